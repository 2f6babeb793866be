"""Tensors with a dtype tag, and exact conversion between storage bits and float64.

NumPy knows neither bfloat16 nor the 8-bit floats, so a tensor is the name of its type (spelled as
in safetensors files) beside an array of its storage:

    F32 float32   F16 float16   BF16 uint16   F8_E4M3 uint8   F8_E8M0 uint8
    I64 int64     I32 int32     U8 uint8      BOOL bool

Every floating-point type widens exactly to float64. Narrowing rounds once, to nearest even.
Inside `unrounded()` it does not: outputs are F64 tensors, which exist nowhere else.
"""

from __future__ import annotations

import contextlib
import contextvars
from dataclasses import dataclass

import numpy as np

STORAGE = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
INTEGERS = ("I64", "I32", "U8", "BOOL")

# Significand bits (with the hidden one), smallest normal exponent and largest finite value.
_FORMATS = {
    "F32": (24, -126, float(np.finfo(np.float32).max)),
    "F16": (11, -14, 65504.0),
    "BF16": (8, -126, (2.0 - 2.0**-7) * 2.0**127),
    "F8_E4M3": (4, -6, 448.0),
    "TF32": (11, -126, (2.0 - 2.0**-10) * 2.0**127),  # no tensor has it; operands are rounded to it
}
_PLAIN = {
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}


_unrounded = contextvars.ContextVar("unrounded", default=False)


@contextlib.contextmanager
def unrounded():
    """Formulas as they are in float64, for gradients by finite differences."""
    token = _unrounded.set(True)
    try:
        yield
    finally:
        _unrounded.reset(token)


@dataclass(frozen=True, eq=False)
class Tensor:
    """An array of storage elements and the name of its type."""

    dtype: str
    data: np.ndarray

    def __post_init__(self):
        if self.data.dtype != STORAGE[self.dtype]:
            raise ValueError(
                f"{self.dtype} is stored as {STORAGE[self.dtype]}, not {self.data.dtype}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def decode(self) -> np.ndarray:
        """float64 of the same values; integers as int64, BOOL as bool."""
        if self.dtype == "BOOL":
            return self.data
        if self.dtype in INTEGERS:
            return self.data.astype(np.int64)
        if self.dtype == "F8_E4M3":
            return _E4M3[self.data]
        if self.dtype == "F8_E8M0":
            return _E8M0[self.data]
        data = self.data
        if self.dtype == "BF16":
            data = (np.ascontiguousarray(data).astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            return data.astype(np.float64)

    def __repr__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def tensor(array) -> Tensor:
    """Tags a NumPy array of a type that NumPy itself knows; a Tensor stays what it is."""
    if isinstance(array, Tensor):
        return array
    array = np.asarray(array)
    if array.dtype.name not in _PLAIN:
        raise ValueError(f"no tensor type for NumPy's {array.dtype}; use encode(values, dtype)")
    return Tensor(_PLAIN[array.dtype.name], array)


def _e4m3_values() -> np.ndarray:
    code = np.arange(128)
    exponent, fraction = code >> 3, code & 7
    positive = np.where(
        exponent == 0, fraction * 2.0**-9, (8 + fraction) * np.exp2(exponent - 10.0)
    )
    positive[127] = np.nan  # e4m3fn has no infinity, and one NaN per sign
    return np.concatenate([positive, -positive])


_E4M3 = _e4m3_values()
_E8M0 = np.concatenate([np.exp2(np.arange(255) - 127.0), [np.nan]])


def spacing(values: np.ndarray, dtype: str) -> np.ndarray:
    """Distance between neighbouring numbers of `dtype` at |values| (float64 in, float64 out)."""
    bits, smallest, largest = _FORMATS[dtype]
    magnitude = np.minimum(np.abs(values), largest)
    _, exponent = np.frexp(np.where(np.isfinite(magnitude), magnitude, 0.0))
    exponent = np.where(magnitude == 0, smallest, np.maximum(exponent - 1, smallest))
    return np.ldexp(1.0, exponent - (bits - 1))


def nearest(values, dtype: str) -> np.ndarray:
    """float64 values rounded once to the numbers of `dtype`, ties to even, too large to inf."""
    values = np.asarray(values, dtype=np.float64)
    if _unrounded.get():
        return values
    bits, smallest, largest = _FORMATS[dtype]
    with np.errstate(invalid="ignore"):
        step = spacing(values, dtype)
        rounded = np.rint(values / step) * step  # a power of two: both steps are exact
        rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, values), rounded)
    return np.where(np.isnan(values), np.nan, rounded)


def encode(values, dtype: str) -> Tensor:
    """Tensor of `dtype` nearest to `values`. F8_E4M3 saturates at +-448, others overflow to inf."""
    if dtype in INTEGERS:
        values = np.asarray(values)
        stored = values.astype(STORAGE[dtype])
        if not np.array_equal(stored, values):
            raise ValueError(f"value out of range of {dtype}")
        return Tensor(dtype, stored)
    rounded = nearest(values, dtype)
    if _unrounded.get():
        return Tensor("F64", rounded)
    if dtype == "F8_E4M3":
        rounded = np.clip(rounded, -448.0, 448.0)
        code = np.searchsorted(_E4M3[:127], np.abs(rounded)).astype(np.uint8)  # NaN sorts last: 127
        return Tensor(dtype, code | (np.signbit(rounded).astype(np.uint8) << 7))
    if dtype == "BF16":
        single = np.ascontiguousarray(rounded.astype(np.float32))
        return Tensor(dtype, (single.view(np.uint32) >> 16).astype(np.uint16))
    with np.errstate(over="ignore"):
        return Tensor(dtype, rounded.astype(STORAGE[dtype]))


def single(value: float) -> float:
    """A floating-point attribute as the formulas see it: parsed as double, rounded once to F32."""
    return float(np.float32(value))


def accumulated(target: Tensor | None, gradient: np.ndarray, dtype: str = "F32") -> Tensor:
    """target + gradient as `dtype`, or the gradient alone without a target of accumulation."""
    return encode(gradient if target is None else target.decode() + gradient, dtype)
