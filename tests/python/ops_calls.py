"""Every operator of the library by its function of `engramhc.ops`: arguments of the operator's table in,
outputs by the names of the table out, in the arrays of one framework."""

import ml_dtypes
import numpy as np
from engramhc import ops
from engramhc.reference.dtypes import STORAGE, Tensor

EXTENSIONS = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}


def to_numpy(t):
    data = t.data.copy()  # writable, and apart from the case
    return data.view(EXTENSIONS[t.dtype]) if t.dtype in EXTENSIONS else data


def from_numpy(array):
    dtype = NAMES[array.dtype.name]
    return Tensor(dtype, np.ascontiguousarray(array).view(STORAGE[dtype]))


def to_torch(t):
    import torch

    data = t.data.copy()
    if t.dtype not in EXTENSIONS:
        return torch.from_numpy(data)
    bits = data.view(np.int16) if t.dtype == "BF16" else data
    name = {dtype: name for name, dtype in NAMES.items()}[t.dtype]
    return torch.from_numpy(bits).view(getattr(torch, name))


def from_torch(array):
    import torch

    dtype = NAMES[str(array.dtype).removeprefix("torch.")]
    array = array.contiguous()
    if dtype == "BF16":
        return Tensor(dtype, array.view(torch.int16).numpy().view(np.uint16))
    if dtype in EXTENSIONS:
        return Tensor(dtype, array.view(torch.uint8).numpy())
    return Tensor(dtype, array.numpy())


FRAMEWORKS = {"numpy": (to_numpy, from_numpy), "torch": (to_torch, from_torch)}


def run(name, inputs, attrs, framework="numpy"):
    """Outputs of one operator as the reference's tensors."""
    enter, leave = FRAMEWORKS[framework]
    made = CALLS[name](Inputs({key: enter(t) for key, t in inputs.items()}), dict(attrs))
    return {key: leave(array) for key, array in made.items() if array is not None}


class Inputs(dict):
    """Absent tensors are None."""

    def __missing__(self, key):
        return None

    def of_list(self, stem):
        return [self[f"{stem}.{i}"] for i in range(sum(key.startswith(f"{stem}.") for key in self))]


def kv_of(a):
    return a["kv"] if a["kv"] is not None else (a["key"], a["value"])


def kv_gradients(g_kv):
    if isinstance(g_kv, tuple):
        return {"grad_key": g_kv[0], "grad_value": g_kv[1]}
    return {"grad_kv": g_kv}


def constants(attrs, *others):
    """Attributes of the mixes as the functions call them."""
    known = {"norm_eps": "rms_eps", "layer_norm_eps": "layer_norm_eps"}
    return {known.get(name, name): value for name, value in attrs.items() if name not in others}


PARAMETERS = ("fn", "scale", "base", "norm_weight", "layer_norm_weight")
STATE = ("pre", "mixes", "mul", "sqr", "comb_logits", "comb")


def weights(a):
    return {name: a[name] for name in ("norm_weight", "layer_norm_weight")}


def accumulators(a, names=PARAMETERS):
    return {f"g_{name}": a[f"grad_{name}_acc"] for name in names}


def gradients(made):
    return {f"grad_{name}": gradient for name, gradient in made._asdict().items()}


def saved(a, prefix=""):
    state = [a[prefix + name] for name in STATE]
    return None if state[1] is None else ops.MixState(*state)


def state_outputs(state, prefix=""):
    return {prefix + name: array for name, array in state._asdict().items()}


def window(a, at):
    return {
        "window": ops.engram_window(
            a["ids"], cu_seqlens=a["cu_seqlens"], history=a["history"], image_token_mask=a["image_token_mask"], **at
        )
    }


def hash_rows(a, at):
    at = {"index_dtype": "I32", "layout": "LTC", **at}
    return {
        "indices": ops.engram_hash(
            a["window"], a["multipliers"], a["vocab_sizes"], a["offsets"], a["image_token_mask"],
            out_dtype={"I32": "int32", "I64": "int64"}[at["index_dtype"]], layout=at["layout"].lower(),
        )
    }  # fmt: skip


def gather_bwd(a, at):
    acc = a["grad_table_acc"]
    rows = at.get("rows", None if acc is None else acc.shape[0])
    if at.get("form") == "sparse":
        unique, sums = ops.engram_gather_bwd(a["grad_embedding"], a["indices"], rows=rows, sparse=True)
        return {"unique_rows": unique, "grad_rows": sums}
    return {"grad_table": ops.engram_gather_bwd(a["grad_embedding"], a["indices"], rows=rows, g_table=acc)}


