"""Writes the demo's text: the King James Bible of the package bible-kjv, or a file of the user's.

    read_text.py OUTPUT [--text FILE]

One verse or line per line, UTF-8, without verse labels, control characters and empty lines.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import shutil
import subprocess

from terminal import fail

WHOLE_BIBLE = "gen1:1-rev22:21"
VERSE_LABEL = re.compile(r"^(?:[1-3]?[A-Za-z]+\d+:\d+) ", re.MULTILINE)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def bible() -> str:
    program = shutil.which("bible")
    if program is None:
        fail("the program `bible` is missing: install the packages bible-kjv and bible-kjv-text")
    result = subprocess.run([program, "-f", WHOLE_BIBLE], capture_output=True, text=True)
    if result.returncode != 0 or not result.stdout.strip():
        fail(f"`bible -f {WHOLE_BIBLE}` gave no text (package bible-kjv-text installed?): "
             f"{result.stderr.strip() or 'no message'}")
    return VERSE_LABEL.sub("", result.stdout)


def user_text(path: pathlib.Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        fail(f"{path}: cannot be read: {error.strerror}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{path}: expected UTF-8, got byte 0x{content[error.start]:02x} at position "
             f"{error.start}; convert it, e.g. with iconv -f latin1 -t utf-8")


def clean(text: str) -> str:
    """Lines with single spaces; a line without a visible character is dropped."""
    lines = []
    for line in text.splitlines():
        words = " ".join(CONTROL.sub(" ", line).split())
        if words:
            lines.append(words)
    return "".join(line + "\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path)
    arguments = parser.parse_args()
    text = clean(user_text(arguments.text) if arguments.text else bible())
    if not text:
        fail(f"{arguments.text or 'the Bible'}: expected text, got none")
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{arguments.output}: cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()
