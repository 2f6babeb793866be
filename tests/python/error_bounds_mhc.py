"""Bounds of the mHC operators: formulas of the reference on arrays that carry their errors."""

import numpy as np
from engramhc.reference import mhc_mixes, mhc_monitors, mhc_projection, mhc_seams, mhc_streams
from engramhc.reference.dtypes import single
from engramhc.reference.mhc_pre import (
    SAVED,
    Mix,
    Sublayer,
    entry,
    entry_gradients,
    fn_gradients,
    merged,
    project,
    project_gradients,
    taken_saved,
)
from engramhc.reference.mhc_projection import flattened, operand

from running_error import UNIT, Approximate, exact, parts

TF32_UNIT = 2.0**-11


def decoded(inputs, *names):
    return [exact(inputs[x].decode()) for x in names]


def errors(results, inputs=None):
    """Bounds by output, with that of the addition into the target of a gradient."""
    bounds = {}
    for name, result in results.items():
        target = (inputs or {}).get(f"{name}_acc")
        if target is not None:
            result = result + target.decode()
        bounds[name] = result.error
    return bounds


# --- Sinkhorn ------------------------------------------------------------------------------------
# Errors in front of a half-step do not grow in it: rows and columns are scaled back. So what comes
# in is allowed a fixed number of times, beside the roundings of the steps, which add up like those
# of a sum. Arguments of exp are as uncertain as their size says. One bound for each matrix.


def _largest(array):
    return np.max(np.abs(array), axis=(-1, -2), keepdims=True)


def _step_units(logits, repeat):
    """Units of the largest entry, of all half-steps together."""
    spread = _largest(logits - logits.max(axis=-1, keepdims=True))
    return (4 + np.sqrt(2 * repeat) + np.minimum(spread, 1e3)) * UNIT


def sinkhorn(mix, logits):
    value, error = parts(logits)
    comb = Mix.comb(mix, value)
    bound = _step_units(value, mix.repeat) + 4 * _largest(error)
    return Approximate(comb, bound * np.maximum(_largest(comb), 1.0))


def sinkhorn_gradient(mix, grad, logits):
    (upstream, grad_error), (value, error) = parts(grad), parts(logits)
    gradient = Mix.comb_gradient(mix, upstream, value)
    units = _step_units(value, mix.repeat) + 16 * _largest(error)
    bound = units * _largest(upstream) + 4 * _largest(grad_error)
    return Approximate(gradient, bound + np.zeros(gradient.shape))


class Estimated(Sublayer):
    """The sublayer of the reference, for arrays that carry their errors."""

    @staticmethod
    def rounded(array, dtype):
        return array.rounded(dtype)

    def comb(self, logits):
        return sinkhorn(self, logits)

    def comb_gradient(self, grad, logits):
        return sinkhorn_gradient(self, grad, logits)

    def product_gradients(self, grad_mixes, state, x, factors):
        if self.precision == "tf32":  # the token's side may be rounded
            value, error = parts(grad_mixes)
            grad_mixes = Approximate(value, error + TF32_UNIT * np.abs(value))
        return super().product_gradients(grad_mixes, state, x, factors)


class OnlyMix(Mix):
    """The same without a projection."""

    rounded, comb = staticmethod(Estimated.rounded), Estimated.comb


def sinkhorn_call(inputs, attrs):
    given = {"scale": None, "base": None, "norm_eps": 0, "pre_eps": 0, "post_mult": 0}
    names = {"repeat": "repeat", "eps": "sinkhorn_eps", "convention": "convention"}
    return OnlyMix(**given, **{names[x]: value for x, value in attrs.items()})


def sinkhorn_fwd(inputs, attrs):
    comb = sinkhorn(sinkhorn_call(inputs, attrs), *decoded(inputs, "comb_logits"))
    return {"comb": comb.error}


def sinkhorn_bwd(inputs, attrs):
    arrays = decoded(inputs, "grad_comb", "comb_logits")
    gradient = sinkhorn_gradient(sinkhorn_call(inputs, attrs), *arrays)
    return {"grad_comb_logits": gradient.error}


