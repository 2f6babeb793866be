"""Rows of the n-gram tables: gathering, the 8-bit row format, projection to keys and value."""

from __future__ import annotations

import numpy as np

from .dtypes import Tensor, accumulated, encode


def _checked(indices: Tensor, rows: int) -> np.ndarray:
    wanted = indices.decode()
    if np.any((wanted < -1) | (wanted >= rows)):
        raise ValueError(f"'indices': outside -1..{rows - 1}")
    return wanted


def _take_rows(rows: np.ndarray, indices: Tensor) -> np.ndarray:
    """rows [rows, hd], indices [..., C] -> [..., C * hd]; index -1 gives zeros."""
    wanted = _checked(indices, rows.shape[0])
    padded = np.concatenate([rows, np.zeros((1, rows.shape[1]), rows.dtype)])  # row -1
    return padded[wanted].reshape(*wanted.shape[:-1], wanted.shape[-1] * rows.shape[1])


def gather_fwd(table: Tensor, indices: Tensor, *, out_dtype: str = "table") -> dict[str, Tensor]:
    """embedding[t, c*hd : (c+1)*hd] = table[indices[t, c]].

    table [rows, hd], indices [..., C] -> embedding [..., C * hd]
    """
    if out_dtype in ("table", table.dtype):
        return {"embedding": Tensor(table.dtype, _take_rows(table.data, indices))}
    return {"embedding": encode(_take_rows(table.decode(), indices), out_dtype)}


def gather_bwd(
    grad_embedding: Tensor,
    indices: Tensor,
    grad_table_acc: Tensor | None = None,
    *,
    rows: int | None = None,
    form: str = "dense",
) -> dict[str, Tensor]:
    """grad_table[r] = sum of grad_embedding[t, c*hd : (c+1)*hd] over all (t, c) with index r.

    form = "sparse" gives only the rows that occur: unique_rows, ascending, and grad_rows.
    grad_embedding [..., C * hd], indices [..., C], grad_table_acc [rows, hd]
    -> grad_table [rows, hd], or unique_rows [U] and grad_rows [U, hd]
    """
    if form == "sparse" and grad_table_acc is not None:
        raise ValueError("'grad_table_acc': a sparse gradient has no target")
    columns = indices.shape[-1]
    width = grad_embedding.shape[-1] // max(1, columns)
    rows, width = (rows, width) if grad_table_acc is None else grad_table_acc.shape
    wanted = _checked(indices, rows).reshape(-1)
    pieces = grad_embedding.decode().reshape(wanted.size, width)
    present = wanted >= 0
    unique, places = np.unique(wanted[present], return_inverse=True)
    sums = np.zeros((unique.size, width))
    with np.errstate(all="ignore"):
        np.add.at(sums, places.reshape(-1), pieces[present])
    if form == "sparse":
        return {
            "unique_rows": encode(unique, indices.dtype),
            "grad_rows": encode(sums, "F32"),
        }
    gradient = np.zeros((rows, width))
    gradient[unique] = sums
    return {"grad_table": accumulated(grad_table_acc, gradient)}


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


def kv_projection_bwd(
    grad_kv: Tensor,
    embedding: Tensor,
    weight: Tensor,
    grad_weight_acc: Tensor | None = None,
    grad_bias_acc: Tensor | None = None,
) -> dict[str, Tensor]:
    """grad_e = grad_kv W, grad_W = sum over t of grad_kv e^T, grad_b = sum over t of grad_kv.

    grad_kv [..., n+1, d], embedding [..., E], weight [n+1, d, E]
    -> grad_embedding [..., E], grad_weight [n+1, d, E], grad_bias [n+1, d]
    """
    rows, width, inner = weight.shape
    flat = grad_kv.decode().reshape(-1, rows * width)
    tokens = embedding.decode().reshape(-1, inner)
    with np.errstate(all="ignore"):
        grad_embedding = flat @ weight.decode().reshape(rows * width, inner)
        return {
            "grad_embedding": encode(grad_embedding.reshape(embedding.shape), embedding.dtype),
            "grad_weight": accumulated(
                grad_weight_acc, (flat.T @ tokens).reshape(rows, width, inner)
            ),
            "grad_bias": accumulated(grad_bias_acc, flat.sum(axis=0).reshape(rows, width)),
        }
