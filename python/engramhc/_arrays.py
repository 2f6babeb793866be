"""Arrays of any framework: how to make one like another, and names of element types."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterator

import numpy as np

from .errors import UnsupportedError

_HOST = 1  # of DLPack's device types

# By (code << 8 | bits) of DLPack.
DTYPES = {
    2 << 8 | 32: "F32",
    2 << 8 | 16: "F16",
    4 << 8 | 16: "BF16",
    10 << 8 | 8: "F8_E4M3",
    14 << 8 | 8: "F8_E8M0",
    0 << 8 | 64: "I64",
    0 << 8 | 32: "I32",
    1 << 8 | 8: "U8",
    6 << 8 | 8: "BOOL",
}
_NAMES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
_BY_NAME = {name: dtype for dtype, name in _NAMES.items()}
_EXTENSIONS = ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu")  # NumPy has them by ml_dtypes


def _numpy_dtype(dtype: str) -> np.dtype:
    name = _NAMES[dtype]
    if name not in _EXTENSIONS:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(f"NumPy arrays of {dtype} need the package ml_dtypes") from None
    return np.dtype(getattr(ml_dtypes, name))


class _Dtypes(dict):
    """NumPy's types by their names here, found on first use."""

    def __missing__(self, dtype: str) -> np.dtype:
        self[dtype] = found = _numpy_dtype(dtype)
        return found


