"""`python -m engramhc bench`."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operators", nargs="*", metavar="operator", help="all without one; see --list")
    parser.add_argument("--list", action="store_true", help="show the operators and stop")
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, help="on the CPU, ours and PyTorch's; all cores without")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, help="folder for bench.json, bench.html and bench.png")
    parser.set_defaults(run=main)


def main(o: argparse.Namespace) -> int:
    try:
        import torch
    except ImportError:
        print("engramhc bench: expected PyTorch to compare with, got none", file=sys.stderr)
        return 1
    from .. import set_num_threads
    from . import report
    from .cases import CASES
    from .measure import run

    if o.list:
        print("\n".join(CASES))
        return 0
    if unknown := [name for name in o.operators if name not in CASES]:
        print(
            f"engramhc bench: expected operators of {', '.join(CASES)}, got {', '.join(unknown)}",
            file=sys.stderr,
        )
        return 2
    device = o.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if o.threads:
        torch.set_num_threads(o.threads)
        set_num_threads(o.threads)
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    title = f"EngramHC, T={o.tokens} n=4 d={o.width} bf16, {machine}, torch {torch.__version__}"

    def progress(line: str) -> None:
        print(f"\r{line:60}", end="", file=sys.stderr, flush=True)

    results, remarks = run(
        o.operators,
        device=device,
        tokens=o.tokens,
        width=o.width,
        repeats=o.repeats,
        compile=not o.no_compile,
        progress=progress if sys.stderr.isatty() else lambda line: None,
    )
    print(f"{title}\n{report.table(results)}")
    for remark in remarks:
        print(f"- {remark}")
    if o.out is not None:
        o.out.mkdir(parents=True, exist_ok=True)
        record = {"title": title, "platform": platform.platform(), "remarks": remarks}
        record["results"] = [result._asdict() for result in results]
        (o.out / "bench.json").write_text(json.dumps(record, indent=1))
        (o.out / "bench.html").write_text(report.page(results, remarks, title), encoding="utf-8")
        try:
            report.picture(results, title, o.out / "bench.png")
        except ImportError:
            print("- no bench.png: matplotlib is not installed")
    return 0
