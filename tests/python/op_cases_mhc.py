"""Spaces and builders of the mHC operators; op_cases.py says what they are."""

import numpy as np
from engramhc.reference import REFERENCE
from engramhc.reference.dtypes import encode

from case_tools import ACTIVATIONS, STREAMS, TOKENS, WEIGHTS, WIDTHS, floats, set_if, targets

SHAPES = [(0,), (1,), (2,), (31,), (33,), (3, 11), (2, 0), (2, 1, 3)]
ROWS = {"n": STREAMS, "d": WIDTHS, "dtype": ACTIVATIONS}  # of streams
SPECIAL = ["normal", "nan", "inf", "zero", "tiny"]
PARAMETERS = ["fn", "scale", "base", "norm_weight", "layer_norm_weight"]
PRECISIONS = [None, "fp32", "tf32"]
ROUNDINGS = [None, "once", "chain"]
SINKHORNS = [
    ("deepseek", 1e-6),
    (None, 1e-2),
    ("deepseek", 0.0),
    ("megatron", 1e-6),
    ("megatron", 0.7),
    ("log", 0.0),
]
MIXES = {
    "train": {
        "norm_eps": 1e-6,
        "pre_eps": 1e-6,
        "post_mult": 2.0,
        "repeat": 20,
        "sinkhorn_eps": 1e-6,
    },
    "repo": {
        "norm_eps": 1e-6,
        "pre_eps": 1e-6,
        "post_mult": 1.0,
        "repeat": 10,
        "sinkhorn_eps": 1e-6,
        "convention": "deepseek",
        "rms": "mean",
    },
    "paper": {
        "norm_eps": 1e-20,
        "pre_eps": 0.0,
        "post_mult": 2.0,
        "repeat": 20,
        "sinkhorn_eps": 0.0,
        "convention": "log",
    },
    "megatron": {
        "norm_eps": 1e-2,
        "pre_eps": 1e-2,
        "post_mult": 0.5,
        "repeat": 3,
        "sinkhorn_eps": 0.7,
        "convention": "megatron",
        "rms": "norm",
    },
}
SUBLAYER = {
    **ROWS,
    "norm weight": [False, True],
    "layer norm": [None, *WEIGHTS],
    "mix": list(MIXES),
    "precision": PRECISIONS,
    "special": ["normal", "nan", "zero token"],
}
BACKWARD = {
    **SUBLAYER,
    "upstream": ["all", "none", "streams", "input", "mixes"],
    "acc": ["none", "all", "some"],
    "saved": [False, True],
}

