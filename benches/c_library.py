"""Operators of the library through its C interface (include/ehc/c_api.h), for tensors of any framework.

    library = Library("build/cpu/lib/libehc.so", threads=2, view=..., new=...)
    run, outputs = library.prepare("engram.gate_fwd", {"residual": x, ...}, {"eps": 1e-6, "clamp": 1e-6})
    run()

`view(tensor)` gives its View, `new(dtype, shape)` an uninitialised tensor for an output.
"""

import ctypes
import typing

CODES = {"F32": (2, 32), "F16": (2, 16), "BF16": (4, 16), "I64": (0, 64), "I32": (0, 32), "BOOL": (6, 8)}
NAMES = {code: name for name, code in CODES.items()}
HOST, TEXT, MAX_RANK = 1, 5, 8


class View(typing.NamedTuple):
    """A contiguous tensor in host memory."""

    address: int
    dtype: str  # a key of CODES
    shape: tuple[int, ...]


class Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class NamedTensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("is_output", ctypes.c_int32),
        ("tensor", ctypes.POINTER(Tensor)),
    ]


class Attribute(ctypes.Structure):
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


class Arguments(ctypes.Structure):
    _fields_ = [
        ("tensors", ctypes.c_void_p),
        ("tensor_count", ctypes.c_size_t),
        ("named_tensors", ctypes.POINTER(NamedTensor)),
        ("named_tensor_count", ctypes.c_size_t),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_size_t),
    ]


class OperatorInfo(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("section", ctypes.c_char_p),
        ("summary", ctypes.c_char_p),
        ("tensor_count", ctypes.c_size_t),
    ]


class Layout(ctypes.Structure):
    _fields_ = [("dtype", Type), ("ndim", ctypes.c_int32), ("shape", ctypes.c_int64 * MAX_RANK)]


class Library:
    def __init__(self, path, threads, view, new):
        self.lib = ctypes.CDLL(str(path))
        self.lib.ehc_last_error.restype = ctypes.c_char_p
        self.lib.ehc_op_find.restype = ctypes.c_void_p
        self.lib.ehc_op_describe.restype = ctypes.POINTER(OperatorInfo)
        self.lib.ehc_op_tensor.restype = ctypes.POINTER(ctypes.c_char_p)  # its first member, the name
        self.view, self.new = view, new
        self.context, self.workspace = ctypes.c_void_p(), b""
        self._check(self.lib.ehc_context_create_cpu(threads, ctypes.byref(self.context)))

    def prepare(self, name, inputs, attributes, list_length=0):
        """A function of no arguments that runs the call, and its outputs by name; lists among them
        have `list_length` entries."""
        op = ctypes.c_void_p(self.lib.ehc_op_find(name.encode()))
        if not op:
            raise RuntimeError(self.lib.ehc_last_error().decode())
        outputs = {
            output: self.new(dtype, shape)
            for position, dtype, shape in self._outputs(op, self._arguments(inputs, {}, attributes))
            for output in self._names(op, position, list_length)
        }
        arguments = self._arguments(inputs, outputs, attributes)
        needed = ctypes.c_size_t()
        self._check(
            self.lib.ehc_workspace_bytes(self.context, op, ctypes.byref(arguments), ctypes.byref(needed))
        )
        if needed.value > len(self.workspace):
            self.workspace = ctypes.create_string_buffer(needed.value)
            self._check(self.lib.ehc_context_set_workspace(self.context, self.workspace, needed))
        return (lambda: self._check(self.lib.ehc_run(self.context, op, ctypes.byref(arguments)))), outputs

    def _check(self, status):
        if status:
            raise RuntimeError(self.lib.ehc_last_error().decode())

    def _outputs(self, op, arguments):
        """Position, dtype and shape of what the call makes."""
        count = self.lib.ehc_op_describe(op).contents.tensor_count
        layouts = (Layout * count)()
        self._check(
            self.lib.ehc_infer_outputs(op, ctypes.byref(arguments), layouts, ctypes.c_size_t(count))
        )
        for position, layout in enumerate(layouts):
            if layout.dtype.bits:
                dtype = NAMES[layout.dtype.code, layout.dtype.bits]
                yield position, dtype, tuple(layout.shape[: layout.ndim])

    def _names(self, op, position, list_length):
        name = self.lib.ehc_op_tensor(op, ctypes.c_size_t(position)).contents.value.decode()
        stem, dot, _ = name.partition(".")
        return [f"{stem}.{i}" for i in range(list_length)] if dot else [name]

    def _arguments(self, inputs, outputs, attributes):
        named = [(name, 0, t) for name, t in inputs.items()]
        named += [(name, 1, t) for name, t in outputs.items()]
        tensors = (NamedTensor * len(named))(
            *[
                NamedTensor(name.encode(), is_output, ctypes.pointer(self._tensor(self.view(t))))
                for name, is_output, t in named
            ]
        )
        values = (Attribute * len(attributes))(
            *[
                Attribute(name.encode(), 0, TEXT, text=str(value).lower().encode())
                for name, value in attributes.items()
            ]
        )
        arguments = Arguments(None, 0, tensors, len(named), values, len(attributes))
        arguments.keep = (inputs, outputs)  # as long as the call may run
        return arguments

    @staticmethod
    def _tensor(view):
        shape = (ctypes.c_int64 * len(view.shape))(*view.shape)
        return Tensor(view.address, HOST, 0, len(view.shape), Type(*CODES[view.dtype], 1), shape, None, 0)
