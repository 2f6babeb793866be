"""Composites and seams of the NumPy reference: gradients, and equality with their parts."""

import mhc_formulas
import numpy as np
import pytest
from engramhc.reference import run
from engramhc.reference.dtypes import encode, nearest
from engramhc.reference.tolerance import compare

from finite_differences import check_directions, check_gradients, single_numbers, singles
from test_reference_mhc import agree, random, with_target

EXIT = ("layer_output", "residual", "post", "comb")
SAVED = ("pre", "mixes", "mul", "sqr", "comb_logits", "comb")
PARAMETERS = ("fn", "scale", "base", "norm_weight", "layer_norm_weight")
TRAIN = {"norm_eps": 1e-6, "pre_eps": 1e-6, "post_mult": 2.0, "repeat": 20, "sinkhorn_eps": 1e-6}
PAPER = {
    **TRAIN,
    "norm_eps": 1e-20,
    "pre_eps": 0.0,
    "sinkhorn_eps": 0.0,
    "convention": "log",
}
MEGATRON = {
    "norm_eps": 1e-2,
    "pre_eps": 0.01,
    "post_mult": 1.0,
    "repeat": 3,
    "sinkhorn_eps": 0.7,
    "convention": "megatron",
    "rms": "norm",
}
# Tokens (with several leading dimensions), streams, width, norm weight?, layer norm?, attributes.
CASES = [
    ((0,), 3, 2, True, True, TRAIN),
    ((1,), 1, 7, True, False, TRAIN),
    ((2,), 2, 5, True, True, TRAIN),
    ((2,), 2, 5, False, False, PAPER),
    ((1, 2), 3, 3, True, True, PAPER),
    ((2,), 3, 3, False, True, MEGATRON),
    ((2,), 4, 3, True, False, MEGATRON),
    ((1,), 5, 3, False, True, TRAIN),
    ((2,), 6, 1, True, False, PAPER),
    ((1,), 7, 2, False, False, MEGATRON),
    ((1,), 8, 2, True, True, TRAIN),
    ((31,), 4, 5, True, True, TRAIN),
    ((33,), 2, 7, True, True, MEGATRON),
    ((33,), 4, 3, False, False, PAPER),
]


def parameters(g, n, d, norm_weight, layer_norm):
    """float64 numbers of F32; fn is small enough that no logit is spiky."""
    width, k = n * n + 2 * n, n * d
    arrays = {
        "fn": single_numbers(g, width, k),
        "scale": single_numbers(g, 3, center=1.0),
        "base": single_numbers(g, width),
    }
    arrays["fn"] = nearest(arrays["fn"] / np.sqrt(k), "F32")
    if norm_weight:
        arrays["norm_weight"] = single_numbers(g, k, center=1.0)
    if layer_norm:
        arrays["layer_norm_weight"] = single_numbers(g, d, center=1.0)
    return arrays


def seam_arrays(g, shape, n, d):
    return {
        "layer_output": single_numbers(g, *shape, d),
        "residual": single_numbers(g, *shape, n, d),
        "post": single_numbers(g, *shape, n),
        "comb": single_numbers(g, *shape, n, n),
    }


def with_norm(attrs, layer_norm):
    return {**attrs, "layer_norm_eps": 1e-3} if layer_norm else {**attrs}


def rounded_attributes(attrs):
    """As the formulas see them."""
    return {x: float(np.float32(v)) if type(v) is float else v for x, v in attrs.items()}


def check_backward(name, formula, arrays, attrs, upstream, hidden_terms=None, **call):
    """Gradients of sum(upstream * outputs), by the name of the input, against differences of
    `formula`. `call`: attributes of the backward alone; hidden_terms: output -> coefficient of what
    is no upstream gradient (an accumulation target)."""
    exact = rounded_attributes(attrs)
    terms = {**upstream, **(hidden_terms or {})}

    def loss(a):
        outputs = formula(a, exact) | {"residual itself": a.get("residual")}
        return sum(np.sum(g * outputs[x]) for x, g in terms.items())

    inputs = singles({**arrays, **{f"grad_{x}": a for x, a in upstream.items()}})
    if hidden_terms:
        inputs["grad_residual_acc"] = encode(hidden_terms["residual itself"], "F32")
    out = run(name, inputs, {**attrs, **call})
    gradients = {x: out[f"grad_{x}"] for x in arrays}
    assert len(gradients) == len(out)
    tokens = arrays.get("residual", arrays.get("hidden")).shape[0]
    check = check_directions if tokens > 30 else check_gradients
    check(loss, arrays, gradients, step=2e-6, tolerance=4e-6)


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["once", "chain"])
@pytest.mark.parametrize("shape, n, d, norm_weight, layer_norm, attrs", CASES)
def test_pre(shape, n, d, norm_weight, layer_norm, attrs, rounding):
    g = random(51, n, d)
    arrays = {"residual": single_numbers(g, *shape, n, d)}
    arrays |= parameters(g, n, d, norm_weight, layer_norm)
    attrs = with_norm(attrs, layer_norm)
    wanted = mhc_formulas.pre(arrays, rounded_attributes(attrs))
    out = run("mhc.pre_fwd", singles(arrays), {**attrs, "save": True})
    for x, value in wanted.items():
        agree(out[x], value, ulp=4, absolute=1e-6)
    upstream = {
        "layer_input": single_numbers(g, *shape, d),
        "post": single_numbers(g, *shape, n),
        "comb": single_numbers(g, *shape, n, n),
    }
    target = {"residual itself": single_numbers(g, *shape, n, d)}
    check_backward(
        "mhc.pre_bwd", mhc_formulas.pre, arrays, attrs, upstream, target, rounding=rounding
    )