SPACES = {
    "mhc.expand_fwd": {"shape": SHAPES, **ROWS, "special": ["normal", "strange", "tiny"]},
    "mhc.expand_bwd": {"shape": SHAPES, **ROWS, "special": SPECIAL},
    "mhc.merge_fwd": {
        "M": [1, 3, 24, 80],
        "K": [1, 7, 64, 257, 4096],
        "special": ["normal", "strange"],
    },
    "mhc.merge_bwd": {
        "M": [1, 3, 24, 80],
        "K": [1, 7, 64, 257, 4096],
        "fn acc": [False, True],
        "weight acc": [False, True],
        "special": ["normal", "nan", "inf"],
    },
    "mhc.prenorm_gemm": {
        "T": TOKENS,
        **ROWS,
        "M": [1, 3, 24, 80],
        "splits": [None, 0, 1, 2, 5, 16, 130],
        "groups": [None, 1, "n", "d"],
        "precision": PRECISIONS,
        "special": ["normal", "nan", "zero"],
    },
    "mhc.reduce_partials_fwd": {
        "S": [0, 1, 2, 3, 7, 16, 128],
        "T": TOKENS,
        "M": [1, 3, 24, 80],
        "G": [None, 1, 2, 5],
        "eps": [1e-20, 1e-6, 1e-2],
        "rms": [None, "mean", "norm"],
        "special": ["normal", "nan", "zero token"],
    },
    "mhc.reduce_partials_bwd": {
        "T": TOKENS,
        "M": [1, 3, 24, 80],
        "G": [None, 1, 2, 5],
        "eps": [1e-20, 1e-6, 1e-2],
        "rms": [None, "mean", "norm"],
        "special": ["normal", "nan", "zero token"],
    },
    "mhc.norm_fn_bwd": {
        "T": TOKENS,
        **ROWS,
        "M": [1, 3, 24, 80],
        "groups": [None, 1, "n", "d"],
        "precision": PRECISIONS,
        "residual acc": [False, True],
        "fn acc": [False, True],
        "special": ["normal", "nan", "zero"],
    },
    "mhc.split_fwd": {
        "shape": SHAPES,
        "n": STREAMS,
        "pre_eps": [0.0, 1e-6, 1e-2],
        "post_mult": [0.0, 1.0, 2.0],
        "special": ["normal", "large", "nan", "inf"],
    },
    "mhc.split_bwd": {
        "shape": SHAPES,
        "n": STREAMS,
        "post_mult": [0.0, 1.0, 2.0],
        "special": ["normal", "large", "nan"],
    },
    "mhc.split_bwd_reduce": {
        "P": [0, 1, 2, 5, 128],
        "n": STREAMS,
        "head": [False, True],
        "scale acc": [False, True],
        "base acc": [False, True],
        "special": ["normal", "nan", "inf"],
    },
    "mhc.sinkhorn_fwd": {
        "shape": SHAPES,
        "n": STREAMS,
        "repeat": [1, 2, 10, 20, 64],
        "how": SINKHORNS,
        "special": ["normal", "wide", "nan"],
    },
    "mhc.sinkhorn_bwd": {
        "shape": SHAPES,
        "n": STREAMS,
        "repeat": [1, 2, 10, 20, 64],
        "how": SINKHORNS,
        "special": ["normal", "wide", "nan"],
    },
    "mhc.pre_apply_fwd": {"shape": SHAPES, **ROWS, "special": SPECIAL},
    "mhc.pre_apply_bwd": {"shape": SHAPES, **ROWS, "acc": [False, True], "special": SPECIAL},
    "mhc.pre_big_fuse": {
        "T": TOKENS,
        **ROWS,
        "S": [1, 2, 3, 16],
        "groups": [None, 1, "n", "d"],
        "layer norm": [None, *WEIGHTS],
        "mix": list(MIXES),
        "special": ["normal", "nan", "zero token"],
    },
    "mhc.post_fwd": {
        "shape": SHAPES,
        **ROWS,
        "inplace": [None, False, True],
        "special": SPECIAL,
    },
    "mhc.post_bwd": {"shape": SHAPES, **ROWS, "special": SPECIAL},
    "mhc.head_mix_fwd": {
        "shape": SHAPES,
        "n": STREAMS,
        "pre_eps": [0.0, 1e-6, 1e-2],
        "special": ["normal", "large", "nan", "inf"],
    },
    "mhc.head_mix_bwd": {
        "shape": SHAPES,
        "n": STREAMS,
        "scale acc": [False, True],
        "base acc": [False, True],
        "special": ["normal", "large", "nan"],
    },
    "mhc.multilayer_recompute": {
        "shape": SHAPES,
        **ROWS,
        "layers": [(1, 0), (1, 1), (3, 2), (3, 3), (10, 10)],
        "special": ["normal", "nan", "inf", "zero"],
    },
    "mhc.plan_recompute": {
        "layers": [1, 2, 7, 30, 61, 200],
        "n": STREAMS,
        "d": [1, 640, 7168],
        "stages": [None, "one", "halves", "uneven", "single"],
    },
    "mhc.amax_gain": {
        "L": [1, 2, 61],
        "T": TOKENS,
        "n": STREAMS,
        "special": ["normal", "nan", "doubly stochastic"],
    },
    "mhc.defect": {
        "shape": SHAPES,
        "n": STREAMS,
        "special": ["normal", "nan", "inf", "doubly stochastic"],
    },
    "mhc.pre_fwd": {"shape": SHAPES, **SUBLAYER, "save": [None, False, True]},
    "mhc.pre_bwd": {"shape": SHAPES, **BACKWARD, "rounding": ROUNDINGS},
    "mhc.head_fwd": {
        "shape": SHAPES,
        **ROWS,
        "norm weight": [False, True],
        "mix": list(MIXES),
        "precision": PRECISIONS,
        "special": ["normal", "nan", "zero token"],
    },
    "mhc.head_bwd": {
        "shape": SHAPES,
        **ROWS,
        "norm weight": [False, True],
        "mix": list(MIXES),
        "precision": PRECISIONS,
        "rounding": ROUNDINGS,
        "acc": ["none", "all", "some"],
        "special": ["normal", "nan", "zero token"],
    },
    "mhc.seam_classic_fwd": {"shape": SHAPES, **SUBLAYER, "save": [None, False, True]},
    "mhc.seam_classic_bwd": {"shape": SHAPES, **BACKWARD, "rounding": ROUNDINGS},
    "mhc.seam_single_pass_fwd": {"shape": SHAPES, **SUBLAYER, "save": [None, False, True]},
    "mhc.seam_single_pass_bwd": {"shape": SHAPES, **BACKWARD, "rounding": ROUNDINGS},
    "mhc.seam_broadcast_fwd": {
        "shape": SHAPES,
        **SUBLAYER,
        "form": [None, "classic", "single_pass"],
        "save": [None, False, True],
    },
    "mhc.seam_broadcast_bwd": {
        "shape": SHAPES,
        **BACKWARD,
        "form": [None, "classic", "single_pass"],
    },
}


