"""The context-aware gate: how much of the looked-up value each residual stream takes."""

from __future__ import annotations

import math

import numpy as np

from .dtypes import Tensor, accumulated, encode, nearest, single


def sigmoid(u: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-u)), with an exponential that never overflows."""
    small = np.exp(-np.abs(u))
    return np.where(u >= 0, 1.0, small) / (1.0 + small)


def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> dict[str, Tensor]:
    """weight_fused = weight_hidden * weight_embed, all [n, d]."""
    with np.errstate(invalid="ignore"):
        product = weight_hidden.decode() * weight_embed.decode()
    return {"weight_fused": encode(product, "F32")}


def split_kv(
    kv: Tensor | None, key: Tensor | None, value: Tensor | None
) -> tuple[np.ndarray, np.ndarray]:
    """Key [..., n, d] and value [..., d], given packed as [..., n+1, d] or separately."""
    if kv is None:
        return key.decode(), value.decode()
    packed = kv.decode()
    return packed[..., :-1, :], packed[..., -1, :]


def gate_statistics(
    residual: np.ndarray, key: np.ndarray, weight_fused: np.ndarray, eps: float, clamp: float
) -> dict[str, np.ndarray]:
    """The numbers behind one gate, per token and stream:

    rstd_residual = 1/sqrt(mean(x^2) + eps), rstd_key likewise, dot = sum(x * weight * k),
    z = dot * rstd_residual * rstd_key / sqrt(d),
    alpha = sigmoid(copysign(sqrt(max(|z|, clamp)), z)).

    residual, key [..., n, d], weight_fused [n, d] -> each [..., n]
    """
    width = residual.shape[-1]
    rstd_residual = 1.0 / np.sqrt(np.mean(residual**2, axis=-1) + eps)
    rstd_key = 1.0 / np.sqrt(np.mean(key**2, axis=-1) + eps)
    dot = np.sum(residual * weight_fused * key, axis=-1, initial=0.0)
    z = dot * rstd_residual * rstd_key / math.sqrt(width)
    alpha = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(z), clamp)), z))  # maximum keeps NaN
    return {"dot": dot, "alpha": alpha, "rstd_residual": rstd_residual, "rstd_key": rstd_key}


def image_tokens(image_token_mask: Tensor | None, shape: tuple[int, ...]) -> np.ndarray:
    """The mask as an array of the tokens' shape; absent: no image tokens."""
    return np.zeros(shape, bool) if image_token_mask is None else image_token_mask.decode()


