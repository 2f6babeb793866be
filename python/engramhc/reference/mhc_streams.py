"""Operators that read and write whole residual streams: expand, collapse (pre_apply), post."""

from __future__ import annotations

import numpy as np

from .dtypes import Tensor, accumulated, encode


def expand_fwd(hidden: Tensor, *, n: int) -> dict[str, Tensor]:
    """n copies of every row: hidden [..., d] -> residual [..., n, d]."""
    return {"residual": Tensor(hidden.dtype, np.repeat(hidden.data[..., None, :], n, axis=-2))}


def expand_bwd(grad_residual: Tensor) -> dict[str, Tensor]:
    """Sum over the copies: grad_residual [..., n, d] -> grad_hidden [..., d]."""
    return {"grad_hidden": encode(grad_residual.decode().sum(axis=-2), grad_residual.dtype)}


def collapsed(residual: np.ndarray, pre: np.ndarray) -> np.ndarray:
    """sum_i pre_i x_i: residual [..., n, d], pre [..., n] -> [..., d]."""
    return np.einsum("...i,...id->...d", pre, residual)


def pre_apply_fwd(residual: Tensor, pre: Tensor) -> dict[str, Tensor]:
    """layer_input = round(sum_i pre_i x_i): residual [..., n, d], pre [..., n] -> [..., d]."""
    return {"layer_input": encode(collapsed(residual.decode(), pre.decode()), residual.dtype)}


def collapse_gradients(
    grad: np.ndarray, residual: np.ndarray, pre: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of sum(grad * collapsed(residual, pre)): gradients of residual [..., n, d], pre [..., n]."""
    return np.einsum("...i,...d->...id", pre, grad), np.einsum("...d,...id->...i", grad, residual)


def pre_apply_bwd(
    grad_layer_input: Tensor,
    residual: Tensor,
    pre: Tensor,
    grad_residual_acc: Tensor | None = None,
) -> dict[str, Tensor]:
    """grad_residual_i = round(acc_i + pre_i g), grad_pre_i = <g, x_i>.

    grad_layer_input [..., d], residual, grad_residual_acc [..., n, d], pre [..., n]
    -> grad_residual [..., n, d], grad_pre [..., n]
    """
    of_residual, of_pre = collapse_gradients(
        grad_layer_input.decode(), residual.decode(), pre.decode()
    )
    return {
        "grad_residual": accumulated(grad_residual_acc, of_residual, residual.dtype),
        "grad_pre": encode(of_pre, "F32"),
    }


def combined(
    layer_output: np.ndarray, residual: np.ndarray, post: np.ndarray, comb: np.ndarray
) -> np.ndarray:
    """x'_o = post_o y + sum_i comb_io x_i. comb is [input stream, output stream].

    layer_output [..., d], residual [..., n, d], post [..., n], comb [..., n, n] -> [..., n, d]
    """
    return np.einsum("...o,...d->...od", post, layer_output) + np.einsum(
        "...io,...id->...od", comb, residual
    )


def post_fwd(
    layer_output: Tensor, residual: Tensor, post: Tensor, comb: Tensor, *, inplace: bool = False
) -> dict[str, Tensor]:
    """new_residual = round(post_o y + sum_i comb_io x_i); `inplace` changes no bit.

    layer_output [..., d], residual [..., n, d], post [..., n], comb [..., n, n] -> [..., n, d]
    """
    streams = combined(layer_output.decode(), residual.decode(), post.decode(), comb.decode())
    return {"new_residual": encode(streams, residual.dtype)}


def combine_gradients(
    grad: np.ndarray,
    layer_output: np.ndarray,
    residual: np.ndarray,
    post: np.ndarray,
    comb: np.ndarray,
) -> dict[str, np.ndarray]:
    """Gradients of sum(grad * combined(...)).

    grad, residual [..., n, d], layer_output [..., d], post [..., n], comb [..., n, n]
    -> grad_layer_output [..., d], grad_residual [..., n, d], grad_post [..., n],
    grad_comb [..., n, n]
    """
    return {
        "grad_layer_output": np.einsum("...o,...od->...d", post, grad),
        "grad_residual": np.einsum("...io,...od->...id", comb, grad),
        "grad_post": np.einsum("...d,...od->...o", layer_output, grad),
        "grad_comb": np.einsum("...id,...od->...io", residual, grad),
    }


def rounded_gradients(gradients: dict[str, np.ndarray], dtype: str) -> dict[str, Tensor]:
    """The gradients of combine_gradients as tensors: coefficients F32, rows `dtype`."""
    return {
        name: encode(gradient, "F32" if name in ("grad_post", "grad_comb") else dtype)
        for name, gradient in gradients.items()
    }


def post_bwd(
    grad_new_residual: Tensor, layer_output: Tensor, residual: Tensor, post: Tensor, comb: Tensor
) -> dict[str, Tensor]:
    """Backward of post_fwd, see combine_gradients."""
    gradients = combine_gradients(
        *(t.decode() for t in (grad_new_residual, layer_output, residual, post, comb))
    )
    return rounded_gradients(gradients, residual.dtype)


def normalized(row: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm of a layer's input: row [..., d], weight [d] -> [..., d]."""
    return row / np.sqrt(np.mean(row**2, axis=-1, keepdims=True) + eps) * weight


def norm_gradients(
    grad: np.ndarray, row: np.ndarray, weight: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of sum(grad * normalized(row, weight)): gradients of row [..., d] and weight [d].

    With r the reciprocal RMS: r g w - row r^3 mean(row g w), and the sum over tokens of g row r.
    """
    r = 1.0 / np.sqrt(np.mean(row**2, axis=-1, keepdims=True) + eps)
    scaled = grad * weight
    of_row = r * scaled - row * r**3 * np.mean(row * scaled, axis=-1, keepdims=True)
    return of_row, np.sum((grad * row * r).reshape(-1, row.shape[-1]), axis=0)
