"""How packed tokens are cut into sequences."""

from __future__ import annotations

from .dtypes import Tensor


def sequence_bounds(cu_seqlens: Tensor | None, tokens: int) -> list[int]:
    """[0, ..., tokens]: sequence b owns tokens bounds[b] .. bounds[b+1]-1. Absent: one sequence."""
    if cu_seqlens is None:
        return [0, tokens]
    bounds = cu_seqlens.decode().tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or sorted(bounds) != bounds:
        raise ValueError(f"'cu_seqlens': expected 0 <= ... <= {tokens}, got {bounds}")
    return bounds
