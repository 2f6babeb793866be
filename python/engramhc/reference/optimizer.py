"""The optimizer of the tables: momentum, then rows and columns brought to equal norm in turn.

`momentum_update` is exact to the last bit, so its F32 arithmetic is spelled out; the other
primitives are formulas in double precision whose outputs are rounded once.
"""

from __future__ import annotations

import math

import numpy as np

from .dtypes import Tensor, encode, nearest, single


def fma_single(a, b, c) -> np.ndarray:
    """a * b + c rounded once to F32; all arguments hold numbers of F32.

    The product is exact in float64. The sum is rounded to odd (an inexact sum goes to the
    neighbour with an odd last bit), after which rounding to F32 cannot be misled.
    """
    with np.errstate(all="ignore"):
        product, c = np.broadcast_arrays(np.asarray(a) * b, np.asarray(c, np.float64))
        total = product + c
        part = total - product
        error = (product - (total - part)) + (c - part)
        even = (np.ascontiguousarray(total).view(np.int64).reshape(total.shape) & 1) == 0
        inexact = np.isfinite(total) & (error != 0)
        odd = np.nextafter(total, np.copysign(np.inf, error))
    return nearest(np.where(inexact & even, odd, total), "F32")


def _momentum(
    grad: np.ndarray, momentum: np.ndarray, beta: float, nesterov: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The update A and the new momentum, both as numbers of F32."""
    decay, fresh = single(beta), single(1.0 - beta)  # 1 - beta in double, then rounded
    with np.errstate(all="ignore"):
        moved = fma_single(momentum, decay, nearest(fresh * grad, "F32"))
        update = fma_single(grad, fresh, nearest(decay * moved, "F32")) if nesterov else moved
    return update, moved


def momentum_update(
    grad: Tensor, momentum: Tensor, *, beta: float, nesterov: bool
) -> dict[str, Tensor]:
    """m' = fma(m, beta, round((1-beta) g)); A = fma(g, 1-beta, round(beta m')), or m' without
    nesterov. A is made from the F32 m' also where the stored momentum is rounded to BF16.

    grad, momentum [rows, hd] -> update (A) [rows, hd] F32, momentum [rows, hd]
    """
    update, moved = _momentum(grad.decode(), momentum.decode(), beta, nesterov)
    return {"update": encode(update, "F32"), "momentum": encode(moved, momentum.dtype)}


def _scaled(update, row_scale, col_scale):
    """The scaled matrix x and the norms of its rows."""
    x = row_scale[:, None] * update * col_scale
    return x, np.sqrt(np.sum(x**2, axis=1))


def _row_step(update, row_scale, col_scale, eps):
    """Row norms of the scaled matrix x, the new row scales, and the matrix with rows of norm 1."""
    x, norm = _scaled(update, row_scale, col_scale)
    inverse = 1.0 / (norm + eps)
    return norm, row_scale * inverse, x * inverse[:, None]


def _column_step(col_scale, sum_of_squares, eps):
    """col_scale / (norm + eps); a column of zeros keeps its scale."""
    return np.where(sum_of_squares == 0, col_scale, col_scale / (np.sqrt(sum_of_squares) + eps))


def _finalize(update, row_scale, col_scale, eps, alpha):
    """The scaled matrix with rows of norm alpha."""
    x, norm = _scaled(update, row_scale, col_scale)
    return x * (alpha / (norm + eps))[:, None]


def sinkhorn_step(
    update: Tensor, row_scale: Tensor, col_scale: Tensor, *, eps: float
) -> dict[str, Tensor]:
    """One row step: x = row_scale * A * col_scale, row_norm = |x_r| before it, row_scale divided
    by row_norm + eps, and the squares of the normalised x summed per column (one partial, P = 1).

    update [rows, hd], row_scale [rows], col_scale [hd]
    -> row_norm, row_scale [rows], col_partial [P, hd]
    """
    with np.errstate(all="ignore"):
        norm, scale, x = _row_step(
            update.decode(), row_scale.decode(), col_scale.decode(), single(eps)
        )
        squares = np.sum(x**2, axis=0)[None]
    return {
        "row_norm": encode(norm, "F32"),
        "row_scale": encode(scale, "F32"),
        "col_partial": encode(squares, "F32"),
    }


def sinkhorn_step_reduce(
    col_partial: Tensor, col_scale: Tensor | None = None, *, eps: float | None = None
) -> dict[str, Tensor]:
    """The sum of the partials; with col_scale also the column step.

    col_partial [P, hd], col_scale [hd] -> col_sumsq, col_scale [hd]
    """
    with np.errstate(all="ignore"):
        total = col_partial.decode().sum(axis=0)
        outputs = {"col_sumsq": encode(total, "F32")}
        if col_scale is not None:
            scale = _column_step(col_scale.decode(), total, single(eps))
            outputs["col_scale"] = encode(scale, "F32")
    return outputs


def sinkhorn_finalize(
    update: Tensor, row_scale: Tensor, col_scale: Tensor, *, eps: float, alpha: float
) -> dict[str, Tensor]:
    """out = x * alpha / (|x_r| + eps): every row gets norm alpha.

    update [rows, hd], row_scale [rows], col_scale [hd] -> out [rows, hd]
    """
    with np.errstate(all="ignore"):
        out = _finalize(
            update.decode(), row_scale.decode(), col_scale.decode(), single(eps), single(alpha)
        )
    return {"out": encode(out, "F32")}


def live_rows(update: np.ndarray, tau: float) -> np.ndarray:
    """Rows whose norm is above tau * the mean norm of all rows. Rows of zeros never are."""
    norms = np.sqrt(np.sum(update**2, axis=1))
    return norms > tau * np.sum(norms) / max(1, norms.size)


def _step(
    weight: Tensor,
    grad: np.ndarray,
    momentum: Tensor,
    *,
    lr: float,
    eps: float,
    beta: float = 0.95,
    nesterov: bool = True,
    repeat: int = 5,
    tau: float = 1e-3,
    gamma: float = 0.18,
    alpha: float | None = None,
) -> dict[str, Tensor]:
    """The new weight and momentum. Rows that are not live have scale 0."""
    update, moved = _momentum(grad, momentum.decode(), beta, nesterov)
    width = update.shape[1]
    alpha = math.sqrt(width) if alpha is None else alpha
    with np.errstate(all="ignore"):
        row_scale = np.where(live_rows(update, single(tau)), 1.0, 0.0)
        col_scale = np.ones(width)
        for _ in range(repeat):
            _, row_scale, x = _row_step(update, row_scale, col_scale, single(eps))
            col_scale = _column_step(col_scale, np.sum(x**2, axis=0), single(eps))
        change = _finalize(update, row_scale, col_scale, single(eps), single(alpha))
        moved_weight = weight.decode() - single(lr * gamma) * change
    return {
        "weight": encode(moved_weight, weight.dtype),
        "momentum": encode(moved, momentum.dtype),
    }


def optimizer_step(
    weight: Tensor, grad: Tensor, momentum: Tensor, **constants
) -> dict[str, Tensor]:
    """One step of a table: momentum, live rows, `repeat` row and column steps, a last row step to
    norm alpha (default sqrt(hd)), W - (lr gamma) * that. The momentum of all rows is kept.
    `constants` are those of _step.

    weight, grad, momentum [rows, hd] -> weight, momentum [rows, hd]
    """
    return _step(weight, grad.decode(), momentum, **constants)


def _checked_rows(unique_rows: Tensor, rows: int) -> np.ndarray:
    """Ascending, no row twice, all inside the table."""
    wanted = unique_rows.decode()
    if np.any(wanted < 0) or np.any(wanted >= rows) or np.any(np.diff(wanted) <= 0):
        raise ValueError(f"'unique_rows': not strictly ascending within 0..{rows - 1}")
    return wanted


def optimizer_step_sparse(
    weight: Tensor, unique_rows: Tensor, grad_rows: Tensor, momentum: Tensor, **constants
) -> dict[str, Tensor]:
    """optimizer_step with a gradient that is zero outside unique_rows: same bits. Every row takes
    part, because its momentum decays and moves it.

    weight, momentum [rows, hd], unique_rows [U] ascending, grad_rows [U, hd]
    -> weight, momentum [rows, hd]
    """
    grad = np.zeros(weight.shape)
    grad[_checked_rows(unique_rows, weight.shape[0])] = grad_rows.decode()
    return _step(weight, grad, momentum, **constants)


def optimizer_step_lazy(
    weight: Tensor, unique_rows: Tensor, grad_rows: Tensor, momentum: Tensor, **constants
) -> dict[str, Tensor]:
    """Another rule, not another way to compute the same: optimizer_step of the touched rows as if
    they were the whole table (also for the mean norm and the columns). All other rows of weight
    and momentum keep their bits.

    weight, momentum [rows, hd], unique_rows [U] ascending, grad_rows [U, hd]
    -> weight, momentum [rows, hd]
    """
    touched = _checked_rows(unique_rows, weight.shape[0])
    part = optimizer_step(
        Tensor(weight.dtype, weight.data[touched]),
        grad_rows,
        Tensor(momentum.dtype, momentum.data[touched]),
        **constants,
    )
    outputs = {}
    for name, whole in (("weight", weight), ("momentum", momentum)):
        data = whole.data.copy()
        data[touched] = part[name].data
        outputs[name] = Tensor(whole.dtype, data)
    return outputs
