"""Operators on fp64 tensors: the NumPy reference without its roundings.

Only on the CPU and inside `engramhc.implementation("*", "reference")`, for gradcheck.
"""

from __future__ import annotations

import torch

from engramhc import _core
from engramhc.reference import REFERENCE
from engramhc.reference.dtypes import Tensor, unrounded


def takes(op, tensors) -> bool:
    """Whether a call with these tensors is for the reference."""
    return _core.forced(op) == "reference" and any(
        isinstance(t, torch.Tensor) and t.dtype is torch.float64 and t.device.type == "cpu"
        for t in tensors
    )


def made(op, inputs, attributes, outputs) -> dict[str, torch.Tensor]:
    """All outputs by name; those given are written."""
    outputs = dict(outputs)
    for name, result in _reference(op, inputs, attributes).items():
        if outputs.get(name) is None:
            outputs[name] = result
        else:
            outputs[name].copy_(result)
    return outputs


def fill(op, inputs, outputs, attributes) -> None:
    made(op, inputs, attributes, outputs)


def _reference(op, inputs, attributes):
    from . import _call

    known = _call.table(op)
    given = {name: _tagged(inputs[name]) for name in known.inputs if inputs.get(name) is not None}
    values = {n: attributes[n] for n in known.attributes if attributes.get(n) is not None}
    with unrounded():
        results = REFERENCE[op](given, values)
    return {name: torch.from_numpy(result.data.copy()) for name, result in results.items()}


def _tagged(tensor):
    array = tensor.detach().contiguous().numpy()
    return Tensor("F64", array) if tensor.dtype is torch.float64 else array
