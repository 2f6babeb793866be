"""Sinkhorn: a positive matrix whose rows and columns are brought to sum 1 in turn.

Three conventions, all with rows along the last axis (of comb: the output streams):
    deepseek  y = softmax(row) + eps; column; then (repeat - 1) times row, column;
              a half-step is y / (sum + eps)
    megatron  y = exp(logit - row maximum); repeat times row, column;
              a half-step is y / max(sum, eps), and a clamped sum has no gradient
    log       the same as megatron without eps, on logarithms
"""

from __future__ import annotations

import numpy as np

from .dtypes import Tensor, encode, single

ROW, COLUMN = -1, -2


def line_sums(y: np.ndarray, axis: int) -> np.ndarray:
    return np.sum(y, axis=axis, keepdims=True)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Along rows, with the row maximum subtracted."""
    exponentials = np.exp(logits - logits.max(axis=ROW, keepdims=True))
    return exponentials / line_sums(exponentials, ROW)


def half_steps(repeat: int, convention: str) -> list[int]:
    """The axis of every half-step. The softmax of `deepseek` is its first row step."""
    steps = [ROW, COLUMN] * repeat
    return steps[1:] if convention == "deepseek" else steps


def log_sums(logs: np.ndarray, axis: int) -> np.ndarray:
    largest = logs.max(axis=axis, keepdims=True)
    return largest + np.log(line_sums(np.exp(logs - largest), axis))


def starting_point(logits: np.ndarray, convention: str) -> np.ndarray:
    """What the half-steps start from, before eps is added."""
    if convention == "deepseek":
        return softmax(logits)
    return np.exp(logits - logits.max(axis=ROW, keepdims=True))


def divisors(sums: np.ndarray, eps: float, convention: str) -> np.ndarray:
    return sums + eps if convention == "deepseek" else np.maximum(sums, eps)


def iterates(
    logits: np.ndarray, repeat: int, eps: float, convention: str
) -> list[tuple[int, np.ndarray, np.ndarray | None]]:
    """Axis, result and sums (of `log`: none) of every half-step."""
    steps = []
    if convention == "log":
        for axis in half_steps(repeat, convention):
            logits = logits - log_sums(logits, axis)
            steps.append((axis, np.exp(logits), None))
        return steps
    y = starting_point(logits, convention) + (eps if convention == "deepseek" else 0.0)
    for axis in half_steps(repeat, convention):
        sums = line_sums(y, axis)
        y = y / divisors(sums, eps, convention)
        steps.append((axis, y, sums))
    return steps


def sinkhorn(logits: np.ndarray, repeat: int, eps: float, convention: str) -> np.ndarray:
    """comb [..., n, n] of the logits [..., n, n]."""
    return iterates(logits, repeat, eps, convention)[-1][1]


def sinkhorn_fwd(
    comb_logits: Tensor, *, repeat: int, eps: float, convention: str = "deepseek"
) -> dict[str, Tensor]:
    """comb_logits [..., n, n] -> comb [..., n, n]."""
    return {"comb": encode(sinkhorn(comb_logits.decode(), repeat, single(eps), convention), "F32")}


def sinkhorn_gradient(
    grad: np.ndarray, logits: np.ndarray, repeat: int, eps: float, convention: str
) -> np.ndarray:
    """Gradient of the logits of sum(grad * sinkhorn(logits)), half-step by half-step backwards.

    A half-step y' = y / divisor passes on (g - w) / divisor with w the sum of g y' over the line,
    or g / divisor where the divisor is a clamped sum. On logarithms it passes on g - y' sum(g).
    The row maximum is a constant.
    """
    steps = iterates(logits, repeat, eps, convention)
    if convention == "log":
        grad = grad * steps[-1][1]
        for axis, y, _ in reversed(steps):
            grad = grad - y * line_sums(grad, axis)
        return grad
    for axis, y, sums in reversed(steps):
        pulled = line_sums(grad * y, axis)
        if convention == "megatron":
            pulled = np.where(sums < eps, 0.0, pulled)
        grad = (grad - pulled) / divisors(sums, eps, convention)
    start = starting_point(logits, convention)
    if convention == "megatron":
        return grad * start
    return (grad - line_sums(grad * start, ROW)) * start


def sinkhorn_bwd(
    grad_comb: Tensor,
    comb_logits: Tensor,
    *,
    repeat: int,
    eps: float,
    convention: str = "deepseek",
) -> dict[str, Tensor]:
    """Backward of sinkhorn_fwd: grad_comb, comb_logits [..., n, n] -> grad_comb_logits."""
    gradient = sinkhorn_gradient(
        grad_comb.decode(), comb_logits.decode(), repeat, single(eps), convention
    )
    return {"grad_comb_logits": encode(gradient, "F32")}
