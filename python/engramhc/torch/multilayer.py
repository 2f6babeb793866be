"""Stacks of sublayers that keep one residual for several layers and make the others again."""

from __future__ import annotations

import torch
from torch import nn

from engramhc.errors import UnsupportedError

from .mhc import entry, layer_norm, mhc_post
from .modules import MhcSublayer
from .recompute import mhc_multilayer_recompute, mhc_recompute_plan


class MultiLayerRecompute(nn.Module):
    """A list of classic MhcSublayers, run one after the other.

    With gradients, a block of layers keeps its first residual, the coefficients and the outputs of the
    modules F; residuals and inputs of F inside it are made again in the backward, by
    mhc_multilayer_recompute and with the same bits. `plan` is that of mhc_recompute_plan.

    The modules F run once: what they save beside their input stays. Eager mode only.
    """

    def __init__(self, layers, plan=None):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for layer in self.layers:
            if not isinstance(layer, MhcSublayer) or layer.form != "classic":
                raise UnsupportedError(
                    f"MultiLayerRecompute: argument 'layers': expected classic MhcSublayers, got {layer}"
                )
        self.plan = plan or mhc_recompute_plan(len(self.layers), self.layers[0].n)

    def forward(self, residual, *args, **kwargs):
        starts = (*self.plan.block_starts, len(self.layers))
        for start, end in zip(starts, starts[1:]):
            block = _Block(residual, self.layers[start:end])
            residual = block.run(args, kwargs)
        return residual


class _Block:
    """One block: what it keeps, and the tensors made again while its backward runs."""

    def __init__(self, x0, layers):
        self.x0, self.layers = x0, layers
        self.pre, self.post, self.comb, self.outputs = [], [], [], []
        self.places: dict[int, tuple[str, int]] = {}  # of storages that are not to be kept
        self.made: dict[str, list[torch.Tensor]] | None = None
        self.saved = self.asked = 0

    def run(self, args, kwargs):
        residual = self.x0
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            for index, layer in enumerate(self.layers):
                residual = self._layer(index, layer, residual, args, kwargs)
        return residual

    def _layer(self, index, layer, residual, args, kwargs):
        if index > 0:
            self.places[_storage(residual)] = "residual", index - 1
        hidden = []
        x, mix = _entry(layer, residual, hidden)
        if hidden:
            self.places[_storage(x)] = "layer_input", index
            self.pre.append(hidden[0])
            self.post.append(mix.post.detach())
            self.comb.append(mix.comb.detach())
        y, extra = layer._run(x, args, kwargs)
        if extra:
            raise UnsupportedError("MultiLayerRecompute: expected one output of F, got several")
        self.outputs.append(y.detach().to(residual.dtype))
        new = mhc_post(y, residual, *mix)
        for tensor in (x, residual):  # nobody saves them from here on
            self.places.pop(_storage(tensor), None)
        return new

    # --- saved tensors ----------------------------------------------------------------------------

    def pack(self, tensor):
        place = self.places.get(_storage(tensor))
        if place is None:
            return tensor
        self.saved += 1
        return place, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        (kind, index), size, stride, offset = packed
        if self.made is None:
            self.made = self._made_again()
        tensor = self.made[kind][index].as_strided(size, stride, offset)
        self.asked += 1
        if self.asked == self.saved:  # the backward of this block is through
            self.made, self.asked = None, 0
        return tensor

    @torch.no_grad()
    def _made_again(self):
        count = len(self.layers)
        lists = self.outputs[: count - 1], self.post[: count - 1], self.comb[: count - 1]
        inputs, residuals = mhc_multilayer_recompute(self.x0.detach(), self.pre, *lists)
        inputs = [
            layer_norm(row, layer.layer_norm_weight, layer.layer_norm_eps)
            for row, layer in zip(inputs, self.layers)
        ]
        return {"layer_input": inputs, "residual": residuals}


def _entry(layer, residual, hidden):
    """The entry of a sublayer, which also gives away its pre mix."""
    weights = layer.fn, layer.scale, layer.base, layer.norm_weight, layer.layer_norm_weight
    constants = {"preset": layer.preset}
    return entry((residual, *weights), constants, "fp32", layer.layer_norm_eps, kept=hidden)


def _storage(tensor):
    return tensor.untyped_storage().data_ptr()
