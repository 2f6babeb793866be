"""mHC: whole entries of sublayers, the seams between them, and the head.

A forward with `save=True` also returns the `MixState` that its backward takes as `saved`; without it
the backward makes that again, with the same bits. Upstream gradients may be None, which counts as
zeros. Gradients of parameters given as `g_*` are added to with beta 1 and written with beta 0.

Arguments of all: `residual A[..., n, d]`, `fn F32[N, n*d]` with rows ordered pre, post, comb row-major,
`scale F32[3]`, `base F32[N]`, N = n*n + 2n; `norm_weight F32[n*d]` is merged into fn;
`layer_norm_weight [d]` with `layer_norm_eps` is the RMS norm of the rounded layer input behind it.
Constants are keywords or come from `preset`: rms_eps, post_mult, pre_eps, sinkhorn_eps, repeat,
convention ("deepseek"), rms ("mean"). `n_splits` is accepted and changes no bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._arrays import framework_of
from ..errors import ArgumentError
from ._arguments import Array, MhcMix, MixState, activation, coefficient, mix_rules, operator, targets

if TYPE_CHECKING:
    from typing import Unpack

    from ._arguments import MixConstants

__all__ = [
    "MhcMix", "MixGradients", "MixState", "mhc_fused_post_pre_bwd", "mhc_fused_post_pre_delayed_bwd",
    "mhc_fused_post_pre_delayed_fwd", "mhc_fused_post_pre_fwd", "mhc_head", "mhc_head_bwd", "mhc_pre",
    "mhc_pre_broadcast_bwd", "mhc_pre_broadcast_fwd", "mhc_pre_bwd", "mhc_pre_delayed",
]  # fmt: skip


class MixGradients(NamedTuple):
    """Of the parameters of a sublayer's entry; None for those that it does not have."""

    fn: Array
    scale: Array
    base: Array
    norm_weight: Array | None
    layer_norm_weight: Array | None


_RULES = {"norm_eps": "rms_eps", "new_residual": "residual", "next_post": "post", "next_comb": "comb", "next_pre": "pre",
          "grad_new_residual": "g_residual"}  # fmt: skip
_GRADIENTS = {
    **_RULES,
    **{
        f"grad_{name}{end}": f"g_{name}"
        for name in ("residual", "layer_input", "post", "comb", "pre", "hidden", "fn", "scale", "base",
                     "norm_weight", "layer_norm_weight", "layer_output")
        for end in ("", "_acc")
    },
    **{f"grad_next_{name}": f"g_{name}" for name in ("pre", "post", "comb")},
}  # fmt: skip
_HEAD = {**_GRADIENTS, "hidden": "out", "grad_hidden": "go"}
_BROADCAST = {**_GRADIENTS, "hidden": "x", "grad_hidden": "gx"}
_DELAYED = {**_RULES, "pre": "pre_mix"}


def mhc_pre(residual: Array, fn: Array, scale: Array, base: Array, *, norm_weight: Array | None = None,
            layer_norm_weight: Array | None = None, layer_norm_eps: float | None = None, precision: str = "fp32",
            n_splits: int | None = None, save: bool = False, out: tuple | None = None, stream: int | None = None,
            workspace: Array | None = None, **constants: Unpack[MixConstants]) -> tuple:
    """Entry of a sublayer: `layer_input A[..., d], MhcMix(post, comb)` of the streams (2.13), and with
    `save` also the MixState. `out` is (layer_input, post, comb)."""
    title = "mhc_pre"
    rules = mix_rules(title, constants)
    made = operator("mhc.pre_fwd")(
        title, (residual, fn, scale, base, norm_weight, layer_norm_weight),
        (*rules, precision, layer_norm_eps, save), (*(out or (None,) * 3), *(None,) * 5), stream, workspace, _RULES,
    )  # fmt: skip
    layer_input, post, comb, *saved = made
    mix = MhcMix(post, comb)
    return (layer_input, mix, MixState(*saved, comb)) if save else (layer_input, mix)


