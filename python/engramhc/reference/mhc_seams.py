"""Seams: the exit of one sublayer (post) and the entry of the next one (pre) in one operator.

classic: the new streams are collapsed with their own mix. single_pass: with a mix that was made one
sublayer earlier; the mix made here is for the seam after this one. broadcast: the first entry of a
stack, whose streams are all the same row. The streams are rounded before the entry reads them.
"""

from __future__ import annotations

import numpy as np

from .dtypes import Tensor, encode, nearest
from .mhc_pre import (
    SAVED,
    Arrays,
    Sublayer,
    entry_gradients,
    given,
    merged,
    singles,
    taken_saved,
)
from .mhc_projection import flattened, operand
from .mhc_streams import (
    collapse_gradients,
    collapsed,
    combine_gradients,
    combined,
    expand_fwd,
    rounded_gradients,
)


def seam_fwd(
    sublayer: Sublayer,
    layer_output: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    earlier_pre: Tensor | None,
) -> tuple[dict[str, Tensor], Arrays]:
    """new_residual and layer_input, and all that the next sublayer's mixes are made of."""
    dtype = residual.dtype
    streams = nearest(combined(*(t.decode() for t in (layer_output, residual, post, comb))), dtype)
    state = sublayer.forward(flattened(streams), sublayer.factors())
    pre = state["pre"] if earlier_pre is None else earlier_pre.decode()
    row = nearest(collapsed(streams, pre), dtype)
    return {
        "new_residual": encode(streams, dtype),
        "layer_input": encode(sublayer.layer_input(row), dtype),
    }, state


def seam_classic_fwd(
    layer_output: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    *,
    save: bool = False,
    **call,
) -> dict[str, Tensor]:
    """post_fwd of one sublayer, then pre_fwd of the next.

    layer_output [..., d], residual [..., n, d], post [..., n], comb [..., n, n], the arguments of
    Sublayer of the next one
    -> new_residual, layer_input, next_post, next_comb; with save next_* of all of SAVED
    """
    outputs, state = seam_fwd(
        Sublayer(**call), layer_output, residual, post, comb, earlier_pre=None
    )
    return outputs | singles(state, ("post", *SAVED) if save else ("post", "comb"), "next_")


def seam_single_pass_fwd(
    layer_output: Tensor,
    residual: Tensor,
    pre: Tensor,
    post: Tensor,
    comb: Tensor,
    *,
    save: bool = False,
    **call,
) -> dict[str, Tensor]:
    """post_fwd, then the collapse with the given pre [..., n], and the mixes for the next use.
    Otherwise as seam_classic_fwd; next_pre is always an output.
    """
    outputs, state = seam_fwd(Sublayer(**call), layer_output, residual, post, comb, pre)
    return outputs | singles(state, ("post", *SAVED) if save else ("pre", "post", "comb"), "next_")


