"""`ehc streams`: the stack against the NumPy reference, what it writes, and what it refuses."""

import json
import resource
import subprocess

import numpy as np
import pytest
from engramhc import reference
from engramhc.reference.dtypes import Tensor, encode
from engramhc.reference.files import load, save

TOKENS, STREAMS, WIDTH, SUBLAYERS = 11, 3, 24, 3
MIXES = STREAMS * STREAMS + 2 * STREAMS
SMALL = ["--sublayers", SUBLAYERS, "--chunk", 8]
GRADIENTS = ["grad_fn", "grad_scale", "grad_base", "grad_norm_weight", "grad_layer_norm_weight"]


def streams_file(folder, shape=(TOKENS, STREAMS, WIDTH), dtype="F32", name="in"):
    path = folder / f"{name}.safetensors"
    values = np.random.default_rng(7).standard_normal(shape)
    save(path, {"streams": encode(values, dtype)})
    return path


def run_stack(ehc, source, folder, name, *more, threads=2):
    out, figures = folder / f"{name}.safetensors", folder / f"{name}.json"
    done = ehc.run("streams", "--in", source, "--out", out, "--json", figures, *more, threads=threads)
    assert (done.returncode, done.stderr) == (0, ""), done
    return load(out)[0], json.loads(figures.read_text()), done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return streams_file(tmp_path_factory.mktemp("streams"))


@pytest.fixture(scope="module")
def result(ehc, source, tmp_path_factory):
    return run_stack(ehc, source, tmp_path_factory.mktemp("result"), "out", *SMALL)


# --- the same stack once more, from the formulas ---


def splitmix64(seed, index):
    with np.errstate(over="ignore"):
        word = np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15) * (index + np.uint64(1))
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))


def random(name, shape, mean=0.0, deviation=1.0):
    """Of seed 0."""
    stream = np.uint64(0)
    for letter in name.encode():
        stream = splitmix64(stream ^ np.uint64(letter), np.uint64(0))
    bits = splitmix64(stream, np.arange(np.prod(shape), dtype=np.uint64))
    words = sum(((bits >> np.uint64(16 * k)) & np.uint64(0xFFFF)).astype(np.int64) for k in range(4))
    normal = (words - 2 * 0xFFFF).astype(np.float32) * np.float32(1.7320508 / 65536)
    value = np.float32(deviation).astype(float) * normal + np.float32(mean)
    return value.astype(np.float32).reshape(shape)


RULES = {"norm_eps": 1e-6, "pre_eps": 1e-6, "post_mult": 2, "repeat": 20, "sinkhorn_eps": 1e-6,
         "layer_norm_eps": 1e-6}


def parameters():
    base = np.zeros(MIXES, np.float32)
    base[2 * STREAMS :] = np.eye(STREAMS).ravel()
    k = STREAMS * WIDTH
    fn = random("fn", (SUBLAYERS, MIXES, k), deviation=1 / np.sqrt(np.float32(k)))
    norm = random("norm_weight", (SUBLAYERS, k), 1, 0.1)
    layer_norm = random("layer_norm_weight", (SUBLAYERS, WIDTH))
    return [{"fn": Tensor("F32", fn[i]), "scale": Tensor("F32", np.ones(3, np.float32)),
             "base": Tensor("F32", base), "norm_weight": Tensor("F32", norm[i]),
             "layer_norm_weight": Tensor("F32", layer_norm[i])} for i in range(SUBLAYERS)]


