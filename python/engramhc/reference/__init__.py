"""NumPy reference of the operators, in double precision, written from the formulas alone.

It is slow and plain on purpose: something to read, and something to compare a fast implementation
with. Inputs are decoded exactly to float64, formulas are evaluated there, and every output is
rounded once to its dtype (twice where an operator says so).

    from engramhc import reference
    outputs = reference.run("engram.fused_weight", {"weight_hidden": a, "weight_embed": b})

Tensors carry their dtype (`dtypes.Tensor`); plain NumPy arrays of a type that NumPy knows are
accepted too. Names of operators, tensors and attributes are those of `ehc op`.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from . import (
    addressing,
    conv,
    gate,
    layer,
    mhc_mixes,
    mhc_monitors,
    mhc_pre,
    mhc_projection,
    mhc_recompute,
    mhc_seams,
    mhc_sinkhorn,
    mhc_streams,
    optimizer,
    rows,
    text,
)
from .dtypes import Tensor, tensor

_FUNCTIONS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "engram.token_map": text.token_map,
    "engram.compress_ids": addressing.compress_ids,
    "engram.window": addressing.window,
    "engram.multipliers": addressing.multipliers,
    "engram.primes": addressing.primes,
    "engram.offsets": addressing.offsets,
    "engram.hash": addressing.hash_rows,
    "engram.gather_fwd": rows.gather_fwd,
    "engram.gather_bwd": rows.gather_bwd,
    "engram.dequant_rows": rows.dequant_rows,
    "engram.quantize_rows": rows.quantize_rows,
    "engram.gather_dequant": rows.gather_dequant,
    "engram.kv_projection_fwd": rows.kv_projection_fwd,
    "engram.kv_projection_bwd": rows.kv_projection_bwd,
    "engram.fused_weight": gate.fused_weight,
    "engram.gate_fwd": gate.gate_fwd,
    "engram.gate_bwd": gate.gate_bwd,
    "engram.grad_w_reduce": gate.grad_w_reduce,
    "engram.conv_fwd": conv.conv_fwd,
    "engram.conv_bwd": conv.conv_bwd,
    "engram.layer_fwd": layer.layer_fwd,
    "engram.layer_bwd": layer.layer_bwd,
    "engram.momentum_update": optimizer.momentum_update,
    "engram.sinkhorn_step": optimizer.sinkhorn_step,
    "engram.sinkhorn_step_reduce": optimizer.sinkhorn_step_reduce,
    "engram.sinkhorn_finalize": optimizer.sinkhorn_finalize,
    "engram.optimizer_step": optimizer.optimizer_step,
    "mhc.expand_fwd": mhc_streams.expand_fwd,
    "mhc.expand_bwd": mhc_streams.expand_bwd,
    "mhc.merge_fwd": mhc_projection.merge_fwd,
    "mhc.merge_bwd": mhc_projection.merge_bwd,
    "mhc.prenorm_gemm": mhc_projection.prenorm_gemm,
    "mhc.reduce_partials_fwd": mhc_projection.reduce_partials_fwd,
    "mhc.reduce_partials_bwd": mhc_projection.reduce_partials_bwd,
    "mhc.norm_fn_bwd": mhc_projection.norm_fn_bwd,
    "mhc.split_fwd": mhc_mixes.split_fwd,
    "mhc.split_bwd": mhc_mixes.split_bwd,
    "mhc.split_bwd_reduce": mhc_mixes.split_bwd_reduce,
    "mhc.sinkhorn_fwd": mhc_sinkhorn.sinkhorn_fwd,
    "mhc.sinkhorn_bwd": mhc_sinkhorn.sinkhorn_bwd,
    "mhc.pre_apply_fwd": mhc_streams.pre_apply_fwd,
    "mhc.pre_apply_bwd": mhc_streams.pre_apply_bwd,
    "mhc.pre_big_fuse": mhc_pre.pre_big_fuse,
    "mhc.post_fwd": mhc_streams.post_fwd,
    "mhc.post_bwd": mhc_streams.post_bwd,
    "mhc.head_mix_fwd": mhc_mixes.head_mix_fwd,
    "mhc.head_mix_bwd": mhc_mixes.head_mix_bwd,
    "mhc.multilayer_recompute": mhc_recompute.multilayer_recompute,
    "mhc.plan_recompute": mhc_recompute.plan_recompute,
    "mhc.amax_gain": mhc_monitors.amax_gain,
    "mhc.defect": mhc_monitors.defect,
    "mhc.pre_fwd": mhc_pre.pre_fwd,
    "mhc.pre_bwd": mhc_pre.pre_bwd,
    "mhc.head_fwd": mhc_pre.head_fwd,
    "mhc.head_bwd": mhc_pre.head_bwd,
    "mhc.seam_classic_fwd": mhc_seams.seam_classic_fwd,
    "mhc.seam_classic_bwd": mhc_seams.seam_classic_bwd,
    "mhc.seam_single_pass_fwd": mhc_seams.seam_single_pass_fwd,
    "mhc.seam_single_pass_bwd": mhc_seams.seam_single_pass_bwd,
    "mhc.seam_broadcast_fwd": mhc_seams.seam_broadcast_fwd,
    "mhc.seam_broadcast_bwd": mhc_seams.seam_broadcast_bwd,
}


def _operator(function: Callable[..., dict[str, Tensor]]):
    def call(inputs: dict, attrs: dict) -> dict[str, Tensor]:
        with np.errstate(all="ignore"):  # NaN and infinities come and go as the formulas say
            return function(**{name: tensor(array) for name, array in inputs.items()}, **attrs)

    return call


# Operator name -> callable(inputs, attrs) -> outputs.
REFERENCE = {name: _operator(function) for name, function in _FUNCTIONS.items()}


def run(name: str, inputs: dict | None = None, attrs: dict | None = None) -> dict[str, Tensor]:
    """Runs one operator of the reference."""
    return REFERENCE[name](inputs or {}, attrs or {})
