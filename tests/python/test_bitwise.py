"""What must be equal bit for bit, for every implementation on the CPU.

Each test states two ways to the same numbers and compares the bytes of the outputs.
"""

import numpy as np
import pytest
from engramhc.reference.dtypes import Tensor, encode

from conftest import Refused
from op_cases import (
    SPACES,
    build,
    cases_of,
    floats,
    gate_fwd,
    hash_rows,
    layer_fwd,
    mask_of,
    window,
)

DTYPES = ["F32", "BF16", "F16"]
GATE = {"eps": 1e-6, "clamp": 1e-6}
STATISTICS = ["dot", "alpha", "rstd_residual", "rstd_key"]


def same_bits(left, right, names=None):
    assert names or set(left) == set(right)
    for name in names or left:
        assert (left[name].dtype, left[name].shape) == (right[name].dtype, right[name].shape), name
        assert left[name].data.tobytes() == right[name].data.tobytes(), f"{name} differs"


def rows(t, start, stop):
    """Tokens start..stop-1."""
    return Tensor(t.dtype, t.data[start:stop])


def random():
    return np.random.default_rng(20240229)


@pytest.fixture
def every(ehc):
    """Runs a check once per implementation: every(name, check(op)), op(inputs, attrs, ...)."""

    def run(name, check):
        if name not in ehc.table:
            pytest.skip(f"{name} is not in this build")
        for impl in ehc.implementations(name):

            def op(inputs, attrs, operator=name, impl=impl, **more):
                if impl not in ehc.implementations(operator):  # a part that has no such kernel
                    impl = None
                return ehc.op(operator, inputs, attrs, impl=impl, **more)

            try:
                check(op)
            except Refused:
                continue
            except AssertionError as error:
                raise AssertionError(f"{name}, {impl}: {error}") from error

    return run


def gate_case(dtype, n=3, d=97, tokens=13, mask="alternating", packed=True, special="normal"):
    return gate_fwd(random(), (tokens,), n, d, dtype, mask, packed, "add", "plain", 1e-6, special)[
        0
    ]


def separate(inputs):
    """The same call with key and value instead of kv."""
    kv = inputs["kv"]
    parts = {name: t for name, t in inputs.items() if name != "kv"}
    return {
        **parts,
        "key": Tensor(kv.dtype, np.ascontiguousarray(kv.data[..., :-1, :])),
        "value": Tensor(kv.dtype, np.ascontiguousarray(kv.data[..., -1, :])),
    }


# --- gate ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 16, 97, 256])
def test_gate_save_inplace_packed(every, dtype, d):
    inputs = gate_case(dtype, d=d)

    def check(op):
        plain = op(inputs, GATE)
        saved = op(inputs, {**GATE, "save": True})
        same_bits(plain, saved, ["out"])
        assert set(saved) == {"out", *STATISTICS}
        same_bits(plain, op(inputs, {**GATE, "inplace": True}))
        same_bits(saved, op(separate(inputs), {**GATE, "save": True}))
        same_bits(plain, op(separate(inputs), {**GATE, "inplace": True}))
        statistics = op(inputs, {**GATE, "mode": "stats"})
        same_bits(saved, statistics, ["alpha"])
        value = op(inputs, {**GATE, "mode": "value", "save": True})
        same_bits(saved, value, STATISTICS)

    every("engram.gate_fwd", check)


