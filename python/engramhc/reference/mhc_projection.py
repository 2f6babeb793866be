"""Projection of the streams: merged fn, product in splits and groups, RMS norm after the product.

A projection is `fn` [M, K] with K = n * d: row j times a token's flattened streams is mix j. The
norm of the token is applied after the product, as a factor per token (and RMS group).
"""

from __future__ import annotations

import math

import numpy as np

from .dtypes import Tensor, accumulated, encode, nearest, single


def merge_fwd(fn: Tensor, norm_weight: Tensor) -> dict[str, Tensor]:
    """fn_merged = fn * norm_weight, column by column: fn [M, K], norm_weight [K] -> [M, K]."""
    return {"fn_merged": encode(fn.decode() * norm_weight.decode(), "F32")}


def operand(fn: np.ndarray, precision: str) -> np.ndarray:
    """The merged fn as a product takes it: as it is, or rounded to TF32."""
    return nearest(fn, "TF32") if precision == "tf32" else fn


def merge_gradients(
    grad_merged: np.ndarray, fn: np.ndarray, norm_weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of fn [M, K] and norm_weight [K], given that of their product [M, K]."""
    return grad_merged * norm_weight, np.sum(grad_merged * fn, axis=0)


def merge_bwd(
    grad_fn_merged: Tensor,
    fn: Tensor,
    norm_weight: Tensor,
    grad_fn_acc: Tensor | None = None,
    grad_norm_weight_acc: Tensor | None = None,
) -> dict[str, Tensor]:
    """Backward of merge_fwd: grad_fn_merged, fn [M, K], norm_weight [K]."""
    of_fn, of_weight = merge_gradients(grad_fn_merged.decode(), fn.decode(), norm_weight.decode())
    return {
        "grad_fn": accumulated(grad_fn_acc, of_fn),
        "grad_norm_weight": accumulated(grad_norm_weight_acc, of_weight),
    }


def flattened(residual: np.ndarray) -> np.ndarray:
    """[..., n, d] -> [..., K]."""
    return residual.reshape(*residual.shape[:-2], residual.shape[-2] * residual.shape[-1])


def split_bounds(width: int, splits: int) -> list[tuple[int, int]]:
    """Columns of every split: blocks of 64, the first (blocks mod splits) splits have one more."""
    blocks = -(-width // 64)
    counts = [blocks // splits + (s < blocks % splits) for s in range(splits)]
    ends = [min(width, 64 * sum(counts[: s + 1])) for s in range(splits)]
    return list(zip([0, *ends], ends))


def prenorm_gemm(
    residual: Tensor, fn: Tensor, *, splits: int = 0, groups: int = 1, precision: str = "fp32"
) -> dict[str, Tensor]:
    """mul[t, j] = sum_k x[t, k] fn[j, k], sqr[t] = sum_k x[t, k]^2. The K axis is cut into splits
    and into groups, entry (s, g) is of the columns in both. splits = 0 is one split here.

    residual [T, n, d], fn [M, K] (merged)
    -> mul_partial [S, T, M] or [S, T, G, M], sqr_partial [S, T] or [S, T, G]
    """
    x, factors = flattened(residual.decode()), operand(fn.decode(), precision)
    width = x.shape[-1]
    if width % groups:
        raise ValueError(f"'groups': expected a divisor of K = {width}, got {groups}")
    size, tokens = width // groups, x.shape[0]
    mul = np.zeros((splits or 1, tokens, groups, factors.shape[0]))
    sqr = np.zeros((splits or 1, tokens, groups))
    for s, (begin, end) in enumerate(split_bounds(width, splits or 1)):
        for g in range(groups):
            columns = slice(max(begin, g * size), max(begin, min(end, (g + 1) * size)))
            mul[s, :, g] = x[:, columns] @ factors[:, columns].T
            sqr[s, :, g] = np.sum(x[:, columns] ** 2, axis=-1)
    if groups == 1:
        mul, sqr = mul[:, :, 0], sqr[:, :, 0]
    return {"mul_partial": encode(mul, "F32"), "sqr_partial": encode(sqr, "F32")}


def projection_gradients(
    grad_mul: np.ndarray, grad_sqr: np.ndarray, x: np.ndarray, factors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of sum(grad_mul * x fn^T) + sum(grad_sqr * |x|^2), both sums within the G groups of columns:
    gradients of x [..., K] and fn [M, K].

    grad_mul [..., G, M], grad_sqr [..., G], x [..., K], factors [M, K]
    """
    groups, mixes = grad_mul.shape[-2:]
    columns = x.shape[-1] // groups
    grouped = x.reshape(*x.shape[:-1], groups, columns)
    by_group = factors.reshape(mixes, groups, columns)
    of_x = np.einsum("...gm,mgk->...gk", grad_mul, by_group) + 2 * grouped * grad_sqr[..., None]
    tokens = math.prod(x.shape[:-1])
    of_fn = np.einsum(
        "tgm,tgk->mgk",
        grad_mul.reshape(tokens, groups, mixes),
        grouped.reshape(tokens, groups, columns),
    )
    return of_x.reshape(x.shape), of_fn.reshape(factors.shape)


def norm_fn_bwd(
    grad_mul: Tensor,
    grad_sqr: Tensor,
    residual: Tensor,
    fn: Tensor,
    grad_residual_acc: Tensor | None = None,
    grad_fn_acc: Tensor | None = None,
    *,
    precision: str = "fp32",
) -> dict[str, Tensor]:
    """Backward of prenorm_gemm: grad_x[t, k] = round(acc + sum_j grad_mul[t, j] fn[j, k]
    + 2 x[t, k] grad_sqr[t]), grad_fn[j, k] = sum_t grad_mul[t, j] x[t, k].

    grad_mul [T, M] or [T, G, M], grad_sqr [T] or [T, G], residual [T, n, d], fn [M, K] (merged)
    """
    mul, sqr = by_groups(grad_mul.decode(), grad_sqr.decode(), residual.data.ndim - 2)
    of_x, of_fn = projection_gradients(
        mul, sqr, flattened(residual.decode()), operand(fn.decode(), precision)
    )
    of_x = of_x.reshape(residual.shape)
    return {
        "grad_residual": accumulated(grad_residual_acc, of_x, residual.dtype),
        "grad_fn": accumulated(grad_fn_acc, of_fn),
    }


# --- RMS norm of the product ---------------------------------------------------------------------


def by_groups(mul: np.ndarray, sqr: np.ndarray, leading: int) -> tuple[np.ndarray, np.ndarray]:
    """mul [..., G, M] and sqr [..., G], with one group where that axis is missing; `leading` axes
    come before it."""
    return (mul, sqr) if sqr.ndim > leading else (mul[..., None, :], sqr[..., None])


def reciprocal_rms(sqr: np.ndarray, count: float, eps: float, rms: str) -> np.ndarray:
    """1/sqrt(sqr/count + eps), or 1/(sqrt(sqr/count) + eps) in the form `norm`."""
    if rms == "norm":
        return 1.0 / (np.sqrt(sqr / count) + eps)
    return 1.0 / np.sqrt(sqr / count + eps)


def group_size(k: int, groups: int) -> int:
    if k % groups:
        raise ValueError(f"'k': expected a multiple of G = {groups}, got {k}")
    return k // groups


def reduced(
    mul_partial: np.ndarray, sqr_partial: np.ndarray, k: int, eps: float, rms: str
) -> dict[str, np.ndarray]:
    """mul, sqr = sums over the splits; mixes = sum over groups of mul * r(sqr), see reciprocal_rms.

    mul_partial [S, T, M] or [S, T, G, M], sqr_partial [S, T] or [S, T, G]
    -> mixes [T, M], mul and sqr without S
    """
    mul, sqr = np.sum(mul_partial, axis=0), np.sum(sqr_partial, axis=0)
    grouped, squares = by_groups(mul, sqr, 1)
    r = reciprocal_rms(squares, group_size(k, squares.shape[-1]), eps, rms)
    return {"mixes": np.sum(grouped * r[..., None], axis=-2), "mul": mul, "sqr": sqr}


def reduce_partials_fwd(
    mul_partial: Tensor, sqr_partial: Tensor, *, k: int, norm_eps: float, rms: str = "mean"
) -> dict[str, Tensor]:
    """See reduced."""
    outputs = reduced(mul_partial.decode(), sqr_partial.decode(), k, single(norm_eps), rms)
    return {name: encode(array, "F32") for name, array in outputs.items()}


def reduce_gradients(
    grad_mixes: np.ndarray, mul: np.ndarray, sqr: np.ndarray, count: int, eps: float, rms: str
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of mul [..., G, M] and sqr [..., G], given that of the mixes [..., M].

    With grad_r = <grad, mul>: grad_sqr = -grad_r r / (2 (sqr + eps count)), and in the form `norm`
    -grad_r r^2 / (2 count sqrt(sqr/count)), 0 where sqr = 0.
    """
    r = reciprocal_rms(sqr, count, eps, rms)
    grad = grad_mixes[..., None, :]
    of_r = np.sum(grad * mul, axis=-1)
    if rms == "norm":
        root = np.where(sqr == 0, 1.0, np.sqrt(sqr / count))
        of_sqr = np.where(sqr == 0, 0.0, -of_r * r**2 / (2 * count * root))
    else:
        of_sqr = -0.5 * of_r * r / (sqr + eps * count)
    return grad * r[..., None], of_sqr


def reduce_partials_bwd(
    grad_mixes: Tensor, mul: Tensor, sqr: Tensor, *, k: int, norm_eps: float, rms: str = "mean"
) -> dict[str, Tensor]:
    """Backward of reduce_partials_fwd, for the sums over splits.

    grad_mixes [T, M], mul [T, M] or [T, G, M], sqr [T] or [T, G] -> grad_mul, grad_sqr alike
    """
    grouped, squares = by_groups(mul.decode(), sqr.decode(), 1)
    of_mul, of_sqr = reduce_gradients(
        grad_mixes.decode(),
        grouped,
        squares,
        group_size(k, squares.shape[-1]),
        single(norm_eps),
        rms,
    )
    return {
        "grad_mul": encode(of_mul.reshape(mul.shape), "F32"),
        "grad_sqr": encode(of_sqr.reshape(sqr.shape), "F32"),
    }