@pytest.mark.parametrize("rounding", ["once", "chain"])
@pytest.mark.parametrize("shape, n, d, norm_weight, layer_norm, attrs", CASES)
def test_head(shape, n, d, norm_weight, layer_norm, attrs, rounding):
    g = random(52, n, d)
    arrays = {
        "residual": single_numbers(g, *shape, n, d),
        "fn": single_numbers(g, n, n * d),
        "scale": single_numbers(g, 1),
        "base": single_numbers(g, n),
    }
    if norm_weight:
        arrays["norm_weight"] = single_numbers(g, n * d, center=1.0)
    attrs = {x: attrs[x] for x in ("norm_eps", "rms", "pre_eps") if x in attrs}
    upstream = {"hidden": single_numbers(g, *shape, d)}

    def formula(a, s):
        return {"hidden": mhc_formulas.head(a, s)}

    wanted = formula(arrays, rounded_attributes(attrs))["hidden"]
    agree(run("mhc.head_fwd", singles(arrays), attrs)["hidden"], wanted, ulp=4, absolute=1e-6)
    check_backward("mhc.head_bwd", formula, arrays, attrs, upstream, rounding=rounding)


@pytest.mark.parametrize("rounding", ["once", "chain"])
@pytest.mark.parametrize("form", ["classic", "single_pass"])
@pytest.mark.parametrize("shape, n, d, norm_weight, layer_norm, attrs", CASES)
def test_seam(form, shape, n, d, norm_weight, layer_norm, attrs, rounding):
    g = random(53, n, d)
    arrays = seam_arrays(g, shape, n, d)
    upstream = {
        "new_residual": single_numbers(g, *shape, n, d),
        "layer_input": single_numbers(g, *shape, d),
        "next_post": single_numbers(g, *shape, n),
        "next_comb": single_numbers(g, *shape, n, n),
    }
    if form == "single_pass":
        arrays["pre"] = single_numbers(g, *shape, n)
        upstream["next_pre"] = single_numbers(g, *shape, n)
    arrays |= parameters(g, n, d, norm_weight, layer_norm)
    attrs = with_norm(attrs, layer_norm)
    out = run(f"mhc.seam_{form}_fwd", singles(arrays), {**attrs, "save": True})
    for x, value in mhc_formulas.seam(arrays, rounded_attributes(attrs)).items():
        agree(out[x], value, ulp=4, absolute=2e-6)
    check_backward(
        f"mhc.seam_{form}_bwd", mhc_formulas.seam, arrays, attrs, upstream, rounding=rounding
    )