def gate_fwd(a, at):
    if at.get("mode") == "stats":
        stats = ops.engram_gate_stats(
            a["residual"], kv_of(a), a["weight_fused"], eps=at["eps"], clamp=at["clamp"],
            image_token_mask=a["image_token_mask"],
        )  # fmt: skip
        return dict(stats._asdict())
    made = ops.engram_gate_fwd(a["residual"], kv_of(a), a["weight_fused"], image_token_mask=a["image_token_mask"], **at)
    return dict(zip(("out", "dot", "alpha", "rstd_residual", "rstd_key"), made))


def gate_bwd(a, at):
    gx, gkv, gw = ops.engram_gate_bwd(
        a["grad_out"], a["residual"], kv_of(a), a["weight_fused"], a["dot"], a["alpha"], a["rstd_residual"],
        a["rstd_key"], image_token_mask=a["image_token_mask"], go_value=a["grad_value_path"], **at,
    )  # fmt: skip
    return {"grad_residual": gx, "grad_weight_partial": gw, **kv_gradients(gkv)}


def conv_fwd(a, at):
    out = ops.engram_short_conv_fwd(
        a["gated_value"], a["conv_weight"], a["conv_norm_weight"], eps=at["conv_eps"], dilation=at["dilation"],
        cu_seqlens=a["cu_seqlens"], image_token_mask=a["image_token_mask"], state=a["state"],
    )  # fmt: skip
    return {"out": out, "state": a["state"]}


def conv_bwd(a, at):
    made = ops.engram_short_conv_bwd(
        a["grad_out"], a["gated_value"], a["conv_weight"], a["conv_norm_weight"], eps=at["conv_eps"],
        dilation=at["dilation"], cu_seqlens=a["cu_seqlens"], image_token_mask=a["image_token_mask"],
        g_weight=a["grad_conv_weight_acc"], g_norm_weight=a["grad_conv_norm_weight_acc"],
    )  # fmt: skip
    return dict(zip(("grad_gated_value", "grad_conv_weight", "grad_conv_norm_weight"), made))


def layer_arguments(a):
    return (
        a["residual"], kv_of(a), a["weight_hidden"], a["weight_embed"], a["conv_weight"], a["conv_norm_weight"],
    )  # fmt: skip


def layer_fwd(a, at):
    made = ops.engram_layer_fwd(
        *layer_arguments(a), cu_seqlens=a["cu_seqlens"], image_token_mask=a["image_token_mask"], state=a["state"], **at
    )
    return {**dict(zip(("out", "dot", "alpha", "rstd_residual", "rstd_key"), made)), "state": a["state"]}


def layer_bwd(a, at):
    names = ("weight_hidden", "weight_embed", "conv_weight", "conv_norm_weight")
    made = ops.engram_layer_bwd(
        a["grad_out"], *layer_arguments(a), cu_seqlens=a["cu_seqlens"], image_token_mask=a["image_token_mask"],
        **accumulators(a, names), **at,
    )  # fmt: skip
    return {
        "grad_residual": made.x,
        **kv_gradients(made.kv),
        **{f"grad_{name}": getattr(made, name) for name in names},
    }


def optimizer_step(a, at):
    at = {{"repeat": "steps"}.get(name, name): value for name, value in at.items()}
    return dict(zip(("weight", "momentum"), ops.sinkhorn_opt_full(a["weight"], a["grad"], a["momentum"], **at)))


def flat_streams(array):
    """[..., n, d] as [..., n*d]."""
    return None if array is None else array.reshape((*array.shape[:-2], array.shape[-2] * array.shape[-1]))


def norm_fn_bwd(a, at):
    gx, g_fn = ops.mhc_prenorm_gemm_bwd(
        a["grad_mul"], a["grad_sqr"], flat_streams(a["residual"]), a["fn"], gx=flat_streams(a["grad_residual_acc"]),
        g_fn=a["grad_fn_acc"], **at,
    )  # fmt: skip
    return {"grad_residual": gx.reshape(a["residual"].shape), "grad_fn": g_fn}


def prenorm_gemm(a, at):
    made = ops.mhc_prenorm_gemm_fwd(
        flat_streams(a["residual"]), a["fn"], n_splits=at.get("splits"), precision=at.get("precision", "fp32")
    )
    return dict(zip(("mul_partial", "sqr_partial"), made))


def reduce_rules(at):
    return {"k": at["k"], "eps": at["norm_eps"], "rms": at.get("rms", "mean")}


