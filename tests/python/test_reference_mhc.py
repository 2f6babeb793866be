"""mHC pieces of the NumPy reference: gradients against central differences, and relations."""

import mhc_formulas
import numpy as np
import pytest
from engramhc.reference import run
from engramhc.reference.dtypes import encode, nearest
from engramhc.reference.tolerance import compare

from finite_differences import (
    EXACT,
    check_directions,
    check_gradients,
    single_numbers,
    singles,
)

# Tokens (with several leading dimensions), streams, width.
SHAPES = [
    ((0,), 4, 3),
    ((1,), 1, 7),
    ((2,), 2, 5),
    ((2, 2), 3, 3),
    ((1,), 8, 1),
    ((3,), 5, 3),
    ((2,), 7, 2),
    ((2,), 6, 1),
]
MANY = [((31,), 4, 5), ((33,), 3, 7)]


def random(*seeds):
    return np.random.default_rng([20250301, *seeds])


def whole(generator, *shape):
    return generator.integers(-4, 5, shape).astype(np.float64)


def decoded(outputs):
    return {name: t.decode() for name, t in outputs.items()}


def agree(got, wanted, ulp=1, absolute=1e-7):
    result = compare(got, encode(wanted, got.dtype), [ulp, absolute])
    assert result.passed, result.text


def with_target(name, inputs, attrs, shapes):
    """Every accumulation target adds to its gradient alone: `shapes` by the gradient's name."""
    plain = run(name, inputs, attrs)
    half_unit = {x: 2.0**-24 * np.abs(t.decode()).max(initial=0.0) for x, t in plain.items()}
    targets = {f"{x}_acc": whole(random(7), *shape) for x, shape in shapes.items()}
    for x in shapes:
        more = run(name, {**inputs, **singles({f"{x}_acc": targets[f"{x}_acc"]})}, attrs)
        for output, tensor in plain.items():
            wanted = tensor.decode() + (targets[f"{x}_acc"] if output == x else 0.0)
            agree(more[output], wanted, absolute=half_unit[output])


# --- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("shape, n, d", SHAPES + MANY)
def test_expand(shape, n, d, dtype):
    """Copies bit for bit, NaN payloads too; the backward is the sum over the copies."""
    g = random(1)
    hidden = encode(g.standard_normal((*shape, d)), dtype)
    streams = run("mhc.expand_fwd", {"hidden": hidden}, {"n": n})["residual"]
    assert streams.shape == (*shape, n, d)
    for m in range(n):
        assert np.array_equal(streams.data[..., m, :], hidden.data)
    grad = encode(whole(g, *shape, n, d), dtype)
    out = run("mhc.expand_bwd", {"grad_residual": grad})["grad_hidden"]
    agree(out, sum(grad.decode()[..., m, :] for m in range(n)), absolute=0.0)


@pytest.mark.parametrize("shape, n, d", SHAPES + MANY)
def test_pre_apply(shape, n, d):
    """Bilinear: differences of whole numbers are exact."""
    g = random(2)
    arrays = {"residual": whole(g, *shape, n, d), "pre": whole(g, *shape, n)}
    upstream, target = whole(g, *shape, d), whole(g, *shape, n, d)

    def loss(a):
        collapsed = mhc_formulas.collapse(a["residual"], a["pre"])
        return np.sum(collapsed * upstream) + np.sum(target * a["residual"])

    inputs = singles({**arrays, "grad_layer_input": upstream, "grad_residual_acc": target})
    forward = run("mhc.pre_apply_fwd", singles(arrays))["layer_input"]
    agree(forward, mhc_formulas.collapse(*arrays.values()), absolute=0.0)
    out = run("mhc.pre_apply_bwd", inputs)
    check_gradients(loss, arrays, {x: out[f"grad_{x}"] for x in arrays}, step=1.0, tolerance=0.0)


