"""`tile_kernels.testing.bench`: names of parameter sets."""

from __future__ import annotations

from typing import Any

import torch

from ..utils import dtype_to_str

_SHORT = {
    "num_ep_ranks": "ep",
    "num_experts": "experts",
    "use_tma_aligned_col_major_sf": "col",
    "use_packed_ue8m0": "ue8m0",
    "round_sf": "round",
}
_WIDTH = {
    "num_tokens": 5,
    "num_ep_ranks": 2,
    "num_experts": 3,
    "hidden": 4,
    "use_tma_aligned_col_major_sf": 1,
    "use_packed_ue8m0": 1,
    "round_sf": 1,
    "num_per_channels": 4,
}


def make_param_key(params: dict[str, Any]) -> str:
    """ "num_tokens= 4001,hidden=7168": numbers of one width under one another."""
    return ",".join(
        f"{_SHORT.get(name, name)}={format(value, f'>{_WIDTH[name]}') if name in _WIDTH else value}"
        for name, value in params.items()
        if value is not None
    )


def make_param_id(params: dict[str, Any]) -> str:
    """ "num_tokens=4001-dtype=bf16", "default" of nothing."""

    def text(value: Any) -> str:
        if isinstance(value, torch.dtype):
            return dtype_to_str(value)
        return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return "-".join(f"{name}={text(value)}" for name, value in params.items()) or "default"
