"""Call sequences of real models, made of the operators of this reference."""

from __future__ import annotations

from . import addressing, gate, rows
from .dtypes import Tensor


def deepseek_v41_layer(
    residual: Tensor,
    table_weight: Tensor,
    table_scale: Tensor,
    indices: Tensor,
    projection: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    image_token_mask: Tensor | None = None,
    *,
    eps: float = 1e-20,
    clamp: float = 1e-6,
    group: int = 32,
) -> dict[str, Tensor]:
    """8-bit rows -> BF16 memory -> keys and value (no bias) -> gate, no convolution.

    residual BF16[T, n, d], table_weight [rows, hd], table_scale [rows, hd/group], indices [T, C],
    projection BF16[n+1, d, C*hd], weight_hidden, weight_embed [n, d], image_token_mask [T]
    -> embedding [T, C*hd], kv [T, n+1, d], out [T, n, d]
    """
    embedding = rows.gather_dequant(table_weight, table_scale, indices, group=group)["embedding"]
    kv = rows.kv_projection_fwd(embedding, projection)["kv"]
    fused = gate.fused_weight(weight_hidden, weight_embed)["weight_fused"]
    out = gate.gate_fwd(
        residual, fused, kv=kv, image_token_mask=image_token_mask, eps=eps, clamp=clamp
    )["out"]
    return {"embedding": embedding, "kv": kv, "out": out}


def qwen_addressing(
    ids: Tensor,
    cu_seqlens: Tensor | None = None,
    history: Tensor | None = None,
    *,
    layers: int = 1,
    vocab: int = 248320,
    end_of_text: int = 248044,
    base: int = 20_000_000,
    max_ngram: int = 3,
    heads: int = 8,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Raw ids, a window that ends at the end-of-text id and is filled with it, multipliers from
    SplitMix64, and consecutive primes from `base` on as table sizes.

    ids [T], cu_seqlens [B+1], history [B, max_ngram-1] -> window [T, max_ngram],
    multipliers [L, max_ngram], vocab_sizes [L, max_ngram-1, heads], offsets [L, C],
    indices [L, T, C]
    """
    outputs = addressing.window(
        ids,
        cu_seqlens,
        history,
        max_ngram=max_ngram,
        pad_id=end_of_text,
        reset_id=end_of_text,
        blocking="farther",
    )
    outputs |= addressing.multipliers(
        layer_ids=list(range(layers)),  # positions in the list of layers, not the layers' numbers
        max_ngram=max_ngram,
        compressed_vocab=vocab,
        seed=seed,
        scheme="splitmix64",
    )
    outputs |= addressing.primes(sizes=[base] * (max_ngram - 1), layers=layers, heads=heads)
    outputs |= addressing.offsets(outputs["vocab_sizes"])
    return outputs | addressing.hash_rows(**outputs)
