"""One operator by the library, by PyTorch eager and by torch.compile, ready to take turns."""

import statistics
import time
import typing

import torch
import torch._functorch.config

STREAMS = 4
GOALS = {"torch eager": 5, "torch.compile": 1.5}
torch._functorch.config.donated_buffer = False  # or a compiled backward could run only once


class Comparison(typing.NamedTuple):
    variants: dict  # functions of no arguments by name; the first is the library's
    ours: dict  # what the library computes, by name
    theirs: list  # what PyTorch computes, in that order
    bytes_moved: int


def as_list(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


def forward(function, data, ours, outputs, bytes_moved):
    """`function(*data.values())` without gradients; `ours` writes `outputs`, in its order."""

    def call(f):
        def run():
            with torch.no_grad():
                return f(*data.values())

        return run

    return compare(call(function), call(compiled(function)), ours, outputs, bytes_moved)


def backward(function, data, upstream, ours, gradients, bytes_moved):
    """From the gradient of its one output to those of all of `data`."""
    inputs = [t.clone().requires_grad_() for t in data.values()]

    def call(f):
        out = f(*inputs)  # the graph, whose backward alone is timed
        return lambda: torch.autograd.grad(out, inputs, *upstream, retain_graph=True)

    return compare(call(function), call(compiled(function)), ours, gradients, bytes_moved)


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function)


def compare(eager, graph, ours, outputs, bytes_moved):
    ours()
    variants = {"engramhc": ours, "torch eager": eager, "torch.compile": graph}
    return Comparison(variants, outputs, as_list(eager()), bytes_moved)


def report(name, comparison, repeats, has_goal):
    print(f"\n{name}")
    for (label, ours), theirs in zip(comparison.ours.items(), comparison.theirs, strict=True):
        a, b = ours.double(), theirs.double()
        distance = ((a - b).square().sum() / (a.square() + b.square()).sum()).item()
        if "." not in label or label.endswith(".9"):  # of a list the last is the farthest off
            print(f"  {label}: calc_diff {distance:.2g}")
    times = {variant: [] for variant in comparison.variants}
    for turn in range(repeats + 1):
        for variant, call in comparison.variants.items():
            begin = time.perf_counter()
            call()
            if turn > 0:  # the first warms up, and compiles
                times[variant].append(time.perf_counter() - begin)
    best = {variant: min(t) for variant, t in times.items()}
    print(f"  {'':14} {'best':>11} {'median':>11} {'GB/s':>8} {'we are faster':>14}")
    for variant, t in times.items():
        goal = f" (goal {GOALS[variant]})" if has_goal and variant in GOALS else ""
        print(
            f"  {variant:14} {best[variant] * 1e3:8.1f} ms {statistics.median(t) * 1e3:8.1f} ms "
            f"{comparison.bytes_moved / best[variant] / 1e9:8.2f} "
            f"{best[variant] / best['engramhc']:13.1f}x{goal}",
            flush=True,
        )
