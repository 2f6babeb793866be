"""Whole call sequences of real models, operator by operator, against the NumPy reference of the
sequence, which shares no number with the program on the way."""

import numpy as np
import pytest
from engramhc.reference.dtypes import Tensor, encode
from engramhc.reference.models import deepseek_v41_layer
from engramhc.reference.tolerance import compare

from conftest import Refused
from error_bounds import tolerances

TOKENS, STREAMS, WIDTH = 13, 4, 96  # the model: 5120 wide
ROWS, HEAD, FETCHED = 700, 256, 24


def deepseek_v41_inputs():
    """As in the model: 24 rows of 256 bytes a token, no bias; some image tokens without rows."""
    g = np.random.default_rng(41)
    weight = g.integers(0, 256, (ROWS, HEAD), dtype=np.uint8)
    weight[(weight & 0x7F) == 0x7F] = 0x38  # no NaN
    indices = g.integers(0, ROWS, (TOKENS, FETCHED))
    mask = np.arange(TOKENS) % 5 == 3
    indices[mask] = -1
    width = FETCHED * HEAD
    projection = g.standard_normal((STREAMS + 1, WIDTH, width)) / np.sqrt(width)
    return {
        "residual": encode(g.standard_normal((TOKENS, STREAMS, WIDTH)), "BF16"),
        "table_weight": Tensor("F8_E4M3", weight),
        "table_scale": Tensor("F8_E8M0", g.integers(118, 122, (ROWS, HEAD // 32), dtype=np.uint8)),
        "indices": encode(indices, "I64"),
        "projection": encode(projection, "BF16"),
        "weight_hidden": encode(1 + 0.2 * g.standard_normal((STREAMS, WIDTH)), "BF16"),
        "weight_embed": encode(1 + 0.2 * g.standard_normal((STREAMS, WIDTH)), "BF16"),
        "image_token_mask": Tensor("BOOL", mask),
    }


def deepseek_v41_outputs(ehc, x, impl):
    """embedding, kv and out of the program, from the 8-bit rows on."""

    op = ehc.op
    rows = {"weight": x["table_weight"], "scale": x["table_scale"], "indices": x["indices"]}
    embedding = op("engram.gather_dequant", rows, {})["embedding"]
    projected = {"embedding": embedding, "weight": x["projection"]}
    kv = op("engram.kv_projection_fwd", projected, {})["kv"]
    weights = {name: x[name] for name in ("weight_hidden", "weight_embed")}
    streams = {"residual": x["residual"], "kv": kv, "image_token_mask": x["image_token_mask"]}
    attrs = {"eps": 1e-20, "clamp": 1e-6}
    fused = op("engram.fused_weight", weights, {})
    out = op("engram.gate_fwd", {**streams, **fused}, attrs, impl=impl)["out"]
    whole = op("engram.layer_fwd", {**streams, **weights}, attrs, impl=impl)["out"]
    assert whole.data.tobytes() == out.data.tobytes(), "a layer without convolution is the gate"
    return {"embedding": embedding, "kv": kv, "out": out}


def test_deepseek_v41(ehc):
    if "engram.gather_dequant" not in ehc.table:
        pytest.skip("not in this build")
    x = deepseek_v41_inputs()
    want = deepseek_v41_layer(**x)
    for impl in ehc.implementations("engram.gate_fwd"):
        try:
            got = deepseek_v41_outputs(ehc, x, impl)
        except Refused:
            continue
        assert got["embedding"].data.tobytes() == want["embedding"].data.tobytes()
        inputs = {"embedding": want["embedding"], "weight": x["projection"]}
        allowed = tolerances("engram.kv_projection_fwd", inputs, {}, {"kv": want["kv"]})
        assert (result := compare(got["kv"], want["kv"], allowed["kv"])).passed, result.text
        # A key or value rounded the other way moves few elements by more than one rounding.
        result = compare(got["out"], want["out"], [2, 1e-3, 0.02])
        assert result.passed, f"{impl}: {result.text}"
        masked = x["image_token_mask"].data
        assert np.array_equal(got["out"].data[masked], x["residual"].data[masked])
        assert not np.array_equal(got["out"].data[~masked], x["residual"].data[~masked])
