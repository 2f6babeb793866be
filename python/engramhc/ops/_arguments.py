"""What the wrappers of the operators share: casts, coefficients, targets of gradients, constants."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypedDict

from .. import presets
from .._arrays import dtype_of, framework_of
from .._core import operator
from ..errors import ArgumentError, ShapeError

Array = Any  # of any framework with DLPack

ACTIVATIONS = ("BF16", "F16", "F32")

class MhcMix(NamedTuple):
    """Coefficients with which a layer's output goes back into the streams."""

    post: Array  # F32[..., n]
    comb: Array  # F32[..., n, n], [input stream, output stream]


class MixState(NamedTuple):
    """What the forward of a sublayer's entry saves for its backward."""

    pre: Array  # F32[..., n]
    mixes: Array  # F32[..., N]
    mul: Array  # F32[..., N]
    sqr: Array  # F32[...]
    comb_logits: Array  # F32[..., n, n]
    comb: Array  # F32[..., n, n]


class MixConstants(TypedDict, total=False):
    """Constants of a projection's mixes; `preset` has values for those that are not given."""

    preset: str | presets.MhcPreset | None
    rms_eps: float
    post_mult: float
    pre_eps: float
    sinkhorn_eps: float
    repeat: int
    convention: str  # "deepseek", "megatron", "log"
    rms: str  # "mean", "norm"


_OPTIONAL = {"convention": "deepseek", "rms": "mean"}
RULES = ("rms_eps", "pre_eps", "post_mult", "repeat", "sinkhorn_eps", "convention", "rms")


def mix_rules(title: str, constants: dict, wanted: tuple[str, ...] = RULES) -> tuple:
    """Constants in the order of `wanted`, that of the operators' tables."""
    preset = constants.pop("preset", None)
    found = vars(presets.find(preset)) if preset is not None else _OPTIONAL
    unknown = [name for name in constants if name not in wanted]
    if unknown:
        raise TypeError(f"{title}() got an unexpected keyword argument '{unknown[0]}'")
    try:
        return tuple([constants[name] if name in constants else found[name] for name in wanted])
    except KeyError as missing:
        raise TypeError(f"{title}() needs the constant {missing}: give it, or preset=") from None


def activation(array: Array, like: Array) -> Array:
    """`array` in the type of `like`, where both are activations of different types."""
    try:
        if array.dtype == like.dtype:
            return array
    except AttributeError:
        return array  # no array: the operator says so
    wanted, given = dtype_of(like), dtype_of(array)
    if wanted in ACTIVATIONS and given in ACTIVATIONS:
        return framework_of(array).cast(array, wanted)
    return array


def as_integers(array: Array, dtype: str) -> Array:
    """Integers in the type that an operator takes."""
    given = dtype_of(array)
    return framework_of(array).cast(array, dtype) if given in ("I32", "I64") and given != dtype else array


def coefficient(mix: Array, streams: Array) -> Array:
    """`[..., n]`, also where it came as `[..., n, 1]` beside streams `[..., n, d]`."""
    try:
        return mix[..., 0] if mix.ndim == streams.ndim else mix
    except AttributeError:
        return mix


def targets(title: str, beta: int, *gradients: Array | None) -> tuple[tuple, tuple]:
    """Accumulators and outputs for parameter gradients: with beta 1 those given are added to."""
    if beta not in (0, 1):
        raise ArgumentError(f"{title}: attribute 'beta': expected 0 or 1, got {beta}")
    return (gradients if beta else (None,) * len(gradients)), gradients


def lead_of(array: Array, tail: int, axis: int = 0) -> tuple[int, ...]:
    """The token dimensions: those from `axis` on but for the last `tail`."""
    shape = tuple(getattr(array, "shape", ()))
    return shape[axis : len(shape) - tail] if len(shape) >= axis + tail else (0,)


def merged(array: Array, lead: tuple[int, ...], axis: int = 0) -> Array:
    """The token dimensions from `axis` on as one, for operators that want a single one."""
    if len(lead) == 1 or not hasattr(array, "shape"):
        return array
    shape = tuple(array.shape)
    return array.reshape((*shape[:axis], math.prod(lead), *shape[axis + len(lead) :]))


def parted(array: Array, lead: tuple[int, ...], axis: int = 0) -> Array:
    """The reverse of `merged`."""
    if len(lead) == 1 or array is None:
        return array
    shape = tuple(array.shape)
    return array.reshape((*shape[:axis], *lead, *shape[axis + 1 :]))


def merged_out(title: str, name: str, array: Array, lead: tuple[int, ...], axis: int = 0) -> Array:
    """`merged` of an output, which must not become a copy."""
    if len(lead) == 1 or array is None:
        return array
    contiguous = array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous
    if not contiguous:
        raise ShapeError(f"{title}: tensor '{name}': expected a contiguous array, got another one")
    return merged(array, lead, axis)


def call_merged(name: str, title: str, inputs: tuple, attributes: tuple, out: tuple | None, lead: tuple[int, ...],
                axes: tuple, out_axes: tuple, stream: int | None, workspace: Array | None, names: dict) -> tuple:
    """Calls an operator that wants one token axis. `axes` and `out_axes` say where it lies in every
    tensor, None for one without tokens."""
    if len(lead) == 1:
        return operator(name)(title, inputs, attributes, out, stream, workspace, names)
    given = out or (None,) * len(out_axes)
    results = operator(name)(
        title,
        tuple(a if axis is None else merged(a, lead, axis) for a, axis in zip(inputs, axes)),
        attributes,
        tuple(a if axis is None else merged_out(title, "out", a, lead, axis) for a, axis in zip(given, out_axes)),
        stream, workspace, names,
    )  # fmt: skip
    return tuple(
        old if old is not None or axis is None else parted(new, lead, axis)
        for old, new, axis in zip(given, results, out_axes)
    )
