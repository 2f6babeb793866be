"""Constants of the n-gram hash: multipliers, table sizes and offsets of every layer that has a table.

Numbers come from the operators engram.multipliers, engram.primes and engram.offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..errors import TableError

_INT32_MAX = 2**31 - 1


class HashArrays(NamedTuple):
    """A layout as `engram_hash` takes it: `engram_hash(window, *layout.torch(device))`."""

    multipliers: Any  # int64 [L, Nmax]
    vocab_sizes: Any  # int32 [L, Nmax-1, Kh], primes
    offsets: Any  # int32 [L, C], int64 where the rows of a layer need it


@dataclass(frozen=True)
class HashLayout:
    """Orders are n-grams of 2 .. Nmax ids, of Kh heads each; C = (Nmax-1)*Kh rows a token and layer."""

    multipliers: list[list[int]]  # [L][Nmax]
    vocab_sizes: list[list[list[int]]]  # [L][Nmax-1][Kh]
    offsets: list[list[int]]  # [L][C]
    rows: list[int]  # [L], of each layer's table
    layer_ids: list[int]  # [L], layers of the model
    compressed_vocab_size: int  # ids that the hash sees; every multiplier depends on it
    pad_id: int  # before token compression
    blocking: str  # of the window, "slot" or "farther"
    reset_id: int | None = None  # the window does not look behind it

    @classmethod
    def deepseek(cls, config: Any) -> HashLayout:
        """Of a DeepSeek-V4.1 config, a dict or an object, flat or with `text_config`."""
        fields = _Fields(config)
        order_count = fields["engram_max_ngram_size"] - 1
        layout = _derive(
            layer_ids=fields["engram_layer_ids"],
            sizes=[fields["engram_vocab_size"]] * order_count,
            heads=fields["engram_n_heads"],
            vocab=fields["engram_compressed_vocab_size"],
            pad_id=fields.first("engram_pad_token_id", "engram_pad_id"),
            blocking="farther",
        )
        stated = fields.get("engram_num_embeddings")
        if stated is not None:
            layout.check(stated)
        return layout

    @classmethod
    def demo(
        cls,
        vocab: int,
        *,
        layer_ids: Sequence[int] = (1, 15),
        sizes: Sequence[int] = (646400, 646400),
        heads: int = 8,
        seed: int = 0,
        pad_id: int = 2,
    ) -> HashLayout:
        """Of the public Engram demo; `vocab` is the size of its token map."""
        return _derive(
            layer_ids=layer_ids,
            sizes=sizes,
            heads=heads,
            vocab=vocab,
            pad_id=pad_id,
            seed=seed,
            blocking="slot",
        )

    @property
    def max_ngram(self) -> int:
        return len(self.multipliers[0])

    @property
    def heads(self) -> int:
        return len(self.vocab_sizes[0][0])

    def position(self, layer: int) -> int:
        """Of a layer of the model among those that have tables."""
        if layer not in self.layer_ids:
            raise TableError(f"hash_layout: attribute 'layer': expected one of {self.layer_ids}, got {layer}")
        return self.layer_ids.index(layer)

    def compressed_pad(self, token_map: Any = None) -> int:
        """The pad id as windows show it: mapped like every id, where ids are."""
        if token_map is None:
            return self.pad_id
        return int(getattr(token_map, "table", token_map)[self.pad_id])

    def numpy(self) -> HashArrays:
        offset_type = np.int32 if max(self.rows) <= _INT32_MAX else np.int64
        return HashArrays(
            np.array(self.multipliers, np.int64),
            np.array(self.vocab_sizes, np.int32),
            np.array(self.offsets, offset_type),
        )

    def torch(self, device: Any = "cpu") -> HashArrays:
        import torch

        return HashArrays(*(torch.from_numpy(array).to(device) for array in self.numpy()))

    def check(self, rows: Any, layer: int | None = None) -> None:
        """TableError unless tables have these rows: a Table or a number, of the only layer or of
        `layer`, or one of either for each layer."""
        if layer is None and isinstance(rows, (list, tuple)):
            layers, given = self.layer_ids, rows
        else:
            layers, given = [layer if layer is not None else self.layer_ids[0]], [rows]
            if layer is None and len(self.rows) != 1:
                given = []  # which layer?
        got = [getattr(table, "rows", table) for table in given]
        expected = [self.rows[self.position(layer)] for layer in layers]
        if got != expected:
            raise TableError(
                f"hash_layout: attribute 'rows': expected {expected} of layers {list(layers)}, got {got}"
                "; hint: the table was made for another vocabulary or layer"
            )


def qwen_ple_layout(
    *,
    vocab_size: int,
    ngram_size: int,
    heads_per_ngram: int,
    base: int,
    seed: int,
    num_layers: int = 1,
    eos_id: int | None = None,
) -> HashLayout:
    """Of Qwen's n-gram tables: raw ids, and a window that does not look behind `eos_id`, with which
    its slots are filled."""
    return _derive(
        layer_ids=range(num_layers),
        sizes=[base] * (ngram_size - 1),
        heads=heads_per_ngram,
        vocab=vocab_size,
        pad_id=eos_id if eos_id is not None else -1,
        seed=seed,
        scheme="splitmix64",
        blocking="slot",
        reset_id=eos_id,
    )


def _derive(
    *,
    layer_ids: Sequence[int],
    sizes: Sequence[int],
    heads: int,
    vocab: int,
    pad_id: int,
    blocking: str,
    seed: int = 0,
    scheme: str = "numpy",
    reset_id: int | None = None,
) -> HashLayout:
    layer_ids, sizes = list(layer_ids), list(sizes)
    multipliers = ops.engram_multipliers(
        layer_ids, max_ngram=len(sizes) + 1, compressed_vocab=vocab, seed=seed, scheme=scheme
    )
    vocab_sizes = ops.engram_primes(sizes, layers=len(layer_ids), heads=heads)
    offsets = ops.engram_offsets(vocab_sizes, out_dtype="int64")
    return HashLayout(
        multipliers=multipliers.tolist(),
        vocab_sizes=vocab_sizes.tolist(),
        offsets=offsets.tolist(),
        rows=vocab_sizes.astype(np.int64).sum((1, 2)).tolist(),
        layer_ids=layer_ids,
        compressed_vocab_size=vocab,
        pad_id=pad_id,
        blocking=blocking,
        reset_id=reset_id,
    )


class _Fields:
    """Fields of a config, from `text_config` where it has one."""

    def __init__(self, config: Any):
        as_dict = getattr(config, "to_dict", None)
        fields = as_dict() if as_dict else config if isinstance(config, dict) else vars(config)
        text = fields.get("text_config")
        self._fields = {**fields, **(text if isinstance(text, dict) else vars(text) if text else {})}

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def first(self, *names: str) -> Any:
        for name in names:
            if self.get(name) is not None:
                return self.get(name)
        raise TableError(f"hash_layout: attribute 'config': expected a field '{names[0]}', got none")

    def __getitem__(self, name: str) -> Any:
        return self.first(name)
