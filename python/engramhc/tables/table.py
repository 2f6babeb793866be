"""A table of rows behind one interface, wherever its rows lie.

Placement, prefetch and the framework of the indices never change a bit of a row.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from .. import _capi, _core
from .._capi import View
from ..errors import Error, ShapeError, TableError, UnsupportedError
from . import arrays, storage
from .storage import FORMATS, GROUP, Block

_PLACEMENTS = ("file", "host", "device")
_contexts = threading.local()


class Table:
    """Rows [rows, dim]; made by `open` and `create`."""

    def __init__(self, blocks: list[Block], format: str, placement: str, name: str, heads: int | None):
        self._blocks: list[Block] | None = blocks
        self._begins = np.cumsum([0] + [block.rows for block in blocks])
        self.rows: int = int(self._begins[-1])
        self.dim: int = blocks[0].weight.shape[1]
        self.format, self.placement, self.name, self.heads = format, placement, name, heads
        self.nbytes: int = self.rows * storage.row_bytes(format, self.dim)
        self._lock = threading.Lock()
        self._calls = threading.local()
        self._worker: ThreadPoolExecutor | None = None
        self._worker_process = 0  # a fork does not take the thread along
        self._side_streams: dict[int, Any] = {}
        self._counts = {"lookups": 0, "prefetches": 0, "rows": 0, "bytes": 0}
        self._out_of_range = 0
        self._counters: dict[int, Any] = {}  # the same, on GPUs
        if (gpu := blocks[0].gpu) is not None:
            self._counter_on(gpu)  # a graph may be captured on first use, but not this

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        *,
        layer: int | None = None,
        placement: str = "file",
        format: str = "auto",
        heads: int | None = None,
        cache_bytes: int = 0,
    ) -> Table:
        """The table of one layer of a checkpoint (`*.index.json` or one safetensors file), or raw
        rows, whose format and width `format` names: "bf16[256]", "fp8[256]". With `heads` every
        lookup must ask for whole n-gram orders of as many rows."""
        _check_placement(placement, cache_bytes)
        path = os.fspath(path)
        sources = storage.find(path, layer, format)
        blocks = storage.map_files(sources) if placement == "file" else [storage.load(sources, placement)]
        return cls(blocks, sources[0].format, placement, path, heads)

    @classmethod
    def create(cls, rows: int, dim: int, *, format: str, placement: str) -> Table:
        """A table of zeros in memory, to be filled by `store`."""
        _check_placement(placement, 0)
        if placement == "file":
            raise UnsupportedError("table: attribute 'placement': expected host or device, got 'file'")
        if format not in FORMATS:
            raise TableError(
                f"table: attribute 'format': expected one of {', '.join(FORMATS)}, got {format!r}"
            )
        if rows < 0 or dim < 1 or (format == "fp8" and dim % GROUP):
            raise ShapeError(f"table: attribute 'dim': expected rows of {format}, got [{rows},{dim}]")
        return cls([storage.allocate(format, rows, dim, placement)], format, placement, "created", None)

    def lookup(
        self, idx: Any, *, out: Any = None, dtype: Any = None, device: Any = None, check: bool | None = None
    ) -> Any:
        """The rows of idx [..., C] side by side, [..., C*dim]; zeros for -1. Other indices that no
        row has raise TableError, or with check=False (the default on a GPU) give zeros and count."""
        idx = arrays.indices(idx, self.heads)
        self._count("lookups", idx)
        return self._rows_of(idx, out, arrays.row_type(dtype), device, check)

    def prefetch(
        self,
        idx: Any,
        *,
        stream: Any = None,
        dtype: Any = None,
        device: Any = None,
        check: bool | None = None,
    ) -> Ticket:
        """The same while the caller goes on: on a side stream (`stream`, or one of the table's own)
        where a GPU gathers, else on a thread. idx must not change before the ticket's `wait`."""
        idx = arrays.indices(idx, self.heads)
        self._count("prefetches", idx)
        gpu = self._gpu_for(idx)
        side = self._side_stream(arrays.gpu_of(idx) if gpu is None else gpu, stream)
        task = functools.partial(
            arrays.on_stream, side, self._rows_of, idx, None, arrays.row_type(dtype), device, check
        )
        if gpu is not None:
            future: Future = Future()
            future.set_result(task())
            return Ticket(self, future)
        with self._lock:
            if self._worker is None or self._worker_process != os.getpid():
                self._worker, self._worker_process = ThreadPoolExecutor(1, "engramhc-table"), os.getpid()
            return Ticket(self, self._worker.submit(task))

    def store(self, begin: int, values: Any) -> None:
        """Writes rows from `begin` on: values [k, dim], rounded once to the format of the table."""
        block = self._open_blocks()[0]
        if self.placement == "file":
            raise TableError(f"{self}: expected a table in memory to store to, got placement 'file'")
        values = arrays.values(values)
        count = values.shape[0]
        if values.ndim != 2 or values.shape[1] != self.dim or not 0 <= begin <= self.rows - count:
            raise ShapeError(
                f"table: tensor 'values': expected rows of {self.dim} within 0..{self.rows}"
                f", got {list(values.shape)} at {begin}"
            )
        gpu = block.weight.cuda
        values = arrays.to_compute(values, gpu)
        source = arrays.view(values, arrays.row_type(values.dtype), (count, self.dim))
        weight = _rows(block.weight, begin, count)
        if block.scale is not None:
            outputs = {"weight": weight, "scale": _rows(block.scale, begin, count)}
            _context(gpu).run("engram.quantize_rows", {"values": source}, outputs, {"group": GROUP})
        else:
            every = arrays.to_compute(np.arange(count).reshape(count, 1), gpu)
            inputs = {"table": source, "indices": arrays.index_view(every)}
            _context(gpu).run("engram.gather_fwd", inputs, {"embedding": weight}, {"out_dtype": weight.dtype})

    def stats(self) -> dict[str, int]:
        """Calls, rows and bytes asked for so far, and indices out of range that gave zeros."""
        with self._lock:
            strays = self._out_of_range + sum(int(counter) for counter in self._counters.values())
            return {**self._counts, "out_of_range": strays}

    def close(self) -> None:
        """Waits for the prefetch at work, cancels the others and lets the rows go."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None and self._worker_process == os.getpid():
            worker.shutdown(cancel_futures=True)
        self._blocks = None

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"table '{self.name}'"

    # --- how ------------------------------------------------------------------------------------

    def _open_blocks(self) -> list[Block]:
        blocks = self._blocks
        if blocks is None:
            raise TableError(f"{self}: expected an open table, got a closed one")
        return blocks

    def _gpu_for(self, idx: Any) -> int | None:
        """The GPU that gathers: the one with the rows, or any for rows in pinned host memory."""
        block = self._open_blocks()[0]
        if block.weight.cuda is not None:
            return block.weight.cuda
        return arrays.gpu_of(idx) if block.is_pinned else None

    def _side_stream(self, gpu: int | None, stream: Any) -> Any:
        """A stream that begins after what is enqueued now; None without a GPU."""
        if gpu is None:
            return None
        import torch

        if stream is None:
            stream = self._side_streams.setdefault(gpu, torch.cuda.Stream(gpu))
        stream.wait_stream(torch.cuda.current_stream(gpu))
        return stream

    def _rows_of(self, idx: Any, out: Any, dtype: str, device: Any, check: bool | None) -> Any:
        shape = (*idx.shape[:-1], idx.shape[-1] * self.dim)
        if out is not None:
            arrays.check_out(out, dtype, shape, idx)
        gpu = self._gpu_for(idx)
        source = arrays.to_compute(idx, gpu)
        if check is False or (check is None and gpu is not None):
            source = self._without_strays(source, gpu)
        elif gpu is not None and bool(arrays.strays(source, self.rows).any()):
            raise self._stray("others too")
        is_target = out is not None and arrays.gpu_of(out) == gpu
        target = out if is_target else arrays.empty(source, dtype, shape)
        self._gather(source, target, dtype, gpu)
        if out is None:
            return arrays.to_place_of(target, idx, device)
        if not is_target:
            out[...] = target
        return out

    def _counter_on(self, gpu: int) -> Any:
        if gpu not in self._counters:
            import torch

            self._counters[gpu] = torch.zeros((), dtype=torch.int64, device=torch.device("cuda", gpu))
        return self._counters[gpu]

    def _without_strays(self, idx: Any, gpu: int | None) -> Any:
        """Indices that no row has become -1 and are counted, on a GPU without waiting for it."""
        strays = arrays.strays(idx, self.rows)
        if gpu is None:
            with self._lock:
                self._out_of_range += int(strays.sum())
        else:
            self._counter_on(gpu).add_(strays.sum())
        return arrays.where(strays, -1, idx)

    def _gather(self, idx: Any, target: Any, dtype: str, gpu: int | None) -> None:
        blocks = self._open_blocks()
        if len(blocks) == 1:
            self._gather_block(0, arrays.index_view(idx), target, dtype, gpu)
            return
        # Shards in files, on the CPU: each gives the rows that lie in it, as bits.
        flat = arrays.as_numpy(idx).reshape(-1)
        outside = flat[arrays.strays(flat, self.rows)]
        if outside.size:
            raise self._stray(outside[0])
        rows = arrays.as_bits(target, dtype).reshape(flat.size, self.dim)
        rows[flat < 0] = 0
        shard_of = np.searchsorted(self._begins, flat, side="right") - 1
        for shard in np.unique(shard_of[flat >= 0]):
            places = np.flatnonzero(shard_of == shard)
            local = (flat[places] - self._begins[shard]).astype(np.int64).reshape(-1, 1)
            found = np.empty((places.size, self.dim), rows.dtype)
            self._gather_block(int(shard), arrays.index_view(local), found, dtype, None)
            rows[places] = found

    def _gather_block(self, shard: int, indices: View, target: Any, dtype: str, gpu: int | None) -> None:
        tokens, columns = indices.shape
        embedding = arrays.view(target, dtype, (tokens, columns * self.dim))
        calls = self._calls.__dict__  # of this thread
        key = f"{shard} {indices.dtype} {dtype} {gpu}"
        if key not in calls:
            calls[key] = self._call(self._open_blocks()[shard], indices, embedding, gpu)
        try:
            calls[key].run(_context(gpu), indices=indices, embedding=embedding)
        except Error as error:
            what = str(error).partition(": ")[2].replace("'indices'", "'idx'")
            raise TableError(f"{self}: {what}") from None

    @staticmethod
    def _call(block: Block, indices: View, embedding: View, gpu: int | None) -> _capi.Call:
        weight = block.weight._replace(cuda=gpu)  # pinned memory has the same address on a GPU
        outputs, attributes = {"embedding": embedding}, {"out_dtype": embedding.dtype}
        if block.scale is None:
            inputs = {"table": weight, "indices": indices}
            return _capi.Call("engram.gather_fwd", inputs, outputs, attributes)
        inputs = {"weight": weight, "scale": block.scale._replace(cuda=gpu), "indices": indices}
        return _capi.Call("engram.gather_dequant", inputs, outputs, {"group": GROUP, **attributes})

    def _stray(self, got: Any) -> TableError:
        return TableError(f"{self}: tensor 'idx': expected -1 or a row below {self.rows}, got {got}")

    def _count(self, what: str, idx: Any) -> None:
        rows = math.prod(idx.shape)
        with self._lock:
            self._counts[what] += 1
            self._counts["rows"] += rows
            self._counts["bytes"] += rows * storage.row_bytes(self.format, self.dim)


class Ticket:
    """Rows that are under way."""

    def __init__(self, table: Table, future: Future):
        self._table, self._future = table, future

    def wait(self, *, stream: Any = None, out: Any = None) -> Any:
        """The rows; on a GPU the current stream, or `stream`, goes on once they are there."""
        try:
            rows, event = self._future.result()
        except CancelledError:
            raise TableError(f"{self._table}: expected a ticket to wait for, got a cancelled one") from None
        if event is not None:
            arrays.wait_for(rows, event, stream)
        if out is None:
            return rows
        if out.dtype != rows.dtype or tuple(out.shape) != tuple(rows.shape):
            raise ShapeError(
                f"prefetch: tensor 'out': expected {rows.dtype}{list(rows.shape)}, got {out.dtype}{list(out.shape)}"
            )
        out[...] = rows
        return out

    def cancel(self) -> bool:
        """Whether it was in time: then nothing was read, and the ticket cannot be waited for."""
        return self._future.cancel()


def _check_placement(placement: str, cache_bytes: int) -> None:
    if placement == "shared":
        raise UnsupportedError("table: attribute 'placement': expected file, host or device, got 'shared'")
    if placement not in _PLACEMENTS:
        raise TableError(f"table: attribute 'placement': expected file, host or device, got {placement!r}")
    if cache_bytes:
        raise UnsupportedError(f"table: attribute 'cache_bytes': expected 0, got {cache_bytes}")


def _rows(view: View, begin: int, count: int) -> View:
    """Some rows of a tensor of one-byte or wider elements."""
    address = view.address + begin * view.strides[0] * storage.BYTES[view.dtype]
    return view._replace(address=address, shape=(count, view.shape[1]))


def _context(gpu: int | None) -> _capi.Context:
    """This thread's context for the processor, or for a GPU's current stream."""
    known = _contexts.__dict__
    if gpu is None:
        threads = _core.library().num_threads() if _core.library.cache_info().currsize else 0
        key = f"cpu {os.getpid()} {threads}"  # a fork does not take the threads along
    else:
        import torch

        stream = torch.cuda.current_stream(gpu).cuda_stream
        key = f"cuda {gpu} {stream}"
    if key not in known:
        known[key] = _capi.Context.cpu(threads) if gpu is None else _capi.Context.cuda(gpu, stream)
    return known[key]
