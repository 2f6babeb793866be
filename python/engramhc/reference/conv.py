"""The short causal convolution behind the gate."""

from __future__ import annotations

import numpy as np

from .dtypes import Tensor, encode, single
from .gate import sigmoid
from .sequences import sequence_bounds


def silu(u: np.ndarray) -> np.ndarray:
    """u * sigmoid(u)."""
    return u * sigmoid(u)


def normalized_rows(
    gated_value: np.ndarray, norm_weight: np.ndarray, eps: float, masked: np.ndarray
) -> np.ndarray:
    """u = gated_value / sqrt(mean(gated_value^2) + eps) * norm_weight per stream; 0 where masked.

    gated_value [T, n, d], norm_weight [n, d], masked [T] -> [T, n, d]
    """
    mean_square = np.mean(gated_value**2, axis=-1, keepdims=True)
    return np.where(
        masked[:, None, None], 0.0, gated_value / np.sqrt(mean_square + eps) * norm_weight
    )


def causal_convolution(
    rows: np.ndarray,
    weight: np.ndarray,
    dilation: int,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
) -> tuple[np.ndarray, np.ndarray]:
    """c[t] = sum over taps j of weight[..., w-1-j] * u[t - j * dilation], per channel and sequence.

    What lies before a sequence comes from its state (oldest row first), or is zero. The new state
    is the last (w-1) * dilation rows of old state and sequence together.

    rows [T, n, d], weight [n, d, w], state [B, (w-1)*dilation, n, d] -> c [T, n, d], new state
    """
    taps = weight.shape[-1]
    reach = (taps - 1) * dilation
    bounds = sequence_bounds(cu_seqlens, rows.shape[0])
    sequences = len(bounds) - 1
    before = np.zeros((sequences, reach, *rows.shape[1:])) if state is None else state.decode()
    mixed, after = np.zeros(rows.shape), np.zeros(before.shape)
    for b, (start, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        extended = np.concatenate([before[b], rows[start:end]])
        for j in range(taps):
            first = reach - j * dilation
            mixed[start:end] += weight[..., taps - 1 - j] * extended[first : first + end - start]
        after[b] = extended[end - start :]
    return mixed, after


def conv_fwd(
    gated_value: Tensor,
    conv_weight: Tensor,
    conv_norm_weight: Tensor,
    cu_seqlens: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    state: Tensor | None = None,
    *,
    dilation: int,
    conv_eps: float,
) -> dict[str, Tensor]:
    """out = round(v + silu(c)) with v the gated value and c the convolution of its normalised rows.
    Image tokens are not read and give 0, but count as positions.

    gated_value [T, n, d], conv_weight [n, d, w], conv_norm_weight [n, d], cu_seqlens [B+1],
    image_token_mask [T], state [B, (w-1)*dilation, n, d] -> out [T, n, d], state (if one came in)
    """
    masked = (
        np.zeros(gated_value.shape[0], bool)
        if image_token_mask is None
        else image_token_mask.decode()
    )
    with np.errstate(all="ignore"):
        rows = normalized_rows(
            gated_value.decode(), conv_norm_weight.decode(), single(conv_eps), masked
        )
        mixed, after = causal_convolution(rows, conv_weight.decode(), dilation, cu_seqlens, state)
        total = np.where(masked[:, None, None], 0.0, gated_value.decode() + silu(mixed))
    outputs = {"out": encode(total, gated_value.dtype)}
    if state is not None:
        outputs["state"] = encode(after, "F32")
    return outputs
