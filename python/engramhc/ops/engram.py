"""Engram: addressing, rows of tables, gate, short convolution, whole layer.

Streams are `[..., n, d]`; `kv` is packed `A[..., n+1, d]` with the value last, or a pair (k, v) of
`A[..., n, d]` and `A[..., d]`, whose gradients then are a pair too. A is BF16, FP16 or FP32, one type per call.
Formulas and bit classes: docs/ops/engram.md, whose section numbers stand behind the summaries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .._arrays import framework_of
from ..errors import ArgumentError
from ._arguments import Array, as_integers, call_merged, lead_of, merged, operator, targets

__all__ = [
    "GateStats", "LayerGradients", "engram_compress", "engram_decode_rows", "engram_encode_rows", "engram_gate_bwd",
    "engram_gate_fwd", "engram_gate_stats", "engram_gather_bwd", "engram_gather_decode", "engram_gather_fwd",
    "engram_hash", "engram_hash_ids", "engram_kv_projection_bwd", "engram_kv_projection_fwd", "engram_layer_bwd",
    "engram_layer_fwd", "engram_multipliers", "engram_offsets", "engram_primes", "engram_short_conv_bwd",
    "engram_short_conv_fwd", "engram_token_map", "engram_window", "fused_weight", "grad_w_reduce",
]  # fmt: skip

_COMPRESS = {"compressed_ids": "out", "table": "map", "checked": "check"}
_HASH = {"indices": "out", "index_dtype": "out_dtype"}
_GATHER = {"indices": "idx", "embedding": "out", "grad_embedding": "go", "grad_table": "g_table",
           "grad_table_acc": "g_table"}  # fmt: skip
_GATE = {
    "residual": "x", "key": "k", "value": "v", "rstd_residual": "rstd_x", "rstd_key": "rstd_k", "grad_out": "go",
    "grad_value_path": "go_value", "grad_residual": "gx", "grad_kv": "gkv", "grad_key": "gk", "grad_value": "gv",
    "grad_weight_partial": "gw_partial", "conv_norm_weight": "conv_norm_weight",
    **{f"grad_{w}{end}": f"g_{w}" for w in ("weight_hidden", "weight_embed", "conv_weight", "conv_norm_weight")
       for end in ("", "_acc")},
}  # fmt: skip
_WEIGHTS = {"grad_weight_partial": "gw_partial", "grad_weight_hidden": "g_hidden", "grad_weight_hidden_acc": "g_hidden",
            "grad_weight_embed": "g_embed", "grad_weight_embed_acc": "g_embed"}  # fmt: skip
_CONV = {"gated_value": "v", "conv_weight": "weight", "conv_norm_weight": "norm_weight", "conv_eps": "eps",
         "grad_out": "go", "grad_gated_value": "gv", "grad_conv_weight": "g_weight", "grad_conv_weight_acc": "g_weight",
         "grad_conv_norm_weight": "g_norm_weight", "grad_conv_norm_weight_acc": "g_norm_weight"}  # fmt: skip
_KV = {"grad_kv": "go", "grad_embedding": "g_embedding", "grad_weight": "g_weight", "grad_weight_acc": "g_weight",
       "grad_bias": "g_bias", "grad_bias_acc": "g_bias"}  # fmt: skip
_DECODE = {"weight": "bytes", "scale": "scales", "values": "out", "indices": "idx", "embedding": "out"}


def _index_dtype(dtype: Any) -> str:
    """ "I32" or "I64" of a framework's type or its name."""
    name = str(dtype)
    if name.endswith("64'>") or name.endswith("64"):
        return "I64"
    if name.endswith("32'>") or name.endswith("32"):
        return "I32"
    raise ArgumentError(f"engram_hash: attribute 'out_dtype': expected int32 or int64, got {name}")


def _sequences(array: Array, tail: int, cu_seqlens: Array | None) -> tuple[tuple[int, ...], Array | None]:
    """Token dimensions, and borders of sequences: each row of a batch [B, T] is one."""
    lead = lead_of(array, tail)
    if cu_seqlens is None and len(lead) == 2:
        batch, tokens = lead
        # As many borders as sequences of no tokens need, too.
        framework = framework_of(array)
        if tokens == 0:
            cu_seqlens = framework.make("zeros", (batch + 1,), dtype="I32", like=array)
        else:
            cu_seqlens = framework.make("arange", 0, batch * tokens + 1, tokens, dtype="I32", like=array)
    return lead, cu_seqlens


