"""From token ids to rows: token map, layout, window, hash and lookup together, in `ops` and `torch`."""

import json

import numpy as np
import pytest
from engramhc import ops
from engramhc.reference import run
from engramhc.reference.dtypes import Tensor
from engramhc.tables import HashLayout, Table, qwen_ple_layout
from engramhc.text import TokenMap

torch = pytest.importorskip("torch")
ehc = pytest.importorskip("engramhc.torch")


@pytest.fixture(scope="module")
def token_map(tmp_path_factory):
    """Pairs of tokens share an id, and the pad id 2 becomes 1."""
    path = tmp_path_factory.mktemp("map") / "tokenizer.json"
    vocab = {letter: i for i, letter in enumerate("aAbBcCdDeE")}
    content = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": [], "decoder": {"type": "ByteLevel"}}
    path.write_text(json.dumps(content))
    return TokenMap.build(path)


def small_deepseek(vocab):
    return HashLayout.deepseek(
        {
            "engram_layer_ids": [1, 14],
            "engram_vocab_size": 101,
            "engram_n_heads": 3,
            "engram_max_ngram_size": 4,
            "engram_compressed_vocab_size": vocab,
            "engram_pad_id": 2,
        }
    )


def by_the_reference(ids, table, layout, pad):
    """Rows [L, B, T, C], operator by operator."""
    compressed = np.where(ids < 0, ids, table[ids]) if table is not None else ids
    borders = np.arange(ids.shape[0] + 1, dtype=np.int32) * ids.shape[1]
    window = run(
        "engram.window",
        {"ids": Tensor("I32", compressed.astype(np.int32).ravel()), "cu_seqlens": Tensor("I32", borders)},
        {
            "max_ngram": layout.max_ngram,
            "pad_id": pad,
            "blocking": layout.blocking,
            "reset_id": -1 if layout.reset_id is None else layout.reset_id,
        },
    )["window"]
    multipliers, sizes, offsets = layout.numpy()
    inputs = {
        "window": window,
        "multipliers": Tensor("I64", multipliers),
        "vocab_sizes": Tensor("I32", sizes),
        "offsets": Tensor("I32", offsets),
    }
    return run("engram.hash", inputs, {})["indices"].data.reshape(len(layout.rows), *ids.shape, -1)


def test_deepseek(token_map):
    layout = small_deepseek(token_map.size)
    ids = np.random.default_rng(0).integers(0, 10, (2, 7))
    assert layout.compressed_pad(token_map) == 1
    expected = by_the_reference(ids, token_map.table, layout, 1)
    np.testing.assert_array_equal(ops.engram_hash_ids(ids, token_map, layout), expected)
    np.testing.assert_array_equal(ops.engram_hash_ids(ids, token_map, layout, layer=14), expected[1])
    given = torch.from_numpy(ids)
    np.testing.assert_array_equal(ehc.engram_hash_ids(given, token_map, layout).numpy(), expected)
    np.testing.assert_array_equal(ehc.engram_hash_ids(given, token_map, layout, layer=1).numpy(), expected[0])


def test_qwen():
    layout = qwen_ple_layout(vocab_size=50, ngram_size=3, heads_per_ngram=2, base=101, seed=4, eos_id=7)
    ids = np.random.default_rng(1).integers(0, 50, (2, 9))
    ids[:, 3] = 7
    expected = by_the_reference(ids, None, layout, 7)
    np.testing.assert_array_equal(ops.engram_hash_ids(ids, None, layout), expected)
    np.testing.assert_array_equal(ehc.engram_hash_ids(torch.from_numpy(ids), None, layout).numpy(), expected)


def test_from_ids_to_rows_of_a_table(token_map):
    layout = small_deepseek(token_map.size)
    ids = torch.tensor([[0, 5, 5, 9]])
    with Table.create(layout.rows[1], 8, format="fp32", placement="host") as table:
        layout.check(table, layer=14)
        values = np.arange(table.rows * 8, dtype=np.float32).reshape(-1, 8)
        table.store(0, values)
        idx = ehc.engram_hash_ids(ids, token_map, layout, layer=14)
        rows = table.prefetch(idx, dtype="fp32").wait()
        assert rows.shape == (1, 4, 9 * 8)
        np.testing.assert_array_equal(rows.numpy(), values[idx.numpy()].reshape(1, 4, 72))
        assert torch.equal(ehc.prefetch(table, idx).wait(), rows.bfloat16())
        assert torch.equal(ehc.lookup(table, idx), rows.bfloat16())