def mhc_pre_bwd(g_layer_input: Array | None, g_post: Array | None, g_comb: Array | None, residual: Array, fn: Array,
                scale: Array, base: Array, *, norm_weight: Array | None = None, layer_norm_weight: Array | None = None,
                layer_norm_eps: float | None = None, saved: MixState | None = None, precision: str = "fp32",
                rounding: str = "once", n_splits: int | None = None, g_residual: Array | None = None,
                g_fn: Array | None = None, g_scale: Array | None = None, g_base: Array | None = None,
                g_norm_weight: Array | None = None, g_layer_norm_weight: Array | None = None, beta: int = 1,
                stream: int | None = None, workspace: Array | None = None,
                **constants: Unpack[MixConstants]) -> tuple[Array, MixGradients]:
    """`g_residual A[..., n, d], MixGradients` of `mhc_pre`. `rounding` "chain" rounds where the single
    operators do, "once" only at the end."""
    title = "mhc_pre_bwd"
    rules = mix_rules(title, constants)
    acc, out = targets(title, beta, g_residual, g_fn, g_scale, g_base, g_norm_weight, g_layer_norm_weight)
    g_residual, *gradients = operator("mhc.pre_bwd")(
        title,
        (g_layer_input, coefficient(g_post, residual), g_comb, residual, fn, scale, base, norm_weight,
         layer_norm_weight, *acc, *(saved or (None,) * 6)),
        (*rules, precision, layer_norm_eps, rounding), out, stream, workspace, _GRADIENTS,
    )  # fmt: skip
    return g_residual, MixGradients(*gradients)


def mhc_head(residual: Array, fn: Array, scale: Array, base: Array, *, norm_weight: Array | None = None,
             precision: str = "fp32", n_splits: int | None = None, out: Array | None = None,
             stream: int | None = None, workspace: Array | None = None, **constants: Unpack[MixConstants]) -> Array:
    """Streams collapsed for the head of a model to `A[..., d]` by mixes of their own (2.13):
    `fn F32[n, n*d], scale F32[1], base F32[n]`; of the constants rms_eps, pre_eps and rms."""
    title = "mhc_head"
    rms_eps, rms, pre_eps = mix_rules(title, constants, ("rms_eps", "rms", "pre_eps"))
    return operator("mhc.head_fwd")(
        title, (residual, fn, scale, base, norm_weight), (rms_eps, rms, pre_eps, precision), (out,), stream, workspace,
        _HEAD,
    )[0]  # fmt: skip


def mhc_head_bwd(go: Array, residual: Array, fn: Array, scale: Array, base: Array, *, norm_weight: Array | None = None,
                 precision: str = "fp32", rounding: str = "once", n_splits: int | None = None,
                 g_fn: Array | None = None, g_scale: Array | None = None, g_base: Array | None = None,
                 g_norm_weight: Array | None = None, beta: int = 1, out: Array | None = None,
                 stream: int | None = None, workspace: Array | None = None,
                 **constants: Unpack[MixConstants]) -> tuple[Array, MixGradients]:
    """`g_residual A[..., n, d], MixGradients` of `mhc_head`."""
    title = "mhc_head_bwd"
    rms_eps, rms, pre_eps = mix_rules(title, constants, ("rms_eps", "rms", "pre_eps"))
    acc, written = targets(title, beta, g_fn, g_scale, g_base, g_norm_weight)
    g_residual, *gradients = operator("mhc.head_bwd")(
        title, (go, residual, fn, scale, base, norm_weight, *acc), (rms_eps, rms, pre_eps, precision, rounding),
        (out, *written), stream, workspace, _HEAD,
    )  # fmt: skip
    return g_residual, MixGradients(*gradients, None)


def mhc_fused_post_pre_fwd(layer_output: Array, residual: Array, post: Array, comb: Array, fn: Array, scale: Array,
                           base: Array, *, norm_weight: Array | None = None, layer_norm_weight: Array | None = None,
                           layer_norm_eps: float | None = None, precision: str = "fp32", n_splits: int | None = None,
                           save: bool = False, out: tuple | None = None, stream: int | None = None,
                           workspace: Array | None = None, **constants: Unpack[MixConstants]) -> tuple:
    """`mhc_post_fwd` of the sublayer that ends and `mhc_pre` of the next one (models 1.1), with their bits:
    `residual A[..., n, d], MhcMix(post, comb), layer_input A[..., d]`, and with `save` also the
    MixState. `out` is (residual, post, comb, layer_input)."""
    title = "mhc_fused_post_pre_fwd"
    rules = mix_rules(title, constants)
    to_residual, to_post, to_comb, to_input = out or (None,) * 4
    made = operator("mhc.seam_classic_fwd")(
        title,
        (activation(layer_output, residual), residual, coefficient(post, residual), comb, fn, scale, base, norm_weight,
         layer_norm_weight),
        (*rules, precision, layer_norm_eps, save), (to_residual, to_input, to_post, to_comb, *(None,) * 5),
        stream, workspace, _RULES,
    )  # fmt: skip
    new_residual, layer_input, next_post, next_comb, *saved = made
    mix = MhcMix(next_post, next_comb)
    if save:
        return new_residual, mix, layer_input, MixState(*saved, next_comb)
    return new_residual, mix, layer_input


