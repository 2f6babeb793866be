#!/usr/bin/env python3
"""Checks the object files that are compiled for one instruction set.

A weak symbol (an inline function, a template) in such a file may be the copy that the linker keeps
for the whole program, and then crashes older processors. So each file defines only global symbols
in a namespace of its instruction set, no weak ones, and imports next to nothing.

usage: isa_objects.py ISA OBJECT...
"""
import re
import subprocess
import sys

IMPORTS = {"memcpy", "memmove", "memset", "_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail"}
# Without fused multiply-add instructions std::fma is a call of the C library.
GENERIC_IMPORTS = {"fma", "fmaf"}


def problems(isa, path):
    text = subprocess.run(["nm", "-C", path], check=True, capture_output=True, text=True).stdout
    allowed = IMPORTS | (GENERIC_IMPORTS if isa == "generic" else set())
    own = re.compile(rf"ehc::(?:\w+::)*{isa}::")
    defined = 0
    for line in text.splitlines():
        kind, name = re.fullmatch(r"(?:[0-9a-f]+)? *(\S) (.*)", line).groups()
        if kind == "U":
            if name not in allowed:
                yield f"imports {name}"
        elif kind in "WwVvu":
            yield f"weak symbol {name}"
        elif kind.isupper():
            defined += 1
            if not own.match(name):
                yield f"defines {name} outside of namespace {isa}"
    if defined == 0:
        yield "defines nothing"


def main():
    isa, *paths = sys.argv[1:]
    if not paths:
        print(f"no object files for {isa}")
        return 1
    bad = [f"{path}: {problem}" for path in paths for problem in problems(isa, path)]
    print("\n".join(bad) if bad else f"{isa}: {len(paths)} object files")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
