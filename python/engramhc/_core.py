"""The compiled library: operators by their tables, called on arrays of any framework.

    post_fwd = operator("mhc.post_fwd")
    (new_residual,) = post_fwd("mhc_post_fwd", (layer_output, residual, post, comb))

Nothing is loaded before the first use.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import threading
import types
from typing import Any, Callable, Mapping

import numpy as np

from . import errors
from ._arrays import DTYPES, bits_of, expanded, framework_of, squeezed

_LIBRARY = "_ehc.so"
_FUNCTIONS = (
    "call", "infer", "workspace_bytes", "tables", "set_implementation", "set_log", "take_log",
    "set_num_threads", "num_threads", "build_info", "device_info",
)  # fmt: skip
_NO_NAMES: Mapping[str, str] = types.MappingProxyType({})

Layout = tuple[str, tuple[int, ...]]  # ("BF16", (3, 4))

log: list[str] | None = None  # lines of `engramhc.verbose`
_measured = threading.local()  # .sizes: bytes of workspace of calls that are measured, not made


def _library_path() -> pathlib.Path:
    """The binding: in the folder that ENGRAMHC_LIBRARY names, or else beside the package (which has
    two folders when it is installed for editing), or in the build folder of a checkout."""
    import engramhc

    named = os.environ.get("ENGRAMHC_LIBRARY")
    if named:
        folders = [pathlib.Path(named)]
    else:
        checkout = pathlib.Path(__file__).resolve().parents[2]
        folders = [*map(pathlib.Path, engramhc.__path__), checkout / "build/cpu/lib"]
    for folder in folders:
        if (folder / _LIBRARY).is_file():
            return folder / _LIBRARY
    places = ", ".join(map(str, folders))
    raise ImportError(f"engramhc: expected {_LIBRARY} in one of: {places}")


@functools.cache
def library() -> Any:
    """The functions of the binding (bindings/python/module.cc)."""
    import tvm_ffi  # imports torch where torch is installed

    module = tvm_ffi.load_module(str(_library_path()))
    return types.SimpleNamespace(**{name: module.get_function(name) for name in _FUNCTIONS})


def checked(result: Any, title: str = "engramhc") -> Any:
    """A result of the binding, or the exception that its text means."""
    if isinstance(result, str):
        raise _Refused(result).translated(title, _NO_NAMES)
    return result


class _Refused(Exception):
    """A call that the library refused, as "<status>:<text>"."""

    def translated(self, title: str, names: Mapping[str, str]) -> errors.Error:
        status, _, text = str(self.args[0]).partition(":")
        return errors.translated(int(status), text, title, names)


class Operator:
    """An operator of the library. Its tensors have positions: inputs first, then outputs."""

    def __init__(self, position: int, table: dict) -> None:
        self.name: str = table["name"]
        self.position = position
        self.attributes: list[dict] = table["attributes"]
        self.implementations: list[dict] = table["implementations"]
        self.inputs = [t for t in table["tensors"] if not t["is_output"]]
        self.outputs = [t for t in table["tensors"] if t["is_output"]]
        self._none = (None,) * len(self.outputs)
        self._call, self._infer = library().call, library().infer

    def __call__(
        self,
        title: str,
        inputs: tuple,
        attributes: tuple = (),
        out: tuple | None = None,
        stream: int | None = None,
        workspace: Any = None,
        names: Mapping[str, str] = _NO_NAMES,
    ) -> tuple:
        """Runs it and returns all outputs, None where this call does not make one.

        `inputs` and `out` are by position, `attributes` too (the last may be left out; None is the
        default). Outputs that `out` leaves None are made in the framework of the first array.
        `title` and `names` (from the table's to the signature's) are for errors.
        """
        if stream is not None or framework_of(_first(inputs)).is_foreign:
            with framework_of(_first(inputs)).stream(stream, _first(inputs)) as stream:
                made = self._called(title, inputs, attributes, out, stream, workspace, names)
            return tuple(framework_of(_first(inputs)).finished(a, _first(inputs)) for a in made)
        return self._called(title, inputs, attributes, out, stream, workspace, names)

    def fill(self, title: str, inputs: tuple, attributes: tuple, out: tuple) -> None:
        """Runs it into `out`, which is None for what this call does not make. The inputs are arrays of
        a framework whose stream the binding sees."""
        try:
            self._run(inputs, attributes, out, None, None)
        except _Refused as error:
            raise error.translated(title, _NO_NAMES) from None
        except BufferError as error:
            raise errors.DTypeError(f"{title}: {error}") from None
        finally:
            if log is not None:
                log.extend(str(library().take_log()).splitlines())

    def _called(self, title, inputs, attributes, out, stream, workspace, names) -> tuple:
        try:
            made = self._completed(inputs, attributes, out)
            self._run(inputs, attributes, made, stream, workspace)
        except _Refused as error:
            if self._lacks_tokens(inputs):
                return self._with_tokens(title, inputs, attributes, out, stream, workspace, names)
            raise error.translated(title, names) from None
        except BufferError as error:
            return self._by_bits(error, title, inputs, attributes, out, stream, workspace, names)
        finally:
            if log is not None:
                log.extend(library().take_log().decode().splitlines())
        return made

    def infer(
        self,
        title: str,
        inputs: tuple,
        attributes: tuple = (),
        names: Mapping[str, str] = _NO_NAMES,
    ) -> list[Layout | None]:
        """Type and shape of every output, None where this call does not make it. An input may be
        ("BF16", dim, ...) instead of an array. The layout of a list is that of each of its arrays."""
        try:
            return self._layouts(inputs, attributes)
        except _Refused as error:
            raise error.translated(title, names) from None

    def _run(self, inputs, attributes, made, stream, workspace) -> None:
        if hasattr(_measured, "sizes"):
            size = library().workspace_bytes(self.position, None, *inputs, *made, *attributes)
            if isinstance(size, str):
                raise _Refused(size)
            _measured.sizes.append(size)
            return
        result = self._call(self.position, stream, workspace, *inputs, *made, *attributes)
        if type(result) is int:  # bytes of workspace on CUDA, where memory is the framework's
            like = _first(inputs)
            workspace = framework_of(like).empty("U8", (result,), like)
            result = self._call(self.position, stream, workspace, *inputs, *made, *attributes)
        if result is not None:
            raise _Refused(result)

    def _layouts(self, inputs: tuple, attributes: tuple) -> list[Layout | None]:
        result = self._infer(self.position, *inputs, *self._none, *attributes)
        if isinstance(result, str):
            raise _Refused(result)
        numbers = memoryview(result).cast("q").tolist()
        layouts: list[Layout | None] = []
        at = 2 * len(inputs)  # inputs have type and rank 0
        for _ in self._none:
            code, end = numbers[at], at + 2 + numbers[at + 1]
            layouts.append((DTYPES[code], tuple(numbers[at + 2 : end])) if code else None)
            at = end
        return layouts

    def _completed(self, inputs: tuple, attributes: tuple, out: tuple | None) -> tuple:
        """`out` with the arrays that it lacks."""
        if out is None:
            out = self._none
        elif not any(array is None for array in out):
            return out
        like = _first(inputs)
        empty = framework_of(like).empty
        made = [
            array if array is not None or layout is None else empty(*layout, like)
            for array, layout in zip(out, self._layouts(inputs, attributes))
        ]
        return tuple(made)

    # --- rare calls -------------------------------------------------------------------------------

    def _lacks_tokens(self, inputs: tuple) -> bool:
        """Whether there is no leading dimension: the first tensor with tokens lacks just that."""
        for array, table in zip(inputs, self.inputs):
            if array is not None and _token_axis(table) is not None and not table["is_list"]:
                return getattr(array, "ndim", -1) == _rank(table) - 1
        return False

    def _with_tokens(self, title, inputs, attributes, out, *rest) -> tuple:
        given = out or self._none
        axes = [_token_axis(table) for table in self.inputs + self.outputs]
        made = self._called(
            title,
            tuple(map(expanded, inputs, axes)),
            attributes,
            tuple(map(expanded, given, axes[len(inputs) :])),
            *rest,
        )
        results = map(squeezed, made, axes[len(inputs) :])
        return tuple(old if old is not None else new for old, new in zip(given, results))

    def _by_bits(self, error, title, inputs, attributes, out, stream, workspace, names) -> tuple:
        """Arrays that DLPack cannot describe: types of ml_dtypes go as bits, the others are named."""
        tables = self.inputs + self.outputs
        given = inputs + (out or self._none)
        for array, table in zip(given, tables):
            problem = _problem(array)
            if problem is not None:
                name = names.get(table["name"], table["name"])
                raise errors.DTypeError(f"{title}: tensor '{name}': {problem}") from None
        bits = tuple(map(bits_of, inputs))
        try:
            made = self._completed(bits, attributes, out)
            self._run(bits, attributes, tuple(map(bits_of, made)), stream, workspace)
        except _Refused as refused:
            if self._lacks_tokens(inputs):
                return self._with_tokens(title, inputs, attributes, out, stream, workspace, names)
            raise refused.translated(title, names) from None
        except BufferError:
            raise errors.DTypeError(f"{title}: {error}") from None
        return made


def _first(inputs: tuple) -> Any:
    """The first array; of a list its first."""
    for value in inputs:
        if value is not None:
            return value[0] if isinstance(value, (list, tuple)) and value else value
    return None


def _dims(table: dict) -> list[str]:
    return table["pattern"].partition("[")[2].rstrip("]").split(",")


def _rank(table: dict) -> int:
    return len(_dims(table))


def _token_axis(table: dict) -> int | None:
    dims = _dims(table)
    return dims.index("T") if "T" in dims else None


def _problem(value: Any) -> str | None:
    """What keeps an array from being read, if anything does."""
    if isinstance(value, (list, tuple)):
        return next((p for p in map(_problem, value) if p is not None), None)
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        return "expected a writable array, got a read-only one; hint: pass a copy"
    if isinstance(value, np.ndarray) and bits_of(value) is value and value.dtype.kind not in "fiub":
        return f"expected an array of numbers, got NumPy's {value.dtype}"
    return None


def workspace_size(function: Callable, *args: Any, **kwargs: Any) -> int:
    """Bytes of scratch memory that a call needs. Outputs are allocated, nothing runs."""
    _measured.sizes = []
    try:
        function(*args, **kwargs)
        return max(_measured.sizes, default=0)
    finally:
        del _measured.sizes


@functools.cache
def _operators() -> dict[str, Operator]:
    tables = json.loads(library().tables())
    return {table["name"]: Operator(i, table) for i, table in enumerate(tables)}


@functools.cache
def operator(name: str) -> Operator:
    """The operator of a table's name, "mhc.post_fwd"."""
    return _operators()[name]


def operators() -> list[Operator]:
    return list(_operators().values())


_forced: dict[str, str] = {}


def force(op: Operator, implementation: str) -> str:
    """Restricts an operator to an implementation, "" to any; returns what it was restricted to."""
    checked(library().set_implementation(op.position, implementation))
    before = _forced.get(op.name, "")
    _forced[op.name] = implementation
    return before