@pytest.mark.parametrize("shape, n, d", SHAPES + MANY)
def test_post(shape, n, d):
    g = random(3)
    arrays = {
        "layer_output": whole(g, *shape, d),
        "residual": whole(g, *shape, n, d),
        "post": whole(g, *shape, n),
        "comb": whole(g, *shape, n, n),
    }
    upstream = whole(g, *shape, n, d)
    for inplace in (False, True):
        out = run("mhc.post_fwd", singles(arrays), {"inplace": inplace})["new_residual"]
        agree(out, mhc_formulas.post(*arrays.values()), absolute=0.0)
    out = run("mhc.post_bwd", singles({**arrays, "grad_new_residual": upstream}))
    check_gradients(
        lambda a: np.sum(upstream * mhc_formulas.post(*a.values())),
        arrays,
        {x: out[f"grad_{x}"] for x in arrays},
        step=1.0,
        tolerance=0.0,
    )


def test_comb_is_input_stream_then_output_stream():
    """Stream 0 sent to stream 2 alone."""
    comb = np.zeros((1, 3, 3))
    comb[0, 0, 2] = 1.0
    inputs = {"layer_output": np.zeros((1, 2)), "residual": np.arange(6.0).reshape(1, 3, 2)}
    inputs |= {"post": np.zeros((1, 3)), "comb": comb}
    out = run("mhc.post_fwd", singles(inputs))["new_residual"].decode()
    assert out.tolist() == [[[0, 0], [0, 0], [0, 1]]]


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_half_precision_rounds_outputs_once(dtype):
    """Activations in half precision change the rounding of the outputs and nothing else."""
    g = random(4)
    rows = {x: g.standard_normal((5, 3, 7)) for x in ("residual", "grad_new_residual")}
    rows |= {x: g.standard_normal((5, 7)) for x in ("layer_output", "grad_layer_input")}
    rows["grad_residual_acc"] = g.standard_normal((5, 3, 7))
    rows = {x: encode(array, dtype) for x, array in rows.items()}
    mixes = {"pre": (5, 3), "post": (5, 3), "comb": (5, 3, 3)}
    mixes = singles({x: g.standard_normal(shape) for x, shape in mixes.items()})
    for name, used in {
        "mhc.expand_bwd": {"grad_residual": rows["residual"]},
        "mhc.pre_apply_fwd": {"residual", "pre"},
        "mhc.pre_apply_bwd": {"grad_layer_input", "residual", "pre", "grad_residual_acc"},
        "mhc.post_fwd": {"layer_output", "residual", "post", "comb"},
        "mhc.post_bwd": {"grad_new_residual", "layer_output", "residual", "post", "comb"},
    }.items():
        inputs = used if isinstance(used, dict) else {x: (rows | mixes)[x] for x in used}
        wide = {x: encode(t.decode(), "F32") for x, t in inputs.items()}
        narrow, exact = run(name, inputs), run(name, wide)
        for x, t in exact.items():
            coefficient = x in ("grad_pre", "grad_post", "grad_comb")
            assert narrow[x].dtype == ("F32" if coefficient else dtype), x
            assert compare(narrow[x], encode(t.decode(), narrow[x].dtype), [0, 0]).passed, x


# --- projection ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, width", [(1, 1), (3, 7), (24, 5), (80, 3)])
def test_merge(rows, width):
    g = random(5)
    arrays = {"fn": whole(g, rows, width), "norm_weight": whole(g, width)}
    upstream = whole(g, rows, width)
    merged = run("mhc.merge_fwd", singles(arrays))["fn_merged"]
    agree(merged, arrays["fn"] * arrays["norm_weight"], absolute=0.0)
    inputs = singles({**arrays, "grad_fn_merged": upstream})
    out = run("mhc.merge_bwd", inputs)
    gradients = {x: out[f"grad_{x}"] for x in arrays}
    check_gradients(
        lambda a: np.sum(upstream * a["fn"] * a["norm_weight"]), arrays, gradients, 1.0, 0.0
    )
    with_target(
        "mhc.merge_bwd", inputs, {}, {"grad_fn": (rows, width), "grad_norm_weight": (width,)}
    )


