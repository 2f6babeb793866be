"""Inputs for the operators at the edges of the contract: a space of choices per operator, a small
set of cases in which every pair of choices occurs, and a builder that turns a case into tensors.
"""

import zlib

import numpy as np
from engramhc.reference import REFERENCE
from engramhc.reference.dtypes import Tensor, encode

import op_cases_mhc
from case_tools import (
    ACTIVATIONS,
    STREAMS,
    TOKENS,
    WEIGHTS,
    WIDTHS,
    covering,
    floats,
    set_if,
    targets,
)

MASKS = ["absent", "none", "all", "alternating", "first", "last"]
SEQUENCES = ["absent", "one", "with empty", "every token"]

# Factors that a forward and its backward share.
PROJECTION = {
    "shape": [(0,), (1,), (2,), (31,), (3, 11)],
    "n": STREAMS,
    "d": [1, 7, 64, 257],
    "E": [1, 7, 96, 1000],
    "dtype": ACTIVATIONS,
}
GATE = {
    "shape": [(0,), (1,), (2,), (31,), (33,), (3, 11), (2, 0), (2, 1, 3)],
    "n": STREAMS,
    "d": WIDTHS,
    "dtype": ACTIVATIONS,
    "mask": MASKS,
    "packed": [False, True],
}
CONVOLUTION = {
    "T": TOKENS,
    "n": STREAMS,
    "d": WIDTHS,
    "dtype": ACTIVATIONS,
    "weight": WEIGHTS,
    "norm": WEIGHTS,
    "w": [1, 2, 4],
    "dilation": [1, 3],
    "mask": MASKS,
    "sequences": SEQUENCES,
}
LAYER = {
    "T": TOKENS,
    "n": STREAMS,
    "d": WIDTHS,
    "dtype": ACTIVATIONS,
    "hidden": WEIGHTS,
    "embed": WEIGHTS,
    "packed": [False, True],
    "conv": [None, (1, 2), (2, 1), (4, 3)],
    "norm": WEIGHTS,
    "mask": MASKS,
    "sequences": SEQUENCES,
}

