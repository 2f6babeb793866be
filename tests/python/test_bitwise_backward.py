"""What must be equal bit for bit in the backward operators and the optimizer."""

import numpy as np
import pytest
from engramhc.reference import REFERENCE
from engramhc.reference.dtypes import Tensor, encode

import op_cases
from test_bitwise import DTYPES, STATISTICS, every, random, same_bits, separate

__all__ = ["every"]  # a fixture

CLAMP = {"clamp": 1e-6}
GATE = {**CLAMP, "eps": 1e-6}


def gate_case(dtype, d=97, tokens=13, mask="alternating", value_path=True):
    """gate_bwd with packed kv and without statistics."""
    return op_cases.gate_bwd(
        *(random(), (tokens,), 3, d, dtype, mask, True, False, 1e-6, 1e-6, "normal"),
        **{"value path": value_path},
    )[0]


def layer_case(dtype, conv, tokens=14, d=37, mask="alternating"):
    weights = {"hidden": "F32", "embed": "F32", "conv": conv, "norm": "F32"}
    return op_cases.layer_bwd(
        random(),
        **{"T": tokens, "n": 3, "d": d, "dtype": dtype, "packed": True, **weights},
        **{"mask": mask, "sequences": "absent", "special": "normal"},
        **{"gate acc": False, "conv acc": False},
    )


def conv_case(dtype, tokens=20, mask="alternating"):
    weights = {"weight": "F32", "norm": "F32", "w": 4, "dilation": 3}
    return op_cases.conv_bwd(
        random(),
        **{"T": tokens, "n": 3, "d": 37, "dtype": dtype, **weights},
        **{"mask": mask, "sequences": "absent", "special": "normal"},
        **{"weight acc": False, "norm acc": False},
    )


def apart(outputs):
    """grad_kv as grad_key and grad_value."""
    parts = {name: t for name, t in outputs.items() if name != "grad_kv"}
    kv = outputs["grad_kv"]
    return {
        **parts,
        "grad_key": Tensor(kv.dtype, kv.data[..., :-1, :]),
        "grad_value": Tensor(kv.dtype, kv.data[..., -1, :]),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 16, 97, 256])
def test_gate_statistics_saved_or_recomputed(every, dtype, d):
    inputs = gate_case(dtype, d)
    forward = {x: inputs[x] for x in ("residual", "kv", "weight_fused", "image_token_mask")}

    def check(op):
        saved = op(forward, {**GATE, "save": True}, operator="engram.gate_fwd")
        statistics = {x: saved[x] for x in STATISTICS}
        fresh = op(inputs, GATE)
        same_bits(fresh, op(inputs | statistics, CLAMP))
        same_bits(fresh, op(inputs | statistics, GATE))  # eps has no effect then
        same_bits(apart(fresh), op(separate(inputs), GATE))
        same_bits(apart(fresh), op(separate(inputs) | statistics, CLAMP))

    every("engram.gate_bwd", check)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_with_one_gradient_for_both_paths(every, dtype):
    inputs = gate_case(dtype, value_path=False)

    def check(op):
        same_bits(op(inputs, GATE), op({**inputs, "grad_value_path": inputs["grad_out"]}, GATE))

    every("engram.gate_bwd", check)


def test_gate_leading_dimensions(every):
    inputs = gate_case("BF16", tokens=12)
    folded = {
        name: t if name == "weight_fused" else Tensor(t.dtype, t.data.reshape(3, 4, *t.shape[1:]))
        for name, t in inputs.items()
    }

    def check(op):
        flat = op(inputs, GATE)
        for name, t in op(folded, GATE).items():
            assert t.shape[:2] == (3, 4) or name == "grad_weight_partial"
            assert t.data.tobytes() == flat[name].data.tobytes(), name

    every("engram.gate_bwd", check)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("conv", [None, (4, 3)])
def test_masked_gradients_are_copies(every, dtype, conv):
    """NaN payloads, signed zeros and subnormals of a masked row's gradient survive."""
    inputs, attrs = layer_case(dtype, conv, tokens=4)
    inputs["image_token_mask"] = Tensor("BOOL", np.ones(4, bool))
    shape, storage = inputs["grad_out"].shape, inputs["grad_out"].data.dtype
    patterns = random().integers(0, 256, inputs["grad_out"].data.nbytes).astype(np.uint8)
    inputs["grad_out"] = Tensor(dtype, patterns.view(storage).reshape(shape))

    def check(op):
        out = op(inputs, attrs)
        assert out["grad_residual"].data.tobytes() == patterns.tobytes()
        for name in set(out) - {"grad_residual"}:
            assert not np.any(out[name].decode()), name

    every("engram.layer_bwd", check)


