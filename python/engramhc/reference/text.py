"""Token map: which token ids share one compressed id.

Unicode tables come from Python's `unicodedata`, whose version changes with the interpreter (14.0 in
Python 3.11). The library itself is pinned to Unicode 9.0 decompositions and marks, so the two may
differ on code points that were assigned or changed after Unicode 9.
"""

from __future__ import annotations

import re
import unicodedata

import numpy as np

from .dtypes import Tensor, encode

# The Unicode property White_Space. Python's own str.strip() would also take U+001C..U+001F.
_WHITE_SPACE = "".join(
    map(
        chr,
        [
            *range(0x09, 0x0E),
            0x20,
            0x85,
            0xA0,
            0x1680,
            *range(0x2000, 0x200B),
            0x2028,
            0x2029,
            0x202F,
            0x205F,
            0x3000,
        ],
    )
)


def normalize(text: str) -> str:
    """NFKC, NFD, marks dropped, lower case per code point, blanks collapsed, ends stripped.

    A text that is one space after collapsing survives as one space.
    """
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.category(c).startswith("M"))
    text = "".join(c.lower() for c in text)  # one code point at a time: no final-sigma rule
    text = re.sub("[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip(_WHITE_SPACE)


def key_of(text: str, raw_token: str) -> str:
    """The key by which an id is merged: undecodable ids keep their vocabulary string."""
    if "\ufffd" in text:
        return raw_token
    return normalize(text) or text


def _strings(data: Tensor, offsets: Tensor) -> list[str]:
    content, bounds = data.data.tobytes(), offsets.decode()
    return [content[begin:end].decode("utf-8") for begin, end in zip(bounds[:-1], bounds[1:])]


def token_map(
    texts: Tensor, text_offsets: Tensor, raw_tokens: Tensor, raw_offsets: Tensor
) -> dict[str, Tensor]:
    """New ids in order of first appearance of their key.

    texts [text_bytes], text_offsets [V+1], raw_tokens [raw_bytes], raw_offsets [V+1]
    -> table [V], size [1] (the compressed vocabulary V')
    """
    new_ids: dict[str, int] = {}
    table = [
        new_ids.setdefault(key_of(text, raw), len(new_ids))
        for text, raw in zip(_strings(texts, text_offsets), _strings(raw_tokens, raw_offsets))
    ]
    return {
        "table": encode(np.array(table, dtype=np.int64), "I32"),
        "size": encode(np.array([len(new_ids)]), "I32"),
    }
