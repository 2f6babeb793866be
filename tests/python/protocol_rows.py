"""The operator tables of the `ehc op` contract as data, in the notation of that contract.

Written by hand from the contract, never generated: the tests compare the program's own tables
(`ehc op --list --json`) with these rows, and derive from them which inputs are legal.

A row: section, inputs, attributes, outputs.
Tensors: "name? DTYPES[shape]", "?" = may be absent; A = BF16/F16/F32, the same for all A tensors
of a call; W = BF16/F32; X = decided by an attribute or by another tensor.
Attributes: "name type [range] = default (with tensor)"; a type with slashes lists the legal words.
"""

import protocol_rows_mhc

_KV = ["kv? A[T,n+1,d]", "key? A[T,n,d]", "value? A[T,d]"]
_GKV = ["grad_kv A[T,n+1,d]", "grad_key A[T,n,d]", "grad_value A[T,d]"]
_STATISTICS = ["dot F32[T,n]", "alpha F32[T,n]", "rstd_residual F32[T,n]", "rstd_key F32[T,n]"]
_QUANTIZED = ["weight F8_E4M3/U8[rows,hd]", "scale F8_E8M0/U8[rows,hd/group]"]
_SCALED = ["update F32[rows,hd]", "row_scale F32[rows]", "col_scale F32[hd]"]

