"""Rows of the mHC operators, in the notation of protocol_rows.py.

"name.L": a list, name.0, name.1, ... "G?": an axis that is there or not, in all tensors of a call.
"""

_FN = [
    "fn F32[N,K]",
    "scale F32[3]",
    "base F32[N]",
    "norm_weight? F32[K]",
    "layer_norm_weight? W[d]",
]
_FNACC = [
    "grad_fn_acc? F32[N,K]",
    "grad_scale_acc? F32[3]",
    "grad_base_acc? F32[N]",
    "grad_norm_weight_acc? F32[K]",
    "grad_layer_norm_weight_acc? F32[d]",
]
_GFN = [
    "grad_fn F32[N,K]",
    "grad_scale F32[3]",
    "grad_base F32[N]",
    "grad_norm_weight F32[K]",
    "grad_layer_norm_weight F32[d]",
]
_RMS = "rms mean/norm = mean"
_CONVENTION = "convention deepseek/megatron/log = deepseek"
_MIX = [
    "norm_eps float [>0]",
    "pre_eps float [>=0]",
    "post_mult float [>=0]",
    "repeat int [1..64]",
    "sinkhorn_eps float [>=0]",
    _CONVENTION,
    _RMS,
]
_PREC = "precision fp32/tf32 = fp32"
_ROUND = "rounding once/chain = once"
_LAYER_NORM = "layer_norm_eps float [>0] (with layer_norm_weight)"
_SAVED = [
    "pre? F32[T,n]",
    "mixes? F32[T,N]",
    "mul? F32[T,N]",
    "sqr? F32[T]",
    "comb_logits? F32[T,n,n]",
    "comb? F32[T,n,n]",
]
_NSAVED = ["new_residual? A[T,n,d]", *(f"next_{row}" for row in _SAVED)]
_EXIT = ["layer_output A[T,d]", "residual A[T,n,d]"]
_POST_COMB = ["post F32[T,n]", "comb F32[T,n,n]"]
_SINKHORN = ["repeat int [1..64]", "eps float [>=0]", _CONVENTION]
_PARTIALS = ["mul_partial F32[S,T,G?,M]", "sqr_partial F32[S,T,G?]"]
_SUMS = ["mul F32[T,G?,M]", "sqr F32[T,G?]"]
_REDUCE = ["k int [>=1]", "norm_eps float [>0]", _RMS]
_STATE = ["mixes F32[T,N]", "mul F32[T,N]", "sqr F32[T]", "comb_logits F32[T,n,n]"]
_NEXT_STATE = [f"next_{row}" for row in _STATE]
_SUBLAYER = [*_MIX, _PREC, _LAYER_NORM]
_EXIT_GRADIENTS = [
    "grad_layer_output A[T,d]",
    "grad_residual A[T,n,d]",
    "grad_post F32[T,n]",
    "grad_comb F32[T,n,n]",
]

