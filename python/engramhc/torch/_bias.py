"""A layer's output plus its bias, rounded once to the type of the streams."""

from __future__ import annotations

import torch

from . import _parameters


def add_bias(layer_output, bias, dtype):
    """round(layer_output [..., d] + bias [d]) to `dtype`, the sum in fp32."""
    return _AddBias.apply(layer_output, bias, dtype)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer_output, bias, dtype):
        ctx.types = layer_output.dtype, bias.dtype
        ctx.parameter = bias if bias.is_leaf else None
        total = torch.promote_types(torch.float32, layer_output.dtype)
        return (layer_output.to(total) + bias.to(total)).to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        output_type, bias_type = ctx.types
        total = torch.promote_types(torch.float32, output_type)
        summed = gradient.to(total).flatten(0, -2).sum(0) if gradient.dim() > 1 else gradient.to(total)
        got = {"bias": summed}
        if ctx.parameter is not None:
            parameters = {"bias": ctx.parameter}
            targets = _parameters.targets(parameters)
            if targets:
                _parameters.hand_over(parameters, targets, got)
                return gradient.to(output_type), got["bias"], None
        return gradient.to(output_type), summed.to(bias_type), None
