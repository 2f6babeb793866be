"""From streams to a layer's input: the whole entry of a sublayer (pre), and the head.

Forward: merge, project, norm, split, Sinkhorn, collapse, and the layer's RMSNorm where it has one.
Between these steps nothing is rounded but the collapsed row, to the activation type, before the
RMSNorm. A backward starts from what the forward saves or would have saved, which is F32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from .dtypes import Tensor, accumulated, encode, nearest, single
from .mhc_mixes import head_mix, head_mix_gradients, split, split_gradients
from .mhc_projection import (
    by_groups,
    flattened,
    merge_gradients,
    operand,
    projection_gradients,
    reciprocal_rms,
    reduce_gradients,
    reduced,
)
from .mhc_sinkhorn import sinkhorn, sinkhorn_gradient
from .mhc_streams import collapse_gradients, collapsed, norm_gradients, normalized

Arrays = dict[str, np.ndarray]
SAVED = ("pre", "mixes", "mul", "sqr", "comb_logits", "comb")


# --- projection ----------------------------------------------------------------------------------


def merged(fn: Tensor, norm_weight: Tensor | None) -> np.ndarray:
    """fn with its norm weight, as merge_fwd rounds it: fn [M, K], norm_weight [K] -> [M, K]."""
    return nearest(
        fn.decode() if norm_weight is None else fn.decode() * norm_weight.decode(), "F32"
    )


def project(x: np.ndarray, factors: np.ndarray, eps: float, rms: str) -> Arrays:
    """x [..., K], factors [M, K] -> mul, mixes [..., M], sqr [...]."""
    mul, sqr = x @ factors.T, np.sum(x**2, axis=-1)
    r = reciprocal_rms(sqr, x.shape[-1], eps, rms)
    return {"mul": mul, "sqr": sqr, "mixes": mul * r[..., None]}


def project_gradients(
    grad_mixes: np.ndarray, state: Arrays, x: np.ndarray, factors: np.ndarray, eps: float, rms: str
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of x [..., K] and factors [M, K], given that of the mixes [..., M]."""
    grouped = by_groups(state["mul"], state["sqr"], x.ndim - 1)
    of_mul, of_sqr = reduce_gradients(grad_mixes, *grouped, x.shape[-1], eps, rms)
    return projection_gradients(of_mul, of_sqr, x, factors)


def fn_gradients(grad_merged: np.ndarray, fn: Tensor, norm_weight: Tensor | None) -> Arrays:
    """Gradients of fn [M, K] and, where there is one, of its norm weight [K]."""
    if norm_weight is None:
        return {"grad_fn": grad_merged}
    of_fn, of_weight = merge_gradients(grad_merged, fn.decode(), norm_weight.decode())
    return {"grad_fn": of_fn, "grad_norm_weight": of_weight}


