"""How far an F32 evaluation may be from the exact formula, element by element.

First-order error analysis. A sum of m terms in any sensible order is off by at most
(4 + sqrt(m)) units of sum |terms|: that covers a serial sum with room, and is fifty
times below what products in bf16 or tf32 would cost. Each function returns, per output,
the absolute allowance that comes on top of the rounding of the result.
"""

import numpy as np
from engramhc.reference.conv import (
    causal_convolution,
    causal_convolution_gradients,
    convolution_gradients,
    silu,
)
from engramhc.reference.dtypes import Tensor, encode, single, spacing
from engramhc.reference.gate import (
    fused_weight,
    gate_gradients,
    gate_statistics,
    image_tokens,
    sigmoid,
    split_kv,
)
from engramhc.reference.optimizer import optimizer_step as run_optimizer

import error_bounds_mhc
from running_error import TINY, UNIT, sum_units


def _gate(residual, keys, weight_fused, eps, clamp):
    """Statistics and their errors."""
    d = residual.shape[-1]
    s = gate_statistics(residual, keys, weight_fused, single(eps), single(clamp))
    units = sum_units(d)
    dot = units * np.sum(np.abs(residual * weight_fused * keys), axis=-1) + d * TINY * (
        1 + np.abs(keys).max(axis=-1, initial=0.0)
    )
    dot = np.where(np.all(residual * keys == 0, axis=-1), 0.0, dot)
    norm = units / 2 + 2 * UNIT  # relative, of one reciprocal root
    scale = s["rstd_residual"] * s["rstd_key"] / np.sqrt(d)
    z = s["dot"] * scale
    z_error = np.abs(z) * (2 * norm + 4 * UNIT) + dot * scale
    root = np.sqrt(np.maximum(np.abs(z), clamp))
    # Where the sign of z is in doubt, so is the side of the jump at zero.
    root_error = (
        np.where(np.abs(z) < z_error, 2 * np.sqrt(np.maximum(z_error, clamp)), z_error / (2 * root))
        + 2 * UNIT * root
    )
    alpha = s["alpha"] * (1 - s["alpha"]) * root_error + 6 * UNIT * s["alpha"]
    return s, {
        "dot": dot,
        "alpha": alpha,
        "rstd_residual": norm * s["rstd_residual"],
        "rstd_key": norm * s["rstd_key"],
    }


def gate_fwd(inputs, attrs):
    residual = inputs["residual"].decode()
    keys, values = split_kv(inputs.get("kv"), inputs.get("key"), inputs.get("value"))
    s, errors = _gate(residual, keys, inputs["weight_fused"].decode(), attrs["eps"], attrs["clamp"])
    gated = np.abs(s["alpha"][..., None] * values[..., None, :])
    identity = np.abs(residual) if attrs.get("mode", "add") == "add" else 0.0
    return {
        **errors,
        "out": np.abs(values)[..., None, :] * errors["alpha"][..., None]
        + 2 * UNIT * (identity + gated),
        "value_mean_square": sum_units(values.shape[-1]) * np.mean(values**2, axis=-1),
    }


def _convolution(gated, relative, inputs, attrs):
    """silu(c), its error and that of the new state; `relative`: error of a row before its norm."""
    weight = inputs["conv_weight"].decode()
    d = gated.shape[-1]
    norm_weight = inputs["conv_norm_weight"].decode()
    mask = inputs.get("image_token_mask")
    rows = gated / np.sqrt(np.mean(gated**2, axis=-1, keepdims=True) + single(attrs["conv_eps"]))
    rows = rows * norm_weight
    if mask is not None:
        rows[mask.data] = 0.0
        relative = np.where(mask.data[:, None, None], 0.0, relative)
    row_errors = (sum_units(d) / 2 + 4 * UNIT + relative) * np.abs(rows)
    state, sequences = inputs.get("state"), inputs.get("cu_seqlens")
    mixed, _ = causal_convolution(rows, weight, attrs["dilation"], sequences, state)
    size = None if state is None else Tensor("F32", np.abs(state.data))
    terms, _ = causal_convolution(np.abs(rows), np.abs(weight), attrs["dilation"], sequences, size)
    exact = None if state is None else encode(np.zeros(state.shape), "F32")
    from_rows, after = causal_convolution(
        row_errors, np.abs(weight), attrs["dilation"], sequences, exact
    )
    error = from_rows + (weight.shape[-1] + 2) * UNIT * terms
    return silu(mixed), 1.1 * error + 4 * UNIT * np.abs(silu(mixed)), after


