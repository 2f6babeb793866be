"""Where the rows of a table lie and what they look like.

A table is one block of rows, or several where a checkpoint cuts it into shards. Blocks are pointers
and not arrays: mapped files are read-only, and NumPy knows neither bf16 nor the 8-bit types.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._capi import View
from ..errors import DeviceError, TableError, UnsupportedError
from .safetensors import BYTES, Entry, entries, fail, file_of_tensors

GROUP = 32  # values that share a scale byte of the 8-bit format

# Name of a format -> type of its values; the scales of fp8 are a tensor of their own.
FORMATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8": "F8_E4M3"}
_FORMAT_OF = {dtype: name for name, dtype in FORMATS.items()}
_STORED_AS_BYTES = {"F8_E4M3": ("F8_E4M3", "U8"), "F8_E8M0": ("F8_E8M0", "U8")}

# DeepSeek-V4.1: `layers.1.engram.embed.weight` and `.scale`; Qwen: 128 shards of one table.
_LAYER = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.(?:.*\.)?"
    r"(?:engram\.embed\.weight|ngram_embedding\.(?:shard_(?P<shard>\d+)|weight))(?:\.weight)?$"
)


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a table in one piece of memory."""

    rows: int
    weight: View  # [rows, dim]
    scale: View | None  # [rows, dim / GROUP], with fp8 only
    keep: Any  # what owns the memory

    @property
    def gpu(self) -> int | None:
        """The GPU with the rows, or for rows in pinned host memory the current one."""
        if self.is_pinned:
            return sys.modules["torch"].cuda.current_device()
        return self.weight.cuda

    @property
    def is_pinned(self) -> bool:
        """Host memory that kernels can read in place."""
        return isinstance(self.keep, _HostMemory) and self.keep.is_pinned


