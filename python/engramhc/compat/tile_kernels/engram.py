"""`tile_kernels.engram` of 1.x and 2.x: gate, its weights, hash and the optimizer's steps."""

from __future__ import annotations

import torch
from torch import Tensor

from ._operators import overloaded, run

Statistics = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """[n, d] fp32."""
    inputs = {"weight_hidden": weight_hidden, "weight_embed": weight_embed}
    return run("fused_weight", "engram.fused_weight", inputs)["weight_fused"]


def _gate_fwd(
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
) -> Statistics:
    """output, dot, gate_score, rstd_x, rstd_k; kv [..., n+1, d], or k [..., n, d] and v [..., d]."""
    keys = {"kv": kv, "image_token_mask": image_token_mask}
    return _gate(hidden_states, keys, weight_fused, eps, clamp_value, save_for_backward, inplace)


def _gate_fwd_1(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
) -> Statistics:
    keys = {"key": k, "value": v}
    return _gate(hidden_states, keys, weight_fused, eps, clamp_value, save_for_backward, False)


def _gate(x: Tensor, keys: dict, weight_fused: Tensor, eps: float, clamp: float, save: bool, inplace: bool):
    got = run(
        "engram_gate_fwd",
        "engram.gate_fwd",
        {"residual": x, "weight_fused": weight_fused, **keys},
        {"out": x} if inplace else {},
        eps=eps,
        clamp=clamp,
        save=save,
        inplace=inplace,
    )
    return got["out"], got["dot"], got["alpha"], got["rstd_residual"], got["rstd_key"]


def _gate_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_x, grad_kv (grad_k, grad_v of k and v), grad_w_partial [P, n, d]."""
    inputs = {"kv": kv, "image_token_mask": image_token_mask}
    got = _gate_gradients(
        grad_out, hidden_states, inputs, weight_fused, dot, gate_score, rstd_x, rstd_k, clamp_value
    )
    return got["grad_residual"], got["grad_kv"], got["grad_weight_partial"]


def _gate_bwd_1(
    grad_out: Tensor,
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = {"key": k, "value": v}
    got = _gate_gradients(
        grad_out, hidden_states, inputs, weight_fused, dot, gate_score, rstd_x, rstd_k, clamp_value
    )
    return got["grad_residual"], got["grad_key"], got["grad_value"], got["grad_weight_partial"]


def _gate_gradients(grad_out, x, keys, weight_fused, dot, alpha, rstd_x, rstd_k, clamp) -> dict:
    inputs = {
        "grad_out": grad_out,
        "residual": x,
        "weight_fused": weight_fused,
        "dot": dot,
        "alpha": alpha,
        "rstd_residual": rstd_x,
        "rstd_key": rstd_k,
        **keys,
    }
    return run("engram_gate_bwd", "engram.gate_bwd", inputs, clamp=clamp)


engram_gate_fwd = overloaded(_gate_fwd, _gate_fwd_1, ("eps", "clamp_value"))
engram_gate_bwd = overloaded(_gate_bwd, _gate_bwd_1, ("clamp_value",))
engram_gate_fwd.__name__, engram_gate_bwd.__name__ = "engram_gate_fwd", "engram_gate_bwd"


def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    """Adds to both gradients."""
    inputs = {
        "grad_weight_partial": grad_w_partial,
        "weight_hidden": weight_hidden,
        "weight_embed": weight_embed,
        "grad_weight_hidden_acc": grad_weight_hidden,
        "grad_weight_embed_acc": grad_weight_embed,
    }
    outputs = {"grad_weight_hidden": grad_weight_hidden, "grad_weight_embed": grad_weight_embed}
    run("grad_w_reduce", "engram.grad_w_reduce", inputs, outputs)


def engram_hash(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """Rows [L, T, C] int32."""
    inputs = {
        "window": ngram_token_ids,
        "multipliers": multipliers,
        "vocab_sizes": vocab_sizes,
        "offsets": offsets,
        "image_token_mask": image_token_mask,
    }
    return run("engram_hash", "engram.hash", inputs)["indices"]


def engram_sinkhorn_momentum_update(
    grad: Tensor, momentum_buffer: Tensor, beta1: float, nesterov: bool = True
) -> Tensor:
    """Updates the buffer and returns what the Sinkhorn steps take, fp32 of its shape."""
    shape = (-1, momentum_buffer.shape[-1]) if momentum_buffer.dim() > 1 else (1, -1)
    momentum = momentum_buffer.view(shape)
    got = run(
        "engram_sinkhorn_momentum_update",
        "engram.momentum_update",
        {"grad": grad.reshape(momentum.shape), "momentum": momentum},
        {"momentum": momentum},
        beta=beta1,
        nesterov=nesterov,
    )
    return got["update"].view_as(momentum_buffer)


def engram_sinkhorn_step(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Updates row_scale; returns row_norm [rows] and col_sumsq_partial [P, hd]."""
    inputs = {"update": matrix, "row_scale": row_scale, "col_scale": col_scale}
    got = run("engram_sinkhorn_step", "engram.sinkhorn_step", inputs, {"row_scale": row_scale}, eps=eps)
    return got["row_norm"], got["col_partial"]


def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Tensor) -> None:
    run(
        "engram_sinkhorn_step_reduce",
        "engram.sinkhorn_step_reduce",
        {"col_partial": col_sumsq_partial},
        {"col_sumsq": col_sumsq},
    )


def engram_sinkhorn_finalize(
    matrix: Tensor,
    row_scale: Tensor,
    col_scale: Tensor,
    eps: float,
    alpha: float,
    out: Tensor | None = None,
) -> Tensor:
    """Rows of the norm alpha, [rows, hd]."""
    inputs = {"update": matrix, "row_scale": row_scale, "col_scale": col_scale}
    outputs = {"out": torch.empty_like(matrix) if out is None else out}
    run("engram_sinkhorn_finalize", "engram.sinkhorn_finalize", inputs, outputs, eps=eps, alpha=alpha)
    return outputs["out"]
