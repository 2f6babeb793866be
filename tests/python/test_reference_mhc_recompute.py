"""Recomputation, its planner, and the monitors of the NumPy reference."""

import itertools
import math

import numpy as np
import pytest
from engramhc.reference import run
from engramhc.reference.dtypes import encode

from finite_differences import singles
from test_reference_mhc import random

# --- recomputation -------------------------------------------------------------------------------


def stack(dtype, layers, posts, shape=(3,), n=3, d=7):
    g = random(41, layers)
    inputs = {"residual": encode(g.standard_normal((*shape, n, d)), dtype)}
    for layer in range(layers):
        inputs[f"pre.{layer}"] = encode(g.uniform(0, 1, (*shape, n)), "F32")
    for layer in range(posts):
        inputs[f"layer_output.{layer}"] = encode(g.standard_normal((*shape, d)), dtype)
        inputs[f"post.{layer}"] = encode(g.uniform(0, 2, (*shape, n)), "F32")
        inputs[f"comb.{layer}"] = encode(g.uniform(0, 1, (*shape, n, n)), "F32")
    return inputs


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("layers, posts", [(1, 0), (1, 1), (3, 2), (3, 3), (10, 9), (10, 10)])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 2)])
def test_recompute_is_pre_apply_and_post_layer_by_layer(dtype, layers, posts, shape):
    inputs = stack(dtype, layers, posts, shape)
    out = run("mhc.multilayer_recompute", inputs)
    assert len(out) == layers + posts
    residual = inputs["residual"]
    for layer in range(layers):
        collapse = {"residual": residual, "pre": inputs[f"pre.{layer}"]}
        wanted = {"layer_input": run("mhc.pre_apply_fwd", collapse)["layer_input"]}
        if layer < posts:
            step = {x: inputs[f"{x}.{layer}"] for x in ("layer_output", "post", "comb")}
            residual = run("mhc.post_fwd", {**step, "residual": residual})["new_residual"]
            wanted["new_residual"] = residual
        for name, t in wanted.items():
            assert out[f"{name}.{layer}"].data.tobytes() == t.data.tobytes(), (name, layer)


def test_recompute_rounds_every_layer():
    """The same stack in F32 has other bf16 values, more of them layer by layer."""
    inputs = stack("BF16", 10, 10, (4,), 4, 64)
    wide = {x: encode(t.decode(), "F32") for x, t in inputs.items()}
    narrow, exact = (run("mhc.multilayer_recompute", t) for t in (inputs, wide))

    def differing(layer):
        name = f"new_residual.{layer}"
        return np.mean(narrow[name].data != encode(exact[name].decode(), "BF16").data)

    assert differing(0) == 0
    assert 0.02 < differing(1) < differing(9)


@pytest.mark.parametrize(
    "change",
    [
        {"pre.1": None},  # a hole
        {"pre.2": None, "pre.1": None},
        {"post.1": None},
        {"layer_output.2": "layer_output.1"},
        {"pre.3": "pre.2", "pre.4": "pre.2"},
        {"pre.00": "pre.0"},
        {"fn.0": "pre.0"},
    ],
)
def test_recompute_refuses_other_lists(change):
    inputs = stack("F32", 3, 2)
    for name, source in change.items():
        if source is None:
            del inputs[name]
        else:
            inputs[name] = inputs[source]
    with pytest.raises(ValueError):
        run("mhc.multilayer_recompute", inputs)


# --- planner -------------------------------------------------------------------------------------


def best_blocks(layers, n, d, stages):
    """By trying all: cost, length and starts of the cheapest length, the shortest of equals."""
    found = []
    for length in range(1, max(stages) + 1):
        starts, first = [], 0
        for stage in stages:
            starts += range(first, first + stage, length)
            first += stage
        found.append((n * d * len(starts) + (n + 2) * d * length, length, starts))
    return min(found)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize(
    "layers, stages",
    [
        (1, None),
        (2, None),
        (7, None),
        (30, None),
        (61, None),
        (30, [15, 15]),
        (61, [16, 15, 15, 15]),
        (9, [1, 7, 1]),
        (5, [1, 1, 1, 1, 1]),
        (200, [199, 1]),
    ],
)
def test_plan_is_the_best_of_all(layers, stages, n):
    d = 640
    attrs = {"layers": layers, "n": n, "d": d} | ({} if stages is None else {"stages": stages})
    out = {x: t.decode().tolist() for x, t in run("mhc.plan_recompute", {}, attrs).items()}
    cost, length, starts = best_blocks(layers, n, d, stages or [layers])
    assert out["block_length"] == [length] and out["block_starts"] == starts
    assert out["terms"] == [n * d * len(starts), (n + 2) * d * length] and sum(out["terms"]) == cost