@pytest.mark.parametrize("form", ["classic", "single_pass"])
@pytest.mark.parametrize("shape, n, d, norm_weight, layer_norm, attrs", CASES)
def test_seam_broadcast(form, shape, n, d, norm_weight, layer_norm, attrs):
    g = random(54, n, d)
    arrays = {"hidden": single_numbers(g, *shape, d)}
    arrays |= parameters(g, n, d, norm_weight, layer_norm)
    attrs = {**with_norm(attrs, layer_norm), "form": form}
    wanted = mhc_formulas.broadcast(arrays, rounded_attributes(attrs))
    out = run("mhc.seam_broadcast_fwd", singles(arrays), attrs)
    assert set(out) == set(wanted)
    for x, value in wanted.items():
        agree(out[x], value, ulp=4, absolute=2e-6)
    upstream = {x: single_numbers(g, *value.shape) for x, value in wanted.items()}
    check_backward("mhc.seam_broadcast_bwd", mhc_formulas.broadcast, arrays, attrs, upstream)


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_whole_sublayer(precision):
    """pre -> tanh -> post of the streams, backwards through both; fn of TF32 numbers."""
    g = random(55)
    n, d = 4, 4
    arrays = {"residual": single_numbers(g, 2, n, d), **parameters(g, n, d, False, False)}
    arrays["fn"] = nearest(arrays["fn"], "TF32")
    upstream = single_numbers(g, 2, n, d)
    attrs = {**TRAIN, "precision": precision}

    def loss(a):
        made = mhc_formulas.pre(a, rounded_attributes(TRAIN))
        out = np.tanh(made["layer_input"])
        return np.sum(upstream * mhc_formulas.post(out, a["residual"], made["post"], made["comb"]))

    t = singles(arrays)
    made = run("mhc.pre_fwd", t, {**attrs, "save": True})
    output = np.tanh(made["layer_input"].decode())
    back = run(
        "mhc.post_bwd",
        {
            "grad_new_residual": encode(upstream, "F32"),
            "layer_output": encode(output, "F32"),
            **{x: made[x] for x in ("post", "comb")},
            "residual": t["residual"],
        },
    )
    of_input = back["grad_layer_output"].decode() * (1 - output**2)
    out = run(
        "mhc.pre_bwd",
        {
            **t,
            "grad_layer_input": encode(of_input, "F32"),
            **{x: back[x] for x in ("grad_post", "grad_comb")},
            "grad_residual_acc": back["grad_residual"],
            **{x: made[x] for x in SAVED},
        },
        attrs,
    )
    check_gradients(loss, arrays, {x: out[f"grad_{x}"] for x in arrays}, tolerance=4e-6)


# --- composites are their parts ------------------------------------------------------------------


def call_of(dtype, layer_norm=False, norm_weight=True, tokens=9, n=3, d=13, seed=60):
    """Tensors of a seam or a pre, and their attributes."""
    g = random(seed, n, d)
    arrays = {**seam_arrays(g, (tokens,), n, d), "pre": single_numbers(g, tokens, n)}
    tensors = singles({**arrays, **parameters(g, n, d, norm_weight, layer_norm)})
    for x in ("layer_output", "residual"):
        tensors[x] = encode(arrays[x], dtype)
    if layer_norm:
        tensors["layer_norm_weight"] = encode(tensors["layer_norm_weight"].decode(), "BF16")
    return tensors, with_norm(TRAIN, layer_norm)


def gradients_of(tensors, dtype, *names, seed=61):
    """Upstream gradients grad_* of outputs of these names, shaped like what they belong to."""
    g = random(seed)
    like = {"layer_input": "layer_output", "new_residual": "residual"}
    out = {}
    for name in names:
        source = tensors[like.get(name, name.removeprefix("next_"))]
        rows = name in like or name in ("residual", "hidden")
        out[f"grad_{name}"] = encode(g.standard_normal(source.shape), dtype if rows else "F32")
    return out


def chosen(tensors, *names):
    return {x: tensors[x] for x in names if x in tensors}


def equal(got, wanted, names=None):
    assert names or set(got) == set(wanted)
    for name in names or got:
        assert (got[name].dtype, got[name].shape) == (wanted[name].dtype, wanted[name].shape), name
        assert got[name].data.tobytes() == wanted[name].data.tobytes(), name


def close(got, wanted):
    """Up to the F32 rounding between the parts."""
    assert set(got) == set(wanted)
    for name, t in wanted.items():
        largest = np.abs(t.decode()).max(initial=0.0)
        rule = [4, 2e-6 * largest] if t.dtype == "F32" else [1, 4e-6 * largest, 0.02]
        result = compare(got[name], t, rule)
        assert result.passed, f"{name}: {result.text}"


def mix_by_parts(tensors, residual, attrs, splits=1):
    """merge, product, reduce, split, Sinkhorn: all that pre saves, and its partials."""
    fn = tensors["fn"]
    if "norm_weight" in tensors:
        fn = run("mhc.merge_fwd", chosen(tensors, "fn", "norm_weight"))["fn_merged"]
    partials = run("mhc.prenorm_gemm", {"residual": residual, "fn": fn}, {"splits": splits})
    k = residual.shape[-1] * residual.shape[-2]
    state = run("mhc.reduce_partials_fwd", partials, {"k": k, "norm_eps": attrs["norm_eps"]})
    mixes = {"mixes": state["mixes"], **chosen(tensors, "scale", "base")}
    state |= run("mhc.split_fwd", mixes, {x: attrs[x] for x in ("pre_eps", "post_mult")})
    sinkhorn = {"repeat": attrs["repeat"], "eps": attrs["sinkhorn_eps"]}
    logits = {"comb_logits": state["comb_logits"]}
    return state | run("mhc.sinkhorn_fwd", logits, sinkhorn), partials


def norm_by_hand(row, tensors, attrs):
    """RMSNorm of the rounded collapsed row, rounded once more."""
    if "layer_norm_weight" not in tensors:
        return row
    x = row.decode()
    normed = mhc_formulas.rms_norm(x, np.float32(attrs["layer_norm_eps"]).astype(float))
    return encode(normed * tensors["layer_norm_weight"].decode(), row.dtype)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("norm_weight", [False, True])