# --- streams -------------------------------------------------------------------------------------


def expand_fwd(g, shape, n, d, dtype, special):
    return {"hidden": floats(g, (*shape, d), dtype, special)}, {"n": n}


def expand_bwd(g, shape, n, d, dtype, special):
    return {"grad_residual": floats(g, (*shape, n, d), dtype, special)}, {}


def mix_of(g, shape, n):
    return floats(g, (*shape, n), "F32", center=0.5)


def pre_apply_fwd(g, shape, n, d, dtype, special):
    residual = floats(g, (*shape, n, d), dtype, special)
    return {"residual": residual, "pre": mix_of(g, shape, n)}, {}


def pre_apply_bwd(g, shape, n, d, dtype, acc, special):
    inputs, _ = pre_apply_fwd(g, shape, n, d, dtype, special)
    if acc:
        inputs["grad_residual_acc"] = floats(g, (*shape, n, d), dtype)
    return {**inputs, "grad_layer_input": floats(g, (*shape, d), dtype)}, {}


def exit_inputs(g, shape, n, d, dtype, special="normal"):
    return {
        "layer_output": floats(g, (*shape, d), dtype),
        "residual": floats(g, (*shape, n, d), dtype, special),
        "post": mix_of(g, shape, n),
        "comb": floats(g, (*shape, n, n), "F32", center=1 / n),
    }


def post_fwd(g, shape, n, d, dtype, inplace, special):
    return exit_inputs(g, shape, n, d, dtype, special), set_if(inplace=inplace)


def post_bwd(g, shape, n, d, dtype, special):
    upstream = {"grad_new_residual": floats(g, (*shape, n, d), dtype)}
    return upstream | exit_inputs(g, shape, n, d, dtype, special), {}


def multilayer_recompute(g, shape, n, d, dtype, layers, special):
    inputs = {"residual": floats(g, (*shape, n, d), dtype, special)}
    count, posts = layers
    for layer in range(count):
        inputs[f"pre.{layer}"] = mix_of(g, shape, n)
    for layer in range(posts):
        made = exit_inputs(g, shape, n, d, dtype)
        del made["residual"]
        made["comb"] = encode(made["comb"].decode() / n, "F32")  # or ten layers grow too large
        inputs |= {f"{x}.{layer}": t for x, t in made.items()}
    return inputs, {}


# --- projection ----------------------------------------------------------------------------------


def merge_fwd(g, M, K, special):
    fn = floats(g, (M, K), "F32", special)
    return {"fn": fn, "norm_weight": floats(g, (K,), "F32", center=1.0)}, {}


def merge_bwd(g, M, K, special, **acc):
    return {
        "grad_fn_merged": floats(g, (M, K), "F32", special),
        **merge_fwd(g, M, K, "normal")[0],
        **targets(
            g,
            grad_fn_acc=(M, K) if acc["fn acc"] else None,
            grad_norm_weight_acc=(K,) if acc["weight acc"] else None,
        ),
    }, {}


