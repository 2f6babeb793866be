"""Other libraries, where they are installed: each gives its function for a case, or says why not.

Inputs are made in the peer's own layout beforehand and not measured. Forward and backward go through
the peer's autograd where it has one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from .formulas import EPS, REPEAT

Inputs = dict[str, Tensor]
# A function of no arguments and whether autograd runs through it to the inputs.
Adapter = Callable[[Inputs], tuple[Callable, list[Tensor]]]


class Peer:
    def __init__(self, name: str, package: str, module: str, adapters: dict[str, Callable]):
        self.name, self.package, self._module, self._adapters = name, package, module, adapters

    def adapter(self, case: str) -> Callable | None:
        """For one case: inputs by name -> function, its inputs. None where the peer has none.
        Raises whatever importing it raises."""
        if case not in self._adapters:
            return None
        module = importlib.import_module(self._module)
        if module.__name__.startswith("engramhc."):
            raise ImportError("it is engramhc.compat's")
        return lambda inputs: self._adapters[case](module, inputs)


def _leading(tensor: Tensor) -> Tensor:
    """TileKernels and TransformerEngine want two leading dimensions."""
    return tensor.unsqueeze(0)


# --- TileKernels: kernels of 1.x and 2.x under one name, without autograd ---------------------------


def _tile_expand(module, x):
    hidden = x["hidden"]
    out = hidden.new_empty(hidden.shape[0], 4, hidden.shape[1])

    def run():
        module.mhc.expand_to_mhc_fwd(hidden, out)
        return out

    return run, []


def _tile_apply(module, x):
    residual, pre = x["residual"], x["pre"]
    out = residual.new_empty(residual.shape[0], residual.shape[2])

    def run():
        module.mhc.mhc_pre_apply_mix_fwd(residual, pre, out)
        return out

    return run, []


def _tile_post(module, x):
    tensors = [_leading(x[name]) for name in ("layer_output", "residual")]
    tensors += [_leading(x["post"]).unsqueeze(-1), _leading(x["comb"])]
    function = importlib.import_module("tile_kernels.mhc.post_kernel").mhc_post_fwd
    return lambda: function(*tensors)[0], []


def _tile_sinkhorn(module, x):
    out = torch.empty_like(x["logits"])

    def run():
        module.mhc.mhc_sinkhorn_fwd(x["logits"], out, REPEAT, EPS)
        return out

    return run, []


def _tile_gate(module, x):
    kv = torch.cat([x["k"], x["v"].unsqueeze(1)], 1)
    fused = module.engram.fused_weight(x["weight_hidden"].bfloat16(), x["weight_embed"].bfloat16())
    is_packed = not hasattr(importlib.import_module("tile_kernels.engram"), "engram_gate_kernel")

    def run():
        keys = (kv,) if is_packed else (x["k"], x["v"])
        return module.engram.engram_gate_fwd(x["x"], *keys, fused, EPS, EPS, False)[0]

    return run, []


# --- Liger: autograd, H_res is [output stream, input stream] ----------------------------------------


def _liger_apply(module, x):
    return lambda: module.liger_mhc_pre(x["residual"], x["pre"]), [x["residual"], x["pre"]]


def _liger_post(module, x):
    h_res = x["comb"].detach().mT.contiguous().requires_grad_(x["comb"].requires_grad)
    inputs = [x["residual"], x["layer_output"], x["post"], h_res]
    return lambda: module.liger_mhc_post_res(*inputs), inputs


# --- TransformerEngine: autograd, streams innermost --------------------------------------------------


def _engine_streams(residual: Tensor) -> Tensor:
    return _leading(residual.detach().mT.contiguous()).requires_grad_(residual.requires_grad)


def _engine_coefficient(tensor: Tensor) -> Tensor:
    return _leading(tensor.detach()).requires_grad_(tensor.requires_grad)


def _engine_apply(module, x):
    inputs = [_engine_streams(x["residual"]), _engine_coefficient(x["pre"])]
    return lambda: module.mhc_fused_aggregate(*inputs, 4)[0], inputs


def _engine_post(module, x):
    f, post, comb = (_engine_coefficient(x[name]) for name in ("layer_output", "post", "comb"))
    streams = _engine_streams(x["residual"])
    return lambda: module.mhc_fused_expand_combine(f, None, post, streams, comb, 4)[0].mT, [
        f,
        post,
        streams,
        comb,
    ]


PEERS = [
    Peer(
        "TileKernels",
        "tile-kernels",
        "tile_kernels",
        {
            "expand_to_mhc": _tile_expand,
            "mhc_pre_apply_mix": _tile_apply,
            "mhc_post": _tile_post,
            "sinkhorn_normalize": _tile_sinkhorn,
            "engram_gate": _tile_gate,
        },
    ),
    Peer(
        "Liger",
        "liger-kernel",
        "liger_kernel.transformers.mhc",
        {"mhc_pre_apply_mix": _liger_apply, "mhc_post": _liger_post},
    ),
    Peer(
        "TransformerEngine",
        "transformer-engine",
        "transformer_engine.pytorch.triton.mhc",
        {"mhc_pre_apply_mix": _engine_apply, "mhc_post": _engine_post},
    ),
]
