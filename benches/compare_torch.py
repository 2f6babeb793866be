#!/usr/bin/env python3
"""Operators beside PyTorch on the CPU, eager and compiled, in one process and one run.

    benches/compare_torch.py [engram.gate_bwd mhc.post_fwd ...] [--tokens 4096] [--width 4096] [--threads 2]

All operators without names. A backward is compared with autograd's of the same formula; gate_bwd
includes the gradients of both weights. Needs PyTorch (not among the packages of the tests). The
variants take turns; a table shows the best and the median of each, and how many times faster the
library is.
"""

import argparse
import pathlib

import torch

import torch_engram
import torch_mhc
from c_library import Library, View
from comparison import STREAMS, report

ROOT = pathlib.Path(__file__).resolve().parent.parent
TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in TYPES.items()}
COMPARISONS = torch_engram.COMPARISONS | torch_mhc.COMPARISONS
# PyTorch is as good as memory or its own matrix product allow.
WITHOUT_GOAL = {"mhc.expand_fwd", "mhc.expand_bwd", "mhc.prenorm_gemm"}


def open_library(path, threads):
    return Library(
        path,
        threads,
        view=lambda t: View(t.data_ptr(), NAMES[t.dtype], tuple(t.shape)),
        new=lambda dtype, shape: torch.empty(shape, dtype=TYPES[dtype]),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="operator", help=", ".join(COMPARISONS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/cpu/lib/libehc.so")
    o = parser.parse_args()
    if unknown := set(o.operators) - set(COMPARISONS):
        parser.error(f"expected operators of {', '.join(COMPARISONS)}, got {', '.join(sorted(unknown))}")

    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    library = open_library(o.library, o.threads)
    print(f"T={o.tokens} n={STREAMS} d={o.width} bf16, {o.threads} threads, torch {torch.__version__}")
    for name in o.operators or COMPARISONS:
        report(name, COMPARISONS[name](library, o.tokens, o.width), o.repeats, name not in WITHOUT_GOAL)


if __name__ == "__main__":
    main()