def test_pre_is_its_parts(dtype, layer_norm, norm_weight):
    tensors, attrs = call_of(dtype, layer_norm, norm_weight)
    inputs = chosen(tensors, "residual", *PARAMETERS)
    out = run("mhc.pre_fwd", inputs, {**attrs, "save": True})
    state, partials = mix_by_parts(tensors, tensors["residual"], attrs, splits=3)
    collapse = {"residual": tensors["residual"], "pre": state["pre"]}
    row = run("mhc.pre_apply_fwd", collapse)["layer_input"]
    close(out, {**state, "layer_input": norm_by_hand(row, tensors, attrs)})
    plain = run("mhc.pre_fwd", inputs, attrs)
    assert set(plain) == {"layer_input", "post", "comb"}
    equal(plain, out, plain)

    fused = chosen(tensors, "residual", "scale", "base", "layer_norm_weight") | partials
    close(run("mhc.pre_big_fuse", fused, attrs), plain)


@pytest.mark.parametrize("groups", [1, 3, 13])
@pytest.mark.parametrize("rms", ["mean", "norm"])
def test_big_fuse_of_groups(groups, rms):
    tensors, attrs = call_of("F32")
    product = {"residual": tensors["residual"], "fn": tensors["fn"]}
    partials = run("mhc.prenorm_gemm", product, {"splits": 2, "groups": groups})
    reduce = {"k": 39, "norm_eps": 1e-6, "rms": rms}
    mixes = {"mixes": run("mhc.reduce_partials_fwd", partials, reduce)["mixes"]}
    mixes |= chosen(tensors, "scale", "base")
    state = run("mhc.split_fwd", mixes, {x: attrs[x] for x in ("pre_eps", "post_mult")})
    out = run(
        "mhc.pre_big_fuse",
        {**partials, **chosen(tensors, "residual", "scale", "base")},
        {**attrs, "rms": rms},
    )
    close({"post": out["post"]}, {"post": state["post"]})


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_seams_are_post_and_pre(dtype, layer_norm):
    tensors, attrs = call_of(dtype, layer_norm)
    attrs |= {"save": True}
    parts = chosen(tensors, *PARAMETERS)
    exit_inputs = chosen(tensors, *EXIT)
    streams = run("mhc.post_fwd", exit_inputs)
    entry = {"residual": streams["new_residual"], **parts}
    entered = run("mhc.pre_fwd", entry, attrs)
    wanted = {f"next_{x}": t for x, t in entered.items() if x != "layer_input"} | streams
    classic = run("mhc.seam_classic_fwd", exit_inputs | parts, attrs)
    equal(classic, wanted | chosen(entered, "layer_input"))

    collapse = {"residual": streams["new_residual"], "pre": tensors["pre"]}
    row = run("mhc.pre_apply_fwd", collapse)["layer_input"]
    single = run("mhc.seam_single_pass_fwd", exit_inputs | parts | chosen(tensors, "pre"), attrs)
    equal(single, wanted | {"layer_input": norm_by_hand(row, tensors, attrs)})
    for name, more in (("classic", set()), ("single_pass", {"next_pre"})):
        inputs = exit_inputs | parts | (chosen(tensors, "pre") if more else {})
        plain = run(f"mhc.seam_{name}_fwd", inputs, {**attrs, "save": False})
        assert set(plain) == {"new_residual", "layer_input", "next_post", "next_comb"} | more
        equal(plain, classic if name == "classic" else single, plain)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_broadcast_is_expand_and_pre(dtype, layer_norm):
    tensors, attrs = call_of(dtype, layer_norm)
    parts, n = chosen(tensors, *PARAMETERS), 3
    hidden = {"hidden": tensors["layer_output"]}
    streams = run("mhc.expand_fwd", hidden, {"n": n})
    entered = run("mhc.pre_fwd", streams | parts, {**attrs, "save": True})
    saving = {**attrs, "save": True}
    out = run("mhc.seam_broadcast_fwd", hidden | parts, saving)
    entered["sqr"] = encode(entered["sqr"].decode() / n, "F32")  # of one row, not of n
    close(out, entered | streams)
    single = run("mhc.seam_broadcast_fwd", hidden | parts, {**saving, "form": "single_pass"})
    others = set(out) - {"layer_input"}
    equal(single, out, others)
    wanted = norm_by_hand(tensors["layer_output"], tensors, attrs)
    equal(single, {"layer_input": wanted}, ["layer_input"])
    plain = run("mhc.seam_broadcast_fwd", hidden | parts, attrs)
    assert set(plain) == {"residual", "layer_input", "pre", "post", "comb"}
    equal(plain, out, plain)


