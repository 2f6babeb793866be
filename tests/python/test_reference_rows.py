"""Row formats and model paths of the NumPy reference, against decodings written a second time."""

import itertools

import numpy as np
import pytest
from engramhc.reference import run
from engramhc.reference.dtypes import Tensor, encode
from engramhc.reference.models import deepseek_v41_layer, qwen_addressing
from engramhc.reference.tolerance import compare


def e4m3(byte):
    """Sign, four bits of exponent (bias 7), three of fraction; 0x7f and 0xff are NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, fraction = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def e8m0(byte):
    return float("nan") if byte == 255 else 2.0 ** (byte - 127)


def bfloat16_bits(single):
    """Rounding by integers: add half of what is cut off, and one less if the kept part is even."""
    bits = single.view(np.uint32)
    upper = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), upper)


def all_pairs():
    """Every weight byte under every scale byte: one row per scale, one group per row."""
    weight = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    return weight, np.arange(256, dtype=np.uint8)[:, None]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("out_dtype", ["F32", "BF16", "F16"])
def test_every_pair_of_bytes_decodes(out_dtype, raw):
    weight, scale = all_pairs()
    inputs = {
        "weight": Tensor("U8" if raw else "F8_E4M3", weight),
        "scale": Tensor("U8" if raw else "F8_E8M0", scale),
    }
    exact = np.array([[e4m3(w) * e8m0(s) for w in range(256)] for s in range(256)])
    with np.errstate(over="ignore"):
        single = exact.astype(np.float32)  # loses nothing but what overflows
        finite = np.isfinite(single)
        assert np.array_equal(single[finite].astype(np.float64), exact[finite])
        wanted = {
            "F32": single,
            "BF16": bfloat16_bits(single),
            "F16": single.astype(np.float16),
        }[out_dtype]
    attrs = {"group": 256, "out_dtype": out_dtype}
    got = run("engram.dequant_rows", inputs, attrs)["values"]
    nan = np.isnan(exact)
    assert got.dtype == out_dtype and nan.sum() == 256 + 255 * 2
    assert np.isnan(got.decode()[nan]).all()
    width = f"u{got.data.itemsize}"
    assert np.array_equal(got.data.view(width)[~nan], wanted.view(width)[~nan])

    order = np.random.default_rng(0).integers(-1, 256, (40, 8))
    gathered = run("engram.gather_dequant", {**inputs, "indices": encode(order, "I32")}, attrs)[
        "embedding"
    ]
    for token, column in itertools.product(range(40), range(8)):
        piece = gathered.data[token, 256 * column : 256 * (column + 1)]
        row = order[token, column]
        wanted = got.data[row] if row >= 0 else np.zeros(256, got.data.dtype)
        assert piece.tobytes() == wanted.tobytes()


def quantized_by_search(group):
    """Scale byte and weight bytes of one group, by trying exponents and codes one after another."""
    largest = np.abs(group).max()
    if np.isnan(group).any():
        return 255, [0x7F] * group.size
    exponent = 0
    if np.isinf(largest):
        exponent = 127
    elif largest > 0:
        exponent = next((e for e in range(-127, 127) if largest <= 448 * 2.0**e), 127)
    codes = np.array([e4m3(byte) for byte in range(0x7F)])
    weights = []
    for value in np.minimum(np.abs(group) * 2.0**-exponent, 448.0):
        distance = np.abs(codes - value)
        best = np.flatnonzero(distance == distance.min())  # two at a tie: the even code
        weights.append(int(best[0] if best.size == 1 else next(c for c in best if c % 2 == 0)))
    return exponent + 127, [
        code | (0x80 if np.signbit(value) else 0) for code, value in zip(weights, group)
    ]


def odd_groups(generator, width):
    """Groups at the edges: wide range, ties, the largest at and beside 448 * 2^e, specials."""
    scale = np.exp2(generator.integers(-149, 120, (60, 1)))
    wide = generator.standard_normal((60, width)) * scale
    ties = generator.choice(
        [448.0, 432.0, 464.0, 17.0, 19.0, 1.0625, -(2.0**-10), 0.0], (60, width)
    )
    largest = np.full((8, width), 2.0**-149)
    largest[:, 0] = [
        448.0,
        float(np.nextafter(np.float32(448.0), np.float32(449.0))),
        448 * 2.0**-127,
        float(np.finfo(np.float32).max),
        -(448 * 2.0**100),
        2.0**-149,
        np.inf,
        np.nan,
    ]
    zeros = np.full((2, width), [[0.0], [-0.0]])
    ties = ties * np.exp2(generator.integers(-120, 100, (60, 1)))
    return np.concatenate([wide, ties, largest, zeros])


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("width", [1, 7, 32])
def test_quantize_by_search(dtype, width):
    values = encode(odd_groups(np.random.default_rng(1), 2 * width), dtype)
    out = run("engram.quantize_rows", {"values": values}, {"group": width})
    for row, decoded in enumerate(values.decode()):
        for column in range(2):
            part = slice(column * width, (column + 1) * width)
            scale, weights = quantized_by_search(decoded[part])
            assert out["scale"].data[row, column] == scale, decoded[part]
            assert out["weight"].data[row, part].tolist() == weights, decoded[part]


def test_quantize_finds_every_pair_again():
    """A group of one: the bytes may differ from those that made the value, the value may not."""
    weight, scale = all_pairs()
    pairs = {"weight": Tensor("U8", weight), "scale": Tensor("U8", scale)}
    values = run("engram.dequant_rows", pairs, {"group": 256, "out_dtype": "F32"})["values"]
    coded = run("engram.quantize_rows", {"values": values}, {"group": 1})
    again = run("engram.dequant_rows", coded, {"group": 1, "out_dtype": "F32"})["values"]
    kept = ~np.isinf(values.decode())  # 448 * 2^127 and its like have no F32
    same = (again.data == values.data) | (np.isnan(again.data) & np.isnan(values.data))
    assert same[kept].all()
    signs = np.signbit(again.data) == np.signbit(values.data)
    assert signs[kept & ~np.isnan(values.data)].all()


# --- models --------------------------------------------------------------------------------------


def test_deepseek_v41():
    """Token by token and stream by stream, from the bytes on."""
    g = np.random.default_rng(2)
    tokens, n, d, columns, hd, rows = 7, 4, 24, 6, 64, 30
    weight = g.integers(0, 256, (rows, hd)).astype(np.uint8)
    weight[weight & 0x7F == 0x7F] = 0x38
    scale = g.integers(117, 122, (rows, hd // 32)).astype(np.uint8)
    indices = g.integers(-1, rows, (tokens, columns))
    mask = np.arange(tokens) == 3
    inputs = {
        "residual": encode(g.standard_normal((tokens, n, d)), "BF16"),
        "table_weight": Tensor("F8_E4M3", weight),
        "table_scale": Tensor("F8_E8M0", scale),
        "indices": encode(np.where(mask[:, None], -1, indices), "I32"),
        "projection": encode(0.05 * g.standard_normal((n + 1, d, columns * hd)), "BF16"),
        "weight_hidden": encode(1 + 0.1 * g.standard_normal((n, d)), "BF16"),
        "weight_embed": encode(1 + 0.1 * g.standard_normal((n, d)), "BF16"),
        "image_token_mask": Tensor("BOOL", mask),
    }
    out = deepseek_v41_layer(**inputs)

    residual, projection, hidden, embed = (
        inputs[x].decode() for x in ("residual", "projection", "weight_hidden", "weight_embed")
    )
    memory = np.zeros((tokens, columns, hd), np.float32)
    for t, c, i in itertools.product(range(tokens), range(columns), range(hd)):
        row = inputs["indices"].data[t, c]
        if row >= 0:
            memory[t, c, i] = e4m3(int(weight[row, i])) * e8m0(int(scale[row, i // 32]))
    memory = bfloat16_bits(memory).reshape(tokens, columns * hd)
    assert np.array_equal(out["embedding"].data, memory)

    wide = Tensor("BF16", memory).decode()
    expected = np.zeros((tokens, n, d))
    for t in range(tokens):
        kv = np.array([[np.dot(wide[t], w) for w in block] for block in projection])
        kv = Tensor("BF16", bfloat16_bits(kv.astype(np.float32))).decode()
        assert compare(Tensor("BF16", out["kv"].data[t]), encode(kv, "BF16")).passed
        kv = Tensor("BF16", out["kv"].data[t]).decode()
        for h in range(n):
            x, k, value = residual[t, h], kv[h], kv[n]
            z = np.sum(
                x
                / np.sqrt(np.mean(x * x) + 1e-20)
                * hidden[h]
                * (k / np.sqrt(np.mean(k * k) + 1e-20))
                * embed[h]
            ) / np.sqrt(d)
            gate = 1 / (1 + np.exp(-np.sign(z) * np.sqrt(max(abs(z), 1e-6))))
            expected[t, h] = x if mask[t] else x + gate * value
    assert compare(out["out"], encode(expected, "BF16")).passed
    assert np.array_equal(out["out"].data[mask], inputs["residual"].data[mask])
    assert not np.array_equal(out["out"].data[~mask], inputs["residual"].data[~mask])


def splitmix64(state, count):
    """Its usual form: the state moves on, then is mixed."""
    mask, words = 2**64 - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        words.append(z ^ z >> 31)
    return words


def test_splitmix64_as_published():
    assert splitmix64(1234567, 3) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def signed(word):
    """The low 64 bits as a signed number."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


