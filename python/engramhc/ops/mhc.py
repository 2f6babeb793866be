"""mHC: the parts of a sublayer's entry and exit.

Streams are `[..., n, d]`, coefficients `pre` and `post` `F32[..., n]` (`[..., n, 1]` is taken too),
`comb` `F32[..., n, n]` as [input stream, output stream]. A is BF16, FP16 or FP32, one type per call.
Formulas and bit classes: docs/ops/mhc.md, whose section numbers stand behind the summaries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Sequence

from .._arrays import framework_of
from ..errors import ShapeError
from ._arguments import (
    Array, activation, call_merged, coefficient, lead_of, mix_rules, operator, targets,
)  # fmt: skip

if TYPE_CHECKING:
    from typing import Unpack

    from ._arguments import MixConstants

__all__ = [
    "MhcDefect", "MhcGain", "RecomputePlan", "expand_to_mhc_bwd", "expand_to_mhc_fwd", "mhc_defect",
    "mhc_fn_normw_merge_bwd", "mhc_fn_normw_merge_fwd", "mhc_gain", "mhc_head_compute_mix_bwd",
    "mhc_head_compute_mix_fwd", "mhc_multilayer_recompute", "mhc_post_bwd", "mhc_post_fwd",
    "mhc_pre_apply_mix_bwd", "mhc_pre_apply_mix_fwd", "mhc_pre_big_fuse_fwd",
    "mhc_pre_split_mixes_bwd", "mhc_pre_split_mixes_fwd", "mhc_prenorm_gemm_bwd",
    "mhc_prenorm_gemm_fwd", "mhc_recompute_plan", "mhc_reduce_partials_and_rmsnorm_bwd",
    "mhc_reduce_partials_and_rmsnorm_fwd", "sinkhorn_bwd", "sinkhorn_fwd",
]  # fmt: skip

_EXPAND = {"hidden": "x", "residual": "out", "grad_residual": "go", "grad_hidden": "out"}
_MERGE = {"grad_fn_merged": "g", "grad_fn": "g_fn", "grad_fn_acc": "g_fn", "fn_merged": "out",
          "grad_norm_weight": "g_norm_weight", "grad_norm_weight_acc": "g_norm_weight"}  # fmt: skip
_GEMM = {"residual": "x", "mul_partial": "out", "sqr_partial": "out", "splits": "n_splits",
         "grad_mul": "g_mul", "grad_sqr": "g_sqrsum", "grad_residual": "gx", "grad_residual_acc": "gx",
         "grad_fn": "g_fn", "grad_fn_acc": "g_fn"}  # fmt: skip
_REDUCE = {"mul_partial": "mul", "sqr_partial": "sqrsum", "sqr": "sqrsum", "norm_eps": "eps", "grad_mixes": "go"}
_SPLIT = {"comb_logits": "logits", "grad_pre": "g_pre", "grad_post": "g_post", "grad_comb_logits": "g_logits",
          "grad_scale": "g_scale", "grad_scale_acc": "g_scale", "grad_base": "g_base", "grad_base_acc": "g_base"}  # fmt: skip
_SINKHORN = {"comb_logits": "logits", "grad_comb": "go", "comb": "out", "grad_comb_logits": "out"}
_APPLY = {"grad_layer_input": "go", "grad_residual": "g_residual", "grad_residual_acc": "g_residual"}
_POST = {"new_residual": "out", "grad_new_residual": "go"}
_HEAD = {"grad_pre": "go", "pre": "out", "grad_scale": "g_scale", "grad_scale_acc": "g_scale",
         "grad_base": "g_base", "grad_base_acc": "g_base"}  # fmt: skip
_FUSE = {"mul_partial": "mul", "sqr_partial": "sqrsum", "norm_eps": "rms_eps"}


def expand_to_mhc_fwd(x: Array, n: int, *, out: Array | None = None, stream: int | None = None,
                      workspace: Array | None = None) -> Array:
    """One hidden state `A[..., d]` becomes n equal streams `A[..., n, d]` (2.1)."""
    return operator("mhc.expand_fwd")("expand_to_mhc_fwd", (x,), (n,), (out,), stream, workspace, _EXPAND)[0]


def expand_to_mhc_bwd(go: Array, *, out: Array | None = None, stream: int | None = None,
                      workspace: Array | None = None) -> Array:
    """Gradient of the expansion: the sum over streams, `A[..., n, d]` -> `A[..., d]` (2.1)."""
    return operator("mhc.expand_bwd")("expand_to_mhc_bwd", (go,), (), (out,), stream, workspace, _EXPAND)[0]


def mhc_fn_normw_merge_fwd(fn: Array, norm_weight: Array, *, out: Array | None = None,
                           stream: int | None = None, workspace: Array | None = None) -> Array:
    """`fn[M, K] * norm_weight[K]`, all F32 (2.2)."""
    return operator("mhc.merge_fwd")("mhc_fn_normw_merge_fwd", (fn, norm_weight), (), (out,), stream, workspace, _MERGE)[0]


def mhc_fn_normw_merge_bwd(fn: Array, norm_weight: Array, g: Array, *, g_fn: Array | None = None,
                           g_norm_weight: Array | None = None, beta: int = 1, stream: int | None = None,
                           workspace: Array | None = None) -> tuple[Array, Array]:
    """`g_fn[M, K], g_norm_weight[K]` from the gradient `g[M, K]` of the merged weight (2.2). With beta 1
    given gradients are added to, with 0 written."""
    title = "mhc_fn_normw_merge_bwd"
    acc, out = targets(title, beta, g_fn, g_norm_weight)
    return operator("mhc.merge_bwd")(title, (g, fn, norm_weight, *acc), (), out, stream, workspace, _MERGE)


def _one_stream(x: Array | None) -> Array | None:
    """`[..., K]` as `[..., 1, K]`."""
    return x[..., None, :] if hasattr(x, "shape") else x


def mhc_prenorm_gemm_fwd(x: Array, fn: Array, *, n_splits: int | None = None, precision: str = "fp32",
                         out: tuple | None = None, stream: int | None = None,
                         workspace: Array | None = None) -> tuple[Array, Array]:
    """Streams projected to mixes, before their norm (2.3): `mul F32[S, ..., M], sqrsum F32[S, ...]` of
    `x A[..., K]` and `fn F32[M, K]`. `n_splits` None lets the library choose S; then
    the sums that `mhc_reduce_partials_and_rmsnorm_fwd` makes have the same bits for any number of
    tokens."""
    return call_merged(
        "mhc.prenorm_gemm", "mhc_prenorm_gemm_fwd", (_one_stream(x), fn), (n_splits or 0, 1, precision), out,
        lead_of(x, 1), (0, None), (1, 1), stream, workspace, _GEMM,
    )  # fmt: skip


def mhc_prenorm_gemm_bwd(g_mul: Array, g_sqrsum: Array, x: Array, fn: Array, *, gx: Array | None = None,
                         g_fn: Array | None = None, beta: int = 1, precision: str = "fp32",
                         stream: int | None = None, workspace: Array | None = None) -> tuple[Array, Array]:
    """`gx` as x, `g_fn F32[M, K]` from gradients `F32[..., M], F32[...]` of the sums over all splits
    (2.5). With beta 1 given gradients are added to, with 0 written."""
    title = "mhc_prenorm_gemm_bwd"
    acc, out = targets(title, beta, _one_stream(gx), g_fn)
    g_streams, g_fn = call_merged(
        "mhc.norm_fn_bwd", title, (g_mul, g_sqrsum, _one_stream(x), fn, *acc), (precision,), out,
        lead_of(x, 1), (0, 0, 0, None, 0, None), (0, None), stream, workspace, _GEMM,
    )  # fmt: skip
    return (g_streams[..., 0, :] if gx is None else gx), g_fn


def mhc_reduce_partials_and_rmsnorm_fwd(mul: Array, sqrsum: Array, *, k: int, eps: float, rms: str = "mean",
                                        out: tuple | None = None, stream: int | None = None,
                                        workspace: Array | None = None) -> tuple[Array, Array, Array]:
    """Sums of a projection over K = k columns put together and normalised (2.4):
    `mixes F32[..., M], mul F32[..., M], sqrsum F32[...]` of `F32[S, ..., M], F32[S, ...]`."""
    return call_merged(
        "mhc.reduce_partials_fwd", "mhc_reduce_partials_and_rmsnorm_fwd", (mul, sqrsum), (k, eps, rms), out,
        lead_of(sqrsum, 0, 1), (1, 1), (0, 0, 0), stream, workspace, _REDUCE,
    )  # fmt: skip


def mhc_reduce_partials_and_rmsnorm_bwd(go: Array, mul: Array, sqrsum: Array, *, k: int, eps: float,
                                        rms: str = "mean", out: tuple | None = None, stream: int | None = None,
                                        workspace: Array | None = None) -> tuple[Array, Array]:
    """`g_mul F32[..., M], g_sqrsum F32[...]` from the gradient `F32[..., M]` of the mixes (2.4)."""
    return call_merged(
        "mhc.reduce_partials_bwd", "mhc_reduce_partials_and_rmsnorm_bwd", (go, mul, sqrsum), (k, eps, rms), out,
        lead_of(sqrsum, 0), (0, 0, 0), (0, 0), stream, workspace, _REDUCE,
    )  # fmt: skip


def mhc_pre_split_mixes_fwd(mixes: Array, scale: Array, base: Array, *, n: int, post_mult: float, pre_eps: float,
                            out: tuple | None = None, stream: int | None = None,
                            workspace: Array | None = None) -> tuple[Array, Array, Array]:
    """`pre F32[..., n], post F32[..., n], logits F32[..., n, n]` of `mixes F32[..., N]`, `scale F32[3]`
    and `base F32[N]`, N = n*n + 2n (2.6)."""
    title = "mhc_pre_split_mixes_fwd"
    if getattr(base, "shape", (n * n + 2 * n,))[-1:] != (n * n + 2 * n,):
        raise ShapeError(f"{title}: tensor 'base': expected F32[{n * n + 2 * n}] for n = {n}, got {tuple(base.shape)}")
    return operator("mhc.split_fwd")(title, (mixes, scale, base), (pre_eps, post_mult), out, stream, workspace, _SPLIT)


def mhc_pre_split_mixes_bwd(g_pre: Array, g_post: Array, g_logits: Array, mixes: Array, scale: Array, base: Array, *,
                            post_mult: float, g_scale: Array | None = None, g_base: Array | None = None,
                            beta: int = 1, out: Array | None = None, stream: int | None = None,
                            workspace: Array | None = None) -> tuple[Array, Array, Array]:
    """`g_mixes F32[..., N], g_scale F32[3], g_base F32[N]` (2.6). With beta 1 given gradients of
    parameters are added to, with 0 written."""
    title = "mhc_pre_split_mixes_bwd"
    inputs = coefficient(g_pre, g_logits), coefficient(g_post, g_logits), g_logits, mixes, scale, base
    acc, written = targets(title, beta, g_scale, g_base)
    g_mixes, *partials = operator("mhc.split_bwd")(
        title, inputs, (post_mult,), (out, None, None), stream, workspace, _SPLIT
    )
    sums = operator("mhc.split_bwd_reduce")(title, (*partials, *acc), (), written, stream, workspace, _SPLIT)
    return g_mixes, *sums


def sinkhorn_fwd(logits: Array, *, repeat: int, eps: float, convention: str = "deepseek",
                 out: Array | None = None, stream: int | None = None, workspace: Array | None = None) -> Array:
    """Logits `F32[..., n, n]` made doubly stochastic by `repeat` iterations (2.7). Conventions:
    "deepseek" (softmax, + eps, columns first), "megatron" (exp of shifted logits, rows first, clamp),
    "log" (in logarithms, no eps)."""
    return operator("mhc.sinkhorn_fwd")(
        "sinkhorn_fwd", (logits,), (repeat, eps, convention), (out,), stream, workspace, _SINKHORN
    )[0]


def sinkhorn_bwd(go: Array, logits: Array, *, repeat: int, eps: float, convention: str = "deepseek",
                 out: Array | None = None, stream: int | None = None, workspace: Array | None = None) -> Array:
    """Gradient of the logits, through all iterations (2.7)."""
    return operator("mhc.sinkhorn_bwd")(
        "sinkhorn_bwd", (go, logits), (repeat, eps, convention), (out,), stream, workspace, _SINKHORN
    )[0]


def mhc_pre_apply_mix_fwd(residual: Array, pre: Array, *, out: Array | None = None, stream: int | None = None,
                          workspace: Array | None = None) -> Array:
    """Streams `A[..., n, d]` collapsed by `pre F32[..., n]` to `A[..., d]`, rounded once (2.8)."""
    return operator("mhc.pre_apply_fwd")(
        "mhc_pre_apply_mix_fwd", (residual, coefficient(pre, residual)), (), (out,), stream, workspace,
        {"layer_input": "out"},
    )[0]  # fmt: skip


def mhc_pre_apply_mix_bwd(go: Array, residual: Array, pre: Array, *, g_residual: Array | None = None, beta: int = 1,
                          stream: int | None = None, workspace: Array | None = None) -> tuple[Array, Array]:
    """`g_residual A[..., n, d], g_pre F32[..., n]` (2.8). With beta 1 a given g_residual is added to,
    with 0 written."""
    title = "mhc_pre_apply_mix_bwd"
    (acc,), (out,) = targets(title, beta, g_residual)
    return operator("mhc.pre_apply_bwd")(
        title, (go, residual, coefficient(pre, residual), acc), (), (out, None), stream, workspace, _APPLY
    )


def mhc_pre_big_fuse_fwd(mul: Array, sqrsum: Array, residual: Array, scale: Array, base: Array, *,
                         layer_norm_weight: Array | None = None, layer_norm_eps: float | None = None,
                         out: tuple | None = None, stream: int | None = None, workspace: Array | None = None,
                         **constants: Unpack[MixConstants]) -> tuple[Array, Array, Array]:
    """From the sums of a projection to `post F32[..., n], comb F32[..., n, n], layer_input A[..., d]`
    (2.9). `mul F32[S, ..., N], sqrsum F32[S, ...]`; with `layer_norm_weight [d]` the RMS norm of the
    rounded row behind it. Constants as in `mhc_pre`."""
    title = "mhc_pre_big_fuse_fwd"
    rules = mix_rules(title, constants)
    post, comb, layer_input = out or (None, None, None)
    layer_input, post, comb = call_merged(
        "mhc.pre_big_fuse", title, (mul, sqrsum, scale, base, residual, layer_norm_weight),
        (rules[0], rules[1], rules[2], rules[3], rules[4], rules[5], rules[6], layer_norm_eps),
        (layer_input, post, comb), lead_of(residual, 2), (1, 1, None, None, 0, None), (0, 0, 0),
        stream, workspace, _FUSE,
    )  # fmt: skip
    return post, comb, layer_input


def _with_bias(layer_output: Array, bias: Array | None) -> Array:
    """Their sum, rounded once to the type of the layer's output."""
    if bias is None:
        return layer_output
    frameworks = framework_of(layer_output)
    total = frameworks.cast(layer_output, "F32") + framework_of(bias).cast(bias, "F32")
    return activation(total, layer_output)


