#!/usr/bin/env python3
"""Compares what libehc.so exports with exported.txt; `--update` rewrites the list.

Weak symbols (vtables, typeinfo) may be missing, since a compiler emits them as it needs them, but
never more than the list has. No symbol outside `ehc_*` and `ehc::` is ever allowed, and every
function that a public header declares EHC_API is there.
"""
import argparse
import pathlib
import re
import subprocess
import sys

LIST = pathlib.Path(__file__).with_name("exported.txt")
HEADERS = LIST.parents[2] / "include" / "ehc"
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


def declared():
    """Names of the functions that the public headers promise."""
    text = "\n".join(header.read_text() for header in HEADERS.rglob("*.h")
                     if header.name != "export.h")
    return set(re.findall(r"\bEHC_API\s[^;{]*?(\w+)\(", text))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    strong, weak = exported(args.library)
    foreign = sorted(name for name in strong | weak if not ALLOWED.match(name))
    for name in foreign:
        print(f"not a symbol of the library: {name}")
    names = set(re.findall(r"(\w+)(?:\[abi:\w+\])?(?:\(|$)", "\n".join(strong | weak),
                           re.MULTILINE))
    undefined = sorted(declared() - names)
    for name in undefined:
        print(f"declared EHC_API and not exported: {name}")
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
    return 1 if foreign or undefined or missing or extra else 0


if __name__ == "__main__":
    sys.exit(main())
