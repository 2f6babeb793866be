#!/usr/bin/env python3
"""engram.gate_fwd beside PyTorch on the CPU, eager and compiled, in one process and one run.

    benches/compare_torch.py [--tokens 8192] [--width 4096] [--threads 2] [--library build/cpu/lib/libehc.so]

Needs PyTorch (not among the packages of the tests). The three variants take turns; the table shows
the best and the median of each, and how many times faster the library is.
"""

import argparse
import ctypes
import pathlib
import statistics
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
STREAMS, EPS, CLAMP = 4, 1e-6, 1e-6
CODES = {torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.float16: (2, 16)}


class Tensor(ctypes.Structure):
    """ehc_tensor of include/ehc/c_api.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class NamedTensor(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("is_output", ctypes.c_int32), ("tensor", ctypes.POINTER(Tensor))]


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


def view(t):
    code, bits = CODES[t.dtype]
    shape = (ctypes.c_int64 * t.dim())(*t.shape)
    return Tensor(t.data_ptr(), 1, 0, t.dim(), code, bits, 1, shape, None, 0)


class Library:
    def __init__(self, path, threads):
        self.lib = ctypes.CDLL(str(path))
        self.lib.ehc_last_error.restype = ctypes.c_char_p
        self.lib.ehc_op_find.restype = ctypes.c_void_p
        self.context = ctypes.c_void_p()
        self.check(self.lib.ehc_context_create_cpu(threads, ctypes.byref(self.context)))

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.ehc_last_error().decode())

    def gate(self, residual, key, value, weight_fused, out):
        """A function of no arguments that runs the call."""
        tensors = dict(residual=residual, key=key, value=value, weight_fused=weight_fused, out=out)
        views = [(name.encode(), int(name == "out"), view(t)) for name, t in tensors.items()]
        named = (NamedTensor * len(views))(*[NamedTensor(n, o, ctypes.pointer(v)) for n, o, v in views])
        real = 1  # EHC_REAL
        attributes = (Attribute * 2)(
            Attribute(b"eps", 0, real, 0, EPS), Attribute(b"clamp", 0, real, 0, CLAMP)
        )
        arguments = Arguments(None, 0, named, len(views), attributes, 2)
        op = ctypes.c_void_p(self.lib.ehc_op_find(b"engram.gate_fwd"))
        return lambda: self.check(self.lib.ehc_run(self.context, op, ctypes.byref(arguments)))


def torch_gate(x, k, v, wf):
    xf, kf = x.float(), k.float()
    rx = torch.rsqrt(xf.square().mean(-1) + EPS)
    rk = torch.rsqrt(kf.square().mean(-1) + EPS)
    z = (xf * wf * kf).sum(-1) * rx * rk * x.shape[-1] ** -0.5
    alpha = torch.sigmoid(torch.copysign(z.abs().clamp_min(CLAMP).sqrt(), z))
    return (xf + alpha.unsqueeze(-1) * v.float().unsqueeze(1)).to(x.dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/cpu/lib/libehc.so")
    o = parser.parse_args()

    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    x = torch.randn(o.tokens, STREAMS, o.width).bfloat16()
    k = torch.randn(o.tokens, STREAMS, o.width).bfloat16()
    v = torch.randn(o.tokens, o.width).bfloat16()
    wf = torch.randn(STREAMS, o.width)
    out = torch.empty_like(x)

    ours = Library(o.library, o.threads).gate(x, k, v, wf, out)
    compiled = torch.compile(torch_gate)
    variants = {
        "engramhc": ours,
        "torch eager": lambda: torch_gate(x, k, v, wf),
        "torch.compile": lambda: compiled(x, k, v, wf),
    }
    with torch.no_grad():
        ours()
        worst = (out.float() - torch_gate(x, k, v, wf).float()).abs().max().item()
        compiled(x, k, v, wf)
        times = {name: [] for name in variants}
        for _ in range(o.repeats):
            for name, call in variants.items():
                begin = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begin)

    bytes_moved = (6 * STREAMS + 2) * o.width * o.tokens
    best = {name: min(t) for name, t in times.items()}
    print(f"gate, T={o.tokens} n={STREAMS} d={o.width} bf16, {o.threads} threads, torch {torch.__version__}")
    print(f"largest difference to torch: {worst:.3g}")
    print(f"{'':14} {'best':>10} {'median':>10} {'GB/s':>8} {'we are faster':>14}")
    for name, t in times.items():
        print(
            f"{name:14} {best[name] * 1e3:8.1f} ms {statistics.median(t) * 1e3:8.1f} ms "
            f"{bytes_moved / best[name] / 1e9:8.2f} {best[name] / best['engramhc']:13.1f}x"
        )


if __name__ == "__main__":
    main()
