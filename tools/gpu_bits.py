#!/usr/bin/env python3
"""Bits that CPU and CUDA must have in common: golden cases run on both, outputs compared.

    gpu_bits.py EHC FOLDER    the program, and the folder with <op>.<number>.safetensors
"""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

# Outputs of class E, whose bits are the same everywhere; None: all of them.
EXACT = {
    "engram.compress_ids": None,
    "engram.window": None,
    "engram.hash": None,
    "engram.gather_fwd": None,
    "engram.gather_bwd": None,
    "engram.dequant_rows": None,
    "engram.quantize_rows": None,
    "engram.gather_dequant": None,
    "engram.fused_weight": None,
    "engram.momentum_update": None,
    "mhc.amax_gain": None,
    "mhc.defect": None,
    "mhc.expand_fwd": None,
    "mhc.expand_bwd": None,
    "mhc.merge_fwd": None,
    "mhc.merge_bwd": ["grad_fn"],
    "mhc.multilayer_recompute": None,
    "mhc.norm_fn_bwd": None,
    "mhc.post_fwd": None,
    "mhc.post_bwd": ["grad_layer_output", "grad_residual"],
    "mhc.pre_apply_fwd": None,
    "mhc.pre_apply_bwd": ["grad_residual"],
    "mhc.reduce_partials_fwd": None,
    "mhc.reduce_partials_bwd": ["grad_mul"],
}
# Struct code, bits without the sign, infinity; integers have no NaN.
FORMATS = {
    "F32": ("I", 0x7FFFFFFF, 0x7F800000),
    "BF16": ("H", 0x7FFF, 0x7F80),
    "F16": ("H", 0x7FFF, 0x7C00),
    "F8_E4M3": ("B", 0, 0),
    "F8_E8M0": ("B", 0, 0),
    "I32": ("I", 0, 0),
    "I64": ("Q", 0, 0),
}


def read(path: pathlib.Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def tensors(path: pathlib.Path) -> dict[str, list]:
    """Elements as bits, every NaN the same."""
    header, data = read(path)
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        code, size, infinity = FORMATS[entry["dtype"]]
        begin, end = entry["data_offsets"]
        elements = struct.unpack(f"<{(end - begin) // struct.calcsize(code)}{code}", data[begin:end])
        out[name] = [None if x & size > infinity else x for x in elements]
    return out


def run(ehc: str, case: pathlib.Path, op: str, device: str, out: pathlib.Path) -> dict[str, list]:
    settings = json.loads(read(case)[0]["__metadata__"]["ehc"])["set"]
    command = [ehc, "op", op, "--in", str(case), "--out", str(out), "--device", device]
    for name, value in settings.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        command += ["--set", f"{name}={text}"]
    subprocess.run(command, check=True)
    return tensors(out)


def main(ehc: str, folder: str) -> int:
    compared = different = 0
    with tempfile.TemporaryDirectory() as scratch:
        out = pathlib.Path(scratch) / "out.safetensors"
        for op, names in EXACT.items():
            for case in sorted(pathlib.Path(folder).glob(f"{op}.*.safetensors")):
                cpu = run(ehc, case, op, "cpu", out)
                cuda = run(ehc, case, op, "cuda", out)
                for name in names or cpu:
                    compared += 1
                    if cpu[name] == cuda[name]:
                        continue
                    different += 1
                    print(f"{case.name}: '{name}' differs between CPU and CUDA")
    print(f"{compared} outputs compared, {different} different")
    return 1 if different or not compared else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
