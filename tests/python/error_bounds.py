"""How far an F32 evaluation may be from the exact formula, element by element.

First-order error analysis. A sum of m terms in any sensible order is off by at most
(4 + sqrt(m)/2) units of sum |terms|: that covers a serial sum of random terms with room, and is a
hundred times below what products in bf16 or tf32 would cost. Each function returns, per output,
the absolute allowance that comes on top of the rounding of the result.
"""

import numpy as np
from engramhc.reference.conv import causal_convolution, silu
from engramhc.reference.dtypes import Tensor, encode, single, spacing
from engramhc.reference.gate import fused_weight, gate_statistics, split_kv

UNIT = 2.0**-24
TINY = 2.0**-149


def sum_units(terms):
    return (4 + np.sqrt(terms) / 2) * UNIT


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


BOUNDS = {
    "engram.gate_fwd": gate_fwd,
    "engram.conv_fwd": conv_fwd,
    "engram.layer_fwd": layer_fwd,
    "engram.kv_projection_fwd": kv_projection_fwd,
}


def tolerances(name, inputs, attrs, expected):
    """[ulp, abs, share] per output; exact operators allow nothing."""
    if name not in BOUNDS:
        return {output: [0, 0] for output in expected}
    with np.errstate(all="ignore"):
        bounds = BOUNDS[name](inputs, attrs)
    result = {}
    for output, target in expected.items():
        absolute = np.nan_to_num(np.broadcast_to(bounds[output], target.shape), nan=0.0, posinf=0.0)
        share = 1
        if target.dtype != "F32" and absolute.size:
            # Half-precision results differ only where the F32 error meets a rounding boundary.
            values = target.decode()
            step = spacing(np.where(np.isfinite(values), values, 0.0), target.dtype)
            share = min(1.0, 0.01 + float(np.mean(np.minimum(1.0, 2 * absolute / step))))
        result[output] = [1, absolute, share]
    return result
