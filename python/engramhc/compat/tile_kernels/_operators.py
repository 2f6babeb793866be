"""Operators of the library by the names of their tables, on the tensors of a TileKernels call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import _core


def run(
    title: str,
    name: str,
    inputs: dict[str, Any],
    outputs: dict[str, Tensor | None] | None = None,
    **attributes: Any,
) -> dict[str, Tensor | None]:
    """Runs an operator; outputs that are not given are made. `title` is what errors say."""
    op, outputs = _core.operator(name), outputs or {}
    results = op(
        title,
        tuple(inputs.get(tensor["name"]) for tensor in op.inputs),
        tuple(attributes.get(attribute["name"]) for attribute in op.attributes),
        out=tuple(outputs.get(tensor["name"]) for tensor in op.outputs),
    )
    return {tensor["name"]: result for tensor, result in zip(op.outputs, results)}


def overloaded(new: Callable, old: Callable, numbers: tuple[str, ...]) -> Callable:
    """A function of two signatures: `new` (2.x) takes a call that binds to it and has no tensor where
    it has `numbers`, `old` (1.x) every other."""
    signature = inspect.signature(new)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return old(*args, **kwargs)
        is_old = any(isinstance(given.get(number), Tensor) for number in numbers)
        return (old if is_old else new)(*args, **kwargs)

    chosen.__name__, chosen.__doc__ = new.__name__, new.__doc__
    return chosen


def flat(mix: Tensor, streams: int) -> Tensor:
    """Coefficients [..., n] that may be [..., n, 1]."""
    return mix.squeeze(-1) if mix.shape[-1] == 1 and mix.dim() > 1 and mix.shape[-2] == streams else mix


def square(comb: Tensor) -> Tensor:
    """[..., n, n] of maps that may be [..., n*n]; the same memory."""
    if comb.shape[-1] == 1 or comb.dim() < 2 or comb.shape[-1] != comb.shape[-2]:
        n = int(comb.shape[-1] ** 0.5)
        if n * n == comb.shape[-1]:
            return comb.unflatten(-1, (n, n))
    return comb


class _HandedOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.storage = x.untyped_storage()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        buffer = getattr(ctx.storage, "grad_from_mhc_post", None)
        if buffer is None:
            return grad
        buffer.view_as(grad).add_(grad)
        return None


def handed_over(x: Tensor) -> Tensor:
    """x, whose gradient goes into the buffer that the caller has set as `grad_from_mhc_post` on its
    storage by the time of the backward, if there is one."""
    return _HandedOver.apply(x) if x.requires_grad and torch.is_grad_enabled() else x
