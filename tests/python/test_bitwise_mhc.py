"""What must be equal bit for bit in the mHC operators, for every implementation on the CPU."""

import numpy as np
import pytest
from engramhc.reference.dtypes import Tensor, encode

import op_cases_mhc as cases
from conftest import Refused
from test_bitwise import DTYPES, every, random, rows, same_bits

__all__ = ["every"]  # a fixture

WEIGHTS = ["fn", "scale", "base", "norm_weight", "layer_norm_weight"]
MIXES = ["train", "paper", "megatron"]
SAVED = ["pre", "mixes", "mul", "sqr", "comb_logits", "comb"]
SEAMS = ["mhc.seam_classic_fwd", "mhc.seam_single_pass_fwd"]


def sublayer(dtype, mix="train", d=97, norms=True, precision=None):
    """Arguments of the builders of a sublayer's operators: four streams."""
    return {
        **{"n": 4, "d": d, "dtype": dtype, "mix": mix, "precision": precision},
        **{"norm weight": norms, "layer norm": "F32" if norms else None, "special": "normal"},
    }


def forward_case(name, shape, **arguments):
    """Inputs of an entry or a seam, without `save`."""
    build = {
        "mhc.pre_fwd": cases.pre_fwd,
        "mhc.seam_classic_fwd": cases.seam_fwd(single_pass=False),
        "mhc.seam_single_pass_fwd": cases.seam_fwd(single_pass=True),
    }[name]
    return build(random(), shape, save=None, **arguments)


def only(names, tensors):
    return {x: tensors[x] for x in names if x in tensors}


def renamed(outputs, prefix):
    """Those of `pre_fwd` by the names that a seam gives them."""
    plain = ("layer_input",)
    return {x if x in plain else prefix + x: t for x, t in outputs.items()}


def folded(tensors, fixed, shape):
    return {
        x: t if x in fixed else Tensor(t.dtype, t.data.reshape(*shape, *t.shape[1:]))
        for x, t in tensors.items()
    }


# --- fused operators and their parts -------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("splits", [1, 3, 16])
def test_big_fuse_is_its_parts(every, dtype, mix, splits):
    inputs, attrs = cases.pre_big_fuse(
        random(), 13, S=splits, groups=None, **without_precision(sublayer(dtype, mix, norms=False))
    )

    def check(op):
        reduced = op(
            only(["mul_partial", "sqr_partial"], inputs),
            {"k": 4 * 97, "norm_eps": attrs["norm_eps"], "rms": attrs.get("rms", "mean")},
            operator="mhc.reduce_partials_fwd",
        )
        parts = op(
            {"mixes": reduced["mixes"], **only(["scale", "base"], inputs)},
            {x: attrs[x] for x in ("pre_eps", "post_mult")},
            operator="mhc.split_fwd",
        )
        sinkhorn = {"repeat": attrs["repeat"], "eps": attrs["sinkhorn_eps"]}
        comb = op(
            only(["comb_logits"], parts),
            {**sinkhorn, "convention": attrs.get("convention", "deepseek")},
            operator="mhc.sinkhorn_fwd",
        )
        row = op(
            {"residual": inputs["residual"], "pre": parts["pre"]}, {}, operator="mhc.pre_apply_fwd"
        )
        same_bits(op(inputs, attrs), {"post": parts["post"], **comb, **row})

    every("mhc.pre_big_fuse", check)


