"""`tile_kernels.mhc`: the kernels of 2.x, whose outputs are arguments, and those of 1.x."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import torch as ehc
from ._operators import flat, run, square


def expand_to_mhc_fwd(x: Tensor, o: Tensor) -> None:
    run("expand_to_mhc_fwd", "mhc.expand_fwd", {"hidden": x}, {"residual": o}, n=o.shape[-2])


def expand_to_mhc_bwd(o_grad: Tensor, x_grad: Tensor) -> None:
    run("expand_to_mhc_bwd", "mhc.expand_bwd", {"grad_residual": o_grad}, {"grad_hidden": x_grad})


def mhc_head_compute_mix_fwd(
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    output_mix: Tensor,
    mhc_pre_eps: float,
    token_block_size: int = 0,
) -> None:
    inputs = {"mixes": input_mix, "scale": mhc_scale, "base": mhc_base}
    run("mhc_head_compute_mix_fwd", "mhc.head_mix_fwd", inputs, {"pre": output_mix}, pre_eps=mhc_pre_eps)


def mhc_head_compute_mix_bwd(
    output_mix_grad: Tensor,
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    input_mix_grad: Tensor,
    mhc_scale_grad_partial: Tensor,
    mhc_base_grad_partial: Tensor,
    num_sms: int,
    token_block_size: int = 0,
) -> None:
    """The first slot of both partials is the whole sum, the others are zero."""
    mhc_scale_grad_partial.zero_()
    mhc_base_grad_partial.zero_()
    run(
        "mhc_head_compute_mix_bwd",
        "mhc.head_mix_bwd",
        {"grad_pre": output_mix_grad, "mixes": input_mix, "scale": mhc_scale, "base": mhc_base},
        {
            "grad_mixes": input_mix_grad,
            "grad_scale": mhc_scale_grad_partial[0],
            "grad_base": mhc_base_grad_partial[0],
        },
    )


def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: list[Tensor],
    layer_output_list: list[Tensor],
    post_mix_list: list[Tensor],
    comb_mix_list: list[Tensor],
    layer_input_list: list[Tensor],
    residual_list: list[Tensor],
) -> None:
    """Writes the last two lists."""
    with torch.no_grad():
        ehc.mhc_multilayer_recompute(
            initial_residual,
            pre_mix_list,
            layer_output_list,
            post_mix_list,
            comb_mix_list,
            layer_input_list,
            residual_list,
        )


def mhc_fn_normw_merge_fwd(fn: Tensor, normw: Tensor, out_fn: Tensor) -> None:
    run("mhc_fn_normw_merge_fwd", "mhc.merge_fwd", {"fn": fn, "norm_weight": normw}, {"fn_merged": out_fn})


def mhc_fn_normw_merge_bwd(
    fn: Tensor, normw: Tensor, out_fn_grad: Tensor, fn_grad: Tensor, normw_grad: Tensor
) -> None:
    """Adds to both gradients."""
    inputs = {
        "grad_fn_merged": out_fn_grad,
        "fn": fn,
        "norm_weight": normw,
        "grad_fn_acc": fn_grad,
        "grad_norm_weight_acc": normw_grad,
    }
    outputs = {"grad_fn": fn_grad, "grad_norm_weight": normw_grad}
    run("mhc_fn_normw_merge_bwd", "mhc.merge_bwd", inputs, outputs)


def mhc_reduce_partials_and_rmsnorm_fwd(
    out_mul_splitted: Tensor,
    sqrsum_splitted: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out: Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int,
) -> None:
    """[S, T, G, M] and [S, T, G] to [T, G, M], [T, G] and [T, M]."""
    run(
        "mhc_reduce_partials_and_rmsnorm_fwd",
        "mhc.reduce_partials_fwd",
        {"mul_partial": out_mul_splitted[:n_splits], "sqr_partial": sqrsum_splitted[:n_splits]},
        {"mixes": out, "mul": out_mul, "sqr": sqrsum},
        k=rms_group_size * out_mul.shape[-2],
        norm_eps=rms_eps,
    )


def mhc_reduce_partials_and_rmsnorm_bwd(
    out_grad: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out_mul_grad: Tensor,
    sqrsum_grad: Tensor,
    rms_group_size: int,
    rms_eps: float,
) -> None:
    run(
        "mhc_reduce_partials_and_rmsnorm_bwd",
        "mhc.reduce_partials_bwd",
        {"grad_mixes": out_grad, "mul": out_mul, "sqr": sqrsum},
        {"grad_mul": out_mul_grad, "grad_sqr": sqrsum_grad},
        k=rms_group_size * out_mul.shape[-2],
        norm_eps=rms_eps,
    )


def mhc_post_fwd(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    with torch.no_grad():
        return ehc.mhc_post(x, residual, post_layer_mix, comb_res_mix, out=out)


def mhc_post_bwd(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    d_o: Tensor,
    fuse_grad_acc: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first four; `fuse_grad_acc` sets nothing, the second is the gradient."""
    got = run(
        "mhc_post_bwd",
        "mhc.post_bwd",
        {
            "grad_new_residual": d_o.contiguous(),
            "layer_output": x,
            "residual": residual,
            "post": flat(post_layer_mix, residual.shape[-2]),
            "comb": comb_res_mix,
        },
    )
    d_post = got["grad_post"].view_as(post_layer_mix)
    return got["grad_layer_output"], got["grad_residual"], d_post, got["grad_comb"]