def pre_big_fuse(a, at):
    post, comb, layer_input = ops.mhc_pre_big_fuse_fwd(
        a["mul_partial"], a["sqr_partial"], a["residual"], a["scale"], a["base"],
        layer_norm_weight=a["layer_norm_weight"], **constants(at),
    )  # fmt: skip
    return {"post": post, "comb": comb, "layer_input": layer_input}


def multilayer_recompute(a, at):
    inputs, residuals = ops.mhc_multilayer_recompute(
        a["residual"], *(a.of_list(stem) for stem in ("pre", "layer_output", "post", "comb"))
    )
    return {
        **{f"layer_input.{i}": array for i, array in enumerate(inputs)},
        **{f"new_residual.{i}": array for i, array in enumerate(residuals)},
    }


def plan_recompute(a, at):
    plan = ops.mhc_recompute_plan(at["layers"], at["n"], d=at["d"], stages=at.get("stages", ()))
    return {
        "block_length": np.array([plan.block_length], np.int32),
        "terms": np.array(plan.terms, np.int64),
        "block_starts": np.array(plan.block_starts, np.int32),
    }


def pre_fwd(a, at):
    made = ops.mhc_pre(a["residual"], a["fn"], a["scale"], a["base"], **weights(a), **constants(at))
    return {"layer_input": made[0], **made[1]._asdict(), **(state_outputs(made[2]) if at.get("save") else {})}


def pre_bwd(a, at):
    g_residual, made = ops.mhc_pre_bwd(
        a["grad_layer_input"], a["grad_post"], a["grad_comb"], a["residual"], a["fn"], a["scale"], a["base"],
        **weights(a), saved=saved(a), g_residual=a["grad_residual_acc"], **accumulators(a), **constants(at),
    )  # fmt: skip
    return {"grad_residual": g_residual, **gradients(made)}


def head_arguments(a):
    return a["residual"], a["fn"], a["scale"], a["base"]


def head_fwd(a, at):
    return {"hidden": ops.mhc_head(*head_arguments(a), norm_weight=a["norm_weight"], **constants(at))}


def head_bwd(a, at):
    g_residual, made = ops.mhc_head_bwd(
        a["grad_hidden"], *head_arguments(a), norm_weight=a["norm_weight"], **accumulators(a, PARAMETERS[:4]),
        **constants(at),
    )  # fmt: skip
    return {"grad_residual": g_residual, **gradients(made)}


def seam_arguments(a):
    return tuple(a[name] for name in ("layer_output", "residual", "post", "comb", "fn", "scale", "base"))


def seam_classic_fwd(a, at):
    residual, mix, layer_input, *state = ops.mhc_fused_post_pre_fwd(*seam_arguments(a), **weights(a), **constants(at))
    return {
        "new_residual": residual,
        "layer_input": layer_input,
        "next_post": mix.post,
        "next_comb": mix.comb,
        **(state_outputs(state[0], "next_") if state else {}),
    }


def seam_classic_bwd(a, at):
    *made, parameters = ops.mhc_fused_post_pre_bwd(
        a["grad_new_residual"], a["grad_next_post"], a["grad_next_comb"], a["grad_layer_input"], *seam_arguments(a),
        **weights(a), new_residual=a["new_residual"], saved=saved(a, "next_"), **accumulators(a), **constants(at),
    )  # fmt: skip
    names = ("grad_layer_output", "grad_residual", "grad_post", "grad_comb")
    return {**dict(zip(names, made)), **gradients(parameters)}


def seam_single_pass_fwd(a, at):
    residual, layer_input, mix, pre, *state = ops.mhc_fused_post_pre_delayed_fwd(
        *seam_arguments(a), pre_mix=a["pre"], **weights(a), **constants(at)
    )
    return {
        "new_residual": residual,
        "layer_input": layer_input,
        "next_pre": pre,
        "next_post": mix.post,
        "next_comb": mix.comb,
        **(state_outputs(state[0], "next_") if state else {}),
    }


def seam_single_pass_bwd(a, at):
    *made, parameters = ops.mhc_fused_post_pre_delayed_bwd(
        a["grad_new_residual"], a["grad_layer_input"], a["grad_next_post"], a["grad_next_comb"], a["grad_next_pre"],
        *seam_arguments(a), pre_mix=a["pre"], **weights(a), new_residual=a["new_residual"], saved=saved(a, "next_"),
        **accumulators(a), **constants(at),
    )  # fmt: skip
    names = ("grad_layer_output", "grad_residual", "grad_pre", "grad_post", "grad_comb")
    return {**dict(zip(names, made)), **gradients(parameters)}


