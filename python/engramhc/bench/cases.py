"""What is compared: inputs, our function, the formula, and the bytes that must move."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import torch as ehc
from . import formulas
from .formulas import CLAMP, DILATION, EPS, KERNEL, POST_MULT, REPEAT

STREAMS = 4
MIXES = STREAMS * (STREAMS + 2)
MAPS = 16  # of the Sinkhorn case, for every token of the others
LAYERS = 10  # of the block that is recomputed
COLUMNS, HEAD_DIM, ROWS = 16, 64, 1 << 18  # of the gather
_RULES = dict(rms_eps=EPS, pre_eps=EPS, sinkhorn_eps=EPS, post_mult=POST_MULT, repeat=REPEAT)


class Case(NamedTuple):
    make: Callable[[int, int, torch.device], dict[str, Tensor]]  # tokens, width, device
    ours: Callable
    theirs: Callable
    forward_values: Callable[[int, int], int]  # bytes of one call from tokens and width
    backward_values: Callable[[int, int], int] | None  # None: no backward is measured


def _streams(tokens: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, STREAMS, width, device=device).bfloat16()


def _row(tokens: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, width, device=device).bfloat16()


def _coefficients(*shape: int, device: torch.device) -> Tensor:
    return torch.rand(*shape, device=device) / STREAMS


def _exit(tokens: int, width: int, device: torch.device) -> dict[str, Tensor]:
    return {
        "layer_output": _row(tokens, width, device),
        "residual": _streams(tokens, width, device),
        "post": _coefficients(tokens, STREAMS, device=device),
        "comb": _coefficients(tokens, STREAMS, STREAMS, device=device),
    }


def _mapping(width: int, device: torch.device) -> dict[str, Tensor]:
    return {
        "fn": torch.randn(MIXES, STREAMS * width, device=device) * (STREAMS * width) ** -0.5,
        "scale": torch.ones(3, device=device),
        "base": torch.randn(MIXES, device=device),
    }


def _gate(tokens: int, width: int, device: torch.device) -> dict[str, Tensor]:
    return {
        "x": _streams(tokens, width, device),
        "k": _streams(tokens, width, device),
        "v": _row(tokens, width, device),
        "weight_hidden": 1 + 0.1 * torch.randn(STREAMS, width, device=device),
        "weight_embed": 1 + 0.1 * torch.randn(STREAMS, width, device=device),
    }


def _block(tokens: int, width: int, device: torch.device) -> dict[str, Tensor]:
    """A block of LAYERS layers, each tensor a stack of theirs; a quarter of the tokens."""
    layers = [_exit(max(1, tokens // 4), width, device) for _ in range(LAYERS)]
    stacks = {
        name: torch.stack([layer[name] for layer in layers]) for name in ("layer_output", "post", "comb")
    }
    residual = layers[0]["residual"]
    return {"residual": residual, "pre": _coefficients(LAYERS, *residual.shape[:2], device=device), **stacks}


def _recompute(residual: Tensor, pre: Tensor, layer_output: Tensor, post: Tensor, comb: Tensor) -> tuple:
    stacks = (list(t) for t in (pre, layer_output, post, comb))
    inputs, residuals = ehc.mhc_multilayer_recompute(residual, *stacks)
    return *inputs, *residuals


def _pre(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    layer_input, (post, comb) = ehc.mhc_pre(residual, fn, scale, base, **_RULES)
    return layer_input, post, comb


def _seam(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    residual, (post, comb), layer_input = ehc.mhc_fused_post_pre(*tensors, **_RULES)
    return residual, layer_input, post, comb


CASES: dict[str, Case] = {
    "expand_to_mhc": Case(
        lambda t, d, device: {"hidden": _row(t, d, device)},
        lambda hidden: ehc.expand_to_mhc(hidden, STREAMS),
        lambda hidden: formulas.expand(hidden, STREAMS),
        lambda t, d: 2 * (1 + STREAMS) * d * t,
        lambda t, d: 2 * (1 + STREAMS) * d * t,
    ),
    "mhc_pre_apply_mix": Case(
        lambda t, d, device: {
            "residual": _streams(t, d, device),
            "pre": _coefficients(t, STREAMS, device=device),
        },
        ehc.mhc_pre_apply_mix,
        formulas.pre_apply,
        lambda t, d: ((2 * STREAMS + 2) * d + 4 * STREAMS) * t,
        lambda t, d: ((4 * STREAMS + 2) * d + 8 * STREAMS) * t,
    ),
    "mhc_post": Case(
        _exit,
        ehc.mhc_post,
        formulas.post,
        lambda t, d: ((4 * STREAMS + 2) * d + 4 * STREAMS * (STREAMS + 1)) * t,
        lambda t, d: ((6 * STREAMS + 4) * d + 8 * STREAMS * (STREAMS + 1)) * t,
    ),
    "sinkhorn_normalize": Case(
        lambda t, d, device: {"logits": torch.randn(MAPS * t, STREAMS, STREAMS, device=device)},
        lambda logits: ehc.sinkhorn_normalize(logits, REPEAT, EPS),
        formulas.sinkhorn,
        lambda t, d: 8 * STREAMS**2 * MAPS * t,
        lambda t, d: 12 * STREAMS**2 * MAPS * t,
    ),
    "mhc_pre_norm_fn": Case(
        lambda t, d, device: {"residual": _streams(t, d, device), "fn": _mapping(d, device)["fn"]},
        lambda residual, fn: ehc.mhc_pre_norm_fn(residual, fn, rms_eps=EPS),
        formulas.norm_fn,
        lambda t, d: (2 * STREAMS * d + 4 * MIXES) * t,
        lambda t, d: (4 * STREAMS * d + 4 * MIXES) * t,
    ),
    "mhc_pre": Case(
        lambda t, d, device: {"residual": _streams(t, d, device), **_mapping(d, device)},
        _pre,
        formulas.pre,
        lambda t, d: ((2 * STREAMS + 2) * d + 4 * STREAMS * (STREAMS + 1)) * t,
        lambda t, d: ((4 * STREAMS + 2) * d + 8 * STREAMS * (STREAMS + 1)) * t,
    ),
    "mhc_fused_post_pre": Case(
        lambda t, d, device: {**_exit(t, d, device), **_mapping(d, device)},
        _seam,
        formulas.seam,
        lambda t, d: ((4 * STREAMS + 4) * d + 8 * STREAMS * (STREAMS + 1)) * t,
        lambda t, d: ((6 * STREAMS + 6) * d + 16 * STREAMS * (STREAMS + 1)) * t,
    ),
    "mhc_multilayer_recompute": Case(
        _block,
        _recompute,
        formulas.recompute,
        lambda t, d: (
            (2 * STREAMS * d + LAYERS * ((4 + 2 * STREAMS) * d + 4 * STREAMS * (STREAMS + 2)))
            * max(1, t // 4)
        ),
        None,
    ),
    "engram_gate": Case(
        _gate,
        lambda x, k, v, wh, we: ehc.engram_gate(x, (k, v), wh, we, eps=EPS, clamp=CLAMP),
        formulas.gate,
        lambda t, d: (6 * STREAMS + 2) * d * t,
        lambda t, d: (10 * STREAMS + 4) * d * t,
    ),
    "engram_short_conv": Case(
        lambda t, d, device: {
            "v": _streams(t, d, device),
            "weight": torch.randn(STREAMS, d, KERNEL, device=device) / KERNEL,
            "norm_weight": 1 + 0.1 * torch.randn(STREAMS, d, device=device),
        },
        lambda v, weight, norm: ehc.engram_short_conv(v, weight, norm, eps=EPS, dilation=DILATION),
        formulas.short_conv,
        lambda t, d: 4 * STREAMS * d * t,
        lambda t, d: 6 * STREAMS * d * t,
    ),
    "engram_gather": Case(
        lambda t, d, device: {
            "table": torch.randn(ROWS, HEAD_DIM, device=device).bfloat16(),
            "idx": torch.randint(0, ROWS, (t, COLUMNS), device=device),
        },
        ehc.engram_gather,
        formulas.gather,
        lambda t, d: (4 * HEAD_DIM + 8) * COLUMNS * t,
        None,
    ),
}