def with_targets(gradients: Arrays, targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of parameters as outputs, each added to its target of accumulation."""
    surplus = targets.keys() - {f"{name}_acc" for name in gradients}
    if surplus:
        raise ValueError(f"'{min(surplus)}': there is no gradient for it")
    return {
        name: accumulated(targets.get(f"{name}_acc"), gradient)
        for name, gradient in gradients.items()
    }


# --- sublayer ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What leads from mixes to pre, post and comb, and from the collapsed row to the layer."""

    scale: Tensor
    base: Tensor
    layer_norm_weight: Tensor | None = None
    layer_norm_eps: float | None = None
    norm_eps: float
    pre_eps: float
    post_mult: float
    repeat: int
    sinkhorn_eps: float
    convention: str = "deepseek"
    rms: str = "mean"

    @classmethod
    def taken_from(cls, call: dict):
        """Takes its own arguments out of those of a call."""
        names = [field.name for field in fields(cls) if field.name in call]
        return cls(**{name: call.pop(name) for name in names})

    @staticmethod
    def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
        """All rounding between steps, for who wants to follow it."""
        return nearest(array, dtype)

    def comb(self, logits: np.ndarray) -> np.ndarray:
        return sinkhorn(logits, self.repeat, single(self.sinkhorn_eps), self.convention)

    def comb_gradient(self, grad: np.ndarray, logits: np.ndarray) -> np.ndarray:
        eps = single(self.sinkhorn_eps)
        return sinkhorn_gradient(grad, logits, self.repeat, eps, self.convention)

    def coefficients(self, mixes: np.ndarray) -> Arrays:
        """mixes [..., N] -> pre, post [..., n], comb_logits, comb [..., n, n]."""
        pre, post, logits = split(
            mixes,
            self.scale.decode(),
            self.base.decode(),
            single(self.pre_eps),
            single(self.post_mult),
        )
        return {"pre": pre, "post": post, "comb_logits": logits, "comb": self.comb(logits)}

    def row(self, streams: np.ndarray, pre: np.ndarray, dtype: str) -> np.ndarray:
        """The collapsed row, rounded: streams [..., n, d], pre [..., n] -> [..., d]."""
        return self.rounded(collapsed(streams, pre), dtype)

    def layer_input(self, row: np.ndarray) -> np.ndarray:
        """row [..., d], already rounded."""
        if self.layer_norm_weight is None:
            return row
        return normalized(row, self.layer_norm_weight.decode(), single(self.layer_norm_eps))

    def layer_input_gradients(self, grad: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, Arrays]:
        """Gradients of the row and, where there is a weight, of it."""
        if self.layer_norm_weight is None:
            return grad, {}
        of_row, of_weight = norm_gradients(
            grad, row, self.layer_norm_weight.decode(), single(self.layer_norm_eps)
        )
        return of_row, {"grad_layer_norm_weight": of_weight}


@dataclass(frozen=True, kw_only=True)
class Sublayer(Mix):
    """A Mix with the projection before it."""

    fn: Tensor
    norm_weight: Tensor | None = None
    precision: str = "fp32"

    def factors(self) -> np.ndarray:
        """[N, K], as the product takes it."""
        return operand(merged(self.fn, self.norm_weight), self.precision)

    def forward(self, x: np.ndarray, factors: np.ndarray) -> Arrays:
        """x [..., K] -> all that SAVED names, and post."""
        state = project(x, factors, single(self.norm_eps), self.rms)
        return state | self.coefficients(state["mixes"])

    def state(self, saved: dict[str, Tensor], x: np.ndarray, factors: np.ndarray) -> Arrays:
        """What a forward saved; if it saved nothing, what it would have."""
        if saved:
            return {name: t.decode() for name, t in saved.items()}
        state = self.forward(x, factors)
        return {name: self.rounded(state[name], "F32") for name in SAVED}

    def product_gradients(
        self, grad_mixes: np.ndarray, state: Arrays, x: np.ndarray, factors: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of x [..., K] and of the factors [N, K]; `grad_mixes` is not rounded to TF32."""
        return project_gradients(grad_mixes, state, x, factors, single(self.norm_eps), self.rms)

    def backward(
        self, grads: Arrays, state: Arrays, x: np.ndarray, factors: np.ndarray
    ) -> tuple[np.ndarray, Arrays]:
        """grads: of pre, post and comb -> gradients of x [..., K] and, by name, of scale, base and
        the factors."""
        of_split = split_gradients(
            grads["pre"],
            grads["post"],
            self.comb_gradient(grads["comb"], state["comb_logits"]),
            state["mixes"],
            self.scale.decode(),
            self.base.decode(),
            single(self.post_mult),
        )
        of_x, of_factors = self.product_gradients(of_split.pop("grad_mixes"), state, x, factors)
        return of_x, of_split | {"of_factors": of_factors}

    def parameter_gradients(self, gradients: Arrays) -> Arrays:
        """Those of backward and of the layer norm, with `of_factors` (of the merged fn) replaced by
        grad_fn and grad_norm_weight."""
        others = {name: array for name, array in gradients.items() if name != "of_factors"}
        return fn_gradients(gradients["of_factors"], self.fn, self.norm_weight) | others


def taken_saved(call: dict, prefix: str = "") -> dict[str, Tensor]:
    """The saved tensors among the arguments of a call, taken out of it: all or none."""
    found = {name: call.pop(prefix + name, None) for name in SAVED}
    given = {name: t for name, t in found.items() if t is not None}
    if given and len(given) < len(SAVED):
        raise ValueError(f"'{prefix}mixes': expected all of the saved tensors or none")
    return given


def singles(arrays: Arrays, names, prefix: str = "") -> dict[str, Tensor]:
    """The named arrays as F32 outputs."""
    return {prefix + name: encode(arrays[name], "F32") for name in names}


def given(gradient: Tensor | None, shape: tuple[int, ...]) -> np.ndarray:
    """An upstream gradient; absent: zeros."""
    return np.zeros(shape) if gradient is None else gradient.decode()


def entry(
    sublayer: Sublayer, streams: np.ndarray, dtype: str, earlier_pre: np.ndarray | None = None
) -> tuple[np.ndarray, Arrays]:
    """The layer's input [..., d] and the mixes of streams [..., n, d]. The collapse goes with the
    sublayer's own mix, or with an earlier one that is given."""
    state = sublayer.forward(flattened(streams), sublayer.factors())
    row = sublayer.row(streams, state["pre"] if earlier_pre is None else earlier_pre, dtype)
    return sublayer.layer_input(row), state


def pre_fwd(residual: Tensor, *, save: bool = False, **call) -> dict[str, Tensor]:
    """Mixes of a token's streams, and their collapse with the mix `pre`.

    residual [..., n, d], the arguments of Sublayer
    -> layer_input [..., d], post [..., n], comb [..., n, n]; with save all of SAVED
    """
    layer_input, state = entry(Sublayer(**call), residual.decode(), residual.dtype)
    names = ("post", *SAVED) if save else ("post", "comb")
    return {"layer_input": encode(layer_input, residual.dtype)} | singles(state, names)


def entry_gradients(
    sublayer: Sublayer,
    streams: np.ndarray,
    dtype: str,
    state: Arrays,
    grads: Arrays,
    earlier_pre: np.ndarray | None = None,
    chain: bool = False,
) -> tuple[np.ndarray, np.ndarray, Arrays]:
    """Backward of entry, added to the gradient of the streams that is there already.

    `chain` rounds after every step, as separate operators do: the gradient of the collapsed row
    behind an RMSNorm, and the running gradient of the streams after the collapse and after the
    projection.

    streams [..., n, d], grads: of streams, layer_input, pre, post, comb
    -> gradient of the streams, of the mix of the collapse, and of the parameters by name
    """
    step = (lambda array: sublayer.rounded(array, dtype)) if chain else (lambda array: array)
    pre = state["pre"] if earlier_pre is None else earlier_pre
    row = sublayer.row(streams, pre, dtype)
    of_row, of_weight = sublayer.layer_input_gradients(grads["layer_input"], row)
    of_streams, of_pre = collapse_gradients(step(of_row) if of_weight else of_row, streams, pre)
    running = step(grads["streams"] + of_streams)

    own = grads if earlier_pre is not None else {**grads, "pre": grads["pre"] + of_pre}
    of_x, of_parameters = sublayer.backward(own, state, flattened(streams), sublayer.factors())
    running = step(running + of_x.reshape(streams.shape))
    return running, of_pre, sublayer.parameter_gradients(of_parameters | of_weight)


def pre_bwd(
    residual: Tensor,
    grad_layer_input: Tensor | None = None,
    grad_post: Tensor | None = None,
    grad_comb: Tensor | None = None,
    grad_residual_acc: Tensor | None = None,
    *,
    rounding: str = "once",
    **call,
) -> dict[str, Tensor]:
    """Backward of pre_fwd. rounding = "chain": see entry_gradients.

    residual, grad_residual_acc [..., n, d], grad_layer_input [..., d], grad_post [..., n],
    grad_comb [..., n, n], the arguments of Sublayer, targets of its gradients, SAVED
    -> grad_residual and gradients of the parameters
    """
    sublayer, saved = Sublayer.taken_from(call), taken_saved(call)
    streams, shape = residual.decode(), residual.shape
    state = sublayer.state(saved, flattened(streams), sublayer.factors())
    grads = {
        "streams": given(grad_residual_acc, shape),
        "layer_input": given(grad_layer_input, (*shape[:-2], shape[-1])),
        "pre": np.zeros(shape[:-1]),
        "post": given(grad_post, shape[:-1]),
        "comb": given(grad_comb, (*shape[:-1], shape[-2])),
    }
    of_streams, _, of_parameters = entry_gradients(
        sublayer, streams, residual.dtype, state, grads, chain=rounding == "chain"
    )
    return {
        "grad_residual": encode(of_streams, residual.dtype),
        **with_targets(of_parameters, call),
    }


def pre_big_fuse(
    mul_partial: Tensor, sqr_partial: Tensor, residual: Tensor, **call
) -> dict[str, Tensor]:
    """All of pre_fwd behind the product: reduce, split, Sinkhorn, collapse.

    mul_partial [S, T, N] or [S, T, G, N], sqr_partial [S, T] or [S, T, G], residual [T, n, d],
    the arguments of Mix -> layer_input [T, d], post [T, n], comb [T, n, n]
    """
    mix, streams = Mix(**call), residual.decode()
    width = streams.shape[-2] * streams.shape[-1]
    partials = mul_partial.decode(), sqr_partial.decode()
    mixes = reduced(*partials, width, single(mix.norm_eps), mix.rms)["mixes"]
    state = mix.coefficients(mixes)
    layer_input = mix.layer_input(mix.row(streams, state["pre"], residual.dtype))
    return {"layer_input": encode(layer_input, residual.dtype)} | singles(state, ("post", "comb"))


# --- head ----------------------------------------------------------------------------------------


def head_fwd(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None = None,
    *,
    norm_eps: float,
    pre_eps: float,
    rms: str = "mean",
    precision: str = "fp32",
) -> dict[str, Tensor]:
    """hidden = round(sum_i pre_i x_i) with pre the head's mix of the projection.

    residual [..., n, d], fn [n, K], scale [1], base [n], norm_weight [K] -> hidden [..., d]
    """
    streams = residual.decode()
    factors = operand(merged(fn, norm_weight), precision)
    mixes = project(flattened(streams), factors, single(norm_eps), rms)["mixes"]
    pre = head_mix(mixes, scale.decode(), base.decode(), single(pre_eps))
    return {"hidden": encode(collapsed(streams, pre), residual.dtype)}


def head_bwd(
    grad_hidden: Tensor,
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_weight: Tensor | None = None,
    *,
    norm_eps: float,
    pre_eps: float,
    rms: str = "mean",
    precision: str = "fp32",
    rounding: str = "once",
    **targets: Tensor,
) -> dict[str, Tensor]:
    """Backward of head_fwd. rounding = "chain" also rounds the gradient of the streams in between,
    after the collapse.

    grad_hidden [..., d], residual [..., n, d], fn [n, K], scale [1], base [n], norm_weight [K],
    targets of the parameters' gradients -> grad_residual and gradients of the parameters
    """
    streams = residual.decode()
    x, factors = flattened(streams), operand(merged(fn, norm_weight), precision)
    eps = single(norm_eps)
    state = {name: nearest(a, "F32") for name, a in project(x, factors, eps, rms).items()}
    weights = scale.decode(), base.decode()
    pre = nearest(head_mix(state["mixes"], *weights, single(pre_eps)), "F32")
    of_streams, of_pre = collapse_gradients(grad_hidden.decode(), streams, pre)
    if rounding == "chain":
        of_streams = nearest(of_streams, residual.dtype)
    of_mix = head_mix_gradients(of_pre, state["mixes"], *weights)
    of_x, of_merged = project_gradients(of_mix.pop("grad_mixes"), state, x, factors, eps, rms)
    return {
        "grad_residual": encode(of_streams + of_x.reshape(streams.shape), residual.dtype),
        **with_targets(fn_gradients(of_merged, fn, norm_weight) | of_mix, targets),
    }
