"""The Engram operators with their backwards. Shapes: residual A[T, n, d], kv A[T, n+1, d] or a key
A[T, n, d] and a value A[T, d]."""

from __future__ import annotations

import torch

from engramhc.errors import Error

from . import sums
from ._call import fill, made, run
from ._mhc_operators import added
from ._operator import Operator, like, wide

NAMES = {"residual": "x", "key": "kv", "value": "kv"}
STATISTICS = ("dot", "alpha", "rstd_residual", "rstd_key")
INDEX_TYPES = {"I32": torch.int32, "I64": torch.int64}

# --- addressing -----------------------------------------------------------------------------------

compress = Operator(
    "engram_compress",
    inputs="...ids table",
    outputs="compressed_ids",
    attributes="checked:bool",
    lead=0,
    new=lambda ids, *rest: (ids.new_empty(ids.shape, dtype=torch.int32),),
    compute="engram.compress_ids",
    names={"table": "token_map"},
)

window = Operator(
    "engram_window",
    inputs="ids cu_seqlens? history? image_token_mask?",
    outputs="window",
    attributes="max_ngram:int pad_id:int reset_id:int blocking:str",
    new=lambda ids, borders, history, mask, max_ngram, *rest: (
        ids.new_empty((*ids.shape, max_ngram)),
    ),
    compute="engram.window",
)


def hash_new(window, multipliers, vocab_sizes, offsets, mask, index_dtype, layout):
    layers, lead, columns = multipliers.shape[0], window.shape[:-1], offsets.shape[-1]
    shape = (layers, *lead, columns) if layout == "LTC" else (*lead, layers, columns)
    return (window.new_empty(shape, dtype=INDEX_TYPES[index_dtype]),)


hash_rows = Operator(
    "engram_hash",
    inputs="window multipliers vocab_sizes offsets image_token_mask?",
    outputs="indices",
    attributes="index_dtype:str layout:str",
    new=hash_new,
    compute="engram.hash",
    names={"index_dtype": "out_dtype"},
)


def gather_new(indices, table, sparse):
    return (table.new_empty((*indices.shape[:-1], indices.shape[-1] * table.shape[-1])),)


def gather_compute(t, a, out):
    run("engram.gather_fwd", {"table": t["table"], "indices": t["indices"]}, out, {})


def gather_backward(g, t, a, targets):
    table = t["table"]
    inputs = {"grad_embedding": g["embedding"], "indices": t["indices"]}
    given = {"rows": table.shape[0]}
    if not a["sparse"] or "table" in targets:
        if sums.may_differ():
            return {"table": summed_in_any_order(g["embedding"], t["indices"], table)}
        return added("engram.gather_bwd", inputs, given, t, targets, "table")
    flat = {"grad_embedding": g["embedding"].flatten(0, -2), "indices": t["indices"].flatten(0, -2)}
    got = made("engram.gather_bwd", flat, {**given, "form": "sparse"})
    return {"table": rows_of(got["unique_rows"], got["grad_rows"], table)}


def summed_in_any_order(gradient, indices, table):
    """The gradient of a table, its rows summed as the device pleases."""
    total = torch.zeros(table.shape, dtype=wide(table), device=table.device)
    rows = gradient.reshape(-1, table.shape[1]).to(total.dtype)
    indices = indices.reshape(-1, 1)
    rows = torch.where(indices >= 0, rows, 0)
    return total.index_add_(0, indices.flatten().clamp(min=0), rows)


def rows_of(unique, rows, table):
    """The sparse gradient of a table; rows that are not there count as zeros of row 0."""
    there, on_cpu = unique >= 0, unique.device.type == "cpu"
    if on_cpu:
        unique, rows = unique[there], rows[there]
    else:  # no wait for the number of rows
        rows = torch.where(there.unsqueeze(1), rows, 0)
        unique = unique.clamp(min=0)
    indices = unique.to(torch.int64).unsqueeze(0)
    values = rows.to(table.dtype)  # checks of the indices would wait for a GPU
    return torch.sparse_coo_tensor(indices, values, table.shape, check_invariants=on_cpu)


gather = Operator(
    "engram_gather",
    inputs="...indices table",
    outputs="embedding",
    attributes="sparse:bool",
    constant="indices",
    weights="table",
    lead=1,
    new=gather_new,
    compute=gather_compute,
    backward=gather_backward,
    names={"indices": "idx"},
)

# --- gate -----------------------------------------------------------------------------------------


def gate_keep(residual, kv, key, value, weight_hidden, *rest):
    """The statistics in one piece of memory, and the fused weight."""
    lead, n, d = residual.shape[:-2], residual.shape[-2], residual.shape[-1]
    statistics = weight_hidden.new_empty((4, *lead, n), dtype=wide(residual)).unbind()
    return (*statistics, weight_hidden.new_empty((n, d), dtype=wide(residual)))


def streams_and_rows(t):
    """What forward and backward read of streams, keys and value."""
    names = ("residual", "kv", "key", "value", "image_token_mask")
    return {name: t[name] for name in names if t[name] is not None}


def fused(t, out=None):
    weights = {"weight_hidden": t["weight_hidden"], "weight_embed": t["weight_embed"]}
    outputs = None if out is None else {"weight_fused": out}
    return made("engram.fused_weight", weights, {}, outputs)["weight_fused"]


