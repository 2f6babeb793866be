"""`ehc train` on a made-up text: what it learns, and that stopping, resuming and threads change no bit."""

import json
import os
import pty
import re
import select
import subprocess
import time

import numpy as np
import pytest
from engramhc import reference
from engramhc.reference.files import load, save

WORDS = 60
SIZES = "300,500"
WIDTH = 8  # of a table row
SMALL = ["--tokens", 128, "--lanes", 4, "--streams", 3, "--width", 24, "--classes", 32]


def succeed(result):
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def made_up_text(length, seed):
    """Mostly decided by the two words before; some words are much more frequent than others."""
    rng = np.random.default_rng(seed)
    follows = rng.zipf(1.5, (WORDS, WORDS)) % WORDS
    ids = [5, 7]
    for surprise, word in zip(rng.random(length), rng.zipf(1.5, length) % WORDS):
        ids.append(word if surprise < 0.2 else follows[ids[-2], ids[-1]])
    return np.array(ids, np.int32)


@pytest.fixture(scope="module")
def inputs(ehc, tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    tokenizer = folder / "tokenizer.json"
    vocabulary = {f"word{i}": i for i in range(WORDS)}
    tokenizer.write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }))
    paths = {name: folder / name for name in ("ids.npy", "map", "layout.safetensors")}
    np.save(paths["ids.npy"], made_up_text(6000, 3))
    succeed(ehc.run("tokmap", "build", tokenizer, "-o", paths["map"]))
    succeed(ehc.run("layout", "show", "--preset", "demo", "--sizes", SIZES, "--row-width", WIDTH,
                    "--compressed-vocab", WORDS, "-o", paths["layout.safetensors"]))
    return ["--ids", paths["ids.npy"], "--map", paths["map"], "--layout",
            paths["layout.safetensors"]]


def train(ehc, inputs, folder, name, steps, *more, threads=2):
    target = folder / f"{name}.json"
    result = ehc.run("train", *inputs, *SMALL, "--steps", steps, "--json", target, *more,
                     threads=threads)
    assert result.stderr == ""  # no terminal, no progress bar
    assert succeed(result).startswith(f"steps {steps} (")
    return json.loads(target.read_text())


def without_clock(result):
    result = dict(result)
    for name in ("seconds", "tokens_per_second", "resumed_at"):
        result.pop(name)
    result["configuration"] = {k: v for k, v in result["configuration"].items() if k != "threads"}
    return result


@pytest.fixture(scope="module")
def whole_run(ehc, inputs, tmp_path_factory):
    return train(ehc, inputs, tmp_path_factory.mktemp("whole"), "whole", 40)


def test_learns_what_frequencies_do_not_tell(ehc, inputs, tmp_path):
    result = train(ehc, inputs, tmp_path, "long", 150)
    last = result["last"]
    assert last["steps"] == 50
    assert last["loss"] == pytest.approx(np.mean(result["losses"][-50:]), rel=1e-6)
    assert last["unigram_loss"] == pytest.approx(np.mean(result["unigram_losses"][-50:]), rel=1e-6)
    assert last["loss"] < 0.8 * last["unigram_loss"]
    assert result["losses"][0] == pytest.approx(result["unigram_losses"][0], rel=0.02)


def test_unigram_loss_counted_twice(inputs, whole_run):
    """Classes, lanes and frequencies again, by NumPy."""
    ids = np.load(inputs[1])
    counts = np.bincount(ids, minlength=WORDS)
    order = np.argsort(-counts, kind="stable")
    classes = np.empty(WORDS, int)
    classes[order] = np.minimum(np.arange(WORDS), 31)
    frequency = np.bincount(classes[ids], minlength=32) + 1
    surprise = -np.log(frequency / frequency.sum())
    lane = (len(ids) - 1) // 4 // 32 * 32
    assert whole_run["configuration"]["steps_per_pass"] == lane // 32
    for step, loss in enumerate(whole_run["unigram_losses"]):
        at = (np.arange(4) * lane + step * 32 % lane)[:, None] + np.arange(32)
        assert loss == pytest.approx(surprise[classes[ids[at + 1]]].mean(), rel=1e-6)