SPACES = {
    "engram.token_map": {
        "V": [0, 1, 2, 33, 400],
        "alphabet": ["ascii", "latin", "asian", "blank"],
        "broken": [False, True],
    },
    "engram.compress_ids": {
        "shape": [(0,), (1,), (33,), (3, 11), (2, 0, 3)],
        "V": [1, 2, 1000],
        "ids": ["I32", "I64"],
        "content": ["known", "negative", "beyond"],
    },
    "engram.window": {
        "T": TOKENS,
        "Nmax": [2, 3, 4, 8],
        "mask": MASKS,
        "sequences": SEQUENCES,
        "history": [False, True],
        "blocking": ["slot", "farther"],
        "reset": ["absent", "off", "on"],
        "content": ["known", "negative"],
    },
    "engram.multipliers": {
        "layers": [[0], [1, 14], [7, 7, 0, 123456]],
        "Nmax": [2, 3, 4, 8],
        "V": [1, 2, 99092, 129280, 2**31, 2**62, 2**63 - 1],
        "seed": [0, 1, 42, 2**31, 2**40 + 7],
        "scheme": ["numpy", "splitmix64"],
    },
    "engram.primes": {
        "sizes": [
            [1],
            [2, 1],
            [50, 20, 50],
            [97, 97, 97, 97],
            [646400, 646400],
            [16000000],
            [2147483000],
        ],
        "layers": [1, 2, 3],
        "heads": [1, 2, 8],
    },
    "engram.offsets": {
        "L": [1, 2, 3],
        "Nmax": [2, 3, 8],
        "Kh": [1, 3, 8],
        "index": ["I32", "I64"],
        "sizes": ["small", "large"],
    },
    "engram.hash": {
        "T": TOKENS,
        "Nmax": [2, 3, 4, 8],
        "L": [1, 2, 5],
        "Kh": [1, 3, 8],
        "mask": MASKS,
        "index": ["I32", "I64"],
        "offsets": ["I32", "I64"],
        "layout": ["LTC", "TLC"],
        "content": ["ids", "extreme", "borders"],
    },
    "engram.gather_fwd": {
        "shape": [(0,), (1,), (33,), (3, 11), (2, 0)],
        "C": [1, 3, 16],
        "hd": [1, 7, 64, 160, 257],
        "rows": [1, 37, 1000],
        "table": ["BF16", "F16", "F32"],
        "out": [None, "table", *ACTIVATIONS],
        "indices": ["I32", "I64"],
        "content": ["mixed", "absent", "same"],
        "special": ["normal", "strange"],
    },
    "engram.gather_bwd": {
        "shape": [(0,), (1,), (33,), (3, 11), (2, 0)],
        "C": [1, 3, 16],
        "hd": [1, 7, 64, 160, 257],
        "rows": [1, 37, 1000],
        "dtype": ACTIVATIONS,
        "indices": ["I32", "I64"],
        "content": ["mixed", "absent", "same"],
        "form": [None, "dense", "sparse"],
        "acc": [False, True],
        "special": ["normal", "nan", "inf"],
    },
    "engram.dequant_rows": {
        "rows": [0, 1, 33],
        "groups": [1, 3, 8],
        "group": [None, 1, 7, 16, 128],
        "out": [None, *ACTIVATIONS],
        "raw": [False, True],
        "scale": ["usual", "any"],
    },
    "engram.quantize_rows": {
        "rows": [0, 1, 33],
        "groups": [1, 3, 8],
        "group": [None, 1, 7, 16, 128],
        "values": ["F32", "BF16"],
        "content": ["normal", "wide", "zero", "strange", "ties"],
    },
    "engram.gather_dequant": {
        "shape": [(0,), (1,), (31,), (3, 5)],
        "C": [1, 3, 24],
        "groups": [1, 3, 8],
        "group": [None, 1, 7, 16],
        "out": [None, *ACTIVATIONS],
        "raw": [False, True],
        "indices": ["I32", "I64"],
        "scale": ["usual", "any"],
    },
    "engram.kv_projection_fwd": {
        **PROJECTION,
        "bias": [False, True],
        "special": ["normal", "nan"],
    },
    "engram.kv_projection_bwd": {
        **PROJECTION,
        "weight acc": [False, True],
        "bias acc": [False, True],
        "special": ["normal", "nan"],
    },
    "engram.fused_weight": {
        "n": STREAMS,
        "d": WIDTHS,
        "hidden": WEIGHTS,
        "embed": WEIGHTS,
        "special": ["normal", "strange"],
    },
    "engram.gate_fwd": {
        **GATE,
        "mode": ["add", "value", "stats"],
        "run": ["plain", "save", "inplace"],
        "eps": [1e-20, 1e-6],
        "special": ["normal", "nan", "inf", "zero", "tiny"],
    },
    "engram.gate_bwd": {
        **GATE,
        "saved": [False, True],
        "value path": [False, True],
        "eps": [1e-20, 1e-6],
        "clamp": [1e-6, 0.2],
        "special": ["normal", "nan", "inf", "zero", "tiny"],
    },
    "engram.grad_w_reduce": {
        "P": [0, 1, 2, 5, 128],
        "n": STREAMS,
        "d": WIDTHS,
        "hidden": WEIGHTS,
        "embed": WEIGHTS,
        "hidden acc": [False, True],
        "embed acc": [False, True],
        "special": ["normal", "nan", "inf"],
    },
    "engram.conv_fwd": {
        **CONVOLUTION,
        "state": [False, True],
        "special": ["normal", "nan", "inf", "zero taps"],
    },
    "engram.conv_bwd": {
        **CONVOLUTION,
        "weight acc": [False, True],
        "norm acc": [False, True],
        "special": ["normal", "nan", "inf", "zero taps"],
    },
    "engram.layer_fwd": {
        **LAYER,
        "state": [False, True],
        "rounding": ["once", "twice"],
        "save": [False, True],
        "special": ["normal", "nan", "inf", "zero"],
    },
    "engram.layer_bwd": {
        **LAYER,
        "gate acc": [False, True],
        "conv acc": [False, True],
        "special": ["normal", "nan", "inf", "zero"],
    },
    "engram.momentum_update": {
        "rows": [0, 1, 2, 33],
        "hd": WIDTHS,
        "grad": WEIGHTS,
        "momentum": WEIGHTS,
        "beta": [0.0, 0.9, 0.95, 0.99, 1.0],
        "nesterov": [False, True],
        "special": ["normal", "zero", "tiny", "strange"],
    },
    "engram.sinkhorn_step": {
        "rows": [0, 1, 2, 33, 300],
        "hd": WIDTHS,
        "eps": [1e-20, 1e-8],
        "content": ["normal", "zero rows", "zero columns", "nan"],
    },
    "engram.sinkhorn_step_reduce": {
        "P": [0, 1, 3, 128],
        "hd": WIDTHS,
        "eps": [1e-20, 1e-8],
        "scale": [False, True],
        "content": ["normal", "zero columns", "nan"],
    },
    "engram.sinkhorn_finalize": {
        "rows": [0, 1, 2, 33, 300],
        "hd": WIDTHS,
        "eps": [1e-20, 1e-8],
        "alpha": [0.5, 16.0],
        "content": ["normal", "zero rows", "zero columns", "nan"],
    },
    "engram.optimizer_step": {
        "rows": [0, 1, 2, 33, 300],
        "hd": [1, 7, 64, 257],
        "weight": WEIGHTS,
        "grad": WEIGHTS,
        "momentum": WEIGHTS,
        "eps": [1e-20, 1e-8],
        "beta": [None, 0.0, 0.9],
        "nesterov": [None, False, True],
        "repeat": [None, 1, 8],
        "tau": [None, 0.0, 0.5],
        "alpha": [None, 2.0],
        "content": ["normal", "zero rows", "zero columns", "all zero", "sparse", "nan"],
    },
}