def _parts(kv: Array | tuple[Array, Array]) -> tuple[Array | None, Array | None, Array | None]:
    """(kv, None, None) or (None, k, v)."""
    return (None, *kv) if isinstance(kv, (tuple, list)) else (kv, None, None)


def _gradient_of_parts(g_kv: Array | None, g_k: Array | None, g_v: Array | None) -> Array | tuple[Array, Array]:
    return g_kv if g_kv is not None else (g_k, g_v)


# --- addressing -----------------------------------------------------------------------------------


def engram_token_map(texts: Array, text_offsets: Array, raw_tokens: Array, raw_offsets: Array) -> tuple[Array, Array]:
    """`table I32[V], size I32[1]`: the compressed id of every token id, from UTF-8 bytes `U8` of all
    decoded texts and raw vocabulary strings with their `I64[V+1]` offsets (1.1)."""
    return operator("engram.token_map")("engram_token_map", (texts, text_offsets, raw_tokens, raw_offsets))


def engram_compress(ids: Array, map: Array, *, check: bool = True, out: Array | None = None,  # noqa: A002
                    stream: int | None = None, workspace: Array | None = None) -> Array:
    """`I32[...]` compressed ids of `ids I32|I64[...]` by `map I32[V]` or a TokenMap (1.1). Negative ids pass;
    others beyond the map raise, or become -1 without `check` and on a device."""
    table = map if hasattr(map, "__dlpack__") else map.table_for(ids)
    return operator("engram.compress_ids")("engram_compress", (ids, table), (check,), (out,), stream, workspace, _COMPRESS)[0]


def engram_window(ids: Array, *, max_ngram: int, pad_id: int, blocking: str, cu_seqlens: Array | None = None,
                  history: Array | None = None, image_token_mask: Array | None = None, reset_id: int | None = None,
                  out: Array | None = None, stream: int | None = None, workspace: Array | None = None) -> Array:
    """`I32[..., max_ngram]`: for every token its compressed id and those before it in its sequence (1.2).

    `ids [T]`, cut into sequences by `cu_seqlens I32[B+1]`, or `[B, T]`. `history I32[B, max_ngram-1]`, oldest
    first, -1 for none. `blocking`: "slot" replaces what must not be seen by `pad_id`, "farther" also
    every slot behind it. Later positions never look past `reset_id`."""
    lead, cu_seqlens = _sequences(ids, 0, cu_seqlens)
    return call_merged(
        "engram.window", "engram_window", (as_integers(ids, "I32"), cu_seqlens, history, image_token_mask),
        (max_ngram, pad_id, -1 if reset_id is None else reset_id, blocking), (out,), lead, (0, None, None, 0), (0,),
        stream, workspace, {"window": "out"},
    )[0]  # fmt: skip


def engram_hash(window: Array, multipliers: Array, vocab_sizes: Array, offsets: Array,
                image_token_mask: Array | None = None, *, out_dtype: Any = "int32", layout: str = "ltc",
                out: Array | None = None, stream: int | None = None, workspace: Array | None = None) -> Array:
    """Rows `[L, ..., C]` ("ltc") or `[..., L, C]` ("tlc") that windows `I32[..., Nmax]` address (1.5), with
    `multipliers I64[L, Nmax], vocab_sizes I32[L, Nmax-1, Kh], offsets I32|I64[L, C]`. Masked tokens
    get -1."""
    return call_merged(
        "engram.hash", "engram_hash", (window, multipliers, vocab_sizes, offsets, image_token_mask),
        (_index_dtype(out_dtype), layout.upper()), (out,), lead_of(window, 1), (0, None, None, None, 0),
        (1 if layout.lower() == "ltc" else 0,), stream, workspace, _HASH,
    )[0]  # fmt: skip


