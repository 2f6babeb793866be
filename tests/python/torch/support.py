"""What several test files use."""

import engramhc
import torch


def reference_in_double():
    """fp64 on the CPU by the NumPy reference."""
    return engramhc.implementation("*", "reference")


def same(a, b):
    """Same shape, type and bits; any NaN for a NaN."""
    assert a.shape == b.shape and a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