class Source(NamedTuple):
    """Consecutive rows in a file; strides in bytes."""

    path: str
    dtype: str
    rows: int
    dim: int
    offset: int
    stride: int
    scale_path: str | None = None
    scale_offset: int = 0
    scale_stride: int = 0

    @property
    def format(self) -> str:
        return _FORMAT_OF[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.rows * row_bytes(self.format, self.dim)


def row_bytes(format: str, dim: int) -> int:
    return dim * BYTES[FORMATS[format]] + (dim // GROUP if format == "fp8" else 0)


# --- finding rows in files ----------------------------------------------------------------------


def find(path: str, layer: int | None, format: str) -> list[Source]:
    """The blocks of one layer's table in a checkpoint, a safetensors file or raw bytes."""
    raw = re.fullmatch(r"(\w+)\[(\d+)\]", format)
    if raw:
        return [_raw(path, raw[1], int(raw[2]))]
    if format != "auto" and format not in FORMATS:
        raise TableError(
            f"table: attribute 'format': expected auto, {', '.join(FORMATS)} or one of them with the"
            f" width of raw rows, like bf16[256], got {format!r}"
        )
    files = file_of_tensors(path)
    sources = [_source(files, name) for name in _names(path, sorted(files), layer)]
    if len({(source.format, source.dim) for source in sources}) != 1:
        raise fail(path, "shards of one type and width", [f"{s.dtype}[{s.rows},{s.dim}]" for s in sources])
    if format not in ("auto", sources[0].format):
        raise fail(path, f"rows of {format}", sources[0].format)
    return sources


def _names(path: str, names: Sequence[str], layer: int | None) -> list[str]:
    """Tensors of the table, shards in order."""
    by_layer: dict[int, list[tuple[int, str]]] = {}
    for name in names:
        match = _LAYER.search(name)
        if match:
            by_layer.setdefault(int(match["layer"]), []).append((int(match["shard"] or 0), name))
    if layer is None and len(by_layer) == 1:
        (layer,) = by_layer
    if layer in by_layer:
        shards = sorted(by_layer[layer])
        if [number for number, _ in shards] != list(range(len(shards))):
            raise fail(path, f"shards 0..{len(shards) - 1} of layer {layer}", [n for n, _ in shards])
        return [name for _, name in shards]
    weights = [name for name in names if not name.endswith(("scale", "scale_inv"))]
    if layer is None and not by_layer and len(weights) == 1:
        return weights
    held = f"tables of layers {sorted(by_layer)}" if by_layer else f"{len(names)} tensors without a table"
    raise fail(path, "one table" if layer is None else f"a table of layer {layer}", held)


def _source(files: dict[str, str], name: str) -> Source:
    weight = _entry(files[name], name)
    stem = name.removesuffix("weight")
    scale_name = next((n for n in (f"{stem}scale", f"{stem}scale_inv", f"{name}_scale") if n in files), None)
    if len(weight.shape) != 2:
        raise fail(weight.path, f"'{name}' of two dimensions", list(weight.shape))
    rows, dim = weight.shape
    if scale_name is None:
        if weight.dtype not in ("BF16", "F16", "F32"):
            raise fail(weight.path, f"BF16, F16, F32, or F8_E4M3 with scales as '{name}'", weight.dtype)
        return Source(weight.path, weight.dtype, rows, dim, weight.offset, dim * BYTES[weight.dtype])
    scale = _entry(files[scale_name], scale_name)
    for entry, dtype, shape in ((weight, "F8_E4M3", (rows, dim)), (scale, "F8_E8M0", (rows, dim // GROUP))):
        if entry.dtype not in _STORED_AS_BYTES[dtype] or entry.shape != shape or dim % GROUP:
            raise fail(
                entry.path,
                f"{dtype}{list(shape)} as '{entry.name}', one scale for {GROUP} values",
                f"{entry.dtype}{list(entry.shape)}",
            )
    return Source(
        weight.path, "F8_E4M3", rows, dim, weight.offset, dim, scale.path, scale.offset, dim // GROUP
    )


def _entry(path: str, name: str) -> Entry:
    found = entries(path).get(name)
    if found is None:
        raise fail(path, f"the tensor '{name}' of the index", "a file without it")
    return found


def _raw(path: str, format: str, dim: int) -> Source:
    """Rows one after the other; each of fp8 has its scale bytes behind it."""
    if format not in FORMATS:
        raise TableError(f"table: attribute 'format': expected one of {', '.join(FORMATS)}, got {format!r}")
    if dim < 1 or (format == "fp8" and dim % GROUP):
        raise TableError(f"table: attribute 'format': expected a width that {GROUP} divides, got {dim}")
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise fail(path, "a file that can be read", error.strerror) from None
    stride = row_bytes(format, dim)
    if size % stride:
        raise fail(path, f"rows of {stride} bytes", f"{size} bytes")
    scales = (path, dim, stride) if format == "fp8" else (None, 0, 0)
    return Source(path, FORMATS[format], size // stride, dim, 0, stride, *scales)


# --- placements ---------------------------------------------------------------------------------


def map_files(sources: Sequence[Source]) -> list[Block]:
    """Read-only mappings: rows are read when a lookup touches them."""
    maps: dict[str, tuple[int, Any]] = {}

    def address(path: str) -> int:
        if path not in maps:
            try:
                with open(path, "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise fail(path, "a file that can be mapped", error) from None
            mapped.madvise(mmap.MADV_RANDOM)
            maps[path] = np.frombuffer(mapped, np.uint8).ctypes.data, mapped
        return maps[path][0]

    def block(source: Source) -> Block:
        scale = 0 if source.scale_path is None else address(source.scale_path) + source.scale_offset
        weight = address(source.path) + source.offset
        keep = [maps[path][1] for path in (source.path, source.scale_path) if path is not None]
        return _block(source, weight, scale, keep)

    return [block(source) if source.rows else _empty(source) for source in sources]


def _block(source: Source, weight: int, scale: int, keep: Any, cuda: int | None = None) -> Block:
    size = BYTES[source.dtype]
    groups = source.dim // GROUP
    return Block(
        source.rows,
        View(weight, source.dtype, (source.rows, source.dim), (source.stride // size, 1), cuda),
        (
            View(scale, "F8_E8M0", (source.rows, groups), (source.scale_stride, 1), cuda)
            if source.dtype == "F8_E4M3"
            else None
        ),
        keep,
    )


def _empty(source: Source) -> Block:
    return _block(source, 0, 0, None)


def allocate(format: str, rows: int, dim: int, placement: str) -> Block:
    """Rows of zeros in one piece, weights first, in host memory or on the current CUDA device."""
    weight_bytes = rows * dim * BYTES[FORMATS[format]]
    scale_stride = dim // GROUP if format == "fp8" else 0
    size = weight_bytes + rows * scale_stride
    cuda, keep, address = (_device_memory if placement == "device" else _host_memory)(size)
    source = Source("", FORMATS[format], rows, dim, 0, dim * BYTES[FORMATS[format]], None, 0, scale_stride)
    return _block(source, address, address + weight_bytes, keep, cuda)


def load(sources: Sequence[Source], placement: str) -> Block:
    """All rows of the files in one piece of memory."""
    rows = sum(source.rows for source in sources)
    block = allocate(sources[0].format, rows, sources[0].dim, placement)
    write = _writer(block)
    weight_at, scale_at = 0, block.scale.address - block.weight.address if block.scale else 0
    for source in sources:
        size = source.dim * BYTES[source.dtype]
        _copy(source.path, source.offset, source.stride, size, source.rows, weight_at, write)
        weight_at += source.rows * size
        if source.scale_path is not None:
            width = source.dim // GROUP
            _copy(
                source.scale_path,
                source.scale_offset,
                source.scale_stride,
                width,
                source.rows,
                scale_at,
                write,
            )
            scale_at += source.rows * width
    return block


def _copy(
    path: str,
    offset: int,
    stride: int,
    width: int,
    rows: int,
    to: int,
    write: Callable[[int, np.ndarray], None],
) -> None:
    """Rows of `width` bytes every `stride` bytes of a file, packed, to byte `to` of the table."""
    at_once = max(1, (64 << 20) // stride)
    with open(path, "rb") as file:
        for begin in range(0, rows, at_once):
            count = min(at_once, rows - begin)
            file.seek(offset + begin * stride)
            # The last row of interleaved bytes may end with the file, before its stride does.
            data = np.fromfile(file, np.uint8, (count - 1) * stride + width)
            if data.size != (count - 1) * stride + width:
                raise fail(path, f"{rows} rows", "a file that became shorter")
            packed = np.lib.stride_tricks.as_strided(data, (count, width), (stride, 1))
            write(to + begin * width, np.ascontiguousarray(packed).reshape(-1))


def _writer(block: Block) -> Callable[[int, np.ndarray], None]:
    if block.weight.cuda is None:
        memory = block.keep.array

        def write_host(at: int, data: np.ndarray) -> None:
            memory[at : at + data.size] = data

        return write_host

    import torch

    def write_device(at: int, data: np.ndarray) -> None:
        block.keep[at : at + data.size].copy_(torch.from_numpy(data))

    return write_device


class _HostMemory:
    """Host memory; page-locked where CUDA is in use, so that kernels can read it in place."""

    def __init__(self, size: int):
        self.array = np.zeros(size, np.uint8)
        self.is_pinned = False
        torch = sys.modules.get("torch")
        if size and torch is not None and torch.cuda.is_available():
            self._runtime = torch.cuda.cudart()
            self.is_pinned = self._runtime.cudaHostRegister(self.array.ctypes.data, size, 1).value == 0

    def __del__(self):
        if self.is_pinned:
            self._runtime.cudaHostUnregister(self.array.ctypes.data)


def _host_memory(size: int) -> tuple[None, _HostMemory, int]:
    keep = _HostMemory(size)
    return None, keep, keep.array.ctypes.data


def _device_memory(size: int) -> tuple[int, Any, int]:
    try:
        import torch
    except ImportError:
        raise UnsupportedError(
            "table: attribute 'placement': expected torch for 'device', got none"
        ) from None
    if not torch.cuda.is_available():
        raise DeviceError("table: attribute 'placement': expected a CUDA device for 'device', got none")
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
    return memory.device.index, memory, memory.data_ptr()