def engram_hash_ids(ids: Array, map: Array, layout: Any, *, layer: int | None = None,  # noqa: A002
                    blocking: str | None = None,
                    cu_seqlens: Array | None = None, history: Array | None = None,
                    image_token_mask: Array | None = None, reset_id: int | None = None, out_dtype: Any = "int32",
                    index_layout: str = "ltc", check: bool = True, out: Array | None = None,
                    stream: int | None = None) -> Array:
    """Compress, window and hash in one call: rows `[L, ..., C]`, of one layer of the layout `[..., C]`.

    `layout` is a `tables.HashLayout`, `layer` one of its `layer_ids`; `blocking` and `reset_id` are the layout's
    unless given. `map` None leaves the ids as they are."""
    framework = framework_of(ids)
    compressed = ids if map is None else engram_compress(ids, map, check=check, stream=stream)
    parts = [
        value if hasattr(value, "__dlpack__") else framework.array(value, dtype, ids)
        for value, dtype in (
            (layout.multipliers, "I64"), (layout.vocab_sizes, "I32"), (layout.offsets, "I64"),
        )
    ]  # fmt: skip
    if layer is not None:
        position = layout.position(layer)
        parts = [part[position : position + 1] for part in parts]
    window = engram_window(
        compressed, max_ngram=parts[0].shape[1], pad_id=layout.compressed_pad(map), blocking=blocking or layout.blocking,
        cu_seqlens=cu_seqlens, history=history, image_token_mask=image_token_mask,
        reset_id=layout.reset_id if reset_id is None else reset_id, stream=stream,
    )  # fmt: skip
    if layer is not None:  # one layer: the same memory with and without its axis
        rows = engram_hash(window, *parts, image_token_mask, out_dtype=out_dtype,
                           out=None if out is None else out[None], stream=stream)  # fmt: skip
        return rows[0] if out is None else out
    return engram_hash(window, *parts, image_token_mask, out_dtype=out_dtype, layout=index_layout, out=out, stream=stream)


def engram_multipliers(layer_ids: list[int], *, max_ngram: int, compressed_vocab: int, seed: int = 0,
                       scheme: str = "numpy") -> Array:
    """`I64[L, max_ngram]`, odd multipliers of the hash (1.3)."""
    return operator("engram.multipliers")(
        "engram_multipliers", (), (tuple(layer_ids), max_ngram, compressed_vocab, seed, scheme)
    )[0]


def engram_primes(sizes: list[int], *, layers: int, heads: int) -> Array:
    """`I32[L, Nmax-1, Kh]`, distinct primes from `sizes` on, one size for each order (1.3)."""
    return operator("engram.primes")("engram_primes", (), (tuple(sizes), layers, heads))[0]


def engram_offsets(vocab_sizes: Array, *, out_dtype: Any = "int32") -> Array:
    """`[L, C]`, where the rows of each column begin (1.4)."""
    return operator("engram.offsets")("engram_offsets", (vocab_sizes,), (_index_dtype(out_dtype),), names=_HASH)[0]


# --- rows -----------------------------------------------------------------------------------------


def engram_gather_fwd(table: Array, idx: Array, *, out_dtype: str = "table", out: Array | None = None,
                      stream: int | None = None, workspace: Array | None = None) -> Array:
    """`[..., C*hd]`: the addressed rows of `table [rows, hd]` side by side (1.6). `idx I32|I64[..., C]`, -1
    gives zeros. `out_dtype` "BF16", "F16" or "F32" converts."""
    return operator("engram.gather_fwd")("engram_gather_fwd", (table, idx), (out_dtype,), (out,), stream, workspace, _GATHER)[0]


def engram_gather_bwd(go: Array, idx: Array, *, rows: int, sparse: bool = False, g_table: Array | None = None,
                      beta: int = 1, stream: int | None = None, workspace: Array | None = None) -> Any:
    """Gradient `F32[rows, hd]` of the table (1.6), which with beta 1 is added to a given `g_table`; or with
    `sparse` the pair (rows, sums): what idx names, ascending, and `F32[U, hd]`. On a device, which is
    not asked for U, both have room for all indices, and rows is -1 from U on."""
    title, op = "engram_gather_bwd", operator("engram.gather_bwd")
    if sparse:
        if g_table is not None:
            raise ArgumentError(f"{title}: tensor 'g_table': expected None with sparse, got an array")
        _, unique, sums = op(title, (go, idx, None), (rows, "sparse"), None, stream, workspace, _GATHER)
        if unique.__dlpack_device__()[0] == 1:
            count = int((unique >= 0).sum())
            return unique[:count], sums[:count]
        return unique, sums
    (acc,), (out,) = targets(title, beta, g_table)
    return op(title, (go, idx, acc), (rows, "dense"), (out, None, None), stream, workspace, _GATHER)[0]


