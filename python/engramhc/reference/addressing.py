"""From token ids to table rows: compression, n-gram window, table layout, hash. All exact."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from .dtypes import Tensor, encode
from .sequences import sequence_bounds

_UINT64 = (1 << 64) - 1
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


def compress_ids(ids: Tensor, table: Tensor, *, checked: bool = True) -> dict[str, Tensor]:
    """compressed = table[id]; negative ids pass, an id >= V is an error or, unchecked, becomes -1.

    ids [...], table [V] -> compressed_ids [...]
    """
    wanted, known = ids.decode(), table.decode()
    outside = wanted >= known.size
    if checked and outside.any():
        raise ValueError(f"'ids': {int(wanted[outside][0])} is not below {known.size}")
    inside = (wanted >= 0) & ~outside
    result = np.where(wanted < 0, wanted, -1)
    result[inside] = known[wanted[inside]]
    return {"compressed_ids": encode(result, "I32")}


def window(
    ids: Tensor,
    cu_seqlens: Tensor | None = None,
    history: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    *,
    max_ngram: int,
    pad_id: int,
    blocking: str,
    reset_id: int = -1,
) -> dict[str, Tensor]:
    """window[t, k] = the id k places before t in its sequence, or pad_id where the view is blocked.

    ids [T], cu_seqlens [B+1], history [B, Nmax-1] (oldest first), image_token_mask [T]
    -> window [T, Nmax]

    Blocked: beyond the start of the sequence and its history, negative ids, image tokens.
    blocking = "slot" pads blocked slots, "farther" also all slots behind one. A look-back that
    meets reset_id shows it and pads everything behind it, in both modes; slot 0 does not look back.
    """
    stream = ids.decode()
    bounds = sequence_bounds(cu_seqlens, stream.size)
    image = np.zeros(stream.size, bool) if image_token_mask is None else image_token_mask.decode()
    result = np.full((stream.size, max_ngram), pad_id, dtype=np.int64)
    for sequence, (start, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        # Everything the sequence may look at, oldest first, blocked tokens as -1.
        before = np.full(max_ngram - 1, -1) if history is None else history.decode()[sequence]
        view = np.concatenate([before, np.where(image[start:end], -1, stream[start:end])])
        for place in range(end - start):
            for slot in range(max_ngram):
                token = view[place + max_ngram - 1 - slot]
                if token >= 0:
                    result[start + place, slot] = token
                elif blocking == "farther":
                    break
                if slot > 0 and token == reset_id and reset_id >= 0:
                    break
    return {"window": encode(result, "I32")}


def _splitmix64(start: int, count: int) -> list[int]:
    """The first outputs of the SplitMix64 stream whose state begins at `start`."""
    outputs = []
    for step in range(1, count + 1):
        z = (start + 0x9E3779B97F4A7C15 * step) & _UINT64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64
        outputs.append(z ^ (z >> 31))
    return outputs


def multipliers(
    *,
    layer_ids: list[int],
    max_ngram: int,
    compressed_vocab: int,
    seed: int = 0,
    scheme: str = "numpy",
) -> dict[str, Tensor]:
    """multiplier = 2 r + 1 with r drawn from [0, half), so that id * multiplier stays below 2^63.

    half = max(1, ((2^63-1) div V') div 2); a layer's generator starts at seed + 10007 * layer_id.
    -> multipliers [L, Nmax]
    """
    half = max(1, _INT64_MAX // compressed_vocab // 2)
    rows = []
    for layer_id in layer_ids:
        start = seed + 10007 * layer_id
        if scheme == "numpy":
            drawn = (
                np.random.default_rng(start).integers(0, half, max_ngram, dtype=np.int64).tolist()
            )
        else:
            drawn = [word % half for word in _splitmix64(start & _UINT64, max_ngram)]
        rows.append([2 * r + 1 for r in drawn])
    return {"multipliers": encode(np.array(rows, np.int64).reshape(len(rows), max_ngram), "I64")}


def _is_prime(number: int) -> bool:
    if number < 4:
        return number >= 2
    return number % 2 != 0 and all(
        number % divisor for divisor in range(3, int(number**0.5) + 2, 2) if divisor < number
    )


def primes(*, sizes: list[int], layers: int, heads: int) -> dict[str, Tensor]:
    """Distinct primes over the whole model: each head takes the next one that nobody has.

    Within a layer every order starts at its own configured size (the size itself is a candidate).
    sizes: one per order 2..Nmax -> vocab_sizes [layers, Nmax-1, heads]
    """
    used: set[int] = set()
    result = np.zeros((layers, len(sizes), heads), dtype=np.int64)
    for layer in range(layers):
        for order, size in enumerate(sizes):
            candidate = size
            for head in range(heads):
                while candidate in used or not _is_prime(candidate):
                    candidate += 1
                if candidate > _INT32_MAX:
                    raise ValueError(f"'sizes': prime {candidate} is beyond 2^31-1")
                used.add(candidate)
                result[layer, order, head] = candidate
    return {"vocab_sizes": encode(result, "I32")}


def offsets(vocab_sizes: Tensor, *, index_dtype: str = "I32") -> dict[str, Tensor]:
    """Where each head's rows begin in the layer's table: exclusive prefix sums over (order, head).

    vocab_sizes [L, Nmax-1, Kh] -> offsets [L, C], C = (Nmax-1) * Kh
    """
    layers, orders, heads = vocab_sizes.shape
    rows = []
    for sizes in vocab_sizes.decode().reshape(layers, orders * heads).tolist():
        if index_dtype == "I32" and sum(sizes) > _INT32_MAX:
            raise ValueError(f"'vocab_sizes': {sum(sizes)} rows do not fit I32")
        rows.append([0, *accumulate(sizes)][:-1])
    return {
        "offsets": encode(np.array(rows, np.int64).reshape(layers, orders * heads), index_dtype)
    }


def hash_rows(
    window: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None = None,
    *,
    index_dtype: str = "I32",
    layout: str = "LTC",
) -> dict[str, Tensor]:
    """h_1 = w_0 m_0, h_k = h_(k-1) xor w_(k-1) m_(k-1), all wrapping in 64 bits;
    index = (h_order mod size) + offset with the remainder floored. Image tokens give -1.

    window [T, Nmax], multipliers [L, Nmax], vocab_sizes [L, Nmax-1, Kh], offsets [L, C]
    -> indices [L, T, C], or [T, L, C] with layout TLC
    """
    tokens, sizes = window.decode(), vocab_sizes.decode()
    layers, orders, heads = sizes.shape
    starts = offsets.decode().reshape(layers, orders, heads)
    result = np.empty((layers, tokens.shape[0], orders, heads), dtype=np.int64)
    for layer, multiplier in enumerate(multipliers.decode()):
        products = tokens * multiplier  # int64 arrays wrap
        mixed = np.bitwise_xor.accumulate(products, axis=1)[:, 1:]  # column k: order k + 2
        result[layer] = np.mod(mixed[:, :, None], sizes[layer]) + starts[layer]
    if image_token_mask is not None:
        result[:, image_token_mask.decode()] = -1
    result = result.reshape(layers, tokens.shape[0], orders * heads)
    return {"indices": encode(result.swapaxes(0, 1) if layout == "TLC" else result, index_dtype)}
