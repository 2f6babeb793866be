"""The whole Engram layer: gate, short convolution and residual."""

from __future__ import annotations

import numpy as np

from .conv import causal_convolution, normalized_rows, silu
from .dtypes import Tensor, encode, nearest, single
from .gate import copy_masked, fused_weight, masked_statistics, split_kv


def layer_fwd(
    residual: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    kv: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_norm_weight: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    state: Tensor | None = None,
    *,
    eps: float,
    clamp: float,
    dilation: int | None = None,
    conv_eps: float | None = None,
    rounding: str = "once",
    save: bool = False,
) -> dict[str, Tensor]:
    """out = round(residual + alpha * value + silu(c)), c the convolution of the normalised rows of
    alpha * value. rounding = "twice" rounds before silu(c) is added and again after. Without
    convolution weights the layer is the gate alone. Image tokens pass unchanged.

    residual [T, n, d], kv [T, n+1, d] or key [T, n, d] and value [T, d],
    weight_hidden, weight_embed, conv_norm_weight [n, d], conv_weight [n, d, w],
    cu_seqlens [B+1], image_token_mask [T], state [B, (w-1)*dilation, n, d]
    -> out [T, n, d]; with save: dot, alpha, rstd_residual, rstd_key [T, n]; state if one came in
    """
    keys, values = split_kv(kv, key, value)
    fused = fused_weight(weight_hidden, weight_embed)["weight_fused"]
    statistics, masked = masked_statistics(residual, keys, fused, image_token_mask, eps, clamp)
    outputs = {}
    with np.errstate(all="ignore"):
        gated = np.where(
            masked[:, None, None], 0.0, statistics["alpha"][..., None] * values[:, None, :]
        )
        total = residual.decode() + gated
        if conv_weight is not None:
            rows = normalized_rows(gated, conv_norm_weight.decode(), single(conv_eps), masked)
            mixed, after = causal_convolution(
                rows, conv_weight.decode(), dilation, cu_seqlens, state
            )
            if rounding == "twice":
                total = nearest(total, residual.dtype)
            total = total + silu(mixed)
            if state is not None:
                outputs["state"] = encode(after, "F32")
    outputs["out"] = copy_masked(encode(total, residual.dtype), residual, masked)
    if save:
        outputs |= {name: encode(numbers, "F32") for name, numbers in statistics.items()}
    return outputs