def test_gate_leading_dimensions(every):
    inputs = gate_case("BF16", tokens=12)
    folded = {
        name: Tensor(
            t.dtype, t.data if name == "weight_fused" else t.data.reshape(3, 4, *t.shape[1:])
        )
        for name, t in inputs.items()
    }

    def check(op):
        flat = op(inputs, {**GATE, "save": True})
        for name, t in op(folded, {**GATE, "save": True}).items():
            assert t.shape[:2] == (3, 4)
            assert t.data.tobytes() == flat[name].data.tobytes(), name

    every("engram.gate_fwd", check)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_rows_are_copies(every, dtype):
    """NaN payloads, signed zeros and subnormals of a masked residual row survive."""
    inputs = gate_case(dtype, n=2, d=33, tokens=4, mask="all")
    width = inputs["residual"].data.itemsize
    patterns = random().integers(0, 256, inputs["residual"].data.nbytes).astype(np.uint8)
    shape, storage = inputs["residual"].shape, inputs["residual"].data.dtype
    assert patterns.size == width * np.prod(shape)
    inputs["residual"] = Tensor(dtype, patterns.view(storage).reshape(shape))

    def check(op):
        out = op(inputs, {**GATE, "save": True})
        assert out["out"].data.tobytes() == patterns.tobytes()
        for name in STATISTICS:
            assert not out[name].data.view(np.uint32).any(), name

    every("engram.gate_fwd", check)


# --- layer ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", ["F32", "BF16"])
def test_layer_without_convolution_is_the_gate(ehc, every, dtype, weight):
    inputs, attrs = layer_fwd(
        random(),
        13,
        3,
        97,
        dtype,
        weight,
        weight,
        True,
        None,
        "F32",
        "alternating",
        "absent",
        False,
        "once",
        True,
        "normal",
    )

    def check(op):
        whole = op(inputs, attrs)
        weights = {name: inputs[name] for name in ("weight_hidden", "weight_embed")}
        fused = ehc.op("engram.fused_weight", weights, {})
        parts = {name: t for name, t in inputs.items() if name not in weights}
        same_bits(whole, op({**parts, **fused}, {**GATE, "save": True}, operator="engram.gate_fwd"))
        same_bits(whole, op(inputs, {**attrs, "rounding": "twice"}))

    every("engram.layer_fwd", check)