# --- streams -------------------------------------------------------------------------------------


def expand_bwd(inputs, attrs):
    return {"grad_hidden": decoded(inputs, "grad_residual")[0].sum(axis=-2).error}


def pre_apply_fwd(inputs, attrs):
    return {"layer_input": mhc_streams.collapsed(*decoded(inputs, "residual", "pre")).error}


def pre_apply_bwd(inputs, attrs):
    of_residual, of_pre = mhc_streams.collapse_gradients(
        *decoded(inputs, "grad_layer_input", "residual", "pre")
    )
    return errors({"grad_residual": of_residual, "grad_pre": of_pre}, inputs)


def post_fwd(inputs, attrs):
    streams = mhc_streams.combined(*decoded(inputs, "layer_output", "residual", "post", "comb"))
    return {"new_residual": streams.error}


def post_bwd(inputs, attrs):
    names = ("grad_new_residual", "layer_output", "residual", "post", "comb")
    return errors(mhc_streams.combine_gradients(*decoded(inputs, *names)))


def multilayer_recompute(inputs, attrs):
    (streams,), dtype = decoded(inputs, "residual"), inputs["residual"].dtype
    bounds, layer = {}, 0
    while f"pre.{layer}" in inputs:
        row = mhc_streams.collapsed(streams, *decoded(inputs, f"pre.{layer}"))
        bounds[f"layer_input.{layer}"] = row.error
        if f"post.{layer}" in inputs:
            output, post, comb = decoded(
                inputs, *(f"{x}.{layer}" for x in ("layer_output", "post", "comb"))
            )
            streams = mhc_streams.combined(output, streams, post, comb)
            bounds[f"new_residual.{layer}"] = streams.error
            streams = streams.rounded(dtype)
        layer += 1
    return bounds


# --- projection and mixes ------------------------------------------------------------------------


def merge_bwd(inputs, attrs):
    of_fn, of_weight = mhc_projection.merge_gradients(
        *decoded(inputs, "grad_fn_merged", "fn", "norm_weight")
    )
    return errors({"grad_fn": of_fn, "grad_norm_weight": of_weight}, inputs)


def prenorm_gemm(inputs, attrs):
    """Of the sums over all splits, which is what is compared."""
    groups = attrs.get("groups", 1)
    x = flattened(inputs["residual"].decode())
    fn = operand(inputs["fn"].decode(), attrs.get("precision", "fp32"))
    columns = x.shape[-1] // groups
    x, fn = (exact(a.reshape(len(a), groups, columns)) for a in (x, fn))
    mul, sqr = np.einsum("tgk,mgk->tgm", x, fn), np.sum(x**2, axis=-1)
    if groups == 1:
        mul, sqr = mul[:, 0], sqr[:, 0]
    return {"mul_partial": mul.error, "sqr_partial": sqr.error}


def reduce_partials_fwd(inputs, attrs):
    partials = decoded(inputs, "mul_partial", "sqr_partial")
    reduced = mhc_projection.reduced
    return errors(
        reduced(*partials, attrs["k"], single(attrs["norm_eps"]), attrs.get("rms", "mean"))
    )


