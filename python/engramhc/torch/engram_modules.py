"""Modules of Engram: the layer from token ids to updated streams, and a trainable table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engramhc.errors import ShapeError
from engramhc.tables import HashLayout

from .engram import engram_gate, engram_gather, engram_hash_ids, engram_layer
from .lookups import lookup

MACHINE_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class EngramConfig:
    """What an Engram layer computes. `demo`, `paper` and `deepseek_v41` are those of published models;
    `dataclasses.replace` changes one."""

    d: int
    n: int
    layout: HashLayout
    token_map: Any  # text.TokenMap, or None for ids that need none
    eps: float  # of the gate's norms
    clamp: float
    bias: bool  # of the projection to keys and value
    conv_width: int = 0  # taps; 0: no convolution
    dilation: int | None = None
    conv_eps: float | None = None

    @classmethod
    def demo(cls, token_map, d, n=4, *, layout=None):
        """Of the public demo: biases, and a convolution whose dilation is the largest n-gram."""
        layout = layout or HashLayout.demo(token_map.size)
        return cls(d, n, layout, token_map, MACHINE_EPS, 1e-6, True, 4, layout.max_ngram, 1e-5)

    @classmethod
    def paper(cls, token_map, d, n=4, *, layout=None):
        """The demo's gate and convolution, without biases."""
        layout = layout or HashLayout.demo(token_map.size)
        return cls(d, n, layout, token_map, MACHINE_EPS, 1e-6, False, 4, layout.max_ngram, 1e-5)

    @classmethod
    def deepseek_v41(cls, config, token_map):
        """Of a DeepSeek-V4.1 config.json: no convolution, no bias."""
        fields = {**config, **config.get("text_config", {})}
        layout = HashLayout.deepseek(config)
        eps = float(fields["rms_norm_eps"])
        return cls(fields["hidden_size"], fields["hc_mult"], layout, token_map, eps, 1e-6, False)


class Engram(nn.Module):
    """Rows of a table by n-grams of token ids, projected to keys and a value, gated into the streams.

    forward(x, ids) or forward(x, rows=rows): x [..., n, d], ids [B, T] or [T] as the tokenizer makes
    them, rows [..., C*hd] where they were looked up before. `table` is a `tables.Table`, an
    EngramTable or a tensor [rows, hd]; `layer` one of the layout's layers, the first by default.
    `state` is that of the convolution, see `new_state`.
    """

    def __init__(self, config, table, *, layer=None):
        super().__init__()
        self.config = config
        self.layer = config.layout.layer_ids[0] if layer is None else layer
        position = config.layout.position(self.layer)
        self.table = table
        row = _width(table)
        columns = len(config.layout.offsets[position])
        n, d = config.n, config.d
        self.wkv = nn.Linear(columns * row, (n + 1) * d, bias=config.bias)
        self.q_weight = nn.Parameter(torch.empty(n, d))
        self.k_weight = nn.Parameter(torch.empty(n, d))
        if config.conv_width:
            self.conv_weight = nn.Parameter(torch.empty(n, d, config.conv_width))
            self.conv_norm_weight = nn.Parameter(torch.empty(n, d))
        else:
            self.register_parameter("conv_weight", None)
            self.register_parameter("conv_norm_weight", None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Weights of norms are 1, the convolution is 0; the projection is that of nn.Linear."""
        self.wkv.reset_parameters()
        nn.init.ones_(self.q_weight)
        nn.init.ones_(self.k_weight)
        if self.conv_weight is not None:
            nn.init.zeros_(self.conv_weight)
            nn.init.ones_(self.conv_norm_weight)

    def rows_of(self, ids, *, image_token_mask=None, cu_seqlens=None, history=None):
        """Rows of the table that token ids address, [..., C]; needs nothing but the ids."""
        return engram_hash_ids(
            ids,
            self.config.token_map,
            self.config.layout,
            layer=self.layer,
            cu_seqlens=cu_seqlens,
            history=history,
            image_token_mask=image_token_mask,
        )

    def new_state(self, sequences, *, device=None):
        """The state of the convolution before the first token, None without one."""
        c = self.config
        if not c.conv_width:
            return None
        shape = sequences, (c.conv_width - 1) * c.dilation, c.n, c.d
        return torch.zeros(shape, dtype=torch.float32, device=device or self.q_weight.device)

    def forward(
        self,
        x,
        ids=None,
        *,
        rows=None,
        image_token_mask=None,
        cu_seqlens=None,
        history=None,
        state=None,
    ):
        if (ids is None) == (rows is None):
            raise TypeError("Engram.forward() needs either ids or rows")
        if rows is None:
            found = self.rows_of(
                ids, image_token_mask=image_token_mask, cu_seqlens=cu_seqlens, history=history
            )
            rows = lookup(self.table, found)
        return self._gated(x, self._projected(x, rows), image_token_mask, cu_seqlens, state)

    def _projected(self, x, rows):
        """kv [..., n+1, d] in the type of the streams, which autocast does not change."""
        if rows.shape[:-1] != x.shape[:-2]:
            raise ShapeError(
                f"Engram: tensor 'rows': expected leading dimensions {list(x.shape[:-2])}, got {list(rows.shape[:-1])}"
            )
        with torch.autocast(x.device.type, enabled=False):
            kv = self.wkv(rows.to(self.wkv.weight.dtype))
        return kv.to(x.dtype).unflatten(-1, (self.config.n + 1, self.config.d))

    def _gated(self, x, kv, image_token_mask, cu_seqlens, state):
        c = self.config
        gate = {"eps": c.eps, "clamp": c.clamp, "image_token_mask": image_token_mask}
        if self.conv_weight is None:
            return engram_gate(x, kv, self.q_weight, self.k_weight, **gate)
        return engram_layer(
            x,
            kv,
            self.q_weight,
            self.k_weight,
            self.conv_weight,
            self.conv_norm_weight,
            **gate,
            conv_eps=c.conv_eps,
            dilation=c.dilation,
            cu_seqlens=cu_seqlens,
            state=state,
        )

    def extra_repr(self):
        c = self.config
        return f"d={c.d}, n={c.n}, layer={self.layer}, conv_width={c.conv_width}"


class EngramTable(nn.Module):
    """A trainable table [rows, hd]; forward(idx [..., C]) -> [..., C*hd].

    Its gradient holds the rows that were asked for alone, unless `sparse_grad` is False. Rows start
    as normal(0, 0.02).
    """

    def __init__(self, rows, hd, *, dtype=torch.float32, sparse_grad=True):
        super().__init__()
        self.sparse_grad = sparse_grad
        self.weight = nn.Parameter(torch.empty(rows, hd, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, idx):
        return engram_gather(self.weight, idx, sparse_grad=self.sparse_grad)

    def extra_repr(self):
        rows, hd = self.weight.shape
        return f"rows={rows}, hd={hd}, sparse_grad={self.sparse_grad}"


def _width(table):
    """hd of a table."""
    if isinstance(table, EngramTable):
        return table.weight.shape[1]
    return table.shape[1] if isinstance(table, torch.Tensor) else table.dim
