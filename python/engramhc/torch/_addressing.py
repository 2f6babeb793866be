"""Borders of sequences, and the tables of token maps and hash layouts on a device."""

from __future__ import annotations

import math

import torch

from engramhc.errors import ArgumentError

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
    """multipliers [L, Nmax], vocab_sizes [L, Nmax-1, Kh] and offsets [L, C] of a layout on a device,
    of all layers or of one alone."""
    key = id(layout), device
    if key not in _on_device:
        tensors = tuple(
            torch.tensor(getattr(layout, name), dtype=dtype, device=device)
            for name, dtype in (
                ("multipliers", torch.int64),
                ("vocab_sizes", torch.int32),
                ("offsets", _offset_type(layout)),
            )
        )
        _on_device[key] = layout, tensors  # the layout too, or its id might be another's
    tensors = _on_device[key][1]
    if layer is None:
        return tensors
    position = layer_position(layout, layer)
    return tuple(tensor[position : position + 1] for tensor in tensors)


def _offset_type(layout):
    largest = max((max(row) for row in layout.offsets), default=0)
    return torch.int32 if largest < 2**31 else torch.int64


def layer_position(layout, layer):
    """Where a layer of the model stands in the layout."""
    layer_ids = getattr(layout, "layer_ids", None)
    if layer_ids is None:
        layer_ids = range(len(layout.multipliers))
    if layer not in layer_ids:
        raise ArgumentError(
            f"engram_hash_ids: argument 'layer': expected one of {list(layer_ids)}, got {layer}"
        )
    return list(layer_ids).index(layer)


def token_table(token_map, device):
    """The compressed id of every token id, I32[V], on a device."""
    if isinstance(token_map, torch.Tensor):
        return token_map
    key = id(token_map), device
    if key not in _on_device:
        table = torch.as_tensor(token_map.table, dtype=torch.int32).to(device)
        _on_device[key] = token_map, table
    return _on_device[key][1]
