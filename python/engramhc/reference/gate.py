"""The context-aware gate: how much of the looked-up value each residual stream takes."""

from __future__ import annotations

import numpy as np

from .dtypes import Tensor, encode, single


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
    z = dot * rstd_residual * rstd_key / np.sqrt(width)
    alpha = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(z), clamp)), z))  # maximum keeps NaN
    return {"dot": dot, "alpha": alpha, "rstd_residual": rstd_residual, "rstd_key": rstd_key}


def masked_statistics(
    residual: Tensor,
    key: np.ndarray,
    weight_fused: Tensor,
    image_token_mask: Tensor | None,
    eps: float,
    clamp: float,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """gate_statistics with zeros for image tokens; also the mask itself, [...]."""
    masked = (
        np.zeros(residual.shape[:-2], bool)
        if image_token_mask is None
        else image_token_mask.decode()
    )
    with np.errstate(all="ignore"):
        statistics = gate_statistics(
            residual.decode(), key, weight_fused.decode(), single(eps), single(clamp)
        )
    return (
        {name: np.where(masked[..., None], 0.0, numbers) for name, numbers in statistics.items()},
        masked,
    )


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
