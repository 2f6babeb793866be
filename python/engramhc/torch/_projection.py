"""The projection of all streams to their mixes, in parts, with backwards made of several operators."""

from __future__ import annotations

import math

import torch

from ._call import made, run
from ._mhc_operators import added, coefficients, or_zeros, row_of
from ._operator import Operator, like, wide


def merged(t):
    """fn with the RMS weight merged into it, F32[M, K]."""
    if t["norm_weight"] is None:
        return t["fn"]
    return made("mhc.merge_fwd", {"fn": t["fn"], "norm_weight": t["norm_weight"]}, {})["fn_merged"]


def flat_streams(x):
    """A[T, n, d] with one dimension of tokens, as operators with an axis before T want it."""
    return x.reshape(-1, *x.shape[-2:])


def projected(x, fn, a):
    """mul_partial F32[S, T, M], sqr_partial F32[S, T]."""
    given = {"splits": a["n_splits"] or 0, "precision": a["precision"]}
    return made("mhc.prenorm_gemm", {"residual": flat_streams(x), "fn": fn}, given)


def reduced(parts, k, a, outputs=None):
    """mixes F32[T, M], and the sums mul and sqr that they come from."""
    given = {"k": k, "norm_eps": a["norm_eps"], "rms": a["rms"]}
    inputs = {name: parts[name] for name in ("mul_partial", "sqr_partial")}
    return made("mhc.reduce_partials_fwd", inputs, given, outputs)


def project_backward(grad_mul, grad_sqr, t, a, targets):
    """Gradients of the streams, fn and its RMS weight from those of the sums."""
    x, fn = t["residual"], merged(t)
    with_norm = t["norm_weight"] is not None
    inputs = {
        "grad_mul": grad_mul.reshape(-1, fn.shape[0]),
        "grad_sqr": grad_sqr.reshape(-1),
        "residual": flat_streams(x),
        "fn": fn,
    }
    given = {"precision": a["precision"]}
    if with_norm:
        got = made("mhc.norm_fn_bwd", inputs, given)
        weights = added(
            "mhc.merge_bwd",
            {"grad_fn_merged": got["grad_fn"], "fn": t["fn"], "norm_weight": t["norm_weight"]},
            {},
            t,
            targets,
            "fn",
            "norm_weight",
        )
        return {"residual": got["grad_residual"].view(x.shape), **weights}
    out = {"grad_residual": like(inputs["residual"])}
    fn_target = targets.get("fn")
    if fn_target is not None and fn_target.dtype is fn.dtype and fn_target.is_contiguous():
        inputs["grad_fn_acc"] = out["grad_fn"] = fn_target
    got = made("mhc.norm_fn_bwd", inputs, given, out)
    return {"residual": got["grad_residual"].view(x.shape), "fn": got["grad_fn"]}


# --- the sums -------------------------------------------------------------------------------------


def gemm_new(residual, fn, *rest):
    lead = residual.shape[:-2]
    return fn.new_empty((*lead, fn.shape[0])), fn.new_empty(lead)


def gemm_compute(t, a, out):
    x, width = t["residual"], t["fn"].shape[0]
    parts = projected(x, merged(t), a)
    sums = {"mul": out["mul"].view(-1, width), "sqr": out["sqr"].view(-1)}
    reduced(parts, x.shape[-1] * x.shape[-2], {"norm_eps": 1.0, "rms": "mean"}, sums)


def gemm_backward(g, t, a, targets):
    x, width = t["residual"], t["fn"].shape[0]
    lead = x.shape[:-2]
    beside = x.new_empty(0, dtype=wide(x))
    mul = or_zeros(g["mul"], beside, (*lead, width))
    return project_backward(mul, or_zeros(g["sqr"], beside, lead), t, a, targets)


prenorm_gemm = Operator(
    "mhc_prenorm_gemm",
    inputs="...residual fn norm_weight?",
    outputs="mul sqr",
    attributes="n_splits:int? precision:str",
    weights="fn norm_weight",
    lead=2,
    new=gemm_new,
    compute=gemm_compute,
    backward=gemm_backward,
    names={"residual": "x", "splits": "n_splits", "sqr": "sqrsum"},
)

# --- sums to mixes --------------------------------------------------------------------------------


def flat_partials(parts):
    """F32[S, T, M], F32[S, T]."""
    mul, sqr = parts["mul_partial"], parts["sqr_partial"]
    return {
        "mul_partial": mul.reshape(mul.shape[0], -1, mul.shape[-1]),
        "sqr_partial": sqr.reshape(sqr.shape[0], -1),
    }


def reduce_new(mul_partial, *rest):
    return (mul_partial.new_empty(mul_partial.shape[1:]),)


