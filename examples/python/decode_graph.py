"""Decoding with one CUDA graph a token: the streams of several layers, captured without a warm-up.

    python examples/python/decode_graph.py
"""

import sys
import time

import engramhc.torch as ehc
import torch
from engramhc import presets

D, STREAMS, LAYERS, BATCH, TOKENS = 2048, 4, 8, 4, 200


class Layer:
    """Weights of a sublayer; its function is one matrix here."""

    def __init__(self):
        mixes = STREAMS * STREAMS + 2 * STREAMS
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.fn = torch.randn(mixes, STREAMS * D, device="cuda") * 0.02
        self.scale, self.base = torch.full((3,), 0.01, device="cuda"), torch.zeros(mixes, device="cuda")
        self.norm = torch.ones(D, **options)
        self.matrix = torch.randn(D, D, **options) * D**-0.5


def step(layers, x):
    """One token of each sequence, x [BATCH, D], through all layers."""
    options = {"preset": presets.deepseek_v4, "layer_norm_eps": 1e-6}
    first = layers[0]
    residual, mix, row = ehc.mhc_pre_broadcast(
        x, first.fn, first.scale, first.base, layer_norm_weight=first.norm, **options
    )
    for layer, following in zip(layers, layers[1:]):
        residual, mix, row = ehc.mhc_fused_post_pre(
            row @ layer.matrix, residual, *mix, following.fn, following.scale, following.base,
            layer_norm_weight=following.norm, **options,
        )  # fmt: skip
    return ehc.mhc_mean(ehc.mhc_post(row @ layers[-1].matrix, residual, *mix))


def seconds(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(TOKENS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / TOKENS


@torch.no_grad()
def main():
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to show")
        return 0
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    x = torch.randn(BATCH, D, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(layers, x)
    for _ in range(3):
        x.copy_(torch.randn(BATCH, D, device="cuda"))
        graph.replay()
        if not torch.equal(out, step(layers, x)):
            print("replay and eager mode differ")
            return 1
    print(f"replays have the bits of eager mode; a token takes {seconds(graph.replay) * 1e6:.0f} us by the graph, "
          f"{seconds(lambda: step(layers, x)) * 1e6:.0f} us eagerly")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