def _identity(comb: Array | None, residual: Array) -> Array:
    if comb is not None:
        return comb
    framework, shape = framework_of(residual), tuple(residual.shape)
    n = shape[-2]
    return framework.broadcast(framework.make("eye", n, dtype="F32", like=residual), (*shape[:-1], n))


def mhc_post_fwd(layer_output: Array, residual: Array, post: Array, comb: Array | None, *, bias: Array | None = None,
                 inplace: bool = False, out: Array | None = None, stream: int | None = None,
                 workspace: Array | None = None) -> Array:
    """A layer's output put back into the streams (2.10):
    `out[..., o, :] = round(post[..., o] * layer_output + sum_i comb[..., i, o] * residual[..., i, :])`.

    `layer_output [..., d]` (of another activation type it is converted once), `residual A[..., n, d]`,
    `post F32[..., n]`, `comb F32[..., n, n]` (None: identity), `bias [d]` added to the layer's output
    and rounded first. `inplace` writes into `residual`."""
    if bias is not None:
        layer_output = _with_bias(layer_output, bias)
    if comb is None:
        comb = _identity(comb, residual)
    if inplace and out is None:
        out = residual
    return operator("mhc.post_fwd")(
        "mhc_post_fwd", (activation(layer_output, residual), residual, coefficient(post, residual), comb), (inplace,),
        None if out is None else (out,),
        stream, workspace, _POST,
    )[0]  # fmt: skip


