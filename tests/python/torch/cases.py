"""Every function of engramhc.torch with small arguments, for tests that ask the same of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import engramhc.torch as ehc
import torch
from engramhc import presets

MIX = {
    "rms_eps": 1e-5,
    "pre_eps": 1e-3,
    "post_mult": 2.0,
    "repeat": 3,
    "sinkhorn_eps": 1e-3,
}
NORM = {"layer_norm_eps": 1e-5}


@dataclass(frozen=True)
class Sizes:
    lead: tuple[int, ...] = (3,)
    n: int = 2
    d: int = 5

    @property
    def mixes(self):
        return self.n * self.n + 2 * self.n


@dataclass(frozen=True)
class Case:
    """`function` takes the tensors by name. Shapes: of them, with T for the leading dimensions."""

    function: Callable
    shapes: Callable[[Sizes], dict[str, tuple]]
    integers: Callable[[Sizes], dict[str, torch.Tensor]] = lambda s: {}
    ops: tuple[str, ...] = ()

    def tensors(self, dtype=torch.float32, sizes=Sizes(), seed=0, coefficients=None, device="cpu"):
        """Tensors by name: activations of `dtype`, all else fp32 (fp64 with fp64)."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        made = {}
        for name, shape in self.shapes(sizes).items():
            kind, shape = shape[0], [x for part in shape[1:] for x in (part if isinstance(part, tuple) else (part,))]
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            if kind == "weight":
                values = 1 + 0.3 * values
            if kind == "square":
                values = values**2
            made[name] = values.to(dtype if kind == "act" else wide).to(device)
        made.update({name: tensor.to(device) for name, tensor in self.integers(sizes).items()})
        return made


def act(*shape):
    return ("act", *shape)


def fp32(*shape):
    return ("fp32", *shape)


def weight(*shape):
    return ("weight", *shape)


def mix_parameters(s, norm=True, layer_norm=True):
    k = s.n * s.d
    found = {"fn": fp32(s.mixes, k), "scale": fp32(3), "base": fp32(s.mixes)}
    if norm:
        found["norm_weight"] = weight(k)
    if layer_norm:
        found["layer_norm_weight"] = weight(s.d)
    return found


def streams(s):
    return {
        "layer_output": act(s.lead, s.d),
        "residual": act(s.lead, s.n, s.d),
        "post": fp32(s.lead, s.n),
        "comb": fp32(s.lead, s.n, s.n),
    }


def gate_shapes(s):
    return {
        "x": act(s.lead, s.n, s.d),
        "kv": act(s.lead, s.n + 1, s.d),
        "weight_hidden": weight(s.n, s.d),
        "weight_embed": weight(s.n, s.d),
    }


def conv_shapes(s, w=3):
    return {"weight": fp32(s.n, s.d, w), "norm_weight": weight(s.n, s.d)}


def mask(s):
    count = 1
    for size in s.lead:
        count *= size
    return {"image_token_mask": (torch.arange(count) % 3 == 1).reshape(s.lead)}


def indices(s):
    generator = torch.Generator().manual_seed(7)
    idx = torch.randint(-1, 6, (*s.lead, 3), generator=generator, dtype=torch.int32)
    return {"idx": idx}


def recompute(x0, pre0, pre1, layer_output, post, comb):
    inputs, residuals = ehc.mhc_multilayer_recompute(x0, [pre0, pre1], [layer_output], [post], [comb])
    return (*inputs, *residuals)


GATE = {"eps": 1e-5, "clamp": 1e-6}

