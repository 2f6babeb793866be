"""Operators on fp64 tensors: the NumPy reference without its roundings.

Only on the CPU and inside `engramhc.implementation("*", "reference")`, for gradcheck.
"""

from __future__ import annotations

import torch

from engramhc.reference import REFERENCE
from engramhc.reference.dtypes import Tensor, unrounded


def takes(inputs) -> bool:
    """Whether these inputs are fp64 tensors of the CPU."""
    return any(
        isinstance(t, torch.Tensor) and t.dtype is torch.float64 and t.device.type == "cpu"
        for t in inputs.values()
    )


def made(op, inputs, attrs, outputs):
    results = _reference(op, inputs, attrs)
    for name, result in results.items():
        if name in outputs:
            outputs[name].copy_(result)
        else:
            outputs[name] = result
    return outputs


def run(op, inputs, outputs, attrs) -> None:
    made(op, inputs, attrs, outputs)


def _reference(op, inputs, attrs):
    given = {name: _tagged(t) for name, t in inputs.items() if t is not None}
    attrs = {name: value for name, value in attrs.items() if value is not None}
    with unrounded():
        results = REFERENCE[op](given, attrs)
    return {name: torch.from_numpy(result.data.copy()) for name, result in results.items()}


def _tagged(tensor):
    array = tensor.detach().contiguous().numpy()
    return Tensor("F64", array) if tensor.dtype is torch.float64 else array