def without_precision(arguments):
    return {x: value for x, value in arguments.items() if x != "precision"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_pre_is_merge_product_and_big_fuse(every, dtype, mix, precision):
    inputs, attrs = forward_case(
        "mhc.pre_fwd", (13,), **sublayer(dtype, mix, d=300, precision=precision)
    )

    def check(op):
        weights = only(["fn", "norm_weight"], inputs)
        merged = op(weights, {}, operator="mhc.merge_fwd")["fn_merged"]
        sums = op(
            {"residual": inputs["residual"], "fn": merged},
            {"precision": precision},
            operator="mhc.prenorm_gemm",
        )
        rest = {x: t for x, t in inputs.items() if x not in weights}
        rules = {x: value for x, value in attrs.items() if x != "precision"}
        fused = op({**rest, **sums}, rules, operator="mhc.pre_big_fuse")
        same_bits(op(inputs, attrs), fused)

    every("mhc.pre_fwd", check)


@pytest.mark.parametrize("name", ["mhc.pre_fwd", *SEAMS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saving_changes_no_bit(every, name, dtype):
    inputs, attrs = forward_case(name, (13,), **sublayer(dtype))

    def check(op):
        plain, saved = op(inputs, attrs), op(inputs, {**attrs, "save": True})
        assert set(plain) < set(saved)
        same_bits(plain, saved, list(plain))

    every(name, check)


@pytest.mark.parametrize("name", SEAMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("norms", [False, True])
def test_seam_is_post_and_pre(every, name, dtype, mix, norms):
    inputs, attrs = forward_case(name, (13,), **sublayer(dtype, mix, norms=norms))
    attrs["save"] = True

    def check(op):
        whole = op(inputs, attrs)
        exit_inputs = only(["layer_output", "residual", "post", "comb"], inputs)
        streams = op(exit_inputs, {}, operator="mhc.post_fwd")["new_residual"]
        entry = op({"residual": streams, **only(WEIGHTS, inputs)}, attrs, operator="mhc.pre_fwd")
        parts = {"new_residual": streams, **renamed(entry, "next_")}
        if "pre" not in inputs:
            same_bits(whole, parts)
            return
        same_bits(whole, parts, [x for x in whole if x != "layer_input"])
        if not norms:  # no operator is the norm of a row alone
            collapse = {"residual": streams, "pre": inputs["pre"]}
            same_bits(whole, op(collapse, {}, operator="mhc.pre_apply_fwd"), ["layer_input"])

    every(name, check)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layers", [(1, 0), (3, 2), (4, 4)])
def test_recompute_is_layer_by_layer(every, dtype, layers):
    inputs, attrs = cases.multilayer_recompute(
        random(), (13,), 4, 97, dtype, layers, special="normal"
    )

    def check(op):
        whole = op(inputs, attrs)
        streams, parts = inputs["residual"], {}
        for layer in range(layers[0]):
            collapse = {"residual": streams, "pre": inputs[f"pre.{layer}"]}
            row = op(collapse, {}, operator="mhc.pre_apply_fwd")
            parts[f"layer_input.{layer}"] = row["layer_input"]
            if layer == layers[1]:
                break
            made = {x: inputs[f"{x}.{layer}"] for x in ("layer_output", "post", "comb")}
            streams = op({"residual": streams, **made}, {}, operator="mhc.post_fwd")["new_residual"]
            parts[f"new_residual.{layer}"] = streams
        same_bits(whole, parts)

    every("mhc.multilayer_recompute", check)


@pytest.mark.parametrize("dtype", DTYPES)
def test_post_in_place(every, dtype):
    inputs, attrs = cases.post_fwd(random(), (13,), 4, 97, dtype, None, "normal")
    every("mhc.post_fwd", lambda op: same_bits(op(inputs, attrs), op(inputs, {"inplace": True})))


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 16, 37])
def test_splits_are_added_as_a_pairwise_tree(ehc, splits):
    inputs, attrs = cases.reduce_partials_fwd(
        random(), splits, 13, 24, None, 1e-6, None, special="normal"
    )

    def tree(partials):
        terms = list(partials.data)
        while len(terms) > 1:
            pairs = [a + b for a, b in zip(terms[::2], terms[1::2])]
            terms = pairs + terms[len(pairs) * 2 :]
        return Tensor(partials.dtype, terms[0])

    expected = {x: tree(inputs[f"{x}_partial"]) for x in ("mul", "sqr")}
    name = "mhc.reduce_partials_fwd"
    for impl in set(ehc.implementations(name)) - {"reference"}:  # which adds in double
        try:
            same_bits(ehc.op(name, inputs, attrs, impl=impl), expected, ["mul", "sqr"])
        except Refused:
            continue


# --- saved state ---------------------------------------------------------------------------------


def backward_case(name, dtype, tokens, rounding, prefix):
    """Inputs without state, attributes, and those of the forward."""
    build = {
        "mhc.pre_bwd": cases.pre_bwd,
        "mhc.seam_classic_bwd": cases.seam_bwd(single_pass=False),
        "mhc.seam_single_pass_bwd": cases.seam_bwd(single_pass=True),
    }[name]
    inputs, attrs = build(
        *(random(), (tokens,)),
        **{**sublayer(dtype), "upstream": "all", "acc": "all", "saved": False},
        rounding=rounding,
    )
    taken = [*WEIGHTS, "residual", *(["layer_output", "post", "comb", "pre"] if prefix else [])]
    return inputs, attrs, only(taken, inputs)


BACKWARDS = [
    ("mhc.pre_bwd", ""),
    ("mhc.seam_classic_bwd", "next_"),
    ("mhc.seam_single_pass_bwd", "next_"),
]


@pytest.mark.parametrize(("name", "prefix"), BACKWARDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["once", "chain"])
def test_state_saved_or_recomputed(every, name, prefix, dtype, rounding):
    inputs, attrs, forward = backward_case(name, dtype, 13, rounding, prefix)
    rules = {x: value for x, value in attrs.items() if x != "rounding"}
    names = [prefix + x for x in SAVED] + (["new_residual"] if prefix else [])

    def check(op):
        saved = op(forward, {**rules, "save": True}, operator=name.replace("_bwd", "_fwd"))
        same_bits(op(inputs, attrs), op(inputs | only(names, saved), attrs))

    every(name, check)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["classic", "single_pass"])
def test_state_of_the_first_entry_saved_or_recomputed(every, dtype, form):
    arguments = {**sublayer(dtype), "form": form}
    inputs, attrs = cases.seam_broadcast_bwd(
        random(), (13,), **arguments, upstream="all", acc="all", saved=False
    )
    forward = only(["hidden", *WEIGHTS], inputs)

    def check(op):
        saved = op(forward, {**attrs, "save": True}, operator="mhc.seam_broadcast_fwd")
        same_bits(op(inputs, attrs), op(inputs | only(SAVED, saved), attrs))

    every("mhc.seam_broadcast_bwd", check)


# --- batch neighbours and position ---------------------------------------------------------------

FORWARDS = {
    "mhc.pre_fwd": lambda dtype, shape: forward_case("mhc.pre_fwd", shape, **sublayer(dtype)),
    **{
        seam: lambda dtype, shape, seam=seam: forward_case(seam, shape, **sublayer(dtype))
        for seam in SEAMS
    },
    "mhc.seam_broadcast_fwd": lambda dtype, shape: cases.seam_broadcast_fwd(
        random(), shape, **sublayer(dtype), form="classic", save=None
    ),
    "mhc.head_fwd": lambda dtype, shape: cases.head_fwd(
        random(), shape, 4, 97, dtype, "train", None, "normal", **{"norm weight": True}
    ),
    "mhc.prenorm_gemm": lambda dtype, shape: cases.prenorm_gemm(
        random(), shape[0], 4, 300, dtype, 24, None, None, None, "normal"
    ),
    "mhc.pre_apply_fwd": lambda dtype, shape: cases.pre_apply_fwd(
        random(), shape, 4, 97, dtype, "normal"
    ),
    "mhc.post_fwd": lambda dtype, shape: cases.post_fwd(
        random(), shape, 4, 97, dtype, None, "normal"
    ),
    "mhc.multilayer_recompute": lambda dtype, shape: cases.multilayer_recompute(
        random(), shape, 4, 97, dtype, (3, 3), "normal"
    ),
}


def tokens_first(inputs):
    return [x for x in inputs if x not in WEIGHTS]


@pytest.mark.parametrize("name", list(FORWARDS))
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_token_alone_or_in_any_batch(every, name, dtype):
    """Alone, moved, beside NaN, and among enough others that blocks and splits change."""
    inputs, attrs = FORWARDS[name](dtype, (150,))
    order = random().permutation(150)
    kept = [0, 7, 149]

    def summed(outputs):
        """Split partials by what reads them."""
        if name != "mhc.prenorm_gemm":
            return outputs
        terms = {x: t.data for x, t in outputs.items()}
        for x in terms:
            while terms[x].shape[0] > 1:  # the automatic count is a power of two
                terms[x] = terms[x][::2] + terms[x][1::2]
        return {x: Tensor("F32", t[0]) for x, t in terms.items()}

    def of(tokens, change=lambda t: t):
        return {
            x: change(Tensor(t.dtype, t.data[tokens])) if x in tokens_first(inputs) else t
            for x, t in inputs.items()
        }

    def check(op):
        whole = summed(op(inputs, attrs))
        moved = summed(op(of(order), attrs))
        same_bits(moved, {x: Tensor(t.dtype, t.data[order]) for x, t in whole.items()})
        for place in kept:
            alone = summed(op(of([place]), attrs))
            same_bits(alone, {x: rows(t, place, place + 1) for x, t in whole.items()})
        mixed = dict(inputs)
        for x in tokens_first(inputs):
            data = inputs[x].data.copy()
            data[[t for t in range(150) if t not in kept]] = encode(np.nan, inputs[x].dtype).data
            mixed[x] = Tensor(inputs[x].dtype, data)
        beside = summed(op(mixed, attrs))
        same_bits(
            *({x: Tensor(t.dtype, t.data[kept]) for x, t in o.items()} for o in (beside, whole))
        )

    every(name, check)


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("mhc.pre_bwd", ["grad_residual"]),
        *(
            (name, ["grad_layer_output", "grad_residual", "grad_post", "grad_comb"])
            for name in ("mhc.seam_classic_bwd", "mhc.seam_single_pass_bwd")
        ),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_token_whatever_others_hold(every, name, outputs, dtype):
    prefix = "" if name == "mhc.pre_bwd" else "next_"
    inputs, attrs, _ = backward_case(name, dtype, 20, "once", prefix)
    fixed = [*WEIGHTS, *(f"grad_{x}_acc" for x in WEIGHTS)]
    others = [*range(7), *range(13, 20)]
    different = {}
    for x, t in inputs.items():
        data = t.data.copy()
        if x not in fixed:
            data[others] = encode(random().standard_normal(t.shape), t.dtype).data[others]
            data[0] = encode(np.nan, t.dtype).data
        different[x] = Tensor(t.dtype, data)

    def check(op):
        first, second = op(inputs, attrs), op(different, attrs)
        same_bits(
            *({x: rows(out[x], 7, 13) for x in outputs} for out in (first, second)),
        )

    every(name, check)


@pytest.mark.parametrize(
    "name", ["mhc.pre_fwd", "mhc.seam_single_pass_fwd", "mhc.seam_broadcast_fwd"]
)
def test_leading_dimensions(every, name):
    inputs, attrs = FORWARDS[name]("BF16", (12,))

    def check(op):
        flat = op(inputs, attrs)
        for x, t in op(folded(inputs, WEIGHTS, (3, 4)), attrs).items():
            assert t.shape[:2] == (3, 4)
            assert t.data.tobytes() == flat[x].data.tobytes(), x

    every(name, check)