ROWS = {
    # Addressing
    "engram.token_map": (
        "1.1",
        [
            "texts U8[text_bytes]",
            "text_offsets I64[V+1]",
            "raw_tokens U8[raw_bytes]",
            "raw_offsets I64[V+1]",
        ],
        [],
        ["table I32[V]", "size I32[1]"],
    ),
    "engram.compress_ids": (
        "1.1",
        ["ids I32/I64[T]", "table I32[V]"],
        ["checked bool = true"],
        ["compressed_ids I32[T]"],
    ),
    "engram.window": (
        "1.2",
        [
            "ids I32[T]",
            "cu_seqlens? I32[B+1]",
            "history? I32[B,Nmax-1]",
            "image_token_mask? BOOL[T]",
        ],
        [
            "max_ngram int [2..8]",
            "pad_id int [0..2147483647]",
            "reset_id int [-1..2147483647] = -1",
            "blocking slot/farther",
        ],
        ["window I32[T,Nmax]"],
    ),
    "engram.multipliers": (
        "1.3",
        [],
        [
            "layer_ids ints [>=0]",
            "max_ngram int [2..8]",
            "compressed_vocab int [>=1]",
            "seed int [>=0] = 0",
            "scheme numpy/splitmix64 = numpy",
        ],
        ["multipliers I64[L,Nmax]"],
    ),
    "engram.primes": (
        "1.3",
        [],
        ["sizes ints [>=1]", "layers int [>=1]", "heads int [>=1]"],
        ["vocab_sizes I32[L,Nmax-1,Kh]"],
    ),
    "engram.offsets": (
        "1.4",
        ["vocab_sizes I32[L,Nmax-1,Kh]"],
        ["index_dtype I32/I64 = I32"],
        ["offsets X[L,C]"],
    ),
    "engram.hash": (
        "1.5",
        [
            "window I32[T,Nmax]",
            "multipliers I64[L,Nmax]",
            "vocab_sizes I32[L,Nmax-1,Kh]",
            "offsets I32/I64[L,C]",
            "image_token_mask? BOOL[T]",
        ],
        ["index_dtype I32/I64 = I32", "layout LTC/TLC = LTC"],
        ["indices X[L,T,C]"],
    ),
    # Rows
    "engram.gather_fwd": (
        "1.6",
        ["table BF16/F16/F32[rows,hd]", "indices I32/I64[T,C]"],
        ["out_dtype table/BF16/F16/F32 = table"],
        ["embedding X[T,C*hd]"],
    ),
    "engram.gather_bwd": (
        "1.6",
        ["grad_embedding A[T,C*hd]", "indices I32/I64[T,C]", "grad_table_acc? F32[rows,hd]"],
        ["rows int [>=0] (without grad_table_acc)", "form dense/sparse = dense"],
        ["grad_table F32[rows,hd]", "unique_rows X[U]", "grad_rows F32[U,hd]"],
    ),
    "engram.dequant_rows": (
        "models 2",
        _QUANTIZED,
        ["group int [>=1] = 32", "out_dtype BF16/F16/F32 = BF16"],
        ["values X[rows,hd]"],
    ),
    "engram.quantize_rows": (
        "1.6",
        ["values F32/BF16[rows,hd]"],
        ["group int [>=1] = 32"],
        ["weight F8_E4M3[rows,hd]", "scale F8_E8M0[rows,hd/group]"],
    ),
    "engram.gather_dequant": (
        "models 2",
        [*_QUANTIZED, "indices I32/I64[T,C]"],
        ["group int [>=1] = 32", "out_dtype BF16/F16/F32 = BF16"],
        ["embedding X[T,C*hd]"],
    ),
    "engram.kv_projection_fwd": (
        "1.7",
        ["embedding A[T,E]", "weight A[n+1,d,E]", "bias? A[n+1,d]"],
        [],
        ["kv A[T,n+1,d]"],
    ),
    "engram.kv_projection_bwd": (
        "1.7",
        [
            "grad_kv A[T,n+1,d]",
            "embedding A[T,E]",
            "weight A[n+1,d,E]",
            "grad_weight_acc? F32[n+1,d,E]",
            "grad_bias_acc? F32[n+1,d]",
        ],
        [],
        ["grad_embedding A[T,E]", "grad_weight F32[n+1,d,E]", "grad_bias F32[n+1,d]"],
    ),
    # Gate, convolution, layer
    "engram.fused_weight": (
        "1.8",
        ["weight_hidden W[n,d]", "weight_embed W[n,d]"],
        [],
        ["weight_fused F32[n,d]"],
    ),
    "engram.gate_fwd": (
        "1.9",
        ["residual A[T,n,d]", *_KV, "weight_fused F32[n,d]", "image_token_mask? BOOL[T]"],
        [
            "eps float [>0]",
            "clamp float [>0]",
            "save bool = false",
            "inplace bool = false",
            "mode add/value/stats = add",
        ],
        ["out A[T,n,d]", *_STATISTICS, "value_mean_square F32[T]"],
    ),
    "engram.gate_bwd": (
        "1.10",
        [
            "grad_out A[T,n,d]",
            "grad_value_path? A[T,n,d]",
            "residual A[T,n,d]",
            *_KV,
            "weight_fused F32[n,d]",
            "dot? F32[T,n]",
            "alpha? F32[T,n]",
            "rstd_residual? F32[T,n]",
            "rstd_key? F32[T,n]",
            "image_token_mask? BOOL[T]",
        ],
        ["clamp float [>0]", "eps float [>0] (without dot)"],
        ["grad_residual A[T,n,d]", *_GKV, "grad_weight_partial F32[P,n,d]"],
    ),
    "engram.grad_w_reduce": (
        "1.11",
        [
            "grad_weight_partial F32[P,n,d]",
            "weight_hidden W[n,d]",
            "weight_embed W[n,d]",
            "grad_weight_hidden_acc? F32[n,d]",
            "grad_weight_embed_acc? F32[n,d]",
        ],
        [],
        ["grad_weight_hidden F32[n,d]", "grad_weight_embed F32[n,d]"],
    ),
    "engram.conv_fwd": (
        "1.13",
        [
            "gated_value A[T,n,d]",
            "conv_weight W[n,d,w]",
            "conv_norm_weight W[n,d]",
            "cu_seqlens? I32[B+1]",
            "image_token_mask? BOOL[T]",
            "state? F32[B,(w-1)*dilation,n,d]",
        ],
        ["dilation int [>=1]", "conv_eps float [>0]"],
        ["out A[T,n,d]", "state F32[B,(w-1)*dilation,n,d]"],
    ),
    "engram.conv_bwd": (
        "1.13",
        [
            "grad_out A[T,n,d]",
            "gated_value A[T,n,d]",
            "conv_weight W[n,d,w]",
            "conv_norm_weight W[n,d]",
            "cu_seqlens? I32[B+1]",
            "image_token_mask? BOOL[T]",
            "grad_conv_weight_acc? F32[n,d,w]",
            "grad_conv_norm_weight_acc? F32[n,d]",
        ],
        ["dilation int [>=1]", "conv_eps float [>0]"],
        [
            "grad_gated_value A[T,n,d]",
            "grad_conv_weight F32[n,d,w]",
            "grad_conv_norm_weight F32[n,d]",
        ],
    ),
    "engram.layer_fwd": (
        "1.14",
        [
            "residual A[T,n,d]",
            *_KV,
            "weight_hidden W[n,d]",
            "weight_embed W[n,d]",
            "conv_weight? W[n,d,w]",
            "conv_norm_weight? W[n,d]",
            "cu_seqlens? I32[B+1]",
            "image_token_mask? BOOL[T]",
            "state? F32[B,(w-1)*dilation,n,d]",
        ],
        [
            "eps float [>0]",
            "clamp float [>0]",
            "dilation int [>=1] (with conv_weight)",
            "conv_eps float [>0] (with conv_weight)",
            "rounding once/twice = once",
            "save bool = false",
        ],
        ["out A[T,n,d]", *_STATISTICS, "state F32[B,(w-1)*dilation,n,d]"],
    ),
    "engram.layer_bwd": (
        "1.14",
        [
            "grad_out A[T,n,d]",
            "residual A[T,n,d]",
            *_KV,
            "weight_hidden W[n,d]",
            "weight_embed W[n,d]",
            "conv_weight? W[n,d,w]",
            "conv_norm_weight? W[n,d]",
            "cu_seqlens? I32[B+1]",
            "image_token_mask? BOOL[T]",
            "grad_weight_hidden_acc? F32[n,d]",
            "grad_weight_embed_acc? F32[n,d]",
            "grad_conv_weight_acc? F32[n,d,w]",
            "grad_conv_norm_weight_acc? F32[n,d]",
        ],
        [
            "eps float [>0]",
            "clamp float [>0]",
            "dilation int [>=1] (with conv_weight)",
            "conv_eps float [>0] (with conv_weight)",
        ],
        [
            "grad_residual A[T,n,d]",
            *_GKV,
            "grad_weight_hidden F32[n,d]",
            "grad_weight_embed F32[n,d]",
            "grad_conv_weight F32[n,d,w]",
            "grad_conv_norm_weight F32[n,d]",
        ],
    ),
    # Optimizer
    "engram.momentum_update": (
        "1.12a",
        ["grad W[rows,hd]", "momentum W[rows,hd]"],
        ["beta float [0..1]", "nesterov bool"],
        ["update F32[rows,hd]", "momentum W[rows,hd]"],
    ),
    "engram.sinkhorn_step": (
        "1.12b",
        [*_SCALED],
        ["eps float [>0]"],
        ["row_norm F32[rows]", "row_scale F32[rows]", "col_partial F32[P,hd]"],
    ),
    "engram.sinkhorn_step_reduce": (
        "1.12c",
        ["col_partial F32[P,hd]", "col_scale? F32[hd]"],
        ["eps float [>0] (with col_scale)"],
        ["col_sumsq F32[hd]", "col_scale F32[hd]"],
    ),
    "engram.sinkhorn_finalize": (
        "1.12d",
        [*_SCALED],
        ["eps float [>0]", "alpha float [>0]"],
        ["out F32[rows,hd]"],
    ),
    "engram.optimizer_step": (
        "1.12",
        ["weight W[rows,hd]", "grad W[rows,hd]", "momentum W[rows,hd]"],
        [
            "lr float [>=0]",
            "eps float [>0]",
            "beta float [0..1] = 0.95",
            "nesterov bool = true",
            "repeat int [1..64] = 5",
            "tau float [>=0] = 0.001",
            "gamma float [>0] = 0.18",
            "alpha float [>0] = sqrt(hd)",
        ],
        ["weight W[rows,hd]", "momentum W[rows,hd]"],
    ),
}

ROWS |= protocol_rows_mhc.ROWS

# Rows that go beyond a table's notation.
ONE_OF = {name: (["kv"], ["key", "value"]) for name, row in ROWS.items() if _KV[0] in row[1]}
TOGETHER = {
    "engram.layer_fwd": [["conv_weight", "conv_norm_weight"]],
    "engram.layer_bwd": [["conv_weight", "conv_norm_weight"]],
    "engram.gate_bwd": [["dot", "alpha", "rstd_residual", "rstd_key"]],
    **protocol_rows_mhc.TOGETHER,
}
NEEDS = {
    "engram.layer_fwd": {"state": "conv_weight"},  # "only with a convolution"
    **protocol_rows_mhc.NEEDS,
}
# A symbol bound by an attribute: its value, or the length of its list plus a constant.
BOUND_BY_ATTRIBUTE = {
    "engram.window": {"Nmax": "max_ngram"},
    "engram.multipliers": {"Nmax": "max_ngram"},
}
