"""The mHC operators with their backwards. Shapes: residual A[T, n, d], coefficients fp32."""

from __future__ import annotations

import torch

from . import _call
from ._operator import Operator, like, wide
from ._parameters import fits

made = _call.made

RULES = "norm_eps:float pre_eps:float post_mult:float repeat:int sinkhorn_eps:float convention:str rms:str"
PROJECTION = f"{RULES} precision:str layer_norm_eps:float?"
MIX_WEIGHTS = "fn scale base norm_weight layer_norm_weight"
MIX_NAMES = {"norm_eps": "rms_eps"}


def row_of(streams) -> torch.Tensor:
    """A[T, d] beside A[T, n, d]."""
    *lead, _, d = streams.shape
    return streams.new_empty((*lead, d))


def coefficients(lead, n, beside) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, n] and [T, n, n] of the type of a parameter."""
    return beside.new_empty((*lead, n)), beside.new_empty((*lead, n, n))


def mix_state(lead, n, fn) -> tuple[torch.Tensor, ...]:
    """mixes, mul, sqr and comb_logits."""
    width, new = fn.shape[0], fn.new_empty
    return new((*lead, width)), new((*lead, width)), new(lead), new((*lead, n, n))


def or_zeros(gradient, beside, shape):
    """An upstream gradient, or zeros for an output that nobody used."""
    return beside.new_zeros(shape) if gradient is None else gradient


def added(op, inputs, attrs, t, targets, *weights) -> dict[str, torch.Tensor]:
    """Gradients of weights by an operator that adds them to their targets where there are some."""
    inputs, outputs = dict(inputs), {}
    for name in weights:
        target = targets.get(name)
        if target is not None and fits(target, t[name], True):
            inputs[f"grad_{name}_acc"] = outputs[f"grad_{name}"] = target
    got = made(op, inputs, attrs, outputs)
    return {name: got[f"grad_{name}"] for name in weights}


# --- streams --------------------------------------------------------------------------------------

expand = Operator(
    "expand_to_mhc",
    inputs="...hidden",
    outputs="residual",
    attributes="n:int",
    lead=1,
    new=lambda hidden, n: (hidden.new_empty((*hidden.shape[:-1], n, hidden.shape[-1])),),
    compute="mhc.expand_fwd",
    backward="mhc.expand_bwd",
    forward_only="hidden n",
    names={"hidden": "x"},
)

post = Operator(
    "mhc_post",
    inputs="...layer_output ...residual ...post ...comb",
    outputs="new_residual",
    lead=1,
    new=lambda layer_output, residual, post, comb: (like(residual),),
    compute="mhc.post_fwd",
    inplace=(True,),
    backward="mhc.post_bwd",
    names={"new_residual": "out"},
)

pre_apply = Operator(
    "mhc_pre_apply_mix",
    inputs="...residual ...pre",
    outputs="layer_input",
    lead=2,
    new=lambda residual, pre: (row_of(residual),),
    compute="mhc.pre_apply_fwd",
    backward="mhc.pre_apply_bwd",
    accumulates="residual",
    names={"layer_input": "out"},
)

# --- coefficients ---------------------------------------------------------------------------------


def split_new(mixes, scale, base, n, *values):
    lead = mixes.shape[:-1]
    pre, comb_logits = coefficients(lead, n, mixes)
    return pre, like(pre), comb_logits


def split_compute(t, a, out):
    _call.run("mhc.split_fwd", t, out, {"pre_eps": a["pre_eps"], "post_mult": a["post_mult"]})


def split_backward(g, t, a, targets):
    mixes, n = t["mixes"], a["n"]
    lead = mixes.shape[:-1]
    parts = made(
        "mhc.split_bwd",
        {
            "grad_pre": or_zeros(g["pre"], mixes, (*lead, n)),
            "grad_post": or_zeros(g["post"], mixes, (*lead, n)),
            "grad_comb_logits": or_zeros(g["comb_logits"], mixes, (*lead, n, n)),
            "mixes": mixes,
            "scale": t["scale"],
            "base": t["base"],
        },
        {"post_mult": a["post_mult"]},
    )
    partials = {name: parts[name] for name in ("grad_scale_partial", "grad_base_partial")}
    got = added("mhc.split_bwd_reduce", partials, {}, t, targets, "scale", "base")
    return {"mixes": parts["grad_mixes"], **got}


split = Operator(
    "mhc_pre_split_mixes",
    inputs="...mixes scale base",
    outputs="pre post comb_logits",
    attributes="n:int pre_eps:float post_mult:float",
    weights="scale base",
    lead=1,
    new=split_new,
    compute=split_compute,
    backward=split_backward,
    names={"comb_logits": "logits"},
)

sinkhorn = Operator(
    "sinkhorn_normalize",
    inputs="...comb_logits",
    outputs="comb",
    attributes="repeat:int eps:float convention:str",
    lead=2,
    new=lambda comb_logits, *values: (like(comb_logits),),
    compute="mhc.sinkhorn_fwd",
    backward="mhc.sinkhorn_bwd",
    names={"comb_logits": "logits"},
)

head_mix = Operator(
    "mhc_head_compute_mix",
    inputs="...mixes scale base",
    outputs="pre",
    attributes="pre_eps:float",
    forward_only="pre_eps",
    weights="scale base",
    lead=1,
    new=lambda mixes, *rest: (like(mixes),),
    compute="mhc.head_mix_fwd",
    backward="mhc.head_mix_bwd",
)

# --- whole sublayers ------------------------------------------------------------------------------


def pre_new(residual, fn, *rest):
    *lead, n, d = residual.shape
    new = fn.new_empty
    return residual.new_empty((*lead, d)), new((*lead, n)), new((*lead, n, n))


def pre_keep(residual, fn, *rest):
    *lead, n, _ = residual.shape
    return fn.new_empty((*lead, n)), *mix_state(lead, n, fn)


pre = Operator(
    "mhc_pre",
    inputs="...residual fn scale base norm_weight? layer_norm_weight?",
    outputs="layer_input post comb",
    hidden="pre mixes mul sqr comb_logits",
    saved="comb",
    attributes=PROJECTION,
    weights=MIX_WEIGHTS,
    accumulates="residual",
    lead=2,
    new=pre_new,
    keep=pre_keep,
    compute="mhc.pre_fwd",
    backward="mhc.pre_bwd",
    names=MIX_NAMES,
)

head = Operator(
    "mhc_head",
    inputs="...residual fn scale base norm_weight?",
    outputs="hidden",
    attributes="norm_eps:float rms:str pre_eps:float precision:str",
    weights="fn scale base norm_weight",
    lead=2,
    new=lambda residual, *rest: (row_of(residual),),
    compute="mhc.head_fwd",
    backward="mhc.head_bwd",
    names={**MIX_NAMES, "hidden": "out"},
)


def seam_new(layer_output, residual, post, comb, fn, *rest):
    post, comb = coefficients(residual.shape[:-2], residual.shape[-2], fn)
    return like(residual), row_of(residual), post, comb


def seam_keep(layer_output, residual, post, comb, fn, *rest):
    *lead, n, _ = residual.shape
    return fn.new_empty((*lead, n)), *mix_state(lead, n, fn)


seam = Operator(
    "mhc_fused_post_pre",
    inputs="...layer_output ...residual ...post ...comb fn scale base norm_weight? layer_norm_weight?",
    outputs="new_residual layer_input next_post next_comb",
    hidden="next_pre next_mixes next_mul next_sqr next_comb_logits",
    saved="next_comb new_residual",
    attributes=PROJECTION,
    weights=MIX_WEIGHTS,
    lead=1,
    new=seam_new,
    keep=seam_keep,
    compute="mhc.seam_classic_fwd",
    backward="mhc.seam_classic_bwd",
    names=MIX_NAMES,
)

def seam_delayed_new(layer_output, residual, pre, post, comb, fn, *rest):
    post, comb = coefficients(residual.shape[:-2], residual.shape[-2], fn)
    return like(residual), row_of(residual), like(post), post, comb


def seam_delayed_keep(layer_output, residual, pre, post, comb, fn, *rest):
    return mix_state(residual.shape[:-2], residual.shape[-2], fn)


seam_delayed = Operator(
    "mhc_fused_post_pre_delayed",
    inputs="...layer_output ...residual ...pre ...post ...comb fn scale base norm_weight? layer_norm_weight?",
    outputs="new_residual layer_input next_pre next_post next_comb",
    hidden="next_mixes next_mul next_sqr next_comb_logits",
    saved="next_pre next_comb new_residual",
    attributes=PROJECTION,
    weights=MIX_WEIGHTS,
    lead=1,
    new=seam_delayed_new,
    keep=seam_delayed_keep,
    compute="mhc.seam_single_pass_fwd",
    backward="mhc.seam_single_pass_bwd",
    names={**MIX_NAMES, "pre": "pre_mix"},
)


def broadcast_new(hidden, fn, *rest):
    lead, d = hidden.shape[:-1], hidden.shape[-1]
    n = fn.shape[1] // d
    post, comb = coefficients(lead, n, fn)
    return hidden.new_empty((*lead, n, d)), like(hidden), like(post), post, comb


def broadcast_keep(hidden, fn, *rest):
    return mix_state(hidden.shape[:-1], fn.shape[1] // hidden.shape[-1], fn)


broadcast = Operator(
    "mhc_pre_broadcast",
    inputs="...hidden fn scale base norm_weight? layer_norm_weight?",
    outputs="residual layer_input pre post comb",
    hidden="mixes mul sqr comb_logits",
    saved="pre comb",
    attributes=f"{PROJECTION} form:str",
    weights=MIX_WEIGHTS,
    lead=1,
    new=broadcast_new,
    keep=broadcast_keep,
    compute="mhc.seam_broadcast_fwd",
    backward="mhc.seam_broadcast_bwd",
    names={**MIX_NAMES, "hidden": "x"},
)
