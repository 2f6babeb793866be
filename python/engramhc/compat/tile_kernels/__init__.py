"""The `tile_kernels` package, 1.x and 2.x, on EngramHC: engram, mhc and what their tests use.

Submodules that only name functions of another (`mhc.post_kernel`, `modeling.mhc.ops.post`, ...) are
made here.
"""

from __future__ import annotations

import sys
import types

from . import config, engram, mhc, modeling, rand, testing, torch, utils
from .config import (
    get_deterministic_algorithms,
    get_device,
    get_device_num_sms,
    get_max_smem_per_sm,
    get_num_ai_cores,
    get_num_cube_cores,
    get_num_sms,
    get_num_vec_cores,
    get_pdl,
    get_token_alignment,
    is_ascend,
    reset_runtime_config,
    set_num_sms,
    set_pdl,
    set_token_alignment,
    use_deterministic_algorithms,
)

_ALIASES: dict[types.ModuleType, dict[str, tuple[str, ...]]] = {
    engram: {
        "engram_fused_weight_kernel": ("fused_weight",),
        "engram_gate_kernel": ("engram_gate_fwd", "engram_gate_bwd"),
        "engram_gate_fwd_kernel": ("engram_gate_fwd",),
        "engram_gate_bwd_kernel": ("engram_gate_bwd",),
        "engram_grad_w_reduce_kernel": ("grad_w_reduce",),
        "engram_hash_kernel": ("engram_hash",),
        "engram_sinkhorn_kernel": (
            "engram_sinkhorn_momentum_update",
            "engram_sinkhorn_step",
            "engram_sinkhorn_step_reduce",
            "engram_sinkhorn_finalize",
        ),
    },
    mhc: {
        "expand_kernel": ("expand_to_mhc_fwd", "expand_to_mhc_bwd"),
        "head_compute_mix_kernel": ("mhc_head_compute_mix_fwd", "mhc_head_compute_mix_bwd"),
        "multilayer_recompute_kernel": ("mhc_multilayer_recompute",),
        "norm_fn_kernel": (
            "mhc_fn_normw_merge_fwd",
            "mhc_fn_normw_merge_bwd",
            "mhc_reduce_partials_and_rmsnorm_fwd",
            "mhc_reduce_partials_and_rmsnorm_bwd",
            "round_to_tf32",
        ),
        "post_kernel": ("mhc_post_fwd", "mhc_post_bwd"),
        "pre_apply_mix_kernel": ("mhc_pre_apply_mix_fwd", "mhc_pre_apply_mix_bwd"),
        "pre_big_fuse_kernel": ("mhc_pre_big_fuse_fwd",),
        "pre_split_mixes_kernel": ("mhc_pre_split_mixes_fwd", "mhc_pre_split_mixes_bwd"),
        "sinkhorn_kernel": ("mhc_sinkhorn_fwd", "mhc_sinkhorn_bwd"),
    },
    modeling.engram: {"engram_gate": ("engram_gate", "EngramGateFn")},
    modeling.mhc.ops: {
        "expand": ("expand_to_mhc",),
        "head_compute_mix": ("mhc_head_compute_mix",),
        "multilayer_recompute": ("mhc_multilayer_recompute",),
        "norm_fn": ("mhc_pre_norm_fn",),
        "post": ("mhc_post", "mhc_post_fwd", "mhc_post_bwd"),
        "pre_apply_mix": ("mhc_pre_apply_mix",),
        "pre_big_fuse": ("mhc_pre_big_fuse",),
        "pre_split_mixes": ("mhc_pre_split_mixes",),
        "sinkhorn": ("sinkhorn_normalize",),
    },
    torch: {
        "mhc": tuple(name for name in vars(torch) if name.endswith("_ref") and "engram" not in name),
        "engram": ("make_offsets", *(name for name in vars(torch) if name.startswith("engram"))),
    },
}

for _module, _parts in _ALIASES.items():
    for _name, _functions in _parts.items():
        _part = types.ModuleType(f"{_module.__name__}.{_name}", _module.__doc__)
        vars(_part).update({function: getattr(_module, function) for function in _functions})
        sys.modules[_part.__name__] = _part
        if not hasattr(_module, _name):  # engram_gate is a function too
            setattr(_module, _name, _part)

_NOT_OFFERED = ("moe", "quant", "transpose", "transform")


def __getattr__(name: str) -> object:
    if name in _NOT_OFFERED:
        raise AttributeError(f"tile_kernels.{name}: not offered by EngramHC, which has engram and mhc alone")
    raise AttributeError(f"module 'tile_kernels' has no attribute '{name}'")