def stack_by_reference(streams):
    """Forward and backward from the first to the last streams, without seams: the names of the file."""
    weights, entries, outputs, residuals = parameters(), [], [], [streams]
    for w in weights:
        entry = reference.run("mhc.pre_fwd", {"residual": residuals[-1], **w}, {**RULES, "save": True})
        outputs.append(encode(np.tanh(entry["layer_input"].decode()), "F32"))
        exit_inputs = {"layer_output": outputs[-1], "residual": residuals[-1], "post": entry["post"],
                       "comb": entry["comb"]}
        entries.append(entry)
        residuals.append(reference.run("mhc.post_fwd", exit_inputs)["new_residual"])
    result = {name: np.stack([entry[name].decode() for entry in entries])
              for name in ("pre", "post", "comb_logits", "comb")}
    result["streams"] = residuals[-1].decode()
    gradients = {name: [] for name in GRADIENTS}
    upstream = Tensor("F32", random("grad_streams", (TOKENS, STREAMS, WIDTH)))
    for w, entry, output, residual in zip(weights[::-1], entries[::-1], outputs[::-1], residuals[-2::-1]):
        back = reference.run("mhc.post_bwd", {
            "grad_new_residual": upstream, "layer_output": output, "residual": residual,
            "post": entry["post"], "comb": entry["comb"]})
        slope = 1 - output.decode() ** 2
        back = reference.run("mhc.pre_bwd", {
            "grad_layer_input": encode(back["grad_layer_output"].decode() * slope, "F32"),
            "grad_post": back["grad_post"], "grad_comb": back["grad_comb"], "residual": residual,
            "grad_residual_acc": back["grad_residual"], **w}, {**RULES, "rounding": "once"})
        upstream = back["grad_residual"]
        for name in GRADIENTS:
            gradients[name].insert(0, back[name].decode())
    return result | {"grad_streams": upstream.decode()} | {k: np.stack(v) for k, v in gradients.items()}


def test_the_stack_is_that_of_the_reference(source, result):
    outputs, _, _ = result
    expected = stack_by_reference(load(source)[0]["streams"])
    assert set(outputs) == set(expected)
    for name, want in expected.items():
        got = outputs[name].decode()
        assert got.shape == want.shape, name
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-5 * np.abs(want).max(), err_msg=name)
        assert np.abs(want).max() > 1e-3, name


# --- what it writes ---


@pytest.mark.parametrize(("dtype", "streams", "width"), [("BF16", 4, 40), ("F16", 1, 7), ("BF16", 8, 33)])
def test_shapes_and_types(ehc, tmp_path, dtype, streams, width):
    source = streams_file(tmp_path, (13, streams, width), dtype)
    outputs, figures, _ = run_stack(ehc, source, tmp_path, "out", "--sublayers", 2, "--chunk", 5)
    mixes = streams * streams + 2 * streams
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in outputs.items()}
    assert shapes == {
        "streams": (dtype, (13, streams, width)),
        "grad_streams": (dtype, (13, streams, width)),
        "pre": ("F32", (2, 13, streams)),
        "post": ("F32", (2, 13, streams)),
        "comb_logits": ("F32", (2, 13, streams, streams)),
        "comb": ("F32", (2, 13, streams, streams)),
        "grad_fn": ("F32", (2, mixes, streams * width)),
        "grad_scale": ("F32", (2, 3)),
        "grad_base": ("F32", (2, mixes)),
        "grad_norm_weight": ("F32", (2, streams * width)),
        "grad_layer_norm_weight": ("F32", (2, width)),
    }
    for name, tensor in outputs.items():
        assert np.isfinite(tensor.decode()).all(), name
    assert figures["configuration"]["type"] == dtype
    assert all(check["equal"] and check["rows"] > 0 for check in figures["checks"])


def test_the_checks_see_every_operator(result):
    _, figures, shown = result
    operators = {stage["op"] for stage in figures["stages"] if stage["op"]}
    assert operators == {f"mhc.{name}_{way}" for name in ("pre", "seam_classic", "post") for way in ("fwd", "bwd")}
    assert {check["op"] for check in figures["checks"]} == operators
    assert all(check["equal"] for check in figures["checks"])
    for stage in figures["stages"] + figures["passes"]:
        assert stage["stage"] in shown and stage["seconds"] > 0 and stage["bytes_per_token"] > 0


def test_bytes_are_inputs_and_outputs_once(result):
    _, figures, _ = result
    post = next(stage for stage in figures["stages"] if stage["op"] == "mhc.post_fwd")
    n, d = STREAMS, WIDTH
    assert post["bytes_per_token"] == 4 * ((2 * n + 1) * d + n * n + n)
    forward = figures["passes"][0]
    calls = {"mhc.pre_fwd": 1, "mhc.seam_classic_fwd": SUBLAYERS - 1, "mhc.post_fwd": 1}
    assert forward["bytes_per_token"] == pytest.approx(
        sum(calls.get(stage["op"], 0) * stage["bytes_per_token"] for stage in figures["stages"]))


