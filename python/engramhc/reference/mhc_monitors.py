"""Monitors: how much the stream maps amplify, and how far they are from doubly stochastic."""

from __future__ import annotations

import functools

import numpy as np

from .dtypes import Tensor, encode

INPUTS, OUTPUTS = -2, -1  # axes of comb: input streams, output streams


def gains(comb: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Forward: the largest sum over input streams of |comb|; backward: over output streams."""
    size = np.abs(comb)
    return size.sum(axis=INPUTS).max(axis=-1), size.sum(axis=OUTPUTS).max(axis=-1)


def amax_gain(comb: Tensor) -> dict[str, Tensor]:
    """Gains of every layer's map and of comb_1 comb_2 ... comb_L: comb [L, T, n, n]
    -> forward_gain, backward_gain [L, T], composite_forward_gain, composite_backward_gain [T]
    """
    maps = comb.decode()
    nothing = np.broadcast_to(np.eye(maps.shape[-1]), maps.shape[1:])
    composite = functools.reduce(np.matmul, maps) if len(maps) else nothing
    values = (*gains(maps), *gains(composite))
    names = ("forward_gain", "backward_gain", "composite_forward_gain", "composite_backward_gain")
    return {name: encode(value, "F32") for name, value in zip(names, values)}


def defect(comb: Tensor) -> dict[str, Tensor]:
    """Largest |row sum - 1| and |column sum - 1|, and sqrt(largest row sum * largest column sum) of
    the absolute values, which bounds the spectral norm: comb [..., n, n] -> each [...].
    """
    maps = comb.decode()
    forward, backward = gains(maps)
    values = {
        "row_defect": np.abs(maps.sum(axis=OUTPUTS) - 1).max(axis=-1),
        "column_defect": np.abs(maps.sum(axis=INPUTS) - 1).max(axis=-1),
        "spectral_bound": np.sqrt(forward * backward),
    }
    return {name: encode(value, "F32") for name, value in values.items()}
