"""Engram: the optimizer that brings rows and columns of a table's update to equal norms.

Formulas: docs/ops/engram.md, 1.12. `inplace` writes into the arrays that a function updates.
"""

from __future__ import annotations

from ._arguments import Array, operator

__all__ = [
    "sinkhorn_opt_finalize", "sinkhorn_opt_full", "sinkhorn_opt_momentum", "sinkhorn_opt_reduce", "sinkhorn_opt_step",
]  # fmt: skip


def sinkhorn_opt_momentum(grad: Array, momentum: Array, *, beta: float, nesterov: bool = True, inplace: bool = False,
                          out: tuple | None = None, stream: int | None = None,
                          workspace: Array | None = None) -> tuple[Array, Array]:
    """`update F32[rows, hd], momentum` of `grad` and `momentum`, both BF16|F32[rows, hd] (1.12a)."""
    update, moved = out or (None, momentum if inplace else None)
    return operator("engram.momentum_update")(
        "sinkhorn_opt_momentum", (grad, momentum), (beta, nesterov), (update, moved), stream, workspace
    )


def sinkhorn_opt_step(update: Array, row_scale: Array, col_scale: Array, *, eps: float, inplace: bool = False,
                      out: tuple | None = None, stream: int | None = None,
                      workspace: Array | None = None) -> tuple[Array, Array, Array]:
    """`row_norm F32[rows], row_scale F32[rows], col_partial F32[P, hd]`: norms of the scaled rows, scales that
    make them 1, and squares by column then (1.12b)."""
    given = out or (None, row_scale if inplace else None, None)
    return operator("engram.sinkhorn_step")(
        "sinkhorn_opt_step", (update, row_scale, col_scale), (eps,), given, stream, workspace
    )


def sinkhorn_opt_reduce(col_partial: Array, col_scale: Array | None = None, *, eps: float | None = None,
                        inplace: bool = False, out: tuple | None = None, stream: int | None = None,
                        workspace: Array | None = None) -> tuple[Array, Array | None]:
    """`col_sumsq F32[hd], col_scale F32[hd]`: the partial sums of all rows, and with `col_scale` and `eps` the
    column scales that make them 1 (1.12c)."""
    given = out or (None, col_scale if inplace else None)
    return operator("engram.sinkhorn_step_reduce")(
        "sinkhorn_opt_reduce", (col_partial, col_scale), (eps,), given, stream, workspace
    )


def sinkhorn_opt_finalize(update: Array, row_scale: Array, col_scale: Array, *, eps: float, alpha: float,
                          inplace: bool = False, out: Array | None = None, stream: int | None = None,
                          workspace: Array | None = None) -> Array:
    """`F32[rows, hd]`: the scaled update, every row with norm alpha (1.12d)."""
    given = update if inplace and out is None else out
    return operator("engram.sinkhorn_finalize")(
        "sinkhorn_opt_finalize", (update, row_scale, col_scale), (eps, alpha), (given,), stream, workspace
    )[0]


def sinkhorn_opt_full(weight: Array, grad: Array, momentum: Array, *, lr: float, eps: float, beta: float = 0.95,
                      nesterov: bool = True, steps: int = 5, tau: float = 1e-3, gamma: float = 0.18,
                      alpha: float | None = None, inplace: bool = False, out: tuple | None = None,
                      stream: int | None = None, workspace: Array | None = None) -> tuple[Array, Array]:
    """One step, `weight, momentum` from those and `grad`, all BF16|F32[rows, hd] (1.12). Rows below tau times
    the mean norm keep their weights. `alpha` None is sqrt(hd): rows of unit RMS."""
    given = out or ((weight, momentum) if inplace else None)
    return operator("engram.optimizer_step")(
        "sinkhorn_opt_full", (weight, grad, momentum), (lr, eps, beta, nesterov, steps, tau, gamma, alpha), given,
        stream, workspace, {"repeat": "steps"},
    )  # fmt: skip
