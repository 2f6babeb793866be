"""Arguments as users write them, made those of the operators."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._presets import find_preset

MIX = ("rms_eps", "pre_eps", "post_mult", "repeat", "sinkhorn_eps")


class MhcMix(NamedTuple):
    """How a layer's output goes back into the streams."""

    post: torch.Tensor  # [..., n]
    comb: torch.Tensor  # [..., n, n], [input stream, output stream]


def constants(name, preset, convention, given):
    """The constants of the mixes by the library's names, from keywords and then from the preset."""
    if preset is not None:
        preset = find_preset(preset)
        given = {k: getattr(preset, k) if v is None else v for k, v in given.items()}
        convention = convention or preset.convention
    for key, value in given.items():
        if value is None:
            raise TypeError(f"{name}() missing required keyword-only argument: '{key}' (or preset=)")
    given["norm_eps"] = given.pop("rms_eps")
    given["convention"] = convention or "deepseek"
    return given


def per_stream(coefficients, residual):
    """[..., n] of coefficients that may be [..., n, 1]."""
    if isinstance(coefficients, torch.Tensor) and coefficients.dim() == residual.dim():
        return coefficients.squeeze(-1)
    return coefficients


def same_type(tensor, residual):
    """A layer's output in the type of the streams, rounded at most once."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype is not residual.dtype:
        if tensor.dtype in (torch.bfloat16, torch.float16, torch.float32):
            return tensor.to(residual.dtype)
    return tensor
