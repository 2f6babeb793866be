"""Bytes that every reader of safetensors files must refuse."""

import json
import struct

import numpy as np
from engramhc.reference.dtypes import Tensor
from engramhc.reference.files import serialize


def broken_files():
    """Bytes that are no safetensors file, or not an honest one."""
    good = serialize({"ids": Tensor("I32", np.arange(5, dtype=np.int32))})

    def with_header(header, data=b""):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
        return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}

    return {
        "empty": b"",
        "half a length": good[:5],
        "header longer than file": struct.pack("<Q", 2**40) + good[8:],
        "length of all ones": b"\xff" * 8 + good[8:],
        "bytes missing": good[:-1],
        "bytes left over": good + b"\0",
        "not JSON": with_header(b"{nothing}"),
        "an array": with_header(b"[]"),
        "two objects": with_header(b"{}{}"),
        "not UTF-8": with_header(b'{"\xff": 1}'),
        "negative dimension": with_header({"ids": entry(shape=(-2,))}, bytes(8)),
        "fraction as dimension": with_header({"ids": entry(shape=(2.5,))}, bytes(8)),
        "size overflows": with_header({"ids": entry(shape=(2**32, 2**32), offsets=(0, 0))}),
        "shape times dtype": with_header({"ids": entry(shape=(3,))}, bytes(8)),
        "unknown dtype": with_header({"ids": entry(dtype="F64", shape=(1,))}, bytes(8)),
        "offsets past the end": with_header({"ids": entry(offsets=(8, 16))}, bytes(8)),
        "offsets backwards": with_header({"ids": entry(offsets=(8, 0))}, bytes(8)),
        "gap": with_header({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
        "overlap": with_header({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
        "name twice": with_header(
            b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
            b'"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        ),
        "missing shape": with_header({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
        "metadata not text": with_header({"__metadata__": {"a": 1}}),
        "deep nesting": with_header(b'{"a":' * 100000),
    }
