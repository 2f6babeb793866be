"""Calls of the library's operators on torch tensors (temporary: over ctypes)."""

import ctypes
import os
import pathlib
import sys
import threading

import torch

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benches"))
import c_library as c  # noqa: E402

TYPES = {
    torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.int64: (0, 64),
    torch.int32: (0, 32), torch.bool: (6, 8), torch.uint8: (1, 8), torch.float64: (2, 64),
    torch.float8_e4m3fn: (10, 8), torch.float8_e8m0fnu: (14, 8),
}
LIB = ctypes.CDLL(os.environ.get("EHC_LIBRARY", str(ROOT / "build/cpu/lib/libehc.so")))
LIB.ehc_last_error.restype = ctypes.c_char_p
LIB.ehc_op_find.restype = ctypes.c_void_p
_local = threading.local()
_ops = {}


class Error(Exception):
    pass


class ShapeError(Error, ValueError):
    pass


class AliasError(Error, ValueError):
    pass


class DTypeError(Error, TypeError):
    pass


class DeviceError(Error, ValueError):
    pass


class UnsupportedError(Error, NotImplementedError):
    pass


def _tensor(t):
    shape = (ctypes.c_int64 * t.dim())(*t.shape)
    strides = (ctypes.c_int64 * t.dim())(*t.stride())
    out = c.Tensor(t.data_ptr(), 1, 0, t.dim(), c.Type(*TYPES[t.dtype], 1), shape,
                   ctypes.cast(strides, ctypes.c_void_p), 0)
    out.keep = (shape, strides)
    return out


LIB.ehc_op_describe.restype = ctypes.POINTER(c.OperatorInfo)
LIB.ehc_op_tensor.restype = ctypes.POINTER(ctypes.c_char_p)
DTYPES = {v: k for k, v in TYPES.items()}


def _op(name):
    if name not in _ops:
        _ops[name] = ctypes.c_void_p(LIB.ehc_op_find(name.encode()))
    if not hasattr(_local, "context"):
        _local.context = ctypes.c_void_p()
        LIB.ehc_context_create_cpu(2, ctypes.byref(_local.context))
    return _ops[name]


def _arguments(inputs, outputs, attrs):
    named = []
    for io, tensors in ((0, inputs), (1, outputs)):
        for n, t in tensors.items():
            if isinstance(t, (list, tuple)):
                named += [(f"{n}.{i}", io, _tensor(x)) for i, x in enumerate(t)]
            elif t is not None:
                named.append((n, io, _tensor(t)))
    tensors = (c.NamedTensor * len(named))(
        *[c.NamedTensor(n.encode(), o, ctypes.pointer(t)) for n, o, t in named])
    values = [(k, v) for k, v in attrs.items() if v is not None]
    attributes = (c.Attribute * len(values))(
        *[c.Attribute(k.encode(), 0, c.TEXT, text=(str(v).lower() if isinstance(v, bool) else ",".join(map(str, v)) if isinstance(v, (list, tuple)) else str(v)).encode())
          for k, v in values])
    arguments = c.Arguments(None, 0, tensors, len(named), attributes, len(values))
    arguments.keep = named
    return arguments


def _run(name, inputs, outputs, attrs):
    for n, t in inputs.items():
        if t is not None and not isinstance(t, (torch.Tensor, list, tuple)):
            raise not_a_tensor(name, n, t)
    op = _op(name)
    arguments = _arguments(inputs, outputs, attrs)
    needed = ctypes.c_size_t()
    check(LIB.ehc_workspace_bytes(_local.context, op, ctypes.byref(arguments), ctypes.byref(needed)))
    if needed.value:
        workspace = ctypes.create_string_buffer(needed.value)
        LIB.ehc_context_set_workspace(_local.context, workspace, needed)
    check(LIB.ehc_run(_local.context, op, ctypes.byref(arguments)))


