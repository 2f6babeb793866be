"""Hyper-connections of Hugging Face models, run by EngramHC.

    count = swap_hyper_connections(model)   # parameters are untouched, so checkpoints load
    restore(model)

Of the families deepseek_v4, glm5_next and hy_v4. What is replaced are methods of the model's own
modules: of hyper-connections and heads, and of decoder layers for their post step.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..torch import (
    mhc_head,
    mhc_head_compute_mix,
    mhc_post,
    mhc_pre,
    mhc_pre_apply_mix,
    mhc_pre_norm_fn,
)

__all__ = ["restore", "swap_hyper_connections"]


def swap_hyper_connections(model: nn.Module) -> int:
    """Replaces `forward` where EngramHC has it; returns the number of hyper-connections and heads."""
    count = 0
    for module in model.modules():
        forward = _FORWARDS.get(type(module).__name__)
        if forward is not None:
            module.forward = types.MethodType(forward, module)
            count += not type(module).__name__.endswith("DecoderLayer")
    return count


def restore(model: nn.Module) -> None:
    """Gives every module its own `forward` back."""
    for module in model.modules():
        if type(module).__name__ in _FORWARDS:
            module.__dict__.pop("forward", None)


# --- hyper-connections and heads ------------------------------------------------------------------


def _connection(self: Any, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, n, d] to post [B, S, n], comb [B, S, n, n] and the collapsed streams [B, S, d]."""
    collapsed, (post, comb) = mhc_pre(
        hidden_streams,
        self.fn.float(),
        self.scale.float(),
        self.base.float(),
        rms_eps=self.input_norm.eps,
        post_mult=2.0,
        pre_eps=self.hc_eps,
        sinkhorn_eps=self.hc_eps,
        repeat=self.hc_sinkhorn_iters,
    )
    return post, comb, collapsed


def _independent_connection(self: Any, hidden_streams: Tensor) -> tuple[Tensor, Tensor]:
    """Of HY-V4: streams are not mixed, and post has an eps too."""
    n, magnitude = self.hc_mult, self.hc_post_magnitude
    mixes = mhc_pre_norm_fn(hidden_streams, self.fn.float(), rms_eps=self.input_norm.eps)
    (pre, post), (pre_base, post_base) = mixes.split(n, -1), self.base.float().split(n)
    pre_scale, post_scale = self.scale.float().split(1)
    pre = mhc_head_compute_mix(pre, pre_scale, pre_base, pre_eps=self.hc_eps)
    post = mhc_head_compute_mix(post, post_scale, post_base, pre_eps=self.hc_eps / magnitude)
    return magnitude * post, mhc_pre_apply_mix(hidden_streams, pre)


def _head(self: Any, x: Tensor) -> Tensor:
    return mhc_head(
        x,
        self.hc_fn.float(),
        self.hc_scale.float(),
        self.hc_base.float(),
        rms_eps=self.input_norm.eps,
        pre_eps=self.eps,
    )


# --- decoder layers: [B, S, n, d] in and out -------------------------------------------------------


def _deepseek_v4_layer(self: Any, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any):
    def attention(x: Tensor) -> Tensor:
        return self.self_attn(self.input_layernorm(x), **kwargs)[0]

    def feed_forward(x: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x), input_ids=input_ids)

    return _sublayer(self.ffn_hc, feed_forward, _sublayer(self.attn_hc, attention, hidden_states))


def _indexed_layer(self: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any):
    """Of GLM-5 and HY-V4, whose attention also returns the top-k indices for the layer behind."""
    is_linear = getattr(self, "block_type", None) == "linear_attention"
    if is_linear:
        for name in ("position_ids", "use_cache", "position_embeddings", "prev_topk_indices"):
            kwargs.pop(name, None)
    topk_indices = None

    def attention(x: Tensor) -> Tensor:
        nonlocal topk_indices
        out = self.self_attn(hidden_states=self.input_layernorm(x), attention_mask=attention_mask, **kwargs)
        if is_linear:
            return out
        topk_indices = out[2]
        return out[0]

    def feed_forward(x: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x))

    hidden_states = _sublayer(self.attn_hc, attention, hidden_states)
    return _sublayer(self.ffn_hc, feed_forward, hidden_states), topk_indices


def _sublayer(connection: nn.Module, function: Callable[[Tensor], Tensor], residual: Tensor) -> Tensor:
    post, *comb, collapsed = connection(residual)
    return mhc_post(function(collapsed), residual, post, comb[0] if comb else None)


_FORWARDS = {
    "DeepseekV4HyperConnection": _connection,
    "DeepseekV4HyperHead": _head,
    "DeepseekV4DecoderLayer": _deepseek_v4_layer,
    "Glm5NextTextHyperConnection": _connection,
    "Glm5NextTextDecoderLayer": _indexed_layer,
    "HYV4HyperConnection": _independent_connection,
    "HYV4HyperHead": _head,
    "HYV4DecoderLayer": _indexed_layer,
}