def scaled(g, shape, factor):
    return encode(factor * g.standard_normal(shape), "F32")


def product(g, T, n, d, dtype, M, special):
    residual = floats(g, (T, n, d), dtype, special)
    return {"residual": residual, "fn": scaled(g, (M, n * d), (n * d) ** -0.5)}


def count_of(groups, n, d):
    return {"n": n, "d": d}.get(groups, groups)


def prenorm_gemm(g, T, n, d, dtype, M, splits, groups, precision, special):
    attrs = set_if(splits=splits, groups=count_of(groups, n, d), precision=precision)
    return product(g, T, n, d, dtype, M, special), attrs


def sums(g, leading, M, G, special):
    """mul and the positive sqr, with an axis G or without."""
    groups = () if G is None else (G,)
    mul = floats(g, (*leading, *groups, M), "F32", special if special == "nan" else "normal")
    sqr = 1 + g.standard_normal((*leading, *groups)) ** 2
    if special == "zero token" and sqr.size:
        mul.data[..., -1:, :] = 0.0  # of the last token or group
        sqr[..., -1:] = 0.0
    return mul, encode(sqr, "F32")


def reduce_partials_fwd(g, S, T, M, G, eps, rms, special):
    mul, sqr = sums(g, (S, T), M, G, special)
    return {"mul_partial": mul, "sqr_partial": sqr}, set_if(k=30, norm_eps=eps, rms=rms)


def reduce_partials_bwd(g, T, M, G, eps, rms, special):
    mul, sqr = sums(g, (T,), M, G, special)
    inputs = {"grad_mixes": floats(g, (T, M), "F32"), "mul": mul, "sqr": sqr}
    return inputs, set_if(k=30, norm_eps=eps, rms=rms)


def norm_fn_bwd(g, T, n, d, dtype, M, groups, precision, special, **acc):
    G = count_of(groups, n, d)
    leading = (T,) if G is None else (T, G)
    return {
        "grad_mul": floats(g, (*leading, M), "F32"),
        "grad_sqr": scaled(g, leading, 0.1),
        **product(g, T, n, d, dtype, M, special),
        **({"grad_residual_acc": floats(g, (T, n, d), dtype)} if acc["residual acc"] else {}),
        **targets(g, grad_fn_acc=(M, n * d) if acc["fn acc"] else None),
    }, set_if(precision=precision)


# --- mixes ---------------------------------------------------------------------------------------


def mixes_of(g, shape, width, special):
    plain = "normal" if special == "large" else special
    mixes = floats(g, (*shape, width), "F32", plain)
    return encode(mixes.decode() * (40 if special == "large" else 1), "F32")


def split_fwd(g, shape, n, pre_eps, post_mult, special):
    inputs = {
        "mixes": mixes_of(g, shape, n * n + 2 * n, special),
        "scale": floats(g, (3,), "F32", center=1.0),
        "base": floats(g, (n * n + 2 * n,), "F32"),
    }
    return inputs, {"pre_eps": pre_eps, "post_mult": post_mult}


def split_bwd(g, shape, n, post_mult, special):
    inputs, _ = split_fwd(g, shape, n, 0.0, post_mult, special)
    upstream = {"grad_pre": (n,), "grad_post": (n,), "grad_comb_logits": (n, n)}
    upstream = {x: floats(g, (*shape, *axes), "F32") for x, axes in upstream.items()}
    return upstream | inputs, {"post_mult": post_mult}


def split_bwd_reduce(g, P, n, head, special, **acc):
    scales, width = (1, n) if head else (3, n * n + 2 * n)
    return {
        "grad_scale_partial": floats(g, (P, scales), "F32", special),
        "grad_base_partial": floats(g, (P, width), "F32", special),
        **targets(
            g,
            grad_scale_acc=(scales,) if acc["scale acc"] else None,
            grad_base_acc=(width,) if acc["base acc"] else None,
        ),
    }, {}


def sinkhorn_fwd(g, shape, n, repeat, how, special):
    convention, eps = how
    plain = "normal" if special == "wide" else special
    logits = floats(g, (*shape, n, n), "F32", plain)
    logits = encode(logits.decode() * (20 if special == "wide" else 1), "F32")
    return {"comb_logits": logits}, set_if(repeat=repeat, eps=eps, convention=convention)