def reduce_partials_bwd(inputs, attrs):
    grad, mul, sqr = decoded(inputs, "grad_mixes", "mul", "sqr")
    grouped, squares = mhc_projection.by_groups(mul, sqr, 1)
    of_mul, of_sqr = mhc_projection.reduce_gradients(
        *(grad, grouped, squares, attrs["k"] // squares.shape[-1]),
        *(single(attrs["norm_eps"]), attrs.get("rms", "mean")),
    )
    return errors({"grad_mul": of_mul.reshape(mul.shape), "grad_sqr": of_sqr.reshape(sqr.shape)})


def norm_fn_bwd(inputs, attrs):
    mul, sqr, residual = decoded(inputs, "grad_mul", "grad_sqr", "residual")
    precision = attrs.get("precision", "fp32")
    if precision == "tf32":
        mul = Approximate(mul.value, TF32_UNIT * np.abs(mul.value))
    of_x, of_fn = mhc_projection.projection_gradients(
        *mhc_projection.by_groups(mul, sqr, 1),
        flattened(residual),
        operand(inputs["fn"].decode(), precision),
    )
    return errors({"grad_residual": of_x.reshape(residual.shape), "grad_fn": of_fn}, inputs)


def split_fwd(inputs, attrs):
    results = mhc_mixes.split(
        *decoded(inputs, "mixes", "scale", "base"),
        single(attrs["pre_eps"]),
        single(attrs["post_mult"]),
    )
    return errors(dict(zip(("pre", "post", "comb_logits"), results)))


def split_bwd(inputs, attrs):
    names = ("grad_pre", "grad_post", "grad_comb_logits", "mixes", "scale", "base")
    bounds = errors(mhc_mixes.split_gradients(*decoded(inputs, *names), single(attrs["post_mult"])))
    partials = {f"{x}_partial": bounds[x] for x in ("grad_scale", "grad_base")}
    return {"grad_mixes": bounds["grad_mixes"], **partials}


def split_bwd_reduce(inputs, attrs):
    names = ("grad_scale", "grad_base")
    return errors({x: decoded(inputs, f"{x}_partial")[0].sum(axis=0) for x in names}, inputs)


def head_mix_fwd(inputs, attrs):
    arrays = decoded(inputs, "mixes", "scale", "base")
    return {"pre": mhc_mixes.head_mix(*arrays, single(attrs["pre_eps"])).error}


def head_mix_bwd(inputs, attrs):
    arrays = decoded(inputs, "grad_pre", "mixes", "scale", "base")
    return errors(mhc_mixes.head_mix_gradients(*arrays), inputs)


# --- monitors ------------------------------------------------------------------------------------


def amax_gain(inputs, attrs):
    maps = inputs["comb"].decode()
    composite = exact(maps[0])
    for layer in maps[1:]:
        composite = composite @ layer
    results = (*mhc_monitors.gains(exact(maps)), *mhc_monitors.gains(composite))
    names = ("forward_gain", "backward_gain", "composite_forward_gain", "composite_backward_gain")
    return errors(dict(zip(names, results)))


def defect(inputs, attrs):
    (maps,) = decoded(inputs, "comb")
    forward, backward = mhc_monitors.gains(maps)
    return errors(
        {
            "row_defect": np.abs(maps.sum(axis=-1) - 1).max(axis=-1),
            "column_defect": np.abs(maps.sum(axis=-2) - 1).max(axis=-1),
            "spectral_bound": np.sqrt(forward * backward),
        }
    )


# --- composites and seams ------------------------------------------------------------------------


def call_of(inputs, attrs):
    """The sublayer of a call, its saved state, and what is left of the call."""
    call = {**inputs, **attrs}
    return Estimated.taken_from(call), call


def state_errors(state, prefix=""):
    return errors({prefix + x: state[x] for x in ("post", *SAVED)})


def pre_fwd(inputs, attrs):
    sublayer, _ = call_of(inputs, attrs)
    layer_input, state = entry(sublayer, *decoded(inputs, "residual"), inputs["residual"].dtype)
    return {"layer_input": layer_input.error, **state_errors(state)}


def upstream_of(inputs, **shapes):
    """Upstream gradients by their short names; absent ones are zeros."""
    arrays = {}
    for name, (tensor, shape) in shapes.items():
        arrays[name] = exact(inputs[tensor].decode() if tensor in inputs else np.zeros(shape))
    return arrays


def saved_state(sublayer, call, prefix, x, factors):
    saved = taken_saved(call, prefix)
    if saved:
        return {name: exact(t.decode()) for name, t in saved.items()}
    return sublayer.state({}, x, factors)


def pre_bwd(inputs, attrs):
    sublayer, call = call_of(inputs, attrs)
    (streams,), shape = decoded(inputs, "residual"), inputs["residual"].shape
    state = saved_state(sublayer, call, "", flattened(streams), sublayer.factors())
    grads = upstream_of(
        inputs,
        streams=("grad_residual_acc", shape),
        layer_input=("grad_layer_input", (*shape[:-2], shape[-1])),
        pre=("none", shape[:-1]),
        post=("grad_post", shape[:-1]),
        comb=("grad_comb", (*shape[:-1], shape[-2])),
    )
    of_streams, _, of_parameters = entry_gradients(
        *(sublayer, streams, inputs["residual"].dtype, state, grads),
        chain=attrs.get("rounding") == "chain",
    )
    return {"grad_residual": of_streams.error, **errors(of_parameters, inputs)}


def pre_big_fuse(inputs, attrs):
    call = {x: t for x, t in (inputs | attrs).items() if "partial" not in x}
    (streams,), mix = decoded(inputs, "residual"), OnlyMix.taken_from(call)
    reduced = mhc_projection.reduced(
        *decoded(inputs, "mul_partial", "sqr_partial"),
        *(streams.shape[-2] * streams.shape[-1], single(mix.norm_eps), mix.rms),
    )
    state = mix.coefficients(reduced["mixes"])
    row = mix.row(streams, state["pre"], inputs["residual"].dtype)
    return errors({"layer_input": mix.layer_input(row), **state})


def head_of(inputs, attrs):
    """Streams, factors, state and pre of a head."""
    (streams,) = decoded(inputs, "residual")
    precision = attrs.get("precision", "fp32")
    factors = operand(merged(inputs["fn"], inputs.get("norm_weight")), precision)
    norm = single(attrs["norm_eps"]), attrs.get("rms", "mean")
    state = project(flattened(streams), factors, *norm)
    weights = inputs["scale"].decode(), inputs["base"].decode()
    pre = mhc_mixes.head_mix(state["mixes"], *weights, single(attrs["pre_eps"]))
    return streams, factors, norm, state, weights, pre


def head_fwd(inputs, attrs):
    streams, *_, pre = head_of(inputs, attrs)
    return {"hidden": mhc_streams.collapsed(streams, pre).error}


def head_bwd(inputs, attrs):
    streams, factors, norm, state, weights, pre = head_of(inputs, attrs)
    state = {x: array.rounded("F32") for x, array in state.items()}
    of_streams, of_pre = mhc_streams.collapse_gradients(
        *decoded(inputs, "grad_hidden"), streams, pre.rounded("F32")
    )
    if attrs.get("rounding") == "chain":
        of_streams = of_streams.rounded(inputs["residual"].dtype)
    of_mix = mhc_mixes.head_mix_gradients(of_pre, state["mixes"], *weights)
    grad_mixes = of_mix.pop("grad_mixes")
    if attrs.get("precision") == "tf32":
        size = TF32_UNIT * np.abs(grad_mixes.value)
        grad_mixes = Approximate(grad_mixes.value, grad_mixes.error + size)
    of_x, of_merged = project_gradients(grad_mixes, state, flattened(streams), factors, *norm)
    gradients = fn_gradients(of_merged, inputs["fn"], inputs.get("norm_weight")) | of_mix
    return {
        "grad_residual": (of_streams + of_x.reshape(streams.shape)).error,
        **errors(gradients, inputs),
    }


EXIT = ("layer_output", "residual", "post", "comb")


def seam_fwd(inputs, attrs):
    sublayer, _ = call_of(inputs, attrs)
    earlier = decoded(inputs, "pre")[0] if "pre" in inputs else None
    dtype, exit_inputs = inputs["residual"].dtype, decoded(inputs, *EXIT)
    _, layer_input, state = mhc_seams.seam(sublayer, exit_inputs, dtype, earlier)
    return {
        "new_residual": mhc_streams.combined(*exit_inputs).error,
        "layer_input": layer_input.error,
        **state_errors(state, "next_"),
    }


def seam_bwd(inputs, attrs):
    sublayer, call = call_of(inputs, attrs)
    exit_inputs, dtype = decoded(inputs, *EXIT), inputs["residual"].dtype
    streams = (
        decoded(inputs, "new_residual")[0]
        if "new_residual" in inputs
        else mhc_streams.combined(*exit_inputs).rounded(dtype)
    )
    state = saved_state(sublayer, call, "next_", flattened(streams), sublayer.factors())
    grads = upstream_of(
        inputs,
        streams=("grad_new_residual", streams.shape),
        layer_input=("grad_layer_input", inputs["layer_output"].shape),
        pre=("grad_next_pre", inputs["post"].shape),
        post=("grad_next_post", inputs["post"].shape),
        comb=("grad_next_comb", inputs["comb"].shape),
    )
    of_streams, of_pre, of_parameters = entry_gradients(
        *(sublayer, streams, dtype, state, grads),
        earlier_pre=decoded(inputs, "pre")[0] if "pre" in inputs else None,
        chain=attrs.get("rounding") == "chain",
    )
    bounds = errors(mhc_streams.combine_gradients(of_streams, *exit_inputs))
    return {**bounds, "grad_pre": of_pre.error, **errors(of_parameters, inputs)}


def broadcast_fwd(inputs, attrs):
    sublayer, _ = call_of(inputs, attrs)
    dtype, form = inputs["hidden"].dtype, attrs.get("form", "classic")
    layer_input, state = mhc_seams.broadcast_entry(
        sublayer, *decoded(inputs, "hidden"), dtype, form
    )
    bounds = {"residual": None, "layer_input": layer_input.error, **state_errors(state)}
    if form == "single_pass" and "layer_norm_weight" not in inputs:
        bounds["layer_input"] = None
    return bounds


def broadcast_bwd(inputs, attrs):
    sublayer, call = call_of(inputs, attrs)
    (row,), shape = decoded(inputs, "hidden"), inputs["hidden"].shape
    n = sublayer.fn.shape[1] // shape[-1]
    factors = mhc_seams.summed_factors(sublayer, n)
    state = saved_state(sublayer, call, "", row, factors)
    grads = upstream_of(
        inputs,
        streams=("grad_residual", (*shape[:-1], n, shape[-1])),
        layer_input=("grad_layer_input", shape),
        pre=("grad_pre", (*shape[:-1], n)),
        post=("grad_post", (*shape[:-1], n)),
        comb=("grad_comb", (*shape[:-1], n, n)),
    )
    of_row, of_parameters = mhc_seams.broadcast_gradients(
        sublayer, row, inputs["hidden"].dtype, state, grads, attrs.get("form", "classic")
    )
    return {"grad_hidden": of_row.error, **errors(of_parameters, inputs)}


BOUNDS = {
    "mhc.expand_bwd": expand_bwd,
    "mhc.merge_bwd": merge_bwd,
    "mhc.prenorm_gemm": prenorm_gemm,
    "mhc.reduce_partials_fwd": reduce_partials_fwd,
    "mhc.reduce_partials_bwd": reduce_partials_bwd,
    "mhc.norm_fn_bwd": norm_fn_bwd,
    "mhc.split_fwd": split_fwd,
    "mhc.split_bwd": split_bwd,
    "mhc.split_bwd_reduce": split_bwd_reduce,
    "mhc.sinkhorn_fwd": sinkhorn_fwd,
    "mhc.sinkhorn_bwd": sinkhorn_bwd,
    "mhc.pre_apply_fwd": pre_apply_fwd,
    "mhc.pre_apply_bwd": pre_apply_bwd,
    "mhc.pre_big_fuse": pre_big_fuse,
    "mhc.post_fwd": post_fwd,
    "mhc.post_bwd": post_bwd,
    "mhc.head_mix_fwd": head_mix_fwd,
    "mhc.head_mix_bwd": head_mix_bwd,
    "mhc.multilayer_recompute": multilayer_recompute,
    "mhc.amax_gain": amax_gain,
    "mhc.defect": defect,
    "mhc.pre_fwd": pre_fwd,
    "mhc.pre_bwd": pre_bwd,
    "mhc.head_fwd": head_fwd,
    "mhc.head_bwd": head_bwd,
    "mhc.seam_classic_fwd": seam_fwd,
    "mhc.seam_classic_bwd": seam_bwd,
    "mhc.seam_single_pass_fwd": seam_fwd,
    "mhc.seam_single_pass_bwd": seam_bwd,
    "mhc.seam_broadcast_fwd": broadcast_fwd,
    "mhc.seam_broadcast_bwd": broadcast_bwd,
}