@pytest.mark.parametrize(
    "width, splits, bounds",
    [
        (7168, 16, [448 * s for s in range(17)]),
        (640, 4, [0, 192, 384, 512, 640]),  # 10 blocks: 3, 3, 2, 2
        (650, 4, [0, 192, 384, 576, 650]),  # 11 blocks, the last of 10 columns
        (100, 5, [0, 64, 100, 100, 100, 100]),  # more splits than blocks
        (63, 1, [0, 63]),
    ],
)
def test_explicit_splits(width, splits, bounds):
    """Blocks of 64 columns, the first splits take one more; splits without columns are zeros."""
    x, fn = whole(random(6), 2, 1, width), whole(random(7), 3, width)
    out = decoded(run("mhc.prenorm_gemm", singles({"residual": x, "fn": fn}), {"splits": splits}))
    assert out["mul_partial"].shape == (splits, 2, 3) and out["sqr_partial"].shape == (splits, 2)
    for s in range(splits):
        part = x[:, 0, bounds[s] : bounds[s + 1]]
        assert np.array_equal(out["mul_partial"][s], part @ fn[:, bounds[s] : bounds[s + 1]].T), s
        assert np.array_equal(out["sqr_partial"][s], np.sum(part**2, axis=-1)), s


@pytest.mark.parametrize("splits", [0, 1, 2, 5])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_splits_and_groups_intersect(splits, groups):
    n, d = 3, 60
    x, fn = whole(random(8), 4, n, d), whole(random(9), 5, n * d)
    attrs = {"splits": splits, "groups": groups}
    out = run("mhc.prenorm_gemm", singles({"residual": x, "fn": fn}), attrs)
    by_group = (4, groups, n * d // groups)
    mul = np.einsum("tgk,mgk->tgm", x.reshape(by_group), fn.reshape(5, *by_group[1:]))
    sqr = np.sum(x.reshape(by_group) ** 2, axis=-1)
    if groups == 1:
        mul, sqr = mul[:, 0], sqr[:, 0]
    assert out["mul_partial"].shape[0] == max(1, splits)
    assert np.array_equal(out["mul_partial"].decode().sum(axis=0), mul)
    assert np.array_equal(out["sqr_partial"].decode().sum(axis=0), sqr)


def test_groups_divide_the_width():
    inputs = singles({"residual": np.ones((1, 2, 3)), "fn": np.ones((1, 6))})
    with pytest.raises(ValueError, match="groups"):
        run("mhc.prenorm_gemm", inputs, {"groups": 4})


def test_tf32_rounds_fn_and_nothing_else():
    g = random(10)
    x = single_numbers(g, 3, 2, 9)
    fn = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-23, -1 - 2.0**-10])
    rounded = np.array([1.0, 1 + 2.0**-9, 1 + 2.0**-10, -1 - 2.0**-10])  # ties to even
    assert np.array_equal(nearest(fn, "TF32"), rounded)
    special = np.array([np.inf, -np.inf, np.nan, 2.0**-149, 2.0**-136, -0.0, 2.0**128 - 2.0**104])
    wanted = [np.inf, -np.inf, np.nan, 0.0, 2.0**-136, -0.0, np.inf]
    assert nearest(special, "TF32").tobytes() == np.array(wanted).tobytes()

    fn = single_numbers(g, 4, 18)
    inputs = singles({"residual": x, "fn": fn})
    low = run("mhc.prenorm_gemm", inputs, {"precision": "tf32"})
    exact = run("mhc.prenorm_gemm", {**inputs, "fn": encode(nearest(fn, "TF32"), "F32")})
    for name in exact:
        assert np.array_equal(low[name].data, exact[name].data)
    assert not np.array_equal(
        low["mul_partial"].data, run("mhc.prenorm_gemm", inputs)["mul_partial"].data
    )
    grads = singles({"grad_mul": single_numbers(g, 3, 4), "grad_sqr": single_numbers(g, 3)})
    low = run("mhc.norm_fn_bwd", inputs | grads, {"precision": "tf32"})
    exact = run("mhc.norm_fn_bwd", inputs | grads | {"fn": encode(nearest(fn, "TF32"), "F32")})
    for name in exact:
        assert np.array_equal(low[name].data, exact[name].data)


PROJECTIONS = [
    # tokens, streams, width, mixes, groups
    (0, 2, 3, 8, 1),
    (1, 1, 7, 3, 1),
    (2, 3, 4, 15, 1),
    (2, 3, 4, 15, 2),
    (3, 4, 3, 4, 4),
    (1, 8, 1, 80, 1),
    (2, 5, 3, 35, 3),
    (2, 2, 3, 8, 6),
]


