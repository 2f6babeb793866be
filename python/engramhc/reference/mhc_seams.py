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
    entry,
    entry_gradients,
    given,
    merged,
    singles,
    taken_saved,
    with_targets,
)
from .mhc_projection import flattened, operand
from .mhc_streams import (
    collapse_gradients,
    combine_gradients,
    combined,
    expand_fwd,
    rounded_gradients,
)


def seam(
    sublayer: Sublayer,
    exit_inputs: list[np.ndarray],
    dtype: str,
    earlier_pre: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, Arrays]:
    """The new streams, rounded, and the entry that reads them; exit_inputs: those of post_fwd."""
    streams = sublayer.rounded(combined(*exit_inputs), dtype)
    return streams, *entry(sublayer, streams, dtype, earlier_pre)


def seam_outputs(
    streams: np.ndarray, layer_input: np.ndarray, state: Arrays, dtype: str, names: tuple[str, ...]
) -> dict[str, Tensor]:
    outputs = {"new_residual": encode(streams, dtype), "layer_input": encode(layer_input, dtype)}
    return outputs | singles(state, names, "next_")


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
    exit_inputs = [t.decode() for t in (layer_output, residual, post, comb)]
    results = seam(Sublayer(**call), exit_inputs, residual.dtype)
    return seam_outputs(*results, residual.dtype, ("post", *SAVED) if save else ("post", "comb"))


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
    exit_inputs = [t.decode() for t in (layer_output, residual, post, comb)]
    results = seam(Sublayer(**call), exit_inputs, residual.dtype, pre.decode())
    names = ("post", *SAVED) if save else ("pre", "post", "comb")
    return seam_outputs(*results, residual.dtype, names)


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
        sublayer.rounded(combined(*exit_inputs), dtype)
        if new_residual is None
        else new_residual.decode()
    )
    state = sublayer.state(saved, flattened(streams), sublayer.factors())
    grads = {
        "streams": given(grad_new_residual, shape),
        "layer_input": given(grad_layer_input, layer_output.shape),
        "pre": given(grad_next_pre, post.shape),
        "post": given(grad_next_post, post.shape),
        "comb": given(grad_next_comb, comb.shape),
    }
    of_streams, of_pre, of_parameters = entry_gradients(
        sublayer,
        streams,
        dtype,
        state,
        grads,
        earlier_pre=None if earlier_pre is None else earlier_pre.decode(),
        chain=rounding == "chain",
    )
    return {
        **rounded_gradients(combine_gradients(of_streams, *exit_inputs), dtype),
        **with_targets(of_parameters, call),
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


def repeated(row: np.ndarray, n: int) -> np.ndarray:
    """[..., d] -> [..., n, d]."""
    return np.repeat(row[..., None, :], n, axis=-2)


def broadcast_entry(
    sublayer: Sublayer, row: np.ndarray, dtype: str, form: str
) -> tuple[np.ndarray, Arrays]:
    """As entry, of n streams that are all the same row [..., d]."""
    n = sublayer.fn.shape[1] // row.shape[-1]
    state = sublayer.forward(row, summed_factors(sublayer, n))
    if form == "classic":
        row = sublayer.row(repeated(row, n), state["pre"], dtype)
    return sublayer.layer_input(row), state


def seam_broadcast_fwd(
    hidden: Tensor, *, form: str = "classic", save: bool = False, **call
) -> dict[str, Tensor]:
    """expand, then pre on equal streams, whose projection is that of one row with the summed fn.
    form = "single_pass" collapses with the one-hot mix of stream 0: the row itself.

    hidden [..., d], the arguments of Sublayer
    -> residual [..., n, d], layer_input [..., d], pre, post, comb; with save all of SAVED
    """
    sublayer = Sublayer(**call)
    layer_input, state = broadcast_entry(sublayer, hidden.decode(), hidden.dtype, form)
    return {
        **expand_fwd(hidden, n=state["pre"].shape[-1]),
        "layer_input": encode(layer_input, hidden.dtype),
        **singles(state, ("post", *SAVED) if save else ("pre", "post", "comb")),
    }


def broadcast_gradients(
    sublayer: Sublayer, row: np.ndarray, dtype: str, state: Arrays, grads: Arrays, form: str
) -> tuple[np.ndarray, Arrays]:
    """Backward of broadcast_entry. row [..., d], grads: of streams, layer_input, pre, post, comb
    -> gradient of the row, and of the parameters by name
    """
    n = sublayer.fn.shape[1] // row.shape[-1]
    if form == "classic":
        streams = repeated(row, n)
        of_row, of_weight = sublayer.layer_input_gradients(
            grads["layer_input"], sublayer.row(streams, state["pre"], dtype)
        )
        of_streams, of_pre = collapse_gradients(of_row, streams, state["pre"])
        of_row = np.sum(grads["streams"] + of_streams, axis=-2)
        grads = {**grads, "pre": grads["pre"] + of_pre}
    else:
        of_row, of_weight = sublayer.layer_input_gradients(grads["layer_input"], row)
        of_row = np.sum(grads["streams"], axis=-2) + of_row
    of_x, of_parameters = sublayer.backward(grads, state, row, summed_factors(sublayer, n))
    of_summed = of_parameters.pop("of_factors")  # and of each of its n terms
    of_parameters |= {"of_factors": np.tile(of_summed, n)}
    return of_row + of_x, sublayer.parameter_gradients(of_parameters | of_weight)


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
    row, leading = hidden.decode(), hidden.shape[:-1]
    n = sublayer.fn.shape[1] // row.shape[-1]
    state = sublayer.state(saved, row, summed_factors(sublayer, n))
    grads = {
        "streams": given(grad_residual, (*leading, n, row.shape[-1])),
        "layer_input": given(grad_layer_input, hidden.shape),
        "pre": given(grad_pre, (*leading, n)),
        "post": given(grad_post, (*leading, n)),
        "comb": given(grad_comb, (*leading, n, n)),
    }
    of_row, of_parameters = broadcast_gradients(sublayer, row, hidden.dtype, state, grads, form)
    return {"grad_hidden": encode(of_row, hidden.dtype), **with_targets(of_parameters, call)}
