"""Mixes: split into pre, post and comb for a sublayer, into pre alone for the head."""

from __future__ import annotations

import math

import numpy as np

from .dtypes import Tensor, accumulated, encode, single
from .gate import sigmoid


def streams_of(mixes: int) -> int:
    """n, given N = n^2 + 2n."""
    n = math.isqrt(mixes + 1) - 1
    if n * n + 2 * n != mixes:
        raise ValueError(f"'mixes': expected n^2 + 2n columns, got {mixes}")
    return n


def per_mix(scale: np.ndarray, mixes: int) -> np.ndarray:
    """The scale of every mix: those of pre and post n times each, that of comb n^2 times."""
    n = streams_of(mixes)
    return scale[np.repeat([0, 1, 2], [n, n, n * n])]


def split(
    mixes: np.ndarray, scale: np.ndarray, base: np.ndarray, pre_eps: float, post_mult: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """With u = mixes * scale + base: pre = sigmoid(u) + pre_eps, post = post_mult * sigmoid(u),
    comb_logits = u.

    mixes [..., N], scale [3], base [N] -> pre, post [..., n], comb_logits [..., n, n]
    """
    n = streams_of(mixes.shape[-1])
    u = mixes * per_mix(scale, mixes.shape[-1]) + base
    logits = u[..., 2 * n :].reshape(*u.shape[:-1], n, n)
    return sigmoid(u[..., :n]) + pre_eps, post_mult * sigmoid(u[..., n : 2 * n]), logits


def split_fwd(
    mixes: Tensor, scale: Tensor, base: Tensor, *, pre_eps: float, post_mult: float
) -> dict[str, Tensor]:
    """See split: mixes [..., N], scale [3], base [N] -> pre, post, comb_logits."""
    pre, post, logits = split(
        mixes.decode(), scale.decode(), base.decode(), single(pre_eps), single(post_mult)
    )
    return {
        "pre": encode(pre, "F32"),
        "post": encode(post, "F32"),
        "comb_logits": encode(logits, "F32"),
    }


def split_gradients(
    grad_pre: np.ndarray,
    grad_post: np.ndarray,
    grad_comb_logits: np.ndarray,
    mixes: np.ndarray,
    scale: np.ndarray,
    base: np.ndarray,
    post_mult: float,
) -> dict[str, np.ndarray]:
    """Gradients of mixes [..., N], scale [3] and base [N], given those of the outputs of split."""
    n = grad_pre.shape[-1]
    factors = per_mix(scale, mixes.shape[-1])
    gate = sigmoid((mixes * factors + base)[..., : 2 * n])
    slope = gate * (1 - gate)
    of_u = np.concatenate(
        [
            grad_pre * slope[..., :n],
            grad_post * post_mult * slope[..., n:],
            grad_comb_logits.reshape(*mixes.shape[:-1], n * n),
        ],
        axis=-1,
    )
    of_base = sum_tokens(of_u)
    products = sum_tokens(of_u * mixes)
    return {
        "grad_mixes": of_u * factors,
        "grad_scale": np.stack([part.sum() for part in np.split(products, [n, 2 * n])]),
        "grad_base": of_base,
    }


def sum_tokens(array: np.ndarray) -> np.ndarray:
    """[..., M] -> [M]."""
    return np.sum(array.reshape(-1, array.shape[-1]), axis=0)


def split_bwd(
    grad_pre: Tensor,
    grad_post: Tensor,
    grad_comb_logits: Tensor,
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    post_mult: float,
) -> dict[str, Tensor]:
    """Backward of split_fwd; the sums over tokens are one partial here.

    grad_pre, grad_post [..., n], grad_comb_logits [..., n, n], mixes [..., N], scale [3], base [N]
    -> grad_mixes [..., N], grad_scale_partial [P, 3], grad_base_partial [P, N]
    """
    gradients = split_gradients(
        *(t.decode() for t in (grad_pre, grad_post, grad_comb_logits, mixes, scale, base)),
        single(post_mult),
    )
    return {
        "grad_mixes": encode(gradients["grad_mixes"], "F32"),
        "grad_scale_partial": encode(gradients["grad_scale"][None], "F32"),
        "grad_base_partial": encode(gradients["grad_base"][None], "F32"),
    }


def split_bwd_reduce(
    grad_scale_partial: Tensor,
    grad_base_partial: Tensor,
    grad_scale_acc: Tensor | None = None,
    grad_base_acc: Tensor | None = None,
) -> dict[str, Tensor]:
    """Sums of the partials [P, Q] and [P, N]; Q = 3, or 1 for the head."""
    return {
        "grad_scale": accumulated(grad_scale_acc, grad_scale_partial.decode().sum(axis=0)),
        "grad_base": accumulated(grad_base_acc, grad_base_partial.decode().sum(axis=0)),
    }


# --- mixes of the head ---------------------------------------------------------------------------


def head_mix(mixes: np.ndarray, scale: np.ndarray, base: np.ndarray, pre_eps: float) -> np.ndarray:
    """pre = sigmoid(mixes * scale + base) + pre_eps: mixes [..., n], scale [1], base [n]."""
    return sigmoid(mixes * scale + base) + pre_eps


def head_mix_fwd(
    mixes: Tensor, scale: Tensor, base: Tensor, *, pre_eps: float
) -> dict[str, Tensor]:
    """See head_mix: -> pre [..., n]."""
    pre = head_mix(mixes.decode(), scale.decode(), base.decode(), single(pre_eps))
    return {"pre": encode(pre, "F32")}


def head_mix_gradients(
    grad_pre: np.ndarray, mixes: np.ndarray, scale: np.ndarray, base: np.ndarray
) -> dict[str, np.ndarray]:
    """Gradients of mixes [..., n], scale [1] and base [n], given that of pre [..., n]."""
    gate = sigmoid(mixes * scale + base)
    of_u = grad_pre * gate * (1 - gate)
    return {
        "grad_mixes": of_u * scale,
        "grad_scale": np.sum(of_u * mixes).reshape(1),
        "grad_base": sum_tokens(of_u),
    }


def head_mix_bwd(
    grad_pre: Tensor,
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    grad_scale_acc: Tensor | None = None,
    grad_base_acc: Tensor | None = None,
) -> dict[str, Tensor]:
    """Backward of head_mix_fwd: grad_pre, mixes [..., n], scale [1], base [n]."""
    gradients = head_mix_gradients(grad_pre.decode(), mixes.decode(), scale.decode(), base.decode())
    return {
        "grad_mixes": encode(gradients["grad_mixes"], "F32"),
        "grad_scale": accumulated(grad_scale_acc, gradients["grad_scale"]),
        "grad_base": accumulated(grad_base_acc, gradients["grad_base"]),
    }
