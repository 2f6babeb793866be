"""Rows of tables on the current stream."""

from __future__ import annotations

import torch
from torch import nn

from .engram import engram_gather


def lookup(table, idx):
    """Rows [..., C*dim] of a `tables.Table`, an EngramTable or a tensor; on a GPU by the current stream,
    so that it can be captured where the rows are in memory that the GPU reads."""
    if isinstance(table, nn.Module):
        return table(idx)
    if isinstance(table, torch.Tensor):
        return engram_gather(table, idx)
    return table.lookup(idx)


def prefetch(table, idx, *, stream=None):
    """The same of a `tables.Table` while the caller goes on; `wait()` of what comes back gives the rows."""
    return table.prefetch(idx, stream=stream)