def primes_from(start, count):
    """By a sieve over as many numbers as are needed."""
    width = 64 * count + 1000
    prime = np.ones(width, bool)
    for factor in range(2, int((start + width) ** 0.5) + 1):
        prime[-start % factor :: factor] = False
    found = np.flatnonzero(prime)[:count]
    assert found.size == count
    return [start + int(offset) for offset in found]


END = 248044


@pytest.mark.parametrize("layers, seed", [(1, 0), (2, 0), (3, 1234)])
@pytest.mark.parametrize("bounds", [None, [0, 0, 5, 20]])
@pytest.mark.parametrize("with_history", [False, True])
def test_qwen_addressing(layers, seed, bounds, with_history):
    g = np.random.default_rng(3)
    ids = g.integers(0, 248320, 20)
    ids[[2, 3, 6, 19]] = END
    edges = bounds or [0, 20]
    past = g.integers(0, 248320, (len(edges) - 1, 2))
    past[-1] = [5, END]
    out = qwen_addressing(
        encode(ids, "I32"),
        None if bounds is None else encode(np.array(bounds), "I32"),
        encode(past, "I32") if with_history else None,
        layers=layers,
        seed=seed,
    )

    half = max(1, (2**63 - 1) // 248320 // 2)
    sizes = primes_from(20_000_000, 16 * layers)
    for layer in range(layers):
        own = sizes[16 * layer : 16 * layer + 16]
        factors = [2 * (word % half) + 1 for word in splitmix64(seed + 10007 * layer, 3)]
        assert out["multipliers"].data[layer].tolist() == factors
        assert out["vocab_sizes"].data[layer].reshape(-1).tolist() == own
        for sequence, (start, end) in enumerate(zip(edges[:-1], edges[1:])):
            before = past[sequence].tolist() if with_history else []
            stream = before + ids[start:end].tolist()
            for place in range(start, end):
                position = len(before) + place - start
                window = [stream[position]]
                for back in (1, 2):
                    ended = back > 1 and window[-1] == END
                    seen = position - back >= 0 and not ended
                    window.append(stream[position - back] if seen else END)
                assert out["window"].data[place].tolist() == window
                key = signed(window[0] * factors[0])
                for order in (2, 3):
                    key = signed(key ^ window[order - 1] * factors[order - 1])
                    for head in range(8):
                        column = 8 * (order - 2) + head
                        index = key % own[column] + sum(own[:column])
                        assert out["indices"].data[layer, place, column] == index


def test_negative_keys_are_floored():
    """With multipliers for a smaller vocabulary the products of raw ids wrap around."""
    ids = encode(np.random.default_rng(4).integers(0, 248320, 200), "I32")
    out = qwen_addressing(ids, vocab=1000, base=100)
    starts = out["offsets"].decode()[:, None, :]
    sizes = out["vocab_sizes"].decode().reshape(1, 1, -1)
    rows = out["indices"].decode() - starts
    assert np.all((rows >= 0) & (rows < sizes))
    products = out["window"].decode().astype(object) * out["multipliers"].decode()[0].astype(object)
    keys = [signed(int(a) ^ int(b)) for a, b in products[:, :2]]
    assert min(keys) < 0
    first = int(sizes[0, 0, 0])
    assert rows[0, :, 0].tolist() == [key % first for key in keys]
