"""EngramHC for PyTorch: functions with autograd, modules and an optimizer."""

from .accumulate import GradAccumulator
from .engram import (
    engram_gate,
    engram_gather,
    engram_hash,
    engram_hash_ids,
    engram_layer,
    engram_short_conv,
    engram_window,
)
from engramhc.ops._arguments import MhcMix

from .mhc import (
    expand_to_mhc,
    mhc_collapse,
    mhc_fused_post_pre,
    mhc_fused_post_pre_delayed,
    mhc_head,
    mhc_head_compute_mix,
    mhc_mean,
    mhc_post,
    mhc_pre,
    mhc_pre_apply_mix,
    mhc_pre_big_fuse,
    mhc_pre_broadcast,
    mhc_pre_delayed,
    mhc_pre_norm_fn,
    mhc_pre_split_mixes,
    mhc_prenorm_gemm,
    mhc_reduce_partials_and_rmsnorm,
    sinkhorn_normalize,
)
from .recompute import RecomputePlan, mhc_multilayer_recompute, mhc_recompute_plan
from .sums import allow_nondeterministic
from .engram_modules import Engram, EngramConfig, EngramTable
from .lookups import lookup, prefetch
from .modules import MhcExpand, MhcHead, MhcMean, MhcSublayer
from .multilayer import MultiLayerRecompute
from .optimizer import EngramSinkhorn