def mix_backward_by_parts(tensors, streams, attrs, running, **grads):
    """From the gradients of pre, post and comb back to those of streams and parameters; `running`:
    the gradient of the streams so far."""
    state, _ = mix_by_parts(tensors, streams, attrs)
    logits = run(
        "mhc.sinkhorn_bwd",
        {"grad_comb": grads["grad_comb"], "comb_logits": state["comb_logits"]},
        {"repeat": attrs["repeat"], "eps": attrs["sinkhorn_eps"]},
    )
    upstream = {**chosen(grads, "grad_pre", "grad_post"), **logits}
    split = run(
        "mhc.split_bwd",
        {**upstream, "mixes": state["mixes"], **chosen(tensors, "scale", "base")},
        {"post_mult": attrs["post_mult"]},
    )
    reduced = run(
        "mhc.reduce_partials_bwd",
        {"grad_mixes": split.pop("grad_mixes"), **chosen(state, "mul", "sqr")},
        {"k": streams.shape[-1] * streams.shape[-2], "norm_eps": attrs["norm_eps"]},
    )
    weights = chosen(tensors, "fn", "norm_weight")
    fn = run("mhc.merge_fwd", weights)["fn_merged"]
    product = {"residual": streams, "fn": fn, "grad_residual_acc": running}
    out = run("mhc.norm_fn_bwd", reduced | product)
    out |= run("mhc.merge_bwd", {**weights, "grad_fn_merged": out.pop("grad_fn")})
    return out | run("mhc.split_bwd_reduce", split)


def norm_backward_by_hand(grad, row, tensors, attrs):
    """Gradients of the collapsed row, rounded, and of the weight of its RMSNorm."""
    x, w = row.decode(), tensors["layer_norm_weight"].decode()
    rms = np.sqrt(
        np.mean(x**2, axis=-1, keepdims=True) + float(np.float32(attrs["layer_norm_eps"]))
    )
    normed, scaled = x / rms, grad.decode() * w
    of_row = (scaled - normed * np.mean(scaled * normed, axis=-1, keepdims=True)) / rms
    return encode(of_row, row.dtype), encode(np.sum(grad.decode() * normed, axis=0), "F32")


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_chain_is_the_unfused_backward(dtype, layer_norm):
    tensors, attrs = call_of(dtype, layer_norm)
    grads = gradients_of(tensors, dtype, "layer_input", "post", "comb", "residual")
    target = grads.pop("grad_residual")
    inputs = {**chosen(tensors, "residual", *PARAMETERS), **grads, "grad_residual_acc": target}
    chain = run("mhc.pre_bwd", inputs, {**attrs, "rounding": "chain"})

    state, _ = mix_by_parts(tensors, tensors["residual"], attrs)
    collapse = {**chosen(tensors, "residual"), "pre": state["pre"]}
    wanted = {}
    if layer_norm:
        row = run("mhc.pre_apply_fwd", collapse)["layer_input"]
        grads["grad_layer_input"], wanted["grad_layer_norm_weight"] = norm_backward_by_hand(
            grads["grad_layer_input"], row, tensors, attrs
        )
    collapse |= {**chosen(grads, "grad_layer_input"), "grad_residual_acc": target}
    back = run("mhc.pre_apply_bwd", collapse)
    grads |= {"grad_pre": back["grad_pre"]}
    wanted |= mix_backward_by_parts(
        tensors, tensors["residual"], attrs, back["grad_residual"], **grads
    )
    close(chain, wanted)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_chain_of_a_seam_is_pre_and_post(dtype, layer_norm):
    tensors, attrs = call_of(dtype, layer_norm)
    attrs |= {"rounding": "chain"}
    exit_inputs = chosen(tensors, *EXIT)
    grads = gradients_of(tensors, dtype, "layer_input", "next_post", "next_comb", "new_residual")
    parts = chosen(tensors, *PARAMETERS)
    out = run("mhc.seam_classic_bwd", {**exit_inputs, **parts, **grads}, attrs)

    entry = {
        "residual": run("mhc.post_fwd", exit_inputs)["new_residual"],
        **parts,
        "grad_residual_acc": grads["grad_new_residual"],
        "grad_layer_input": grads["grad_layer_input"],
        "grad_post": grads["grad_next_post"],
        "grad_comb": grads["grad_next_comb"],
    }
    wanted = run("mhc.pre_bwd", entry, attrs)
    running = {"grad_new_residual": wanted.pop("grad_residual")}
    equal(out, wanted | run("mhc.post_bwd", {**exit_inputs, **running}))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_chain_of_a_single_pass_seam_is_its_parts(dtype):
    """post, pre_apply with the given mix, and mixes that get no gradient from the collapse."""
    tensors, attrs = call_of(dtype)
    names = ("layer_input", "next_pre", "next_post", "next_comb", "new_residual")
    grads = gradients_of(tensors, dtype, *names)
    exit_inputs = chosen(tensors, *EXIT)
    inputs = {**chosen(tensors, *EXIT, "pre", *PARAMETERS), **grads}
    out = run("mhc.seam_single_pass_bwd", inputs, {**attrs, "rounding": "chain"})

    streams = run("mhc.post_fwd", exit_inputs)["new_residual"]
    collapse = {"residual": streams, "pre": tensors["pre"], **chosen(grads, "grad_layer_input")}
    back = run("mhc.pre_apply_bwd", {**collapse, "grad_residual_acc": grads["grad_new_residual"]})
    of_mixes = {f"grad_{x}": grads[f"grad_next_{x}"] for x in ("pre", "post", "comb")}
    wanted = mix_backward_by_parts(tensors, streams, attrs, back["grad_residual"], **of_mixes)
    running = {"grad_new_residual": wanted.pop("grad_residual")}
    wanted |= run("mhc.post_bwd", {**exit_inputs, **running})
    close(out, wanted | chosen(back, "grad_pre"))


