"""All functions in one graph through inductor, in one process: the bits of eager mode."""

import torch
from cases import CASES, Sizes, loss, requiring, run
from support import same

SIZES = Sizes((4,), 2, 6)


def test_inductor():
    torch._inductor.config.cpp.vec_isa_ok = True  # the probe of the processor takes half a minute
    names = ["mhc_pre", "mhc_post", "engram_gate", "engram_layer", "mhc_fused_post_pre_delayed"]
    tensors = {name: CASES[name].tensors(torch.float32, SIZES) for name in names}

    def every(given):
        return [[2 * o + 1 for o in run(CASES[name], given[name])] for name in names]

    leaves = {name: requiring(given) for name, given in tensors.items()}
    expected = every(leaves)
    loss([o for outputs in expected for o in outputs]).backward()
    mine = {name: requiring(given) for name, given in tensors.items()}
    outputs = torch.compile(every, fullgraph=True)(mine)
    for a, b in zip(sum(outputs, []), sum(expected, []), strict=True):
        same(a.detach(), b.detach())
    loss([o for found in outputs for o in found]).backward()
    for name in names:
        for which, leaf in leaves[name].items():
            if leaf.grad is not None:
                torch.testing.assert_close(mine[name][which].grad, leaf.grad, rtol=1e-6, atol=1e-6)
