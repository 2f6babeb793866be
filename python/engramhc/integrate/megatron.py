"""Megatron-LM's HyperConnectionModule on EngramHC.

    spec.hyper_connection = engramhc.integrate.megatron.HyperConnectionModule

Methods, shapes and parameter names are Megatron's, so its checkpoints load. Streams travel as
[s, b, n*C]; h_res is [input stream, output stream], the comb of this library. Mixing weights stay
fp32. Megatron itself is not needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import torch as ehc
from ..errors import ArgumentError, UnsupportedError

__all__ = ["HyperConnectionModule"]

_EPS = 1e-6  # of the RMS, the Sinkhorn iteration and, with "deepseek", of h_pre
_PRE_EPS = {"megatron": 0.0, "deepseek": _EPS}


class HyperConnectionModule(nn.Module):
    """Mappings of one sublayer. `convention` is that of the Sinkhorn iteration: "megatron" begins
    with exponentials and rows; releases whose iteration begins with a softmax need "deepseek"."""

    def __init__(self, config: Any, layer_number: int, *, convention: str = "megatron"):
        super().__init__()
        if convention not in _PRE_EPS:
            raise ArgumentError(
                "HyperConnectionModule: attribute 'convention': expected megatron or deepseek"
                f", got {convention!r}"
            )
        self.config, self.layer_number, self.convention = config, layer_number, convention
        self.n: int = config.num_residual_streams
        self.hidden_size: int = config.hidden_size
        self.sinkhorn_iterations: int = config.mhc_sinkhorn_iterations
        mixes = self.n * self.n + 2 * self.n
        self.mapping_proj = nn.Linear(self.n * self.hidden_size, mixes, bias=False)
        self.alpha_pre = nn.Parameter(torch.full((1,), config.mhc_init_gating_factor))
        self.alpha_post = nn.Parameter(torch.full((1,), config.mhc_init_gating_factor))
        self.alpha_res = nn.Parameter(torch.full((1,), config.mhc_init_gating_factor))
        self.bias = nn.Parameter(torch.zeros(mixes))
        nn.init.xavier_uniform_(self.mapping_proj.weight)
        if getattr(config, "sequence_parallel", False):
            for parameter in self.parameters():
                parameter.sequence_parallel = True  # gradients are summed over the ranks

    def forward(
        self, hidden_states: Tensor, mhc_recompute_manager: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [s, b, n*C] to aggregated [s, b, C], h_res [s, b, n, n], h_post [s, b, n]."""
        _refuse_manager(mhc_recompute_manager)
        aggregated, (h_post, h_res) = ehc.mhc_pre(
            self._streams(hidden_states),
            *self._weights(),
            rms="norm",
            rms_eps=_EPS,
            post_mult=2.0,
            pre_eps=_PRE_EPS[self.convention],
            sinkhorn_eps=_EPS,
            repeat=self.sinkhorn_iterations,
            convention=self.convention,
        )
        return aggregated, h_res, h_post

    def compute_mappings(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h_pre [s, b, n], h_post [s, b, n], h_res [s, b, n, n]."""
        fn, scale, base = self._weights()
        mixes = ehc.mhc_pre_norm_fn(self._streams(x), fn, rms="norm", rms_eps=_EPS)
        h_pre, h_post, logits = ehc.mhc_pre_split_mixes(
            mixes, scale, base, self.n, post_mult=2.0, pre_eps=_PRE_EPS[self.convention]
        )
        h_res = ehc.sinkhorn_normalize(logits, self.sinkhorn_iterations, _EPS, convention=self.convention)
        return h_pre, h_post, h_res

    def aggregate(self, x: Tensor, h_pre: Tensor) -> Tensor:
        """[s, b, n*C] to [s, b, C]."""
        return ehc.mhc_pre_apply_mix(self._streams(x), h_pre.float())

    def apply_h_res(self, h_res: Tensor, residual: Tensor) -> Tensor:
        """The streams mixed, [s, b, n*C]."""
        streams = self._streams(residual)
        nothing = streams.new_zeros(streams.shape[:2] + streams.shape[3:])
        no_post = torch.zeros(streams.shape[:3], device=streams.device)
        return ehc.mhc_post(nothing, streams, no_post, h_res.float()).flatten(-2)

    def apply_h_post(
        self, x_with_bias: tuple[Tensor, Tensor | None], h_post: Tensor, manager: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [s, b, C] and a bias [C] or None, each put into the streams: [s, b, n*C]."""
        _refuse_manager(manager)
        x, bias = x_with_bias

        def expanded(row: Tensor) -> Tensor:
            return (h_post.unsqueeze(-1) * row.unsqueeze(-2)).to(row.dtype).flatten(-2)

        return expanded(x), None if bias is None else expanded(bias)

    def fused_h_res_h_post_bda(
        self,
        h_res: Tensor,
        original_residual: Tensor,
        h_post: Tensor,
        layer_output_with_bias: tuple[Tensor, Tensor | None],
        dropout_prob: float,
        training: bool,
        fused: bool,
        manager: Any = None,
    ) -> Tensor:
        """dropout(h_post (x + bias)) + the streams mixed by h_res, [s, b, n*C]."""
        _refuse_manager(manager)
        x, bias = layer_output_with_bias
        if dropout_prob == 0.0 or not training:
            streams = self._streams(original_residual)
            return ehc.mhc_post(x, streams, h_post.float(), h_res.float(), bias=bias).flatten(-2)
        expanded, _ = self.apply_h_post((x if bias is None else x + bias, None), h_post)
        return F.dropout(expanded, dropout_prob, training) + self.apply_h_res(h_res, original_residual)

    @staticmethod
    def input_expand(x: Tensor, n: int) -> Tensor:
        """[s, b, C] to n equal streams, [s, b, n*C]."""
        return ehc.expand_to_mhc(x, n).flatten(-2)

    @staticmethod
    def output_contract(x: Tensor, n: int) -> Tensor:
        """The mean of the streams, [s, b, C]."""
        return ehc.mhc_mean(x.unflatten(-1, (n, -1)))

    def _streams(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n, self.hidden_size))

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        scale = torch.cat([self.alpha_pre, self.alpha_post, self.alpha_res])
        return self.mapping_proj.weight.float(), scale.float(), self.bias.float()


def _refuse_manager(manager: Any) -> None:
    if manager is not None:
        raise UnsupportedError(
            "HyperConnectionModule: argument 'mhc_recompute_manager': expected None, got a manager"
            "; hint: engramhc.torch.MultiLayerRecompute recomputes blocks of layers"
        )
