"""What several test files use."""

import contextlib

import torch
from engramhc.torch import _call


@contextlib.contextmanager
def reference_in_double():
    """fp64 on the CPU by the NumPy reference."""
    _call.IMPLEMENTATION[0] = "reference"
    try:
        yield
    finally:
        _call.IMPLEMENTATION[0] = ""


def same(a, b):
    """Same shape, type and bits; any NaN for a NaN."""
    assert a.shape == b.shape and a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
