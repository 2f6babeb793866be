"""The examples of examples/python run, and the snippets of docs/torch.md."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]


def output_of(*command, code=None):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, *map(str, command)]
    result = subprocess.run(command, input=code, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def example(name, *arguments):
    return output_of(ROOT / "examples/python" / name, *arguments)


def test_numpy_only():
    assert float(re.search(r"reference: (\S+)", example("numpy_only.py"))[1]) < 2e-6


def test_replace_residual():
    out = example("replace_residual.py")
    assert float(re.search(r"by (\S+)%", out)[1]) < 5
    assert "18 of 18" in out and out.rstrip().endswith("True")


def test_decode_graph():
    assert re.search("bits of eager mode|no CUDA device", example("decode_graph.py"))


def test_train_tiny():
    out = example("train_tiny.py", "--steps", 150)
    without, with_engram = map(float, re.search(r"loss: (\S+) without Engram, (\S+) with", out).groups())
    assert with_engram < without - 0.05
    outside = [int(count) for count in re.search(r"table: (\d+) with Engram, (\d+) without", out).groups()]
    assert outside[0] <= outside[1]


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", (ROOT / "docs/torch.md").read_text(), re.S))
def test_snippets(snippet):
    output_of("-", code=snippet)