CASES = {
    "expand_to_mhc": Case(
        lambda x: ehc.expand_to_mhc(x, 3), lambda s: {"x": act(s.lead, s.d)}, ops=("expand_to_mhc",)
    ),
    "mhc_prenorm_gemm": Case(
        ehc.mhc_prenorm_gemm,
        lambda s: {
            "x": act(s.lead, s.n * s.d),
            "fn": fp32(7, s.n * s.d),
            "norm_weight": weight(s.n * s.d),
        },
        ops=("mhc_prenorm_gemm",),
    ),
    "mhc_prenorm_gemm, splits": Case(
        lambda **t: ehc.mhc_prenorm_gemm(**t, n_splits=3),
        lambda s: {"x": act(s.lead, s.n * s.d), "fn": fp32(7, s.n * s.d)},
    ),
    "mhc_reduce_partials_and_rmsnorm": Case(
        lambda mul, sqrsum: ehc.mhc_reduce_partials_and_rmsnorm(mul, sqrsum, k=10, eps=1e-5),
        lambda s: {"mul": fp32(4, s.lead, 6), "sqrsum": ("square", 4, s.lead)},
        ops=("mhc_reduce_partials_and_rmsnorm",),
    ),
    "mhc_pre_norm_fn": Case(
        lambda **t: ehc.mhc_pre_norm_fn(**t, rms_eps=1e-5),
        lambda s: {
            "residual": act(s.lead, s.n, s.d),
            "fn": fp32(7, s.n * s.d),
            "norm_weight": weight(s.n * s.d),
        },
        ops=("mhc_pre_norm_fn",),
    ),
    "mhc_pre_norm_fn, norm": Case(
        lambda **t: ehc.mhc_pre_norm_fn(**t, rms_eps=1e-5, rms="norm"),
        lambda s: {"residual": act(s.lead, s.n, s.d), "fn": fp32(7, s.n * s.d)},
    ),
    "mhc_pre_split_mixes": Case(
        lambda mixes, scale, base: ehc.mhc_pre_split_mixes(
            mixes, scale, base, int((base.numel() + 1) ** 0.5) - 1, post_mult=2.0, pre_eps=1e-3
        ),
        lambda s: {"mixes": fp32(s.lead, s.mixes), "scale": fp32(3), "base": fp32(s.mixes)},
        ops=("mhc_pre_split_mixes",),
    ),
    "sinkhorn_normalize": Case(
        lambda logits: ehc.sinkhorn_normalize(logits, 4, 1e-3),
        lambda s: {"logits": fp32(s.lead, s.n, s.n)},
        ops=("sinkhorn_normalize",),
    ),
    "sinkhorn_normalize, log": Case(
        lambda logits: ehc.sinkhorn_normalize(logits, 4, 0.0, convention="log"),
        lambda s: {"logits": fp32(s.lead, s.n, s.n)},
    ),
    "sinkhorn_normalize, megatron": Case(
        lambda logits: ehc.sinkhorn_normalize(logits, 4, 1e-6, convention="megatron"),
        lambda s: {"logits": fp32(s.lead, s.n, s.n)},
    ),
    "mhc_pre_apply_mix": Case(
        ehc.mhc_pre_apply_mix,
        lambda s: {"residual": act(s.lead, s.n, s.d), "pre": fp32(s.lead, s.n)},
        ops=("mhc_pre_apply_mix",),
    ),
    "mhc_pre": Case(
        lambda **t: ehc.mhc_pre(**t, **MIX, **NORM),
        lambda s: {"residual": act(s.lead, s.n, s.d), **mix_parameters(s)},
        ops=("mhc_pre",),
    ),
    "mhc_pre, plain": Case(
        lambda **t: ehc.mhc_pre(**t, preset="paper"),
        lambda s: {"residual": act(s.lead, s.n, s.d), **mix_parameters(s, False, False)},
    ),
    "mhc_pre_big_fuse": Case(
        lambda **t: ehc.mhc_pre_big_fuse(**t, **MIX),
        lambda s: {
            "mul": fp32(4, s.lead, s.mixes),
            "sqrsum": ("square", 4, s.lead),
            "residual": act(s.lead, s.n, s.d),
            "scale": fp32(3),
            "base": fp32(s.mixes),
        },
        ops=("mhc_pre_big_fuse",),
    ),
    "mhc_post": Case(ehc.mhc_post, streams, ops=("mhc_post",)),
    "mhc_post, bias": Case(ehc.mhc_post, lambda s: {**streams(s), "bias": fp32(s.d)}),
    "mhc_post, identity": Case(
        lambda **t: ehc.mhc_post(**t, comb=None),
        lambda s: {k: v for k, v in streams(s).items() if k != "comb"},
    ),
    "mhc_fused_post_pre": Case(
        lambda **t: ehc.mhc_fused_post_pre(**t, **MIX, **NORM),
        lambda s: {**streams(s), **mix_parameters(s)},
        ops=("mhc_fused_post_pre",),
    ),
    "mhc_pre_broadcast": Case(
        lambda **t: ehc.mhc_pre_broadcast(**t, **MIX, **NORM),
        lambda s: {"x": act(s.lead, s.d), **mix_parameters(s)},
        ops=("mhc_pre_broadcast",),
    ),
    "mhc_pre_broadcast, fn_sum": Case(
        lambda **t: ehc.mhc_pre_broadcast(**t, **MIX, **NORM),
        lambda s: {
            "x": act(s.lead, s.d),
            **mix_parameters(s, norm=False),
            "fn_sum": fp32(s.mixes, s.d),
        },
    ),
    "mhc_pre_delayed": Case(
        lambda **t: ehc.mhc_pre_delayed(**t, **MIX, **NORM),
        lambda s: {
            "residual": act(s.lead, s.n, s.d),
            **mix_parameters(s),
            "pre_mix": fp32(s.lead, s.n),
        },
    ),
    "mhc_pre_delayed, first": Case(
        lambda **t: ehc.mhc_pre_delayed(**t, preset=presets.train, repeat=3),
        lambda s: {"residual": act(s.lead, s.n, s.d), **mix_parameters(s, layer_norm=False)},
    ),
    "mhc_pre_delayed, x": Case(
        lambda **t: ehc.mhc_pre_delayed(**t, residual=None, **MIX, **NORM),
        lambda s: {
            "x": act(s.lead, s.d),
            "fn": fp32(s.mixes, s.d),
            "scale": fp32(3),
            "base": fp32(s.mixes),
            "layer_norm_weight": weight(s.d),
        },
    ),
    "mhc_fused_post_pre_delayed": Case(
        lambda **t: ehc.mhc_fused_post_pre_delayed(**t, **MIX, **NORM, return_mean=True),
        lambda s: {**streams(s), **mix_parameters(s), "pre_mix": fp32(s.lead, s.n)},
        ops=("mhc_fused_post_pre_delayed",),
    ),
    "mhc_head_compute_mix": Case(
        lambda **t: ehc.mhc_head_compute_mix(**t, pre_eps=1e-3),
        lambda s: {"mixes": fp32(s.lead, s.n), "scale": fp32(1), "base": fp32(s.n)},
        ops=("mhc_head_compute_mix",),
    ),
    "mhc_head": Case(
        lambda **t: ehc.mhc_head(**t, rms_eps=1e-5, pre_eps=1e-3),
        lambda s: {
            "residual": act(s.lead, s.n, s.d),
            "fn": fp32(s.n, s.n * s.d),
            "scale": fp32(1),
            "base": fp32(s.n),
            "norm_weight": weight(s.n * s.d),
        },
        ops=("mhc_head",),
    ),
    "mhc_multilayer_recompute": Case(
        recompute,
        lambda s: {
            "x0": act(s.lead, s.n, s.d),
            "pre0": fp32(s.lead, s.n),
            "pre1": fp32(s.lead, s.n),
            "layer_output": act(s.lead, s.d),
            "post": fp32(s.lead, s.n),
            "comb": fp32(s.lead, s.n, s.n),
        },
    ),
    "engram_gather": Case(
        ehc.engram_gather, lambda s: {"table": act(6, s.d)}, indices, ops=("engram_gather",)
    ),
    "engram_gate": Case(
        lambda **t: ehc.engram_gate(**t, **GATE), gate_shapes, mask, ops=("engram_gate",)
    ),
    "engram_gate, pair": Case(
        lambda key, value, **t: ehc.engram_gate(kv=(key, value), **t, **GATE, mode="value"),
        lambda s: {
            **{k: v for k, v in gate_shapes(s).items() if k != "kv"},
            "key": act(s.lead, s.n, s.d),
            "value": act(s.lead, s.d),
        },
    ),
    "engram_short_conv": Case(
        lambda **t: ehc.engram_short_conv(**t, eps=1e-5, dilation=1),
        lambda s: {"v": act(s.lead, s.n, s.d), **conv_shapes(s)},
        ops=("engram_short_conv",),
    ),
    "engram_layer": Case(
        lambda weight, norm_weight, **t: ehc.engram_layer(
            **t,
            conv_weight=weight,
            conv_norm_weight=norm_weight,
            **GATE,
            conv_eps=1e-5,
            dilation=1,
        ),
        lambda s: {**gate_shapes(s), **conv_shapes(s)},
        mask,
        ops=("engram_layer",),
    ),
}


def run(case, tensors):
    """The outputs of a case as a flat list."""
    return flat(case.function(**tensors))


def flat(results):
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for result in results for tensor in flat(result)]


def requiring(tensors):
    """The same tensors as leaves that want a gradient where they can have one."""
    return {
        name: t.detach().clone().requires_grad_() if t.is_floating_point() else t
        for name, t in tensors.items()
    }


def loss(outputs, seed=1):
    """A number that every element of every floating output has a share of its own in."""
    generator = torch.Generator().manual_seed(seed)
    total = 0
    for output in outputs:
        if output.is_floating_point():
            factors = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            total = total + (output.double() * factors.to(output.device)).sum()
    return total


def gradients(case, tensors):
    """Outputs and gradients of a case by the name of the tensor."""
    tensors = requiring(tensors)
    outputs = run(case, tensors)
    loss(outputs).backward()
    return outputs, {n: t.grad for n, t in tensors.items() if t.is_floating_point()}
