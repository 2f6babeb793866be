#!/usr/bin/env python3
"""Checks that ehc/<family>.h includes every header of ehc/<family>/, and ehc/ehc.h everything else.

usage: umbrella.py INCLUDE_FOLDER
"""
import pathlib
import re
import sys

# The C interface stands alone; export.h comes with every header.
APART = {"ehc/c_api.h", "ehc/export.h", "ehc/ehc.h"}


def includes(path):
    return set(re.findall(r'^#include "(.*)"$', path.read_text(), re.MULTILINE))


def main():
    root = pathlib.Path(sys.argv[1])
    wrong = []
    families = [path for path in (root / "ehc").iterdir() if path.is_dir()]
    for family in families:
        umbrella = root / "ehc" / f"{family.name}.h"
        wanted = {f"ehc/{family.name}/{path.name}" for path in family.glob("*.h")}
        got = includes(umbrella) if umbrella.exists() else set()
        wrong += [f"ehc/{family.name}.h lacks {name}" for name in sorted(wanted - got)]
    top = {f"ehc/{path.name}" for path in (root / "ehc").glob("*.h")} - APART
    wrong += [f"ehc/ehc.h lacks {name}" for name in sorted(top - includes(root / "ehc/ehc.h"))]
    print("\n".join(wrong) if wrong else f"{len(families)} families")
    return 1 if wrong or not families else 0


if __name__ == "__main__":
    sys.exit(main())