def conv_fwd(inputs, attrs):
    gated = inputs["gated_value"].decode()
    activated, error, state = _convolution(gated, 0.0, inputs, attrs)
    return {"out": error + 2 * UNIT * (np.abs(gated) + np.abs(activated)), "state": state}


def layer_fwd(inputs, attrs):
    residual, dtype = inputs["residual"].decode(), inputs["residual"].dtype
    keys, values = split_kv(inputs.get("kv"), inputs.get("key"), inputs.get("value"))
    fused = fused_weight(inputs["weight_hidden"], inputs["weight_embed"])["weight_fused"].decode()
    s, errors = _gate(residual, keys, fused, attrs["eps"], attrs["clamp"])
    gated = s["alpha"][..., None] * values[:, None, :]
    out = np.abs(values)[:, None, :] * errors["alpha"][..., None] + 3 * UNIT * (
        np.abs(residual) + np.abs(gated)
    )
    if "conv_weight" in inputs:
        relative = (errors["alpha"] / s["alpha"])[..., None] + 2 * UNIT
        activated, error, errors["state"] = _convolution(gated, relative, inputs, attrs)
        if attrs.get("rounding") == "twice":  # the inner rounding may fall to the other side
            inner = residual + gated
            out = out + spacing(np.where(np.isfinite(inner), inner, 0.0), dtype)
        out = out + error + 2 * UNIT * np.abs(activated)
    return {**errors, "out": out}


def kv_projection_fwd(inputs, attrs):
    tokens, weight = np.abs(inputs["embedding"].decode()), np.abs(inputs["weight"].decode())
    rows, d, inner = weight.shape
    terms = (tokens @ weight.reshape(rows * d, inner).T).reshape(*tokens.shape[:-1], rows, d)
    if "bias" in inputs:
        terms = terms + np.abs(inputs["bias"].decode())
    return {"kv": sum_units(inner) * terms}


def _total(inputs, target, terms):
    """Allowance of the last addition into an accumulation target."""
    return UNIT * (terms + (np.abs(inputs[target].decode()) if target in inputs else 0.0))


def gather_bwd(inputs, attrs):
    gradient = np.abs(inputs["grad_embedding"].decode())
    indices = inputs["indices"].decode().reshape(-1)
    pieces = gradient.reshape(indices.size, -1) if indices.size else np.zeros((0, 1))
    rows = attrs.get("rows") or inputs["grad_table_acc"].shape[0]
    sums, counts = np.zeros((rows, pieces.shape[1])), np.zeros((rows, 1))
    np.add.at(sums, indices[indices >= 0], pieces[indices >= 0])
    np.add.at(counts, indices[indices >= 0], 1)
    error = sum_units(counts) * sums
    return {
        "grad_table": error + _total(inputs, "grad_table_acc", sums),
        "unique_rows": None,
        "grad_rows": error[counts[:, 0] > 0],
    }


def kv_projection_bwd(inputs, attrs):
    weight = np.abs(inputs["weight"].decode())
    rows, d, inner = weight.shape
    gradient = np.abs(inputs["grad_kv"].decode()).reshape(-1, rows * d)
    tokens = np.abs(inputs["embedding"].decode())
    flat = tokens.reshape(-1, inner)
    units = sum_units(flat.shape[0])
    of_weight = (gradient.T @ flat).reshape(weight.shape)
    of_bias = gradient.sum(axis=0).reshape(rows, d)
    return {
        "grad_embedding": sum_units(rows * d)
        * (gradient @ weight.reshape(rows * d, inner)).reshape(tokens.shape),
        "grad_weight": units * of_weight + _total(inputs, "grad_weight_acc", of_weight),
        "grad_bias": units * of_bias + _total(inputs, "grad_bias_acc", of_bias),
    }