def project(a, k, eps, rms):
    """mixes of (mul, sqr) with groups as an axis."""
    size = a["sqr"] / (k / a["sqr"].shape[-1])
    r = 1 / (np.sqrt(size) + eps) if rms == "norm" else (size + eps) ** -0.5
    return np.sum(a["mul"] * r[..., None], axis=-2)


@pytest.mark.parametrize("rms", ["mean", "norm"])
@pytest.mark.parametrize("eps", [1e-20, 1e-6, 0.01])
@pytest.mark.parametrize("tokens, n, d, rows, groups", PROJECTIONS)
def test_reduce_partials(tokens, n, d, rows, groups, eps, rms):
    g = random(11)
    k, splits = n * d, 3
    parts = {
        "mul_partial": single_numbers(g, splits, tokens, groups, rows),
        "sqr_partial": np.abs(single_numbers(g, splits, tokens, groups)),
    }
    arrays = {"mul": parts["mul_partial"].sum(0), "sqr": parts["sqr_partial"].sum(0)}
    arrays = {x: a.astype(np.float32).astype(np.float64) for x, a in arrays.items()}
    upstream = single_numbers(g, tokens, rows)
    attrs = {"k": k, "norm_eps": eps, "rms": rms}

    def shaped(tensors):
        if groups > 1:
            return singles(tensors)
        axes = {"mul_partial": 2, "sqr_partial": 2, "mul": 1, "sqr": 1}
        return singles({x: a.squeeze(axes[x]) for x, a in tensors.items()})

    out = run("mhc.reduce_partials_fwd", shaped(parts), attrs)
    agree(out["mixes"], project({x: parts[f"{x}_partial"].sum(0) for x in arrays}, k, eps, rms))
    for x, t in shaped(arrays).items():
        agree(out[x], t.decode())
    inputs = {**shaped(arrays), "grad_mixes": encode(upstream, "F32")}
    out = decoded(run("mhc.reduce_partials_bwd", inputs, attrs))
    gradients = {x: encode(out[f"grad_{x}"].reshape(a.shape), "F32") for x, a in arrays.items()}
    check_gradients(lambda a: np.sum(upstream * project(a, k, eps, rms)), arrays, gradients)


@pytest.mark.parametrize("rms", ["mean", "norm"])
@pytest.mark.parametrize("eps", [1e-20, 1e-6])
def test_a_token_of_zeros_has_no_gradient(rms, eps):
    zeros = singles({"mul": np.zeros((2, 3)), "sqr": np.zeros(2)})
    attrs = {"k": 6, "norm_eps": eps, "rms": rms}
    partials = {f"{x}_partial": encode(t.decode()[None], "F32") for x, t in zeros.items()}
    assert not np.any(run("mhc.reduce_partials_fwd", partials, attrs)["mixes"].decode())
    out = run(
        "mhc.reduce_partials_bwd", {**zeros, "grad_mixes": encode(np.ones((2, 3)), "F32")}, attrs
    )
    assert not np.any(out["grad_sqr"].decode())
    assert np.all(np.isfinite(out["grad_mul"].decode()) & (out["grad_mul"].decode() > 0))


