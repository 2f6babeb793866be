"""What the report and the terminal table both read: the figures of pipeline, stack and training, and
the text's tokens."""

from __future__ import annotations

import json
import pathlib

import numpy as np
from v4_tokenizer import load_tokenizer


def read_json(path: pathlib.Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


class Results:
    def __init__(self, figures: pathlib.Path, ids: pathlib.Path,
                 stack: pathlib.Path | None = None, training: pathlib.Path | None = None):
        self.figures = read_json(figures)
        self.stack = read_json(stack) if stack else None
        self.training = read_json(training) if training else None
        self.ids = np.load(ids, mmap_mode="r")
        self.tokenizer = load_tokenizer()

    def __getitem__(self, key):
        return self.figures[key]

    def text(self, begin: int, end: int) -> str:
        """Tokens [begin, end) of the text, as it stands there."""
        return self.tokenizer.decode(self.ids[max(0, begin) : end].tolist(),
                                     skip_special_tokens=False)

    def token(self, at: int) -> str:
        return self.text(at, at + 1)

    def ngram(self, entry: dict, order: int) -> str:
        """First spelling of an n-gram; before the start of the text there is the pad id."""
        last = entry["first_token"]
        pads = max(0, order - 1 - last)
        return "□" * pads + self.text(last - order + 1, last + 1)

    @property
    def checks(self) -> list[dict]:
        return self["checks"] + (self.stack["checks"] if self.stack else [])

    @property
    def all_equal(self) -> bool:
        return all(check["equal"] for check in self.checks)

    def stage(self, name: str) -> dict | None:
        return next((stage for stage in self["stages"] if stage["stage"] == name), None)


def visible(text: str) -> str:
    """White space that can be seen."""
    return text.replace(" ", "·").replace("\n", "↵")


def deviations(table: dict) -> float:
    """How many standard deviations the rows used are away from the prediction."""
    spread = table["rows_used_deviation"]
    difference = table["rows_used"] - table["rows_used_predicted"]
    return difference / spread if spread > 0 else 0.0


def number(value: float | None) -> str:
    """Of any size; none is what JSON has for infinity and for no number."""
    if value is None:
        return "beyond fp32"
    return f"{value:.4f}" if value < 100 else f"{value:.2g}"


def expected(value: float) -> str:
    """A predicted number of things, which need not be whole."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
