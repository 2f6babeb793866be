#!/usr/bin/env python3
"""The gate beside PyTorch on the CPU, eager and compiled, in one process and one run.

    benches/compare_torch.py [gate_fwd gate_bwd] [--tokens 8192] [--width 4096] [--threads 2]

gate_bwd is the backward with the gradients of both weights (engram.gate_bwd, engram.grad_w_reduce)
beside autograd's. Needs PyTorch (not among the packages of the tests). The variants take turns; a
table shows the best and the median of each, and how many times faster the library is.
"""

import argparse
import pathlib
import statistics
import time

import torch
import torch._functorch.config

from c_library import Library, View

ROOT = pathlib.Path(__file__).resolve().parent.parent
STREAMS, EPS, CLAMP = 4, 1e-6, 1e-6
GOALS = {"torch eager": 5, "torch.compile": 1.5}
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in TYPES.items()}


def open_library(path, threads):
    return Library(
        path,
        threads,
        view=lambda t: View(t.data_ptr(), NAMES[t.dtype], tuple(t.shape)),
        new=lambda dtype, shape: torch.empty(shape, dtype=TYPES[dtype]),
    )


def torch_gate(x, k, v, weight_hidden, weight_embed):
    xf, kf = x.float(), k.float()
    rx = torch.rsqrt(xf.square().mean(-1) + EPS)
    rk = torch.rsqrt(kf.square().mean(-1) + EPS)
    z = (xf * (weight_hidden * weight_embed) * kf).sum(-1) * rx * rk * x.shape[-1] ** -0.5
    alpha = torch.sigmoid(torch.copysign(z.abs().clamp_min(CLAMP).sqrt(), z))
    return (xf + alpha.unsqueeze(-1) * v.float().unsqueeze(1)).to(x.dtype)


class Data:
    """Inputs of the gate, and what the library and PyTorch call them."""

    def __init__(self, tokens, width):
        torch.manual_seed(0)
        self.x = torch.randn(tokens, STREAMS, width).bfloat16()
        self.k = torch.randn(tokens, STREAMS, width).bfloat16()
        self.v = torch.randn(tokens, width).bfloat16()
        self.weight_hidden = 1 + 0.1 * torch.randn(STREAMS, width)
        self.weight_embed = 1 + 0.1 * torch.randn(STREAMS, width)
        self.torch = [self.x, self.k, self.v, self.weight_hidden, self.weight_embed]
        self.gate = {
            "residual": self.x,
            "key": self.k,
            "value": self.v,
            "weight_fused": self.weight_hidden * self.weight_embed,
        }


def forward(library, data, compiled):
    """Variants by name, and pairs of what the library and PyTorch compute."""
    ours, out = library.prepare("engram.gate_fwd", data.gate, {"eps": EPS, "clamp": CLAMP})

    def torch_call(function):
        def call():
            with torch.no_grad():
                return function(*data.torch)

        return call

    variants = {
        "engramhc": ours,
        "torch eager": torch_call(torch_gate),
        "torch.compile": torch_call(compiled),
    }
    ours()
    return variants, {"out": (out["out"], variants["torch eager"]())}


def backward(library, data, compiled):
    """The same, from the gradient of the output to those of all five inputs."""
    grad = torch.randn_like(data.x)
    run_forward, saved = library.prepare(
        "engram.gate_fwd", data.gate, {"eps": EPS, "clamp": CLAMP, "save": True}
    )
    run_forward()
    statistics_of = {name: t for name, t in saved.items() if name != "out"}
    of_gate, rows = library.prepare(
        "engram.gate_bwd", {"grad_out": grad, **data.gate, **statistics_of}, {"clamp": CLAMP}
    )
    weights = {"weight_hidden": data.weight_hidden, "weight_embed": data.weight_embed}
    of_weights, sums = library.prepare(
        "engram.grad_w_reduce", {"grad_weight_partial": rows["grad_weight_partial"], **weights}, {}
    )

    def ours():
        of_gate()
        of_weights()

    inputs = [t.clone().requires_grad_() for t in data.torch]

    def torch_call(function):
        out = function(*inputs)  # the graph, whose backward alone is timed
        return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)

    variants = {
        "engramhc": ours,
        "torch eager": torch_call(torch_gate),
        "torch.compile": torch_call(compiled),
    }
    ours()
    names = ["grad_residual", "grad_key", "grad_value", "grad_weight_hidden", "grad_weight_embed"]
    return variants, {name: ((rows | sums)[name], t) for name, t in zip(names, variants["torch eager"]())}


# Variants of an operator, and the bytes that it moves a token and width.
OPERATORS = {"gate_fwd": (forward, 6 * STREAMS + 2), "gate_bwd": (backward, 10 * STREAMS + 4)}


def report(name, variants, pairs, bytes_moved, repeats):
    for label, (ours, theirs) in pairs.items():
        a, b = ours.double(), theirs.double()
        distance = ((a - b).square().sum() / (a.square() + b.square()).sum()).item()
        print(f"{label}: calc_diff {distance:.2g}")
    times = {variant: [] for variant in variants}
    for turn in range(repeats + 1):
        for variant, call in variants.items():
            begin = time.perf_counter()
            call()
            if turn > 0:  # the first warms up, and compiles
                times[variant].append(time.perf_counter() - begin)
    best = {variant: min(t) for variant, t in times.items()}
    print(f"{name:14} {'best':>11} {'median':>11} {'GB/s':>8} {'we are faster':>14}")
    for variant, t in times.items():
        goal = f" (goal {GOALS[variant]})" if variant in GOALS else ""
        print(
            f"{variant:14} {best[variant] * 1e3:8.1f} ms {statistics.median(t) * 1e3:8.1f} ms "
            f"{bytes_moved / best[variant] / 1e9:8.2f} {best[variant] / best['engramhc']:13.1f}x{goal}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="operator", help=" or ".join(OPERATORS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/cpu/lib/libehc.so")
    o = parser.parse_args()
    if unknown := set(o.operators) - set(OPERATORS):
        parser.error(f"expected operators of {', '.join(OPERATORS)}, got {', '.join(sorted(unknown))}")

    torch.set_num_threads(o.threads)
    torch._functorch.config.donated_buffer = False  # or a compiled backward could run only once
    library, data = open_library(o.library, o.threads), Data(o.tokens, o.width)
    compiled = torch.compile(torch_gate)
    print(f"T={o.tokens} n={STREAMS} d={o.width} bf16, {o.threads} threads, torch {torch.__version__}")
    for name in o.operators or OPERATORS:
        prepare, bytes_per_element = OPERATORS[name]
        variants, pairs = prepare(library, data, compiled)
        report(name, variants, pairs, bytes_per_element * o.width * o.tokens, o.repeats)


if __name__ == "__main__":
    main()
