"""What a call of `engramhc.ops` or `engramhc.torch` costs beside its kernel: small calls on NumPy's and
torch's arrays.

    PYTHONPATH=python python benches/python_overhead.py

Prints microseconds, the best of several rounds, with outputs made by the call and with `out=`, and of the
functions of engramhc.torch also where autograd records them. Goals for one token of 4 streams of 64: 8 us,
30 us for mhc_pre with autograd.
"""

import functools
import time

import numpy as np
from engramhc import ops

ROUNDS, CALLS = 15, 2000
GOAL, GOAL_RECORDED = 8.0, 30.0


def best(call):
    """Microseconds a call."""
    call()
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(rounds)


def cases(make):
    """Name, call, and the same with the outputs given."""
    n, d = 4, 64
    y, residual, post, comb = make(1, d), make(1, n, d), make(1, n), make(1, n, n)
    kv, weight = make(1, n + 1, d), make(n, d)
    constants = {"eps": 1e-6, "clamp": 1e-6}
    out = make(1, n, d)
    yield (
        "mhc_post_fwd",
        lambda: ops.mhc_post_fwd(y, residual, post, comb),
        lambda: ops.mhc_post_fwd(y, residual, post, comb, out=out),
    )
    yield (
        "engram_gate_fwd",
        lambda: ops.engram_gate_fwd(residual, kv, weight, **constants),
        lambda: ops.engram_gate_fwd(residual, kv, weight, **constants, out=out),
    )
    fn, scale, base = make(24, n * d), make(3), make(24)
    yield (
        "mhc_pre",
        lambda: ops.mhc_pre(residual, fn, scale, base, preset="train"),
        lambda: ops.mhc_pre(residual, fn, scale, base, preset="train", out=(y, post, comb)),
    )


def torch_cases():
    """Name, call without gradients, and the same with tensors that require them."""
    import engramhc.torch as ehc
    import torch

    n, d = 4, 64
    shapes = {
        "mhc_post": ((1, d), (1, n, d), (1, n), (1, n, n)),
        "mhc_pre": ((1, n, d), (24, n * d), (3,), (24,)),
        "engram_gate": ((1, n, d), (1, n + 1, d), (n, d), (n, d)),
    }
    options = {"mhc_post": {}, "mhc_pre": {"preset": "train"}, "engram_gate": {"eps": 1e-6, "clamp": 1e-6}}
    for name, given in shapes.items():
        function = functools.partial(getattr(ehc, name), **options[name])
        plain = [torch.ones(shape) for shape in given]
        wanting = [tensor.clone().requires_grad_() for tensor in plain]
        yield name, functools.partial(function, *plain), functools.partial(function, *wanting)


def frameworks():
    yield "numpy", lambda *shape: np.ones(shape, np.float32)
    try:
        import torch
    except ImportError:
        return
    yield "torch", lambda *shape: torch.ones(shape)


def main():
    print(f"{'':24}{'new outputs':>14}{'out=':>10}   us")
    for framework, make in frameworks():
        for name, new, given in cases(make):
            print(f"{framework + ' ' + name:24}{best(new):14.2f}{best(given):10.2f}")
    try:
        import torch  # noqa: F401
    except ImportError:
        return
    print(f"\n{'engramhc.torch':24}{'no gradients':>14}{'recorded':>10}   us")
    for name, plain, recorded in torch_cases():
        print(f"{name:24}{best(plain):14.2f}{best(recorded):10.2f}")
    print(f"goals: {GOAL} us for mhc_post and engram_gate, {GOAL_RECORDED} us for mhc_pre recorded")


if __name__ == "__main__":
    main()