def mask_of(kind, shape):
    if kind == "absent":
        return {}
    flat = np.zeros(int(np.prod(shape)), bool)
    places = {
        "none": slice(0, 0),
        "all": slice(None),
        "alternating": slice(None, None, 2),
        "first": slice(0, 1),
        "last": slice(-1, None),
    }
    flat[places[kind]] = True
    return {"image_token_mask": Tensor("BOOL", flat.reshape(shape))}


def mask_in(inputs):
    return {x: t for x, t in inputs.items() if x == "image_token_mask"}


def sequences_of(kind, tokens, generator):
    """cu_seqlens as an input, and the number of sequences."""
    if kind == "absent":
        return {}, 1
    inner = {
        "one": [],
        "every token": range(1, tokens),
        "with empty": sorted([0, tokens, *generator.integers(0, tokens + 1, 3).tolist()]),
    }[kind]
    bounds = [0, *inner, tokens]
    return {"cu_seqlens": encode(np.array(bounds), "I32")}, len(bounds) - 1


def hide(tensor, mask, rows):
    """NaN into the rows of masked tokens, which nothing may read. `rows`: axes of one token."""
    if not mask:
        return tensor
    unread = encode(np.float64(np.nan), tensor.dtype).data
    masked = mask["image_token_mask"].data.reshape(mask["image_token_mask"].shape + (1,) * rows)
    return Tensor(tensor.dtype, np.where(masked, unread, tensor.data))


