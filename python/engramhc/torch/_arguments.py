"""Arguments as users write them, made those of the operators."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._presets import find_preset

class MhcMix(NamedTuple):
    """How a layer's output goes back into the streams."""

    post: torch.Tensor  # [..., n]
    comb: torch.Tensor  # [..., n, n], [input stream, output stream]


def constants(name, preset, convention, rms_eps, pre_eps, post_mult, repeat, sinkhorn_eps):
    """The constants of the mixes in the library's order, from keywords and then from the preset."""
    if preset is not None:
        preset = find_preset(preset)
        rms_eps = preset.rms_eps if rms_eps is None else rms_eps
        pre_eps = preset.pre_eps if pre_eps is None else pre_eps
        post_mult = preset.post_mult if post_mult is None else post_mult
        repeat = preset.repeat if repeat is None else repeat
        sinkhorn_eps = preset.sinkhorn_eps if sinkhorn_eps is None else sinkhorn_eps
        convention = convention or preset.convention
    elif None in (rms_eps, pre_eps, post_mult, repeat, sinkhorn_eps):
        given = {
            "rms_eps": rms_eps,
            "pre_eps": pre_eps,
            "post_mult": post_mult,
            "repeat": repeat,
            "sinkhorn_eps": sinkhorn_eps,
        }
        missing = next(key for key, value in given.items() if value is None)
        raise TypeError(f"{name}() missing required keyword-only argument: '{missing}' (or preset=)")
    return rms_eps, pre_eps, post_mult, repeat, sinkhorn_eps, convention or "deepseek"


def missing_eps(name):
    return TypeError(f"{name}() missing keyword-only argument: 'layer_norm_eps', with layer_norm_weight")


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
