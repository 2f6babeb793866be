"""`tile_kernels.modeling.mhc.functional` of 1.x, with its defaults."""

from __future__ import annotations

from torch import Tensor

from ..... import torch as ehc
from ... import _settings
from ..._operators import handed_over


def expand_from_embedding(x: Tensor, mhc_mult: int = 4) -> Tensor:
    """[..., d] to [..., n, d]."""
    return ehc.expand_to_mhc(x, mhc_mult)


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """layer_input [..., d], and (post [..., n, 1], comb [..., n, n]) for mhc_post."""
    layer_input, (post, comb) = ehc.mhc_pre(
        handed_over(residual),
        fn,
        scale,
        base,
        norm_weight=norm_weight,
        rms_eps=norm_eps,
        post_mult=post_mult_value,
        pre_eps=pre_eps,
        sinkhorn_eps=sinkhorn_eps,
        repeat=sinkhorn_repeat,
        precision=_settings.precision,
    )
    return layer_input, (post.unsqueeze(-1), comb)


def mhc_head(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    pre_eps: float = 1e-6,
    n_splits: int = 16,
) -> Tensor:
    """The streams collapsed, [..., d]."""
    return ehc.mhc_head(
        handed_over(residual),
        fn,
        scale.reshape(1),
        base,
        norm_weight=norm_weight,
        rms_eps=norm_eps,
        pre_eps=pre_eps,
        precision=_settings.precision,
    )
