"""Borders of sequences, and the arrays of token maps and hash layouts on a device."""

from __future__ import annotations

import math

import torch

_on_device: dict = {}


def sequence_borders(lead, cu_seqlens, device):
    """cu_seqlens of tokens with leading dimensions [..., T]; None for a single sequence."""
    if cu_seqlens is not None:
        return cu_seqlens.to(torch.int32) if cu_seqlens.dtype is torch.int64 else cu_seqlens
    sequences = math.prod(lead[:-1])
    if sequences == 1:
        return None
    return torch.arange(sequences + 1, dtype=torch.int32, device=device) * lead[-1]


def columns_of(layout, layer, device):
    """multipliers [L, Nmax], vocab_sizes [L, Nmax-1, Kh] and offsets [L, C] of a layout on a device, of
    all layers or of one alone. They stay for the next call, which may be captured in a graph."""
    key = id(layout), device
    if key not in _on_device:
        _on_device[key] = layout, layout.torch(device)  # the layout too, or its id might be another's
    arrays = _on_device[key][1]
    if layer is None:
        return arrays
    position = layout.position(layer)
    return tuple(array[position : position + 1] for array in arrays)


def token_table(token_map, ids):
    """The compressed id of every token id, I32[V], where `ids` are."""
    return token_map if isinstance(token_map, torch.Tensor) else token_map.table_for(ids)
