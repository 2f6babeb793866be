"""Indices and rows as arrays of their owner: NumPy, or torch where the indices are torch's.

`gpu` is the index of a CUDA device, None for the processor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .._capi import View
from ..errors import DTypeError, ShapeError

_INDEX_TYPES = {"int32": "I32", "int64": "I64"}
_ROW_TYPES = {
    "bf16": "BF16",
    "bfloat16": "BF16",
    "fp16": "F16",
    "float16": "F16",
    "fp32": "F32",
    "float32": "F32",
}


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def gpu_of(array: Any) -> int | None:
    return array.device.index if is_torch(array) and array.is_cuda else None


# --- what comes in ------------------------------------------------------------------------------


def indices(idx: Any, heads: int | None) -> Any:
    """A contiguous array of the indices."""
    if not is_torch(idx):
        idx = np.asarray(idx, np.int64) if isinstance(idx, (list, tuple)) else _numpy_of(idx, "idx")
    if _name_of(idx.dtype) not in _INDEX_TYPES:
        raise DTypeError(f"lookup: tensor 'idx': expected I32 or I64, got {idx.dtype}")
    if idx.ndim < 1 or (heads is not None and idx.shape[-1] % heads):
        expected = "[..., C]" if heads is None else f"[..., k*{heads}]"
        raise ShapeError(f"lookup: tensor 'idx': expected {expected}, got {list(idx.shape)}")
    return _contiguous(idx)


def values(array: Any) -> Any:
    """Rows to store."""
    return _contiguous(array.detach() if is_torch(array) else _numpy_of(array, "values"))


def _numpy_of(array: Any, name: str) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    try:
        return np.from_dlpack(array)
    except (AttributeError, TypeError, BufferError, RuntimeError) as error:
        raise DTypeError(f"table: tensor '{name}': expected an array, got {error}") from None


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _contiguous(array: Any) -> Any:
    return array.contiguous() if is_torch(array) else np.ascontiguousarray(array)


def row_type(dtype: Any) -> str:
    """Name of a type of rows; None is bf16."""
    name = "bf16" if dtype is None else _name_of(np.dtype(dtype) if isinstance(dtype, type) else dtype)
    if name not in _ROW_TYPES:
        raise DTypeError(f"table: attribute 'dtype': expected bf16, fp16 or fp32, got {dtype}")
    return _ROW_TYPES[name]


def check_out(out: Any, dtype: str, shape: tuple[int, ...], idx: Any) -> None:
    """`out=` must be what the lookup would have made."""
    if is_torch(out) != is_torch(idx):
        raise DTypeError("lookup: tensor 'out': expected an array of the framework of idx, got another")
    if out.dtype != _type(out, dtype):
        raise DTypeError(f"lookup: tensor 'out': expected {dtype}, got {out.dtype}")
    if tuple(out.shape) != shape:
        raise ShapeError(f"lookup: tensor 'out': expected {list(shape)}, got {list(out.shape)}")
    if not (out.is_contiguous() if is_torch(out) else out.flags.c_contiguous and out.flags.writeable):
        raise ShapeError("lookup: tensor 'out': expected contiguous memory to write to, got another layout")


# --- between devices and frameworks --------------------------------------------------------------


def to_compute(array: Any, gpu: int | None) -> Any:
    if gpu is None:
        return array.cpu() if is_torch(array) else array
    import torch

    return (array if is_torch(array) else torch.from_numpy(array)).to(torch.device("cuda", gpu))


def to_place_of(rows: Any, idx: Any, device: Any) -> Any:
    """Rows where `idx` is, or on `device`, which makes them torch's."""
    if device is not None:
        import torch

        return (rows if is_torch(rows) else as_torch(rows)).to(torch.device(device))
    if is_torch(idx):
        return rows.to(idx.device)
    if not is_torch(rows):
        return rows
    rows = rows.cpu()
    return rows.view(_bits(rows)).numpy().view(_type(idx, _ROW_TYPES[_name_of(rows.dtype)]))


def as_torch(rows: np.ndarray) -> Any:
    """Shares memory; bf16 of either form becomes torch's."""
    import torch

    if rows.dtype.itemsize == 2 and rows.dtype != np.float16:
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


def as_numpy(array: Any) -> np.ndarray:
    return array.numpy() if is_torch(array) else array


def as_bits(rows: Any, dtype: str) -> np.ndarray:
    """The memory of rows on the processor as integers."""
    if is_torch(rows):
        rows = rows.view(_bits(rows)).numpy()
    return rows.view(np.uint32 if dtype == "F32" else np.uint16)


def _bits(rows: Any) -> Any:
    import torch

    return torch.int32 if rows.dtype == torch.float32 else torch.int16


# --- memory ---------------------------------------------------------------------------------------


def _type(like: Any, dtype: str) -> Any:
    """The framework's type; NumPy has bf16 only with ml_dtypes, else rows are its bits as uint16."""
    if is_torch(like):
        import torch

        return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    if dtype != "BF16":
        return np.dtype({"F16": np.float16, "F32": np.float32}[dtype])
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)
    return np.dtype(ml_dtypes.bfloat16)


def empty(like: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    if is_torch(like):
        return like.new_empty(shape, dtype=_type(like, dtype))
    return np.empty(shape, _type(like, dtype))


def strays(idx: Any, rows: int) -> Any:
    """Where an index is neither -1 nor a row."""
    largest = rows - 1 if idx.dtype.itemsize == 8 else min(rows - 1, 2**31 - 1)
    return idx != idx.clip(-1, largest)


def where(condition: Any, value: int, array: Any) -> Any:
    return (
        array.masked_fill(condition, value)
        if is_torch(array)
        else np.where(condition, array.dtype.type(value), array)
    )


def view(array: Any, dtype: str, shape: tuple[int, ...]) -> View:
    """Contiguous memory under another shape."""
    address = array.data_ptr() if is_torch(array) else array.ctypes.data
    return View(address, dtype, shape, None, gpu_of(array))


def index_view(idx: Any) -> View:
    return view(idx, _INDEX_TYPES[_name_of(idx.dtype)], (math.prod(idx.shape[:-1]), idx.shape[-1]))


# --- streams ---------------------------------------------------------------------------------------


def on_stream(side: Any, function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """The function's result, and the event of its end; without a stream it is there."""
    if side is None:
        return function(*arguments), None
    import torch

    with torch.cuda.stream(side):
        return function(*arguments), side.record_event()


def wait_for(rows: Any, event: Any, stream: Any) -> None:
    import torch

    if not (is_torch(rows) and rows.is_cuda):
        event.synchronize()
        return
    stream = torch.cuda.current_stream(rows.device) if stream is None else stream
    stream.wait_event(event)
    rows.record_stream(stream)