class NumpyArrays:
    is_foreign = False  # the binding sees the current stream and can write the arrays
    _module: Any = np
    _dtypes = _Dtypes()

    def empty(self, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        return np.empty(shape, self._dtypes[dtype])

    def empty_like(self, array: Any) -> Any:
        """Contiguous, of the same type and shape."""
        return np.empty(array.shape, array.dtype)

    def make(self, function: str, *args: Any, dtype: str, like: Any) -> Any:
        """`arange`, `eye`, `zeros` or `ones`."""
        return getattr(self._module, function)(*args, dtype=self._dtypes[dtype])

    def array(self, values: Any, dtype: str, like: Any) -> Any:
        """Of nested lists."""
        return self._module.asarray(values, dtype=self._dtypes[dtype])

    def cast(self, array: Any, dtype: str) -> Any:
        return array.astype(self._dtypes[dtype])

    def stack(self, arrays: Any) -> Any:
        return self._module.stack(arrays)

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        # What broadcast_to makes is read-only, which DLPack does not describe.
        return np.lib.stride_tricks.as_strided(array, shape, np.broadcast_to(array, shape).strides)

    @contextlib.contextmanager
    def stream(self, stream: int | None, like: Any) -> Iterator[int | None]:
        yield None

    def finished(self, array: Any, like: Any) -> Any:
        return array


class TorchArrays:
    """Torch, which is there when one of its tensors is."""

    is_foreign = False

    def __init__(self) -> None:
        self._module = torch = sys.modules["torch"]
        self._empty_like, self._contiguous = torch.empty_like, torch.contiguous_format
        self._dtypes = {dtype: getattr(torch, name) for dtype, name in _NAMES.items()}

    def empty(self, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        return like.new_empty(shape, dtype=self._dtypes[dtype])

    def empty_like(self, array: Any) -> Any:
        return self._empty_like(array, memory_format=self._contiguous)

    def make(self, function: str, *args: Any, dtype: str, like: Any) -> Any:
        return getattr(self._module, function)(*args, dtype=self._dtypes[dtype], device=like.device)

    def array(self, values: Any, dtype: str, like: Any) -> Any:
        return self._module.as_tensor(values, dtype=self._dtypes[dtype], device=like.device)

    def cast(self, array: Any, dtype: str) -> Any:
        return array.to(self._dtypes[dtype])

    def stack(self, arrays: Any) -> Any:
        return self._module.stack(tuple(arrays))

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        return array.expand(shape)

    @contextlib.contextmanager
    def stream(self, stream: int | None, like: Any) -> Iterator[int | None]:
        """Makes it the current one, so that memory made inside belongs to it; the binding asks."""
        if stream is None or not like.is_cuda:
            yield None
            return
        cuda = self._module.cuda
        with cuda.device(like.device), cuda.stream(cuda.ExternalStream(stream, like.device)):
            yield None

    def finished(self, array: Any, like: Any) -> Any:
        return array


class ForeignArrays(NumpyArrays):
    """A framework whose current stream the binding does not see: CuPy; or one with an array
    namespace like JAX, whose arrays cannot be written and are made from NumPy's."""

    is_foreign = True

    def __init__(self, kind: type) -> None:
        self._name = kind.__module__.partition(".")[0]
        self._cupy = sys.modules["cupy"] if self._name == "cupy" else None
        self._module = self._cupy or np

    def empty(self, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        if self._cupy is not None:
            with like.device:
                return self._cupy.empty(shape, self._dtypes[dtype])
        if like.__dlpack_device__()[0] != _HOST:
            raise UnsupportedError(f"arrays of {self._name} on a device need `out=`")
        return np.empty(shape, self._dtypes[dtype])

    def empty_like(self, array: Any) -> Any:
        return self.empty(dtype_of(array), array.shape, array)

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        return self._module.broadcast_to(array, shape)

    @contextlib.contextmanager
    def stream(self, stream: int | None, like: Any) -> Iterator[int | None]:
        if self._cupy is None:
            yield stream
            return
        cuda = self._cupy.cuda
        with like.device:
            if stream is None:
                yield cuda.get_current_stream().ptr
            else:
                with cuda.ExternalStream(stream):
                    yield stream

    def finished(self, array: Any, like: Any) -> Any:
        if self._cupy is not None or not isinstance(array, np.ndarray):
            return array
        return like.__array_namespace__().asarray(array)


_FRAMEWORKS: dict[type, Any] = {np.ndarray: NumpyArrays()}
NATIVE = dict(_FRAMEWORKS)  # without the foreign ones


def framework_of(array: Any) -> Any:
    """The framework of an array, by its type."""
    kind = type(array)
    try:
        return _FRAMEWORKS[kind]
    except KeyError:
        pass
    if any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__):
        found: Any = TorchArrays()
    elif hasattr(kind, "__dlpack__") and not isinstance(array, np.ndarray):
        found = ForeignArrays(kind)
    else:  # NumPy's, or none at all, which the call itself will say
        found = _FRAMEWORKS[np.ndarray]
    _FRAMEWORKS[kind] = found
    if not found.is_foreign and hasattr(kind, "__dlpack__"):
        NATIVE[kind] = found
    return found


def dtype_of(array: Any) -> str | None:
    """ "BF16" and so on; None for types that no operator takes."""
    return _BY_NAME.get(str(getattr(array, "dtype", "")).rpartition(".")[2])


def bits_of(value: Any) -> Any:
    """An array of one of ml_dtypes' types as its bits and the name of the type; lists likewise."""
    if isinstance(value, (list, tuple)):
        return tuple(map(bits_of, value))
    if isinstance(value, np.ndarray) and value.dtype.name in _EXTENSIONS:
        bits = np.uint16 if value.dtype.itemsize == 2 else np.uint8
        return value.view(bits), _BY_NAME[value.dtype.name]
    return value


def expanded(value: Any, axis: int | None) -> Any:
    """With a dimension of 1 at `axis`."""
    if value is None or axis is None:
        return value
    if isinstance(value, (list, tuple)):
        return tuple(expanded(item, axis) for item in value)
    return value[(slice(None),) * axis + (None,)]


def squeezed(value: Any, axis: int | None) -> Any:
    """Without the dimension of 1 at `axis`."""
    if value is None or axis is None:
        return value
    if isinstance(value, (list, tuple)):
        return tuple(squeezed(item, axis) for item in value)
    return value[(slice(None),) * axis + (0,)]