def strings(generator, count, alphabet, broken):
    letters = {
        "ascii": " \tabcABCxyz019.,-",
        "latin": " aÀÁàéÉñßſﬁİIıǅŸẞΣσςЖжЁё\u0301\u0308\u0327\u20dd",
        "asian": "\u3000中文字ｱア가각한\u1100\u1161\u11a8か\u3099ががヷ①㍿（）｢",
        "blank": " \t\r\n\x0b\x0c\x1c\x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000\u200b",
    }[alphabet]
    made = [
        "".join(generator.choice(list(letters), int(generator.integers(0, 5))))
        for _ in range(count)
    ]
    if broken:
        made = [text + "\ufffd" if generator.random() < 0.3 else text for text in made]
    return made


def packed_strings(made):
    parts = [text.encode("utf-8") for text in made]
    ends = np.cumsum([0, *map(len, parts)])
    return (Tensor("U8", np.frombuffer(b"".join(parts), np.uint8)), encode(ends, "I64"))


def token_map(g, V, alphabet, broken):
    texts, text_offsets = packed_strings(strings(g, V, alphabet, broken))
    raw_tokens, raw_offsets = packed_strings(strings(g, V, alphabet, False))
    return {
        "texts": texts,
        "text_offsets": text_offsets,
        "raw_tokens": raw_tokens,
        "raw_offsets": raw_offsets,
    }, {}


def compress_ids(g, shape, V, ids, content):
    values = g.integers(0, V, shape)
    if content == "negative":
        values = np.where(g.random(shape) < 0.5, g.integers(-9, 0, shape), values)
    if content == "beyond":
        values = np.where(g.random(shape) < 0.5, V + g.integers(0, 2**30, shape), values)
    return (
        {"ids": encode(values, ids), "table": encode(g.integers(0, 2**31, V), "I32")},
        {"checked": False} if content == "beyond" else {},
    )


def window(g, T, Nmax, mask, sequences, history, blocking, reset, content):
    cu_seqlens, count = sequences_of(sequences, T, g)
    low = -2 if content == "negative" else 0
    inputs = {"ids": encode(g.integers(low, 6, T), "I32"), **cu_seqlens, **mask_of(mask, (T,))}
    if history:
        inputs["history"] = encode(g.integers(-1, 6, (count, Nmax - 1)), "I32")
    resets = {"absent": None, "off": -1, "on": 3}[reset]
    if reset == "on" and "image_token_mask" in inputs:  # an image that is also the reset id: unsaid
        inputs["ids"] = encode(
            np.where(
                inputs["image_token_mask"].data & (inputs["ids"].data == 3), 4, inputs["ids"].data
            ),
            "I32",
        )
    return inputs, set_if(max_ngram=Nmax, pad_id=77, blocking=blocking, reset_id=resets)


def multipliers(g, layers, Nmax, V, seed, scheme):
    return {}, {
        "layer_ids": layers,
        "max_ngram": Nmax,
        "compressed_vocab": V,
        "seed": seed,
        "scheme": scheme,
    }


def primes(g, sizes, layers, heads):
    return {}, {"sizes": sizes, "layers": layers, "heads": heads}


def offsets(g, L, Nmax, Kh, index, sizes):
    columns = (Nmax - 1) * Kh
    most = 2**31 - 1 if index == "I64" else (2**31 - 1) // columns
    low = most - 1000 if sizes == "large" else 1
    values = g.integers(low, most if sizes == "large" else 1000, (L, Nmax - 1, Kh))
    return {"vocab_sizes": encode(values, "I32")}, {"index_dtype": index}