def engram_decode_rows(bytes: Array, scales: Array, *, format: str = "fp8_ue8m0", out_dtype: str = "BF16",  # noqa: A002
                       out: Array | None = None, stream: int | None = None, workspace: Array | None = None) -> Array:
    """Values `[rows, hd]` of rows in the format "fp8_ue8m0": `bytes F8_E4M3|U8[rows, hd]` and one scale
    `F8_E8M0|U8[rows, hd/group]` for each group (models 2)."""
    return operator("engram.dequant_rows")(
        "engram_decode_rows", (bytes, scales), (_group("engram_decode_rows", bytes, scales, format), out_dtype), (out,),
        stream, workspace, _DECODE,
    )[0]  # fmt: skip


def _group(title: str, weight: Array, scales: Array, row_format: str) -> int:
    if row_format != "fp8_ue8m0":
        raise ArgumentError(f"{title}: attribute 'format': expected 'fp8_ue8m0', got '{row_format}'")
    return max(1, weight.shape[-1] // max(1, scales.shape[-1]))


def engram_encode_rows(values: Array, *, group: int = 32, out: tuple | None = None, stream: int | None = None,
                       workspace: Array | None = None) -> tuple[Array, Array]:
    """`F8_E4M3[rows, hd], F8_E8M0[rows, hd/group]` of values `F32|BF16[rows, hd]` (1.6)."""
    return operator("engram.quantize_rows")("engram_encode_rows", (values,), (group,), out, stream, workspace)


def engram_gather_decode(bytes: Array, scales: Array, idx: Array, *, format: str = "fp8_ue8m0",  # noqa: A002
                         out_dtype: str = "BF16", out: Array | None = None, stream: int | None = None,
                         workspace: Array | None = None) -> Array:
    """`engram_gather_fwd` of the decoded rows, without decoding others (models 2)."""
    return operator("engram.gather_dequant")(
        "engram_gather_decode", (bytes, scales, idx),
        (_group("engram_gather_decode", bytes, scales, format), out_dtype), (out,), stream, workspace, _DECODE,
    )[0]  # fmt: skip


def engram_kv_projection_fwd(embedding: Array, weight: Array, bias: Array | None = None, *, out: Array | None = None,
                             stream: int | None = None, workspace: Array | None = None) -> Array:
    """Packed `kv A[..., n+1, d]` of `embedding A[..., E]` by `weight A[n+1, d, E]` and `bias A[n+1, d]` (1.7)."""
    return operator("engram.kv_projection_fwd")(
        "engram_kv_projection_fwd", (embedding, weight, bias), (), (out,), stream, workspace, {"kv": "out"}
    )[0]


def engram_kv_projection_bwd(go: Array, embedding: Array, weight: Array, *, g_weight: Array | None = None,
                             g_bias: Array | None = None, beta: int = 1, out: Array | None = None,
                             stream: int | None = None, workspace: Array | None = None) -> tuple[Array, Array, Array]:
    """`g_embedding A[..., E], g_weight F32[n+1, d, E], g_bias F32[n+1, d]` (1.7). With beta 1 given gradients of
    parameters are added to, with 0 written."""
    title = "engram_kv_projection_bwd"
    acc, written = targets(title, beta, g_weight, g_bias)
    return operator("engram.kv_projection_bwd")(
        title, (go, embedding, weight, *acc), (), (out, *written), stream, workspace, _KV
    )


# --- gate and convolution -------------------------------------------------------------------------


def fused_weight(weight_hidden: Array, weight_embed: Array, *, out: Array | None = None, stream: int | None = None,
                 workspace: Array | None = None) -> Array:
    """`F32[n, d]`, product of the gate's norm weights BF16|F32 (1.8)."""
    return operator("engram.fused_weight")(
        "fused_weight", (weight_hidden, weight_embed), (), (out,), stream, workspace, {"weight_fused": "out"}
    )[0]


def grad_w_reduce(gw_partial: Array, weight_hidden: Array, weight_embed: Array, g_hidden: Array | None = None,
                  g_embed: Array | None = None, *, beta: int = 1, stream: int | None = None,
                  workspace: Array | None = None) -> tuple[Array, Array]:
    """`g_hidden, g_embed F32[n, d]` from the partial sums of `engram_gate_bwd` (1.11). Given ones are added to;
    beta 0 writes."""
    acc, out = targets("grad_w_reduce", beta, g_hidden, g_embed)
    return operator("engram.grad_w_reduce")(
        "grad_w_reduce", (gw_partial, weight_hidden, weight_embed, *acc), (), out, stream, workspace, _WEIGHTS
    )


def engram_gate_fwd(x: Array, kv: Array | tuple[Array, Array], weight_fused: Array, *, eps: float, clamp: float,
                    save: bool = False, image_token_mask: Array | None = None, inplace: bool = False,
                    mode: str = "add", out: Array | None = None, stream: int | None = None,
                    workspace: Array | None = None) -> tuple:
    """How much of the looked-up value each stream lets in (1.9): `out A[..., n, d], dot, alpha, rstd_x, rstd_k`,
    the last four `F32[..., n]` with `save` and None without. `mode` "add": x + alpha * v, "value": alpha * v.
    `weight_fused F32[n, d]`; image tokens keep x and do not read kv. `inplace` writes into x."""
    if inplace and out is None:
        out = x
    made = operator("engram.gate_fwd")(
        "engram_gate_fwd", (x, *_parts(kv), weight_fused, image_token_mask), (eps, clamp, save, inplace, mode),
        None if out is None else (out, None, None, None, None, None), stream, workspace, _GATE,
    )  # fmt: skip
    return made[:5]


class GateStats(NamedTuple):
    alpha: Array  # F32[..., n], gates
    value_mean_square: Array  # F32[...]


def engram_gate_stats(x: Array, kv: Array | tuple[Array, Array], weight_fused: Array, *, eps: float, clamp: float,
                      image_token_mask: Array | None = None, stream: int | None = None,
                      workspace: Array | None = None) -> GateStats:
    """The gates alone, for monitors (1.9)."""
    made = operator("engram.gate_fwd")(
        "engram_gate_stats", (x, *_parts(kv), weight_fused, image_token_mask), (eps, clamp, False, False, "stats"),
        None, stream, workspace, _GATE,
    )  # fmt: skip
    return GateStats(made[2], made[5])


def engram_gate_bwd(go: Array, x: Array, kv: Array | tuple[Array, Array], weight_fused: Array, dot: Array | None,
                    alpha: Array | None, rstd_x: Array | None, rstd_k: Array | None, *, clamp: float,
                    eps: float | None = None, image_token_mask: Array | None = None, go_value: Array | None = None,
                    out: tuple | None = None, stream: int | None = None, workspace: Array | None = None) -> tuple:
    """`gx A[..., n, d], gkv` (as kv) and `gw_partial F32[P, n, d]` for `grad_w_reduce` (1.10). The statistics
    are those that the forward saved; None, None, None, None with `eps` computes them again. `go_value` is a
    gradient of the value path of its own. `out` is (gx, gkv or a pair, gw_partial)."""
    gx, gkv, gw_partial = out or (None, None, None)
    gx, *parts, gw_partial = operator("engram.gate_bwd")(
        "engram_gate_bwd", (go, go_value, x, *_parts(kv), weight_fused, dot, alpha, rstd_x, rstd_k, image_token_mask),
        (clamp, eps), (gx, *_parts(gkv), gw_partial), stream, workspace, _GATE,
    )  # fmt: skip
    return gx, _gradient_of_parts(*parts), gw_partial


def engram_short_conv_fwd(v: Array, weight: Array, norm_weight: Array, *, eps: float, dilation: int,
                          cu_seqlens: Array | None = None, image_token_mask: Array | None = None,
                          state: Array | None = None, out: Array | None = None, stream: int | None = None,
                          workspace: Array | None = None) -> Array:
    """`v + silu(conv(norm(v)))`, causal, over each channel (1.13): `v A[T, n, d]`, cut into sequences by
    `cu_seqlens I32[B+1]`, or `A[B, T, n, d]`; `weight [n, d, w], norm_weight [n, d]` BF16|F32.
    `state F32[B, (w-1)*dilation, n, d]` is what came before, updated in place."""
    lead, cu_seqlens = _sequences(v, 2, cu_seqlens)
    return call_merged(
        "engram.conv_fwd", "engram_short_conv_fwd", (v, weight, norm_weight, cu_seqlens, image_token_mask, state),
        (dilation, eps), (out, state), lead, (0, None, None, None, 0, None), (0, None), stream, workspace, _CONV,
    )[0]  # fmt: skip


def engram_short_conv_bwd(go: Array, v: Array, weight: Array, norm_weight: Array, *, eps: float, dilation: int,
                          cu_seqlens: Array | None = None, image_token_mask: Array | None = None,
                          g_weight: Array | None = None, g_norm_weight: Array | None = None, beta: int = 1,
                          out: Array | None = None, stream: int | None = None,
                          workspace: Array | None = None) -> tuple[Array, Array, Array]:
    """`gv, g_weight F32[n, d, w], g_norm_weight F32[n, d]` (1.13). With beta 1 given gradients of parameters
    are added to, with 0 written."""
    title = "engram_short_conv_bwd"
    lead, cu_seqlens = _sequences(v, 2, cu_seqlens)
    acc, written = targets(title, beta, g_weight, g_norm_weight)
    return call_merged(
        "engram.conv_bwd", title, (go, v, weight, norm_weight, cu_seqlens, image_token_mask, *acc), (dilation, eps),
        (out, *written), lead, (0, 0, None, None, None, 0, None, None), (0, None, None), stream, workspace, _CONV,
    )  # fmt: skip


def engram_layer_fwd(x: Array, kv: Array | tuple[Array, Array], weight_hidden: Array, weight_embed: Array,
                     conv_weight: Array | None = None, conv_norm_weight: Array | None = None, *, eps: float,
                     clamp: float, conv_eps: float | None = None, dilation: int | None = None,
                     cu_seqlens: Array | None = None, image_token_mask: Array | None = None,
                     state: Array | None = None, rounding: str = "once", save: bool = False, out: Array | None = None,
                     stream: int | None = None, workspace: Array | None = None) -> tuple:
    """Gate and short convolution added to the streams (1.14): `out A[..., n, d], dot, alpha, rstd_x, rstd_k`,
    the last four with `save` and None without. Without conv weights the gate alone. `x A[T, n, d]` with
    `cu_seqlens`, or `A[B, T, n, d]`; `state` as in `engram_short_conv_fwd`. `rounding` "once" or "twice"."""
    lead, cu_seqlens = _layer_sequences(x, conv_weight, cu_seqlens)
    made = call_merged(
        "engram.layer_fwd", "engram_layer_fwd",
        (x, *_parts(kv), weight_hidden, weight_embed, conv_weight, conv_norm_weight, cu_seqlens, image_token_mask,
         state),
        (eps, clamp, dilation, conv_eps, rounding, save), (out, None, None, None, None, state), lead,
        (0, 0, 0, 0, None, None, None, None, None, 0, None), (0, 0, 0, 0, 0, None), stream, workspace, _GATE,
    )  # fmt: skip
    return made[:5]


def _layer_sequences(x: Array, conv_weight: Array | None, cu_seqlens: Array | None) -> tuple:
    if conv_weight is None and cu_seqlens is None:
        return lead_of(x, 2), None  # tokens do not meet
    return _sequences(x, 2, cu_seqlens)


class LayerGradients(NamedTuple):
    x: Array
    kv: Array | tuple[Array, Array]
    weight_hidden: Array
    weight_embed: Array
    conv_weight: Array | None
    conv_norm_weight: Array | None


def engram_layer_bwd(go: Array, x: Array, kv: Array | tuple[Array, Array], weight_hidden: Array, weight_embed: Array,
                     conv_weight: Array | None = None, conv_norm_weight: Array | None = None, *, eps: float,
                     clamp: float, conv_eps: float | None = None, dilation: int | None = None,
                     cu_seqlens: Array | None = None, image_token_mask: Array | None = None,
                     g_weight_hidden: Array | None = None, g_weight_embed: Array | None = None,
                     g_conv_weight: Array | None = None, g_conv_norm_weight: Array | None = None, beta: int = 1,
                     stream: int | None = None, workspace: Array | None = None) -> LayerGradients:
    """All gradients of `engram_layer_fwd` (1.14); those of parameters F32. With beta 1 given ones are added
    to, with 0 written."""
    title = "engram_layer_bwd"
    lead, cu_seqlens = _layer_sequences(x, conv_weight, cu_seqlens)
    acc, written = targets(title, beta, g_weight_hidden, g_weight_embed, g_conv_weight, g_conv_norm_weight)
    gx, g_kv, g_k, g_v, *gradients = call_merged(
        "engram.layer_bwd", title,
        (go, x, *_parts(kv), weight_hidden, weight_embed, conv_weight, conv_norm_weight, cu_seqlens, image_token_mask,
         *acc),
        (eps, clamp, dilation, conv_eps), (None, None, None, None, *written), lead,
        (0, 0, 0, 0, 0, None, None, None, None, None, 0, None, None, None, None), (0, 0, 0, 0, *(None,) * 4),
        stream, workspace, _GATE,
    )  # fmt: skip
    return LayerGradients(gx, _gradient_of_parts(g_kv, g_k, g_v), *gradients)
