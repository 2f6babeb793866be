"""Backward operators of the NumPy reference against central differences of plain forward formulas.

The forward formulas are written here once more, in float64 and from the contract's text; the
reference's own forward is compared with them too.
"""

import numpy as np
import pytest
from engramhc.reference import run
from engramhc.reference.dtypes import Tensor, encode
from engramhc.reference.tolerance import compare

from finite_differences import ROUNDED, check_gradients, single_numbers, singles

EPS, CLAMP, CONV_EPS = 1e-6, 1e-6, 1e-5


# --- linear in every input: differences of whole numbers are exact -------------------------------


def whole(generator, *shape):
    return generator.integers(-4, 5, shape).astype(np.float64)


@pytest.mark.parametrize("indices", ["I32", "I64"])
@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gather(indices, shape, accumulate):
    g = np.random.default_rng(1)
    wanted = encode(g.integers(-1, 4, (*shape, 3)), indices)
    arrays = {"table": whole(g, 6, 2)}
    upstream, target = whole(g, *shape, 6), whole(g, 6, 2)

    def loss(a):
        out = run("engram.gather_fwd", {"table": encode(a["table"], "F32"), "indices": wanted})
        return np.sum(out["embedding"].decode() * upstream) + accumulate * np.sum(
            a["table"] * target
        )

    inputs = {"grad_embedding": encode(upstream, "BF16"), "indices": wanted}
    if accumulate:
        inputs["grad_table_acc"] = encode(target, "F32")
    out = run("engram.gather_bwd", inputs, {} if accumulate else {"rows": 6})
    check_gradients(loss, arrays, {"table": out["grad_table"]}, step=1.0, tolerance=0.0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0,), (1,), (4,), (2, 2)])
def test_kv_projection(shape, bias):
    g = np.random.default_rng(2)
    rows, d, inner = 3, 2, 5
    arrays = {"embedding": whole(g, *shape, inner), "weight": whole(g, rows, d, inner)}
    arrays["bias"] = whole(g, rows, d)
    upstream = whole(g, *shape, rows, d)

    def loss(a):
        return np.sum(run("engram.kv_projection_fwd", singles(a))["kv"].decode() * upstream)

    inputs = {
        "grad_kv": encode(upstream, "F32"),
        **singles({name: arrays[name] for name in ("embedding", "weight")}),
    }
    out = run("engram.kv_projection_bwd", inputs)
    gradients = {name: out[f"grad_{name}"] for name in arrays}
    check_gradients(loss, arrays, gradients, step=1.0, tolerance=0.0)

    target = {"grad_weight_acc": whole(g, rows, d, inner), "grad_bias_acc": whole(g, rows, d)}
    again = run("engram.kv_projection_bwd", inputs | singles(target))
    for name, values in target.items():
        name = name.removesuffix("_acc")
        assert np.array_equal(again[name].decode(), values + out[name].decode())


@pytest.mark.parametrize("partials", [0, 1, 3])
def test_grad_w_reduce(partials):
    g = np.random.default_rng(3)
    pieces, target = whole(g, partials, 2, 3), whole(g, 2, 3)
    arrays = {"weight_hidden": whole(g, 2, 3), "weight_embed": whole(g, 2, 3)}

    def loss(a):
        fused = run("engram.fused_weight", singles(a))["weight_fused"].decode()
        return np.sum(fused * pieces)

    inputs = {"grad_weight_partial": encode(pieces, "F32"), **singles(arrays)}
    out = run("engram.grad_w_reduce", inputs)
    check_gradients(loss, arrays, {x: out[f"grad_{x}"] for x in arrays}, step=1.0, tolerance=0.0)
    more = run("engram.grad_w_reduce", {**inputs, "grad_weight_embed_acc": encode(target, "F32")})
    assert np.array_equal(more["grad_weight_hidden"].data, out["grad_weight_hidden"].data)
    assert np.array_equal(
        more["grad_weight_embed"].decode(), target + out["grad_weight_embed"].decode()
    )


# --- gate ----------------------------------------------------------------------------------------


def scaled_dot(x, k, weight):
    """The scaled dot product of the two normalised rows."""
    rows = [a / np.sqrt(np.mean(a * a, axis=-1, keepdims=True) + EPS) for a in (x, k)]
    return np.sum(rows[0] * weight * rows[1], axis=-1) / np.sqrt(x.shape[-1])


