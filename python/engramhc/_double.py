"""Operators on fp64 arrays of the host: the NumPy reference without its roundings.

Only inside `engramhc.implementation("*", "reference")`, for gradients by finite differences.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._arrays import dtype_of, framework_of


def takes(forced: str, inputs: tuple) -> bool:
    """Whether a call with these arrays is for the reference."""
    return forced == "reference" and any(
        str(getattr(array, "dtype", "")).endswith("float64") and dtype_of(array) is None
        for value in inputs
        for array in (value if isinstance(value, (list, tuple)) else (value,))
    )


def run(op: Any, inputs: tuple, attributes: tuple, out: tuple | None) -> tuple:
    """All outputs by position; those given are written."""
    from .reference import REFERENCE
    from .reference.dtypes import unrounded

    given = dict(_named(op.inputs, inputs))
    values = {a["name"]: value for a, value in zip(op.attributes, attributes) if value is not None}
    with unrounded():
        results = REFERENCE[op.name](given, values)
    framework = framework_of(next(value for value in inputs if value is not None))
    made = []
    for table, target in zip(op.outputs, out or (None,) * len(op.outputs)):
        result = results.get(table["name"])
        array = None if result is None else framework.from_numpy(result.data)
        if target is not None and array is not None:
            target[...] = array
            array = target
        made.append(array)
    return tuple(made)


def _named(tables: list[dict], arrays: tuple) -> Any:
    for table, value in zip(tables, arrays):
        if table["is_list"]:
            stem = table["name"].partition(".")[0]
            yield from ((f"{stem}.{i}", _tagged(array)) for i, array in enumerate(value or ()))
        elif value is not None:
            yield table["name"], _tagged(value)


def _tagged(array: Any) -> Any:
    from .reference.dtypes import Tensor, tensor

    data = np.ascontiguousarray(framework_of(array).to_numpy(array))
    return Tensor("F64", data) if data.dtype == np.float64 else tensor(data)
