"""EngramHC beside PyTorch, eager and compiled, and beside the peers that are installed.

    python -m engramhc bench [mhc_post ...] [--device cuda] [--tokens 4096] [--width 4096] [--out DIR]

All in one process, in turns, with the rate of a copy of the same run as the ceiling. One table; with
`--out` also bench.json, bench.html and, where matplotlib is installed, bench.png. A peer that is
absent, or fails, is a line under the table.
"""

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