def test_threads_change_no_bit(ehc, inputs, tmp_path, whole_run):
    one = train(ehc, inputs, tmp_path, "one", 40, threads=1)
    assert one["configuration"]["threads"] == 1 and whole_run["configuration"]["threads"] == 2
    assert without_clock(one) == without_clock(whole_run)


def test_resuming_changes_no_bit(ehc, inputs, tmp_path, whole_run):
    """Also past the end of the lanes, on another number of threads, and without anything to do."""
    keep = ["--checkpoint", tmp_path / "state"]
    first = train(ehc, inputs, tmp_path, "first", 17, *keep)
    assert first["losses"] == whole_run["losses"][:17]
    rest = train(ehc, inputs, tmp_path, "rest", 40, *keep, threads=1)
    assert (rest["resumed_at"], rest["steps"]) == (17, 40)
    assert without_clock(rest) == without_clock(whole_run)
    assert whole_run["steps"] < whole_run["configuration"]["steps_per_pass"] + 1
    again = train(ehc, inputs, tmp_path, "again", 40, *keep)
    assert again["resumed_at"] == 40 and without_clock(again) == without_clock(whole_run)
    train(ehc, inputs, tmp_path, "at-once", 40, "--checkpoint", tmp_path / "other", "--every", 7)
    assert (tmp_path / "state").read_bytes() == (tmp_path / "other").read_bytes()


def test_killed_and_resumed(ehc, inputs, tmp_path):
    state = tmp_path / "state"
    command = [ehc.path, "train", *inputs, *SMALL, "--steps", 1000000, "--every", 3,
               "--checkpoint", state]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not state.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
    steps = len(load(state)[0]["losses"].data)
    assert steps % 3 == 0
    resumed = train(ehc, inputs, tmp_path, "resumed", steps + 4, "--checkpoint", state)
    assert resumed["resumed_at"] == steps
    at_once = train(ehc, inputs, tmp_path, "at-once", steps + 4)
    assert without_clock(resumed) == without_clock(at_once)


# One step again, by the NumPy reference: forward, every gradient, both optimizers.

TOKENS, LANES, STREAMS, SIZE, CLASSES = 128, 4, 3, 24, 32
GATE = {"eps": 1e-6, "clamp": 1e-6, "dilation": 3, "conv_eps": 1e-5}


def splitmix64(seed, index):
    """Output `index` of the stream that starts at `seed`; both may be arrays."""
    word = np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15) * (np.asarray(index, np.uint64) + np.uint64(1))
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def incoming_streams(ids):
    """Sums of four uniform numbers, of a random stream with a name, at the place of each id."""
    with np.errstate(over="ignore"):
        stream = np.uint64(0)  # seed 0
        for letter in b"residual":
            stream = splitmix64(stream ^ np.uint64(letter), 0)
        at = ids[:, None] * (STREAMS * SIZE) + np.arange(STREAMS * SIZE)
        bits = splitmix64(stream, at)
    parts = sum(((bits >> np.uint64(k)) & np.uint64(0xFFFF)).astype(np.int64) for k in (0, 16, 32, 48))
    values = (parts - 2 * 0xFFFF).astype(np.float32) * (np.float32(1.7320508) / np.float32(65536))
    return values.reshape(-1, STREAMS, SIZE)