@pytest.mark.parametrize("rounding", ["once", "twice"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_save_and_packed(every, dtype, rounding):
    inputs, attrs = layer_fwd(
        random(),
        13,
        3,
        97,
        dtype,
        "BF16",
        "F32",
        True,
        (4, 3),
        "F32",
        "alternating",
        "with empty",
        True,
        rounding,
        False,
        "normal",
    )

    def check(op):
        plain = op(inputs, attrs)
        saved = op(inputs, {**attrs, "save": True})
        same_bits(plain, saved, ["out", "state"])
        same_bits(saved, op(separate(inputs), {**attrs, "save": True}))

    every("engram.layer_fwd", check)


def test_layer_statistics_are_those_of_the_gate(ehc, every):
    inputs, attrs = layer_fwd(
        random(),
        13,
        3,
        97,
        "BF16",
        "F32",
        "F32",
        True,
        (4, 3),
        "F32",
        "alternating",
        "absent",
        False,
        "once",
        True,
        "normal",
    )
    weights = {name: inputs[name] for name in ("weight_hidden", "weight_embed")}
    parts = {name: inputs[name] for name in ("residual", "kv", "image_token_mask")}

    def check(op):
        fused = ehc.op("engram.fused_weight", weights, {})
        gate = op({**parts, **fused}, {**GATE, "save": True}, operator="engram.gate_fwd")
        same_bits(op(inputs, attrs), gate, STATISTICS)

    every("engram.layer_fwd", check)


# --- decoding ------------------------------------------------------------------------------


def convolution_case(name, dtype, tokens, d=37):
    generator, n, w, dilation = random(), 2, 4, 3
    weights = {
        "conv_weight": floats(generator, (n, d, w), "F32"),
        "conv_norm_weight": floats(generator, (n, d), "F32", center=1.0),
    }
    mask = mask_of("alternating", (tokens,))
    attrs = {"dilation": dilation, "conv_eps": 1e-5}
    state = encode(np.zeros((1, (w - 1) * dilation, n, d)), "F32")
    if name == "engram.conv_fwd":
        inputs = {"gated_value": floats(generator, (tokens, n, d), dtype), **mask}
    else:
        inputs = {
            "residual": floats(generator, (tokens, n, d), dtype),
            "kv": floats(generator, (tokens, n + 1, d), dtype),
            **mask,
        }
        weights |= {
            "weight_hidden": floats(generator, (n, d), "F32", center=1.0),
            "weight_embed": floats(generator, (n, d), "F32", center=1.0),
        }
        attrs |= GATE
    return inputs, weights, attrs, state


@pytest.mark.parametrize("name", ["engram.conv_fwd", "engram.layer_fwd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_token_by_token_is_one_pass(every, name, dtype):
    inputs, weights, attrs, zeros = convolution_case(name, dtype, 14)

    def check(op):
        whole = op({**inputs, **weights, "state": zeros}, attrs)
        same_bits(whole, op({**inputs, **weights}, attrs), ["out"])
        for chunk in (1, 5):
            state, outputs = zeros, []
            for start in range(0, 14, chunk):
                part = {x: rows(t, start, start + chunk) for x, t in inputs.items()}
                step = op({**part, **weights, "state": state}, attrs)
                state = step["state"]
                outputs.append(step["out"].data)
            assert np.concatenate(outputs).tobytes() == whole["out"].data.tobytes(), chunk
            same_bits({"state": state}, whole, ["state"])

    every(name, check)


@pytest.mark.parametrize("name", ["engram.conv_fwd", "engram.layer_fwd"])
def test_packed_sequences_are_separate_calls(every, name):
    inputs, weights, attrs, zeros = convolution_case(name, "BF16", 14)
    bounds = [0, 5, 5, 14]
    state = floats(random(), (3, *zeros.shape[1:]), "F32")

    def check(op):
        whole = op(
            {**inputs, **weights, "state": state, "cu_seqlens": encode(bounds, "I32")}, attrs
        )
        for b, (start, stop) in enumerate(zip(bounds, bounds[1:])):
            part = {x: rows(t, start, stop) for x, t in inputs.items()}
            alone = op({**part, **weights, "state": rows(state, b, b + 1)}, attrs)
            same_bits(
                alone,
                {"out": rows(whole["out"], start, stop), "state": rows(whole["state"], b, b + 1)},
            )

    every(name, check)


@pytest.mark.parametrize("blocking", ["slot", "farther"])
def test_window_with_history_is_one_pass(every, blocking):
    inputs, attrs = window(random(), 33, 4, "absent", "absent", False, blocking, "on", "negative")

    def check(op):
        whole = op(inputs, attrs)["window"]
        ids = inputs["ids"].data
        before = np.full(3, -1, np.int32)
        for place in range(33):
            step = op(
                {
                    "ids": rows(inputs["ids"], place, place + 1),
                    "history": Tensor("I32", before[None]),
                },
                attrs,
            )["window"]
            assert np.array_equal(step.data[0], whole.data[place]), place
            before = np.append(before[1:], ids[place]).astype(np.int32)

    every("engram.window", check)


# --- batch neighbours and position --------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 64, 97, 576])
def test_gate_of_a_token_alone(every, dtype, d):
    inputs = gate_case(dtype, d=d, tokens=19, mask="absent")
    fixed = {"weight_fused": inputs["weight_fused"]}
    tokens = {x: inputs[x] for x in ("residual", "kv")}
    order = random().permutation(19)

    def check(op):
        whole = op(inputs, {**GATE, "save": True})
        moved = op(
            {**{x: Tensor(t.dtype, t.data[order]) for x, t in tokens.items()}, **fixed},
            {**GATE, "save": True},
        )
        same_bits(moved, {x: Tensor(t.dtype, t.data[order]) for x, t in whole.items()})
        for place in (0, 7, 18):
            alone = op(
                {**{x: rows(t, place, place + 1) for x, t in tokens.items()}, **fixed},
                {**GATE, "save": True},
            )
            same_bits(alone, {x: rows(t, place, place + 1) for x, t in whole.items()})
        kv = tokens["kv"].data.copy()
        kv[[6, 8]] = encode(np.nan, dtype).data
        neighbours = op({**tokens, **fixed, "kv": Tensor(dtype, kv)}, {**GATE, "save": True})
        same_bits(
            {x: rows(t, 7, 8) for x, t in neighbours.items()},
            {x: rows(t, 7, 8) for x, t in whole.items()},
        )

    every("engram.gate_fwd", check)


@pytest.mark.parametrize("name", ["engram.conv_fwd", "engram.layer_fwd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_wherever_the_sequence_lies(every, name, dtype):
    """A sequence gives the same bits alone and behind another one."""
    inputs, weights, attrs, _ = convolution_case(name, dtype, 23, d=96)

    def check(op):
        whole = op({**inputs, **weights, "cu_seqlens": encode([0, 9, 23], "I32")}, attrs)["out"]
        alone = op({**{x: rows(t, 9, 23) for x, t in inputs.items()}, **weights}, attrs)["out"]
        same_bits({"out": rows(whole, 9, 23)}, {"out": alone})
        for stop in (10, 11, 15):
            head = op({**{x: rows(t, 9, stop) for x, t in inputs.items()}, **weights}, attrs)["out"]
            same_bits({"out": rows(whole, 9, stop)}, {"out": head})

    every(name, check)


@pytest.mark.parametrize("layout", ["LTC", "TLC"])
def test_hash_of_a_token_alone(every, layout):
    inputs, attrs = hash_rows(random(), 33, 4, 3, 8, "alternating", "I64", "I64", layout, "extreme")

    def check(op):
        whole = op(inputs, attrs)["indices"].data
        by_token = whole if layout == "TLC" else whole.swapaxes(0, 1)
        for place in (0, 15, 32):
            part = {
                **inputs,
                **{x: rows(inputs[x], place, place + 1) for x in ("window", "image_token_mask")},
            }
            alone = op(part, attrs)["indices"].data
            assert np.array_equal(alone.reshape(by_token[place].shape), by_token[place])

    every("engram.hash", check)


def test_gather_dequant_is_dequant_then_gather(ehc, every):
    def check(op):
        for number, case in cases_of("engram.gather_dequant"):
            inputs, attrs = build("engram.gather_dequant", number, case)
            table = {x: inputs[x] for x in ("weight", "scale")}
            values = ehc.op("engram.dequant_rows", table, attrs)["values"]
            gathered = ehc.op(
                "engram.gather_fwd", {"table": values, "indices": inputs["indices"]}, {}
            )
            same_bits(op(inputs, attrs), gathered)

    every("engram.gather_dequant", check)


# --- threads and repetition ---------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SPACES))
def test_any_number_of_threads(every, name):
    """The same call on 1 to 8 threads, and again on 8: the case with the most to share out."""

    def size(entry):
        inputs, _ = build(name, *entry)
        return sum(t.data.size for t in inputs.values())

    ranked = sorted(cases_of(name), key=size, reverse=True)
    number, case = ranked[0]
    inputs, attrs = build(name, number, case)

    def check(op):
        first = op(inputs, attrs, threads=1)
        for threads in (2, 3, 4, 8, 8):
            same_bits(first, op(inputs, attrs, threads=threads))

    every(name, check)


def test_many_tokens_on_any_number_of_threads(every):
    """Enough tokens that a split over threads must take place."""
    inputs, attrs = layer_fwd(
        random(),
        700,
        4,
        128,
        "BF16",
        "BF16",
        "BF16",
        True,
        (4, 3),
        "BF16",
        "alternating",
        "with empty",
        True,
        "once",
        True,
        "normal",
    )

    def check(op):
        first = op(inputs, attrs, threads=1)
        for threads in range(2, 9):
            same_bits(first, op(inputs, attrs, threads=threads))

    every("engram.layer_fwd", check)