def grad_w_reduce(inputs, attrs):
    partials = inputs["grad_weight_partial"].decode()
    total = np.abs(partials.sum(axis=0))
    error = sum_units(partials.shape[0]) * np.abs(partials).sum(axis=0)
    bounds = {}
    for name, other in (("hidden", "embed"), ("embed", "hidden")):
        factor = np.abs(inputs[f"weight_{other}"].decode())
        bounds[f"grad_weight_{name}"] = error * factor + _total(
            inputs, f"grad_weight_{name}_acc", 2 * total * factor
        )
    return bounds


def _hidden(masked, array):
    """Zero in the rows of image tokens. masked [...], array [..., any more axes]."""
    return np.where(masked.reshape(masked.shape + (1,) * (array.ndim - masked.ndim)), 0.0, array)


def _gate_gradients(identity, of_value, of_value_error, x, k, v, weight, s, errors, clamp, masked):
    """Errors of gate_gradients; `of_value_error`: of the gradient of alpha * value."""
    x, k, v, identity, of_value, of_value_error = (
        _hidden(masked, a) for a in (x, k, v, identity, of_value, of_value_error)
    )
    dot, alpha, rstd_x, rstd_k = (
        _hidden(masked, s[name]) for name in ("dot", "alpha", "rstd_residual", "rstd_key")
    )
    d = x.shape[-1]
    v, size = v[..., None, :], np.abs(dot)
    relative_x = errors["rstd_residual"] / s["rstd_residual"]
    relative_k = errors["rstd_key"] / s["rstd_key"]
    scale = rstd_x * rstd_k / np.sqrt(d)
    z = size * scale
    z_error = z * (relative_x + relative_k + 4 * UNIT) + errors["dot"] * scale
    in_doubt = np.abs(z - clamp) <= z_error
    flat = ((z < clamp) | (size == 0)) & ~in_doubt

    grad_alpha = np.sum(of_value * v, axis=-1)
    grad_alpha_error = sum_units(d) * np.sum(np.abs(of_value * v), axis=-1) + np.sum(
        np.abs(v) * of_value_error, axis=-1
    )
    bell = alpha * (1 - alpha)
    bell_error = np.abs(1 - 2 * alpha) * errors["alpha"] + 4 * UNIT * bell
    root = scale / np.sqrt(np.maximum(z, clamp))
    relative_root = z_error / (2 * np.maximum(z, clamp)) + 4 * UNIT
    slope = np.abs(grad_alpha) * bell * root / 2
    slope_error = (
        1.2 * (grad_alpha_error * bell + np.abs(grad_alpha) * bell_error) * root / 2
        + (1.2 * relative_root + 4 * UNIT + in_doubt) * slope
    )
    slope, slope_error = (np.where(flat, 0.0, a)[..., None] for a in (slope, slope_error))

    def pulled(along, other, rstd, relative, dot_error):
        """Error of slope * (other * weight - along * dot * rstd^2 / d)."""
        size_of_pull = np.abs(along) * (size * rstd**2 / d)[..., None]
        inner = np.abs(other * weight)
        return slope_error * (inner + size_of_pull) + slope * (
            4 * UNIT * inner
            + size_of_pull * (2 * relative + 6 * UNIT)[..., None]
            + np.abs(along) * (rstd**2 / d * dot_error)[..., None]
        )

    terms = np.abs(x * k)
    value_terms = np.abs(alpha[..., None] * of_value)
    tokens = max(1, masked.size)
    of_weight = slope_error * terms + sum_units(tokens) * slope * terms
    return {
        "grad_residual": pulled(x, k, rstd_x, relative_x, errors["dot"])
        + 2 * UNIT * np.abs(identity),
        "grad_key": pulled(k, x, rstd_k, relative_k, errors["dot"]),
        "grad_value": np.sum(
            np.abs(of_value) * errors["alpha"][..., None]
            + alpha[..., None] * of_value_error
            + sum_units(x.shape[-2]) * value_terms,
            axis=-2,
        ),
        "grad_weight_fused": of_weight.reshape(-1, *x.shape[-2:]).sum(axis=0),
    }


