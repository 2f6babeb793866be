"""Reading and writing safetensors files, strictly: a file that is not exactly right is refused.

Layout: 8 bytes little-endian header length, that many bytes of one JSON object, then the tensors'
bytes without gap or overlap. The JSON maps a name to {"dtype", "shape", "data_offsets"}; the name
`__metadata__` maps to an object of strings.
"""

from __future__ import annotations

import json
import math
import struct

import numpy as np

from .dtypes import STORAGE, Tensor


class FileError(ValueError):
    """The bytes are not a valid safetensors file."""


def _object_without_duplicates(pairs):
    result = dict(pairs)
    if len(result) != len(pairs):
        raise FileError("a name occurs twice in the header")
    return result


def _natural(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def parse(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file's bytes."""
    if len(content) < 8:
        raise FileError("shorter than the header length")
    (length,) = struct.unpack_from("<Q", content)
    if length > len(content) - 8:
        raise FileError(f"header of {length} bytes in a file of {len(content)}")
    try:
        header = json.loads(
            content[8 : 8 + length].decode("utf-8"), object_pairs_hook=_object_without_duplicates
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FileError(f"header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FileError("header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FileError("__metadata__ is not an object of strings")

    data = memoryview(content)[8 + length :]
    tensors, spans = {}, []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise FileError(f"'{name}': expected dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in STORAGE:
            raise FileError(f"'{name}': unknown dtype {dtype!r}")
        if not isinstance(shape, list) or not all(map(_natural, shape)):
            raise FileError(f"'{name}': bad shape {shape!r}")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
            raise FileError(f"'{name}': bad data_offsets {offsets!r}")
        begin, end = offsets
        if end - begin != math.prod(shape) * STORAGE[dtype].itemsize or end > len(data):
            raise FileError(f"'{name}': {dtype}{shape} does not fit offsets {offsets}")
        spans.append((begin, end))
        array = np.frombuffer(data[begin:end], dtype=np.uint8)
        if dtype == "BOOL" and np.any(array > 1):
            raise FileError(f"'{name}': a BOOL byte is neither 0 nor 1")
        tensors[name] = Tensor(dtype, array.view(STORAGE[dtype]).reshape(shape))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise FileError(f"gap or overlap at byte {position}")
        position = end
    if position != len(data):
        raise FileError(f"{len(data) - position} bytes left over")
    return tensors, metadata


def serialize(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Bytes of a file with these tensors: wide types first, so that every tensor is aligned."""
    header, parts, position = {}, [], 0
    if metadata:
        header["__metadata__"] = metadata
    for name in sorted(tensors, key=lambda name: (-tensors[name].data.itemsize, name)):
        payload = tensors[name].data.tobytes()
        header[name] = {
            "dtype": tensors[name].dtype,
            "shape": list(tensors[name].shape),
            "data_offsets": [position, position + len(payload)],
        }
        position += len(payload)
        parts.append(payload)
    text = json.dumps(header, ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def load(path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with open(path, "rb") as file:
        return parse(file.read())


def save(path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    content = serialize(tensors, metadata)
    with open(path, "wb") as file:
        file.write(content)