def mhc_post_bwd(go: Array, layer_output: Array, residual: Array, post: Array, comb: Array | None, *,
                 bias: Array | None = None, out: tuple | None = None, stream: int | None = None,
                 workspace: Array | None = None) -> tuple:
    """`g_layer_output, g_residual, g_post F32[..., n], g_comb F32[..., n, n]` (2.10), and with `bias`
    also its gradient `F32[d]`. g_layer_output has the type of layer_output."""
    widened = activation(_with_bias(layer_output, bias), residual)
    g_layer_output, *others = operator("mhc.post_bwd")(
        "mhc_post_bwd", (go, widened, residual, coefficient(post, residual), _identity(comb, residual)), (), out,
        stream, workspace, _POST,
    )  # fmt: skip
    if bias is None:
        return activation(g_layer_output, layer_output), *others
    rows = framework_of(go).cast(g_layer_output, "F32").reshape((-1, g_layer_output.shape[-1]))
    return activation(g_layer_output, layer_output), *others, rows.sum(0)


def mhc_head_compute_mix_fwd(mixes: Array, scale: Array, base: Array, *, pre_eps: float, out: Array | None = None,
                             stream: int | None = None, workspace: Array | None = None) -> Array:
    """The mix `F32[..., n]` that collapses the streams for the head, of `mixes F32[..., n]`,
    `scale F32[1]`, `base F32[n]` (2.11)."""
    return operator("mhc.head_mix_fwd")(
        "mhc_head_compute_mix_fwd", (mixes, scale, base), (pre_eps,), (out,), stream, workspace, _HEAD
    )[0]


