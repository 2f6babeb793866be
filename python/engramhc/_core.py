"""The compiled library: operators by their tables, called on arrays of any framework.

    post_fwd = operator("mhc.post_fwd")
    (new_residual,) = post_fwd("mhc_post_fwd", (layer_output, residual, post, comb))

Nothing is loaded before the first use.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import threading
import types
from typing import Any, Callable, Iterator, Mapping, NamedTuple

import numpy as np

from . import errors
from ._arrays import DTYPES, NATIVE, bits_of, dtype_of, expanded, framework_of, squeezed

_LIBRARY = "_ehc.so"
_FUNCTIONS = (
    "call", "infer", "workspace_bytes", "tables", "set_implementation", "set_log", "take_log",
    "set_num_threads", "num_threads", "build_info", "device_info",
)  # fmt: skip
_NO_NAMES: Mapping[str, str] = types.MappingProxyType({})

_NONE = type(None)
Layout = tuple[str, tuple[int, ...]]  # ("BF16", (3, 4))
_MOST_LAYOUTS = 256  # remembered for each operator

log: list[str] | None = None  # lines of `engramhc.verbose`
_watchers = 0  # calls that must go the long way: logged or measured ones


class _Measured(threading.local):
    sizes: list[int] | None = None  # bytes of workspace of calls that are measured, not made


_measured = _Measured()
_lock = threading.Lock()


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


class _Call(NamedTuple):
    """What stays the same on the way through a call."""

    title: str
    names: Mapping[str, str]
    stream: int | None
    workspace: Any
    like: Any  # the first array, and its framework
    framework: Any


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
        self._layouts_by_key: dict[tuple, list[tuple[int, Layout, int | None]]] = {}

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
        if stream is None and not _watchers:  # the short way, for what is usual
            try:
                like = inputs[0]
                framework = NATIVE[type(like)]
                made = self._completed(inputs, attributes, out, like, framework)
                result = self._call(self.position, None, workspace, *inputs, *made, *attributes)
                if type(result) is int:
                    result = self._with_workspace(result, inputs, attributes, made, None, like, framework)
                if result is None:
                    return made
            except (BufferError, RuntimeError, IndexError, KeyError, _Refused):
                pass  # the long way finds the words
        like = _first(inputs)
        framework = framework_of(like)
        with framework.stream(stream, like) as stream:
            call = _Call(title, names, stream, workspace, like, framework)
            made = self._carefully(call, inputs, attributes, out)
        return tuple([framework.finished(array, like) for array in made]) if framework.is_foreign else made

    def fill(self, title: str, inputs: tuple, attributes: tuple, out: tuple) -> None:
        """Runs it into `out`, None for what this call does not make; of a framework whose current
        stream the binding sees. For callers that know the layouts."""
        like = _first(inputs)
        framework = framework_of(like)
        try:
            if _watchers:
                self._run(_Call(title, _NO_NAMES, None, None, like, framework), inputs, attributes, out)
                return
            result = self._call(self.position, None, None, *inputs, *out, *attributes)
            if type(result) is int:
                result = self._with_workspace(result, inputs, attributes, out, None, like, framework)
            if result is not None:
                raise _Refused(result)
        except _Refused as error:
            raise error.translated(title, _NO_NAMES) from None
        except BufferError as error:
            raise errors.DTypeError(f"{title}: {error}") from None
        finally:
            if log is not None:
                log.extend(library().take_log().decode().splitlines())

    def _carefully(self, call: _Call, inputs: tuple, attributes: tuple, out: tuple | None) -> tuple:
        try:
            made = self._completed(inputs, attributes, out, call.like, call.framework)
            self._run(call, inputs, attributes, made)
        except _Refused as error:
            if self._lacks_tokens(inputs):
                return self._with_tokens(call, inputs, attributes, out)
            raise error.translated(call.title, call.names) from None
        except BufferError as error:
            return self._by_bits(call, error, inputs, attributes, out)
        except RuntimeError:
            self._name_problem(call, inputs, out)
            raise
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
        except BufferError:
            return self._layouts(tuple(map(bits_of, inputs)), attributes)

    def _run(self, call: _Call, inputs: tuple, attributes: tuple, made: tuple) -> None:
        if _measured.sizes is not None:
            result = library().workspace_bytes(self.position, None, *inputs, *made, *attributes)
            if type(result) is int:
                _measured.sizes.append(result)
                return
        else:
            result = self._call(self.position, call.stream, call.workspace, *inputs, *made, *attributes)
            if type(result) is int:
                result = self._with_workspace(result, inputs, attributes, made, call.stream, call.like, call.framework)
        if result is not None:
            raise _Refused(result)

    def _with_workspace(self, size, inputs, attributes, made, stream, like, framework) -> Any:
        """The call again, with scratch memory of the framework: on CUDA the library has none."""
        workspace = framework.empty("U8", (size,), like)
        return self._call(self.position, stream, workspace, *inputs, *made, *attributes)

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

    def _completed(self, inputs: tuple, attributes: tuple, out: tuple | None, like: Any, framework: Any) -> tuple:
        """`out` with the arrays that it lacks."""
        if out is None:
            made = list(self._none)
        elif _NONE in map(type, out):
            made = list(out)
        else:
            return out
        for index, (dtype, shape), twin in self._remembered_layouts(inputs, attributes):
            if made[index] is None:
                made[index] = (
                    framework.empty(dtype, shape, like) if twin is None else framework.empty_like(inputs[twin])
                )
        return tuple(made)

    def _remembered_layouts(self, inputs: tuple, attributes: tuple) -> list[tuple[int, Layout, int | None]]:
        """Position and layout of the outputs that a call makes, and an input of the same layout. They
        follow from types, shapes and attributes, and asking costs as much as a small call."""
        try:
            key = (attributes, *[None if a is None else (a.shape, a.dtype) for a in inputs])
            return self._layouts_by_key[key]
        except AttributeError:  # lists, bits of ml_dtypes' types
            key = None
        except (KeyError, TypeError):
            pass
        layouts = [
            (index, layout, _twin(layout, inputs) if key is not None else None)
            for index, layout in enumerate(self._layouts(inputs, attributes))
            if layout is not None
        ]
        if key is not None:
            if len(self._layouts_by_key) >= _MOST_LAYOUTS:
                self._layouts_by_key.clear()
            self._layouts_by_key[key] = layouts
        return layouts

    # --- rare calls -------------------------------------------------------------------------------

    def _lacks_tokens(self, inputs: tuple) -> bool:
        """Whether there is no leading dimension: the first tensor with tokens lacks just that."""
        for array, table in zip(inputs, self.inputs):
            if array is not None and _token_axis(table) is not None and not table["is_list"]:
                return getattr(array, "ndim", -1) == _rank(table) - 1
        return False

    def _with_tokens(self, call: _Call, inputs: tuple, attributes: tuple, out: tuple | None) -> tuple:
        given = out or self._none
        axes = [_token_axis(table) for table in self.inputs]
        out_axes = [_token_axis(table) for table in self.outputs]
        made = self._carefully(
            call, tuple(map(expanded, inputs, axes)), attributes, tuple(map(expanded, given, out_axes))
        )
        results = map(squeezed, made, out_axes)
        return tuple(old if old is not None else new for old, new in zip(given, results))

    def _name_problem(self, call: _Call, inputs: tuple, out: tuple | None) -> None:
        """Raises for the first array that cannot be read."""
        for array, table in zip(inputs + (out or self._none), self.inputs + self.outputs):
            problem = _problem(array)
            if problem is not None:
                kind, text = problem
                name = call.names.get(table["name"], table["name"])
                raise kind(f"{call.title}: tensor '{name}': {text}") from None

    def _by_bits(
        self, call: _Call, error: BufferError, inputs: tuple, attributes: tuple, out: tuple | None
    ) -> tuple:
        """Arrays that DLPack cannot describe: types of ml_dtypes go as bits, the others are named."""
        self._name_problem(call, inputs, out)
        bits = tuple(map(bits_of, inputs))
        try:
            made = self._completed(bits, attributes, out, call.like, call.framework)
            self._run(call, bits, attributes, tuple(map(bits_of, made)))
        except _Refused as refused:
            if self._lacks_tokens(inputs):
                return self._with_tokens(call, inputs, attributes, out)
            raise refused.translated(call.title, call.names) from None
        except BufferError:
            raise errors.DTypeError(f"{call.title}: {error}") from None
        return made


def _first(inputs: tuple) -> Any:
    """The first array; of a list its first."""
    for value in inputs:
        if value is not None:
            return value[0] if isinstance(value, (list, tuple)) and value else value
    return None


def _twin(layout: Layout, inputs: tuple) -> int | None:
    framework = framework_of(_first(inputs))
    for index, array in enumerate(inputs):
        if array is None or framework_of(array) is not framework:
            continue
        if (dtype_of(array), tuple(array.shape)) == layout:
            return index
    return None


def _dims(table: dict) -> list[str]:
    return table["pattern"].partition("[")[2].rstrip("]").split(",")


def _rank(table: dict) -> int:
    return len(_dims(table))


def _token_axis(table: dict) -> int | None:
    dims = _dims(table)
    return dims.index("T") if "T" in dims else None


def _problem(value: Any) -> tuple[type[errors.Error], str] | None:
    """What keeps an array from being read, if anything does."""
    if isinstance(value, (list, tuple)):
        return next((found for found in map(_problem, value) if found is not None), None)
    device = getattr(getattr(value, "device", None), "type", "cpu")
    if device not in ("cpu", "cuda"):
        return errors.DeviceError, f"expected memory on cpu or cuda, got {device}"
    if not isinstance(value, np.ndarray):
        return None
    if not value.flags.writeable:
        return errors.DTypeError, "expected a writable array, got a read-only one; hint: pass a copy"
    if bits_of(value) is value and value.dtype.kind not in "fiub":
        return errors.DTypeError, f"expected an array of numbers, got NumPy's {value.dtype}"
    return None


def workspace_size(function: Callable, *args: Any, **kwargs: Any) -> int:
    """Bytes of scratch memory that a call needs. Outputs are allocated, nothing runs."""
    _measured.sizes = []
    try:
        with watched():
            function(*args, **kwargs)
        return max(_measured.sizes, default=0)
    finally:
        _measured.sizes = None


@contextlib.contextmanager
def watched() -> Iterator[None]:
    global _watchers
    with _lock:
        _watchers += 1
    try:
        yield
    finally:
        with _lock:
            _watchers -= 1


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Lines about the calls inside."""
    global log
    outer, lines = log, []
    library().set_log(1)
    log = lines
    try:
        with watched():
            yield lines
    finally:
        log = outer
        if outer is None:
            library().set_log(0)
        else:
            outer.extend(lines)


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


def forced(name: str) -> str:
    """What an operator is restricted to, "" without a restriction."""
    return _forced.get(name, "")


def force(op: Operator, implementation: str) -> str:
    """Restricts an operator to an implementation, "" to any; returns what it was restricted to."""
    checked(library().set_implementation(op.position, implementation))
    before = _forced.get(op.name, "")
    _forced[op.name] = implementation
    return before