@pytest.mark.parametrize("tokens, n, d, rows, groups", [*PROJECTIONS, (33, 2, 3, 8, 1)])
def test_norm_fn(tokens, n, d, rows, groups):
    """Quadratic in the streams and linear in fn: differences of whole numbers are exact."""
    g = random(12)
    arrays = {"residual": whole(g, tokens, n, d), "fn": whole(g, rows, n * d)}
    of_mul, of_sqr = whole(g, tokens, groups, rows), whole(g, tokens, groups)
    target = whole(g, tokens, n, d)

    def loss(a):
        x = a["residual"].reshape(tokens, groups, n * d // groups)
        mul = np.einsum("tgk,mgk->tgm", x, a["fn"].reshape(rows, *x.shape[1:]))
        value = np.sum(of_mul * mul) + np.sum(of_sqr * np.sum(x * x, axis=-1))
        return value + np.sum(target * a["residual"])

    grads = {"grad_mul": of_mul, "grad_sqr": of_sqr}
    if groups == 1:
        grads = {x: a.squeeze(1) for x, a in grads.items()}
    inputs = singles({**arrays, **grads, "grad_residual_acc": target})
    out = run("mhc.norm_fn_bwd", inputs)
    check_gradients(loss, arrays, {x: out[f"grad_{x}"] for x in arrays}, step=1.0, tolerance=0.0)
    with_target("mhc.norm_fn_bwd", inputs, {}, {"grad_fn": (rows, n * d)})


@pytest.mark.parametrize("rms", ["mean", "norm"])
@pytest.mark.parametrize("groups", [1, 2])
def test_projection_end_to_end(rms, groups):
    """merge, product, reduce against the formula that norms before the product; backwards too."""
    g = random(13)
    tokens, n, d, rows = 3, 4, 3, 8
    arrays = {
        "residual": single_numbers(g, tokens, n, d),
        "fn": single_numbers(g, rows, n * d),
        "norm_weight": single_numbers(g, n * d, center=1.0),
    }
    upstream = single_numbers(g, tokens, rows)
    t = singles(arrays)
    attrs = {"k": n * d, "norm_eps": 1e-6, "rms": rms}
    weights = {x: t[x] for x in ("fn", "norm_weight")}
    merged = run("mhc.merge_fwd", weights)["fn_merged"]
    product = {"residual": t["residual"], "fn": merged}
    partials = run("mhc.prenorm_gemm", product, {"groups": groups, "splits": 2})
    state = run("mhc.reduce_partials_fwd", partials, attrs)

    def forward(a):
        return mhc_formulas.mixes(*a.values(), 1e-6, rms, groups)

    agree(state.pop("mixes"), forward(arrays), absolute=2e-6)
    grads = run("mhc.reduce_partials_bwd", {**state, "grad_mixes": encode(upstream, "F32")}, attrs)
    out = run("mhc.norm_fn_bwd", product | grads)
    out |= run("mhc.merge_bwd", {**weights, "grad_fn_merged": out.pop("grad_fn")})
    check_gradients(
        lambda a: np.sum(upstream * forward(a)),
        arrays,
        {x: out[f"grad_{x}"] for x in arrays},
        tolerance=5 * EXACT,
    )


def test_norm_after_the_product_is_safe_but_not_in_bf16():
    """What breaks the equality of the two orders is a normalised row that is rounded to bf16."""
    g = random(14)
    x, fn = g.standard_normal((16, 4, 320)), g.standard_normal((24, 1280))
    before = mhc_formulas.mixes(x, fn, 1.0, 1e-6)
    flat = x.reshape(16, 1280)
    after = (flat @ fn.T) / np.sqrt(np.mean(flat**2, axis=-1) + 1e-6)[:, None]
    size = np.abs(before).max()
    assert np.abs(after - before).max() < 1e-14 * size
    low = nearest(mhc_formulas.rms_norm(flat, 1e-6), "BF16") @ fn.T
    assert 3e-4 < np.abs(low - before).max() / size < 1e-2


# --- mixes ---------------------------------------------------------------------------------------


def mix_arrays(g, shape, n):
    width = n * n + 2 * n
    return {
        "mixes": single_numbers(g, *shape, width),
        "scale": single_numbers(g, 3),
        "base": single_numbers(g, width),
    }


@pytest.mark.parametrize("post_mult", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("pre_eps", [0.0, 1e-2])
@pytest.mark.parametrize("shape, n, d", SHAPES + MANY)
def test_split(shape, n, d, pre_eps, post_mult):
    g = random(15, n)
    arrays = mix_arrays(g, shape, n)
    upstream = {x: single_numbers(g, *shape, n) for x in ("pre", "post")}
    upstream["comb_logits"] = single_numbers(g, *shape, n, n)
    eps = float(np.float32(pre_eps))

    def forward(a):
        return dict(zip(upstream, mhc_formulas.split(*a.values(), eps, post_mult)))

    def loss(a):
        return sum(np.sum(upstream[x] * value) for x, value in forward(a).items())

    attrs = {"post_mult": post_mult}
    out = run("mhc.split_fwd", singles(arrays), {**attrs, "pre_eps": pre_eps})
    for x, value in forward(arrays).items():
        agree(out[x], value)
    inputs = singles({**arrays, **{f"grad_{x}": a for x, a in upstream.items()}})
    out = run("mhc.split_bwd", inputs, attrs)
    partials = {x: t for x, t in out.items() if x.endswith("_partial")}
    out |= run("mhc.split_bwd_reduce", partials)
    gradients = {x: out[f"grad_{x}"] for x in arrays}
    (check_directions if len(shape) == 1 and shape[0] > 30 else check_gradients)(
        loss, arrays, gradients, tolerance=5 * EXACT
    )


@pytest.mark.parametrize("partials", [0, 1, 5])
@pytest.mark.parametrize("scales, width", [(3, 24), (1, 4)])
def test_split_bwd_reduce(partials, scales, width):
    g = random(16)
    arrays = {
        "grad_scale_partial": whole(g, partials, scales),
        "grad_base_partial": whole(g, partials, width),
    }
    out = run("mhc.split_bwd_reduce", singles(arrays))
    for x, t in out.items():
        agree(t, sum(arrays[f"{x}_partial"], np.zeros(t.shape)), absolute=0.0)
    shapes = {"grad_scale": (scales,), "grad_base": (width,)}
    with_target("mhc.split_bwd_reduce", singles(arrays), {}, shapes)


def test_split_refuses_a_width_that_is_no_mix():
    inputs = singles({"mixes": np.zeros((1, 9)), "scale": np.zeros(3), "base": np.zeros(9)})
    with pytest.raises(ValueError, match="mixes"):
        run("mhc.split_fwd", inputs, {"pre_eps": 0.0, "post_mult": 1.0})


@pytest.mark.parametrize("shape, n, d", SHAPES + MANY)
def test_head_mix(shape, n, d):
    g = random(17)
    arrays = {
        "mixes": single_numbers(g, *shape, n),
        "scale": single_numbers(g, 1),
        "base": single_numbers(g, n),
    }
    upstream = single_numbers(g, *shape, n)

    def forward(a):
        return mhc_formulas.sigmoid(a["mixes"] * a["scale"] + a["base"]) + 1e-2

    out = run("mhc.head_mix_fwd", singles(arrays), {"pre_eps": 1e-2})
    agree(out["pre"], forward(arrays))
    inputs = singles({**arrays, "grad_pre": upstream})
    out = run("mhc.head_mix_bwd", inputs)
    check_gradients(
        lambda a: np.sum(upstream * forward(a)), arrays, {x: out[f"grad_{x}"] for x in arrays}
    )
    with_target("mhc.head_mix_bwd", inputs, {}, {"grad_scale": (1,), "grad_base": (n,)})


def test_sigmoid_of_large_arguments():
    """Neither branch overflows, and gradients are exactly 0 there."""
    inputs = singles({"mixes": [[1000.0, -1000.0]], "scale": [1.0], "base": [0.0, 0.0]})
    assert run("mhc.head_mix_fwd", inputs, {"pre_eps": 0.0})["pre"].decode().tolist() == [[1, 0]]
    out = run("mhc.head_mix_bwd", inputs | singles({"grad_pre": [[1.0, 1.0]]}))
    assert not np.any(out["grad_mixes"].decode())


# --- NaN and infinities --------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_special_values_stay_in_their_token(value):
    """One NaN or infinity in the streams or mixes of a token touches no other token."""
    g = random(18)
    streams = g.standard_normal((3, 2, 5))
    streams[1, 0, 2] = value
    mixes = g.standard_normal((3, 8))
    mixes[1] = value
    fixed = singles({"pre": g.standard_normal((3, 2)), "comb": g.standard_normal((3, 2, 2))})
    rows = {"residual": encode(streams, "BF16")}
    more = {"layer_output": encode(g.standard_normal((3, 5)), "BF16"), "post": fixed["pre"]}
    split = singles({"mixes": mixes, "scale": np.ones(3), "base": np.zeros(8)})
    for out in (
        run("mhc.pre_apply_fwd", {**rows, "pre": fixed["pre"]}),
        run("mhc.post_fwd", {**rows, **more, "comb": fixed["comb"]}),
        run("mhc.split_fwd", split, {"pre_eps": 0.0, "post_mult": 1.0}),
    ):
        for name, t in out.items():
            finite = np.isfinite(t.decode().reshape(3, -1))
            assert finite[[0, 2]].all(), name
            if name in ("layer_input", "new_residual", "comb_logits"):
                assert not finite[1].all(), name