def sinkhorn_bwd(g, shape, n, repeat, how, special):
    inputs, attrs = sinkhorn_fwd(g, shape, n, repeat, how, special)
    return {"grad_comb": floats(g, (*shape, n, n), "F32"), **inputs}, attrs


def head_mix_fwd(g, shape, n, pre_eps, special):
    inputs = {
        "mixes": mixes_of(g, shape, n, special),
        "scale": floats(g, (1,), "F32", center=1.0),
        "base": floats(g, (n,), "F32"),
    }
    return inputs, {"pre_eps": pre_eps}


def head_mix_bwd(g, shape, n, special, **acc):
    return {
        "grad_pre": floats(g, (*shape, n), "F32"),
        **head_mix_fwd(g, shape, n, 0.0, special)[0],
        **targets(
            g,
            grad_scale_acc=(1,) if acc["scale acc"] else None,
            grad_base_acc=(n,) if acc["base acc"] else None,
        ),
    }, {}


# --- planner and monitors ------------------------------------------------------------------------


def plan_recompute(g, layers, n, d, stages):
    cut = {
        None: None,
        "one": [layers],
        "halves": [layers - layers // 2, layers // 2],
        "uneven": [1, layers - 1],
        "single": [1] * layers,
    }[stages]
    if cut is not None:
        cut = [stage for stage in cut if stage]
    return {}, set_if(layers=layers, n=n, d=d, stages=cut)


def maps(g, shape, n, special):
    if special == "doubly stochastic":
        permutations = np.eye(n)[[g.permutation(n) for _ in range(3)]]
        weights = g.dirichlet(np.ones(3), shape)
        return encode(np.einsum("...k,kio->...io", weights, permutations), "F32")
    return encode(floats(g, (*shape, n, n), "F32", special).decode() / n, "F32")


def amax_gain(g, L, T, n, special):
    return {"comb": maps(g, (L, T), n, special)}, {}


def defect(g, shape, n, special):
    return {"comb": maps(g, shape, n, special)}, {}


# --- composites and seams ------------------------------------------------------------------------


def stream_rows(g, shape, dtype, special):
    """Streams or rows; zero token: the last token is all zeros."""
    rows = floats(g, shape, dtype, "nan" if special == "nan" else "normal")
    if special == "zero token":
        rows.data.reshape(-1, int(np.prod(shape[-2:])))[-1:] = 0
    return rows


def sublayer(g, n, d, mix, precision, more):
    """fn and all that goes with it, and the attributes."""
    width = n * n + 2 * n
    tensors = {
        "fn": scaled(g, (width, n * d), (n * d) ** -0.5),
        "scale": floats(g, (3,), "F32", center=1.0),
        "base": floats(g, (width,), "F32"),
    }
    attrs = {**MIXES[mix], **set_if(precision=precision)}
    if more["norm weight"]:
        tensors["norm_weight"] = floats(g, (n * d,), "F32", center=1.0)
    if more["layer norm"]:
        tensors["layer_norm_weight"] = floats(g, (d,), more["layer norm"], center=1.0)
        attrs["layer_norm_eps"] = 1e-6
    return tensors, attrs


def parameter_targets(g, tensors, acc):
    """grad_*_acc of all parameters, or of every second one."""
    names = [x for x in PARAMETERS if x in tensors]
    names = {"none": [], "all": names, "some": names[::2]}[acc]
    return targets(g, **{f"grad_{x}_acc": tensors[x].shape for x in names})


def chosen_upstream(g, dtype, kind, **shapes):
    """Upstream gradients by output: rows of `dtype` (those that end in d), mixes of F32."""
    wanted = {
        "all": lambda x: True,
        "none": lambda x: False,
        "streams": lambda x: "residual" in x,
        "input": lambda x: x == "layer_input",
        "mixes": lambda x: "residual" not in x and x != "layer_input",
    }[kind]
    return {
        f"grad_{x}": floats(g, shape, dtype if "residual" in x or x == "layer_input" else "F32")
        for x, shape in shapes.items()
        if wanted(x)
    }


def pre_fwd(g, shape, n, d, dtype, mix, precision, special, save, **more):
    tensors, attrs = sublayer(g, n, d, mix, precision, more)
    residual = stream_rows(g, (*shape, n, d), dtype, special)
    return {"residual": residual, **tensors}, attrs | set_if(save=save)


def saved_by(name, inputs, attrs, prefix=""):
    """What the forward saves, without its other outputs."""
    outputs = REFERENCE[name](inputs, {**attrs, "save": True})
    names = ("pre", "mixes", "mul", "sqr", "comb_logits", "comb")
    saved = {prefix + x: outputs[prefix + x] for x in names}
    return saved | ({"new_residual": outputs["new_residual"]} if prefix else {})


def pre_bwd(g, shape, n, d, dtype, mix, precision, special, upstream, acc, saved, rounding, **more):
    inputs, attrs = pre_fwd(g, shape, n, d, dtype, mix, precision, special, None, **more)
    state = saved_by("mhc.pre_fwd", inputs, attrs) if saved else {}
    grads = chosen_upstream(
        *(g, dtype, upstream),
        layer_input=(*shape, d),
        post=(*shape, n),
        comb=(*shape, n, n),
    )
    if upstream in ("all", "streams"):
        grads["grad_residual_acc"] = floats(g, (*shape, n, d), dtype)
    accs = parameter_targets(g, inputs, acc)
    return {**grads, **inputs, **accs, **state}, attrs | set_if(rounding=rounding)


def pre_big_fuse(g, T, n, d, dtype, S, groups, mix, special, **more):
    tensors, attrs = sublayer(g, n, d, mix, None, {**more, "norm weight": False})
    del tensors["fn"]
    mul, sqr = sums(g, (S, T), n * n + 2 * n, count_of(groups, n, d), special)
    sqr = encode(sqr.decode() * n * d / 2, "F32")  # so that mixes are of size 1
    residual = stream_rows(g, (T, n, d), dtype, special)
    return {"mul_partial": mul, "sqr_partial": sqr, "residual": residual, **tensors}, attrs


def head_fwd(g, shape, n, d, dtype, mix, precision, special, **more):
    inputs = {
        "residual": stream_rows(g, (*shape, n, d), dtype, special),
        "fn": scaled(g, (n, n * d), (n * d) ** -0.5),
        "scale": floats(g, (1,), "F32", center=1.0),
        "base": floats(g, (n,), "F32"),
    }
    if more["norm weight"]:
        inputs["norm_weight"] = floats(g, (n * d,), "F32", center=1.0)
    attrs = {x: v for x, v in MIXES[mix].items() if x in ("norm_eps", "rms", "pre_eps")}
    return inputs, attrs | set_if(precision=precision)


def head_bwd(g, shape, n, d, dtype, mix, precision, rounding, acc, special, **more):
    inputs, attrs = head_fwd(g, shape, n, d, dtype, mix, precision, special, **more)
    upstream = {"grad_hidden": floats(g, (*shape, d), dtype)}
    accs = parameter_targets(g, inputs, acc)
    return {**upstream, **inputs, **accs}, attrs | set_if(rounding=rounding)


def seam_inputs(g, shape, n, d, dtype, special, single_pass):
    inputs = exit_inputs(g, shape, n, d, dtype)
    inputs["residual"] = stream_rows(g, (*shape, n, d), dtype, special)
    if special == "zero token":  # so that the new streams of that token are zeros too
        inputs["layer_output"].data.reshape(-1, d)[-1:] = 0
    return inputs | ({"pre": mix_of(g, shape, n)} if single_pass else {})


def seam_fwd(single_pass):
    def build(g, shape, n, d, dtype, mix, precision, special, save, **more):
        tensors, attrs = sublayer(g, n, d, mix, precision, more)
        inputs = seam_inputs(g, shape, n, d, dtype, special, single_pass)
        return {**inputs, **tensors}, attrs | set_if(save=save)

    return build


def seam_bwd(single_pass):
    name = "mhc.seam_single_pass_fwd" if single_pass else "mhc.seam_classic_fwd"

    def build(
        g, shape, n, d, dtype, mix, precision, special, upstream, acc, saved, rounding, **more
    ):
        forward = seam_fwd(single_pass)
        inputs, attrs = forward(g, shape, n, d, dtype, mix, precision, special, None, **more)
        state = saved_by(name, inputs, attrs, "next_") if saved else {}
        grads = chosen_upstream(
            *(g, dtype, upstream),
            new_residual=(*shape, n, d),
            layer_input=(*shape, d),
            next_pre=(*shape, n),
            next_post=(*shape, n),
            next_comb=(*shape, n, n),
        )
        if not single_pass:
            grads.pop("grad_next_pre", None)
        accs = parameter_targets(g, inputs, acc)
        return {**grads, **inputs, **accs, **state}, attrs | set_if(rounding=rounding)

    return build


def seam_broadcast_fwd(g, shape, n, d, dtype, mix, precision, special, form, save, **more):
    tensors, attrs = sublayer(g, n, d, mix, precision, more)
    hidden = stream_rows(g, (*shape, 1, d), dtype, special)
    hidden = encode(hidden.decode().reshape(*shape, d), dtype)
    return {"hidden": hidden, **tensors}, attrs | set_if(form=form, save=save)


def seam_broadcast_bwd(
    g, shape, n, d, dtype, mix, precision, special, form, upstream, acc, saved, **more
):
    inputs, attrs = seam_broadcast_fwd(
        g, shape, n, d, dtype, mix, precision, special, form, None, **more
    )
    state = saved_by("mhc.seam_broadcast_fwd", inputs, attrs) if saved else {}
    grads = chosen_upstream(
        *(g, dtype, upstream),
        residual=(*shape, n, d),
        layer_input=(*shape, d),
        pre=(*shape, n),
        post=(*shape, n),
        comb=(*shape, n, n),
    )
    return {**grads, **inputs, **parameter_targets(g, inputs, acc), **state}, attrs


BUILDERS = {
    "mhc.expand_fwd": expand_fwd,
    "mhc.expand_bwd": expand_bwd,
    "mhc.merge_fwd": merge_fwd,
    "mhc.merge_bwd": merge_bwd,
    "mhc.prenorm_gemm": prenorm_gemm,
    "mhc.reduce_partials_fwd": reduce_partials_fwd,
    "mhc.reduce_partials_bwd": reduce_partials_bwd,
    "mhc.norm_fn_bwd": norm_fn_bwd,
    "mhc.split_fwd": split_fwd,
    "mhc.split_bwd": split_bwd,
    "mhc.split_bwd_reduce": split_bwd_reduce,
    "mhc.sinkhorn_fwd": sinkhorn_fwd,
    "mhc.sinkhorn_bwd": sinkhorn_bwd,
    "mhc.pre_apply_fwd": pre_apply_fwd,
    "mhc.pre_apply_bwd": pre_apply_bwd,
    "mhc.pre_big_fuse": pre_big_fuse,
    "mhc.post_fwd": post_fwd,
    "mhc.post_bwd": post_bwd,
    "mhc.head_mix_fwd": head_mix_fwd,
    "mhc.head_mix_bwd": head_mix_bwd,
    "mhc.multilayer_recompute": multilayer_recompute,
    "mhc.plan_recompute": plan_recompute,
    "mhc.amax_gain": amax_gain,
    "mhc.defect": defect,
    "mhc.pre_fwd": pre_fwd,
    "mhc.pre_bwd": pre_bwd,
    "mhc.head_fwd": head_fwd,
    "mhc.head_bwd": head_bwd,
    "mhc.seam_classic_fwd": seam_fwd(single_pass=False),
    "mhc.seam_classic_bwd": seam_bwd(single_pass=False),
    "mhc.seam_single_pass_fwd": seam_fwd(single_pass=True),
    "mhc.seam_single_pass_bwd": seam_bwd(single_pass=True),
    "mhc.seam_broadcast_fwd": seam_broadcast_fwd,
    "mhc.seam_broadcast_bwd": seam_broadcast_bwd,
}


def legal(name, case):
    """False for combinations that the contract forbids or leaves open."""
    if name.startswith("mhc.sinkhorn") and case["special"] == "wide":
        return case["how"] != ("deepseek", 0.0)  # 0/0 in F32, not in double
    return True
