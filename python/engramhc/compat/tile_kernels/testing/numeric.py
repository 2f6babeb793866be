"""`tile_kernels.testing.numeric`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def assert_equal(
    x: Tensor,
    y: Tensor,
    check_dtype: bool = True,
    check_shape: bool = True,
    check_stride: bool = True,
) -> None:
    """AssertionError unless both have the same bits."""
    if check_dtype and x.dtype != y.dtype:
        raise AssertionError(f"dtypes differ: {x.dtype} and {y.dtype}")
    if check_shape and x.shape != y.shape:
        raise AssertionError(f"shapes differ: {list(x.shape)} and {list(y.shape)}")
    if check_stride and x.numel() and x.stride() != y.stride():
        raise AssertionError(f"strides differ: {x.stride()} and {y.stride()}")
    if x.device != y.device:
        raise AssertionError(f"devices differ: {x.device} and {y.device}")
    bytes_of_x, bytes_of_y = (t.contiguous().flatten().view(torch.uint8) for t in (x, y))
    if not torch.equal(bytes_of_x, bytes_of_y):
        count = int(
            (bytes_of_x.view(-1, x.element_size()) != bytes_of_y.view(-1, x.element_size())).any(1).sum()
        )
        raise AssertionError(f"{count} of {x.numel()} values differ:\n{x}\nand\n{y}")


def calc_diff(x: Tensor, y: Tensor) -> Tensor | int:
    """Squares of the differences over squares of both; 0 for two zeros."""
    x, y = x.double(), y.double()
    size = (x.square() + y.square()).sum()
    return (x - y).square().sum() / size if size != 0 else 0


def check_bias(x: Tensor, ref_x: Tensor) -> None:
    """AssertionError when x lies on one side of the reference too often: rounding to nearest falls
    on each side half the time, within ten standard deviations doubled."""
    if x.numel() == 0:
        return
    below = ((x < ref_x).sum() + (x == ref_x).sum() / 2) / x.numel()
    allowed = 10 / math.sqrt(x.numel())
    if abs(below - 0.5) >= allowed:
        raise AssertionError(f"{float(below):.4f} of the values are below, expected 0.5 +- {allowed:.4f}")


def count_bytes(*tensors: Any) -> int:
    """Of all tensors, in lists and tuples too; None counts nothing."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, (tuple, list)):
            total += count_bytes(*tensor)
        elif tensor is not None:
            total += tensor.numel() * tensor.element_size()
    return total
