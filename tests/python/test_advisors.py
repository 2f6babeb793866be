"""ehc plan, gain and advise: figures against plain Python, and what they refuse."""

import json
import math

import numpy as np
import pytest
from engramhc.reference.dtypes import Tensor
from engramhc.reference.files import save


def json_of(ehc, *arguments):
    done = ehc.run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def refusal(ehc, *arguments):
    done = ehc.run(*arguments)
    assert done.stdout == ""
    return done.returncode, done.stderr


# --- plan ---


def blocks_of(stages, length):
    return sum(-(-layers // length) for layers in stages)


@pytest.mark.parametrize(
    "stages, streams, width",
    [([30], 4, 4096), ([61], 4, 7168), ([16, 15, 15, 15], 4, 7168), ([1], 1, 1), ([7, 50, 3], 8, 96)],
)
def test_the_plan_is_the_best_of_all_block_lengths(ehc, stages, streams, width):
    layers = sum(stages)
    plan = json_of(
        ehc, "plan", "--layers", layers, "--streams", streams, "--width", width,
        "--stages", ",".join(map(str, stages)), "--dtype", "F32",
    )
    costs = {
        length: streams * width * blocks_of(stages, length) + (streams + 2) * width * length
        for length in range(1, max(stages) + 1)
    }
    best = min(costs, key=lambda length: (costs[length], length))
    assert plan["block_length"] == best
    assert sum(plan["terms"]) == costs[best]
    starts, first = [], 0
    for stage in stages:
        starts += range(first, first + stage, best)
        first += stage
    assert plan["block_starts"] == starts
    outputs = layers * width
    assert plan["bytes_per_token_of_outputs"] == 4 * outputs
    assert plan["bytes_per_token_with"] == 4 * (costs[best] + outputs)
    assert plan["bytes_per_token_without"] == 4 * (streams + 3) * width * layers


def test_the_plan_as_text(ehc):
    done = ehc.run("plan", "--layers", 61, "--width", 4096)
    assert done.returncode == 0, done.stderr
    assert "7 layers, 9 blocks (6.38 without stages and in fractions)" in done.stdout
    assert "0 7 14 21 28 35 42 49 56" in done.stdout


def test_what_plan_refuses(ehc):
    assert refusal(ehc, "plan", "--layers", 10, "--width", 8, "--stages", "4,5") == (
        2, "ehc: --stages: expected a sum of --layers = 10, got 9\n",
    )
    for arguments, option in [
        (["--layers", 0, "--width", 8], "--layers"),
        (["--layers", 5, "--width", "wide"], "--width"),
        (["--layers", 5, "--width", 8, "--streams", 9], "--streams"),
        (["--layers", 5, "--width", 8, "--dtype", "F8"], "--dtype"),
        (["--layers", 5], "--width"),
    ]:
        code, text = refusal(ehc, "plan", *arguments)
        assert code == 2
        assert option in text


# --- gain ---


def gains(maps):
    """By layer: the worst over tokens of gains, defects and bounds, and of the product so far."""
    product = np.broadcast_to(np.eye(maps.shape[-1]), maps.shape[1:])
    rows = []
    for layer in maps.astype(np.float64):
        product = product @ layer
        lines, columns = layer.sum(-1), layer.sum(-2)
        forward = np.abs(layer).sum(-2).max(-1)
        backward = np.abs(layer).sum(-1).max(-1)
        rows.append({
            "forward_gain": forward.max(),
            "backward_gain": backward.max(),
            "composite_forward_gain": np.abs(product).sum(-2).max(),
            "composite_backward_gain": np.abs(product).sum(-1).max(),
            "row_defect": np.abs(lines - 1).max(),
            "column_defect": np.abs(columns - 1).max(),
            "spectral_bound": np.sqrt(forward * backward).max(),
        })
    return rows


def test_gains_of_maps_in_a_file(ehc, tmp_path):
    maps = np.random.default_rng(5).normal(0, 0.6, (9, 7, 3, 3)).astype(np.float32)
    path = tmp_path / "maps.safetensors"
    save(path, {"comb": Tensor("F32", maps)})
    result = json_of(ehc, "gain", "--in", path)
    assert list(result) == [str(path)]
    for got, expected in zip(result[str(path)], gains(maps), strict=True):
        for name, value in expected.items():
            assert math.isclose(got[name], value, rel_tol=1e-5, abs_tol=1e-6), name


def test_gains_of_random_maps(ehc):
    result = json_of(ehc, "gain", "--layers", 60, "--tokens", 40, "--seed", 2)
    bound, free = result["constrained"], result["unconstrained"]
    assert len(bound) == len(free) == 60
    assert max(row["composite_forward_gain"] for row in bound) < 1.001
    assert max(row["spectral_bound"] for row in bound) < 1.05
    assert free[-1]["composite_forward_gain"] > 1e6
    # More rounds, smaller defects; wider logits, larger ones.
    few = json_of(ehc, "gain", "--layers", 2, "--repeat", 5)["constrained"][0]["row_defect"]
    many = json_of(ehc, "gain", "--layers", 2, "--repeat", 20)["constrained"][0]["row_defect"]
    wide = json_of(ehc, "gain", "--layers", 2, "--scale", 4)["constrained"][0]["row_defect"]
    assert many < few / 10
    assert wide > many * 10


def test_gains_as_text(ehc):
    done = ehc.run("gain", "--layers", 10, "--tokens", 4)
    assert done.returncode == 0, done.stderr
    depths = [line.split()[0] for line in done.stdout.splitlines()[3:]]
    assert depths == ["1", "2", "4", "8", "10"]


def test_what_gain_refuses(ehc, tmp_path):
    path = tmp_path / "maps.safetensors"
    save(path, {"comb": Tensor("F32", np.zeros((2, 3, 3), np.float32))})
    assert refusal(ehc, "gain", "--in", path) == (
        3,
        f"ehc: {path}: tensor 'comb': expected F32[L,T,n,n] with L and T above 0, got F32[2,3,3]\n",
    )
    save(path, {"comb": Tensor("F32", np.zeros((2, 3, 3, 4), np.float32))})
    code, text = refusal(ehc, "gain", "--in", path)
    assert (code, "tensor 'comb'" in text) == (3, True)
    for arguments in [
        ["--repeat", 0], ["--repeat", 65], ["--streams", 9], ["--eps=-1"], ["--scale=nan"],
        ["--layers", 0], ["--convention", "none"], ["--in", path, "--layers", 3],
    ]:
        code, text = refusal(ehc, "gain", *arguments)
        assert code == 2, arguments
        assert arguments[-2 if len(arguments) > 1 else 0].split("=")[0] in text


# --- advise ---


def test_advice_says_bytes_operations_and_the_side_of_the_ridge(ehc):
    arguments = ["advise", "mhc.post_fwd", "--shape", "T=8192,d=4096"]
    advice = json_of(ehc, *arguments)
    assert advice["assumed"] == ["n=4"]
    assert advice["bytes"]["batch"] == 8192 * 73808
    assert advice["flops"] == 8192 * 147456
    assert advice["bound_by"] == "bandwidth"
    assert advice["crosses_blocks"] is False
    assert advice["implementation"] in ehc.implementations("mhc.post_fwd")
    slow = json_of(ehc, *arguments, "--bandwidth", 1000, "--peak", 1000)
    assert slow["ridge"] == 1
    assert slow["bound_by"] == "arithmetic"
    text = ehc.run(*arguments).stdout
    assert "73808 bytes for each of T = 8192" in text
    assert "147456 FLOP for each of T = 8192" in text
    assert "below the ridge of 14" in text


def test_every_operator_has_an_advice(ehc):
    sizes = "T=64,n=4,d=64,rows=100,hd=64,V=50,E=32,P=8,K=256,text_bytes=10,raw_bytes=10"
    options = {"mhc.multilayer_recompute": ["--with", "layer_output.L"]}
    lists = {
        "engram.multipliers": ["layer_ids=1,2", "compressed_vocab=100"],
        "engram.primes": ["sizes=10,20", "layers=1", "heads=2"],
        "mhc.plan_recompute": ["layers=4"],
    }
    for name in ehc.table:
        settings = [word for text in lists.get(name, []) for word in ("--set", text)]
        done = ehc.run("advise", name, "--shape", sizes, *settings, *options.get(name, []))
        assert done.returncode == 0, (name, done.stderr)
        assert "runs here" in done.stdout


def test_what_advise_refuses(ehc):
    for arguments, expected in [
        (["mhc.none"], "unknown operator 'mhc.none'; see ehc op --list"),
        (["mhc.post_fwd", "--shape", "T"], "--shape: expected key=value, got 'T'"),
        (["mhc.post_fwd", "--shape", "T=x"], "--shape: expected T as an integer >= 0, got 'x'"),
        (["mhc.post_fwd", "--shape", "z=1"],
         "--shape: expected a symbol of ehc op --list, got 'z'"),
        (["mhc.post_fwd", "--shape", "T=1"],
         "--shape: expected values of d for mhc.post_fwd, got 'mhc.post_fwd T=1 A=BF16 n=4'"),
        (["mhc.post_fwd", "--set", "inplace"], "--set: expected key=value, got 'inplace'"),
    ]:
        assert refusal(ehc, "advise", *arguments) == (2, f"ehc: {expected}\n")
    for option in ["--bandwidth=nan", "--peak=0", "--dtype=F8", "--device=tpu"]:
        code, text = refusal(ehc, "advise", "mhc.post_fwd", "--shape", "T=1,d=1", option)
        assert code == 2
        assert option.split("=")[0] in text
    code, text = refusal(ehc, "advise", "mhc.post_fwd", "--shape", "T=1,n=9,d=1")
    assert code == 3
    assert "expected n in [1,8]" in text