def mhc_head_compute_mix_bwd(go: Array, mixes: Array, scale: Array, base: Array, *, g_scale: Array | None = None,
                             g_base: Array | None = None, beta: int = 1, out: Array | None = None,
                             stream: int | None = None, workspace: Array | None = None) -> tuple[Array, Array, Array]:
    """`g_mixes F32[..., n], g_scale F32[1], g_base F32[n]` (2.11). With beta 1 given gradients of
    parameters are added to, with 0 written."""
    title = "mhc_head_compute_mix_bwd"
    acc, written = targets(title, beta, g_scale, g_base)
    return operator("mhc.head_mix_bwd")(
        title, (go, mixes, scale, base, *acc), (), (out, *written), stream, workspace, _HEAD
    )


def mhc_multilayer_recompute(x0: Array, pre: Sequence[Array], layer_output: Sequence[Array], post: Sequence[Array],
                             comb: Sequence[Array], layer_input: Sequence[Array] | None = None,
                             residual: Sequence[Array] | None = None, *, stream: int | None = None,
                             workspace: Array | None = None) -> tuple[list[Array], list[Array]]:
    """Layer inputs and residuals of a block of layers from its first residual `x0 A[..., n, d]` (2.12),
    bit for bit those of the single steps. `pre` has one array a layer, the other lists as many or
    one fewer. Given `layer_input` and `residual` are written."""
    title, op = "mhc_multilayer_recompute", operator("mhc.multilayer_recompute")
    inputs = (
        x0,
        tuple(coefficient(mix, x0) for mix in pre),
        tuple(activation(y, x0) for y in layer_output),
        tuple(coefficient(mix, x0) for mix in post),
        tuple(comb),
    )
    names = {"residual": "x0"}
    if layer_input is None or residual is None:
        empty = framework_of(x0).empty
        row, streams = op.infer(title, inputs, (), names)
        if layer_input is None:
            layer_input = [empty(*row, x0) for _ in pre]
        if residual is None:
            residual = [empty(*streams, x0) for _ in layer_output]
    op(title, inputs, (), (tuple(layer_input), tuple(residual)), stream, workspace, names)
    return list(layer_input), list(residual)