def mhc_pre_apply_mix_fwd(x: Tensor, mix: Tensor, o: Tensor) -> None:
    inputs = {"residual": x, "pre": flat(mix, x.shape[-2])}
    run("mhc_pre_apply_mix_fwd", "mhc.pre_apply_fwd", inputs, {"layer_input": o})


def mhc_pre_apply_mix_bwd(o_grad: Tensor, x: Tensor, mix: Tensor, x_grad: Tensor) -> Tensor:
    """Adds to x_grad; returns the gradient of mix."""
    inputs = {
        "grad_layer_input": o_grad,
        "residual": x,
        "pre": flat(mix, x.shape[-2]),
        "grad_residual_acc": x_grad,
    }
    got = run("mhc_pre_apply_mix_bwd", "mhc.pre_apply_bwd", inputs, {"grad_residual": x_grad})
    return got["grad_pre"].view_as(mix)


def mhc_pre_big_fuse_fwd(
    gemm_out_mul: Tensor,
    gemm_out_sqrsum: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    layer_input: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> None:
    """From [S, T, N] and [S, T] to post [T, n], comb [T, n, n] or [T, n*n], and the input [T, d]."""
    run(
        "mhc_pre_big_fuse_fwd",
        "mhc.pre_big_fuse",
        {
            "mul_partial": gemm_out_mul,
            "sqr_partial": gemm_out_sqrsum,
            "scale": mhc_scale,
            "base": mhc_base,
            "residual": residual,
        },
        {
            "layer_input": layer_input,
            "post": flat(post_mix, residual.shape[-2]),
            "comb": square(comb_mix),
        },
        norm_eps=rms_eps,
        pre_eps=mhc_pre_eps,
        post_mult=mhc_post_mult_value,
        repeat=sinkhorn_repeat,
        sinkhorn_eps=mhc_sinkhorn_eps,
    )


def mhc_pre_split_mixes_fwd(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    pre_layer_mix: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> None:
    n = int((mhc_base.shape[-1] + 1) ** 0.5) - 1
    run(
        "mhc_pre_split_mixes_fwd",
        "mhc.split_fwd",
        {"mixes": input_mixes, "scale": mhc_scale, "base": mhc_base},
        {
            "pre": flat(pre_layer_mix, n),
            "post": flat(post_layer_mix, n),
            "comb_logits": square(comb_res_mix),
        },
        pre_eps=mhc_pre_eps,
        post_mult=mhc_post_mult_value,
    )


def mhc_pre_split_mixes_bwd(
    pre_layer_mix_grad: Tensor,
    post_layer_mix_grad: Tensor,
    comb_res_mix_grad: Tensor,
    input_mixes: Tensor,
    post_layer_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    input_mixes_grad: Tensor,
    mhc_scale_grad: Tensor,
    mhc_base_grad: Tensor,
    mhc_post_mult_value: float,
) -> None:
    """Writes the three gradients; those of scale [3] and base [N] may be partials with slots in
    front, of which the first becomes the whole sum and the others zero."""
    title, n = "mhc_pre_split_mixes_bwd", int((mhc_base.shape[-1] + 1) ** 0.5) - 1
    got = run(
        title,
        "mhc.split_bwd",
        {
            "grad_pre": flat(pre_layer_mix_grad, n),
            "grad_post": flat(post_layer_mix_grad, n),
            "grad_comb_logits": square(comb_res_mix_grad),
            "mixes": input_mixes,
            "scale": mhc_scale,
            "base": mhc_base,
        },
        {"grad_mixes": input_mixes_grad},
        post_mult=mhc_post_mult_value,
    )
    sums = {}
    for name, target in (("grad_scale", mhc_scale_grad), ("grad_base", mhc_base_grad)):
        sums[name] = target if target.dim() == 1 else target.zero_()[0]
    run(
        title,
        "mhc.split_bwd_reduce",
        {name: got[name] for name in ("grad_scale_partial", "grad_base_partial")},
        sums,
    )


def mhc_sinkhorn_fwd(comb_res_mix: Tensor, comb_res_mix_out: Tensor, repeat: int, eps: float) -> None:
    inputs, outputs = {"comb_logits": comb_res_mix}, {"comb": comb_res_mix_out}
    run("mhc_sinkhorn_fwd", "mhc.sinkhorn_fwd", inputs, outputs, repeat=repeat, eps=eps)


def mhc_sinkhorn_bwd(grad_output: Tensor, x: Tensor, grad_input: Tensor, repeat: int, eps: float) -> None:
    inputs = {"grad_comb": grad_output, "comb_logits": x}
    outputs = {"grad_comb_logits": grad_input}
    run("mhc_sinkhorn_bwd", "mhc.sinkhorn_bwd", inputs, outputs, repeat=repeat, eps=eps)


def round_to_tf32(x: Tensor) -> Tensor:
    """fp32 with 11 significand bits, to nearest even; infinities and NaN stay."""
    bits = x.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)
