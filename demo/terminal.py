"""Small helpers for programs that talk to a terminal."""

from __future__ import annotations

import sys
import time


def fail(message: str) -> None:
    """Ends the program with one line on stderr."""
    sys.exit(f"demo: {message}")


class ProgressBar:
    """A bar on stderr for slow work; silent when stderr is not a terminal."""

    WIDTH = 30

    def __init__(self, what: str, total: int):
        self.what, self.total = what, max(1, total)
        self.visible, self.next = sys.stderr.isatty(), 0.0

    def show(self, done: int) -> None:
        now = time.monotonic()
        if not self.visible or now < self.next:
            return
        self.next = now + 0.1
        filled = "=" * (self.WIDTH * done // self.total)
        print(f"\r{self.what} [{filled:<{self.WIDTH}}] {100 * done // self.total} %\x1b[K",
              end="", file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.visible:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() else text
