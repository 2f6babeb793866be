"""The mHC operators of vLLM in its own order of arguments and results.

Streams are [T, n, d], post comes back as [T, n, 1]. `n_splits` and `tile_n` are accepted and change
no bit: kernels choose their own. A `norm_weight` is the RMS norm of the layer's input, in the same
kernel; it is not the weight inside of the mix projection.
"""

from __future__ import annotations

from torch import Tensor

from .. import torch as ehc

__all__ = [
    "hc_collapse",
    "hc_head",
    "mhc_fused_post_pre",
    "mhc_fused_post_pre_delayed",
    "mhc_post",
    "mhc_pre",
    "mhc_pre_broadcast",
    "mhc_pre_delayed",
]


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """post, comb, layer_input."""
    constants = _constants(
        rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_weight, norm_eps
    )
    layer_input, (post, comb) = ehc.mhc_pre(residual, fn, hc_scale, hc_base, **constants)
    return post.unsqueeze(-1), comb, layer_input


def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    return ehc.mhc_post(x, residual, post_layer_mix, comb_res_mix)


def mhc_fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """residual, post, comb, layer_input."""
    constants = _constants(
        rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_weight, norm_eps
    )
    new_residual, (post, comb), layer_input = ehc.mhc_fused_post_pre(
        x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, **constants
    )
    return new_residual, post.unsqueeze(-1), comb, layer_input


def mhc_pre_broadcast(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    norm_weight: Tensor,
    norm_eps: float,
    fn_broadcast: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """residual, post, comb, layer_input of the embedding [T, d], which every stream begins as."""
    constants = _constants(
        rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_weight, norm_eps
    )
    streams, (post, comb), layer_input = ehc.mhc_pre_broadcast(
        residual, fn, hc_scale, hc_base, fn_sum=fn_broadcast, **constants
    )
    return streams, post.unsqueeze(-1), comb, layer_input


def mhc_pre_delayed(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None = None,
    x: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """post, comb, layer_input, pre for the next sublayer."""
    constants = _constants(
        rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_weight, norm_eps
    )
    layer_input, (post, comb), pre = ehc.mhc_pre_delayed(
        residual, fn, hc_scale, hc_base, pre_mix=pre_mix, x=x, **constants
    )
    return post.unsqueeze(-1), comb, layer_input, pre


def mhc_fused_post_pre_delayed(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    capture_aux: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """residual, post, comb, layer_input, pre, mean of the new streams ([0, d] unless captured)."""
    constants = _constants(
        rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_weight, norm_eps
    )
    new_residual, layer_input, (post, comb), pre, *mean = ehc.mhc_fused_post_pre_delayed(
        x,
        residual,
        post_layer_mix,
        comb_res_mix,
        fn,
        hc_scale,
        hc_base,
        pre_mix=pre_mix,
        return_mean=capture_aux,
        **constants,
    )
    aux = mean[0] if capture_aux else x.new_empty(0, x.shape[-1])
    return new_residual, post.unsqueeze(-1), comb, layer_input, pre, aux


def hc_head(
    hidden_states: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_norm_eps: float,
    hc_eps: float,
) -> Tensor:
    return ehc.mhc_head(hidden_states, hc_fn, hc_scale, hc_base, rms_eps=rms_norm_eps, pre_eps=hc_eps)


def hc_collapse(x: Tensor, pre: Tensor) -> Tensor:
    return ehc.mhc_collapse(x, pre)


def _constants(
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    repeat: int,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> dict:
    return {
        "rms_eps": rms_eps,
        "pre_eps": pre_eps,
        "sinkhorn_eps": sinkhorn_eps,
        "post_mult": post_mult,
        "repeat": repeat,
        "layer_norm_weight": norm_weight,
        "layer_norm_eps": norm_eps if norm_weight is not None else None,
    }
