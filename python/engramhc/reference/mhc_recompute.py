"""Recomputation of residual streams from a block's first ones, and how long a block should be."""

from __future__ import annotations

import numpy as np

from .dtypes import Tensor, encode
from .mhc_streams import post_fwd, pre_apply_fwd


def listed(tensors: dict[str, Tensor], name: str) -> list[Tensor]:
    """The tensors name.0, name.1, ... without holes."""
    found = [x for x in tensors if x.startswith(f"{name}.")]
    wanted = [f"{name}.{layer}" for layer in range(len(found))]
    if set(found) != set(wanted):
        raise ValueError(f"'{name}': expected {', '.join(wanted)}, got {', '.join(sorted(found))}")
    return [tensors[x] for x in wanted]


def multilayer_recompute(residual: Tensor, **layers: Tensor) -> dict[str, Tensor]:
    """Layer by layer: layer_input.l = round(sum_i pre_i x_i), then x = new_residual.l =
    round(post_o y + sum_i comb_io x_i). The last layer may lack the second half.

    residual [..., n, d], pre.l [..., n], layer_output.l [..., d], post.l [..., n],
    comb.l [..., n, n] -> layer_input.l [..., d], new_residual.l [..., n, d]
    """
    lists = {name: listed(layers, name) for name in ("pre", "layer_output", "post", "comb")}
    inputs, posts = len(lists["pre"]), len(lists["post"])
    if {len(lists[name]) for name in ("layer_output", "comb")} != {posts}:
        raise ValueError("'layer_output', 'post', 'comb': expected equally many")
    if inputs < 1 or posts not in (inputs - 1, inputs) or len(layers) != inputs + 3 * posts:
        raise ValueError(f"'pre': expected {posts} or {posts + 1} layers, got {inputs}")
    outputs = {}
    for layer, pre in enumerate(lists["pre"]):
        outputs[f"layer_input.{layer}"] = pre_apply_fwd(residual, pre)["layer_input"]
        if layer < posts:
            output, post, comb = (lists[x][layer] for x in ("layer_output", "post", "comb"))
            residual = post_fwd(output, residual, post, comb)["new_residual"]
            outputs[f"new_residual.{layer}"] = residual
    return outputs


def plan_recompute(
    *, layers: int, n: int, d: int, stages: list[int] | None = None
) -> dict[str, Tensor]:
    """The block length (the smallest of the best) that minimises what is kept at once:
    n d for the first streams of every block + (n + 2) d block_length inside one of them.

    stages: layers of every pipeline stage, which no block crosses
    -> block_length [1], terms [2] (the two summands), block_starts [blocks]
    """
    stages = [layers] if stages is None else stages
    if sum(stages) != layers:
        raise ValueError(f"'stages': expected a sum of {layers}, got {sum(stages)}")

    def terms(length: int) -> tuple[int, int]:
        return n * d * sum(-(-stage // length) for stage in stages), (n + 2) * d * length

    best = min(range(1, max(stages) + 1), key=lambda length: (sum(terms(length)), length))
    firsts = np.cumsum([0, *stages])
    starts = [
        start for first, stage in zip(firsts, stages) for start in range(first, first + stage, best)
    ]
    return {
        "block_length": encode(np.array([best]), "I32"),
        "terms": encode(np.array(terms(best)), "I64"),
        "block_starts": encode(np.array(starts), "I32"),
    }