def seam_broadcast_fwd(a, at):
    """`pre` is given with what is saved."""
    at = {**at, "save": True}
    residual, mix, layer_input, state = ops.mhc_pre_broadcast_fwd(
        a["hidden"], a["fn"], a["scale"], a["base"], **weights(a), **constants(at)
    )
    return {"residual": residual, "layer_input": layer_input, "post": mix.post, **state_outputs(state)}


def seam_broadcast_bwd(a, at):
    gx, parameters = ops.mhc_pre_broadcast_bwd(
        a["grad_residual"], a["grad_post"], a["grad_comb"], a["grad_layer_input"], a["hidden"], a["fn"], a["scale"],
        a["base"], g_pre=a["grad_pre"], saved=saved(a), **weights(a), **accumulators(a), **constants(at),
    )  # fmt: skip
    return {"grad_hidden": gx, **gradients(parameters)}


def one(output, function, *names):
    """A function of arrays alone, with one output."""
    return lambda a, at: {output: function(*(a[name] for name in names), **at)}


def many(outputs, function, *names, **renamed):
    def call(a, at):
        at = {renamed.get(name, name): value for name, value in at.items()}
        return dict(zip(outputs, function(*(a[name] for name in names), **at)))

    return call


CALLS = {
    "engram.token_map": many(
        ("table", "size"), ops.engram_token_map, "texts", "text_offsets", "raw_tokens", "raw_offsets"
    ),
    "engram.compress_ids": lambda a, at: {
        "compressed_ids": ops.engram_compress(a["ids"], a["table"], check=at.get("checked", True))
    },
    "engram.window": window,
    "engram.multipliers": lambda a, at: {"multipliers": ops.engram_multipliers(**at)},
    "engram.primes": lambda a, at: {"vocab_sizes": ops.engram_primes(**at)},
    "engram.offsets": lambda a, at: {
        "offsets": ops.engram_offsets(a["vocab_sizes"], out_dtype={"I64": "int64"}.get(at.get("index_dtype"), "int32"))
    },
    "engram.hash": hash_rows,
    "engram.gather_fwd": one("embedding", ops.engram_gather_fwd, "table", "indices"),
    "engram.gather_bwd": gather_bwd,
    "engram.dequant_rows": lambda a, at: {
        "values": ops.engram_decode_rows(a["weight"], a["scale"], out_dtype=at.get("out_dtype", "BF16"))
    },
    "engram.quantize_rows": many(("weight", "scale"), ops.engram_encode_rows, "values"),
    "engram.gather_dequant": lambda a, at: {
        "embedding": ops.engram_gather_decode(
            a["weight"], a["scale"], a["indices"], out_dtype=at.get("out_dtype", "BF16")
        )
    },
    "engram.kv_projection_fwd": one("kv", ops.engram_kv_projection_fwd, "embedding", "weight", "bias"),
    "engram.kv_projection_bwd": lambda a, at: dict(
        zip(
            ("grad_embedding", "grad_weight", "grad_bias"),
            ops.engram_kv_projection_bwd(
                a["grad_kv"], a["embedding"], a["weight"], g_weight=a["grad_weight_acc"], g_bias=a["grad_bias_acc"]
            ),
        )
    ),
    "engram.fused_weight": one("weight_fused", ops.fused_weight, "weight_hidden", "weight_embed"),
    "engram.gate_fwd": gate_fwd,
    "engram.gate_bwd": gate_bwd,
    "engram.grad_w_reduce": many(
        ("grad_weight_hidden", "grad_weight_embed"), ops.grad_w_reduce, "grad_weight_partial", "weight_hidden",
        "weight_embed", "grad_weight_hidden_acc", "grad_weight_embed_acc",
    ),  # fmt: skip
    "engram.conv_fwd": conv_fwd,
    "engram.conv_bwd": conv_bwd,
    "engram.layer_fwd": layer_fwd,
    "engram.layer_bwd": layer_bwd,
    "engram.momentum_update": many(("update", "momentum"), ops.sinkhorn_opt_momentum, "grad", "momentum"),
    "engram.sinkhorn_step": many(
        ("row_norm", "row_scale", "col_partial"), ops.sinkhorn_opt_step, "update", "row_scale", "col_scale"
    ),
    "engram.sinkhorn_step_reduce": many(
        ("col_sumsq", "col_scale"), ops.sinkhorn_opt_reduce, "col_partial", "col_scale"
    ),
    "engram.sinkhorn_finalize": one("out", ops.sinkhorn_opt_finalize, "update", "row_scale", "col_scale"),
    "engram.optimizer_step": optimizer_step,
    "mhc.expand_fwd": lambda a, at: {"residual": ops.expand_to_mhc_fwd(a["hidden"], at["n"])},
    "mhc.expand_bwd": one("grad_hidden", ops.expand_to_mhc_bwd, "grad_residual"),
    "mhc.merge_fwd": one("fn_merged", ops.mhc_fn_normw_merge_fwd, "fn", "norm_weight"),
    "mhc.merge_bwd": lambda a, at: dict(
        zip(
            ("grad_fn", "grad_norm_weight"),
            ops.mhc_fn_normw_merge_bwd(
                a["fn"], a["norm_weight"], a["grad_fn_merged"], g_fn=a["grad_fn_acc"],
                g_norm_weight=a["grad_norm_weight_acc"],
            ),
        )
    ),  # fmt: skip
    "mhc.prenorm_gemm": prenorm_gemm,
    "mhc.reduce_partials_fwd": lambda a, at: dict(
        zip(
            ("mixes", "mul", "sqr"),
            ops.mhc_reduce_partials_and_rmsnorm_fwd(a["mul_partial"], a["sqr_partial"], **reduce_rules(at)),
        )
    ),
    "mhc.reduce_partials_bwd": lambda a, at: dict(
        zip(
            ("grad_mul", "grad_sqr"),
            ops.mhc_reduce_partials_and_rmsnorm_bwd(a["grad_mixes"], a["mul"], a["sqr"], **reduce_rules(at)),
        )
    ),
    "mhc.norm_fn_bwd": norm_fn_bwd,
    "mhc.split_fwd": lambda a, at: dict(
        zip(
            ("pre", "post", "comb_logits"),
            ops.mhc_pre_split_mixes_fwd(
                a["mixes"], a["scale"], a["base"], n=int((a["base"].shape[0] + 1) ** 0.5) - 1, **at
            ),
        )
    ),
    "mhc.sinkhorn_fwd": one("comb", ops.sinkhorn_fwd, "comb_logits"),
    "mhc.sinkhorn_bwd": one("grad_comb_logits", ops.sinkhorn_bwd, "grad_comb", "comb_logits"),
    "mhc.pre_apply_fwd": one("layer_input", ops.mhc_pre_apply_mix_fwd, "residual", "pre"),
    "mhc.pre_apply_bwd": lambda a, at: dict(
        zip(
            ("grad_residual", "grad_pre"),
            ops.mhc_pre_apply_mix_bwd(
                a["grad_layer_input"], a["residual"], a["pre"], g_residual=a["grad_residual_acc"]
            ),
        )
    ),
    "mhc.pre_big_fuse": pre_big_fuse,
    "mhc.post_fwd": lambda a, at: {
        "new_residual": ops.mhc_post_fwd(a["layer_output"], a["residual"], a["post"], a["comb"], **at)
    },
    "mhc.post_bwd": many(
        ("grad_layer_output", "grad_residual", "grad_post", "grad_comb"), ops.mhc_post_bwd, "grad_new_residual",
        "layer_output", "residual", "post", "comb",
    ),  # fmt: skip
    "mhc.head_mix_fwd": one("pre", ops.mhc_head_compute_mix_fwd, "mixes", "scale", "base"),
    "mhc.head_mix_bwd": lambda a, at: dict(
        zip(
            ("grad_mixes", "grad_scale", "grad_base"),
            ops.mhc_head_compute_mix_bwd(
                a["grad_pre"], a["mixes"], a["scale"], a["base"], g_scale=a["grad_scale_acc"],
                g_base=a["grad_base_acc"],
            ),
        )
    ),  # fmt: skip
    "mhc.multilayer_recompute": multilayer_recompute,
    "mhc.plan_recompute": plan_recompute,
    "mhc.amax_gain": lambda a, at: dict(
        zip(
            ("forward_gain", "backward_gain", "composite_forward_gain", "composite_backward_gain"),
            ops.mhc_gain(a["comb"]),
        )
    ),
    "mhc.defect": many(("row_defect", "column_defect", "spectral_bound"), ops.mhc_defect, "comb"),
    "mhc.pre_fwd": pre_fwd,
    "mhc.pre_bwd": pre_bwd,
    "mhc.head_fwd": head_fwd,
    "mhc.head_bwd": head_bwd,
    "mhc.seam_classic_fwd": seam_classic_fwd,
    "mhc.seam_classic_bwd": seam_classic_bwd,
    "mhc.seam_single_pass_fwd": seam_single_pass_fwd,
    "mhc.seam_single_pass_bwd": seam_single_pass_bwd,
    "mhc.seam_broadcast_fwd": seam_broadcast_fwd,
    "mhc.seam_broadcast_bwd": seam_broadcast_bwd,
}
