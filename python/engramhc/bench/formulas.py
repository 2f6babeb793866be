"""The operators as one writes them in PyTorch: what eager and compiled code is measured on.

Sums are in fp32 and results rounded once, as in the library. Shapes: residual [T, n, d],
coefficients [T, n] and [T, n, n].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS, CLAMP, REPEAT, POST_MULT = 1e-6, 1e-6, 20, 2.0
KERNEL, DILATION = 4, 3  # of the short convolution


def expand(hidden: Tensor, n: int) -> Tensor:
    return hidden.unsqueeze(-2).expand(-1, n, -1).contiguous()


def pre_apply(residual: Tensor, pre: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * residual.float()).sum(-2).to(residual.dtype)


def post(layer_output: Tensor, residual: Tensor, post_mix: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("tio,tid->tod", comb, residual.float())
    return (post_mix.unsqueeze(-1) * layer_output.float().unsqueeze(-2) + mixed).to(residual.dtype)


def sinkhorn(logits: Tensor) -> Tensor:
    y = torch.softmax(logits, -1) + EPS
    y = y / (y.sum(-2, keepdim=True) + EPS)
    for _ in range(REPEAT - 1):
        y = y / (y.sum(-1, keepdim=True) + EPS)
        y = y / (y.sum(-2, keepdim=True) + EPS)
    return y


def norm_fn(residual: Tensor, fn: Tensor) -> Tensor:
    x = residual.float().flatten(-2)
    return F.linear(x, fn) * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def pre(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """layer_input, post, comb."""
    n = residual.shape[-2]
    mixes = norm_fn(residual, fn).split([n, n, n * n], -1)
    u = [mix * s + b for mix, s, b in zip(mixes, scale.unbind(), base.split([n, n, n * n]))]
    row = pre_apply(residual, torch.sigmoid(u[0]) + EPS)
    return row, POST_MULT * torch.sigmoid(u[1]), sinkhorn(u[2].unflatten(-1, (n, n)))


def seam(
    layer_output: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """residual, layer_input, post, comb."""
    streams = post(layer_output, residual, post_mix, comb)
    return streams, *pre(streams, fn, scale, base)


def recompute(residual: Tensor, pre_mix: Tensor, layer_output: Tensor, post_mix: Tensor, comb: Tensor):
    """Layer inputs, then residuals, of layers whose tensors are stacked."""
    inputs, residuals = [], []
    for layer in range(pre_mix.shape[0]):
        inputs.append(pre_apply(residual, pre_mix[layer]))
        residual = post(layer_output[layer], residual, post_mix[layer], comb[layer])
        residuals.append(residual)
    return *inputs, *residuals


def gate(x: Tensor, k: Tensor, v: Tensor, weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    xf, kf = x.float(), k.float()
    rx = torch.rsqrt(xf.square().mean(-1) + EPS)
    rk = torch.rsqrt(kf.square().mean(-1) + EPS)
    z = (xf * (weight_hidden * weight_embed) * kf).sum(-1) * rx * rk * x.shape[-1] ** -0.5
    alpha = torch.sigmoid(torch.copysign(z.abs().clamp_min(CLAMP).sqrt(), z))
    return (xf + alpha.unsqueeze(-1) * v.float().unsqueeze(-2)).to(x.dtype)


def short_conv(v: Tensor, weight: Tensor, norm_weight: Tensor) -> Tensor:
    """v [T, n, d], weight [n, d, w]."""
    vf = v.float()
    u = vf * torch.rsqrt(vf.square().mean(-1, keepdim=True) + EPS) * norm_weight
    rows = F.pad(u.flatten(1).T.unsqueeze(0), ((KERNEL - 1) * DILATION, 0))
    c = F.conv1d(rows, weight.flatten(0, 1).unsqueeze(1), dilation=DILATION, groups=rows.shape[1])
    return (vf + F.silu(c[0].T.unflatten(1, v.shape[1:]))).to(v.dtype)


def gather(table: Tensor, idx: Tensor) -> Tensor:
    return F.embedding(idx, table).flatten(-2)