def plain_alpha(x, k, weight, clamp=CLAMP):
    z = scaled_dot(x, k, weight)
    return 1 / (1 + np.exp(-np.copysign(np.sqrt(np.maximum(np.abs(z), clamp)), z)))


def away_from_edges(draw, clamp=CLAMP, distance=0.01):
    """The first drawn arrays in which no |z| is close to the clamp (or to 0 below it)."""
    for seed in range(1000):
        arrays = draw(np.random.default_rng(seed))
        z = np.abs(scaled_dot(arrays["residual"], arrays["key"], arrays["weight_fused"]))
        if np.all((np.abs(z - clamp) > distance) & (z > distance)):
            return arrays
    raise AssertionError("no such arrays")


def joined(arrays, packed):
    """key and value as tensors, packed into kv or not."""
    if not packed:
        return singles({name: arrays[name] for name in ("key", "value")})
    packed = np.concatenate([arrays["key"], arrays["value"][..., None, :]], axis=-2)
    return {"kv": encode(packed, "F32")}


def parted(outputs):
    """grad_key and grad_value, whichever way they came."""
    if "grad_kv" not in outputs:
        return {"key": outputs["grad_key"], "value": outputs["grad_value"]}
    both = outputs["grad_kv"].data
    return {"key": Tensor("F32", both[..., :-1, :]), "value": Tensor("F32", both[..., -1, :])}


def gate_arrays(shape, n, d):
    def draw(g):
        return {
            "residual": single_numbers(g, *shape, n, d),
            "key": single_numbers(g, *shape, n, d),
            "value": single_numbers(g, *shape, d),
            "weight_fused": single_numbers(g, n, d, center=1.0),
        }

    return draw


