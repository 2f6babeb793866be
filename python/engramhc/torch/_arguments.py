"""Arguments as users write them, made those of the operators."""

from __future__ import annotations

import torch

_ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)


def missing_eps(name):
    return TypeError(f"{name}() missing keyword-only argument: 'layer_norm_eps', with layer_norm_weight")


def same_type(tensor, residual):
    """A layer's output in the type of the streams, rounded at most once."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype is not residual.dtype:
        if tensor.dtype in _ACTIVATIONS and residual.dtype in _ACTIVATIONS:
            return tensor.to(residual.dtype)
    return tensor
