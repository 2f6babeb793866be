"""Tests of engramhc.torch, run on the CPU and, marked `cuda`, where there is a GPU."""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
