"""Rows of tables (`engramhc.tables`) for tensors: on the current stream, capturable where the rows are
on the device or in page-locked memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from ..tables import Table, Ticket


def lookup(table: Table, idx: Tensor, **options: Any) -> Tensor:
    """Rows of idx [..., C] side by side, [..., C*dim]; options are those of `Table.lookup`."""
    return table.lookup(idx, **options)


def prefetch(table: Table, idx: Tensor, **options: Any) -> Ticket:
    """The same on a side stream or a thread; `ticket.wait()` gives the rows to the current stream."""
    return table.prefetch(idx, **options)