# --- one rounding or several, saved or recomputed ------------------------------------------------


def backward_calls(dtype, layer_norm=False):
    """name -> inputs without saved state, the names under which state is saved."""
    tensors, attrs = call_of(dtype, layer_norm)
    parts = chosen(tensors, *PARAMETERS)
    tensors["hidden"] = tensors["layer_output"]
    nexts = ("next_post", "next_comb", "new_residual", "layer_input")
    single = chosen(tensors, *EXIT, "pre")
    return (
        {
            "mhc.pre": {
                **chosen(tensors, "residual"),
                **gradients_of(tensors, dtype, "layer_input", "post", "comb"),
            },
            "mhc.seam_classic": {
                **chosen(tensors, *EXIT),
                **gradients_of(tensors, dtype, *nexts),
            },
            "mhc.seam_single_pass": {**single, **gradients_of(tensors, dtype, "next_pre", *nexts)},
            "mhc.seam_broadcast": {
                **chosen(tensors, "hidden"),
                **gradients_of(tensors, dtype, "residual", "layer_input", "pre", "post", "comb"),
            },
        },
        parts,
        attrs,
    )


NAMES = ["mhc.pre", "mhc.seam_classic", "mhc.seam_single_pass", "mhc.seam_broadcast"]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_saved_state_is_the_recomputed_one(name, layer_norm, dtype):
    calls, parts, attrs = backward_calls(dtype, layer_norm)
    inputs = calls[name] | parts
    forward = {x: t for x, t in inputs.items() if not x.startswith("grad_")}
    made = run(f"{name}_fwd", forward, {**attrs, "save": True})
    prefix = "next_" if name in NAMES[1:3] else ""
    saved = {prefix + x: made[prefix + x] for x in SAVED} | (
        chosen(made, "new_residual") if prefix else {}
    )
    equal(run(f"{name}_bwd", inputs | saved, attrs), run(f"{name}_bwd", inputs, attrs))
    missing = {x: t for x, t in saved.items() if not x.endswith("mul")}
    with pytest.raises(ValueError, match="mixes"):
        run(f"{name}_bwd", inputs | missing, attrs)
    if prefix:
        with pytest.raises(ValueError, match="new_residual"):
            run(f"{name}_bwd", inputs | {"new_residual": saved["new_residual"]}, attrs)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("name", NAMES[:3])
def test_once_rounds_outputs_only(name, dtype):
    """The same call on the same numbers in F32 gives the same up to the rounding of the outputs;
    `chain` does not, and stays within three roundings of the running gradient."""
    calls, parts, attrs = backward_calls(dtype)
    inputs = calls[name] | parts
    forward = {x: t for x, t in inputs.items() if not x.startswith("grad_")}
    made = run(f"{name}_fwd", forward, {**attrs, "save": True})
    if name != "mhc.pre":  # the rounded streams, which F32 would not round
        inputs |= {f"next_{x}": made[f"next_{x}"] for x in SAVED} | chosen(made, "new_residual")
    wide = {x: encode(t.decode(), "F32") for x, t in inputs.items()}
    once, exact = run(f"{name}_bwd", inputs, attrs), run(f"{name}_bwd", wide, attrs)
    chain = run(f"{name}_bwd", inputs, {**attrs, "rounding": "chain"})
    differing = 0
    for x, t in exact.items():
        rows = x in ("grad_residual", "grad_layer_output")
        assert once[x].dtype == (dtype if rows else "F32")
        assert compare(once[x], encode(t.decode(), once[x].dtype), [0, 0]).passed, x
        differing += np.count_nonzero(once[x].data != chain[x].data)
        unit = {"BF16": 2.0**-8, "F16": 2.0**-11}[dtype]
        largest = np.abs(t.decode()).max()
        assert np.abs(chain[x].decode() - t.decode()).max() < 8 * unit * largest, x
    assert differing > 10


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_layer_norm_takes_the_rounded_row(dtype):
    """Both ways of one rounding point: fused gives the norm of the collapse's own output."""
    tensors, attrs = call_of(dtype, True, d=257)
    inputs = chosen(tensors, "residual", *PARAMETERS)
    out = run("mhc.pre_fwd", inputs, {**attrs, "save": True})
    row = run("mhc.pre_apply_fwd", {**chosen(tensors, "residual"), "pre": out["pre"]})
    wanted = norm_by_hand(row["layer_input"], tensors, attrs)
    assert compare(out["layer_input"], wanted, [0, 0]).passed
    exact = mhc_formulas.collapse(tensors["residual"].decode(), out["pre"].decode())
    unrounded = encode(
        mhc_formulas.rms_norm(exact, 1e-3) * tensors["layer_norm_weight"].decode(), dtype
    )
    assert np.mean(unrounded.data != wanted.data) > 0.05