def mhc_fused_post_pre_bwd(g_residual: Array | None, g_post: Array | None, g_comb: Array | None,
                           g_layer_input: Array | None, layer_output: Array, residual: Array, post: Array, comb: Array,
                           fn: Array, scale: Array, base: Array, *, norm_weight: Array | None = None,
                           layer_norm_weight: Array | None = None, layer_norm_eps: float | None = None,
                           new_residual: Array | None = None, saved: MixState | None = None, precision: str = "fp32",
                           rounding: str = "once", n_splits: int | None = None, g_fn: Array | None = None,
                           g_scale: Array | None = None, g_base: Array | None = None,
                           g_norm_weight: Array | None = None, g_layer_norm_weight: Array | None = None, beta: int = 1,
                           out: tuple | None = None, stream: int | None = None, workspace: Array | None = None,
                           **constants: Unpack[MixConstants]) -> tuple:
    """`g_layer_output, g_residual, g_post, g_comb, MixGradients` of `mhc_fused_post_pre_fwd`, from the
    gradients of what it returned. `new_residual` and `saved` are what it made, both or neither."""
    title = "mhc_fused_post_pre_bwd"
    rules = mix_rules(title, constants)
    acc, written = targets(title, beta, g_fn, g_scale, g_base, g_norm_weight, g_layer_norm_weight)
    made = operator("mhc.seam_classic_bwd")(
        title,
        (g_residual, g_layer_input, coefficient(g_post, residual), g_comb, activation(layer_output, residual), residual,
         coefficient(post, residual), comb, fn, scale, base, norm_weight, layer_norm_weight, *acc, new_residual,
         *(saved or (None,) * 6)),
        (*rules, precision, layer_norm_eps, rounding), (*(out or (None,) * 4), *written), stream, workspace, _GRADIENTS,
    )  # fmt: skip
    return activation(made[0], layer_output), *made[1:4], MixGradients(*made[4:])


def mhc_fused_post_pre_delayed_fwd(layer_output: Array, residual: Array, post: Array, comb: Array, fn: Array,
                                   scale: Array, base: Array, *, pre_mix: Array, return_mean: bool = False,
                                   norm_weight: Array | None = None, layer_norm_weight: Array | None = None,
                                   layer_norm_eps: float | None = None, precision: str = "fp32",
                                   n_splits: int | None = None, save: bool = False, out: tuple | None = None,
                                   stream: int | None = None, workspace: Array | None = None,
                                   **constants: Unpack[MixConstants]) -> tuple:
    """As `mhc_fused_post_pre_fwd`, but collapsed with `pre_mix F32[..., n]`, made one sublayer earlier
    (models 1.2): `residual, layer_input, MhcMix(post, comb), pre[, mean][, MixState]`. `pre` is for the seam after
    this one, `mean A[..., d]` that of the new streams. `out` is (residual, layer_input, pre, post, comb)."""
    title = "mhc_fused_post_pre_delayed_fwd"
    rules = mix_rules(title, constants)
    made = operator("mhc.seam_single_pass_fwd")(
        title,
        (activation(layer_output, residual), residual, coefficient(pre_mix, residual), coefficient(post, residual),
         comb, fn, scale, base, norm_weight, layer_norm_weight),
        (*rules, precision, layer_norm_eps, save), (*(out or (None,) * 5), *(None,) * 4), stream, workspace, _DELAYED,
    )  # fmt: skip
    new_residual, layer_input, pre, next_post, next_comb, *saved = made
    results = [new_residual, layer_input, MhcMix(next_post, next_comb), pre]
    if return_mean:
        results.append(_mean(new_residual, stream))
    if save:
        results.append(MixState(pre, *saved, next_comb))
    return tuple(results)


def _mean(residual: Array, stream: int | None) -> Array:
    framework, n = framework_of(residual), residual.shape[-2]
    equal = framework.make("ones", (n,), dtype="F32", like=residual) / n
    pre = framework.broadcast(equal, tuple(residual.shape[:-1]))
    return operator("mhc.pre_apply_fwd")("mhc_mean", (residual, pre), (), None, stream)[0]


