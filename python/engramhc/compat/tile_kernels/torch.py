"""`tile_kernels.torch`: the operators in plain torch, to compare with. Half-precision results are
rounded once, at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from ._operators import overloaded

# --- mHC ------------------------------------------------------------------------------------------


def expand_to_mhc_ref(hidden: Tensor, mhc_mult: int) -> Tensor:
    return torch.stack([hidden] * mhc_mult, dim=-2)


def sinkhorn_normalize_ref(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    comb = torch.softmax(x, dim=-1) + eps
    for half_step in range(2 * repeat - 1):
        line = -1 if half_step % 2 else -2
        comb = comb / (comb.sum(line, keepdim=True) + eps)
    return comb


def mhc_head_compute_mix_ref(
    input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float
) -> Tensor:
    return torch.sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps


def mhc_pre_split_mixes_ref(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [mhc_mult, mhc_mult, mhc_mult**2]
    parts = zip(input_mixes.split(sizes, -1), mhc_scale, mhc_base.split(sizes))
    pre, post, comb = (mixes * scale + base for mixes, scale, base in parts)
    pre = torch.sigmoid(pre) + mhc_pre_eps
    post = mhc_post_mult_value * torch.sigmoid(post)
    return pre.unsqueeze(-1), post.unsqueeze(-1), comb.unflatten(-1, (mhc_mult, mhc_mult))


def mhc_pre_apply_mix_ref(x: Tensor, mix: Tensor) -> Tensor:
    return (x.float() * mix).sum(-2).to(x.dtype)


def mhc_post_ref(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    mixed = comb_res_mix.mT @ residual.float()
    return (mixed + post_layer_mix * x.float().unsqueeze(-2)).to(residual.dtype)


def mhc_pre_norm_fn_ref(
    residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None, mhc_norm_eps: float
) -> Tensor:
    fn = mhc_fn if mhc_norm_weight is None else mhc_fn * mhc_norm_weight
    row = residual.flatten(-2).float()
    return row @ fn.T * torch.rsqrt(row.square().mean(-1, keepdim=True) + mhc_norm_eps)


def mhc_pre_norm_fn_partials_ref(residual: Tensor, fn: Tensor, n_splits: int) -> tuple[Tensor, Tensor]:
    """[S, T, 1, M] and [S, T, 1]."""
    rows = residual.flatten(0, -3).flatten(-2).float().unflatten(-1, (n_splits, -1)).transpose(0, 1)
    parts = fn.unflatten(-1, (n_splits, -1)).permute(1, 2, 0)
    return (rows @ parts).unsqueeze(2), rows.square().sum(-1, keepdim=True)


# --- Engram ---------------------------------------------------------------------------------------


def make_offsets(vocab_sizes: Tensor) -> Tensor:
    """[L, C]: where the rows of each column begin in the table of its layer."""
    sizes = vocab_sizes.flatten(1)
    return (sizes.cumsum(1) - sizes).to(torch.int32)


def engram_hash_ref(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """[L, T, C]."""
    products = ngram_token_ids.long().unsqueeze(0) * multipliers.unsqueeze(1)  # [L, T, Nmax]
    key, columns = products[..., 0], []
    for order in range(1, products.shape[-1]):
        key = key ^ products[..., order]
        columns.append(key.unsqueeze(-1) % vocab_sizes[:, order - 1].long().unsqueeze(1))
    rows = (torch.cat(columns, -1) + offsets.unsqueeze(1)).to(torch.int32)
    return rows if image_token_mask is None else rows.masked_fill(image_token_mask.view(1, -1, 1), -1)


def _gate_ref(
    hidden_states: Tensor,
    kv: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    save_for_backward: bool = False,
    image_token_mask: Tensor | None = None,
):
    """The streams, and with `save_for_backward` dot, gate_score, rstd_x and rstd_k behind them."""
    n = hidden_states.shape[-2]
    k, v = kv[..., :n, :], kv[..., n, :]
    results = _gate_ref_1(
        hidden_states, k, v, weight_hidden, weight_embed, clamp_value, eps, save_for_backward
    )
    if image_token_mask is None:
        return results
    output, *saved = results if save_for_backward else (results,)
    output = torch.where(image_token_mask[..., None, None], hidden_states, output)
    return (output, *saved) if save_for_backward else output


def _gate_ref_1(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    save_for_backward: bool = False,
):
    x, key = hidden_states.float(), k.float()
    rstd_x = torch.rsqrt(x.square().mean(-1) + eps)
    rstd_k = torch.rsqrt(key.square().mean(-1) + eps)
    dot = (x * weight_hidden.float() * key * weight_embed.float()).sum(-1)
    z = dot * rstd_x * rstd_k * x.shape[-1] ** -0.5
    gate_score = torch.sigmoid(torch.copysign(z.abs().clamp_min(clamp_value).sqrt(), z))
    output = (x + gate_score.unsqueeze(-1) * v.float().unsqueeze(-2)).to(hidden_states.dtype)
    return (output, dot, gate_score, rstd_x, rstd_k) if save_for_backward else output


engram_gate_ref = overloaded(_gate_ref, _gate_ref_1, ("clamp_value", "eps"))
engram_gate_ref.__name__ = "engram_gate_ref"


def engram_sinkhorn_momentum_update_ref(
    grad: Tensor, momentum_buffer: Tensor, beta1: float, nesterov: bool = True
) -> Tensor:
    momentum = beta1 * momentum_buffer.float() + (1 - beta1) * grad.float()
    momentum_buffer.copy_(momentum)
    return beta1 * momentum + (1 - beta1) * grad.float() if nesterov else momentum


def engram_sinkhorn_step_ref(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, col_sumsq: Tensor, eps: float
) -> Tensor:
    """Updates row_scale and col_sumsq; returns the norms of the rows before."""
    scaled = matrix * col_scale
    row_norm = (row_scale.unsqueeze(1) * scaled).norm(dim=1)
    row_scale.div_(row_norm + eps)
    col_sumsq.copy_((row_scale.unsqueeze(1) * scaled).square().sum(0))
    return row_norm


def engram_sinkhorn_finalize_ref(
    matrix: Tensor,
    row_scale: Tensor,
    col_scale: Tensor,
    eps: float,
    alpha: float,
    out: Tensor | None = None,
) -> Tensor:
    scaled = row_scale.unsqueeze(1) * matrix * col_scale
    result = alpha * scaled / (scaled.norm(dim=1, keepdim=True) + eps)
    return result if out is None else out.copy_(result)
