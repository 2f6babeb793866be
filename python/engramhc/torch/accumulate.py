"""The running gradient of a residual that several functions share, as an object."""

from __future__ import annotations

import torch

from engramhc.errors import AliasError


class GradAccumulator:
    """One buffer for the gradient of `residual`, for `mhc_pre` and `mhc_post` of a sublayer.

        acc = GradAccumulator(residual)
        x, mix = mhc_pre(residual, ..., grad_acc=acc)
        new = mhc_post(layer(x), residual, *mix, grad_acc=acc)

    In the backward each of them adds to the buffer, `mhc_pre` before its only rounding, and the sum
    becomes the gradient of `residual`. The order does not matter, nor whether all of them take
    part. `dtype` is that of the buffer: that of the residual, or fp32.
    """

    def __init__(self, residual: torch.Tensor, *, dtype: torch.dtype | None = None):
        self.source = residual
        self.dtype = dtype or residual.dtype
        self.buffer: torch.Tensor | None = None
        self.residual = _Shared.apply(residual, self)

    def share(self, name: str, residual: torch.Tensor) -> torch.Tensor:
        """What a function is to use in place of `residual`."""
        if residual is not self.source:
            raise AliasError(
                f"{name}: tensor 'residual': expected the tensor that grad_acc was made for, got another"
            )
        return self.residual

    def added_to(self, targets):
        return targets if self.buffer is None else {**targets, "residual": self.buffer}

    def take(self, got) -> None:
        """Takes over the gradient that an operator made."""
        gradient = got["residual"]
        if self.buffer is None:
            self.buffer = gradient.to(self.dtype)
        elif gradient is not self.buffer:
            self.buffer.add_(gradient)
        got["residual"] = None


class _Shared(torch.autograd.Function):
    """The residual itself; its backward runs when all who use it are done."""

    @staticmethod
    def forward(ctx, residual, accumulator):
        ctx.accumulator = accumulator
        ctx.set_materialize_grads(False)
        return residual.view_as(residual)

    @staticmethod
    def backward(ctx, gradient):
        accumulator = ctx.accumulator
        total, accumulator.buffer = accumulator.buffer, None
        if total is None:
            return gradient, None
        total = total.to(accumulator.source.dtype)
        return (total if gradient is None else total + gradient), None
