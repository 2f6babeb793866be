"""Modules of mHC: a sublayer around any module, entry and exits of a stack."""

from __future__ import annotations

import math

import torch
from torch import nn

from engramhc import presets
from engramhc.errors import ArgumentError

from .mhc import expand_to_mhc, mhc_head, mhc_mean, mhc_post, mhc_pre, mhc_pre_delayed

FN_STD = 0.02
DIAGONAL = 4.0  # logits of comb on its diagonal, 0 elsewhere
SATURATED = 6.0  # of a sigmoid that is to be 1
_NARROW = (torch.bfloat16, torch.float16)


class _Coefficients(nn.Module):
    """Parameters of mixes, which stay fp32 whatever type the rest of a model is moved to."""

    _coefficients = ("fn", "scale", "base", "norm_weight")

    def _apply(self, fn, recurse=True):
        own = [self._parameters.get(name) for name in self._coefficients]
        own = [p for p in own if p is not None]
        kept = {id(t) for p in own for t in (p, p.data, p.grad) if t is not None}

        def without_narrowing(tensor):
            moved = fn(tensor)
            if id(tensor) in kept and moved.dtype in _NARROW:
                return tensor.to(moved.device)
            return moved

        return super()._apply(without_narrowing, recurse)


class MhcSublayer(_Coefficients):
    """A module F: [..., d] -> [..., d] as a sublayer of n residual streams.

    `form="classic"`: forward(residual, ...) -> residual. `form="single_pass"` (DeepSeek-V4.1): a pair
    (residual, pre_mix) -> the next pair, where pre_mix None takes stream 0. Further arguments go to F;
    what F returns beside its output follows in a tuple.

    `layer_norm` normalises the input of F, `norm_weight` gives the RMS norm of the mixes a weight.
    At the start F sees the mean of the streams and its output goes to all of them in full.
    """

    def __init__(
        self,
        F,
        d,
        n=4,
        *,
        preset="train",
        form="classic",
        layer_norm=False,
        norm_weight=False,
        mean_init=0.01,
        layer_norm_eps=1e-6,
    ):
        super().__init__()
        if form not in ("classic", "single_pass"):
            raise ArgumentError(
                f"MhcSublayer: argument 'form': expected 'classic' or 'single_pass', got {form!r}"
            )
        self.F = F
        self.d, self.n, self.form = d, n, form
        self.preset = presets.find(preset)
        self.mean_init, self.layer_norm_eps = mean_init, layer_norm_eps
        mixes = n * n + 2 * n
        self.fn = nn.Parameter(torch.empty(mixes, n * d, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(mixes, dtype=torch.float32))
        self.norm_weight = (
            nn.Parameter(torch.empty(n * d, dtype=torch.float32)) if norm_weight else None
        )
        self.layer_norm_weight = nn.Parameter(torch.empty(d)) if layer_norm else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """The parameters of the mixes as a new sublayer has them; F keeps its own."""
        n = self.n
        nn.init.normal_(self.fn, std=FN_STD)
        nn.init.constant_(self.scale, self.mean_init)
        self.base[:n].fill_(_even_logit(n, self.preset.pre_eps))
        self.base[n : 2 * n].fill_(_unit_logit(self.preset.post_mult))
        self.base[2 * n :].fill_(0.0)
        self.base[2 * n :].view(n, n).diagonal().fill_(DIAGONAL)
        for weight in (self.norm_weight, self.layer_norm_weight):
            if weight is not None:
                nn.init.ones_(weight)

    def forward(self, residual, *args, **kwargs):
        if self.form == "single_pass":
            streams, pre_mix = residual
            x, mix, next_pre = self._entry(mhc_pre_delayed, streams, pre_mix=pre_mix)
            y, extra = self._run(x, args, kwargs)
            pair = mhc_post(y, streams, *mix), next_pre
            return (pair, *extra) if extra else pair
        x, mix = self._entry(mhc_pre, residual)
        y, extra = self._run(x, args, kwargs)
        new = mhc_post(y, residual, *mix)
        return (new, *extra) if extra else new

    def _entry(self, function, residual, **more):
        with_norm = self.layer_norm_weight is not None
        return function(
            residual,
            self.fn,
            self.scale,
            self.base,
            norm_weight=self.norm_weight,
            layer_norm_weight=self.layer_norm_weight,
            layer_norm_eps=self.layer_norm_eps if with_norm else None,
            preset=self.preset,
            **more,
        )

    def _run(self, x, args, kwargs):
        made = self.F(x, *args, **kwargs)
        return (made[0], made[1:]) if isinstance(made, tuple) else (made, ())

    def extra_repr(self):
        return f"d={self.d}, n={self.n}, form={self.form!r}, repeat={self.preset.repeat}"


class MhcExpand(nn.Module):
    """[..., d] to n equal streams [..., n, d]."""

    def __init__(self, n=4):
        super().__init__()
        self.n = n

    def forward(self, x):
        return expand_to_mhc(x, self.n)

    def extra_repr(self):
        return f"n={self.n}"


class MhcHead(_Coefficients):
    """The streams collapsed by mixes of their own, at first their mean: [..., n, d] -> [..., d]."""

    def __init__(self, d, n=4, *, preset="train", mean_init=0.01):
        super().__init__()
        self.d, self.n, self.preset, self.mean_init = d, n, presets.find(preset), mean_init
        self.fn = nn.Parameter(torch.empty(n, n * d, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(1, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(n, dtype=torch.float32))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        nn.init.normal_(self.fn, std=FN_STD)
        nn.init.constant_(self.scale, self.mean_init)
        nn.init.constant_(self.base, _even_logit(self.n, self.preset.pre_eps))

    def forward(self, residual):
        return mhc_head(
            residual,
            self.fn,
            self.scale,
            self.base,
            rms_eps=self.preset.rms_eps,
            pre_eps=self.preset.pre_eps,
            rms=self.preset.rms,
        )

    def extra_repr(self):
        return f"d={self.d}, n={self.n}"


class MhcMean(nn.Module):
    """The mean of the streams: [..., n, d] -> [..., d]."""

    def forward(self, residual):
        return mhc_mean(residual)


def _even_logit(n, pre_eps):
    """u with sigmoid(u) + pre_eps = 1/n."""
    share = 1 / n - pre_eps
    return SATURATED if n == 1 else math.log(share / (1 - share))


def _unit_logit(post_mult):
    """u with post_mult * sigmoid(u) = 1."""
    return -math.log(post_mult - 1) if post_mult > 1 else SATURATED
