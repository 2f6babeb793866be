"""What several test files use."""

import contextlib

import torch
from engramhc.torch import _double


@contextlib.contextmanager
def reference_in_double():
    """fp64 on the CPU by the NumPy reference."""
    _double.allowed[0] = True
    try:
        yield
    finally:
        _double.allowed[0] = False


def same(a, b):
    """Same shape, type and bits; any NaN for a NaN."""
    assert a.shape == b.shape and a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
