"""`ehc op` as a command: exit codes, messages, files, attributes, tables."""

import json
import pathlib
import subprocess

import numpy as np
import pytest
from engramhc.reference import REFERENCE
from engramhc.reference.dtypes import STORAGE, Tensor, encode
from engramhc.reference.files import load, save
from engramhc.reference.tolerance import comparable, compare

from broken_files import broken_files
from conftest import set_arguments
from error_bounds import tolerances
from legality import attributes_of, inputs_of, legal, outputs_of, row_of
from protocol_rows import ROWS

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
WEIGHTS = {
    "weight_hidden": encode(np.ones((2, 3)), "F32"),
    "weight_embed": encode(np.full((2, 3), 2.0), "BF16"),
}
IDS = {"ids": encode(np.arange(5), "I32")}
WINDOW = ["--set", "max_ngram=3", "--set", "pad_id=0", "--set", "blocking=slot"]
PRIMES = ["--set", "sizes=10", "--set", "layers=1", "--set", "heads=1"]


def needs(ehc, name):
    if name not in ehc.table:
        pytest.skip(f"{name} is not in this build")


def refusal(result, code, *words):
    """Asserts a silent stdout, one line on stderr, and its words."""
    line = result.stderr
    assert result.returncode == code, result
    assert result.stdout == "", result
    assert line.endswith("\n") and line.count("\n") == 1, repr(line)
    for word in words:
        assert word in line, (word, line)
    return line


def violation(result, operator, *words):
    """A contract violation: who, what, what was expected and what came."""
    return refusal(result, 3, f"ehc: {operator}: ", "expected", "got", *words)


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- usage (2) ------------------------------------------------------------------------------

