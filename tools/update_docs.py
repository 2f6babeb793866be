#!/usr/bin/env python3
"""Writes what the docs take from the operator tables: tools/update_docs.py [--check].

Needs a built program ($EHC_BUILD/bin/ehc, default build/cpu). --check only tells, with exit code 1.
"""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- operators: begin -->", "<!-- operators: end -->"


def operators():
    program = ROOT / os.environ.get("EHC_BUILD", "build/cpu") / "bin" / "ehc"
    listed = subprocess.run([program, "op", "--list", "--json"], check=True, capture_output=True)
    return json.loads(listed.stdout)


def has_cuda(name):
    """A build without CUDA does not list its kernels, so their files are asked."""
    folder = ROOT / "src" / "ops" / name.split(".")[0]
    return any(f'"{name}"' in source.read_text() for source in folder.glob("*/*_cuda.cu"))


def summary_table():
    lines = ["| operator | what it does | CPU | CUDA |", "|---|---|---|---|"]
    for op in operators():
        names = op["impls"]["cpu"]
        simd = any(n.endswith("avx512") for n in names)
        cpu = "SIMD" if simd else "yes"
        lines.append(f"| `{op['name']}` | {op['summary']} | {cpu} | {'yes' if has_cuda(op['name']) else '-'} |")
    return "\n".join(lines)


def argument_tables():
    blocks = []
    for op in operators():
        lines = [f"### `{op['name']}`", "", "| argument | type | |", "|---|---|---|"]
        for t in op["inputs"]:
            lines.append(f"| `{t['name']}` | {'/'.join(t['dtypes'])}{t['shape']} | {'optional input' if t['optional'] else 'input'} |")
        for a in op["attributes"]:
            kind = a["type"] + (" " + "/".join(a["values"]) if "values" in a else "") + (" " + a["range"] if "range" in a else "")
            if "default" in a:
                default = a["default"]
                note = f"attribute, default {str(default).lower() if isinstance(default, bool) else default}"
            elif "required_with" in a:
                note = f"attribute, required with `{a['required_with']}`"
            elif "required_without" in a:
                note = f"attribute, required without `{a['required_without']}`"
            else:
                note = "attribute, required"
            lines.append(f"| `{a['name']}` | {kind} | {note} |")
        for t in op["outputs"]:
            when = f" (with {t['condition'].replace('|', ' or ')})" if "condition" in t else ""
            lines.append(f"| `{t['name']}` | {t['dtype']}{t['shape']} | output{when} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def main():
    check = sys.argv[1:] == ["--check"]
    stale = []
    for path, text in ((ROOT / "README.md", summary_table()), (ROOT / "docs" / "ops" / "reference.md", argument_tables())):
        old = path.read_text()
        head, rest = old.split(BEGIN)
        new = f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"
        if new == old:
            continue
        stale.append(path.name)
        if not check:
            path.write_text(new)
    if stale:
        print(f"update_docs: {'stale' if check else 'rewritten'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