@pytest.mark.parametrize(
    "shape, n, d, mask, clamp",
    [
        ((3,), 4, 8, None, CLAMP),
        ((4,), 2, 5, [0, 1, 0, 1], CLAMP),
        ((4,), 2, 5, [1, 1, 1, 1], CLAMP),
        ((2, 2), 1, 7, [[0, 1], [0, 0]], CLAMP),
        ((5,), 3, 6, None, 0.3),  # both sides of the clamp occur
        ((2,), 8, 3, None, CLAMP),
        ((3,), 1, 2, None, CLAMP),
        ((0,), 2, 3, None, CLAMP),
    ],
)
@pytest.mark.parametrize("own_path", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_gate(shape, n, d, mask, clamp, own_path, saved):
    arrays = away_from_edges(gate_arrays(shape, n, d), clamp)
    if clamp > 0.1:
        z = np.abs(scaled_dot(arrays["residual"], arrays["key"], arrays["weight_fused"]))
        assert np.any(z < clamp) and np.any(z > clamp)
    g = np.random.default_rng(7)
    identity = single_numbers(g, *shape, n, d)
    path = single_numbers(g, *shape, n, d) if own_path else identity
    live = np.ones(shape) if mask is None else 1.0 - np.array(mask)

    def loss(a):
        alpha = plain_alpha(a["residual"], a["key"], a["weight_fused"], clamp)
        gated = alpha[..., None] * a["value"][..., None, :] * live[..., None, None]
        return np.sum(identity * a["residual"]) + np.sum(path * gated)

    forward = {
        **singles({x: arrays[x] for x in ("residual", "weight_fused")}),
        **joined(arrays, packed=own_path),
    }
    if mask is not None:
        forward["image_token_mask"] = Tensor("BOOL", np.array(mask, bool))
    inputs, attrs = {**forward, "grad_out": encode(identity, "F32")}, {"clamp": clamp, "eps": EPS}
    if own_path:
        inputs["grad_value_path"] = encode(path, "F32")
    if saved:
        out = run("engram.gate_fwd", forward, {**attrs, "save": True})
        inputs |= {name: tensor for name, tensor in out.items() if name != "out"}
        del attrs["eps"]
    out = run("engram.gate_bwd", inputs, attrs)
    gradients = {"residual": out["grad_residual"], **parted(out)}
    gradients["weight_fused"] = encode(out["grad_weight_partial"].decode().sum(axis=0), "F32")
    check_gradients(loss, arrays, gradients, tolerance=ROUNDED)


@pytest.mark.parametrize("saved", [False, True])
def test_gate_on_the_flat_side(saved):
    """dot = 0, or |z| below the clamp: the residual's gradient passes, the key gets exactly 0."""
    g = np.random.default_rng(0)
    x, k = single_numbers(g, 3, 2, 4), single_numbers(g, 3, 2, 4)
    x[0] = 0.0
    k[1, :, ::2], x[1, :, 1::2] = 0.0, 0.0  # orthogonal
    k[2] *= 1e-10
    forward = singles(
        {
            "residual": x,
            "key": k,
            "value": single_numbers(g, 3, 4),
            "weight_fused": np.ones((2, 4)),
        }
    )
    attrs = {"clamp": CLAMP, "eps": 1e-2}
    upstream = single_numbers(g, 3, 2, 4)
    inputs = {**forward, "grad_out": encode(upstream, "F32")}
    if saved:
        out = run("engram.gate_fwd", forward, {**attrs, "save": True})
        inputs |= {name: tensor for name, tensor in out.items() if name != "out"}
    out = run("engram.gate_bwd", inputs, attrs)
    assert np.array_equal(out["grad_residual"].decode(), upstream)
    assert not np.any(out["grad_key"].decode()) and not np.any(out["grad_weight_partial"].decode())
    assert np.all(out["grad_value"].decode() != 0)


def test_gate_without_clamp():
    """A clamp that is 0 in F32: dot = 0 still has no gradient, and no infinity."""
    x, k = np.array([[[1.0, 0.0]], [[1.0, 2.0]]]), np.array([[[0.0, 1.0]], [[3.0, 1.0]]])
    inputs = singles({"residual": x, "key": k, "value": np.ones((2, 2)), "grad_out": x})
    inputs["weight_fused"] = encode(np.ones((1, 2)), "F32")
    out = run("engram.gate_bwd", inputs, {"clamp": 1e-50, "eps": 1e-6})
    assert np.array_equal(out["grad_residual"].decode()[0], x[0])
    assert not np.any(out["grad_key"].decode()[0]) and np.all(out["grad_key"].decode()[1] != 0)


# --- convolution and layer -----------------------------------------------------------------------


def plain_convolution(v, weight, norm_weight, dilation, bounds, live):
    """v + silu(c), zero for image tokens."""
    u = v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + CONV_EPS) * norm_weight
    u = u * live[:, None, None]
    places = np.arange(len(v))
    start = np.array([max(b for b in bounds[:-1] if b <= t) for t in places], int)
    c = np.zeros(v.shape)
    for j in range(weight.shape[-1]):
        source = places - j * dilation
        inside = (source >= start)[:, None, None]
        c += weight[..., weight.shape[-1] - 1 - j] * np.where(inside, u[np.maximum(source, 0)], 0)
    return (v + c / (1 + np.exp(-c))) * live[:, None, None]


CONVOLUTIONS = [
    # tokens, streams, width, taps, dilation, bounds of the sequences, image tokens
    (9, 2, 5, 4, 3, None, []),
    (9, 2, 5, 4, 3, [0, 4, 9], []),
    (14, 1, 3, 4, 3, [0, 0, 13, 13, 14], [3, 12]),
    (6, 3, 2, 2, 1, [0, 2, 2, 6], [0, 5]),
    (5, 1, 4, 1, 2, None, [2]),
    (4, 2, 3, 3, 5, None, []),  # nothing but the current token in reach
    (5, 2, 1, 3, 1, None, []),
    (3, 1, 2, 3, 1, [0, 1, 2, 3], [0, 1, 2]),
    (0, 2, 3, 2, 1, None, []),
]


def convolution_setting(tokens, bounds, images):
    """The optional tensors, the bounds, and 1 for live tokens."""
    inputs, live = {}, np.ones(tokens)
    if bounds is not None:
        inputs["cu_seqlens"] = encode(np.array(bounds), "I32")
    if images:
        live[images] = 0.0
        inputs["image_token_mask"] = Tensor("BOOL", live == 0)
    return inputs, bounds or [0, tokens], live