USAGE = {
    "unknown operator": (
        ["engram.nothing", "--in", "{in}", "--out", "{out}"],
        ["unknown operator 'engram.nothing'"],
    ),
    "unknown operator beats missing file": (
        ["nothing", "--in", "{none}", "--out", "{out}"],
        ["unknown operator 'nothing'"],
    ),
    "unknown option": (
        ["engram.fused_weight", "--in", "{in}", "--out", "{out}", "--colour", "red"],
        ["--colour"],
    ),
    "device name": (
        ["engram.fused_weight", "--in", "{in}", "--out", "{out}", "--device", "tpu"],
        ["tpu"],
    ),
    "implementation": (
        ["engram.fused_weight", "--in", "{in}", "--out", "{out}", "--impl", "magic"],
        ["magic"],
    ),
    "set without =": (
        ["engram.fused_weight", "--in", "{in}", "--out", "{out}", "--set", "eps"],
        ["eps"],
    ),
    "missing --in": (["engram.fused_weight", "--out", "{out}"], ["--in"]),
    "missing --out": (["engram.fused_weight", "--in", "{in}"], ["--out"]),
    "missing --out without inputs": (["engram.primes", *PRIMES], ["--out"]),
    "usage beats unreadable file": (
        ["engram.fused_weight", "--in", "{none}", "--out", "{out}", "--device", "tpu"],
        ["tpu"],
    ),
    "no operator": ([], []),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage(ehc, tmp_path, case):
    arguments, words = USAGE[case]
    names = {"in": tmp_path / "in", "out": tmp_path / "out", "none": tmp_path / "none"}
    save(names["in"], WEIGHTS)
    before = snapshot(tmp_path)
    result = ehc.run("op", *(word.format(**names) for word in arguments))
    refusal(result, 2, *words)
    assert snapshot(tmp_path) == before


# --- files (4) ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", broken_files())
def test_unreadable_file(ehc, tmp_path, case):
    source = tmp_path / "in"
    source.write_bytes(broken_files()[case])
    before = snapshot(tmp_path)
    # The surplus attribute is a violation (3) that must not come first.
    result = ehc.run(
        "op", "engram.fused_weight", "--in", source, "--out", tmp_path / "out", "--set", "surplus=1"
    )
    refusal(result, 4, str(source))
    assert snapshot(tmp_path) == before


FILES = {
    "missing input": ("{dir}/none", "{dir}/out", "{dir}/none"),
    "folder as input": ("{dir}", "{dir}/out", "{dir}"),
    "output in no folder": ("{dir}/in", "{dir}/none/out", "{dir}/none/out"),
    "output below a file": ("{dir}/in", "{dir}/in/out", "{dir}/in/out"),
    "output is a folder": ("{dir}/in", "{dir}/folder", "{dir}/folder"),
}


@pytest.mark.parametrize(
    "surplus", [[], ["--set", "surplus=1"]], ids=["alone", "before a violation"]
)
@pytest.mark.parametrize("case", FILES)
def test_paths(ehc, tmp_path, case, surplus):
    source, target, blamed = (text.format(dir=tmp_path) for text in FILES[case])
    save(tmp_path / "in", WEIGHTS)
    (tmp_path / "folder").mkdir()
    names = sorted(path.name for path in tmp_path.rglob("*"))
    result = ehc.run("op", "engram.fused_weight", "--in", source, "--out", target, *surplus)
    refusal(result, 4, blamed)
    assert sorted(path.name for path in tmp_path.rglob("*")) == names


# --- violations (3) -----------------------------------------------------------------------------

# operator, inputs, arguments, words of the message
VIOLATIONS = {
    "unknown attribute": ("engram.fused_weight", WEIGHTS, ["--set", "surplus=1"], ["'surplus'"]),
    "missing attribute": ("engram.window", IDS, WINDOW[:2] + WINDOW[4:], ["'pad_id'"]),
    "no default blocking": ("engram.window", IDS, WINDOW[:4], ["'blocking'"]),
    "below the range": (
        "engram.window",
        IDS,
        [*WINDOW, "--set", "max_ngram=1"],
        ["'max_ngram'", "1"],
    ),
    "above the range": (
        "engram.window",
        IDS,
        [*WINDOW, "--set", "max_ngram=9"],
        ["'max_ngram'", "9"],
    ),
    "pad beyond 31 bits": (
        "engram.window",
        IDS,
        [*WINDOW, "--set", "pad_id=2147483648"],
        ["'pad_id'", "2147483648"],
    ),
    "word not in the list": (
        "engram.window",
        IDS,
        [*WINDOW, "--set", "blocking=near"],
        ["'blocking'", "near"],
    ),
    "text for int": ("engram.window", IDS, [*WINDOW, "--set", "pad_id=two"], ["'pad_id'", "two"]),
    "fraction for int": ("engram.window", IDS, [*WINDOW, "--set", "pad_id=1.5"], ["'pad_id'"]),
    "int beyond 64 bits": (
        "engram.window",
        IDS,
        [*WINDOW, "--set", "pad_id=9223372036854775808"],
        ["'pad_id'"],
    ),
    "empty int": ("engram.window", IDS, [*WINDOW, "--set", "pad_id="], ["'pad_id'"]),
    "trailing letters": ("engram.window", IDS, [*WINDOW, "--set", "pad_id=2x"], ["'pad_id'"]),
    "not a bool": (
        "engram.compress_ids",
        {**IDS, "table": encode(np.arange(9), "I32")},
        ["--set", "checked=yes"],
        ["'checked'", "yes"],
    ),
    "hole in ints": ("engram.primes", None, [*PRIMES, "--set", "sizes=5,,7"], ["'sizes'"]),
    "ints out of range": ("engram.primes", None, [*PRIMES, "--set", "sizes=5,0"], ["'sizes'", "0"]),
    "prime beyond 31 bits": (
        "engram.primes",
        None,
        [*PRIMES, "--set", "sizes=2147483647", "--set", "heads=2"],
        ["'sizes'"],
    ),
    "negative seed": (
        "engram.multipliers",
        None,
        [
            "--set",
            "layer_ids=1",
            "--set",
            "max_ngram=3",
            "--set",
            "compressed_vocab=9",
            "--set",
            "seed=-1",
        ],
        ["'seed'", "-1"],
    ),
    "negative layer": (
        "engram.multipliers",
        None,
        ["--set", "layer_ids=1,-2", "--set", "max_ngram=3", "--set", "compressed_vocab=9"],
        ["'layer_ids'", "-2"],
    ),
    "id beyond the table": (
        "engram.compress_ids",
        {**IDS, "table": encode(np.arange(4), "I32")},
        [],
        ["'ids'", "4"],
    ),
    "surplus tensor": (
        "engram.fused_weight",
        {**WEIGHTS, "surplus": WEIGHTS["weight_embed"]},
        [],
        ["'surplus'"],
    ),
    "tensor name of two lines": (
        "engram.fused_weight",
        {**WEIGHTS, "a\nb": WEIGHTS["weight_embed"]},
        [],
        ["'a"],
    ),
    "attribute name of two lines": ("engram.fused_weight", WEIGHTS, ["--set", "a\nb=1"], ["'a"]),
    "attribute value of two lines": (
        "engram.window",
        IDS,
        [*WINDOW, "--set", "pad_id=1\n2"],
        ["'pad_id'"],
    ),
    "output as input": (
        "engram.fused_weight",
        {**WEIGHTS, "weight_fused": WEIGHTS["weight_hidden"]},
        [],
        ["'weight_fused'"],
    ),
    "tensor for an operator without": ("engram.primes", IDS, PRIMES, ["'ids'"]),
    "cu_seqlens starts late": (
        "engram.window",
        {**IDS, "cu_seqlens": encode([1, 5], "I32")},
        WINDOW,
        ["'cu_seqlens'"],
    ),
    "cu_seqlens decreases": (
        "engram.window",
        {**IDS, "cu_seqlens": encode([0, 4, 3, 5], "I32")},
        WINDOW,
        ["'cu_seqlens'"],
    ),
    "cu_seqlens ends early": (
        "engram.window",
        {**IDS, "cu_seqlens": encode([0, 4], "I32")},
        WINDOW,
        ["'cu_seqlens'"],
    ),
    "cu_seqlens ends late": (
        "engram.window",
        {**IDS, "cu_seqlens": encode([0, 6], "I32")},
        WINDOW,
        ["'cu_seqlens'"],
    ),
    "cu_seqlens empty": (
        "engram.window",
        {**IDS, "cu_seqlens": encode(np.zeros(0, int), "I32")},
        WINDOW,
        ["'cu_seqlens'"],
    ),
    "offsets beyond 31 bits": (
        "engram.offsets",
        {"vocab_sizes": encode([[[2**31 - 1, 1]]], "I32")},
        [],
        ["'vocab_sizes'"],
    ),
}


def indices_case(value):
    return {"table": encode(np.ones((4, 2)), "F32"), "indices": encode([[0, value]], "I64")}


def gate_inputs(n=2, d=3, **more):
    ones = {"residual": (1, n, d), "kv": (1, n + 1, d), "weight_fused": (n, d)}
    return {**{x: encode(np.ones(shape), "F32") for x, shape in ones.items()}, **more}


GATE = ["--set", "eps=1e-6", "--set", "clamp=1e-6"]
VIOLATIONS |= {
    "index of the row behind": ("engram.gather_fwd", indices_case(4), [], ["'indices'", "4"]),
    "index -2": ("engram.gather_fwd", indices_case(-2), [], ["'indices'", "-2"]),
    "index of 33 bits": ("engram.gather_fwd", indices_case(2**32), [], ["'indices'"]),
    "group does not divide": (
        "engram.quantize_rows",
        {"values": encode(np.ones((1, 33)), "F32")},
        [],
        ["'"],
    ),
    "save with inplace": (
        "engram.gate_fwd",
        gate_inputs(),
        [*GATE, "--set", "save=true", "--set", "inplace=true"],
        ["inplace"],
    ),
    "save with inplace, without an output to share": (
        "engram.gate_fwd",
        gate_inputs(),
        [*GATE, "--set", "save=true", "--set", "inplace=true", "--set", "mode=stats"],
        ["inplace"],
    ),
    "both kinds of kv": (
        "engram.gate_fwd",
        gate_inputs(key=encode(np.ones((1, 2, 3)), "F32"), value=encode(np.ones((1, 3)), "F32")),
        GATE,
        ["'"],
    ),
    "nine streams": ("engram.gate_fwd", gate_inputs(n=9), GATE, ["'residual'"]),
    "eps zero": ("engram.gate_fwd", gate_inputs(), [*GATE, "--set", "eps=0"], ["'eps'"]),
    "eps negative": ("engram.gate_fwd", gate_inputs(), [*GATE, "--set", "eps=-1e-6"], ["'eps'"]),
    "eps infinite": ("engram.gate_fwd", gate_inputs(), [*GATE, "--set", "eps=inf"], ["'eps'"]),
    "eps NaN": ("engram.gate_fwd", gate_inputs(), [*GATE, "--set", "eps=nan"], ["'eps'"]),
    "eps text": (
        "engram.gate_fwd",
        gate_inputs(),
        [*GATE, "--set", "eps=small"],
        ["'eps'", "small"],
    ),
    "clamp missing": ("engram.gate_fwd", gate_inputs(), GATE[:2], ["'clamp'"]),
}


def hash_inputs(size=7, offset=0, offset_dtype="I32"):
    return {
        "window": encode([[1, 2]], "I32"),
        "multipliers": encode([[3, 5]], "I64"),
        "vocab_sizes": encode([[[size]]], "I32"),
        "offsets": encode([[offset]], offset_dtype),
    }


def texts(content=b"ab", bounds=(0, 1, 2), raw_bounds=(0, 1, 2)):
    return {
        "texts": Tensor("U8", np.frombuffer(content, np.uint8)),
        "text_offsets": encode(bounds, "I64"),
        "raw_tokens": Tensor("U8", np.frombuffer(b"xy", np.uint8)),
        "raw_offsets": encode(raw_bounds, "I64"),
    }


def layer_inputs(**more):
    inputs = gate_inputs(**more)
    weight = inputs.pop("weight_fused")
    return {**inputs, "weight_hidden": weight, "weight_embed": weight}


ONES = {shape: encode(np.ones(shape), "F32") for shape in ((2, 3), (2, 3, 2), (1, 3, 2, 3))}
CONVOLUTION = {"conv_weight": ONES[2, 3, 2], "conv_norm_weight": ONES[2, 3]}
CONV = {"gated_value": encode(np.ones((5, 2, 3)), "F32"), **CONVOLUTION}
VIOLATIONS |= {
    "hash by zero": ("engram.hash", hash_inputs(size=0), [], ["'vocab_sizes'", "0"]),
    "hash by less than zero": ("engram.hash", hash_inputs(size=-5), [], ["'vocab_sizes'", "-5"]),
    "hash beyond the index": (
        "engram.hash",
        hash_inputs(offset=2**31 - 4, offset_dtype="I64"),
        [],
        ["'"],
    ),
    "offset beyond 64 bits": (
        "engram.hash",
        hash_inputs(offset=2**63 - 1, offset_dtype="I64"),
        ["--set", "index_dtype=I64"],
        ["'"],
    ),
    "offsets of sizes below one": (
        "engram.offsets",
        {"vocab_sizes": encode([[[3, -1]]], "I32")},
        [],
        ["'vocab_sizes'", "-1"],
    ),
    "layout": ("engram.hash", hash_inputs(), ["--set", "layout=CLT"], ["'layout'", "CLT"]),
    "more primes than there are": (
        "engram.primes",
        None,
        [*PRIMES, "--set", f"layers={2**62}"],
        ["'"],
    ),
    "size beyond 31 bits": (
        "engram.primes",
        None,
        [*PRIMES, "--set", f"sizes={2**62}"],
        ["'sizes'"],
    ),
    "text that is not UTF-8": ("engram.token_map", texts(b"a\xff"), [], ["'texts'"]),
    "surrogate in UTF-8": ("engram.token_map", texts(b"\xed\xa0\x80", (0, 3, 3)), [], ["'texts'"]),
    "character cut in two": ("engram.token_map", texts("\u00e9".encode()), [], ["'texts'"]),
    "offsets decrease": ("engram.token_map", texts(bounds=(0, 2, 1)), [], ["'text_offsets'"]),
    "offsets past the end": ("engram.token_map", texts(bounds=(0, 1, 3)), [], ["'text_offsets'"]),
    "offsets far past the end": (
        "engram.token_map",
        texts(raw_bounds=(0, 1, 2**62)),
        [],
        ["'raw_offsets'"],
    ),
    "offsets below zero": ("engram.token_map", texts(bounds=(-1, 1, 2)), [], ["'text_offsets'"]),
    "row of an empty table": (
        "engram.gather_fwd",
        {"table": encode(np.ones((0, 2)), "F32"), "indices": encode([[0]], "I32")},
        [],
        ["'indices'"],
    ),
    "group zero": (
        "engram.quantize_rows",
        {"values": ONES[2, 3]},
        ["--set", "group=0"],
        ["'group'", "0"],
    ),
    "group of 62 bits": (
        "engram.quantize_rows",
        {"values": ONES[2, 3]},
        ["--set", f"group={2**62}"],
        ["'"],
    ),
    "dilation zero": (
        "engram.conv_fwd",
        CONV,
        ["--set", "dilation=0", "--set", "conv_eps=1e-5"],
        ["'dilation'", "0"],
    ),
    "state of one row less": (
        "engram.conv_fwd",
        {**CONV, "state": ONES[1, 3, 2, 3]},
        ["--set", "dilation=4", "--set", "conv_eps=1e-5"],
        ["'state'"],
    ),
    "state of 64 bits": (
        "engram.conv_fwd",
        {**CONV, "state": ONES[1, 3, 2, 3]},
        ["--set", f"dilation={2**63 - 1}", "--set", "conv_eps=1e-5"],
        ["'"],
    ),
    "state without convolution": (
        "engram.layer_fwd",
        layer_inputs(state=ONES[1, 3, 2, 3]),
        GATE,
        ["'"],
    ),
    "half a convolution": (
        "engram.layer_fwd",
        layer_inputs(conv_weight=ONES[2, 3, 2]),
        [*GATE, "--set", "dilation=1", "--set", "conv_eps=1"],
        ["conv_norm_weight"],
    ),
    "dilation missing": (
        "engram.layer_fwd",
        layer_inputs(**CONVOLUTION),
        [*GATE, "--set", "conv_eps=1"],
        ["'dilation'"],
    ),
    "conv_eps missing": (
        "engram.layer_fwd",
        layer_inputs(**CONVOLUTION),
        [*GATE, "--set", "dilation=1"],
        ["'conv_eps'"],
    ),
    "range without the tensor": (
        "engram.layer_fwd",
        layer_inputs(),
        [*GATE, "--set", "dilation=0"],
        ["'dilation'", "0"],
    ),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_violation(ehc, tmp_path, case):
    name, inputs, arguments, words = VIOLATIONS[case]
    needs(ehc, name)
    target = tmp_path / "out"
    target.write_bytes(b"as before")
    files = ["--out", target]
    if inputs is not None:
        save(tmp_path / "in", inputs)
        files += ["--in", tmp_path / "in"]
    before = snapshot(tmp_path)
    violation(ehc.run("op", name, *files, *arguments), name, *words)
    assert snapshot(tmp_path) == before


def test_attributes_without_effect(ehc):
    """conv_eps and dilation are legal, and do nothing, without a convolution."""
    needs(ehc, "engram.layer_fwd")
    attrs = {"eps": 1e-6, "clamp": 1e-6}
    plain_layer = ehc.op("engram.layer_fwd", layer_inputs(), attrs)
    more = ehc.op("engram.layer_fwd", layer_inputs(), {**attrs, "dilation": 3, "conv_eps": 0.5})
    assert plain_layer["out"].data.tobytes() == more["out"].data.tobytes()


def test_dilation_of_64_bits(ehc):
    """Taps that reach before the sequence count nothing, however far they reach."""
    needs(ehc, "engram.conv_fwd")
    outs = [
        ehc.op("engram.conv_fwd", CONV, {"dilation": dilation, "conv_eps": 1e-5})["out"].data
        for dilation in (5, 2**31, 2**62, 2**63 - 1)
    ]
    assert all(out.tobytes() == outs[0].tobytes() for out in outs)


def test_violation_beats_missing_device(ehc, tmp_path):
    save(tmp_path / "in", {"weight_hidden": WEIGHTS["weight_hidden"]})
    result = ehc.run(
        "op",
        "engram.fused_weight",
        "--in",
        tmp_path / "in",
        "--out",
        tmp_path / "out",
        "--device",
        "cuda",
    )
    violation(result, "engram.fused_weight", "'weight_embed'")


def test_device_without_implementation(ehc, tmp_path):
    """Exit 5 for every operator that has none on the device."""
    name = "engram.primes"
    assert "cuda" not in ehc.table[name]["devices"]
    result = ehc.run("op", name, *PRIMES, "--out", tmp_path / "out", "--device", "cuda")
    refusal(result, 5, "cuda")
    assert not list(tmp_path.iterdir())


# --- attributes and metadata --------------------------------------------------------------------


def primes_of(ehc, tmp_path, *arguments, metadata=None):
    files = ["--out", tmp_path / "out"]
    if metadata is not None:
        save(tmp_path / "in", {}, {"ehc": metadata})
        files += ["--in", tmp_path / "in"]
    result = ehc.run("op", "engram.primes", *files, *arguments)
    if result.returncode:
        return result
    assert result.stderr == ""
    return load(tmp_path / "out")[0]["vocab_sizes"].data.tolist()


def test_metadata_attributes(ehc, tmp_path):
    text = json.dumps({"op": "engram.primes", "set": {"sizes": [10, 20], "layers": 1, "heads": 2}})
    assert primes_of(ehc, tmp_path, metadata=text) == [[[11, 13], [23, 29]]]
    assert primes_of(ehc, tmp_path, "--set", "heads=1", metadata=text) == [[[11], [23]]]


def test_last_set_wins(ehc, tmp_path):
    assert primes_of(ehc, tmp_path, *PRIMES, "--set", "sizes=20", "--set", "sizes=30") == [[[31]]]


def test_override_repairs_metadata(ehc, tmp_path):
    text = json.dumps({"set": {"sizes": [0], "layers": 1, "heads": 1}})
    assert primes_of(ehc, tmp_path, "--set", "sizes=2", metadata=text) == [[[2]]]


@pytest.mark.parametrize(
    "settings, word",
    [
        (
            {"op": "engram.offsets", "set": {"sizes": [10], "layers": 1, "heads": 1}},
            "engram.offsets",
        ),
        (
            {"op": "engram.primes", "set": {"sizes": [10], "layers": 1, "heads": 1, "surplus": 1}},
            "'surplus'",
        ),
        ({"op": "engram.primes", "set": {"sizes": [10], "layers": 1.5, "heads": 1}}, "'layers'"),
        ({"op": "engram.primes", "set": {"sizes": [10], "layers": True, "heads": 1}}, "'layers'"),
        ({"op": "engram.primes", "set": {"sizes": [10, "x"], "layers": 1, "heads": 1}}, "'sizes'"),
        ({"op": "engram.primes", "set": {"sizes": [10], "layers": 1, "heads": None}}, "'heads'"),
        ({"op": "engram.primes", "set": {"sizes": [10], "layers": 2**70, "heads": 1}}, "'layers'"),
        (
            {"op": "engram.primes", "set": {"sizes": [2**64 - 1], "layers": 1, "heads": 1}},
            "18446744",
        ),
    ],
    ids=[
        "other operator",
        "unknown",
        "fraction",
        "bool",
        "text among ints",
        "null",
        "too large",
        "too large in ints",
    ],
)
def test_metadata_violations(ehc, tmp_path, settings, word):
    result = primes_of(ehc, tmp_path, metadata=json.dumps(settings))
    violation(result, "engram.primes", word)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"set": 3}', '{"op": 1}', "{\n\n", '{"a\\nb": 1}']
)
def test_metadata_that_is_no_call(ehc, tmp_path, text):
    """Whether this is a bad file or a violation is not said; that it is refused is."""
    result = primes_of(ehc, tmp_path, metadata=text)
    assert result.returncode in (3, 4)
    refusal(result, result.returncode)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"op": %s}',
        '{"set": %s}',
        '{"set": {"layers": %s}}',
        '{"set": {"sizes": [%s]}}',
        '{"set": {"sizes": [{"a": %s}]}}',
        '{"%%": %s}',
    ],
)
def test_nested_metadata(ehc, tmp_path, text):
    depth = 200_000
    result = primes_of(ehc, tmp_path, metadata=text % ("[" * depth + "]" * depth))
    assert len(violation(result, "engram.primes")) < 1000


