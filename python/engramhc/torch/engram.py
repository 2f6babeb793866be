"""Engram: addressing, gather, gate and short convolution as functions with autograd.

Shapes: ids [B, T] or [T]; streams x [..., n, d]; kv packed [..., n+1, d] (value last) or a pair of a
key [..., n, d] and a value [..., d].
"""

from __future__ import annotations

import torch

from engramhc.errors import ShapeError, UnsupportedError

from . import _engram_operators as ops
from ._addressing import columns_of, sequence_borders, token_table
from ._operator import records, traces


def engram_window(
    ids,
    *,
    max_ngram,
    pad_id,
    blocking,
    cu_seqlens=None,
    history=None,
    image_token_mask=None,
    reset_id=None,
):
    """What the n-gram hash of each token looks at: [..., max_ngram], slot 0 the token itself."""
    flat = ids.reshape(-1)
    if flat.dtype is torch.int64:
        flat = flat.to(torch.int32)
    borders = sequence_borders(ids.shape, cu_seqlens, ids.device)
    out = ops.window(
        (flat, borders, _int32(history), _flat_mask(image_token_mask)),
        (max_ngram, pad_id, -1 if reset_id is None else reset_id, blocking),
    )
    return out.reshape(*ids.shape, max_ngram)


def engram_hash(
    window,
    multipliers,
    vocab_sizes,
    offsets,
    image_token_mask=None,
    *,
    out_dtype=torch.int32,
    layout="ltc",
):
    """Rows of the tables that windows [..., Nmax] address: [L, ..., C], or "tlc" [..., L, C]."""
    lead = window.shape[:-1]
    flat = window.reshape(-1, window.shape[-1])
    rows = ops.hash_rows(
        (flat, multipliers, vocab_sizes, offsets, _flat_mask(image_token_mask)),
        ("I64" if out_dtype is torch.int64 else "I32", layout.upper()),
    )
    layers, columns = multipliers.shape[0], offsets.shape[-1]
    return rows.reshape((layers, *lead, columns) if layout == "ltc" else (*lead, layers, columns))


def engram_hash_ids(
    ids,
    token_map,
    layout,
    *,
    layer=None,
    cu_seqlens=None,
    history=None,
    image_token_mask=None,
    reset_id=None,
    blocking=None,
    out_dtype=torch.int32,
):
    """Token ids to table rows: compressed by `token_map` (None: as they are), windows, hash.

    [L, ..., C], or [..., C] of the one `layer`. `layout` is a `tables.HashLayout`.
    """
    multipliers, vocab_sizes, offsets = columns_of(layout, layer, ids.device)
    if token_map is not None:
        ids = ops.compress((ids, token_table(token_map, ids)), (ids.device.type == "cpu",))
    window = engram_window(
        ids,
        max_ngram=multipliers.shape[-1],
        pad_id=layout.compressed_pad(token_map),
        blocking=blocking or layout.blocking,
        cu_seqlens=cu_seqlens,
        history=history,
        image_token_mask=image_token_mask,
        reset_id=layout.reset_id if reset_id is None else reset_id,
    )
    rows = engram_hash(
        window, multipliers, vocab_sizes, offsets, image_token_mask, out_dtype=out_dtype
    )
    return rows if layer is None else rows[0]


def engram_gather(table, idx, *, sparse_grad=None):
    """table [rows, hd] at idx [..., C]: [..., C*hd]; idx -1 gives zeros and no gradient.

    The gradient is sparse where `sparse_grad`, or `table.sparse_grad`, says so.
    """
    if sparse_grad is None:
        sparse_grad = getattr(table, "sparse_grad", False)
    return ops.gather((idx, table), (bool(sparse_grad),))


def engram_gate(
    x,
    kv,
    weight_hidden,
    weight_embed,
    *,
    eps,
    clamp,
    image_token_mask=None,
    mode="add",
    inplace=False,
):
    """x + alpha * value, alpha the gate of every stream between x and its key; "value": alpha * value."""
    packed, key, value = _kv(kv)
    tensors = x, packed, key, value, weight_hidden, weight_embed, image_token_mask
    if inplace and records(tensors):
        raise UnsupportedError(
            "engram_gate: argument 'inplace': expected no gradients to be recorded, got an input that "
            "requires them; hint: the backward reads x"
        )
    if mode == "add" and not inplace and not (traces(x) or x.dim() != 3 or records(tensors)):
        return ops.gate_alone(*tensors, eps, clamp)
    return ops.gate(tensors, (eps, clamp, mode), out=x if inplace else None)


def engram_short_conv(
    v,
    weight,
    norm_weight,
    *,
    eps,
    dilation,
    cu_seqlens=None,
    image_token_mask=None,
    state=None,
):
    """v + silu(c), c the causal depthwise convolution of the normalised v [B, T, n, d] or [T, n, d].

    `state` [B, (w-1)*dilation, n, d], fp32, is updated in place and has no gradient.
    """
    arguments = (
        _flat(v),
        weight,
        norm_weight,
        sequence_borders(v.shape[:-2], cu_seqlens, v.device),
        _flat_mask(image_token_mask),
    )
    constants = dilation, eps
    if state is None:
        return ops.short_conv(arguments, constants).reshape(v.shape)
    return _with_state(ops.short_conv_step, arguments, state, constants).reshape(v.shape)


def engram_layer(
    x,
    kv,
    weight_hidden,
    weight_embed,
    conv_weight=None,
    conv_norm_weight=None,
    *,
    eps,
    clamp,
    conv_eps=None,
    dilation=None,
    cu_seqlens=None,
    image_token_mask=None,
    rounding="once",
    state=None,
):
    """The whole layer: gate, short convolution and residual sum, x [B, T, n, d] or [T, n, d]."""
    packed, key, value = _kv(kv)
    arguments = (
        _flat(x),
        _flat(packed),
        _flat(key),
        None if value is None else value.reshape(-1, value.shape[-1]),
        weight_hidden,
        weight_embed,
        conv_weight,
        conv_norm_weight,
        None if conv_weight is None else sequence_borders(x.shape[:-2], cu_seqlens, x.device),
        _flat_mask(image_token_mask),
    )
    constants = eps, clamp, dilation, conv_eps, rounding
    if state is None:
        return ops.layer(arguments, constants).reshape(x.shape)
    return _with_state(ops.layer_step, arguments, state, constants).reshape(x.shape)


# --- what several of them share -------------------------------------------------------------------


def _kv(kv):
    """Packed kv, or key and value."""
    if isinstance(kv, (tuple, list)):
        if len(kv) != 2:
            raise ShapeError(f"engram_gate: tensor 'kv': expected one tensor or (k, v), got {len(kv)}")
        return None, kv[0], kv[1]
    return kv, None, None


def _flat(tensor):
    return None if tensor is None else tensor.reshape(-1, *tensor.shape[-2:])


def _flat_mask(mask):
    return None if mask is None else mask.reshape(-1)


def _int32(tensor):
    return tensor.to(torch.int32) if tensor is not None and tensor.dtype is torch.int64 else tensor


def _with_state(step, arguments, state, constants):
    """Runs a step, which leaves the next state in `state`."""
    if records(arguments):
        raise UnsupportedError(
            f"{step.name}: tensor 'state': expected no gradients to be recorded, got an input that "
            "requires them; hint: the state has no backward"
        )
    out, new_state = step((*arguments, state), constants)
    state.copy_(new_state)
    return out