def _packed(bounds):
    key, value = bounds["grad_key"], bounds["grad_value"]
    return {**bounds, "grad_kv": np.concatenate([key, value[..., None, :]], axis=-2)}


def gate_bwd(inputs, attrs):
    residual, weight = inputs["residual"].decode(), inputs["weight_fused"].decode()
    keys, values = split_kv(inputs.get("kv"), inputs.get("key"), inputs.get("value"))
    masked = image_tokens(inputs.get("image_token_mask"), residual.shape[:-2])
    if "dot" in inputs:
        names = ("dot", "alpha", "rstd_residual", "rstd_key")
        s = {name: inputs[name].decode() for name in names}
        errors = {name: np.zeros(masked.shape + residual.shape[-2:-1]) for name in names}
    else:
        s, errors = _gate(residual, keys, weight, attrs["eps"], attrs["clamp"])
    s = {name: np.where(masked[..., None], 1.0, numbers) for name, numbers in s.items()}
    errors = {name: _hidden(masked, numbers) for name, numbers in errors.items()}
    identity = inputs["grad_out"].decode()
    path = inputs.get("grad_value_path", inputs["grad_out"]).decode()
    bounds = _gate_gradients(
        identity,
        path,
        np.zeros(path.shape),
        residual,
        keys,
        values,
        weight,
        s,
        errors,
        single(attrs["clamp"]),
        masked,
    )
    return {**_packed(bounds), "grad_weight_partial": bounds["grad_weight_fused"]}


def _convolution_gradients(grad, v, relative, inputs, attrs):
    """Errors of convolution_gradients; `relative` [T, n, 1]: error of a row of v."""
    weight, norm_weight = (inputs[x].decode() for x in ("conv_weight", "conv_norm_weight"))
    sequences, dilation = inputs.get("cu_seqlens"), attrs["dilation"]
    masked = image_tokens(inputs.get("image_token_mask"), grad.shape[:1])
    grad, v, relative = (_hidden(masked, a) for a in (grad, v, relative + np.zeros(v.shape)))
    tokens, _, d = v.shape
    taps = weight.shape[-1]

    rstd = 1.0 / np.sqrt(np.mean(v**2, axis=-1, keepdims=True) + single(attrs["conv_eps"]))
    of_rstd = sum_units(d) / 2 + 4 * UNIT + relative
    rows = np.abs(v * rstd * norm_weight)
    row_errors = (of_rstd + relative + 4 * UNIT) * rows
    mixed, _ = causal_convolution(v * rstd * norm_weight, weight, dilation, sequences, None)
    weight = np.abs(weight)
    terms, _ = causal_convolution(rows, weight, dilation, sequences, None)
    mixed_error, _ = causal_convolution(row_errors, weight, dilation, sequences, None)
    mixed_error = 1.1 * mixed_error + (taps + 2) * UNIT * terms

    gate = sigmoid(mixed)
    slope = np.abs(gate * (1 + mixed * (1 - gate)))
    slope_error = 0.55 * mixed_error + 8 * UNIT * gate * (1 + np.abs(mixed))
    of_mixed = np.abs(grad) * slope
    of_mixed_error = np.abs(grad) * slope_error + 2 * UNIT * of_mixed

    def spread(of_c, u):
        of_rows, of_weight = causal_convolution_gradients(
            of_c, u, weight, masked, dilation, sequences
        )
        return _hidden(masked, of_rows), of_weight

    exact = convolution_gradients(
        grad,
        v,
        inputs["conv_weight"].decode(),
        norm_weight,
        single(attrs["conv_eps"]),
        masked,
        dilation,
        sequences,
    )
    size, of_weight = spread(of_mixed, rows)
    error, of_weight_error = spread(of_mixed_error, rows)
    error = error + (taps + 2) * UNIT * size  # of the gradient of the normalised rows
    _, from_rows = spread(of_mixed, row_errors)

    g, v, units = np.abs(norm_weight), np.abs(v), sum_units(tokens)
    direct = rstd * g * size
    inner = np.mean(size * g * v, axis=-1, keepdims=True)
    inner_error = np.mean(error * g * v, axis=-1, keepdims=True) + (
        sum_units(d) + relative + 3 * UNIT
    ) * np.abs(inner)
    pull = v * rstd**3 * inner
    return exact, {
        "grad_gated_value": rstd * g * error
        + direct * (of_rstd + 3 * UNIT)
        + v * rstd**3 * inner_error
        + pull * (3 * of_rstd + relative + 6 * UNIT)
        + 4 * UNIT * (np.abs(grad) + direct + pull),
        "grad_conv_weight": of_weight_error
        + from_rows
        + units * of_weight
        + _total(inputs, "grad_conv_weight_acc", of_weight),
        "grad_conv_norm_weight": np.sum(
            v * rstd * (error + size * (of_rstd + relative + 4 * UNIT + units)), axis=0
        )
        + _total(inputs, "grad_conv_norm_weight_acc", np.sum(v * rstd * size, axis=0)),
    }


