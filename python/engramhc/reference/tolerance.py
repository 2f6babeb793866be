"""The rule by which an output is compared with an expected tensor: [ulp, abs, share].

Every element has |got - expected| <= ulp * (spacing of the dtype at expected) + abs, and at most
share * (number of elements), rounded up, have |got - expected| > abs. Equal infinities are equal,
NaN equals NaN, and [0, 0] means the same bits (any NaN for NaN).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .dtypes import INTEGERS, Tensor, encode, spacing


@dataclass(frozen=True)
class Comparison:
    passed: bool
    largest_error: float
    largest_ulp: float
    text: str


def default_tolerance(expected: Tensor) -> list[float]:
    """The rule for an output without a stated tolerance."""
    if expected.dtype in INTEGERS or expected.dtype.startswith("F8"):
        return [0, 0]
    values = np.abs(expected.decode())
    finite = values[np.isfinite(values)]
    absolute = 2.0**-22 * float(finite.max(initial=0.0))
    return [4, absolute] if expected.dtype == "F32" else [1, absolute, 0.01]


def comparable(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Partial sums (`*_partial`) summed over their first axis, whose length is free."""
    with np.errstate(all="ignore"):
        return {
            name: encode(t.decode().sum(axis=0), t.dtype) if name.endswith("_partial") else t
            for name, t in outputs.items()
        }


def compare(got: Tensor, expected: Tensor, tolerance=None) -> Comparison:
    """Compares two tensors. `abs` of the tolerance may be an array of the tensor's shape."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return Comparison(False, math.inf, math.inf, f"expected {expected}, got {got}")
    ulp, absolute, *rest = default_tolerance(expected) if tolerance is None else tolerance
    share = rest[0] if rest else 1
    integer = expected.dtype in INTEGERS
    left, right = got.decode(), expected.decode()
    if integer:
        same = left == right
    else:
        same = (np.isnan(left) & np.isnan(right)) | (left == right)
        if ulp == 0 and np.all(np.asarray(absolute) == 0):
            same &= np.isnan(left) | (np.signbit(left) == np.signbit(right))
    # Elements of which one is not finite are either the same or infinitely far apart.
    finite = np.isfinite(left) & np.isfinite(right)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(same, 0.0, np.where(finite, np.abs(left - right), np.inf))
    unit = (
        np.ones(right.shape)
        if integer or expected.dtype == "F8_E8M0"
        else spacing(np.where(finite, right, 0.0), expected.dtype)
    )
    too_far = ~same & ~(error <= ulp * unit + absolute)
    if ulp == 0 and np.all(np.asarray(absolute) == 0):
        too_far = ~same
    above = int(np.count_nonzero(error > absolute))
    allowed = math.ceil(share * error.size)
    largest = float(error.max(initial=0.0))
    largest_ulp = float((error / unit).max(initial=0.0))
    if too_far.any():
        worst = np.unravel_index(np.argmax(np.where(too_far, error / unit, -1.0)), error.shape)
        place = ",".join(map(str, worst))
        text = (
            f"{int(too_far.sum())} of {error.size} elements too far off, e.g. at [{place}]: "
            f"expected {right[worst]!r}, got {left[worst]!r}"
        )
        return Comparison(False, largest, largest_ulp, text)
    if above > allowed:
        text = f"{above} of {error.size} elements differ, at most {allowed} may"
        return Comparison(False, largest, largest_ulp, text)
    return Comparison(True, largest, largest_ulp, f"largest error {largest:.3g}")
