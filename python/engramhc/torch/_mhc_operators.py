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
    return streams.new_empty(streams.shape[:-2] + streams.shape[-1:])


def coefficients(streams, *names) -> dict[str, torch.Tensor]:
    """[T, n] of the names, and [T, n, n] of those that have comb in theirs."""
    lead, n = streams.shape[:-2], streams.shape[-2]
    dtype, device = wide(streams), streams.device
    return {
        name: torch.empty(
            (*lead, n, n) if "comb" in name else (*lead, n), dtype=dtype, device=device
        )
        for name in names
    }


def mix_state(streams, fn, prefix="") -> dict[str, torch.Tensor]:
    """What a forward saves of the mixes for its backward."""
    lead, n, width = streams.shape[:-2], streams.shape[-2], fn.shape[0]
    dtype, device = wide(streams), streams.device
    return {
        prefix + "pre": torch.empty((*lead, n), dtype=dtype, device=device),
        prefix + "mixes": torch.empty((*lead, width), dtype=dtype, device=device),
        prefix + "mul": torch.empty((*lead, width), dtype=dtype, device=device),
        prefix + "sqr": torch.empty(lead, dtype=dtype, device=device),
        prefix + "comb_logits": torch.empty((*lead, n, n), dtype=dtype, device=device),
    }


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
    new=lambda t, a: {
        "residual": t["hidden"].new_empty(
            (*t["hidden"].shape[:-1], a["n"], t["hidden"].shape[-1])
        )
    },
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
    new=lambda t, a: {"new_residual": like(t["residual"])},
    compute="mhc.post_fwd",
    backward="mhc.post_bwd",
    names={"new_residual": "out"},
)

pre_apply = Operator(
    "mhc_pre_apply_mix",
    inputs="...residual ...pre",
    outputs="layer_input",
    lead=2,
    new=lambda t, a: {"layer_input": row_of(t["residual"])},
    compute="mhc.pre_apply_fwd",
    backward="mhc.pre_apply_bwd",
    accumulates="residual",
    names={"layer_input": "out"},
)

# --- coefficients ---------------------------------------------------------------------------------


def split_new(t, a):
    mixes, n = t["mixes"], a["n"]
    lead = mixes.shape[:-1]
    return {
        "pre": mixes.new_empty((*lead, n)),
        "post": mixes.new_empty((*lead, n)),
        "comb_logits": mixes.new_empty((*lead, n, n)),
    }


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
    new=lambda t, a: {"comb": like(t["comb_logits"])},
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
    new=lambda t, a: {"pre": like(t["mixes"])},
    compute="mhc.head_mix_fwd",
    backward="mhc.head_mix_bwd",
)

# --- whole sublayers ------------------------------------------------------------------------------


def pre_new(t, a):
    residual = t["residual"]
    return {"layer_input": row_of(residual), **coefficients(residual, "post", "comb")}


def pre_keep(t, a):
    return mix_state(t["residual"], t["fn"])


pre = Operator(
    "mhc_pre",
    inputs="...residual fn scale base norm_weight? layer_norm_weight?",
    outputs="layer_input post comb",
    saved="pre mixes mul sqr comb_logits comb",
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
    new=lambda t, a: {"hidden": row_of(t["residual"])},
    compute="mhc.head_fwd",
    backward="mhc.head_bwd",
    names={**MIX_NAMES, "hidden": "out"},
)


def seam_new(t, a):
    residual = t["residual"]
    return {
        "new_residual": like(residual),
        "layer_input": row_of(residual),
        **coefficients(residual, "next_post", "next_comb"),
    }


def seam_keep(t, a):
    return mix_state(t["residual"], t["fn"], "next_")


def seam_delayed_new(t, a):
    return {**seam_new(t, a), **coefficients(t["residual"], "next_pre")}


def seam_delayed_keep(t, a):
    state = seam_keep(t, a)
    del state["next_pre"]  # an output
    return state


SEAM_STATE = "next_pre next_mixes next_mul next_sqr next_comb_logits next_comb new_residual"

seam = Operator(
    "mhc_fused_post_pre",
    inputs="...layer_output ...residual ...post ...comb fn scale base norm_weight? layer_norm_weight?",
    outputs="new_residual layer_input next_post next_comb",
    saved=SEAM_STATE,
    attributes=PROJECTION,
    weights=MIX_WEIGHTS,
    lead=1,
    new=seam_new,
    keep=seam_keep,
    compute="mhc.seam_classic_fwd",
    backward="mhc.seam_classic_bwd",
    names=MIX_NAMES,
)

seam_delayed = Operator(
    "mhc_fused_post_pre_delayed",
    inputs="...layer_output ...residual ...pre ...post ...comb fn scale base norm_weight? layer_norm_weight?",
    outputs="new_residual layer_input next_post next_comb next_pre",
    saved=SEAM_STATE,
    attributes=PROJECTION,
    weights=MIX_WEIGHTS,
    lead=1,
    new=seam_delayed_new,
    keep=seam_delayed_keep,
    compute="mhc.seam_single_pass_fwd",
    backward="mhc.seam_single_pass_bwd",
    names={**MIX_NAMES, "pre": "pre_mix"},
)


def broadcast_new(t, a):
    hidden = t["hidden"]
    n = t["fn"].shape[1] // hidden.shape[-1]
    residual = hidden.new_empty((*hidden.shape[:-1], n, hidden.shape[-1]))
    return {
        "residual": residual,
        "layer_input": like(hidden),
        **coefficients(residual, "pre", "post", "comb"),
    }


def broadcast_keep(t, a):
    n = t["fn"].shape[1] // t["hidden"].shape[-1]
    state = mix_state(t["hidden"].unsqueeze(-2).expand(*t["hidden"].shape[:-1], n, -1), t["fn"])
    del state["pre"]  # an output
    return state


broadcast = Operator(
    "mhc_pre_broadcast",
    inputs="...hidden fn scale base norm_weight? layer_norm_weight?",
    outputs="residual layer_input pre post comb",
    saved="pre mixes mul sqr comb_logits comb",
    attributes=f"{PROJECTION} form:str",
    weights=MIX_WEIGHTS,
    lead=1,
    new=broadcast_new,
    keep=broadcast_keep,
    compute="mhc.seam_broadcast_fwd",
    backward="mhc.seam_broadcast_bwd",
    names={**MIX_NAMES, "hidden": "x"},
)