def conv_bwd(inputs, attrs):
    v = inputs["gated_value"].decode()
    return _convolution_gradients(inputs["grad_out"].decode(), v, 0.0, inputs, attrs)[1]


def layer_bwd(inputs, attrs):
    residual, grad = inputs["residual"].decode(), inputs["grad_out"].decode()
    keys, values = split_kv(inputs.get("kv"), inputs.get("key"), inputs.get("value"))
    fused = fused_weight(inputs["weight_hidden"], inputs["weight_embed"])["weight_fused"].decode()
    masked = image_tokens(inputs.get("image_token_mask"), residual.shape[:-2])
    s, errors = _gate(residual, keys, fused, attrs["eps"], attrs["clamp"])
    s = {name: np.where(masked[..., None], 1.0, numbers) for name, numbers in s.items()}
    errors = {name: _hidden(masked, numbers) for name, numbers in errors.items()}
    bounds, of_value, of_value_error = {}, grad, np.zeros(grad.shape)
    if "conv_weight" in inputs:
        relative = (errors["alpha"] / s["alpha"])[..., None] + 2 * UNIT
        gated = s["alpha"][..., None] * values[:, None, :]
        exact, bounds = _convolution_gradients(grad, gated, relative, inputs, attrs)
        of_value, of_value_error = exact["grad_gated_value"], bounds["grad_gated_value"]
    weights = [inputs["weight_hidden"].decode(), inputs["weight_embed"].decode()]
    clamp = single(attrs["clamp"])
    of_gate = (residual, keys, values, fused)
    bounds |= _gate_gradients(grad, of_value, of_value_error, *of_gate, s, errors, clamp, masked)
    of_fused = np.abs(
        gate_gradients(grad, of_value, *of_gate, s, clamp, masked)["grad_weight_fused"]
    )
    for name, factor in (("hidden", weights[1]), ("embed", weights[0])):
        bounds[f"grad_weight_{name}"] = bounds["grad_weight_fused"] * np.abs(factor) + _total(
            inputs, f"grad_weight_{name}_acc", 2 * of_fused * np.abs(factor)
        )
    return _packed(bounds)


def _scaled(inputs, attrs):
    """|x|, its row norms, and the relative error of a norm."""
    row_scale, col_scale = inputs["row_scale"].decode(), inputs["col_scale"].decode()
    x = np.abs(row_scale[:, None] * inputs["update"].decode() * col_scale)
    norms = np.sqrt(np.sum(x**2, axis=1))
    return x, norms, sum_units(x.shape[1]) / 2 + 4 * UNIT