def test_nested_tolerance(ehc, tmp_path):
    for text in ('{"tolerance": %s}', '{"tolerance": {"weight_fused": %s}}'):
        save(tmp_path / "in", WEIGHTS, {"ehc": text % ("[" * 200_000 + "]" * 200_000)})
        result = ehc.run("op", "engram.fused_weight", "--in", tmp_path / "in", "--check")
        violation(result, "engram.fused_weight", "tolerance")


# --- streams and limits -------------------------------------------------------------------------


def shell(ehc, line, *arguments):
    command = ["bash", "-c", line, "bash", ehc.path, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full"])
def test_error_that_cannot_be_told(ehc, stream):
    assert shell(ehc, f'"$1" op engram.nothing --out none {stream}').returncode == 2


@pytest.mark.parametrize("stream", [">&-", ">/dev/full"])
def test_result_that_cannot_be_printed(ehc, tmp_path, stream):
    refusal(shell(ehc, f'"$1" op --list {stream}'), 4, "standard output")
    refusal(shell(ehc, f'"$1" op --list --json {stream}'), 4)
    save(tmp_path / "in", WEIGHTS)
    before = snapshot(tmp_path)
    line = f'"$1" op engram.fused_weight --in "$2" --check --out "$3" {stream}'
    refusal(shell(ehc, line, tmp_path / "in", tmp_path / "out"), 4, "standard output")
    assert snapshot(tmp_path) == before


def test_file_size_limit_leaves_nothing(ehc, tmp_path):
    save(tmp_path / "in", {name: encode(np.ones((2, 5000)), "F32") for name in WEIGHTS})
    before = snapshot(tmp_path)
    line = 'ulimit -f 8; "$1" op engram.fused_weight --in "$2" --out "$3"'
    target = tmp_path / "out"
    refusal(shell(ehc, line, tmp_path / "in", target), 4, str(target))
    assert snapshot(tmp_path) == before


def test_input_file_without_tensors_may_be_left_out(ehc, tmp_path):
    assert primes_of(ehc, tmp_path, *PRIMES) == [[[11]]]
    assert primes_of(ehc, tmp_path, *PRIMES, metadata="{}") == [[[11]]]


# --- --check ------------------------------------------------------------------------------


def check(ehc, tmp_path, tensors, settings=None, out=None):
    metadata = {"ehc": json.dumps(settings)} if settings else None
    save(tmp_path / "in", tensors, metadata)
    before = snapshot(tmp_path)
    result = ehc.run(
        "op",
        "engram.fused_weight",
        "--in",
        tmp_path / "in",
        "--check",
        *([] if out is None else ["--out", out]),
    )
    if out is None:
        assert snapshot(tmp_path) == before
    return result


FUSED = encode(np.full((2, 3), 2.0), "F32")
OFF_BY_ONE_BIT = Tensor("F32", np.nextafter(FUSED.data, np.float32(3), dtype=np.float32))


def test_check_agrees(ehc, tmp_path):
    result = check(ehc, tmp_path, {**WEIGHTS, "expected.weight_fused": FUSED}, out=tmp_path / "out")
    assert (result.returncode, result.stderr) == (0, "")
    assert "weight_fused" in result.stdout
    assert np.array_equal(load(tmp_path / "out")[0]["weight_fused"].data, FUSED.data)


@pytest.mark.parametrize(
    "tolerance, code",
    [
        (None, 0),
        ([0, 0], 1),
        ([1, 0], 0),
        ([0, 1e-6], 0),
        ([0, 1e-8], 1),
        ([1, 0, 0.5], 1),
        ([1, 1e-6, 0.0], 0),
    ],
)
def test_check_tolerance(ehc, tmp_path, tolerance, code):
    """All six elements are one unit (2^-22) off."""
    settings = {"op": "engram.fused_weight"}
    if tolerance is not None:
        settings["tolerance"] = {"weight_fused": tolerance}
    result = check(ehc, tmp_path, {**WEIGHTS, "expected.weight_fused": OFF_BY_ONE_BIT}, settings)
    assert result.returncode == code, result
    assert "weight_fused" in result.stdout
    assert result.stderr.count("\n") == code


def test_check_share_is_rounded_up(ehc, tmp_path):
    data = FUSED.data.copy()
    data[1, 2] = OFF_BY_ONE_BIT.data[1, 2]
    tensors = {**WEIGHTS, "expected.weight_fused": Tensor("F32", data)}
    for share, code in ((0.01, 0), (0.0, 1)):
        settings = {"tolerance": {"weight_fused": [1, 0, share]}}
        assert check(ehc, tmp_path, tensors, settings).returncode == code, share


@pytest.mark.parametrize(
    "got, wanted, code",
    [
        (np.nan, np.nan, 0),
        (np.inf, np.inf, 0),
        (np.inf, -np.inf, 1),
        (np.nan, 1.0, 1),
        (1.0, np.nan, 1),
        (np.inf, 3e38, 1),
        (0.0, -0.0, 1),
    ],
)
def test_check_special_values(ehc, tmp_path, got, wanted, code):
    """With [0, 0]: NaN equals NaN, infinities their like, and zeros have signs."""
    result = check(
        ehc,
        tmp_path,
        {
            "weight_hidden": encode([[got]], "F32"),
            "weight_embed": encode([[1.0]], "F32"),
            "expected.weight_fused": encode([[wanted]], "F32"),
        },
        {"tolerance": {"weight_fused": [0, 0]}},
    )
    assert result.returncode == code, result


def test_check_default_tolerance(ehc, tmp_path):
    """F32 [4, 2^-22 of the largest |expected|]: room for 2 units at 2^-22, not for a thousandth."""
    for factor, code in ((1 + 2.0**-22, 0), (1 + 2.0**-10, 1)):
        wanted = encode(FUSED.decode() * factor, "F32")
        assert check(ehc, tmp_path, {**WEIGHTS, "expected.weight_fused": wanted}).returncode == code


def test_check_without_partner_only_reports(ehc, tmp_path):
    result = check(ehc, tmp_path, WEIGHTS)
    assert (result.returncode, result.stderr) == (0, "")
    assert "weight_fused" in result.stdout


def test_expected_tensors_are_never_inputs(ehc, tmp_path):
    save(tmp_path / "in", {**WEIGHTS, "expected.anything": FUSED})
    result = ehc.run(
        "op", "engram.fused_weight", "--in", tmp_path / "in", "--out", tmp_path / "out"
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert set(load(tmp_path / "out")[0]) == {"weight_fused"}


# --- golden cases ------------------------------------------------------------------------------


def golden(name):
    return sorted(GOLDEN.glob(f"{name}.*.safetensors"))


@pytest.mark.parametrize("name", list(REFERENCE))
def test_golden(ehc, name):
    needs(ehc, name)
    for path in golden(name):
        for impl in ehc.implementations(name):
            result = ehc.run("op", name, "--in", path, "--check", "--impl", impl)
            if impl in ehc.refusable and result.returncode == 5 and "refused" in result.stderr:
                continue
            assert (result.returncode, result.stderr) == (0, ""), (path.name, impl, result)


def converted(tensor, dtype):
    """The same numbers (or bytes) in another type where that makes sense; else zeros."""
    eight_bits = ("F8_E4M3", "F8_E8M0", "U8")
    if tensor.dtype in eight_bits and dtype in eight_bits:
        return Tensor(dtype, tensor.data)
    if {tensor.dtype, dtype} <= {"F32", "F16", "BF16"}:
        return encode(tensor.decode(), dtype)
    if {tensor.dtype, dtype} == {"I32", "I64"} and np.all(np.abs(tensor.decode()) < 2**31):
        return encode(tensor.decode(), dtype)
    return Tensor(dtype, np.zeros(tensor.shape, STORAGE[dtype]))


def mutations(name, inputs):
    """Every single fault of every tensor: [(what, tensor, inputs)]."""
    for place, (x, t) in enumerate(inputs.items()):
        yield "dropped", x, {y: u for y, u in inputs.items() if y != x}
        dtypes = row_of(name, x)["dtypes"]
        others = [dtype for dtype in STORAGE if dtype not in dtypes]
        allowed = [dtype for dtype in dtypes if dtype != t.dtype]
        for dtype in [*allowed, others[(place + len(inputs)) % len(others)]]:
            yield f"as {dtype}", x, {**inputs, x: converted(t, dtype)}
        for axis in range(len(t.shape)):
            if t.shape[axis]:  # one more entry, like the last
                widths = [(0, int(a == axis)) for a in range(len(t.shape))]
                longer = np.pad(t.data, widths, mode="edge")
            else:
                longer = np.zeros(t.shape[:axis] + (1,) + t.shape[axis + 1 :], t.data.dtype)
            yield f"axis {axis} + 1", x, {**inputs, x: Tensor(t.dtype, longer)}
        yield "one axis more", x, {**inputs, x: Tensor(t.dtype, t.data[None])}
    yield "surplus", "surplus", {**inputs, "surplus": encode(np.zeros(2), "F32")}


@pytest.mark.parametrize("name", list(REFERENCE))
def test_single_faults(ehc, tmp_path, name):
    """Refused with a message that names a tensor or attribute, or legal and then computed right."""
    needs(ehc, name)
    source, target = tmp_path / "in", tmp_path / "out"
    names = [f"'{x}'" for x in (*inputs_of(name), *attributes_of(name), "surplus")]
    names = [x.replace(".L'", ".") for x in names]  # of a list: any member
    refused = accepted = 0
    problems = []
    for path in golden(name):
        tensors, metadata = load(path)
        attrs = json.loads(metadata["ehc"])["set"]
        inputs = {x: t for x, t in tensors.items() if not x.startswith("expected.")}
        assert legal(name, inputs, attrs), path.name
        for what, x, changed in mutations(name, inputs):
            save(source, changed)
            if not inputs_of(name) and what != "surplus":
                continue
            result = ehc.run("op", name, "--in", source, "--out", target, *set_arguments(attrs))
            label = f"{path.name}, {x} {what}: {result.returncode} {result.stderr.strip()}"
            allowed = legal(name, changed, attrs)
            if allowed:
                try:
                    expected = comparable(REFERENCE[name](changed, attrs))
                except ValueError:
                    allowed = False  # e.g. cu_seqlens that no longer end at T
            unsaid = (name == "engram.token_map" and "axis 0" in what and "offsets" not in x) or (
                # whether two scales, or a width that is no n^2 + 2n, are wrong
                name == "mhc.split_bwd_reduce"
                and "axis 1" in what
            )
            if result.returncode == 3 and (not allowed or unsaid):
                refused += 1
                line = result.stderr
                if not (
                    line.startswith(f"ehc: {name}: ")
                    and line.count("\n") == 1
                    and "expected" in line
                    and "got" in line
                    and any(quoted in line for quoted in names)
                ):
                    problems.append(f"message of {label}")
                if target.exists():
                    problems.append(f"output in spite of {label}")
                    target.unlink()
            elif result.returncode == 0 and allowed:
                accepted += 1
                outputs = comparable(load(target)[0])
                target.unlink()
                allowance = tolerances(name, changed, attrs, expected)
                for output, wanted in expected.items():
                    comparison = compare(outputs[output], wanted, allowance[output])
                    if not comparison.passed:
                        problems.append(f"{output} of {label}: {comparison.text}")
            else:
                problems.append(f"{'legal' if allowed else 'illegal'}, but {label}")
    assert not problems, f"{len(problems)} problems\n" + "\n".join(problems)
    assert refused > 0
    assert sorted(tmp_path.iterdir()) == [source]


# --- tables ------------------------------------------------------------------------------


def test_all_operators_are_listed(ehc):
    assert set(ehc.table) <= set(ROWS), "an operator without a row in protocol_rows.py"
    missing = set(REFERENCE) - set(ehc.table)
    assert not {name for name in missing if not name.startswith("mhc.")}
    if missing:
        pytest.skip(f"not in this build yet: {', '.join(sorted(missing))}")


def test_every_operator_of_the_reference_has_a_row():
    assert set(REFERENCE) == set(ROWS)


def test_plain_list_names_the_same_operators(ehc):
    result = ehc.run("op", "--list")
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(ehc.table)


def plain(shape):
    """One spelling of a shape, whether a list or a text."""
    text = ",".join(map(str, shape)) if isinstance(shape, list) else shape.strip("[]")
    return text.replace("·", "*").replace(" ", "")


@pytest.mark.parametrize("name", list(ROWS))
def test_table_agrees_with_the_contract(ehc, name):
    needs(ehc, name)
    entry = ehc.table[name]
    assert entry["section"] == ROWS[name][0]
    assert entry["devices"] == list(entry["impls"]) and "cpu" in entry["devices"]
    assert all(entry["impls"].values())

    assert [x["name"] for x in entry["inputs"]] == list(inputs_of(name))
    for x in entry["inputs"]:
        row = inputs_of(name)[x["name"]]
        assert sorted(x["dtypes"]) == sorted(row["dtypes"]), x
        assert (plain(x["shape"]), x["optional"]) == (",".join(row["shape"]), row["optional"]), x

    assert [x["name"] for x in entry["outputs"]] == list(outputs_of(name))
    for x in entry["outputs"]:
        row = outputs_of(name)[x["name"]]
        assert (x["dtype"], plain(x["shape"])) == (row["class"], ",".join(row["shape"])), x

    assert [x["name"] for x in entry["attributes"]] == list(attributes_of(name))
    for x in entry["attributes"]:
        row = attributes_of(name)[x["name"]]
        assert (x["type"], x.get("values")) == (row["type"], row["values"]), x
        assert x.get("range", "[]").strip("[]").replace(" ", "") == (row["range"] or "").strip(
            "[]"
        ), x
        default = x.get("default")
        default = str(default).lower() if isinstance(default, bool) else default
        assert (None if default is None else str(default)) == row["default"], x
        for condition in ("required_with", "required_without"):
            assert x.get(condition) == row.get(condition), x
        bare = row["default"] is None and not {"required_with", "required_without"} & set(row)
        assert x.get("required", False) is bare, x