def _infer(name, inputs, attrs):
    op = _op(name)
    count = LIB.ehc_op_describe(op).contents.tensor_count
    layouts = (c.Layout * count)()
    arguments = _arguments(inputs, {}, attrs)
    check(LIB.ehc_infer_outputs(op, ctypes.byref(arguments), layouts, ctypes.c_size_t(count)))
    for position, layout in enumerate(layouts):
        if layout.dtype.bits:
            n = LIB.ehc_op_tensor(op, ctypes.c_size_t(position)).contents.value.decode()
            yield n, DTYPES[layout.dtype.code, layout.dtype.bits], tuple(layout.shape[: layout.ndim])


def check(status):
    if status:
        text = LIB.ehc_last_error().decode()
        kind = UnsupportedError if status == 5 else DTypeError if "code 2, 64" in text else ShapeError
        raise kind(text)


# --- what the package uses --------------------------------------------------------------------------

IMPLEMENTATION = [""]


def _with_unit_strides(inputs):
    """The inputs with copies of those whose last stride is not 1, or None when all are as they should."""
    copied = None
    for name, tensor in inputs.items():
        if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.stride(-1) != 1:
            copied = copied or dict(inputs)
            copied[name] = tensor.contiguous()
    return copied


def run(op, inputs, outputs, attrs):
    """Runs an operator of the library. The fast path checks nothing here: the library does."""
    try:
        _run(op, inputs, outputs, attrs)
    except Error:
        if IMPLEMENTATION[0] == "reference":
            if _double.takes(inputs):
                return _double.run(op, inputs, outputs, attrs)
        inputs = _with_unit_strides(inputs)
        if inputs is None:
            raise
        _run(op, inputs, outputs, attrs)


def made(op, inputs, attrs, outputs=None):
    """All outputs of an operator by name; those given are written, the others allocated."""
    outputs = dict(outputs or {})
    if IMPLEMENTATION[0] == "reference" and _double.takes(inputs):
        return _double.made(op, inputs, attrs, outputs)
    device = next(t.device for t in inputs.values() if t is not None)
    try:
        layouts = list(_infer(op, inputs, attrs))
    except Error:
        inputs = _with_unit_strides(inputs)
        if inputs is None:
            raise
        layouts = list(_infer(op, inputs, attrs))
    for name, dtype, shape in layouts:
        if name not in outputs:
            outputs[name] = torch.empty(shape, dtype=dtype, device=device)
    run(op, inputs, outputs, attrs)
    return outputs


def not_a_tensor(op, name, value):
    got = "None" if value is None else type(value).__name__
    return DTypeError(f"{op}: tensor '{name}': expected a torch.Tensor, got {got}")


def renamed(error, name, names):
    text = str(error)
    _, _, rest = text.partition(": ")
    for theirs, ours in names.items():
        rest = rest.replace(f"'{theirs}'", f"'{ours}'")
    return type(error)(f"{name}: {rest}")


class _Preset:
    def __init__(self, rms_eps, pre_eps, post_mult, repeat, sinkhorn_eps, convention):
        self.__dict__.update(locals())


PRESETS = {
    "train": _Preset(1e-6, 1e-6, 2.0, 20, 1e-6, "deepseek"),
    "repo": _Preset(1e-6, 1e-6, 1.0, 10, 1e-6, "deepseek"),
    "paper": _Preset(1e-20, 0.0, 2.0, 20, 0.0, "log"),
    "deepseek_v4": _Preset(1e-6, 1e-6, 2.0, 20, 1e-6, "deepseek"),
    "deepseek_v41": _Preset(1e-20, 1e-6, 2.0, 20, 1e-6, "deepseek"),
    "glm5": _Preset(1e-5, 1e-6, 2.0, 20, 1e-6, "deepseek"),
}


def find_preset(preset):
    return PRESETS[preset] if isinstance(preset, str) else preset


from . import _double  # noqa: E402