def gate_compute(t, a, out):
    weight_fused = out["weight_fused"]
    if weight_fused is None:
        weight_fused = t["weight_hidden"].new_empty(t["weight_hidden"].shape, dtype=wide(t["residual"]))
    run(
        "engram.fused_weight",
        {"weight_hidden": t["weight_hidden"], "weight_embed": t["weight_embed"]},
        {"weight_fused": weight_fused},
        {},
    )
    outputs = {name: tensor for name, tensor in out.items() if name != "weight_fused"}
    given = {
        "eps": a["eps"],
        "clamp": a["clamp"],
        "mode": a["mode"],
        "save": out["dot"] is not None,
        "inplace": out["out"] is t["residual"],
    }
    run("engram.gate_fwd", {**streams_and_rows(t), "weight_fused": weight_fused}, outputs, given)


def gate_backward(g, t, a, targets):
    gradient = g["out"]
    saved = {name: t[name] for name in STATISTICS if t[name] is not None}
    weight_fused = t["weight_fused"] if saved else fused(t)
    upstream = {"grad_out": gradient}
    if a["mode"] == "value":  # no path but that of the value
        upstream = {"grad_out": torch.zeros_like(gradient), "grad_value_path": gradient}
    inputs = {**upstream, **streams_and_rows(t), **saved, "weight_fused": weight_fused}
    got = made("engram.gate_bwd", inputs, {"clamp": a["clamp"], "eps": a["eps"]})
    weights = added(
        "engram.grad_w_reduce",
        {
            "grad_weight_partial": got["grad_weight_partial"],
            "weight_hidden": t["weight_hidden"],
            "weight_embed": t["weight_embed"],
        },
        {},
        t,
        targets,
        "weight_hidden",
        "weight_embed",
    )
    rows = {name: got.get(f"grad_{name}") for name in ("residual", "kv", "key", "value")}
    return {**rows, **weights}


gate = Operator(
    "engram_gate",
    inputs="...residual ...kv? ...key? ...value? weight_hidden weight_embed ...image_token_mask?",
    outputs="out",
    hidden="dot alpha rstd_residual rstd_key weight_fused",
    attributes="eps:float clamp:float mode:str",
    constant="image_token_mask",
    weights="weight_hidden weight_embed",
    lead=2,
    new=lambda residual, *rest: (like(residual),),
    keep=gate_keep,
    compute=gate_compute,
    backward=gate_backward,
    names=NAMES,
)



def gate_alone(residual, kv, key, value, weight_hidden, weight_embed, mask, eps, clamp):
    """The gate of A[T, n, d] as one call, engram.layer_fwd without a convolution: its bits, nothing kept."""
    tensors = residual, kv, key, value, weight_hidden, weight_embed, None, None, None, mask
    out = like(residual)
    try:
        fill("engram.layer_fwd", tensors, (eps, clamp), (out,))
    except Error as error:
        raise gate.renamed(error) from None
    return out


# --- convolution and whole layer ------------------------------------------------------------------

CONV_INPUTS = "gated_value conv_weight conv_norm_weight cu_seqlens? image_token_mask?"
CONV_NAMES = {
    "gated_value": "v",
    "conv_weight": "weight",
    "conv_norm_weight": "norm_weight",
    "conv_eps": "eps",
}

short_conv = Operator(
    "engram_short_conv",
    inputs=CONV_INPUTS,
    outputs="out",
    attributes="dilation:int conv_eps:float",
    constant="cu_seqlens image_token_mask",
    weights="conv_weight conv_norm_weight",
    new=lambda gated_value, *rest: (like(gated_value),),
    compute="engram.conv_fwd",
    backward="engram.conv_bwd",
    names=CONV_NAMES,
)

short_conv_step = Operator(
    "engram_short_conv_step",
    inputs=f"{CONV_INPUTS} state",
    outputs="out state",
    attributes="dilation:int conv_eps:float",
    new=lambda *given: (like(given[0]), like(given[5])),
    compute="engram.conv_fwd",
    names=CONV_NAMES,
)

LAYER_INPUTS = (
    "residual kv? key? value? weight_hidden weight_embed conv_weight? conv_norm_weight?"
    " cu_seqlens? image_token_mask?"
)
LAYER_ATTRIBUTES = "eps:float clamp:float dilation:int? conv_eps:float? rounding:str"

layer = Operator(
    "engram_layer",
    inputs=LAYER_INPUTS,
    outputs="out",
    attributes=LAYER_ATTRIBUTES,
    constant="cu_seqlens image_token_mask",
    weights="weight_hidden weight_embed conv_weight conv_norm_weight",
    forward_only="rounding",
    new=lambda residual, *rest: (like(residual),),
    compute="engram.layer_fwd",
    backward="engram.layer_bwd",
    names=NAMES,
)

layer_step = Operator(
    "engram_layer_step",
    inputs=f"{LAYER_INPUTS} state",
    outputs="out state",
    attributes=LAYER_ATTRIBUTES,
    new=lambda *given: (like(given[0]), like(given[10])),
    compute=lambda t, a, out: run("engram.layer_fwd", t, out, a),
    names=NAMES,
)