@pytest.mark.parametrize("name", NAMES)
def test_absent_upstream_gradients_are_zeros(name):
    calls, parts, attrs = backward_calls("F32", True)
    inputs = calls[name] | parts
    upstream = [x for x in inputs if x.startswith("grad_")]
    for left in [(), *((x,) for x in upstream)]:
        some = {x: t for x, t in inputs.items() if x not in upstream or x in left}
        zeros = {x: encode(np.zeros(inputs[x].shape), "F32") for x in upstream if x not in left}
        out = run(f"{name}_bwd", some, attrs)
        equal(out, run(f"{name}_bwd", some | zeros, attrs))
        assert bool(left) == any(np.any(t.decode()) for t in out.values())


@pytest.mark.parametrize("name", [*NAMES, "mhc.head"])
def test_targets_of_accumulation(name):
    calls, parts, attrs = backward_calls("F32", True)
    if name == "mhc.head":
        tensors, _ = call_of("F32")
        parts = chosen(tensors, "norm_weight") | {"fn": encode(tensors["fn"].data[:3], "F32")}
        parts |= singles({"scale": np.full(1, 0.7), "base": np.arange(3.0)})
        calls[name] = {**chosen(tensors, "residual"), "grad_hidden": tensors["layer_output"]}
        attrs = {"norm_eps": 1e-6, "pre_eps": 1e-6}
    inputs = calls[name] | parts
    shapes = {f"grad_{x}": t.shape for x, t in parts.items()}
    if name == "mhc.pre":
        shapes["grad_residual"] = inputs["residual"].shape
    with_target(f"{name}_bwd", inputs, attrs, shapes)
    del inputs["norm_weight"]
    surplus = {"grad_norm_weight_acc": encode(np.zeros(39), "F32")}
    with pytest.raises(ValueError, match="grad_norm_weight_acc"):
        run(f"{name}_bwd", inputs | surplus, attrs)


@pytest.mark.parametrize("name", [*NAMES[:3], "mhc.head"])
def test_tf32_is_fp32_with_a_rounded_fn(name):
    """The merged fn is rounded, nothing else is; broadcast rounds its sum over streams."""
    tensors, attrs = call_of("BF16", norm_weight=False)
    parts = chosen(tensors, *PARAMETERS)
    calls, _, _ = backward_calls("BF16")
    if name == "mhc.head":
        parts = {"fn": encode(tensors["fn"].data[:3], "F32")}
        parts |= singles({"scale": np.full(1, 0.7), "base": np.arange(3.0)})
        calls[name] = {**chosen(tensors, "residual"), "grad_hidden": tensors["layer_output"]}
        attrs = {"norm_eps": 1e-6, "pre_eps": 1e-6}
    inputs = calls[name] | parts
    rounded = {"fn": encode(nearest(parts["fn"].decode(), "TF32"), "F32")}
    low = {**attrs, "precision": "tf32"}
    out = run(f"{name}_bwd", inputs, low)
    equal(out, run(f"{name}_bwd", inputs | rounded, attrs))
    assert np.any(out["grad_fn"].data != run(f"{name}_bwd", inputs, attrs)["grad_fn"].data)
    forward = {x: t for x, t in inputs.items() if not x.startswith("grad_")}
    equal(run(f"{name}_fwd", forward, low), run(f"{name}_fwd", forward | rounded, attrs))