@pytest.mark.parametrize("tokens, n, d, taps, dilation, bounds, images", CONVOLUTIONS)
def test_convolution(tokens, n, d, taps, dilation, bounds, images):
    g = np.random.default_rng(11)
    arrays = {
        "gated_value": single_numbers(g, tokens, n, d),
        "conv_weight": single_numbers(g, n, d, taps),
        "conv_norm_weight": single_numbers(g, n, d, center=1.0),
    }
    upstream = single_numbers(g, tokens, n, d)
    more, bounds, live = convolution_setting(tokens, bounds, images)
    attrs = {"dilation": dilation, "conv_eps": CONV_EPS}

    def forward(a):
        return plain_convolution(*a.values(), dilation, bounds, live)

    inputs = {**singles(arrays), **more}
    expected = encode(forward(arrays), "F32")
    assert compare(run("engram.conv_fwd", inputs, attrs)["out"], expected, [1, 0]).passed
    out = run("engram.conv_bwd", {**inputs, "grad_out": encode(upstream, "F32")}, attrs)
    check_gradients(
        lambda a: np.sum(upstream * forward(a)), arrays, {x: out[f"grad_{x}"] for x in arrays}
    )


def test_convolution_of_zero_taps_still_learns():
    g = np.random.default_rng(12)
    inputs = singles(
        {"gated_value": single_numbers(g, 7, 2, 3), "conv_weight": np.zeros((2, 3, 2))}
    )
    inputs["conv_norm_weight"] = encode(np.ones((2, 3)), "F32")
    inputs["grad_out"] = encode(single_numbers(g, 7, 2, 3), "F32")
    out = run("engram.conv_bwd", inputs, {"dilation": 2, "conv_eps": CONV_EPS})
    assert np.all(out["grad_conv_weight"].decode() != 0)
    assert not np.any(out["grad_conv_norm_weight"].decode())
    assert np.array_equal(out["grad_gated_value"].data, inputs["grad_out"].data)


def layer_arrays(tokens, n, d, taps):
    def draw(g):
        arrays = {
            "residual": single_numbers(g, tokens, n, d),
            "key": single_numbers(g, tokens, n, d),
            "value": single_numbers(g, tokens, d),
            "weight_hidden": single_numbers(g, n, d, center=1.0),
            "weight_embed": single_numbers(g, n, d, center=1.0),
        }
        arrays["weight_fused"] = arrays["weight_hidden"] * arrays["weight_embed"]
        if taps:
            arrays["conv_weight"] = single_numbers(g, n, d, taps)
            arrays["conv_norm_weight"] = single_numbers(g, n, d, center=1.0)
        return arrays

    return draw


# With d = 1 a row is its sign after the norm, and all gradients of the gate cancel.
LAYERS = [
    *((t, n, max(2, d), *more) for t, n, d, *more in CONVOLUTIONS),
    (6, 2, 5, 0, 1, None, [1]),
    (3, 4, 3, 0, 1, [0, 1, 3], []),
]


@pytest.mark.parametrize("tokens, n, d, taps, dilation, bounds, images", LAYERS)
@pytest.mark.parametrize("packed", [False, True])
def test_layer(tokens, n, d, taps, dilation, bounds, images, packed):
    arrays = away_from_edges(layer_arrays(tokens, n, d, taps))
    del arrays["weight_fused"]
    upstream = single_numbers(np.random.default_rng(13), tokens, n, d)
    more, bounds, live = convolution_setting(tokens, bounds, images)

    def forward(a):
        fused = a["weight_hidden"] * a["weight_embed"]
        gated = plain_alpha(a["residual"], a["key"], fused)[..., None] * a["value"][:, None, :]
        if not taps:
            return a["residual"] + gated * live[:, None, None]
        return a["residual"] + plain_convolution(
            gated, a["conv_weight"], a["conv_norm_weight"], dilation, bounds, live
        )

    attrs = {"eps": EPS, "clamp": CLAMP}
    if taps:
        attrs |= {"dilation": dilation, "conv_eps": CONV_EPS}
    others = {x: a for x, a in arrays.items() if x not in ("key", "value")}
    inputs = {**singles(others), **joined(arrays, packed), **more}
    expected = encode(forward(arrays), "F32")
    assert compare(run("engram.layer_fwd", inputs, attrs)["out"], expected).passed
    out = run("engram.layer_bwd", {**inputs, "grad_out": encode(upstream, "F32")}, attrs)
    gradients = {x: out[f"grad_{x}"] for x in others} | parted(out)
    check_gradients(lambda a: np.sum(upstream * forward(a)), arrays, gradients, tolerance=ROUNDED)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("taps", [0, 3])
