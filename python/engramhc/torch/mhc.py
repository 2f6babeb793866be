"""mHC: streams, coefficients and sublayers as functions with autograd.

Shapes: residual [..., n, d], coefficients [..., n] and [..., n, n] ([input stream, output stream]).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engramhc.errors import UnsupportedError
from engramhc.ops._arguments import MhcMix, coefficient, mix_rules

from . import _mhc_operators as ops
from . import _projection as projection
from ._arguments import missing_eps, same_type
from ._bias import add_bias
from ._operator import records

if TYPE_CHECKING:
    from typing import Unpack

    from engramhc.ops._arguments import MixConstants


def expand_to_mhc(x, n, *, out=None):
    """[..., d] to n equal streams [..., n, d]."""
    return ops.expand((x,), (n,), out=out)


def mhc_prenorm_gemm(x, fn, norm_weight=None, *, n_splits=None, precision="fp32"):
    """x [..., K] times fn [M, K] in fp32, and the sum of the squares of x: [..., M], [...]."""
    return projection.prenorm_gemm((x.unsqueeze(-2), fn, norm_weight), (n_splits, precision))


def mhc_reduce_partials_and_rmsnorm(mul, sqrsum, *, k, eps, rms="mean"):
    """mul [S, ..., M] and sqrsum [S, ...] added up, and normalised by the RMS of k values."""
    return projection.reduce_partials((mul, sqrsum), (k, eps, rms))


def mhc_pre_norm_fn(
    residual, fn, norm_weight=None, *, rms_eps, rms="mean", n_splits=None, precision="fp32"
):
    """The normalised streams of a token times fn [M, K]: mixes [..., M]."""
    return projection.norm_fn((residual, fn, norm_weight), (rms_eps, rms, n_splits, precision))


def mhc_pre_split_mixes(mixes, scale, base, n, *, post_mult, pre_eps):
    """mixes [..., n*n + 2n] to pre [..., n], post [..., n] and logits [..., n, n]."""
    return ops.split((mixes, scale, base), (n, pre_eps, post_mult))


def sinkhorn_normalize(logits, repeat, eps, *, convention="deepseek"):
    """Logits [..., n, n] to a doubly stochastic comb."""
    return ops.sinkhorn((logits,), (repeat, eps, convention))


def mhc_pre_apply_mix(residual, pre, *, out=None, grad_acc=None):
    """The streams collapsed to one row: sum over i of pre_i times stream i, [..., d]."""
    pre = coefficient(pre, residual)
    if grad_acc is not None:
        residual = grad_acc.share("mhc_pre_apply_mix", residual)
    return ops.pre_apply((residual, pre), into=grad_acc, out=out)


mhc_collapse = mhc_pre_apply_mix


def mhc_pre(
    residual,
    fn,
    scale,
    base,
    *,
    norm_weight=None,
    layer_norm_weight=None,
    layer_norm_eps=None,
    precision="fp32",
    n_splits=None,
    grad_acc=None,
    **constants: Unpack[MixConstants],
):
    """Entry of a sublayer: its input [..., d], and MhcMix(post, comb) for mhc_post.

    `n_splits` changes nothing: the projection picks splits that no bit depends on.
    """
    tensors = residual, fn, scale, base, norm_weight, layer_norm_weight
    return entry(tensors, constants, precision, layer_norm_eps, grad_acc)


def entry(tensors, constants, precision, layer_norm_eps, grad_acc=None, kept=None):
    """mhc_pre; a list `kept` gets what it saves for its backward, pre [..., n] first."""
    rules = mix_rules("mhc_pre", constants)
    residual, *weights = tensors
    if weights[-1] is not None and layer_norm_eps is None:
        raise missing_eps("mhc_pre")
    if grad_acc is not None:
        residual = grad_acc.share("mhc_pre", residual)
    values = *rules, precision, layer_norm_eps
    layer_input, post, comb = ops.pre((residual, *weights), values, into=grad_acc, kept=kept)
    return layer_input, MhcMix(post, comb)


def mhc_pre_big_fuse(
    mul,
    sqrsum,
    residual,
    scale,
    base,
    *,
    rms_eps,
    pre_eps,
    sinkhorn_eps,
    post_mult,
    repeat,
    convention="deepseek",
    rms="mean",
):
    """From the sums of a projection, mul [S, ..., N] and sqrsum [S, ...], to post, comb, layer_input.

    With gradients it is the functions that it stands for, which have the same bits.
    """
    if records((mul, sqrsum, residual, scale, base)):
        n, d = residual.shape[-2:]
        mixes = mhc_reduce_partials_and_rmsnorm(mul, sqrsum, k=n * d, eps=rms_eps, rms=rms)
        pre, post, logits = mhc_pre_split_mixes(
            mixes, scale, base, n, post_mult=post_mult, pre_eps=pre_eps
        )
        comb = sinkhorn_normalize(logits, repeat, sinkhorn_eps, convention=convention)
        return post, comb, mhc_pre_apply_mix(residual, pre)
    values = rms_eps, pre_eps, post_mult, repeat, sinkhorn_eps, convention, rms
    return projection.big_fuse((mul, sqrsum, residual, scale, base), values)


def mhc_post(
    layer_output, residual, post, comb, *, bias=None, out=None, inplace=False, grad_acc=None
):
    """A layer's output put back: new stream o = post_o * layer_output + sum over i of comb_io * stream i.

    comb None is the identity. `inplace` writes the residual and needs gradients off.
    """
    post = coefficient(post, residual)
    if comb is None:
        comb = _identity(residual)
    if bias is not None:
        layer_output = add_bias(layer_output, bias, residual.dtype)
    layer_output = same_type(layer_output, residual)
    if inplace:
        if records((layer_output, residual, post, comb)):
            raise UnsupportedError(
                "mhc_post: argument 'inplace': expected no gradients to be recorded, got an input that "
                "requires them; hint: the backward reads the residual"
            )
        if out is not None and out is not residual:
            raise UnsupportedError("mhc_post: argument 'out': expected none with inplace, got a tensor")
        out = residual
    if grad_acc is not None:
        residual = grad_acc.share("mhc_post", residual)
    return ops.post((layer_output, residual, post, comb), into=grad_acc, out=out)


def mhc_fused_post_pre(
    layer_output,
    residual,
    post,
    comb,
    fn,
    scale,
    base,
    *,
    norm_weight=None,
    layer_norm_weight=None,
    layer_norm_eps=None,
    precision="fp32",
    n_splits=None,
    **constants: Unpack[MixConstants],
):
    """mhc_post of one sublayer and mhc_pre of the next: residual, MhcMix, layer_input."""
    name = "mhc_fused_post_pre"
    rules = mix_rules(name, constants)
    if layer_norm_weight is not None and layer_norm_eps is None:
        raise missing_eps(name)
    tensors = (
        same_type(layer_output, residual),
        residual,
        coefficient(post, residual),
        _identity(residual) if comb is None else comb,
        fn,
        scale,
        base,
        norm_weight,
        layer_norm_weight,
    )
    values = *rules, precision, layer_norm_eps
    new_residual, layer_input, next_post, next_comb = ops.seam(tensors, values)
    return new_residual, MhcMix(next_post, next_comb), layer_input


def mhc_fused_post_pre_delayed(
    layer_output,
    residual,
    post,
    comb,
    fn,
    scale,
    base,
    *,
    pre_mix,
    return_mean=False,
    norm_weight=None,
    layer_norm_weight=None,
    layer_norm_eps=None,
    precision="fp32",
    n_splits=None,
    **constants: Unpack[MixConstants],
):
    """The single-pass seam: residual, layer_input (collapsed by `pre_mix`), MhcMix, the next pre[, mean].

    The mean is that of the new streams, [..., d].
    """
    name = "mhc_fused_post_pre_delayed"
    rules = mix_rules(name, constants)
    if layer_norm_weight is not None and layer_norm_eps is None:
        raise missing_eps(name)
    tensors = (
        same_type(layer_output, residual),
        residual,
        _first_stream(residual) if pre_mix is None else coefficient(pre_mix, residual),
        coefficient(post, residual),
        _identity(residual) if comb is None else comb,
        fn,
        scale,
        base,
        norm_weight,
        layer_norm_weight,
    )
    values = *rules, precision, layer_norm_eps
    new_residual, layer_input, next_pre, next_post, next_comb = ops.seam_delayed(tensors, values)
    results = new_residual, layer_input, MhcMix(next_post, next_comb), next_pre
    return (*results, mhc_mean(new_residual)) if return_mean else results


def mhc_pre_broadcast(
    x,
    fn,
    scale,
    base,
    *,
    fn_sum=None,
    norm_weight=None,
    layer_norm_weight=None,
    layer_norm_eps=None,
    precision="fp32",
    n_splits=None,
    **constants: Unpack[MixConstants],
):
    """Entry of a stack, whose streams all are x [..., d]: residual, MhcMix, layer_input.

    `fn_sum` [N, d] is the sum of fn over the streams (norm_weight merged), where the caller keeps it.
    """
    name = "mhc_pre_broadcast"
    rules = mix_rules(name, constants)
    if layer_norm_weight is not None and layer_norm_eps is None:
        raise missing_eps(name)
    if fn_sum is not None:
        n = fn.shape[-1] // x.shape[-1]
        residual = expand_to_mhc(x, n)
        pre, mix = _mixes(x.unsqueeze(-2), fn_sum, scale, base, None, n, rules, precision)
        row = mhc_pre_apply_mix(residual, pre)
        return residual, mix, layer_norm(row, layer_norm_weight, layer_norm_eps)
    tensors = x, fn, scale, base, norm_weight, layer_norm_weight
    values = *rules, precision, layer_norm_eps, "classic"
    residual, layer_input, _, post, comb = ops.broadcast(tensors, values)
    return residual, MhcMix(post, comb), layer_input


def mhc_pre_delayed(
    residual,
    fn,
    scale,
    base,
    *,
    pre_mix=None,
    x=None,
    norm_weight=None,
    layer_norm_weight=None,
    layer_norm_eps=None,
    precision="fp32",
    n_splits=None,
    **constants: Unpack[MixConstants],
):
    """Entry of a sublayer whose collapse uses an older mix: layer_input, MhcMix, pre for the next one.

    `pre_mix` None takes stream 0. With `x` [..., d], the embedding that all streams are, fn is the
    sum over the streams, [N, d].
    """
    name = "mhc_pre_delayed"
    rules = mix_rules(name, constants)
    if layer_norm_weight is not None and layer_norm_eps is None:
        raise missing_eps(name)
    source = residual if x is None else x.unsqueeze(-2)
    n = residual.shape[-2] if residual is not None else fn_streams(fn)
    pre, mix = _mixes(source, fn, scale, base, norm_weight, n, rules, precision)
    if pre_mix is None:
        row = x if residual is None else residual.select(-2, 0)
        row = row.clone(memory_format=torch.contiguous_format)
    else:
        row = mhc_pre_apply_mix(residual, pre_mix)
    return layer_norm(row, layer_norm_weight, layer_norm_eps), mix, pre


def mhc_head_compute_mix(mixes, scale, base, *, pre_eps):
    """mixes [..., n] to the coefficients of the last collapse."""
    return ops.head_mix((mixes, scale, base), (pre_eps,))


def mhc_head(
    residual,
    fn,
    scale,
    base,
    *,
    norm_weight=None,
    rms_eps,
    pre_eps,
    rms="mean",
    precision="fp32",
    out=None,
):
    """The streams collapsed by mixes of their own, for the head of a model: [..., d]."""
    tensors = residual, fn, scale, base, norm_weight
    return ops.head(tensors, (rms_eps, rms, pre_eps, precision), out=out)


def mhc_mean(residual):
    """The mean of the streams, [..., d], by mhc_pre_apply_mix."""
    n = residual.shape[-2]
    even = torch.full((), 1 / n, dtype=ops.wide(residual), device=residual.device)
    return mhc_pre_apply_mix(residual, even.expand(residual.shape[:-1]))


def fn_streams(fn):
    """n of fn [n*n + 2n, K]."""
    return int((fn.shape[0] + 1) ** 0.5) - 1


# --- what several of them share -------------------------------------------------------------------


def _identity(residual):
    n = residual.shape[-2]
    eye = torch.eye(n, dtype=ops.wide(residual), device=residual.device)
    return eye.expand(*residual.shape[:-2], n, n)


def _first_stream(residual):
    one_hot = torch.zeros(residual.shape[-2], dtype=ops.wide(residual), device=residual.device)
    one_hot[0] = 1
    return one_hot.expand(residual.shape[:-1])


def _mixes(source, fn, scale, base, norm_weight, n, rules, precision):
    """pre and MhcMix by the parts of mhc_pre, which have its bits."""
    rms_eps, pre_eps, post_mult, repeat, sinkhorn_eps, convention, rms = rules
    mixes = mhc_pre_norm_fn(
        source, fn, norm_weight, rms_eps=rms_eps, rms=rms, precision=precision
    )
    pre, post, logits = mhc_pre_split_mixes(
        mixes, scale, base, n, post_mult=post_mult, pre_eps=pre_eps
    )
    comb = sinkhorn_normalize(logits, repeat, sinkhorn_eps, convention=convention)
    return pre, MhcMix(post, comb)


def layer_norm(row, weight, eps):
    """RMSNorm of a row [..., d] with the bits of the fused functions.

    It is the seam of one stream that passes itself on: post 0, comb 1, pre 1.
    """
    if weight is None:
        return row
    lead, d = row.shape[:-1], row.shape[-1]
    dtype, device = ops.wide(row), row.device
    one = torch.ones((), dtype=dtype, device=device)
    zero = torch.zeros((), dtype=dtype, device=device)
    tensors = (
        torch.zeros((*lead, d), dtype=row.dtype, device=device),
        row.unsqueeze(-2),
        one.expand(*lead, 1),
        zero.expand(*lead, 1),
        one.expand(*lead, 1, 1),
        torch.zeros((3, d), dtype=dtype, device=device),
        zero.expand(3),
        zero.expand(3),
        None,
        weight,
    )
    rules = 1.0, 0.0, 0.0, 1, 1.0, "deepseek", "mean"
    return ops.seam_delayed(tensors, (*rules, "fp32", eps))[1]