def test_one_sublayer_has_no_seam(ehc, source, tmp_path):
    outputs, figures, _ = run_stack(ehc, source, tmp_path, "one", "--sublayers", 1)
    assert outputs["comb"].shape[0] == 1
    assert not any("seam" in stage["op"] for stage in figures["stages"])


def without_clock(figures):
    kept = {name: value for name, value in figures.items()
            if name not in ("stages", "passes", "copy_gb_per_second")}
    kept["configuration"] = {k: v for k, v in kept["configuration"].items() if k != "threads"}
    return kept


def test_threads_change_no_bit(ehc, tmp_path):
    source = streams_file(tmp_path, (70, 4, 96), "BF16")
    results = [run_stack(ehc, source, tmp_path, f"threads{n}", "--sublayers", 4, "--chunk", 33, threads=n)
               for n in (1, 2)]
    first, second = ((tmp_path / f"threads{n}.safetensors").read_bytes() for n in (1, 2))
    assert first == second
    assert without_clock(results[0][1]) == without_clock(results[1][1])
    assert [r[1]["configuration"]["threads"] for r in results] == [1, 2]


def test_tokens_do_not_depend_on_the_text_behind_them(ehc, source, tmp_path, result):
    outputs, figures, _ = run_stack(ehc, source, tmp_path, "some", *SMALL, "--tokens", 8)
    assert figures["configuration"]["tokens"] == 8
    for name, axis in (("streams", 0), ("grad_streams", 0), ("comb", 1), ("pre", 1), ("post", 1)):
        whole = np.take(result[0][name].decode(), range(8), axis)
        assert np.array_equal(outputs[name].decode(), whole), name


# --- the figures ---


def defects(comb):
    return np.abs(comb.sum(-1) - 1).max(-1), np.abs(comb.sum(-2) - 1).max(-1)