def test_half_precision_rounds_once(dtype, taps):
    """Activations in half precision change the rounding of the outputs and nothing else."""
    g = np.random.default_rng(14)
    arrays = layer_arrays(5, 2, 6, taps)(g)
    del arrays["weight_fused"]
    arrays["grad_out"] = single_numbers(g, 5, 2, 6)
    attrs = {"eps": EPS, "clamp": CLAMP, "dilation": 1, "conv_eps": CONV_EPS}
    inputs = {x: encode(a, "F32" if "weight" in x else dtype) for x, a in arrays.items()}
    wide = {x: encode(t.decode(), "F32") for x, t in inputs.items()}
    narrow, exact = run("engram.layer_bwd", inputs, attrs), run("engram.layer_bwd", wide, attrs)
    for name, tensor in exact.items():
        activation = name in ("grad_residual", "grad_key", "grad_value")
        assert narrow[name].dtype == (dtype if activation else "F32")
        assert compare(narrow[name], encode(tensor.decode(), narrow[name].dtype), [0, 0]).passed


# --- relations between the operators -------------------------------------------------------------


def layer_inputs(tokens, n, d, taps, dtype="F32", seed=5):
    g = np.random.default_rng(seed)
    arrays = layer_arrays(tokens, n, d, taps)(g)
    inputs = {x: encode(a, "F32" if "weight" in x else dtype) for x, a in arrays.items()}
    inputs["grad_out"] = encode(single_numbers(g, tokens, n, d), dtype)
    fused = inputs.pop("weight_fused")
    return inputs, fused


@pytest.mark.parametrize("taps", [0, 4])
def test_layer_is_its_pieces(taps):
    """convolution, gate, weight reduction, up to the F32 rounding between them."""
    inputs, _ = layer_inputs(11, 3, 8, taps)
    mask = Tensor("BOOL", np.arange(11) % 4 == 1)
    bounds = encode(np.array([0, 5, 11]), "I32")
    attrs, convolution = {"eps": EPS, "clamp": CLAMP}, {"dilation": 2, "conv_eps": CONV_EPS}
    whole_layer = {**inputs, "image_token_mask": mask, "cu_seqlens": bounds}
    expected = run("engram.layer_bwd", whole_layer, attrs | (convolution if taps else {}))

    weights = {x: inputs[x] for x in ("weight_hidden", "weight_embed")}
    fused = run("engram.fused_weight", weights)["weight_fused"]
    of_gate = {x: inputs[x] for x in ("residual", "key", "value")}
    of_gate |= {"weight_fused": fused, "image_token_mask": mask}
    got, path = {}, {}
    if taps:
        gated = run("engram.gate_fwd", of_gate, {**attrs, "mode": "value"})["out"]
        got = run(
            "engram.conv_bwd",
            {
                "grad_out": inputs["grad_out"],
                "gated_value": gated,
                "image_token_mask": mask,
                "cu_seqlens": bounds,
                **{x: inputs[x] for x in ("conv_weight", "conv_norm_weight")},
            },
            convolution,
        )
        path = {"grad_value_path": got.pop("grad_gated_value")}
    got |= run("engram.gate_bwd", {**of_gate, "grad_out": inputs["grad_out"], **path}, attrs)
    partial = {"grad_weight_partial": got.pop("grad_weight_partial")}
    got |= run("engram.grad_w_reduce", partial | weights)
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        result = compare(got[name], tensor, [4, 2e-6 * np.abs(tensor.decode()).max()])
        assert result.passed, f"{name}: {result.text}"


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_saved_statistics_are_the_recomputed_ones(dtype):
    inputs, fused = layer_inputs(7, 4, 16, 0, dtype)
    forward = {x: inputs[x] for x in ("residual", "key", "value")} | {"weight_fused": fused}
    attrs = {"eps": EPS, "clamp": CLAMP}
    saved = run("engram.gate_fwd", forward, {**attrs, "save": True})
    del saved["out"]
    backward = {**forward, "grad_out": inputs["grad_out"]}
    fresh = run("engram.gate_bwd", backward, attrs)
    for name, tensor in run("engram.gate_bwd", backward | saved, attrs).items():
        assert tensor.data.tobytes() == fresh[name].data.tobytes(), name


