"""The C interface (include/ehc/c_api.h) on raw pointers: token maps, and operators on tables that
no array can hold, because they are mapped read-only or of a type that NumPy does not know.

    context = Context.cpu(threads=2)
    context.run("engram.gather_fwd", {"table": View(address, "BF16", (rows, dim)), ...}, {}, outputs)
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any, NamedTuple

from . import _core, errors

# Names of types as in safetensors files, with DLPack's code and bits.
TYPES = {
    "F32": (2, 32),
    "F16": (2, 16),
    "BF16": (4, 16),
    "F8_E4M3": (10, 8),
    "F8_E8M0": (14, 8),
    "I64": (0, 64),
    "I32": (0, 32),
    "U8": (1, 8),
    "BOOL": (6, 8),
}
_HOST, _CUDA, _TEXT = 1, 2, 5


class View(NamedTuple):
    """Memory as a tensor; strides in elements, None for contiguous; cuda is a device's index."""

    address: int
    dtype: str  # a key of TYPES
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    cuda: int | None = None


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _NamedTensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("is_output", ctypes.c_int32),
        ("tensor", ctypes.POINTER(_Tensor)),
    ]


class _Attribute(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("position", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("integers", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("text", ctypes.c_char_p),
    ]


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("tensors", ctypes.c_void_p),
        ("tensor_count", ctypes.c_size_t),
        ("named_tensors", ctypes.POINTER(_NamedTensor)),
        ("named_tensor_count", ctypes.c_size_t),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_size_t),
    ]


class TokenMapInfo(ctypes.Structure):
    _fields_ = [
        ("table", ctypes.POINTER(ctypes.c_int32)),
        ("vocab_size", ctypes.c_int64),
        ("size", ctypes.c_int32),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    folder = _core._library_path().parent
    lib = ctypes.CDLL(str(min(folder.glob("libehc.so*"))))  # the binding needs the very same file
    lib.ehc_last_error.restype = ctypes.c_char_p
    lib.ehc_op_find.restype = ctypes.c_void_p
    lib.ehc_token_map_describe.restype = ctypes.POINTER(TokenMapInfo)
    return lib


def check(status: int) -> None:
    if status != 0:
        text = library().ehc_last_error().decode()
        raise errors.translated(status, text, text.partition(":")[0], {})


class Context:
    """Where operators run. One thread at a time."""

    def __init__(self, handle: ctypes.c_void_p):
        self._handle, self._process = handle, os.getpid()

    @classmethod
    def cpu(cls, threads: int = 0) -> Context:
        handle = ctypes.c_void_p()
        check(library().ehc_context_create_cpu(threads, ctypes.byref(handle)))
        return cls(handle)

    @classmethod
    def cuda(cls, device: int, stream: int) -> Context:
        handle = ctypes.c_void_p()
        check(library().ehc_context_create_cuda(device, ctypes.c_void_p(stream), ctypes.byref(handle)))
        return cls(handle)

    def __del__(self):
        if self._process == os.getpid():  # a fork has no threads to wait for
            library().ehc_context_destroy(self._handle)

    def run(
        self, name: str, inputs: dict[str, View], outputs: dict[str, View], attributes: dict[str, Any]
    ) -> None:
        """An operator that needs no workspace. The interpreter's lock is free meanwhile."""
        Call(name, inputs, outputs, attributes).run(self)


class Call:
    """A call that is made again and again with other memory and other sizes. One thread at a time."""

    def __init__(
        self, name: str, inputs: dict[str, View], outputs: dict[str, View], attributes: dict[str, Any]
    ):
        self._op = _find(name)
        self._tensors = {key: _tensor(view) for key, view in [*inputs.items(), *outputs.items()]}
        named = (_NamedTensor * len(self._tensors))(
            *[
                _NamedTensor(key.encode(), key in outputs, ctypes.pointer(tensor))
                for key, tensor in self._tensors.items()
            ]
        )
        values = (_Attribute * len(attributes))(
            *[_Attribute(key.encode(), 0, _TEXT, text=_text(value)) for key, value in attributes.items()]
        )
        self._arguments = _Arguments(None, 0, named, len(named), values, len(values))
        self._reference = ctypes.byref(self._arguments)

    def run(self, context: Context, **changed: View) -> None:
        """Tensors by name are those of the call but for address and extents."""
        for name, view in changed.items():
            tensor = self._tensors[name]
            tensor.data = view.address
            for i, extent in enumerate(view.shape):
                tensor.shape[i] = extent
        check(library().ehc_run(context._handle, self._op, self._reference))


@functools.cache
def _find(name: str) -> ctypes.c_void_p:
    op = library().ehc_op_find(name.encode())
    if not op:
        raise errors.UnsupportedError(library().ehc_last_error().decode())
    return ctypes.c_void_p(op)


def _tensor(view: View) -> _Tensor:
    rank = len(view.shape)
    integers = ctypes.c_int64 * rank
    strides = None if view.strides is None else integers(*view.strides)
    place = (_HOST, 0) if view.cuda is None else (_CUDA, view.cuda)
    return _Tensor(
        view.address, *place, rank, _Type(*TYPES[view.dtype], 1), integers(*view.shape), strides, 0
    )


def _text(value: Any) -> bytes:
    if isinstance(value, bool):
        return str(value).lower().encode()
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)).encode()
    return str(value).encode()
