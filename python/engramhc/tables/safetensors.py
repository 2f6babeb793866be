"""Where the tensors of safetensors files lie, without reading them.

A file is 8 bytes of header length, a JSON header, then the tensors' bytes without a gap; a sharded
checkpoint has beside its files a `*.index.json` that says which file holds which tensor.
"""

from __future__ import annotations

import json
import math
import os
from typing import NamedTuple

from ..errors import TableError

BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
_MOST_HEADER_BYTES = 100_000_000  # as in the safetensors library


class Entry(NamedTuple):
    """A tensor inside a file."""

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


def fail(path: str | os.PathLike, expected: str, got: object) -> TableError:
    return TableError(f"table: file '{os.fspath(path)}': expected {expected}, got {got}")


def file_of_tensors(path: str | os.PathLike) -> dict[str, str]:
    """Name of every tensor -> file that holds it, of one file or of an index."""
    path = os.fspath(path)
    if not path.endswith(".json"):
        return {name: path for name in entries(path)}
    index = _json(_read(path), path)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise fail(path, "an object 'weight_map' of file names", type(files).__name__)
    return {name: os.path.join(os.path.dirname(path), file) for name, file in files.items()}


def entries(path: str) -> dict[str, Entry]:
    """Tensors of one file, whose bytes must all be there."""
    start = _read(path, 8)
    size = os.path.getsize(path)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
        raise fail(path, "a safetensors header", f"{length} bytes of it in a file of {size}")
    header = _json(_read(path, 8 + length)[8:], path)
    if not isinstance(header, dict):
        raise fail(path, "a JSON object as header", type(header).__name__)
    header.pop("__metadata__", None)
    return {name: _entry(path, name, tensor, 8 + length, size) for name, tensor in header.items()}


def _entry(path: str, name: str, tensor: object, data_start: int, size: int) -> Entry:
    try:
        dtype, shape, (begin, end) = tensor["dtype"], tuple(tensor["shape"]), tensor["data_offsets"]
        bytes_of_one = BYTES[dtype]
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise fail(path, f"dtype, shape and data_offsets of '{name}'", tensor) from None
    if end - begin != math.prod(shape) * bytes_of_one or data_start + end > size:
        raise fail(path, f"bytes of {dtype}{list(shape)} '{name}'", f"{begin}..{end} of {size - data_start}")
    return Entry(path, name, dtype, shape, data_start + begin)


def _read(path: str, count: int = -1) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except OSError as error:
        raise fail(path, "a file that can be read", error.strerror) from None


def _json(text: bytes, path: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise fail(path, "JSON", error) from None