def mhc_fused_post_pre_delayed_bwd(g_residual: Array | None, g_layer_input: Array | None, g_post: Array | None,
                                   g_comb: Array | None, g_pre: Array | None, layer_output: Array, residual: Array,
                                   post: Array, comb: Array, fn: Array, scale: Array, base: Array, *, pre_mix: Array,
                                   norm_weight: Array | None = None, layer_norm_weight: Array | None = None,
                                   layer_norm_eps: float | None = None, new_residual: Array | None = None,
                                   saved: MixState | None = None, precision: str = "fp32", rounding: str = "once",
                                   n_splits: int | None = None, g_fn: Array | None = None,
                                   g_scale: Array | None = None, g_base: Array | None = None,
                                   g_norm_weight: Array | None = None, g_layer_norm_weight: Array | None = None,
                                   beta: int = 1, out: tuple | None = None, stream: int | None = None,
                                   workspace: Array | None = None, **constants: Unpack[MixConstants]) -> tuple:
    """`g_layer_output, g_residual, g_pre_mix, g_post, g_comb, MixGradients` of
    `mhc_fused_post_pre_delayed_fwd`."""
    title = "mhc_fused_post_pre_delayed_bwd"
    rules = mix_rules(title, constants)
    acc, written = targets(title, beta, g_fn, g_scale, g_base, g_norm_weight, g_layer_norm_weight)
    made = operator("mhc.seam_single_pass_bwd")(
        title,
        (g_residual, g_layer_input, coefficient(g_pre, residual), coefficient(g_post, residual), g_comb,
         activation(layer_output, residual), residual, coefficient(pre_mix, residual), coefficient(post, residual),
         comb, fn, scale, base, norm_weight, layer_norm_weight, *acc, new_residual, *(saved or (None,) * 6)),
        (*rules, precision, layer_norm_eps, rounding), (*(out or (None,) * 5), *written), stream, workspace,
        {**_GRADIENTS, "pre": "pre_mix", "grad_pre": "g_pre_mix"},
    )  # fmt: skip
    return activation(made[0], layer_output), *made[1:5], MixGradients(*made[5:])


def _spread(fn_sum: Array, n: int) -> Array:
    """A weight whose parts sum to `fn_sum [N, d]`: that one and zeros."""
    rows, d = fn_sum.shape
    fn = framework_of(fn_sum).make("zeros", (rows, n * d), dtype="F32", like=fn_sum)
    fn[:, :d] = fn_sum
    return fn


def _streams(base: Array) -> int:
    """n of N = n*n + 2n."""
    return int((base.shape[-1] + 1) ** 0.5) - 1


def mhc_pre_broadcast_fwd(x: Array, fn: Array | None, scale: Array, base: Array, *, fn_sum: Array | None = None,
                          form: str = "classic", norm_weight: Array | None = None,
                          layer_norm_weight: Array | None = None, layer_norm_eps: float | None = None,
                          precision: str = "fp32", n_splits: int | None = None, save: bool = False,
                          out: tuple | None = None, stream: int | None = None, workspace: Array | None = None,
                          **constants: Unpack[MixConstants]) -> tuple:
    """The first entry of a stack, whose streams all equal `x A[..., d]` (models 1.3):
    `residual A[..., n, d], MhcMix(post, comb), layer_input A[..., d][, MixState]`. `fn_sum F32[N, d]`, the sum
    of the parts of fn with its norm weight merged, may stand for `fn`. `form` "single_pass" collapses
    with stream 0 alone. `out` is (residual, post, comb, layer_input)."""
    title = "mhc_pre_broadcast_fwd"
    rules = mix_rules(title, constants)
    to_residual, to_post, to_comb, to_input = out or (None,) * 4
    residual, layer_input, pre, post, comb, *saved = _broadcast(
        title, x, fn, fn_sum, scale, base, norm_weight, layer_norm_weight,
        (*rules, precision, layer_norm_eps, form, save), (to_residual, to_input, None, to_post, to_comb, *(None,) * 4),
        stream, workspace,
    )  # fmt: skip
    if save:
        return residual, MhcMix(post, comb), layer_input, MixState(pre, *saved, comb)
    return residual, MhcMix(post, comb), layer_input


