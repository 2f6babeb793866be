"""Which rows of a table an n-gram of token ids addresses, and tables of such rows.

    layout = HashLayout.deepseek(config)
    with Table.open("model.safetensors.index.json", layer=1, placement="host") as table:
        layout.check(table, layer=1)
        rows = table.lookup(idx)        # [..., C*dim] bf16, where idx is
        ticket = table.prefetch(idx)    # the same while something else computes
        rows = ticket.wait()

Needs NumPy alone; tensors of torch are taken as they are.
"""

from .layout import HashArrays, HashLayout, qwen_ple_layout
from .table import Table, Ticket

__all__ = ["HashArrays", "HashLayout", "Table", "Ticket", "qwen_ple_layout"]
