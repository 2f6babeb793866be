#!/usr/bin/env python3
"""Compares what libehc.so exports with exported.txt; `--update` rewrites the list.

Weak symbols (vtables, typeinfo) may be missing, since a compiler emits them as it needs them, but
never more than the list has. No symbol outside `ehc_*` and `ehc::` is ever allowed.
"""
import argparse
import pathlib
import re
import subprocess
import sys

LIST = pathlib.Path(__file__).with_name("exported.txt")
ALLOWED = re.compile(r"(?:vtable for |typeinfo for |typeinfo name for )?ehc(?:::|_)")


def exported(library):
    """Names by kind: (strong, weak), demangled."""
    text = subprocess.run(["nm", "-D", "-C", "--defined-only", library], check=True,
                          capture_output=True, text=True).stdout
    strong, weak = set(), set()
    for line in text.splitlines():
        kind, name = re.fullmatch(r"[0-9a-f]+ (\S) (.*)", line).groups()
        (strong if kind in "TDBR" else weak).add(name)
    return strong, weak


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    strong, weak = exported(args.library)
    foreign = sorted(name for name in strong | weak if not ALLOWED.match(name))
    for name in foreign:
        print(f"not a symbol of the library: {name}")
    if args.update and not foreign:
        LIST.write_text("".join(f"{name}\n" for name in sorted(strong | weak)))
        return 0
    listed = set(LIST.read_text().splitlines())
    missing = sorted(name for name in listed - strong - weak
                     if not re.match("vtable for |typeinfo ", name))
    extra = sorted((strong | weak) - listed - set(foreign))
    for name in missing:
        print(f"no longer exported: {name}")
    for name in extra:
        print(f"exported, but not in the list: {name}")
    if missing or extra:
        print(f"If this is meant: {sys.argv[0]} {args.library} --update")
    return 1 if foreign or missing or extra else 0


if __name__ == "__main__":
    sys.exit(main())
