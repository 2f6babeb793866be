"""A tiny transformer with mHC residuals, with and without an Engram layer, on real text.

    python examples/python/train_tiny.py [--steps 300] [--text FILE]

Both models see the same batches and have the same number of parameters outside the table: what the
Engram layer takes, the other model has in wider MLPs. The text is Python's own documentation unless
FILE names another; tokens are its words. About a minute on two cores.
"""

import argparse
import collections
import math
import pydoc_data.topics
import re
import time

import engramhc.torch as ehc
import torch
import torch.nn.functional as F
from engramhc.tables import HashLayout
from torch import nn

D, STREAMS, HEADS, LAYERS, WINDOW, BATCH, VOCAB = 48, 2, 4, 2, 32, 8, 1024
ROW = 16  # width of a row of the table


def words(text):
    """Ids of the words of a text: the most frequent ones, and 0 for all others."""
    tokens = re.findall(r"\w+|[^\w\s]|\n+", text.lower())
    known = [word for word, _ in collections.Counter(tokens).most_common(VOCAB - 1)]
    ids = {word: i for i, word in enumerate(known, start=1)}
    return torch.tensor([ids.get(word, 0) for word in tokens])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):  # [B, T, D]
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D // HEADS)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def mlp(hidden):
    return nn.Sequential(nn.Linear(D, hidden), nn.GELU(), nn.Linear(hidden, D))


class Model(nn.Module):
    def __init__(self, layout=None, hidden=4 * D):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, D), nn.Embedding(WINDOW, D)
        nn.init.normal_(self.embed.weight, std=0.05)
        nn.init.normal_(self.place.weight, std=0.05)
        self.expand = ehc.MhcExpand(STREAMS)
        self.engram = None
        if layout is not None:
            config = ehc.EngramConfig.paper(None, D, STREAMS, layout=layout)
            self.engram = ehc.Engram(config, ehc.EngramTable(layout.rows[0], ROW))
        parts = [part for _ in range(LAYERS) for part in (Attention(), mlp(hidden))]
        self.sublayers = nn.ModuleList(
            ehc.MhcSublayer(part, D, STREAMS, layer_norm=True) for part in parts
        )
        self.head, self.logits = ehc.MhcHead(D, STREAMS), nn.Linear(D, VOCAB)

    def forward(self, ids):  # [B, T] -> [B, T, VOCAB]
        x = self.expand(self.embed(ids) + self.place.weight)
        for i, sublayer in enumerate(self.sublayers):
            if i == 2 and self.engram is not None:
                x = self.engram(x, ids)
            x = sublayer(x)
        return self.logits(F.rms_norm(self.head(x), (D,)))

    def dense(self):
        """Parameters outside the table."""
        return sum(p.numel() for name, p in self.named_parameters() if "table" not in name)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(model, ids, steps, name):
    """The loss on text that it has not seen."""
    held_out = ids[-len(ids) // 10 :]
    held_out = held_out[: len(held_out) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
    ids = ids[: -len(ids) // 10]
    tables = [p for n, p in model.named_parameters() if "table" in n]
    others = [p for n, p in model.named_parameters() if "table" not in n]
    optimizers = [torch.optim.AdamW(others, 3e-3)]
    if tables:
        optimizers.append(torch.optim.SparseAdam(tables, 1e-2))
    generator, start = torch.Generator().manual_seed(0), time.time()
    for step in range(1, steps + 1):
        begins = torch.randint(len(ids) - WINDOW - 1, (BATCH,), generator=generator)
        loss = loss_of(model, torch.stack([ids[b : b + WINDOW + 1] for b in begins]))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 50 == 0 or step == steps:
            print(f"{name}: step {step}, loss {loss.item():.3f}, {time.time() - start:.0f} s", flush=True)
    with torch.no_grad():
        return sum(loss_of(model, b).item() * len(b) for b in held_out.split(32)) / len(held_out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text")
    options = parser.parse_args()
    if options.text:
        with open(options.text, encoding="utf-8") as file:
            text = file.read()
    else:
        text = "\n".join(pydoc_data.topics.topics.values())
    ids = words(text)
    layout = HashLayout.demo(VOCAB, layer_ids=[1], sizes=[20000, 20000], heads=2, pad_id=0)

    torch.manual_seed(0)
    memory = Model(layout)
    torch.manual_seed(0)
    wider = 4 * D + math.ceil((memory.dense() - Model().dense()) / (LAYERS * (2 * D + 1)))
    plain = Model(hidden=wider)
    print(f"{len(ids)} words; parameters outside the table: {memory.dense()} with Engram, {plain.dense()} without")
    losses = {name: train(model, ids, options.steps, name) for name, model in (("without", plain), ("with", memory))}
    print(f"held-out loss: {losses['without']:.3f} without Engram, {losses['with']:.3f} with it")


if __name__ == "__main__":
    main()
