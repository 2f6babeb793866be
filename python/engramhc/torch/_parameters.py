"""Gradients that go to a parameter's `main_grad` instead of autograd.

A parameter whose `main_grad` is a tensor gets its fp32 gradient added there in place, and autograd
receives None. One that also has `grad_added_to_main_grad` (Megatron) gets that set to True, and
autograd receives zeros of the parameter's type, so that its hooks fire.
"""

from __future__ import annotations

import torch

NONE: dict = {}


def targets(parameters) -> dict[str, torch.Tensor]:
    """What gradients are to be added to, by input name."""
    return {
        name: parameter.main_grad
        for name, parameter in parameters.items()
        if isinstance(getattr(parameter, "main_grad", None), torch.Tensor)
        and parameter.is_leaf
        and parameter.requires_grad
    }


def fits(target, tensor, is_weight) -> bool:
    """Whether the library can add a gradient of `tensor` to it directly."""
    return (
        target.dtype is (torch.float32 if is_weight else tensor.dtype)
        and target.shape == tensor.shape
        and target.is_contiguous()
    )


def hand_over(parameters, targets, got) -> None:
    """Gradients that the library did not add to their targets are added now, and replaced by what
    autograd is to see."""
    for name, target in targets.items():
        parameter = parameters[name]
        if got[name] is not target:
            target.add_(got[name])
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = True
            got[name] = torch.zeros_like(parameter)
        else:
            got[name] = None
