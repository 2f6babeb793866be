"""Plain float64 forward formulas of the mHC operators, for finite differences. Written as the text
of the contract has them: maps of the streams as H_res = comb^T, the norm before the product.
"""

import numpy as np


def sigmoid(u):
    return 1 / (1 + np.exp(-u))


def post(layer_output, residual, post_mix, comb):
    """H_res x + H_post^T y."""
    return np.swapaxes(comb, -1, -2) @ residual + post_mix[..., None] * layer_output[..., None, :]


def collapse(residual, pre):
    """H_pre x."""
    return (pre[..., None, :] @ residual)[..., 0, :]


def rms_norm(row, eps, rms="mean"):
    size = np.mean(row**2, axis=-1, keepdims=True)
    return row / (np.sqrt(size) + eps if rms == "norm" else np.sqrt(size + eps))


def mixes(residual, fn, norm_weight, eps, rms="mean", groups=1):
    """RMSNorm of the flattened streams, within every group of columns, times fn^T."""
    flat = residual.reshape(*residual.shape[:-2], groups, fn.shape[1] // groups)
    normed = rms_norm(flat, eps, rms).reshape(*residual.shape[:-2], fn.shape[1])
    return (normed * norm_weight) @ fn.T


def split(mix, scale, base, pre_eps, post_mult):
    """pre, post, logits."""
    n = int(np.sqrt(mix.shape[-1] + 1)) - 1
    parts = []
    for place, columns in enumerate([slice(0, n), slice(n, 2 * n), slice(2 * n, None)]):
        parts.append(scale[place] * mix[..., columns] + base[columns])
    pre, post_mix, logits = parts
    logits = logits.reshape(*mix.shape[:-1], n, n)
    return sigmoid(pre) + pre_eps, post_mult * sigmoid(post_mix), logits


def sinkhorn(logits, repeat, eps, convention):
    """Rows are the last axis."""
    if convention == "deepseek":
        y = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) + eps
        y = y / (y.sum(-2, keepdims=True) + eps)
        for _ in range(repeat - 1):
            y = y / (y.sum(-1, keepdims=True) + eps)
            y = y / (y.sum(-2, keepdims=True) + eps)
        return y
    y = np.exp(logits - logits.max(-1, keepdims=True))
    least = eps if convention == "megatron" else 0.0
    for _ in range(repeat):
        y = y / np.maximum(y.sum(-1, keepdims=True), least)
        y = y / np.maximum(y.sum(-2, keepdims=True), least)
    return y


def coefficients(streams, a, s):
    """pre, post, comb; `a`: fn, scale, base, maybe norm_weight; `s`: attributes."""
    mix = mixes(streams, a["fn"], a.get("norm_weight", 1.0), s["norm_eps"], s.get("rms", "mean"))
    pre, post_mix, logits = split(mix, a["scale"], a["base"], s["pre_eps"], s["post_mult"])
    convention = s.get("convention", "deepseek")
    return pre, post_mix, sinkhorn(logits, s["repeat"], s["sinkhorn_eps"], convention)


def layer_input(row, a, s):
    if "layer_norm_weight" not in a:
        return row
    return rms_norm(row, s["layer_norm_eps"]) * a["layer_norm_weight"]


def pre(a, s):
    """Outputs of pre_fwd by name."""
    pre_mix, post_mix, comb = coefficients(a["residual"], a, s)
    row = layer_input(collapse(a["residual"], pre_mix), a, s)
    return {"layer_input": row, "pre": pre_mix, "post": post_mix, "comb": comb}


def head(a, s):
    mix = mixes(
        a["residual"], a["fn"], a.get("norm_weight", 1.0), s["norm_eps"], s.get("rms", "mean")
    )
    return collapse(a["residual"], sigmoid(mix * a["scale"] + a["base"]) + s["pre_eps"])


def seam(a, s):
    """Outputs of a classic seam, or of a single-pass one where `a` has a mix `pre`."""
    streams = post(a["layer_output"], a["residual"], a["post"], a["comb"])
    pre_mix, post_mix, comb = coefficients(streams, a, s)
    row = layer_input(collapse(streams, a.get("pre", pre_mix)), a, s)
    outputs = {"new_residual": streams, "layer_input": row}
    return outputs | {"next_pre": pre_mix, "next_post": post_mix, "next_comb": comb}


def broadcast(a, s):
    """Outputs of the seam behind the embedding: pre of n equal streams, or the one-hot collapse."""
    n = a["fn"].shape[1] // a["hidden"].shape[-1]
    streams = np.stack([a["hidden"]] * n, axis=-2)
    outputs = {"residual": streams, **pre({**a, "residual": streams}, s)}
    if s["form"] == "single_pass":
        outputs["layer_input"] = layer_input(a["hidden"], a, s)
    return outputs