def test_tf32_of_broadcast_rounds_after_the_sum():
    tensors, attrs = call_of("F32")
    merged = run("mhc.merge_fwd", chosen(tensors, "fn", "norm_weight"))["fn_merged"].decode()
    total = merged.reshape(15, 3, 13)
    total = nearest(nearest(total[:, 0] + total[:, 1], "F32") + total[:, 2], "F32")
    inputs = {"hidden": tensors["layer_output"], **chosen(tensors, *PARAMETERS)}
    low = {**attrs, "precision": "tf32", "save": True}
    mul = run("mhc.seam_broadcast_fwd", inputs, low)["mul"]
    agree(mul, tensors["layer_output"].decode() @ nearest(total, "TF32").T, absolute=0.0)


def test_broadcast_sums_streams_in_f32():
    """1 + 2^-11 is a tie of TF32; 2^-25 more would decide it, but is lost in the F32 sum."""
    inputs = {"hidden": np.ones((1, 1)), "fn": np.tile([1 + 2.0**-11, 2.0**-25], (8, 1))}
    inputs |= {"scale": np.ones(3), "base": np.zeros(8)}
    low = {**TRAIN, "precision": "tf32", "save": True}
    assert np.all(run("mhc.seam_broadcast_fwd", singles(inputs), low)["mul"].decode() == 1)


# --- a stack of sublayers ------------------------------------------------------------------------


def test_single_pass_stack():
    """X_{l+1} = B_l X_l + C_l F(A_{l-1} X_l), A of the first layer one-hot on stream 0."""
    n, d, tokens = 3, 5, 4
    layers = [parameters(random(71, layer), n, d, True, False) for layer in range(4)]
    hidden = single_numbers(random(72), tokens, d)
    attrs = rounded_attributes(TRAIN)

    streams, before = np.stack([hidden] * n, axis=1), np.eye(n)[[0] * tokens]
    for layer in layers[:-1]:
        after, post, comb = mhc_formulas.coefficients(streams, layer, attrs)
        output = np.tanh(mhc_formulas.collapse(streams, before))
        streams, before = mhc_formulas.post(output, streams, post, comb), after

    first = run(
        "mhc.seam_broadcast_fwd",
        singles({"hidden": hidden, **layers[0]}),
        {**TRAIN, "form": "single_pass"},
    )
    state = {f"next_{x}": first[x] for x in ("pre", "post", "comb")}
    state |= {"new_residual": first["residual"], "layer_input": first["layer_input"]}
    for layer in layers[1:]:
        inputs = {x: state[f"next_{x}"] for x in ("pre", "post", "comb")}
        output = encode(np.tanh(state["layer_input"].decode()), "F32")
        inputs |= {"layer_output": output, "residual": state["new_residual"]}
        state = run("mhc.seam_single_pass_fwd", inputs | singles(layer), TRAIN)
    agree(state["new_residual"], streams, ulp=4, absolute=3e-6)
    agree(state["layer_input"], mhc_formulas.collapse(streams, before), ulp=4, absolute=3e-6)


def test_classic_stack_with_a_head():
    """Round trip through one stream: expand, sublayers, head."""
    n, d, tokens = 4, 6, 3
    layers = [parameters(random(73, layer), n, d, True, True) for layer in range(3)]
    attrs = with_norm(TRAIN, True)
    hidden = single_numbers(random(74), tokens, d)
    head = {"fn": layers[0]["fn"][:n], "scale": np.full(1, 0.5), "base": np.linspace(-1, 1, n)}
    of_head = {"norm_eps": 1e-6, "pre_eps": 1e-6}

    streams = np.stack([hidden] * n, axis=1)
    for layer in layers:
        made = mhc_formulas.pre({"residual": streams, **layer}, rounded_attributes(attrs))
        output = np.tanh(made["layer_input"])
        streams = mhc_formulas.post(output, streams, made["post"], made["comb"])
    wanted = mhc_formulas.head({"residual": streams, **head}, rounded_attributes(of_head))

    state = run("mhc.seam_broadcast_fwd", singles({"hidden": hidden, **layers[0]}), attrs)
    state = {"new_residual": state["residual"]} | {
        x if x == "layer_input" else f"next_{x}": state[x] for x in ("layer_input", "post", "comb")
    }
    for layer in layers[1:]:
        inputs = {x: state[f"next_{x}"] for x in ("post", "comb")}
        output = encode(np.tanh(state["layer_input"].decode()), "F32")
        inputs |= {"layer_output": output, "residual": state["new_residual"]}
        state = run("mhc.seam_classic_fwd", inputs | singles(layer), attrs)
    last = {
        "layer_output": encode(np.tanh(state["layer_input"].decode()), "F32"),
        "residual": state["new_residual"],
        "post": state["next_post"],
        "comb": state["next_comb"],
    }
    residual = run("mhc.post_fwd", last)["new_residual"]
    out = run("mhc.head_fwd", {"residual": residual, **singles(head)}, of_head)
    agree(out["hidden"], wanted, ulp=4, absolute=3e-6)
