"""`tile_kernels.modeling.mhc.ops` of 1.x. Coefficients of streams are [..., n, 1]."""

from __future__ import annotations

import torch
from torch import Tensor

from ..... import torch as ehc
from ... import _settings
from ..._operators import handed_over
from ...mhc import mhc_multilayer_recompute, mhc_post_bwd, mhc_post_fwd

__all__ = [
    "expand_to_mhc",
    "mhc_head_compute_mix",
    "mhc_multilayer_recompute",
    "mhc_post",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_pre_apply_mix",
    "mhc_pre_big_fuse",
    "mhc_pre_norm_fn",
    "mhc_pre_split_mixes",
    "sinkhorn_normalize",
]


def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    return ehc.expand_to_mhc(hidden, mhc_mult, out=out)


def mhc_head_compute_mix(
    input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float
) -> Tensor:
    return ehc.mhc_head_compute_mix(input_mix, mhc_scale, mhc_base, pre_eps=mhc_pre_eps)


def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int = 16,
) -> Tensor:
    return ehc.mhc_pre_norm_fn(
        handed_over(residual) if fuse_grad_acc else residual,
        mhc_fn,
        mhc_norm_weight,
        rms_eps=mhc_norm_eps,
        precision=_settings.precision,
    )


def mhc_post(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    return ehc.mhc_post(x, residual, post_layer_mix, comb_res_mix, out=out)


def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    return ehc.mhc_pre_apply_mix(handed_over(x), mix, out=out)


def mhc_pre_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """post [..., n, 1], comb [..., n, n], layer_input [..., d], without gradients."""
    with torch.no_grad():
        layer_input, (post, comb) = ehc.mhc_pre(
            residual,
            fn,
            mhc_scale,
            mhc_base,
            rms_eps=rms_eps,
            pre_eps=mhc_pre_eps,
            sinkhorn_eps=mhc_sinkhorn_eps,
            post_mult=mhc_post_mult_value,
            repeat=sinkhorn_repeat,
            precision=_settings.precision,
        )
    return post.unsqueeze(-1), comb, layer_input


def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [..., n, 1], post [..., n, 1] and the logits of comb [..., n, n]."""
    pre, post, logits = ehc.mhc_pre_split_mixes(
        input_mixes,
        mhc_scale,
        mhc_base,
        mhc_mult,
        post_mult=mhc_post_mult_value,
        pre_eps=mhc_pre_eps,
    )
    return pre.unsqueeze(-1), post.unsqueeze(-1), logits


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    return ehc.sinkhorn_normalize(x, repeat, eps)