def seam_bwd(
    layer_output: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    earlier_pre: Tensor | None,
    grad_new_residual: Tensor | None = None,
    grad_layer_input: Tensor | None = None,
    grad_next_pre: Tensor | None = None,
    grad_next_post: Tensor | None = None,
    grad_next_comb: Tensor | None = None,
    new_residual: Tensor | None = None,
    *,
    rounding: str = "once",
    **call,
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Backward of a seam, entry first; also the gradient of the mix of the collapse."""
    sublayer, saved = Sublayer.taken_from(call), taken_saved(call, "next_")
    dtype, shape = residual.dtype, residual.shape
    if (new_residual is None) is not (not saved):
        raise ValueError("'new_residual': expected with next_mixes and the like, or not at all")
    exit_inputs = [t.decode() for t in (layer_output, residual, post, comb)]
    streams = (
        nearest(combined(*exit_inputs), dtype) if new_residual is None else new_residual.decode()
    )
    state = sublayer.state(saved, flattened(streams), sublayer.factors())
    of_streams, of_pre, of_parameters = entry_gradients(
        sublayer,
        streams,
        dtype,
        state,
        given(grad_new_residual, shape),
        given(grad_layer_input, layer_output.shape),
        {
            "pre": given(grad_next_pre, post.shape),
            "post": given(grad_next_post, post.shape),
            "comb": given(grad_next_comb, comb.shape),
        },
        earlier_pre=None if earlier_pre is None else earlier_pre.decode(),
        chain=rounding == "chain",
    )
    of_merged = of_parameters.pop("of_merged")
    return {
        **rounded_gradients(combine_gradients(of_streams, *exit_inputs), dtype),
        **sublayer.parameter_gradients(of_merged, of_parameters, call),
    }, of_pre


def seam_classic_bwd(
    layer_output: Tensor, residual: Tensor, post: Tensor, comb: Tensor, **call
) -> dict[str, Tensor]:
    """Backward of seam_classic_fwd: pre_bwd, then post_bwd; see entry_gradients for `rounding`.

    As in seam_bwd -> grad_layer_output, grad_residual, grad_post, grad_comb, gradients of the
    parameters of the next sublayer
    """
    return seam_bwd(layer_output, residual, post, comb, None, **call)[0]


def seam_single_pass_bwd(
    layer_output: Tensor, residual: Tensor, pre: Tensor, post: Tensor, comb: Tensor, **call
) -> dict[str, Tensor]:
    """Backward of seam_single_pass_fwd, with grad_pre of the given pre beside the others."""
    outputs, of_pre = seam_bwd(layer_output, residual, post, comb, pre, **call)
    return outputs | {"grad_pre": encode(of_pre, "F32")}


# --- first entry of a stack ----------------------------------------------------------------------


def summed_factors(sublayer: Sublayer, n: int) -> np.ndarray:
    """The merged fn summed over its n streams in F32, ascending, and then rounded to TF32 if the
    product takes it so: [N, d]."""
    fn = merged(sublayer.fn, sublayer.norm_weight)
    total, *others = np.moveaxis(fn.reshape(fn.shape[0], n, -1), 1, 0)
    for part in others:
        total = nearest(total + part, "F32")
    return operand(total, sublayer.precision)


def seam_broadcast_fwd(
    hidden: Tensor, *, form: str = "classic", save: bool = False, **call
) -> dict[str, Tensor]:
    """expand, then pre on equal streams, whose projection is that of one row with the summed fn.
    form = "single_pass" collapses with the one-hot mix of stream 0: the row itself.

    hidden [..., d], the arguments of Sublayer
    -> residual [..., n, d], layer_input [..., d], pre, post, comb; with save all of SAVED
    """
    sublayer, row, dtype = Sublayer(**call), hidden.decode(), hidden.dtype
    n = sublayer.fn.shape[1] // row.shape[-1]
    state = sublayer.forward(row, summed_factors(sublayer, n))
    outputs = expand_fwd(hidden, n=n)
    if form == "classic":
        row = nearest(collapsed(outputs["residual"].decode(), state["pre"]), dtype)
    outputs["layer_input"] = encode(sublayer.layer_input(row), dtype)
    return outputs | singles(state, ("post", *SAVED) if save else ("pre", "post", "comb"))


def seam_broadcast_bwd(
    hidden: Tensor,
    grad_residual: Tensor | None = None,
    grad_layer_input: Tensor | None = None,
    grad_pre: Tensor | None = None,
    grad_post: Tensor | None = None,
    grad_comb: Tensor | None = None,
    *,
    form: str = "classic",
    **call,
) -> dict[str, Tensor]:
    """Backward of seam_broadcast_fwd, rounded once.

    hidden, grad_layer_input [..., d], grad_residual [..., n, d], grad_pre, grad_post [..., n],
    grad_comb [..., n, n], the arguments of Sublayer, targets, SAVED
    -> grad_hidden and gradients of the parameters
    """
    sublayer, saved = Sublayer.taken_from(call), taken_saved(call)
    row, dtype, leading = hidden.decode(), hidden.dtype, hidden.shape[:-1]
    n = sublayer.fn.shape[1] // row.shape[-1]
    factors = summed_factors(sublayer, n)
    state = sublayer.state(saved, row, factors)
    streams = expand_fwd(hidden, n=n)["residual"].decode()

    of_input = given(grad_layer_input, hidden.shape)
    of_streams = given(grad_residual, streams.shape)
    of_pre = given(grad_pre, (*leading, n))
    if form == "classic":
        collapsed_row = nearest(collapsed(streams, state["pre"]), dtype)
        of_row, of_weight = sublayer.layer_input_gradients(of_input, collapsed_row)
        through_streams, through_pre = collapse_gradients(of_row, streams, state["pre"])
        of_hidden = (of_streams + through_streams).sum(axis=-2)
        of_pre = of_pre + through_pre
    else:
        of_row, of_weight = sublayer.layer_input_gradients(of_input, row)
        of_hidden = of_streams.sum(axis=-2) + of_row
    of_x, of_summed, of_mix = sublayer.backward(
        of_pre,
        given(grad_post, (*leading, n)),
        given(grad_comb, (*leading, n, n)),
        state,
        row,
        factors,
    )
    of_merged = np.tile(of_summed, n)  # every stream's columns have the gradient of the sum
    return {
        "grad_hidden": encode(of_hidden + of_x, dtype),
        **sublayer.parameter_gradients(of_merged, of_mix | of_weight, call),
    }
