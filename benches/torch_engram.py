"""The gate of Engram as PyTorch writes it, for compare_torch.py."""

import torch

from comparison import STREAMS, backward, forward

EPS, CLAMP = 1e-6, 1e-6


def torch_gate(x, k, v, weight_hidden, weight_embed):
    xf, kf = x.float(), k.float()
    rx = torch.rsqrt(xf.square().mean(-1) + EPS)
    rk = torch.rsqrt(kf.square().mean(-1) + EPS)
    z = (xf * (weight_hidden * weight_embed) * kf).sum(-1) * rx * rk * x.shape[-1] ** -0.5
    alpha = torch.sigmoid(torch.copysign(z.abs().clamp_min(CLAMP).sqrt(), z))
    return (xf + alpha.unsqueeze(-1) * v.float().unsqueeze(1)).to(x.dtype)


def inputs(tokens, width):
    """Those of torch_gate, in its order."""
    return {
        "residual": torch.randn(tokens, STREAMS, width).bfloat16(),
        "key": torch.randn(tokens, STREAMS, width).bfloat16(),
        "value": torch.randn(tokens, width).bfloat16(),
        "weight_hidden": 1 + 0.1 * torch.randn(STREAMS, width),
        "weight_embed": 1 + 0.1 * torch.randn(STREAMS, width),
    }


def parts(data):
    """What the library's gate reads, and the two weights that it reads fused."""
    rows = {x: t for x, t in data.items() if not x.startswith("weight")}
    weights = {x: t for x, t in data.items() if x.startswith("weight")}
    return {**rows, "weight_fused": weights["weight_hidden"] * weights["weight_embed"]}, weights


def gate_fwd(library, tokens, width):
    data = inputs(tokens, width)
    gate, _ = parts(data)
    ours, out = library.prepare("engram.gate_fwd", gate, {"eps": EPS, "clamp": CLAMP})
    return forward(torch_gate, data, ours, {"out": out["out"]}, (6 * STREAMS + 2) * width * tokens)


def gate_bwd(library, tokens, width):
    """With the gradients of both weights."""
    data = inputs(tokens, width)
    gate, weights = parts(data)
    grad = torch.randn_like(data["residual"])
    rules = {"eps": EPS, "clamp": CLAMP, "save": True}
    run_forward, saved = library.prepare("engram.gate_fwd", gate, rules)
    run_forward()
    statistics = {name: t for name, t in saved.items() if name != "out"}
    of_gate, rows = library.prepare(
        "engram.gate_bwd", {"grad_out": grad, **gate, **statistics}, {"clamp": CLAMP}
    )
    of_weights, sums = library.prepare(
        "engram.grad_w_reduce", {"grad_weight_partial": rows["grad_weight_partial"], **weights}, {}
    )

    def ours():
        of_gate()
        of_weights()

    gradients = {name: (rows | sums)[f"grad_{name}"] for name in data}
    return backward(torch_gate, data, [grad], ours, gradients, (10 * STREAMS + 4) * width * tokens)


COMPARISONS = {"engram.gate_fwd": gate_fwd, "engram.gate_bwd": gate_bwd}
