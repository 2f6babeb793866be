"""Rows of the n-gram tables: gathering, the 8-bit row format, projection to keys and value."""

from __future__ import annotations

import numpy as np

from .dtypes import Tensor, encode


def _take_rows(rows: np.ndarray, indices: Tensor) -> np.ndarray:
    """rows [rows, hd], indices [..., C] -> [..., C * hd]; index -1 gives zeros."""
    wanted = indices.decode()
    if np.any((wanted < -1) | (wanted >= rows.shape[0])):
        raise ValueError(f"'indices': outside -1..{rows.shape[0] - 1}")
    padded = np.concatenate([rows, np.zeros((1, rows.shape[1]), rows.dtype)])  # row -1
    return padded[wanted].reshape(*wanted.shape[:-1], wanted.shape[-1] * rows.shape[1])


def gather_fwd(table: Tensor, indices: Tensor, *, out_dtype: str = "table") -> dict[str, Tensor]:
    """embedding[t, c*hd : (c+1)*hd] = table[indices[t, c]].

    table [rows, hd], indices [..., C] -> embedding [..., C * hd]
    """
    if out_dtype in ("table", table.dtype):
        return {"embedding": Tensor(table.dtype, _take_rows(table.data, indices))}
    return {"embedding": encode(_take_rows(table.decode(), indices), out_dtype)}


def _in_groups(values: np.ndarray, group: int) -> np.ndarray:
    rows, width = values.shape
    return values.reshape(rows, width // group, group)


def dequant_rows(
    weight: Tensor, scale: Tensor, *, group: int = 32, out_dtype: str = "BF16"
) -> dict[str, Tensor]:
    """values = weight * 2^(scale - 127), rounded once. U8 tensors hold the raw bytes.

    weight [rows, hd], scale [rows, hd/group] -> values [rows, hd]
    """
    numbers = Tensor("F8_E4M3", weight.data).decode()
    powers = Tensor("F8_E8M0", scale.data).decode()
    return {"values": encode(numbers * np.repeat(powers, group, axis=1), out_dtype)}


def quantize_rows(values: Tensor, *, group: int = 32) -> dict[str, Tensor]:
    """Per group: e = smallest integer with max|value| / 2^e <= 448 within -127..127,
    scale byte e + 127, weight = value / 2^e in e4m3fn, nearest even, saturating.

    All zero: scale byte 127. A NaN: scale byte 255 and weight bytes 0x7f. An infinity: e = 127.
    values [rows, hd] -> weight [rows, hd], scale [rows, hd/group]
    """
    numbers = _in_groups(values.decode(), group)
    largest = np.abs(numbers).max(axis=-1, initial=0.0)
    bad = np.isnan(largest)
    finite = np.where(np.isfinite(largest), largest, 1.0)
    fraction, power = np.frexp(finite)  # finite = fraction * 2^power, 448 = 0.875 * 2^9
    exponent = np.clip(np.where(fraction <= 0.875, power - 9, power - 8), -127, 127)
    exponent = np.where(largest == 0, 0, np.where(np.isposinf(largest), 127, exponent))
    weight = encode(np.ldexp(numbers, -exponent[..., None]), "F8_E4M3").data
    weight = np.where(bad[..., None], np.uint8(0x7F), weight).reshape(values.shape)
    scale = np.where(bad, 255, exponent + 127).astype(np.uint8)
    return {"weight": Tensor("F8_E4M3", weight), "scale": Tensor("F8_E8M0", scale)}


def gather_dequant(
    weight: Tensor, scale: Tensor, indices: Tensor, *, group: int = 32, out_dtype: str = "BF16"
) -> dict[str, Tensor]:
    """gather_fwd of dequant_rows.

    weight [rows, hd], scale [rows, hd/group], indices [..., C] -> embedding [..., C * hd]
    """
    values = dequant_rows(weight, scale, group=group, out_dtype=out_dtype)["values"]
    return gather_fwd(values, indices)


def kv_projection_fwd(
    embedding: Tensor, weight: Tensor, bias: Tensor | None = None
) -> dict[str, Tensor]:
    """kv[t, j] = W_j e_t + b_j: rows 0..n-1 are the keys of the streams, row n is the shared value.

    embedding [..., E], weight [n+1, d, E], bias [n+1, d] -> kv [..., n+1, d]
    """
    rows, width, inner = weight.shape
    tokens = embedding.decode()
    kv = tokens @ weight.decode().reshape(rows * width, inner).T
    kv = kv.reshape(*tokens.shape[:-1], rows, width)
    if bias is not None:
        kv = kv + bias.decode()
    return {"kv": encode(kv, embedding.dtype)}