@pytest.mark.parametrize("name", ["engram.conv_bwd", "engram.layer_bwd"])
def test_a_masked_token_that_sees_nan_takes_no_part(every, name):
    """Tokens 1..3 are masked, and the only ones whose older taps meet the NaN of token 0."""
    if name == "engram.conv_bwd":
        inputs, attrs = conv_case("F32", tokens=5, mask="none")
    else:
        inputs, attrs = layer_case("F32", (4, 1), tokens=5, mask="none")
    inputs["image_token_mask"] = Tensor("BOOL", np.array([0, 1, 1, 1, 0], bool))
    inputs["gated_value" if "gated_value" in inputs else "kv"].data[0, -1, 0] = np.nan

    def check(op):
        gradient = op(inputs, attrs | {"dilation": 1})["grad_conv_weight"].decode()
        assert np.isnan(gradient[-1, :, 3]).all()
        assert not gradient[..., :3].any()

    every(name, check)
    check(REFERENCE[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_without_convolution_is_the_gate(ehc, every, dtype):
    inputs, attrs = layer_case(dtype, None, d=97)
    weights = {x: inputs[x] for x in ("weight_hidden", "weight_embed")}
    fused = ehc.op("engram.fused_weight", weights, {})

    def check(op):
        parts = {x: t for x, t in inputs.items() if x not in weights}
        gate = op(parts | fused, attrs, operator="engram.gate_bwd")
        same_bits(op(inputs, attrs), gate, ["grad_residual", "grad_kv"])

    every("engram.layer_bwd", check)


def changed(t, places):
    """Other numbers, one of them NaN, in these tokens."""
    data = t.data.copy()
    noise = encode(random().standard_normal(t.shape), t.dtype).data
    data[places] = noise[places]
    data[places[0]] = encode(np.float64(np.nan), t.dtype).data
    return Tensor(t.dtype, data)


def token_case(name, dtype):
    """Inputs, attributes, the inputs and outputs per token, and sequences or not."""
    if name == "engram.gate_bwd":
        inputs, attrs = gate_case(dtype, tokens=20), GATE
        tokens = ["grad_out", "grad_value_path", "residual", "kv"]
        outputs = ["grad_residual", "grad_kv"]
    elif name == "engram.kv_projection_bwd":
        inputs, attrs = op_cases.kv_projection_bwd(
            *(random(), (20,), 3, 37, 96, dtype, "normal"),
            **{"weight acc": False, "bias acc": False},
        )
        tokens, outputs = ["grad_kv", "embedding"], ["grad_embedding"]
    elif name == "engram.conv_bwd":
        inputs, attrs = conv_case(dtype)
        tokens, outputs = ["grad_out", "gated_value"], ["grad_gated_value"]
    else:
        inputs, attrs = layer_case(dtype, (4, 3), tokens=20)
        tokens = ["grad_out", "residual", "kv"]
        outputs = ["grad_residual", "grad_kv"]
    return inputs, attrs, tokens, outputs


@pytest.mark.parametrize(
    "name",
    ["engram.gate_bwd", "engram.kv_projection_bwd", "engram.conv_bwd", "engram.layer_bwd"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_token_whatever_others_hold(every, name, dtype):
    """Others: any other token, or for a convolution the tokens of other sequences."""
    inputs, attrs, tokens, outputs = token_case(name, dtype)
    if name in ("engram.conv_bwd", "engram.layer_bwd"):
        inputs["cu_seqlens"] = encode(np.array([0, 7, 13, 20]), "I32")
    others = [*range(7), *range(13, 20)]
    different = inputs | {x: changed(inputs[x], others) for x in tokens}

    def check(op):
        first, second = op(inputs, attrs), op(different, attrs)
        for output in outputs:
            kept, again = first[output].data[7:13], second[output].data[7:13]
            assert kept.tobytes() == again.tobytes(), output
            assert np.isfinite(first[output].decode()[7:13]).all(), output

    every(name, check)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("content", ["mixed", "same", "absent"])
def test_sparse_gather_gradient_is_the_dense_one(every, dtype, content):
    inputs, attrs = op_cases.gather_bwd(
        random(), (50,), 16, 33, 37, dtype, "I32", content, "dense", False, "normal"
    )

    def check(op):
        dense = op(inputs, attrs)["grad_table"]
        sparse = op(inputs, {**attrs, "form": "sparse"})
        scattered = np.zeros(dense.shape, np.float32)
        scattered[sparse["unique_rows"].data] = sparse["grad_rows"].data
        assert scattered.tobytes() == dense.data.tobytes()

    every("engram.gather_bwd", check)


@pytest.mark.parametrize("grad", ["F32", "BF16"])
@pytest.mark.parametrize("momentum", ["F32", "BF16"])
def test_momentum_of_the_whole_step(ehc, every, grad, momentum):
    inputs, attrs = op_cases.optimizer_step(
        *(random(), 33, 97, "F32", grad, momentum, 1e-20, 0.9, True, None, None, None),
        "zero rows",
    )
    moments = {x: inputs[x] for x in ("grad", "momentum")}

    def check(op):
        alone = ehc.op("engram.momentum_update", moments, {"beta": 0.9, "nesterov": True})
        whole = op(inputs, attrs)
        same_bits(whole, alone, ["momentum"])
        frozen = np.all(inputs["grad"].decode() == 0, axis=1)
        assert frozen.any()
        kept, old = whole["weight"].data[frozen], inputs["weight"].data[frozen]
        assert kept.tobytes() == old.tobytes()

    every("engram.optimizer_step", check)