def masked_statistics(
    residual: Tensor,
    key: np.ndarray,
    weight_fused: Tensor,
    image_token_mask: Tensor | None,
    eps: float,
    clamp: float,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """gate_statistics with zeros for image tokens; also the mask itself, [...]."""
    masked = image_tokens(image_token_mask, residual.shape[:-2])
    with np.errstate(all="ignore"):
        statistics = gate_statistics(
            residual.decode(), key, weight_fused.decode(), single(eps), single(clamp)
        )
    return (
        {name: np.where(masked[..., None], 0.0, numbers) for name, numbers in statistics.items()},
        masked,
    )


def recomputed_statistics(*arguments) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """masked_statistics as a forward would have saved them: rounded to F32, so that a backward
    gives the same bits with saved and with fresh ones."""
    statistics, masked = masked_statistics(*arguments)
    return {name: nearest(numbers, "F32") for name, numbers in statistics.items()}, masked


def copy_masked(out: Tensor, residual: Tensor, masked: np.ndarray) -> Tensor:
    """`out` with the rows of image tokens replaced by the residual's very bits."""
    return Tensor(out.dtype, np.where(masked[..., None, None], residual.data, out.data))


def gate_fwd(
    residual: Tensor,
    weight_fused: Tensor,
    kv: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    *,
    eps: float,
    clamp: float,
    save: bool = False,
    inplace: bool = False,
    mode: str = "add",
) -> dict[str, Tensor]:
    """out = round(residual + alpha * value), or round(alpha * value) in mode "value"; mode "stats"
    gives alpha and mean(value^2) instead. Image tokens: out is the residual (0 in mode "value"),
    statistics are 0, and kv is not looked at.

    residual [..., n, d], kv [..., n+1, d] or key [..., n, d] and value [..., d],
    weight_fused [n, d], image_token_mask [...]
    -> out [..., n, d]; dot, alpha, rstd_residual, rstd_key [..., n]; value_mean_square [...]
    """
    if save and inplace:
        raise ValueError("'inplace': the backward of a saving forward needs the old residual")
    keys, values = split_kv(kv, key, value)
    statistics, masked = masked_statistics(
        residual, keys, weight_fused, image_token_mask, eps, clamp
    )
    outputs = {}
    with np.errstate(all="ignore"):
        gated = statistics["alpha"][..., None] * values[..., None, :]
        if mode == "add":
            rounded = encode(residual.decode() + gated, residual.dtype)
            outputs["out"] = copy_masked(rounded, residual, masked)
        elif mode == "value":
            outputs["out"] = encode(np.where(masked[..., None, None], 0.0, gated), residual.dtype)
        else:
            mean_square = np.where(masked, 0.0, np.mean(values**2, axis=-1))
            outputs["alpha"] = encode(statistics["alpha"], "F32")
            outputs["value_mean_square"] = encode(mean_square, "F32")
    if save:
        outputs |= {name: encode(numbers, "F32") for name, numbers in statistics.items()}
    return outputs


def gate_gradients(
    grad_identity: np.ndarray,
    grad_value_path: np.ndarray,
    residual: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    weight_fused: np.ndarray,
    statistics: dict[str, np.ndarray],
    clamp: float,
    masked: np.ndarray,
) -> dict[str, np.ndarray]:
    """Gradients of sum(grad_identity * residual) + sum(grad_value_path * alpha * value).

    slope = dL/d(dot) with both rstd held fixed. It is 0 on the flat side of the clamp and at
    dot = 0. What a reciprocal root adds is the term with rstd^2: d rstd/dx = -rstd^3 x / d.

    grad_*, residual, key [..., n, d], value [..., d], weight_fused [n, d], statistics [..., n],
    masked [...] -> grad_residual, grad_key [..., n, d], grad_value [..., d],
    grad_weight_fused [n, d]; nothing of an image token is read, its gradients are 0
    """
    width = residual.shape[-1]
    rows, streams = masked[..., None, None], masked[..., None]
    grad_identity, grad_value_path, x, k = (
        np.where(rows, 0.0, array) for array in (grad_identity, grad_value_path, residual, key)
    )
    v = np.where(streams, 0.0, value)[..., None, :]
    dot, alpha, rstd_x, rstd_k = (
        np.where(streams, 0.0, statistics[name])
        for name in ("dot", "alpha", "rstd_residual", "rstd_key")
    )

    scale = rstd_x * rstd_k / math.sqrt(width)  # z = dot * scale
    grad_alpha = np.sum(grad_value_path * v, axis=-1)
    flat = (np.abs(dot * scale) < clamp) | (dot == 0)
    root = np.sqrt(scale / np.where(flat, 1.0, np.abs(dot)))  # scale / sqrt|z|
    slope = np.where(flat, 0.0, grad_alpha * alpha * (1 - alpha) * 0.5 * root)

    pull_x, pull_k = dot * rstd_x**2 / width, dot * rstd_k**2 / width
    slope, alpha, pull_x, pull_k = (array[..., None] for array in (slope, alpha, pull_x, pull_k))
    grad_weight = (slope * x * k).reshape(-1, *residual.shape[-2:]).sum(axis=0)
    return {
        "grad_residual": grad_identity + slope * (k * weight_fused - x * pull_x),
        "grad_key": np.where(rows, 0.0, slope * (x * weight_fused - k * pull_k)),
        "grad_value": np.sum(alpha * grad_value_path, axis=-2),
        "grad_weight_fused": grad_weight,
    }


def pack_gradients(
    gradients: dict[str, np.ndarray],
    grad_out: Tensor,
    masked: np.ndarray,
    packed: bool,
) -> dict[str, Tensor]:
    """The gradients per token as tensors, in the form in which keys and value came.

    Image tokens hand the gradient of their residual through, bit for bit.
    """
    dtype = grad_out.dtype
    rounded = encode(gradients["grad_residual"], dtype)
    outputs = {"grad_residual": copy_masked(rounded, grad_out, masked)}
    key, value = gradients["grad_key"], gradients["grad_value"]
    if packed:
        outputs["grad_kv"] = encode(np.concatenate([key, value[..., None, :]], axis=-2), dtype)
    else:
        outputs |= {"grad_key": encode(key, dtype), "grad_value": encode(value, dtype)}
    return outputs


def gate_bwd(
    grad_out: Tensor,
    residual: Tensor,
    weight_fused: Tensor,
    grad_value_path: Tensor | None = None,
    kv: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    dot: Tensor | None = None,
    alpha: Tensor | None = None,
    rstd_residual: Tensor | None = None,
    rstd_key: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    *,
    clamp: float,
    eps: float | None = None,
) -> dict[str, Tensor]:
    """Backward of gate_fwd, with its saved statistics or, without them, with fresh ones (eps).

    grad_value_path is the gradient of alpha * value where it differs from that of the residual:
    behind the gate of a layer there is a convolution. Absent: grad_out for both.
    The partial sums of the weight's gradient are one here, P = 1.

    grad_out, grad_value_path, residual [..., n, d], kv [..., n+1, d] or key [..., n, d] and
    value [..., d], weight_fused [n, d], statistics [..., n], image_token_mask [...]
    -> grad_residual, grad_kv or grad_key and grad_value, grad_weight_partial [P, n, d]
    """
    keys, values = split_kv(kv, key, value)
    if dot is None:
        statistics, masked = recomputed_statistics(
            residual, keys, weight_fused, image_token_mask, eps, clamp
        )
    else:
        masked = image_tokens(image_token_mask, residual.shape[:-2])
        saved = {"dot": dot, "alpha": alpha, "rstd_residual": rstd_residual, "rstd_key": rstd_key}
        statistics = {name: numbers.decode() for name, numbers in saved.items()}
    identity = grad_out.decode()
    with np.errstate(all="ignore"):
        gradients = gate_gradients(
            identity,
            identity if grad_value_path is None else grad_value_path.decode(),
            residual.decode(),
            keys,
            values,
            weight_fused.decode(),
            statistics,
            single(clamp),
            masked,
        )
    return {
        **pack_gradients(gradients, grad_out, masked, packed=kv is not None),
        "grad_weight_partial": encode(gradients["grad_weight_fused"][None], "F32"),
    }


def grad_w_reduce(
    grad_weight_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden_acc: Tensor | None = None,
    grad_weight_embed_acc: Tensor | None = None,
) -> dict[str, Tensor]:
    """Sums the partials and applies the product rule of weight_fused = hidden * embed.

    grad_weight_partial [P, n, d], the others [n, d] -> grad_weight_hidden, grad_weight_embed [n, d]
    """
    with np.errstate(all="ignore"):
        total = grad_weight_partial.decode().sum(axis=0)
        return {
            "grad_weight_hidden": accumulated(
                grad_weight_hidden_acc, total * weight_embed.decode()
            ),
            "grad_weight_embed": accumulated(grad_weight_embed_acc, total * weight_hidden.decode()),
        }
