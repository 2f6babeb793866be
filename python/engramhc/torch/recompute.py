"""Residuals and layer inputs of a block of layers made again, and which layers make a block."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engramhc.errors import Error
from engramhc.ops._arguments import coefficient

from . import _call
from ._operator import like, records, traces
from .mhc import mhc_post, mhc_pre_apply_mix


def mhc_multilayer_recompute(
    x0, pre, layer_output, post, comb, layer_input=None, residual=None
):
    """From the first residual x0 [..., n, d] of a block and lists of what its layers made, the layer
    inputs (as many as `pre`) and the new residuals (as many as `layer_output`).

    Given outputs are written and returned. With gradients it is mhc_pre_apply_mix and mhc_post layer
    by layer, which have the same bits.
    """
    pre = [coefficient(p, x0) for p in pre]
    post = [coefficient(p, x0) for p in post]
    tensors = [x0, *pre, *layer_output, *post, *comb]
    given = [*(layer_input or ()), *(residual or ())]
    if records(tensors + given) or traces(x0):
        return _by_layers(x0, pre, layer_output, post, comb, layer_input, residual)
    lift = x0.dim() == 2
    if layer_input is None:
        layer_input = [x0.new_empty(x0.shape[:-2] + x0.shape[-1:]) for _ in pre]
    if residual is None:
        residual = [like(x0) for _ in layer_output]
    inputs = {
        "residual": x0,
        "pre": pre,
        "layer_output": list(layer_output),
        "post": post,
        "comb": list(comb),
    }
    outputs = {"layer_input": list(layer_input), "new_residual": list(residual)}
    if lift:
        inputs, outputs = _lifted(inputs), _lifted(outputs)
    try:
        _call.run("mhc.multilayer_recompute", inputs, outputs, {})
    except Error as error:
        names = {"residual": "x0", "new_residual": "residual"}
        raise _call.renamed(error, "mhc_multilayer_recompute", names) from None
    return layer_input, residual


def _lifted(tensors):
    return {
        name: [t.unsqueeze(0) for t in value] if isinstance(value, list) else value.unsqueeze(0)
        for name, value in tensors.items()
    }


def _by_layers(x0, pre, layer_output, post, comb, layer_input, residual):
    inputs, residuals = [], []
    for layer, mix in enumerate(pre):
        inputs.append(mhc_pre_apply_mix(x0, mix))
        if layer < len(layer_output):
            x0 = mhc_post(layer_output[layer], x0, post[layer], comb[layer])
            residuals.append(x0)
    for outputs, made in ((layer_input, inputs), (residual, residuals)):
        for output, tensor in zip(outputs or (), made):
            output.copy_(tensor)
    return layer_input or inputs, residual or residuals


class RecomputePlan(NamedTuple):
    """Which layers begin a block, and what storing costs, in values a token and unit of width."""

    block_starts: tuple[int, ...]
    stored: int  # kept through the forward: n for each block
    transient: int  # live while the backward of one block runs: (n + 2) for each of its layers


def mhc_recompute_plan(layers, n, *, stage_borders=()):
    """The blocks of layers that keep the fewest values, none of which crosses a stage border.

    `stage_borders` are the first layers of the pipeline stages after the first.
    """
    borders = [0, *stage_borders, layers]
    stages = tuple(b - a for a, b in zip(borders, borders[1:]))
    attributes = {"layers": layers, "n": n, "d": 1, "stages": stages}
    try:
        got = _call.made("mhc.plan_recompute", {}, attributes)
    except Error as error:
        raise _call.renamed(error, "mhc_recompute_plan", {"stages": "stage_borders"}) from None
    stored, transient = got["terms"].tolist()
    return RecomputePlan(tuple(got["block_starts"].tolist()), stored, transient)
