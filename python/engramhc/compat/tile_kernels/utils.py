"""`tile_kernels.utils`."""

from __future__ import annotations

import torch

_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.int8: "e2m1",
}


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, y: int) -> int:
    return ceil_div(x, y) * y


def is_power_of_two(x: int) -> bool:
    return x > 0 and x.bit_count() == 1


def next_power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()


def dtype_to_str(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise ValueError(f"dtype_to_str: expected one of {list(_NAMES)}, got {dtype}")
    return _NAMES[dtype]


def str_to_dtype(fmt: str) -> torch.dtype:
    for dtype, name in _NAMES.items():
        if name == fmt:
            return dtype
    raise ValueError(f"str_to_dtype: expected one of {list(_NAMES.values())}, got {fmt!r}")