def test_convergence_curves(ehc, source, tmp_path):
    outputs, figures, _ = run_stack(ehc, source, tmp_path, "curves", *SMALL, "--repeat", 10, "--spread", 3)
    curves = {curve["logits"]: curve for curve in figures["sinkhorn"]}
    assert list(curves) == ["1", "2", "4", "text"]
    text = curves["text"]
    assert text["maps"] == SUBLAYERS * TOKENS
    at = text["repeat"].index(10)
    rows, columns = defects(outputs["comb"].decode())
    assert text["row_worst"][at] == pytest.approx(rows.max(), rel=1e-4, abs=3e-7)
    assert text["column_worst"][at] == pytest.approx(columns.max(), abs=3e-7)
    logits = {"comb_logits": outputs["comb_logits"]}
    for repeat in (1, 4, 64):
        at = text["repeat"].index(repeat)
        comb = reference.run("mhc.sinkhorn_fwd", logits, {"repeat": repeat, "eps": 1e-6})["comb"].decode()
        rows, columns = (np.sort(d.ravel()) for d in defects(comb))
        for line, values in (("row", rows), ("column", columns)):
            assert text[f"{line}_worst"][at] == pytest.approx(values[-1], rel=1e-4, abs=1e-6)
            assert text[f"{line}_median"][at] == pytest.approx(values[len(values) // 2], rel=1e-4, abs=1e-6)
    for one, other in (("1", "2"), ("2", "4")):  # wider logits take longer
        for name in ("row_worst", "row_median"):
            assert curves[one][name][8] < curves[other][name][8]


def test_gain_is_that_of_the_written_maps(ehc, result, tmp_path):
    outputs, figures, _ = result
    path = tmp_path / "maps.safetensors"
    for kind, name in (("constrained", "comb"), ("unconstrained", "comb_logits")):
        save(path, {"comb": outputs[name]})
        done = ehc.run("gain", "--in", path, "--json")
        assert json.loads(done.stdout)[str(path)] == figures["gain"]["text"][kind]
        assert len(figures["gain"]["random"][kind]) == SUBLAYERS
    assert figures["gain"]["text"]["constrained"][-1]["composite_forward_gain"] < 1.01
    assert figures["gain"]["random"]["unconstrained"][-1]["composite_forward_gain"] > 20


def test_listed_maps(ehc, source, tmp_path):
    outputs, figures, _ = run_stack(ehc, source, tmp_path, "maps", "--sublayers", 5, "--map-begin", 7,
                                    "--map-tokens", 9, "--map-sublayers", 3)
    maps = figures["maps"]
    assert (maps["first_token"], maps["sublayers"]) == (7, [0, 2, 4])
    for name in ("pre", "post", "comb"):
        expected = outputs[name].decode()[[0, 2, 4], 7:]
        assert np.array_equal(np.array(maps[name], np.float32), expected), name


def test_more_maps_than_there_are_tokens(ehc, source, tmp_path):
    """As many as the option can say."""
    outputs, figures, _ = run_stack(ehc, source, tmp_path, "all", "--sublayers", 2, "--map-begin", 1,
                                    "--map-tokens", 2**63 - 1)
    shown = np.array(figures["maps"]["pre"], np.float32)
    assert np.array_equal(shown, outputs["pre"].decode()[:, 1:])


# --- what it refuses ---


def refused(ehc, tmp_path, code, *arguments):
    done = ehc.run("streams", *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("ehc: ") and done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("out*"))
    return done.stderr


@pytest.mark.parametrize(
    ("tensors", "got"),
    [
        ({"streams": encode(np.zeros((4, 9, 8)), "BF16")}, "got BF16[4,9,8]"),
        ({"streams": encode(np.zeros((4, 0, 8)), "BF16")}, "got BF16[4,0,8]"),
        ({"streams": encode(np.zeros((0, 4, 8)), "F32")}, "got F32[0,4,8]"),
        ({"streams": encode(np.zeros((4, 8)), "F32")}, "got F32[4,8]"),
        ({"streams": Tensor("I32", np.zeros((4, 4, 8), np.int32))}, "got I32[4,4,8]"),
        ({"other": encode(np.zeros((4, 4, 8)), "F32")}, "got none"),
    ],
)
def test_other_tensors_are_refused(ehc, tmp_path, tensors, got):
    path = tmp_path / "in.safetensors"
    save(path, tensors)
    told = refused(ehc, tmp_path, 3, "--in", path, "--out", tmp_path / "out", "--json", tmp_path / "out.json")
    assert told == (f"ehc: {path}: tensor 'streams': expected BF16, F16 or F32[T,n,d] with n from 1 to 8 "
                    f"and T and d above 0, {got}\n")


@pytest.mark.parametrize(("value", "shown"), [(np.nan, "nan"), (np.inf, "inf")])
def test_streams_that_are_no_numbers_are_refused(ehc, tmp_path, value, shown):
    path = tmp_path / "in.safetensors"
    streams = np.zeros((3, 2, 4), np.float32)
    streams[1, 1, 2] = value
    save(path, {"streams": Tensor("F32", streams)})
    told = refused(ehc, tmp_path, 3, "--in", path, "--out", tmp_path / "out")
    assert told == f"ehc: {path}: tensor 'streams': expected finite values, got {shown} at position 14\n"


def test_missing_and_damaged_files(ehc, tmp_path):
    path = tmp_path / "missing.safetensors"
    assert str(path) in refused(ehc, tmp_path, 4, "--in", path)
    path.write_bytes(b"\x10" + bytes(20))
    assert str(path) in refused(ehc, tmp_path, 4, "--in", path, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    "arguments",
    [["--sublayers", 0], ["--repeat", 0], ["--repeat", 65], ["--spread", "-1"], ["--spread=nan"],
     ["--chunk", 0], ["--tokens", 0], ["--check-tokens", "-1"]],
)
def test_bad_options(ehc, source, tmp_path, arguments):
    assert str(arguments[0]).split("=")[0] in refused(ehc, tmp_path, 2, "--in", source, *arguments)


def test_a_full_disk_leaves_no_part_of_a_file(ehc, source, tmp_path):
    done = subprocess.run(
        [str(ehc.path), "streams", "--in", str(source), "--sublayers", "2", "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)))
    assert (done.returncode, done.stdout) == (4, "")
    assert str(tmp_path / "out") in done.stderr
    assert list(tmp_path.iterdir()) == []
