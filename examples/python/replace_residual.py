"""An existing transformer gets mHC in place of its residual sums; its modules stay as they are.

    python examples/python/replace_residual.py
"""

import engramhc.torch as ehc
import torch
from torch import nn


class Block(nn.Module):
    """What one may find: a residual sum around attention and around an MLP."""

    def __init__(self, d, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def attend(self, x):
        x = self.norm1(x)
        return self.attention(x, x, x, need_weights=False)[0]

    def think(self, x):
        return self.mlp(self.norm2(x))

    def forward(self, x):
        x = x + self.attend(x)
        return x + self.think(x)


class Part(nn.Module):
    """One of the functions of a block, as the module that a sublayer wraps."""

    def __init__(self, block, name):
        super().__init__()
        self.block, self.name = block, name

    def forward(self, x):
        return getattr(self.block, self.name)(x)


def with_streams(blocks, d, n=4):
    """The same blocks with n residual streams."""
    parts = [Part(block, name) for block in blocks for name in ("attend", "think")]
    sublayers = [ehc.MhcSublayer(part, d, n) for part in parts]
    return nn.Sequential(ehc.MhcExpand(n), *sublayers, ehc.MhcMean())


def main():
    torch.manual_seed(0)
    d = 32
    blocks = nn.ModuleList(Block(d, 4) for _ in range(3))
    model = with_streams(blocks, d)
    x = torch.randn(2, 10, d)

    before = x
    for block in blocks:
        before = block(before)
    after = model(x)
    # At the start the coefficients are nearly those of a plain residual sum.
    change = (after - before).norm() / (before - x).norm()
    print(f"a new model differs from the one with residual sums by {change:.1%} of what the layers add")

    after.square().mean().backward()
    mixes = [p for name, p in model.named_parameters() if name.endswith(("fn", "scale", "base"))]
    learning = sum(bool(p.grad.any()) for p in mixes)
    print(f"gradients reach {learning} of {len(mixes)} parameters of the mixes, and the blocks' own: "
          f"{all(p.grad is not None for p in blocks.parameters())}")  # fmt: skip


if __name__ == "__main__":
    main()