def reduce_keep(mul_partial, *rest):
    tokens = math.prod(mul_partial.shape[1:-1])
    return mul_partial.new_empty((tokens, mul_partial.shape[-1])), mul_partial.new_empty((tokens,))


def reduce_compute(t, a, out):
    mixes = out["mixes"].view(-1, out["mixes"].shape[-1])
    reduced(flat_partials(t), a["k"], a, {**out, "mixes": mixes})


def reduce_backward(g, t, a, targets):
    mul, sqr = t["mul_partial"], t["sqr_partial"]
    saved = {"mul": t["mul"], "sqr": t["sqr"]}
    if saved["mul"] is None:  # not recorded with its sums
        saved = reduced(flat_partials(t), a["k"], a)
    got = made(
        "mhc.reduce_partials_bwd",
        {
            "grad_mixes": g["mixes"].reshape(-1, mul.shape[-1]),
            "mul": saved["mul"],
            "sqr": saved["sqr"],
        },
        {"k": a["k"], "norm_eps": a["norm_eps"], "rms": a["rms"]},
    )
    # A split has the gradient of the sum that it is part of.
    return {
        "mul_partial": got["grad_mul"].view(mul.shape[1:]).expand(mul.shape),
        "sqr_partial": got["grad_sqr"].view(sqr.shape[1:]).expand(sqr.shape),
    }


reduce_partials = Operator(
    "mhc_reduce_partials_and_rmsnorm",
    inputs="mul_partial sqr_partial",
    outputs="mixes",
    hidden="mul sqr",
    attributes="k:int norm_eps:float rms:str",
    new=reduce_new,
    keep=reduce_keep,
    compute=reduce_compute,
    backward=reduce_backward,
    names={"mul_partial": "mul", "sqr_partial": "sqrsum", "norm_eps": "eps"},
)

# --- streams to mixes -----------------------------------------------------------------------------


def norm_fn_new(residual, fn, *rest):
    return (fn.new_empty((*residual.shape[:-2], fn.shape[0])),)


def norm_fn_keep(residual, fn, *rest):
    tokens = math.prod(residual.shape[:-2])
    return fn.new_empty((tokens, fn.shape[0])), fn.new_empty((tokens,))


def norm_fn_compute(t, a, out):
    x = t["residual"]
    parts = projected(x, merged(t), a)
    mixes = out["mixes"].view(-1, t["fn"].shape[0])
    reduced(parts, x.shape[-1] * x.shape[-2], a, {**out, "mixes": mixes})


def norm_fn_backward(g, t, a, targets):
    x, width = t["residual"], t["fn"].shape[0]
    k = x.shape[-1] * x.shape[-2]
    saved = t if t["mul"] is not None else reduced(projected(x, merged(t), a), k, a)
    got = made(
        "mhc.reduce_partials_bwd",
        {"grad_mixes": g["mixes"].reshape(-1, width), "mul": saved["mul"], "sqr": saved["sqr"]},
        {"k": k, "norm_eps": a["norm_eps"], "rms": a["rms"]},
    )
    return project_backward(got["grad_mul"], got["grad_sqr"], t, a, targets)


norm_fn = Operator(
    "mhc_pre_norm_fn",
    inputs="...residual fn norm_weight?",
    outputs="mixes",
    hidden="mul sqr",
    attributes="norm_eps:float rms:str n_splits:int? precision:str",
    weights="fn norm_weight",
    lead=2,
    new=norm_fn_new,
    keep=norm_fn_keep,
    compute=norm_fn_compute,
    backward=norm_fn_backward,
    names={"norm_eps": "rms_eps", "splits": "n_splits"},
)


def big_fuse_new(mul_partial, sqr_partial, residual, *rest):
    post, comb = coefficients(residual.shape[:-2], residual.shape[-2], mul_partial)
    return post, comb, row_of(residual)


def big_fuse_compute(t, a, out):
    x = t["residual"]
    n, d = x.shape[-2:]
    inputs = {**flat_partials(t), "residual": flat_streams(x), "scale": t["scale"], "base": t["base"]}
    flat = {
        "post": out["post"].view(-1, n),
        "comb": out["comb"].view(-1, n, n),
        "layer_input": out["layer_input"].view(-1, d),
    }
    run("mhc.pre_big_fuse", inputs, flat, a)


big_fuse = Operator(
    "mhc_pre_big_fuse",
    inputs="mul_partial sqr_partial residual scale base",
    outputs="post comb layer_input",
    attributes="norm_eps:float pre_eps:float post_mult:float repeat:int sinkhorn_eps:float convention:str rms:str",
    new=big_fuse_new,
    compute=big_fuse_compute,
    names={"mul_partial": "mul", "sqr_partial": "sqrsum", "norm_eps": "rms_eps"},
)
