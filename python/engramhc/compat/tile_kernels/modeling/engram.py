"""`tile_kernels.modeling.engram` of 1.x (k, v apart) and 2.x (packed kv [..., (n+1)*d])."""

from __future__ import annotations

from torch import Tensor

from .... import torch as ehc
from .._operators import overloaded


def _gate(
    hidden_states: Tensor,
    kv: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    n, d = hidden_states.shape[-2:]
    return ehc.engram_gate(
        hidden_states,
        kv.reshape(*hidden_states.shape[:-2], n + 1, d),
        weight_hidden,
        weight_embed,
        eps=eps,
        clamp=clamp_value,
        image_token_mask=image_token_mask,
    )


def _gate_1(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
) -> Tensor:
    return ehc.engram_gate(hidden_states, (k, v), weight_hidden, weight_embed, eps=eps, clamp=clamp_value)


engram_gate = overloaded(_gate, _gate_1, ("clamp_value", "eps"))
engram_gate.__name__ = "engram_gate"


class EngramGateFn:
    """Only `apply`, which is `engram_gate`."""

    apply = staticmethod(engram_gate)
