"""The short causal convolution behind the gate."""

from __future__ import annotations

import numpy as np

from .dtypes import Tensor, accumulated, encode, single
from .gate import image_tokens, sigmoid
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
    masked = image_tokens(image_token_mask, gated_value.shape[:1])
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


def causal_convolution_gradients(
    grad_mixed: np.ndarray,
    rows: np.ndarray,
    weight: np.ndarray,
    masked: np.ndarray,
    dilation: int,
    cu_seqlens: Tensor | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of sum(grad_mixed * c) with respect to rows and weight (causal_convolution). The
    c of image tokens is not in the sum, whatever it is."""
    counts = ~masked[:, None, None]
    grad_mixed = np.where(counts, grad_mixed, 0.0)
    taps = weight.shape[-1]
    grad_rows, grad_weight = np.zeros(rows.shape), np.zeros(weight.shape)
    bounds = sequence_bounds(cu_seqlens, rows.shape[0])
    for start, end in zip(bounds[:-1], bounds[1:]):
        for j in range(taps):
            pairs = end - start - j * dilation  # token start + i is seen by the one j taps later
            if pairs > 0:
                earlier, later = slice(start, start + pairs), slice(end - pairs, end)
                products = grad_mixed[later] * rows[earlier]
                grad_weight[..., taps - 1 - j] += products.sum(axis=0, where=counts[later])
                grad_rows[earlier] += weight[..., taps - 1 - j] * grad_mixed[later]
    return grad_rows, grad_weight


def convolution_gradients(
    grad: np.ndarray,
    gated_value: np.ndarray,
    weight: np.ndarray,
    norm_weight: np.ndarray,
    eps: float,
    masked: np.ndarray,
    dilation: int,
    cu_seqlens: Tensor | None,
) -> dict[str, np.ndarray]:
    """Gradients of sum(grad * (v + silu(c))), v the gated value, c the convolution of its
    normalised rows u = v * rstd * g:

    grad_c = grad * silu'(c); the taps see grad_c * u, the rows grad_c spread forward in time;
    then grad_v = grad + rstd * g * grad_u - v * rstd^3 * mean(grad_u * g * v).

    grad, gated_value [T, n, d], weight [n, d, w], norm_weight [n, d], masked [T]
    -> grad_gated_value [T, n, d], grad_conv_weight [n, d, w], grad_conv_norm_weight [n, d];
    image tokens are not read and have gradient 0
    """
    hidden = masked[:, None, None]
    grad, v = np.where(hidden, 0.0, grad), np.where(hidden, 0.0, gated_value)
    rstd = 1.0 / np.sqrt(np.mean(v**2, axis=-1, keepdims=True) + eps)
    rows = normalized_rows(v, norm_weight, eps, masked)
    mixed, _ = causal_convolution(rows, weight, dilation, cu_seqlens, None)
    gate = sigmoid(mixed)
    grad_mixed = grad * gate * (1 + mixed * (1 - gate))

    grad_rows, grad_weight = causal_convolution_gradients(
        grad_mixed, rows, weight, masked, dilation, cu_seqlens
    )
    grad_rows = np.where(hidden, 0.0, grad_rows)  # an image token's row is 0 whatever it holds

    inner = np.mean(grad_rows * norm_weight * v, axis=-1, keepdims=True)
    grad_value = grad + rstd * norm_weight * grad_rows - v * rstd**3 * inner
    return {
        "grad_gated_value": np.where(hidden, 0.0, grad_value),
        "grad_conv_weight": grad_weight,
        "grad_conv_norm_weight": np.sum(grad_rows * v * rstd, axis=0),
    }


def conv_bwd(
    grad_out: Tensor,
    gated_value: Tensor,
    conv_weight: Tensor,
    conv_norm_weight: Tensor,
    cu_seqlens: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    grad_conv_weight_acc: Tensor | None = None,
    grad_conv_norm_weight_acc: Tensor | None = None,
    *,
    dilation: int,
    conv_eps: float,
) -> dict[str, Tensor]:
    """Backward of conv_fwd without state.

    grad_out, gated_value [T, n, d], conv_weight [n, d, w], conv_norm_weight [n, d],
    cu_seqlens [B+1], image_token_mask [T]
    -> grad_gated_value [T, n, d], grad_conv_weight [n, d, w], grad_conv_norm_weight [n, d]
    """
    with np.errstate(all="ignore"):
        gradients = convolution_gradients(
            grad_out.decode(),
            gated_value.decode(),
            conv_weight.decode(),
            conv_norm_weight.decode(),
            single(conv_eps),
            image_tokens(image_token_mask, gated_value.shape[:1]),
            dilation,
            cu_seqlens,
        )
        return {
            "grad_gated_value": encode(gradients["grad_gated_value"], gated_value.dtype),
            "grad_conv_weight": accumulated(grad_conv_weight_acc, gradients["grad_conv_weight"]),
            "grad_conv_norm_weight": accumulated(
                grad_conv_norm_weight_acc, gradients["grad_conv_norm_weight"]
            ),
        }