def sinkhorn_step(inputs, attrs):
    x, norms, relative = _scaled(inputs, attrs)
    scale = np.abs(inputs["row_scale"].decode()) / (norms + single(attrs["eps"]))
    squares = (x / (norms + single(attrs["eps"]))[:, None]) ** 2
    return {
        "row_norm": relative * norms,
        "row_scale": (relative + 4 * UNIT) * scale,
        "col_partial": (2 * relative + 8 * UNIT + sum_units(x.shape[0])) * squares.sum(axis=0),
    }


def sinkhorn_step_reduce(inputs, attrs):
    partials = inputs["col_partial"].decode()
    units, total = sum_units(partials.shape[0]), partials.sum(axis=0)
    bounds = {"col_sumsq": units * total}
    if "col_scale" in inputs:
        old = inputs["col_scale"].decode()
        new = np.where(total == 0, 0.0, old / (np.sqrt(total) + single(attrs["eps"])))
        bounds["col_scale"] = (units + 4 * UNIT) * np.abs(new)
    return bounds


def sinkhorn_finalize(inputs, attrs):
    x, norms, relative = _scaled(inputs, attrs)
    out = x * (single(attrs["alpha"]) / (norms + single(attrs["eps"])))[:, None]
    return {"out": (relative + 6 * UNIT) * out}


def optimizer_step(inputs, attrs):
    """Errors of the scales add up over the half-steps: each step passes on no more than it got."""
    rows, width = inputs["weight"].shape
    steps = 2 * attrs.get("repeat", 5) + 1
    relative = 2 * steps * (sum_units(max(rows, width)) + 8 * UNIT)
    from_zero = {**inputs, "weight": encode(np.zeros((rows, width)), "F32")}
    change = np.abs(run_optimizer(**from_zero, **attrs)["weight"].decode())
    weight = np.abs(inputs["weight"].decode())
    return {"weight": relative * change + 2 * UNIT * (weight + change), "momentum": None}


BOUNDS = {
    "engram.gather_bwd": gather_bwd,
    "engram.kv_projection_bwd": kv_projection_bwd,
    "engram.gate_bwd": gate_bwd,
    "engram.grad_w_reduce": grad_w_reduce,
    "engram.conv_bwd": conv_bwd,
    "engram.layer_bwd": layer_bwd,
    "engram.sinkhorn_step": sinkhorn_step,
    "engram.sinkhorn_step_reduce": sinkhorn_step_reduce,
    "engram.sinkhorn_finalize": sinkhorn_finalize,
    "engram.optimizer_step": optimizer_step,
    "engram.gate_fwd": gate_fwd,
    "engram.conv_fwd": conv_fwd,
    "engram.layer_fwd": layer_fwd,
    "engram.kv_projection_fwd": kv_projection_fwd,
    **error_bounds_mhc.BOUNDS,
}


def tolerances(name, inputs, attrs, expected):
    """[ulp, abs, share] per output; exact operators allow nothing."""
    if name not in BOUNDS:
        return {output: [0, 0] for output in expected}
    with np.errstate(all="ignore"):
        bounds = BOUNDS[name](inputs, attrs)
    result = {}
    for output, target in expected.items():
        if bounds[output] is None:  # exact
            result[output] = [0, 0]
            continue
        absolute = np.nan_to_num(np.broadcast_to(bounds[output], target.shape), nan=0.0, posinf=0.0)
        share = 1
        if target.dtype != "F32" and absolute.size:
            # Half-precision results differ only where the F32 error meets a rounding boundary.
            values = target.decode()
            step = spacing(np.where(np.isfinite(values), values, 0.0), target.dtype)
            share = min(1.0, 0.01 + float(np.mean(np.minimum(1.0, 2 * absolute / step))))
        result[output] = [1, absolute, share]
    return result