def hash_rows(g, T, Nmax, L, Kh, mask, index, offsets, layout, content):
    columns = (Nmax - 1) * Kh
    narrow = "I32" in (index, offsets)
    most = (2**31 - 1) // columns if narrow else 2**31 - 1
    sizes = np.minimum(g.choice([1, 2, 3, 646403, 16000057, most - 1, most], (L, columns)), most)
    starts = np.cumsum(sizes, axis=1) - sizes
    tokens = g.integers(0, 99092, (T, Nmax))
    factors = 2 * g.integers(0, 2**45, (L, Nmax)) + 1
    if content == "extreme":
        tokens = g.choice([-(2**31), 2**31 - 1, -1, 0, 1, 2**31 - 2], (T, Nmax))
        factors = g.choice([-(2**63), 2**63 - 1, -1, 1, 3, 2**62 + 1, -(2**62)], (L, Nmax))
    if content == "borders":  # products at and around multiples of the sizes, and at +-2^63
        tokens = g.choice([1, -1], (T, Nmax))
        tokens[:, 1:] = 0
        edges = sizes[:, 0] * ((2**63 - 1) // sizes[:, 0])
        factors = np.repeat((edges - g.integers(0, 2, L))[:, None], Nmax, axis=1)
    return (
        {
            "window": encode(tokens, "I32"),
            "multipliers": encode(factors, "I64"),
            "vocab_sizes": encode(sizes.reshape(L, Nmax - 1, Kh), "I32"),
            "offsets": encode(starts, offsets),
            **mask_of(mask, (T,)),
        },
        {"index_dtype": index, "layout": layout},
    )


def row_indices(g, shape, C, rows, dtype, content="mixed"):
    values = g.integers(-1, rows, (*shape, C))
    if content != "mixed":
        values[:] = -1 if content == "absent" else rows - 1
    return encode(values, dtype)


def gather_bwd(g, shape, C, hd, rows, dtype, indices, content, form, acc, special):
    wanted = row_indices(g, shape, C, rows, indices, content)
    gradient = floats(g, (*shape, C, hd), dtype, special)
    unread = {"image_token_mask": Tensor("BOOL", wanted.data < 0)}
    gradient = hide(gradient, unread, 1)
    inputs = {
        "grad_embedding": Tensor(dtype, gradient.data.reshape(*shape, C * hd)),
        "indices": wanted,
        **targets(g, grad_table_acc=(rows, hd) if acc and form != "sparse" else None),
    }
    return inputs, set_if(form=form, rows=None if "grad_table_acc" in inputs else rows)


def gather_fwd(g, shape, C, hd, rows, table, out, indices, content, special):
    return (
        {
            "table": floats(g, (rows, hd), table, special),
            "indices": row_indices(g, shape, C, rows, indices, content),
        },
        set_if(out_dtype=out),
    )


def quantized(g, rows, groups, group, raw, scale):
    width = groups * (group or 32)
    scales = (
        g.integers(100, 140, (rows, groups))
        if scale == "usual"
        else g.choice([0, 1, 2, 100, 127, 128, 254, 255], (rows, groups))
    )
    return {
        "weight": Tensor(
            "U8" if raw else "F8_E4M3", g.integers(0, 256, (rows, width)).astype(np.uint8)
        ),
        "scale": Tensor("U8" if raw else "F8_E8M0", scales.astype(np.uint8)),
    }


def dequant_rows(g, rows, groups, group, out, raw, scale):
    return quantized(g, rows, groups, group, raw, scale), set_if(group=group, out_dtype=out)


def quantize_rows(g, rows, groups, group, values, content):
    shape = (rows, groups * (group or 32))
    special = {"strange": "strange", "zero": "zero"}.get(content, "normal")
    numbers = floats(g, shape, values, special)
    if content == "wide":
        numbers = encode(numbers.decode() * np.exp2(g.integers(-140, 120, shape)), values)
    if content == "ties":  # small integers and quarters: many ties, and amax at 448 * 2^k exactly
        numbers = encode(
            g.choice([448.0, 449.0, 3.5, 17.0, 1.0625, -2.125, 0.0], shape)
            * np.exp2(g.integers(-3, 4, (rows, 1))),
            values,
        )
    return {"values": numbers}, set_if(group=group)


def gather_dequant(g, shape, C, groups, group, out, raw, indices, scale):
    return (
        {
            **quantized(g, 37, groups, group, raw, scale),
            "indices": row_indices(g, shape, C, 37, indices),
        },
        set_if(group=group, out_dtype=out),
    )


def kv_projection_fwd(g, shape, n, d, E, dtype, bias, special):
    inputs = {
        "embedding": floats(g, (*shape, E), dtype, special),
        "weight": floats(g, (n + 1, d, E), dtype),
    }
    if bias:
        inputs["bias"] = floats(g, (n + 1, d), dtype)
    return inputs, {}


def kv_projection_bwd(g, shape, n, d, E, dtype, special, **acc):
    return {
        "grad_kv": floats(g, (*shape, n + 1, d), dtype, special),
        "embedding": floats(g, (*shape, E), dtype),
        "weight": floats(g, (n + 1, d, E), dtype),
        **targets(
            g,
            grad_weight_acc=(n + 1, d, E) if acc["weight acc"] else None,
            grad_bias_acc=(n + 1, d) if acc["bias acc"] else None,
        ),
    }, {}


def fused_weight(g, n, d, hidden, embed, special):
    return {
        "weight_hidden": floats(g, (n, d), hidden, special),
        "weight_embed": floats(g, (n, d), embed, special),
    }, {}


def keys_and_value(g, shape, n, d, dtype, packed, mask, special):
    if packed:
        return {"kv": hide(floats(g, (*shape, n + 1, d), dtype, special), mask, 2)}
    return {
        "key": hide(floats(g, (*shape, n, d), dtype, special), mask, 2),
        "value": hide(floats(g, (*shape, d), dtype, special), mask, 1),
    }


def gate_fwd(g, shape, n, d, dtype, mask, packed, mode, run, eps, special):
    masked = mask_of(mask, shape)
    one_side = "normal" if special == "tiny" else special
    inputs = {
        "residual": floats(g, (*shape, n, d), dtype, special),
        **keys_and_value(g, shape, n, d, dtype, packed, masked, one_side),
        "weight_fused": floats(g, (n, d), "F32", center=1.0),
        **masked,
    }
    return inputs, {
        "eps": eps,
        "clamp": 1e-6,
        "mode": mode,
        "save": run == "save",
        "inplace": run == "inplace",
    }


def gate_bwd(g, shape, n, d, dtype, mask, packed, saved, eps, clamp, special, **more):
    forward, _ = gate_fwd(g, shape, n, d, dtype, mask, packed, "add", "save", eps, special)
    masked = mask_in(forward)
    inputs = {
        "grad_out": floats(g, (*shape, n, d), dtype),
        **forward,
        "residual": hide(forward["residual"], masked, 2),
    }
    if more["value path"]:
        inputs["grad_value_path"] = hide(floats(g, (*shape, n, d), dtype), masked, 2)
    attrs = {"clamp": clamp}
    if saved:
        statistics = REFERENCE["engram.gate_fwd"](
            forward, {"eps": eps, "clamp": clamp, "save": True}
        )
        inputs |= {x: hide(t, masked, 1) for x, t in statistics.items() if x != "out"}
    else:
        attrs["eps"] = eps
    return inputs, attrs


def grad_w_reduce(g, P, n, d, hidden, embed, special, **acc):
    return {
        "grad_weight_partial": floats(g, (P, n, d), "F32", special),
        "weight_hidden": floats(g, (n, d), hidden, center=1.0),
        "weight_embed": floats(g, (n, d), embed, center=1.0),
        **targets(
            g,
            grad_weight_hidden_acc=(n, d) if acc["hidden acc"] else None,
            grad_weight_embed_acc=(n, d) if acc["embed acc"] else None,
        ),
    }, {}


def conv_fwd(g, T, n, d, dtype, weight, norm, w, dilation, mask, sequences, state, special):
    masked = mask_of(mask, (T,))
    cu_seqlens, count = sequences_of(sequences, T, g)
    inputs = {
        "gated_value": hide(floats(g, (T, n, d), dtype, special), masked, 2),
        "conv_weight": floats(g, (n, d, w), weight, "zero" if special == "zero taps" else "normal"),
        "conv_norm_weight": floats(g, (n, d), norm, center=1.0),
        **cu_seqlens,
        **masked,
    }
    if state:
        inputs["state"] = floats(g, (count, (w - 1) * dilation, n, d), "F32")
    return inputs, {"dilation": dilation, "conv_eps": 1e-5}


def conv_bwd(g, **factors):
    weight_acc, norm_acc = factors.pop("weight acc"), factors.pop("norm acc")
    inputs, attrs = conv_fwd(g, **factors, state=False)
    value = inputs["gated_value"]
    masked = mask_in(inputs)
    return {
        "grad_out": hide(floats(g, value.shape, value.dtype), masked, 2),
        **inputs,
        **targets(
            g,
            grad_conv_weight_acc=inputs["conv_weight"].shape if weight_acc else None,
            grad_conv_norm_weight_acc=inputs["conv_norm_weight"].shape if norm_acc else None,
        ),
    }, attrs


def layer_fwd(
    g,
    T,
    n,
    d,
    dtype,
    hidden,
    embed,
    packed,
    conv,
    norm,
    mask,
    sequences,
    state,
    rounding,
    save,
    special,
):
    masked = mask_of(mask, (T,))
    cu_seqlens, count = sequences_of(sequences, T, g)
    inputs = {
        "residual": floats(g, (T, n, d), dtype, special),
        **keys_and_value(g, (T,), n, d, dtype, packed, masked, special),
        "weight_hidden": floats(g, (n, d), hidden, center=1.0),
        "weight_embed": floats(g, (n, d), embed, center=1.0),
        **cu_seqlens,
        **masked,
    }
    attrs = {"eps": 1e-6, "clamp": 1e-6, "rounding": rounding, "save": save}
    if conv is not None:
        w, dilation = conv
        inputs |= {
            "conv_weight": floats(g, (n, d, w), hidden),
            "conv_norm_weight": floats(g, (n, d), norm, center=1.0),
        }
        attrs |= {"dilation": dilation, "conv_eps": 1e-5}
        if state:
            inputs["state"] = floats(g, (count, (w - 1) * dilation, n, d), "F32")
    return inputs, attrs


def layer_bwd(g, **factors):
    gate_acc, conv_acc = factors.pop("gate acc"), factors.pop("conv acc")
    inputs, attrs = layer_fwd(g, **factors, state=False, rounding=None, save=None)
    residual = inputs["residual"]
    masked = mask_in(inputs)
    gates = inputs["weight_hidden"].shape if gate_acc else None
    taps, norms = None, None
    if "conv_weight" in inputs and conv_acc:
        taps, norms = inputs["conv_weight"].shape, inputs["conv_norm_weight"].shape
    return {
        "grad_out": floats(g, residual.shape, residual.dtype),
        **inputs,
        "residual": hide(residual, masked, 2),
        **targets(
            g,
            grad_weight_hidden_acc=gates,
            grad_weight_embed_acc=gates,
            grad_conv_weight_acc=taps,
            grad_conv_norm_weight_acc=norms,
        ),
    }, set_if(**attrs)


def momentum_update(g, rows, hd, grad, momentum, beta, nesterov, special):
    return {
        "grad": floats(g, (rows, hd), grad, special),
        "momentum": floats(g, (rows, hd), momentum, special),
    }, {"beta": beta, "nesterov": nesterov}


def with_zeros(g, values, content):
    """Rows or columns of zeros, or one NaN."""
    if content == "zero rows":
        values[::2] = 0.0
    if content == "zero columns":
        values[:, ::2] = 0.0
    if content == "all zero":
        values[:] = 0.0
    if content == "sparse":
        values[g.random(values.shape[0]) < 0.8] = 0.0
    if content == "nan" and values.size:
        values.reshape(-1)[g.integers(0, values.size)] = np.nan
    return values


def scaled_matrix(g, rows, hd, content):
    row_scale = g.uniform(0.5, 2.0, rows)
    if content == "zero rows":
        row_scale[::4] = 0.0  # rows 2, 6, ... are zero themselves
    return {
        "update": encode(with_zeros(g, g.standard_normal((rows, hd)), content), "F32"),
        "row_scale": encode(row_scale, "F32"),
        "col_scale": encode(g.uniform(0.5, 2.0, hd), "F32"),
    }


def sinkhorn_step(g, rows, hd, eps, content):
    return scaled_matrix(g, rows, hd, content), {"eps": eps}


def sinkhorn_step_reduce(g, P, hd, eps, scale, content):
    squares = with_zeros(g, g.standard_normal((P, hd)), content) ** 2
    inputs = {"col_partial": encode(squares, "F32")}
    if not scale:
        return inputs, {}
    return inputs | {"col_scale": encode(g.uniform(0.5, 2.0, hd), "F32")}, {"eps": eps}


def sinkhorn_finalize(g, rows, hd, eps, alpha, content):
    return scaled_matrix(g, rows, hd, content), {"eps": eps, "alpha": alpha}


def optimizer_step(
    g, rows, hd, weight, grad, momentum, eps, beta, nesterov, repeat, tau, alpha, content
):
    gradient = with_zeros(g, g.standard_normal((rows, hd)), content)
    moving = 0.3 * g.standard_normal((rows, hd))
    if content in ("zero rows", "zero columns", "all zero"):
        moving[gradient == 0] = 0.0
    return {
        "weight": floats(g, (rows, hd), weight),
        "grad": encode(gradient, grad),
        "momentum": encode(moving, momentum),
    }, set_if(lr=0.1, eps=eps, beta=beta, nesterov=nesterov, repeat=repeat, tau=tau, alpha=alpha)


BUILDERS = {
    "engram.token_map": token_map,
    "engram.compress_ids": compress_ids,
    "engram.window": window,
    "engram.multipliers": multipliers,
    "engram.primes": primes,
    "engram.offsets": offsets,
    "engram.hash": hash_rows,
    "engram.gather_fwd": gather_fwd,
    "engram.gather_bwd": gather_bwd,
    "engram.dequant_rows": dequant_rows,
    "engram.quantize_rows": quantize_rows,
    "engram.gather_dequant": gather_dequant,
    "engram.kv_projection_fwd": kv_projection_fwd,
    "engram.kv_projection_bwd": kv_projection_bwd,
    "engram.fused_weight": fused_weight,
    "engram.gate_fwd": gate_fwd,
    "engram.gate_bwd": gate_bwd,
    "engram.grad_w_reduce": grad_w_reduce,
    "engram.conv_fwd": conv_fwd,
    "engram.conv_bwd": conv_bwd,
    "engram.layer_fwd": layer_fwd,
    "engram.layer_bwd": layer_bwd,
    "engram.momentum_update": momentum_update,
    "engram.sinkhorn_step": sinkhorn_step,
    "engram.sinkhorn_step_reduce": sinkhorn_step_reduce,
    "engram.sinkhorn_finalize": sinkhorn_finalize,
    "engram.optimizer_step": optimizer_step,
}


SPACES |= op_cases_mhc.SPACES
BUILDERS |= op_cases_mhc.BUILDERS


def legal(name, case):
    """False for combinations that the contract forbids or leaves open."""
    if name == "engram.primes" and case["sizes"] == [2147483000]:
        return case["layers"] * case["heads"] <= 8  # a few primes are left below 2^31
    if name in ("engram.gate_bwd", "engram.layer_bwd") and case["d"] == 1:
        return case["special"] != "inf"  # inf times a difference that is 0 but for rounding
    return op_cases_mhc.legal(name, case)


def cases_of(name):
    """All cases of an operator with their names: [(id, case)]."""
    found = [
        case for case in covering(SPACES[name], zlib.crc32(name.encode())) if legal(name, case)
    ]
    return list(enumerate(found))


def build(name, number, case):
    return BUILDERS[name](np.random.default_rng([number, zlib.crc32(name.encode())]), **case)