def numpy_step(state, layout, ids, step):
    """Loss and new state of one step, tensors in the shapes of a checkpoint."""

    def run(name, inputs, **attrs):
        outputs = reference.run(f"engram.{name}", inputs, attrs)
        return {key: value.data for key, value in outputs.items()}

    def value(name, *shape):
        return state[name].reshape(shape)

    span = TOKENS // LANES
    lane = (len(ids) - 1) // LANES // span * span
    starts = np.arange(LANES) * lane + step * span % lane
    here = (starts[:, None] + np.arange(span)).ravel()
    history = np.stack([[ids[at + k] if at + k >= 0 else -1 for k in (-2, -1)] for at in starts])
    sequences = np.arange(LANES + 1, dtype=np.int32) * span
    counts = np.bincount(ids, minlength=WORDS)
    classes = np.empty(WORDS, int)
    classes[np.argsort(-counts, kind="stable")] = np.minimum(np.arange(WORDS), CLASSES - 1)
    window = run("window", {"ids": ids[here], "history": history.astype(np.int32),
                            "cu_seqlens": sequences},
                 max_ngram=3, pad_id=2, blocking="slot")["window"]
    indices = run("hash", {"window": window} | {k: layout[k].data[:1] for k in
                  ("multipliers", "vocab_sizes", "offsets")})["indices"][0]
    embedding = run("gather_fwd", {"table": state["table"], "indices": indices})["embedding"]
    width = embedding.shape[1]
    projection = {"embedding": embedding, "weight": value("projection", STREAMS + 1, SIZE, width)}
    layer = {
        "residual": incoming_streams(ids[here]),
        "kv": run("kv_projection_fwd", projection | {"bias": state["projection_bias"]})["kv"],
        "weight_hidden": state["weight_hidden"],
        "weight_embed": state["weight_embed"],
        "conv_weight": value("conv_weight", STREAMS, SIZE, 4),
        "conv_norm_weight": state["conv_norm_weight"],
        "cu_seqlens": sequences,
    }
    added = run("layer_fwd", layer, **GATE)["out"].astype(np.float64) - layer["residual"]
    features = added.mean(axis=1)
    softmax = state["softmax"].astype(np.float64)
    logits = features @ softmax.T + state["softmax_bias"]
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = classes[ids[here + 1]]
    loss = -logits[np.arange(TOKENS), expected].mean()

    grad_logits = (np.exp(logits) - np.eye(CLASSES)[expected]) / TOKENS
    grad_features = grad_logits @ softmax / STREAMS
    grad_out = np.repeat(grad_features[:, None, :], STREAMS, axis=1).astype(np.float32)
    grads = run("layer_bwd", layer | {"grad_out": grad_out}, **GATE)
    grads |= run("kv_projection_bwd", projection | {"grad_kv": grads["grad_kv"]})
    grad_table = run("gather_bwd", {"grad_embedding": grads["grad_embedding"], "indices": indices},
                     rows=len(state["table"]))["grad_table"]
    new = run("optimizer_step", {"weight": state["table"], "grad": grad_table,
                                 "momentum": state["table.momentum"]}, lr=RATES[1], eps=1e-20)
    result = {"table": new["weight"], "table.momentum": new["momentum"]}
    for name, grad in {
        "projection": grads["grad_weight"], "projection_bias": grads["grad_bias"],
        "weight_hidden": grads["grad_weight_hidden"], "weight_embed": grads["grad_weight_embed"],
        "conv_weight": grads["grad_conv_weight"], "conv_norm_weight": grads["grad_conv_norm_weight"],
        "softmax": grad_logits.T @ features, "softmax_bias": grad_logits.sum(axis=0),
    }.items():
        moved = run("momentum_update", {"grad": grad.reshape(state[name].shape).astype(np.float32),
                                        "momentum": state[f"{name}.momentum"]},
                    beta=0.9, nesterov=True)
        result[name] = state[name] - RATES[3] * moved["update"]
        result[f"{name}.momentum"] = moved["momentum"]
    return loss, result


RATES = ["--table-rate", 0.25, "--rate", 0.75]


def test_a_step_counted_twice(ehc, inputs, tmp_path):
    """Late enough that the convolution and all weights have left their first values."""
    checkpoint = tmp_path / "state"
    keep = ["--checkpoint", checkpoint, *RATES]
    train(ehc, inputs, tmp_path, "before", 12, *keep)
    before = {name: entry.data for name, entry in load(checkpoint)[0].items()}
    train(ehc, inputs, tmp_path, "after", 13, *keep)
    after = {name: entry.data for name, entry in load(checkpoint)[0].items()}
    loss, expected = numpy_step(before, load(inputs[5])[0], np.load(inputs[1]), 12)
    assert after["losses"][12] == pytest.approx(loss, rel=1e-5)
    assert set(expected) == set(after) - {"losses"}
    for name, values in expected.items():
        change = np.linalg.norm(values - before[name].astype(np.float64))
        assert change > 0, name
        # Where a row's dot is close to 0, its gate amplifies the roundings before it.
        assert np.linalg.norm(after[name] - values) < 1e-4 * change, name