ROWS = {
    # Pieces
    "mhc.expand_fwd": ("2.1", ["hidden A[T,d]"], ["n int [1..8]"], ["residual A[T,n,d]"]),
    "mhc.expand_bwd": ("2.1", ["grad_residual A[T,n,d]"], [], ["grad_hidden A[T,d]"]),
    "mhc.merge_fwd": ("2.2", ["fn F32[M,K]", "norm_weight F32[K]"], [], ["fn_merged F32[M,K]"]),
    "mhc.merge_bwd": (
        "2.2",
        [
            "grad_fn_merged F32[M,K]",
            "fn F32[M,K]",
            "norm_weight F32[K]",
            "grad_fn_acc? F32[M,K]",
            "grad_norm_weight_acc? F32[K]",
        ],
        [],
        ["grad_fn F32[M,K]", "grad_norm_weight F32[K]"],
    ),
    "mhc.prenorm_gemm": (
        "2.3",
        ["residual A[T,n,d]", "fn F32[M,K]"],
        ["splits int [0..1024] = 0", "groups int [>=1] = 1", _PREC],
        _PARTIALS,
    ),
    "mhc.reduce_partials_fwd": ("2.4", _PARTIALS, _REDUCE, ["mixes F32[T,M]", *_SUMS]),
    "mhc.reduce_partials_bwd": (
        "2.4",
        ["grad_mixes F32[T,M]", *_SUMS],
        _REDUCE,
        ["grad_mul F32[T,G?,M]", "grad_sqr F32[T,G?]"],
    ),
    "mhc.norm_fn_bwd": (
        "2.5",
        [
            "grad_mul F32[T,G?,M]",
            "grad_sqr F32[T,G?]",
            "residual A[T,n,d]",
            "fn F32[M,K]",
            "grad_residual_acc? A[T,n,d]",
            "grad_fn_acc? F32[M,K]",
        ],
        [_PREC],
        ["grad_residual A[T,n,d]", "grad_fn F32[M,K]"],
    ),
    "mhc.split_fwd": (
        "2.6",
        ["mixes F32[T,N]", "scale F32[3]", "base F32[N]"],
        ["pre_eps float [>=0]", "post_mult float [>=0]"],
        ["pre F32[T,n]", "post F32[T,n]", "comb_logits F32[T,n,n]"],
    ),
    "mhc.split_bwd": (
        "2.6",
        [
            "grad_pre F32[T,n]",
            "grad_post F32[T,n]",
            "grad_comb_logits F32[T,n,n]",
            "mixes F32[T,N]",
            "scale F32[3]",
            "base F32[N]",
        ],
        ["post_mult float [>=0]"],
        ["grad_mixes F32[T,N]", "grad_scale_partial F32[P,3]", "grad_base_partial F32[P,N]"],
    ),
    "mhc.split_bwd_reduce": (
        "2.6",
        [
            "grad_scale_partial F32[P,Q]",
            "grad_base_partial F32[P,N]",
            "grad_scale_acc? F32[Q]",
            "grad_base_acc? F32[N]",
        ],
        [],
        ["grad_scale F32[Q]", "grad_base F32[N]"],
    ),
    "mhc.sinkhorn_fwd": ("2.7", ["comb_logits F32[T,n,n]"], _SINKHORN, ["comb F32[T,n,n]"]),
    "mhc.sinkhorn_bwd": (
        "2.7",
        ["grad_comb F32[T,n,n]", "comb_logits F32[T,n,n]"],
        _SINKHORN,
        ["grad_comb_logits F32[T,n,n]"],
    ),
    "mhc.pre_apply_fwd": (
        "2.8",
        ["residual A[T,n,d]", "pre F32[T,n]"],
        [],
        ["layer_input A[T,d]"],
    ),
    "mhc.pre_apply_bwd": (
        "2.8",
        [
            "grad_layer_input A[T,d]",
            "residual A[T,n,d]",
            "pre F32[T,n]",
            "grad_residual_acc? A[T,n,d]",
        ],
        [],
        ["grad_residual A[T,n,d]", "grad_pre F32[T,n]"],
    ),
    "mhc.pre_big_fuse": (
        "2.9",
        [
            "mul_partial F32[S,T,G?,N]",
            "sqr_partial F32[S,T,G?]",
            "scale F32[3]",
            "base F32[N]",
            "residual A[T,n,d]",
            "layer_norm_weight? W[d]",
        ],
        [*_MIX, _LAYER_NORM],
        ["layer_input A[T,d]", *_POST_COMB],
    ),
    "mhc.post_fwd": (
        "2.10",
        [*_EXIT, *_POST_COMB],
        ["inplace bool = false"],
        ["new_residual A[T,n,d]"],
    ),
    "mhc.post_bwd": (
        "2.10",
        ["grad_new_residual A[T,n,d]", *_EXIT, *_POST_COMB],
        [],
        _EXIT_GRADIENTS,
    ),
    "mhc.head_mix_fwd": (
        "2.11",
        ["mixes F32[T,n]", "scale F32[1]", "base F32[n]"],
        ["pre_eps float [>=0]"],
        ["pre F32[T,n]"],
    ),
    "mhc.head_mix_bwd": (
        "2.11",
        [
            "grad_pre F32[T,n]",
            "mixes F32[T,n]",
            "scale F32[1]",
            "base F32[n]",
            "grad_scale_acc? F32[1]",
            "grad_base_acc? F32[n]",
        ],
        [],
        ["grad_mixes F32[T,n]", "grad_scale F32[1]", "grad_base F32[n]"],
    ),
    "mhc.multilayer_recompute": (
        "2.12",
        [
            "residual A[T,n,d]",
            "pre.L F32[T,n]",
            "layer_output.L? A[T,d]",
            "post.L? F32[T,n]",
            "comb.L? F32[T,n,n]",
        ],
        [],
        ["layer_input.L A[T,d]", "new_residual.L A[T,n,d]"],
    ),
    "mhc.plan_recompute": (
        "2.12",
        [],
        ["layers int [>=1]", "n int [1..8]", "d int [>=1]", "stages ints [>=1] = layers"],
        ["block_length I32[1]", "terms I64[2]", "block_starts I32[blocks]"],
    ),
    "mhc.amax_gain": (
        "2.15",
        ["comb F32[L,T,n,n]"],
        [],
        [
            "forward_gain F32[L,T]",
            "backward_gain F32[L,T]",
            "composite_forward_gain F32[T]",
            "composite_backward_gain F32[T]",
        ],
    ),
    "mhc.defect": (
        "2.15",
        ["comb F32[T,n,n]"],
        [],
        ["row_defect F32[T]", "column_defect F32[T]", "spectral_bound F32[T]"],
    ),
    # Composites and seams
    "mhc.pre_fwd": (
        "2.13",
        ["residual A[T,n,d]", *_FN],
        [*_SUBLAYER, "save bool = false"],
        ["layer_input A[T,d]", *_POST_COMB, "pre F32[T,n]", *_STATE],
    ),
    "mhc.pre_bwd": (
        "2.13",
        [
            "grad_layer_input? A[T,d]",
            "grad_post? F32[T,n]",
            "grad_comb? F32[T,n,n]",
            "residual A[T,n,d]",
            *_FN,
            "grad_residual_acc? A[T,n,d]",
            *_FNACC,
            *_SAVED,
        ],
        [*_SUBLAYER, _ROUND],
        ["grad_residual A[T,n,d]", *_GFN],
    ),
    "mhc.head_fwd": (
        "2.13",
        [
            "residual A[T,n,d]",
            "fn F32[n,K]",
            "scale F32[1]",
            "base F32[n]",
            "norm_weight? F32[K]",
        ],
        ["norm_eps float [>0]", _RMS, "pre_eps float [>=0]", _PREC],
        ["hidden A[T,d]"],
    ),
    "mhc.head_bwd": (
        "2.13",
        [
            "grad_hidden A[T,d]",
            "residual A[T,n,d]",
            "fn F32[n,K]",
            "scale F32[1]",
            "base F32[n]",
            "norm_weight? F32[K]",
            "grad_fn_acc? F32[n,K]",
            "grad_scale_acc? F32[1]",
            "grad_base_acc? F32[n]",
            "grad_norm_weight_acc? F32[K]",
        ],
        ["norm_eps float [>0]", _RMS, "pre_eps float [>=0]", _PREC, _ROUND],
        [
            "grad_residual A[T,n,d]",
            "grad_fn F32[n,K]",
            "grad_scale F32[1]",
            "grad_base F32[n]",
            "grad_norm_weight F32[K]",
        ],
    ),
    "mhc.seam_classic_fwd": (
        "models 1.1",
        [*_EXIT, *_POST_COMB, *_FN],
        [*_SUBLAYER, "save bool = false"],
        [
            "new_residual A[T,n,d]",
            "layer_input A[T,d]",
            "next_post F32[T,n]",
            "next_comb F32[T,n,n]",
            "next_pre F32[T,n]",
            *_NEXT_STATE,
        ],
    ),
    "mhc.seam_classic_bwd": (
        "models 1.1",
        [
            "grad_new_residual? A[T,n,d]",
            "grad_layer_input? A[T,d]",
            "grad_next_post? F32[T,n]",
            "grad_next_comb? F32[T,n,n]",
            *_EXIT,
            *_POST_COMB,
            *_FN,
            *_FNACC,
            *_NSAVED,
        ],
        [*_SUBLAYER, _ROUND],
        [*_EXIT_GRADIENTS, *_GFN],
    ),
    "mhc.seam_single_pass_fwd": (
        "models 1.2",
        [*_EXIT, "pre F32[T,n]", *_POST_COMB, *_FN],
        [*_SUBLAYER, "save bool = false"],
        [
            "new_residual A[T,n,d]",
            "layer_input A[T,d]",
            "next_pre F32[T,n]",
            "next_post F32[T,n]",
            "next_comb F32[T,n,n]",
            *_NEXT_STATE,
        ],
    ),
    "mhc.seam_single_pass_bwd": (
        "models 1.2",
        [
            "grad_new_residual? A[T,n,d]",
            "grad_layer_input? A[T,d]",
            "grad_next_pre? F32[T,n]",
            "grad_next_post? F32[T,n]",
            "grad_next_comb? F32[T,n,n]",
            *_EXIT,
            "pre F32[T,n]",
            *_POST_COMB,
            *_FN,
            *_FNACC,
            *_NSAVED,
        ],
        [*_SUBLAYER, _ROUND],
        [*_EXIT_GRADIENTS[:2], "grad_pre F32[T,n]", *_EXIT_GRADIENTS[2:], *_GFN],
    ),
    "mhc.seam_broadcast_fwd": (
        "models 1.3",
        ["hidden A[T,d]", *_FN],
        [*_SUBLAYER, "form classic/single_pass = classic", "save bool = false"],
        ["residual A[T,n,d]", "layer_input A[T,d]", "pre F32[T,n]", *_POST_COMB, *_STATE],
    ),
    "mhc.seam_broadcast_bwd": (
        "models 1.3",
        [
            "grad_residual? A[T,n,d]",
            "grad_layer_input? A[T,d]",
            "grad_pre? F32[T,n]",
            "grad_post? F32[T,n]",
            "grad_comb? F32[T,n,n]",
            "hidden A[T,d]",
            *_FN,
            *_FNACC,
            *_SAVED,
        ],
        [*_SUBLAYER, "form classic/single_pass = classic"],
        ["grad_hidden A[T,d]", *_GFN],
    ),
}


def _names(rows):
    return [row.split("?")[0] for row in rows]


TOGETHER = {
    name: [_names(group)]
    for name, row in ROWS.items()
    for group in (_SAVED, _NSAVED)
    if set(group) <= set(row[1])
}
# The target of a gradient that is an output only with its forward input.
NEEDS = {
    name: {
        f"grad_{x}_acc": x
        for x in ("norm_weight", "layer_norm_weight")
        if any(row.startswith(f"grad_{x}_acc") for row in rows[1])
        and any(row.startswith(f"{x}? ") for row in rows[1])
    }
    for name, rows in ROWS.items()
}