def _broadcast(title, x, fn, fn_sum, scale, base, norm_weight, layer_norm_weight, attributes, out, stream, workspace):
    if fn_sum is not None:
        if norm_weight is not None:
            raise ArgumentError(f"{title}: tensor 'norm_weight': expected None with fn_sum, got a weight; hint: merge it into fn_sum")
        fn = _spread(fn_sum, _streams(base))
    return operator("mhc.seam_broadcast_fwd")(
        title, (x, fn, scale, base, norm_weight, layer_norm_weight), attributes, out, stream, workspace, _BROADCAST
    )


def mhc_pre_broadcast_bwd(g_residual: Array | None, g_post: Array | None, g_comb: Array | None,
                          g_layer_input: Array | None, x: Array, fn: Array, scale: Array, base: Array, *,
                          g_pre: Array | None = None, form: str = "classic", norm_weight: Array | None = None,
                          layer_norm_weight: Array | None = None, layer_norm_eps: float | None = None,
                          saved: MixState | None = None, precision: str = "fp32", n_splits: int | None = None,
                          g_fn: Array | None = None, g_scale: Array | None = None, g_base: Array | None = None,
                          g_norm_weight: Array | None = None, g_layer_norm_weight: Array | None = None, beta: int = 1,
                          out: Array | None = None, stream: int | None = None, workspace: Array | None = None,
                          **constants: Unpack[MixConstants]) -> tuple[Array, MixGradients]:
    """`gx A[..., d], MixGradients` of `mhc_pre_broadcast_fwd`; `g_pre` is that of the saved pre mix."""
    title = "mhc_pre_broadcast_bwd"
    rules = mix_rules(title, constants)
    acc, written = targets(title, beta, g_fn, g_scale, g_base, g_norm_weight, g_layer_norm_weight)
    gx, *gradients = operator("mhc.seam_broadcast_bwd")(
        title,
        (g_residual, g_layer_input, g_pre, g_post, g_comb, x, fn, scale, base, norm_weight, layer_norm_weight, *acc,
         *(saved or (None,) * 6)),
        (*rules, precision, layer_norm_eps, form), (out, *written), stream, workspace, _BROADCAST,
    )  # fmt: skip
    return gx, MixGradients(*gradients)


def mhc_pre_delayed(residual: Array, fn: Array, scale: Array, base: Array, *, pre_mix: Array | None = None,
                    x: Array | None = None, norm_weight: Array | None = None, layer_norm_weight: Array | None = None,
                    layer_norm_eps: float | None = None, precision: str = "fp32", n_splits: int | None = None,
                    stream: int | None = None, workspace: Array | None = None,
                    **constants: Unpack[MixConstants]) -> tuple:
    """`layer_input A[..., d], MhcMix(post, comb), pre F32[..., n]`: mixes from the streams, which are collapsed
    with `pre_mix F32[..., n]`, made one sublayer earlier; None is stream 0 (models 1.2). With
    `x A[..., d]`, which all streams equal, `fn` is the sum of its parts, `F32[N, d]`."""
    title = "mhc_pre_delayed"
    rules = mix_rules(title, constants)
    if x is not None:
        if pre_mix is not None:
            raise ArgumentError(f"{title}: tensor 'pre_mix': expected None with x, got a mix; hint: all streams equal x")
        _, layer_input, pre, post, comb, *_ = _broadcast(
            title, x, None, fn, scale, base, norm_weight, layer_norm_weight,
            (*rules, precision, layer_norm_eps, "single_pass"), None, stream, workspace,
        )  # fmt: skip
        return layer_input, MhcMix(post, comb), pre
    # The seam behind a sublayer that leaves the streams as they are.
    framework, shape = framework_of(residual), tuple(residual.shape)
    n = shape[-2]
    identity = framework.make("eye", n, dtype="F32", like=residual)
    nothing = framework.make("zeros", max(n, shape[-1]), dtype="F32", like=residual)
    made = operator("mhc.seam_single_pass_fwd")(
        title,
        (framework.broadcast(activation(nothing[: shape[-1]], residual), (*shape[:-2], shape[-1])), residual,
         framework.broadcast(identity[0], shape[:-1]) if pre_mix is None else coefficient(pre_mix, residual),
         framework.broadcast(nothing[:n], shape[:-1]), framework.broadcast(identity, (*shape[:-1], n)),
         fn, scale, base, norm_weight, layer_norm_weight),
        (*rules, precision, layer_norm_eps), None, stream, workspace, _DELAYED,
    )  # fmt: skip
    return made[1], MhcMix(made[3], made[4]), made[2]
