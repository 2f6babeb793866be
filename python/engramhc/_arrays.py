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
_NUMPY = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
# Types that NumPy has by ml_dtypes only, and its names there.
_EXTENSIONS = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}
_EXTENSION_NAMES = {name: dtype for dtype, name in _EXTENSIONS.items()}


class NumpyArrays:
    is_foreign = False

    @staticmethod
    def empty(dtype: str, shape: tuple[int, ...], like: Any) -> np.ndarray:
        return np.empty(shape, _NUMPY.get(dtype) or _extension(dtype))

    @staticmethod
    def stream(stream: int | None, like: Any) -> Any:
        return contextlib.nullcontext(None)

    @staticmethod
    def finished(array: Any, like: Any) -> Any:
        return array


class TorchArrays:
    """Torch, which is there when one of its tensors is."""

    is_foreign = False

    def __init__(self) -> None:
        self._torch = torch = sys.modules["torch"]
        self._empty = torch.empty
        self._dtypes = {
            "F32": torch.float32,
            "F16": torch.float16,
            "BF16": torch.bfloat16,
            "F8_E4M3": torch.float8_e4m3fn,
            "F8_E8M0": torch.float8_e8m0fnu,
            "I64": torch.int64,
            "I32": torch.int32,
            "U8": torch.uint8,
            "BOOL": torch.bool,
        }

    def empty(self, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        return self._empty(shape, dtype=self._dtypes[dtype], device=like.device)

    @contextlib.contextmanager
    def stream(self, stream: int | None, like: Any) -> Iterator[None]:
        """Memory made inside belongs to the stream too; the binding then asks for the current one."""
        if not like.is_cuda or stream is None:
            yield None
            return
        cuda = self._torch.cuda
        with cuda.device(like.device), cuda.stream(cuda.ExternalStream(stream, like.device)):
            yield None

    @staticmethod
    def finished(array: Any, like: Any) -> Any:
        return array


class ForeignArrays:
    """A framework whose current stream the binding does not see: CuPy, or one with an array
    namespace like JAX, whose arrays are made from NumPy's since they cannot be written."""

    is_foreign = True

    def __init__(self, kind: type) -> None:
        self._name = kind.__module__.partition(".")[0]
        self._cupy = sys.modules["cupy"] if self._name == "cupy" else None

    def empty(self, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        if self._cupy is not None:
            with like.device:
                return self._cupy.empty(shape, _NUMPY.get(dtype) or _extension(dtype))
        if like.__dlpack_device__()[0] != _HOST:
            raise UnsupportedError(f"arrays of {self._name} on a device need `out=`")
        return np.empty(shape, _NUMPY.get(dtype) or _extension(dtype))

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


def _extension(dtype: str) -> np.dtype:
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(f"NumPy arrays of {dtype} need the package ml_dtypes") from None
    return np.dtype(getattr(ml_dtypes, _EXTENSIONS[dtype]))


_FRAMEWORKS: dict[type, Any] = {np.ndarray: NumpyArrays()}


def framework_of(array: Any) -> Any:
    """The framework of an array, by its type."""
    kind = type(array)
    try:
        return _FRAMEWORKS[kind]
    except KeyError:
        pass
    if isinstance(array, np.ndarray):
        found = _FRAMEWORKS[np.ndarray]
    elif any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in kind.__mro__):
        found = TorchArrays()
    elif hasattr(kind, "__dlpack__"):
        found = ForeignArrays(kind)
    else:
        found = _FRAMEWORKS[np.ndarray]  # the call itself will say that it is no array
    _FRAMEWORKS[kind] = found
    return found


def bits_of(value: Any) -> Any:
    """An array of one of ml_dtypes' types as its bits and the name of the type; lists likewise."""
    if isinstance(value, (list, tuple)):
        return tuple(map(bits_of, value))
    if isinstance(value, np.ndarray) and value.dtype.name in _EXTENSION_NAMES:
        bits = np.uint16 if value.dtype.itemsize == 2 else np.uint8
        return value.view(bits), _EXTENSION_NAMES[value.dtype.name]
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
