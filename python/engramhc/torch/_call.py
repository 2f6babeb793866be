"""Calls of the library's operators by the names of their tables.

Nothing is checked here on the way: the library refuses what breaks an operator's contract, and then
there is time to see whether a copy helps.
"""

from __future__ import annotations

import functools

import torch

from engramhc import _core
from engramhc.errors import Error

from . import _double


class Table:
    """An operator of the library and the positions of its tensors and attributes."""

    def __init__(self, name: str):
        self.operator = _core.operator(name)
        self.inputs = tuple(t["name"].partition(".")[0] for t in self.operator.inputs)
        self.outputs = tuple(t["name"].partition(".")[0] for t in self.operator.outputs)
        self.attributes = tuple(a["name"] for a in self.operator.attributes)


table = functools.cache(Table)


def fill(op: str, tensors: tuple, values: tuple, out: tuple) -> None:
    """Runs an operator on tensors and attributes in the order of its table; the last may be left out."""
    known = table(op)
    operator = known.operator
    if len(tensors) < len(known.inputs):
        tensors += (None,) * (len(known.inputs) - len(tensors))
    if len(out) < len(known.outputs):
        out += (None,) * (len(known.outputs) - len(out))
    try:
        operator.fill(op, tensors, values, out)
    except Error:
        if _double.takes(op, tensors):
            return _double.fill(
                op,
                dict(zip(known.inputs, tensors)),
                dict(zip(known.outputs, out)),
                dict(zip(known.attributes, values)),
            )
        copies = contiguous(tensors)
        if copies is None:
            raise
        operator.fill(op, copies, values, out)


def infer(op: str, tensors: tuple, values: tuple) -> None:
    """Lets the library check inputs and attributes, which need not be in memory."""
    known = table(op)
    tensors += (None,) * (len(known.inputs) - len(tensors))
    known.operator.infer(op, tensors, values)


def run(op: str, inputs: dict, outputs: dict, attributes: dict) -> None:
    """Runs an operator into the outputs that there are. Entries that its table lacks are ignored."""
    known = table(op)
    values = tuple([attributes.get(name) for name in known.attributes])
    given = tuple([inputs.get(name) for name in known.inputs])
    out = tuple([outputs.get(name) for name in known.outputs])
    try:
        known.operator.fill(op, given, values, out)
    except Error:
        if _double.takes(op, given):
            return _double.fill(op, inputs, outputs, attributes)
        copies = contiguous(given)
        if copies is None:
            raise
        known.operator.fill(op, copies, values, out)


def made(op: str, inputs: dict, attributes: dict, outputs: dict | None = None) -> dict:
    """All outputs of an operator by name; those given are written, the others allocated."""
    known = table(op)
    values = tuple([attributes.get(name) for name in known.attributes])
    given = tuple([inputs.get(name) for name in known.inputs])
    out = None if outputs is None else tuple([outputs.get(name) for name in known.outputs])
    try:
        results = known.operator(op, given, values, out)
    except Error:
        if _double.takes(op, given):
            return _double.made(op, inputs, attributes, outputs or {})
        copies = contiguous(given)
        if copies is None:
            raise
        results = known.operator(op, copies, values, out)
    return {name: result for name, result in zip(known.outputs, results) if result is not None}


def contiguous(tensors: tuple) -> tuple | None:
    """The tensors with contiguous copies of those that are not; None when all are."""
    copies = tuple(map(_contiguous, tensors))
    return None if all(a is b for a, b in zip(copies, tensors)) else copies


def _contiguous(value):
    if isinstance(value, (list, tuple)):
        copies = [_contiguous(item) for item in value]
        return value if all(a is b for a, b in zip(copies, value)) else copies
    if isinstance(value, torch.Tensor) and not value.is_contiguous():
        return value.contiguous()
    return value


def renamed(error: Error, name: str, names: dict[str, str]) -> Error:
    """The same error of the function `name`, whose signature calls tensors and attributes by `names`."""
    _, _, text = str(error).partition(": ")
    for theirs, ours in names.items():
        text = text.replace(f"'{theirs}'", f"'{ours}'")
    return type(error)(f"{name}: {text}")
