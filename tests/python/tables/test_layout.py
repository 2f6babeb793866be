"""Layouts of the n-gram tables of real models (constants recomputed independently)."""

import numpy as np
import pytest
from engramhc.errors import TableError
from engramhc.reference import run
from engramhc.tables import HashLayout, qwen_ple_layout

CONFIG = {
    "engram_layer_ids": [1, 14],
    "engram_vocab_size": 16000000,
    "engram_num_embeddings": [384006168, 384016682],
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_max_ngram_size": 4,
    "engram_compressed_vocab_size": 99092,
    "engram_pad_token_id": 2,
}


def test_deepseek():
    layout = HashLayout.deepseek({"text_config": CONFIG})
    assert layout.multipliers[0] == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert layout.multipliers[1] == [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    assert [(order[0], order[-1]) for layer in layout.vocab_sizes for order in layer] == [
        (16000057, 16000183),
        (16000189, 16000321),
        (16000339, 16000463),
        (16000477, 16000627),
        (16000667, 16000769),
        (16000781, 16000889),
    ]
    assert layout.rows == CONFIG["engram_num_embeddings"]
    assert (layout.pad_id, layout.blocking, layout.reset_id, layout.max_ngram, layout.heads) == (
        2,
        "farther",
        None,
        4,
        8,
    )
    assert layout.position(14) == 1


def test_offsets_are_sums_of_the_sizes_before():
    layout = HashLayout.demo(1000)
    sizes = np.array(layout.vocab_sizes).reshape(2, -1)
    assert layout.offsets == (np.cumsum(sizes, axis=1) - sizes).tolist()
    arrays = layout.numpy()
    assert [a.dtype for a in arrays] == [np.int64, np.int32, np.int32]
    assert [a.shape for a in arrays] == [(2, 3), (2, 2, 8), (2, 16)]


def test_demo_constants():
    layout = HashLayout.demo(129280)
    assert layout.multipliers[0] == [58737837727525, 3709723095905, 27562777300965]
    assert layout.multipliers[1] == [22166238923025, 42939128327945, 41336139856257]
    assert layout.vocab_sizes[0][0][:3] == [646403, 646411, 646421]
    assert layout.vocab_sizes[1][1][-1] == 646879


def test_qwen_against_the_formula():
    layout = qwen_ple_layout(
        vocab_size=248320, ngram_size=3, heads_per_ngram=8, base=20000000, seed=0, eos_id=248044
    )
    expected = run(
        "engram.multipliers",
        {},
        {"layer_ids": [0], "max_ngram": 3, "compressed_vocab": 248320, "seed": 0, "scheme": "splitmix64"},
    )
    assert layout.multipliers == expected["multipliers"].decode().tolist()
    assert min(layout.vocab_sizes[0][0]) >= 20000000
    assert (layout.reset_id, layout.pad_id) == (248044, 248044)


def test_arrays_for_torch():
    torch = pytest.importorskip("torch")
    for mine, theirs in zip(HashLayout.demo(7).numpy(), HashLayout.demo(7).torch()):
        assert isinstance(theirs, torch.Tensor)
        np.testing.assert_array_equal(mine, theirs.numpy())


def test_check():
    layout = HashLayout.deepseek(CONFIG)
    layout.check(CONFIG["engram_num_embeddings"])
    layout.check(384016682, layer=14)
    with pytest.raises(TableError, match=r"expected \[384006168\] of layers \[1\], got \[7\]"):
        layout.check(7, layer=1)
    with pytest.raises(TableError, match="of layers"):
        layout.check(384006168)  # of which layer?
    with pytest.raises(TableError, match=r"expected one of \[1, 14\], got 2"):
        layout.check(384006168, layer=2)


def test_a_config_that_does_not_fit():
    with pytest.raises(TableError, match="expected a field 'engram_max_ngram_size'"):
        HashLayout.deepseek({})
    with pytest.raises(TableError, match="'rows': expected"):
        HashLayout.deepseek({**CONFIG, "engram_num_embeddings": [1, 2]})
