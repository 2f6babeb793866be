"""From the ids of a tokenizer to the smaller set of ids that the n-gram hash works on.

    map = TokenMap.build("tokenizer.json")
    text.expect(map, 99092)         # DeepSeek V4: another count means another tokenizer
    compressed = map.apply(ids)     # ids of any framework, on any device

Needs NumPy alone. Building, files and the normaliser are those of `ehc tokmap`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from typing import Any

import numpy as np

from . import errors, ops
from ._arrays import framework_of
from ._capi import check, library

__all__ = ["TokenMap", "expect", "normalize"]


class TokenMap:
    """Compressed ids of all tokens: `table` is int32 [vocab_size] with values in [0, size)."""

    def __init__(self, handle: ctypes.c_void_p):
        self._handle = handle
        info = library().ehc_token_map_describe(handle).contents
        self.size: int = info.size
        self.vocab_size: int = info.vocab_size
        self.table: np.ndarray = np.empty(self.vocab_size, np.int32)
        self._copies: dict[Any, Any] = {}
        ctypes.memmove(self.table.ctypes.data, info.table, self.table.nbytes)

    @classmethod
    def build(cls, tokenizer_json: str | os.PathLike) -> TokenMap:
        """Of a Hugging Face `tokenizer.json` with a byte-level BPE."""
        return cls(_open("ehc_token_map_build", tokenizer_json))

    @classmethod
    def load(cls, path: str | os.PathLike) -> TokenMap:
        return cls(_open("ehc_token_map_load", path))

    def save(self, path: str | os.PathLike) -> None:
        """Readers of `path` see the old file or the whole new one."""
        check(library().ehc_token_map_save(self._handle, os.fsencode(path)))

    @property
    def sha256(self) -> str:
        """Of the table's little-endian bytes."""
        return hashlib.sha256(self.table.astype("<i4", copy=False)).hexdigest()

    def table_for(self, ids: Any) -> Any:
        """The table where `ids` are; on a device it stays for the next call."""
        if isinstance(ids, np.ndarray):
            return self.table
        framework, device = framework_of(ids), getattr(ids, "device", None)
        if (framework, device) not in self._copies:
            self._copies[framework, device] = framework.array(self.table, "I32", ids)
        return self._copies[framework, device]

    def apply(self, ids: Any) -> Any:
        """Compressed ids, int32, where `ids` are; negative ids pass through. On the CPU an id that
        the tokenizer does not have is refused, elsewhere it becomes -1."""
        return ops.engram_compress(np.asarray(ids) if isinstance(ids, (list, tuple, int)) else ids, self)

    def __del__(self):
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            library().ehc_token_map_destroy(handle)

    def __repr__(self) -> str:
        return f"TokenMap({self.vocab_size} ids -> {self.size})"


def _open(function: str, path: str | os.PathLike) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    check(getattr(library(), function)(os.fsencode(path), ctypes.byref(handle)))
    return handle


def normalize(text: str) -> str:
    """The key of a token's text: NFKC, NFD, marks dropped, lower case, blanks collapsed, stripped."""
    source, length = text.encode(), ctypes.c_size_t()
    capacity = 4 * len(source) + 64  # enough but for the few code points that become long phrases
    while True:
        key = ctypes.create_string_buffer(capacity)
        status = library().ehc_normalize(
            source, ctypes.c_size_t(len(source)), key, ctypes.c_size_t(capacity), ctypes.byref(length)
        )
        check(status)
        if length.value <= capacity:
            return key.raw[: length.value].decode()
        capacity = length.value


def expect(map: TokenMap, size: int) -> None:
    """TableError unless the map has this many compressed ids: every hash of a model depends on it."""
    if map.size != size:
        raise errors.TableError(
            f"token_map: attribute 'size': expected {size} compressed ids, got {map.size}"
            "; hint: the tokenizer is not the one that the tables were made for"
        )
