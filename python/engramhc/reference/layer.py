"""The whole Engram layer: gate, short convolution and residual."""

from __future__ import annotations

import numpy as np

from .conv import causal_convolution, convolution_gradients, normalized_rows, silu
from .dtypes import Tensor, accumulated, encode, nearest, single
from .gate import (
    copy_masked,
    fused_weight,
    gate_gradients,
    masked_statistics,
    pack_gradients,
    recomputed_statistics,
    split_kv,
)


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


def layer_bwd(
    grad_out: Tensor,
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
    grad_weight_hidden_acc: Tensor | None = None,
    grad_weight_embed_acc: Tensor | None = None,
    grad_conv_weight_acc: Tensor | None = None,
    grad_conv_norm_weight_acc: Tensor | None = None,
    *,
    eps: float,
    clamp: float,
    dilation: int | None = None,
    conv_eps: float | None = None,
) -> dict[str, Tensor]:
    """Backward of layer_fwd without state: convolution first, whose gradient of alpha * value then
    enters the gate beside grad_out of the residual; the product rule of the fused weight last.
    Between the steps nothing but the statistics of the gate is rounded.

    grad_out, residual [T, n, d], kv [T, n+1, d] or key [T, n, d] and value [T, d],
    weight_hidden, weight_embed, conv_norm_weight [n, d], conv_weight [n, d, w],
    cu_seqlens [B+1], image_token_mask [T]
    -> grad_residual [T, n, d], grad_kv or grad_key and grad_value, grad_weight_hidden,
    grad_weight_embed [n, d]; with a convolution grad_conv_weight [n, d, w],
    grad_conv_norm_weight [n, d]
    """
    keys, values = split_kv(kv, key, value)
    fused = fused_weight(weight_hidden, weight_embed)["weight_fused"]
    statistics, masked = recomputed_statistics(residual, keys, fused, image_token_mask, eps, clamp)
    grad = grad_out.decode()
    outputs = {}
    with np.errstate(all="ignore"):
        grad_gated = grad
        if conv_weight is not None:
            convolution = convolution_gradients(
                grad,
                statistics["alpha"][..., None] * values[:, None, :],
                conv_weight.decode(),
                conv_norm_weight.decode(),
                single(conv_eps),
                masked,
                dilation,
                cu_seqlens,
            )
            grad_gated = convolution["grad_gated_value"]
            outputs["grad_conv_weight"] = accumulated(
                grad_conv_weight_acc, convolution["grad_conv_weight"]
            )
            outputs["grad_conv_norm_weight"] = accumulated(
                grad_conv_norm_weight_acc, convolution["grad_conv_norm_weight"]
            )
        gradients = gate_gradients(
            grad,
            grad_gated,
            residual.decode(),
            keys,
            values,
            fused.decode(),
            statistics,
            single(clamp),
            masked,
        )
        of_fused = gradients["grad_weight_fused"]
        outputs["grad_weight_hidden"] = accumulated(
            grad_weight_hidden_acc, of_fused * weight_embed.decode()
        )
        outputs["grad_weight_embed"] = accumulated(
            grad_weight_embed_acc, of_fused * weight_hidden.decode()
        )
    return outputs | pack_gradients(gradients, grad_out, masked, packed=kv is not None)