def test_a_terminal_sees_the_loss(ehc, inputs):
    ours, theirs = pty.openpty()
    command = [ehc.path, "train", *inputs, *SMALL, "--steps", 1000000]
    with subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL,
                          stderr=theirs) as process:
        shown = b""
        while b"loss" not in shown and select.select([ours], [], [], 60)[0]:
            shown += os.read(ours, 4096)
        process.kill()
    os.close(ours)
    os.close(theirs)
    assert re.search(rb"\rtraining \[=* *\] \d+/1000000 loss \d+\.\d{4}", shown)


@pytest.fixture(scope="module")
def checkpoint(ehc, inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    train(ehc, inputs, folder, "short", 2, "--checkpoint", folder / "state")
    return folder / "state"


def refused(ehc, inputs, state, *more):
    before = state.read_bytes()
    result = ehc.run("train", *inputs, *SMALL, "--steps", 3, "--checkpoint", state, *more)
    assert result.stdout == "" and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"ehc: {state}: ")
    assert state.read_bytes() == before
    return result


@pytest.mark.parametrize("left", [0, 5, 100, -1000, -1])
def test_truncated_checkpoints_are_refused(ehc, inputs, tmp_path, checkpoint, left):
    state = tmp_path / "state"
    state.write_bytes(checkpoint.read_bytes()[:left])
    assert refused(ehc, inputs, state).returncode == 4


def test_damaged_checkpoints_are_refused(ehc, inputs, tmp_path, checkpoint):
    state = tmp_path / "state"
    content = bytearray(checkpoint.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    result = refused(ehc, inputs, state)
    assert result.returncode == 4 and "damaged" in result.stderr


@pytest.mark.parametrize("change", ["no metadata", "version", "settings", "step", "shape", "missing"])
def test_other_files_are_no_checkpoints(ehc, inputs, tmp_path, checkpoint, change):
    tensors, metadata = load(checkpoint)
    about = json.loads(metadata["ehc_train"])
    if change == "version":
        about["version"] = 2
    if change == "settings":
        about["settings"] = []
    if change == "step":
        about["step"] = 3
    if change == "shape":
        tensors["softmax"] = tensors["softmax_bias"]
    if change == "missing":
        del tensors["table.momentum"]
    state = tmp_path / "state"
    save(state, tensors, None if change == "no metadata" else {"ehc_train": json.dumps(about)})
    assert refused(ehc, inputs, state).returncode == 4


def test_checkpoints_of_other_settings_are_refused(ehc, inputs, tmp_path, checkpoint):
    state = tmp_path / "state"
    state.write_bytes(checkpoint.read_bytes())
    result = refused(ehc, inputs, state, "--seed", 1)
    assert result.returncode == 3 and "expected seed 1, got 0" in result.stderr
    ids = tmp_path / "ids.npy"
    np.save(ids, made_up_text(6000, 4))
    other_text = ["--ids", ids, *inputs[2:]]
    result = refused(ehc, other_text, state)
    assert result.returncode == 3 and "expected ids" in result.stderr
    restarted = train(ehc, other_text, tmp_path, "restarted", 3, "--checkpoint", state, "--restart")
    assert restarted["resumed_at"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--lanes", 5], 2, "divisor of the 128 tokens"),
        (["--classes", 31], 2, "even"),
        (["--text-tokens", 128], 3, "more than the 128 tokens of one step, got 128"),
        (["--layer", 7], 3, "expected one of 1 15"),
        (["--checkpoint", "/nonexistent/x"], 4, "folder does not exist"),
        (["--json", "/nonexistent/x"], 4, "folder does not exist"),
        (["--rate", 1000], 3, "take smaller rates"),
    ],
)
def test_errors(ehc, inputs, arguments, code, message):
    result = ehc.run("train", *inputs, "--tokens", 128, "--width", 24, "--steps", 50, *arguments)
    assert (result.returncode, result.stdout) == (code, ""), result
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_short_texts_and_paragraphs(ehc, inputs, tmp_path):
    """One token more than a step takes: every step is the same text, and the gates fit it."""
    result = train(ehc, inputs, tmp_path, "short", 20, "--text-tokens", 129, "--paragraph-begin", 100)
    assert result["configuration"]["steps_per_pass"] == 1
    assert len(set(result["unigram_losses"])) == 1
    assert result["losses"][-1] < result["losses"][0]
    for moment in ("before", "after"):
        gates = np.array(result["gate"][moment])
        assert gates.shape == (28, 3) and np.all((gates > 0) & (gates < 1))