class RecomputePlan(NamedTuple):
    block_length: int
    terms: tuple[int, int]  # elements a token: kept residuals, and what a block's backward holds
    block_starts: list[int]


def mhc_recompute_plan(layers: int, n: int, *, d: int = 1, stages: Sequence[int] = ()) -> RecomputePlan:
    """How many layers to recompute at a time for the least memory (2.12). Blocks do not cross the
    `stages`, layers of each pipeline stage."""
    length, terms, starts = operator("mhc.plan_recompute")(
        "mhc_recompute_plan", (), (layers, n, d, tuple(stages) or None)
    )
    return RecomputePlan(int(length[0]), (int(terms[0]), int(terms[1])), starts.tolist())


class MhcGain(NamedTuple):
    forward: Array  # F32[L, ...], largest absolute column sum of each map
    backward: Array  # F32[L, ...], largest absolute row sum
    composite_forward: Array  # F32[...], of the product of all maps
    composite_backward: Array  # F32[...]


def mhc_gain(combs: Array | Sequence[Array], *, stream: int | None = None, workspace: Array | None = None) -> MhcGain:
    """How much mixing maps `F32[L, ..., n, n]` (or a list of L) enlarge a signal (2.15)."""
    if isinstance(combs, (list, tuple)):
        combs = framework_of(combs[0]).stack(combs)
    return MhcGain(*call_merged(
        "mhc.amax_gain", "mhc_gain", (combs,), (), None, lead_of(combs, 2, 1), (1,), (1, 1, 0, 0),
        stream, workspace, {"comb": "combs"},
    ))  # fmt: skip


class MhcDefect(NamedTuple):
    rows: Array  # F32[...], largest distance of a row sum from 1
    columns: Array  # F32[...]
    spectral_bound: Array  # F32[...], not exceeded by the largest singular value


def mhc_defect(comb: Array, *, stream: int | None = None, workspace: Array | None = None) -> MhcDefect:
    """How far mixing maps `F32[..., n, n]` are from doubly stochastic (2.15)."""
    return MhcDefect(*operator("mhc.defect")("mhc_defect", (comb,), (), None, stream, workspace))