def with_rows(tensor, mask, value):
    bits = encode(np.float64(value), tensor.dtype).data
    rows = mask.reshape(-1, *[1] * (tensor.data.ndim - 1))
    return Tensor(tensor.dtype, np.where(rows, bits, tensor.data))


@pytest.mark.parametrize("name", ["engram.gate_bwd", "engram.conv_bwd", "engram.layer_bwd"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_image_tokens_are_not_read(name, dtype):
    """NaN in all rows of image tokens changes nothing; their gradients are copies or zeros."""
    inputs, fused = layer_inputs(9, 2, 5, 3, dtype)
    mask = np.arange(9) % 3 == 0
    inputs["gated_value"] = inputs["grad_value_path"] = inputs["key"]
    inputs["weight_fused"] = fused
    of_gate, of_convolution = {"eps": EPS, "clamp": CLAMP}, {"dilation": 1, "conv_eps": CONV_EPS}
    taps = ["conv_weight", "conv_norm_weight"]
    read, fixed, attrs = {
        "engram.gate_bwd": (
            ["residual", "key", "value", "grad_value_path"],
            ["grad_out", "weight_fused"],
            of_gate,
        ),
        "engram.conv_bwd": (["gated_value", "grad_out"], taps, of_convolution),
        "engram.layer_bwd": (
            ["residual", "key", "value"],
            ["grad_out", "weight_hidden", "weight_embed", *taps],
            of_gate | of_convolution,
        ),
    }[name]
    call = {x: inputs[x] for x in (*read, *fixed)} | {"image_token_mask": Tensor("BOOL", mask)}
    hidden = {x: with_rows(inputs[x], mask, np.nan) for x in read}
    clean, dirty = run(name, call, attrs), run(name, call | hidden, attrs)
    for x, tensor in clean.items():
        assert np.array_equal(tensor.data, dirty[x].data), x
    if name == "engram.conv_bwd":
        assert not np.any(clean["grad_gated_value"].data[mask])
    else:
        assert np.array_equal(clean["grad_residual"].data[mask], inputs["grad_out"].data[mask])
        assert not np.any(clean["grad_key"].data[mask])
        assert not np.any(clean["grad_value"].data[mask])


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("indices", ["I32", "I64"])
@pytest.mark.parametrize("content", ["mixed", "absent", "same", "none"])
def test_sparse_gather_gradient_is_the_dense_one(dtype, indices, content):
    g = np.random.default_rng(6)
    shape = (0, 4) if content == "none" else (30, 4)
    wanted = g.integers(-1, 50, shape)
    wanted[:] = {"absent": -1, "same": 7}.get(content, wanted)
    inputs = {
        "grad_embedding": encode(g.standard_normal((shape[0], 12)), dtype),
        "indices": encode(wanted, indices),
    }
    dense = run("engram.gather_bwd", inputs, {"rows": 50})["grad_table"]
    sparse = run("engram.gather_bwd", inputs, {"rows": 50, "form": "sparse"})
    assert sparse["unique_rows"].dtype == indices
    unique = sparse["unique_rows"].decode()
    assert unique.tolist() == sorted(set(wanted[wanted >= 0].tolist()))
    scattered = np.zeros((50, 3), np.float32)
    scattered[unique] = sparse["grad_rows"].data
    assert scattered.tobytes() == dense.data.tobytes()


def test_sparse_gather_gradient_has_no_target():
    inputs = singles({"grad_embedding": np.ones((1, 2)), "grad_table_acc": np.ones((3, 2))})
    inputs["indices"] = encode(np.zeros((1, 1), int), "I32")
    with pytest.raises(ValueError, match="grad_table_acc"):
        run("engram.gather_bwd", inputs, {"form": "sparse"})