def test_plan_blocks_cover_stages():
    """Every stage starts a block, and no block is longer than the block length."""
    for stages in itertools.product([1, 2, 5, 8], repeat=3):
        attrs = {"layers": sum(stages), "n": 4, "d": 3, "stages": list(stages)}
        out = run("mhc.plan_recompute", {}, attrs)
        starts = out["block_starts"].decode().tolist()
        assert set(np.cumsum([0, *stages[:-1]]).tolist()) <= set(starts)
        assert max(np.diff([*starts, sum(stages)])) <= out["block_length"].decode()[0]


@pytest.mark.parametrize("layers", [30, 61, 126])
def test_plan_is_close_to_the_closed_form(layers):
    """L_r ~ sqrt(n L / (n + 2)), rounded to what divides well."""
    out = run("mhc.plan_recompute", {}, {"layers": layers, "n": 4, "d": 7168})
    assert abs(out["block_length"].decode()[0] - math.sqrt(4 * layers / 6)) < 1.5


def test_plan_needs_stages_of_all_layers():
    with pytest.raises(ValueError, match="stages"):
        run("mhc.plan_recompute", {}, {"layers": 5, "n": 4, "d": 8, "stages": [2, 2]})


# --- monitors ------------------------------------------------------------------------------------


def near(got, wanted):
    return np.abs(got - wanted) <= 1e-7 * np.abs(wanted)


@pytest.mark.parametrize(
    "layers, tokens, n", [(1, 1, 1), (3, 5, 4), (60, 2, 3), (2, 0, 2), (4, 3, 8)]
)
def test_gains_are_operator_norms(layers, tokens, n):
    """With H_res = comb^T: forward is its infinity norm, backward its one norm."""
    comb = encode(random(42).standard_normal((layers, tokens, n, n)) / n, "F32")
    out = {x: t.decode() for x, t in run("mhc.amax_gain", {"comb": comb}).items()}
    assert out["forward_gain"].shape == (layers, tokens)
    for t in range(tokens):
        total = np.eye(n)  # x_L = H_L ... H_1 x
        for layer in range(layers):
            h_res = comb.decode()[layer, t].T
            assert near(out["forward_gain"][layer, t], np.linalg.norm(h_res, np.inf))
            assert near(out["backward_gain"][layer, t], np.linalg.norm(h_res, 1))
            total = h_res @ total
        assert near(out["composite_forward_gain"][t], np.linalg.norm(total, np.inf))
        assert near(out["composite_backward_gain"][t], np.linalg.norm(total, 1))


def test_gain_without_constraint_grows():
    """Maps that are the identity plus noise amplify layer by layer; Sinkhorn's maps do not."""
    noise = 0.3 * random(43).standard_normal((60, 8, 4, 4))
    free = run("mhc.amax_gain", {"comb": encode(np.eye(4) + noise, "F32")})
    attrs = {"repeat": 20, "eps": 1e-6}
    maps = run("mhc.sinkhorn_fwd", {"comb_logits": encode(noise, "F32")}, attrs)["comb"]
    tamed = run("mhc.amax_gain", {"comb": maps})
    assert np.all(free["composite_forward_gain"].decode() > 30)
    assert np.all(tamed["composite_forward_gain"].decode() < 1.01)


@pytest.mark.parametrize("shape", [(0,), (40,), (2, 3)])
@pytest.mark.parametrize("n", range(1, 9))
def test_defect(shape, n):
    comb = encode(random(44, n).standard_normal((*shape, n, n)), "F32")
    out = run("mhc.defect", {"comb": comb})
    ones = np.ones(n)
    for place in np.ndindex(*shape):
        m = comb.decode()[place]
        got = {x: t.decode()[place] for x, t in out.items()}
        assert near(got["row_defect"], np.linalg.norm(m @ ones - 1, np.inf))
        assert near(got["column_defect"], np.linalg.norm(ones @ m - 1, np.inf))
        bound = math.sqrt(np.linalg.norm(m, 1) * np.linalg.norm(m, np.inf))
        assert near(got["spectral_bound"], bound)
        assert np.linalg.norm(m, 2) <= bound * (1 + 1e-7)


def test_doubly_stochastic_has_no_defect():
    comb = np.eye(4)[[[2, 0, 3, 1]]]
    out = run("mhc.defect", singles({"comb": comb}))
    assert {x: t.decode().tolist() for x, t in out.items()} == {
        "row_defect": [0.0],
        "column_defect": [0.0],
        "spectral_bound": [1.0],
    }


def test_monitors_show_nan():
    comb = np.ones((2, 2, 3, 3))
    comb[1, 0, 1, 2] = np.nan
    gains = run("mhc.amax_gain", singles({"comb": comb}))
    for name, t in gains.items():
        touched = [True, False]
        by_layer = [[False, False], touched]
        assert np.isnan(t.decode()).tolist() == (touched if "composite" in name else by_layer), name
    for name, t in run("mhc.defect", singles({"comb": comb[1]})).items():
        assert np.isnan(t.decode()).tolist() == [True, False], name
