"""Modules: what they compute, how they start, what their state_dict holds."""

import copy

import engramhc
import engramhc.torch as ehc
import pytest
import torch
from engramhc import presets
from support import same
from torch import nn

D = 16


class Mlp(nn.Module):
    def __init__(self, d=D):
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x, scale=1.0):
        return scale * self.down(torch.nn.functional.gelu(self.up(x)))


def sublayer(**options):
    torch.manual_seed(0)
    return ehc.MhcSublayer(Mlp(), D, **options)


def shaken(module):
    """A module whose parameters are no longer those of the start."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def test_sublayer_is_its_functions():
    block = shaken(sublayer(layer_norm=True, norm_weight=True))
    residual = torch.randn(2, 5, 4, D)
    x, mix = ehc.mhc_pre(
        residual, block.fn, block.scale, block.base, norm_weight=block.norm_weight, preset="train",
        layer_norm_weight=block.layer_norm_weight, layer_norm_eps=1e-6,
    )  # fmt: skip
    expected = ehc.mhc_post(block.F(x, scale=2.0), residual, *mix)
    same(block(residual, scale=2.0).detach(), expected.detach())


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("preset", ["train", "repo", "paper"])
def test_a_new_sublayer_is_a_plain_residual(n, preset):
    """Before anything is learnt: the mean of the streams goes in, the output to all of them."""
    torch.manual_seed(0)
    block = ehc.MhcSublayer(nn.Identity(), D, n, preset=preset, mean_init=0.0)
    row = torch.randn(3, D)
    new = block(ehc.expand_to_mhc(row, n))
    # comb is doubly stochastic, so equal streams stay equal; pre and post are 1/n and 1.
    tolerance = 6e-3 if n == 1 or preset == "repo" else 1e-4
    torch.testing.assert_close(new, ehc.expand_to_mhc(2 * row, n), rtol=tolerance, atol=tolerance)


def test_initial_values():
    block = sublayer(mean_init=0.01)
    assert block.fn.std().item() == pytest.approx(0.02, rel=0.1)
    assert block.scale.tolist() == pytest.approx([0.01] * 3)
    base = block.base.detach()
    torch.testing.assert_close(torch.sigmoid(base[:4]) + 1e-6, torch.full((4,), 0.25))
    torch.testing.assert_close(2 * torch.sigmoid(base[4:8]), torch.ones(4))
    same(base[8:].view(4, 4), 4 * torch.eye(4))
    assert ehc.MhcSublayer(nn.Identity(), D, 1).base[0] == 6


@pytest.mark.parametrize("options", [{}, {"layer_norm": True, "norm_weight": True}], ids=["plain", "norms"])
def test_state_dict_of_a_sublayer(options):
    block = shaken(sublayer(**options))
    names = {"fn", "scale", "base", "F.up.weight", "F.up.bias", "F.down.weight", "F.down.bias"}
    if options:
        names |= {"norm_weight", "layer_norm_weight"}
    state = block.state_dict()
    assert set(state) == names
    other = sublayer(**options)
    other.load_state_dict(state)
    residual = torch.randn(3, 4, D)
    same(other(residual).detach(), block(residual).detach())


def test_coefficients_stay_fp32():
    block = sublayer(layer_norm=True).to(torch.bfloat16)
    assert {n for n, p in block.named_parameters() if p.dtype is torch.float32} == {"fn", "scale", "base"}
    block(torch.randn(3, 4, D).bfloat16()).sum().backward()
    block.half()
    assert block.fn.grad.dtype is torch.float32 and block.F.up.weight.dtype is torch.float16
    assert ehc.MhcHead(D).bfloat16().fn.dtype is torch.float32


def test_extra_outputs_of_f():
    class Two(nn.Module):
        def forward(self, x):
            return x, x.sum()

    residual = torch.randn(3, 4, D)
    new, total = ehc.MhcSublayer(Two(), D)(residual)
    assert new.shape == residual.shape and total.dim() == 0
    (pair, total) = ehc.MhcSublayer(Two(), D, form="single_pass")((residual, None))
    assert pair[0].shape == residual.shape and pair[1].shape == (3, 4)


def test_single_pass_is_the_seam():
    """Two sublayers one after the other have the bits of the fused seam between them."""
    first, second = shaken(sublayer(form="single_pass")), shaken(sublayer(form="single_pass"))
    residual, pre_mix = torch.randn(3, 4, D), torch.rand(3, 4)
    streams, handed = first((residual, pre_mix))
    new, last = second((streams, handed))
    x, mix, pre = ehc.mhc_pre_delayed(residual, first.fn, first.scale, first.base, pre_mix=pre_mix, preset="train")
    seam_residual, x2, mix2, pre2 = ehc.mhc_fused_post_pre_delayed(
        first.F(x), residual, *mix, second.fn, second.scale, second.base, pre_mix=pre, preset="train"
    )
    same(streams.detach(), seam_residual.detach())
    same(last.detach(), pre2.detach())
    same(new.detach(), ehc.mhc_post(second.F(x2), seam_residual, *mix2).detach())


def test_entry_and_exits():
    x = torch.randn(3, D)
    residual = ehc.MhcExpand(4)(x)
    assert residual.shape == (3, 4, D)
    torch.testing.assert_close(ehc.MhcMean()(residual), x)
    head = ehc.MhcHead(D)
    torch.testing.assert_close(head(residual), x, rtol=2e-2, atol=2e-2)  # its scale is 0.01, not 0
    assert set(head.state_dict()) == {"fn", "scale", "base"}
    assert head.fn.shape == (4, 4 * D) and head.scale.shape == (1,) and head.base.shape == (4,)


def test_meta_construction():
    with torch.device("meta"):
        block, head, table = sublayer(layer_norm=True), ehc.MhcHead(D), ehc.EngramTable(10, 4)
    assert {p.device.type for m in (block, head, table) for p in m.parameters()} == {"meta"}
    block = block.to_empty(device="cpu")
    block.load_state_dict(sublayer(layer_norm=True).state_dict())
    assert block(torch.randn(3, 4, D)).shape == (3, 4, D)


def test_unknown_form_and_preset():
    with pytest.raises(engramhc.ArgumentError, match="'form'"):
        ehc.MhcSublayer(nn.Identity(), D, form="else")
    with pytest.raises(ValueError, match="preset"):
        ehc.MhcSublayer(nn.Identity(), D, preset="else")


# --- recompute ------------------------------------------------------------------------------------


def stack(count=5, **options):
    torch.manual_seed(1)
    return [shaken(ehc.MhcSublayer(Mlp(), D, **options)) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"layer_norm": True, "norm_weight": True}], ids=["plain", "norms"])
def test_recompute_changes_no_bit(options, dtype):
    plain = nn.Sequential(*stack(**options)).to(dtype)
    again = ehc.MultiLayerRecompute(stack(**options), ehc.mhc_recompute_plan(5, 4)).to(dtype)
    residual = torch.randn(40, 4, D).to(dtype)  # enough for saved state
    leaves = [residual.clone().requires_grad_() for _ in range(2)]
    outputs = [module(leaf) for module, leaf in zip((plain, again), leaves)]
    same(*outputs)
    upstream = torch.randn(40, 4, D).to(dtype)
    for output in outputs:
        output.backward(upstream)
    same(leaves[0].grad, leaves[1].grad)
    for a, b in zip(plain.parameters(), again.parameters(), strict=True):
        same(a.grad, b.grad)


def test_recompute_twice_and_without_gradients():
    again = ehc.MultiLayerRecompute(stack(4))
    residual = torch.randn(3, 4, D).requires_grad_()
    out = again(residual)
    first = torch.autograd.grad(out.sum(), residual, retain_graph=True)[0]
    same(torch.autograd.grad(out.sum(), residual)[0], first)
    with torch.no_grad():
        same(again(residual), out.detach())


def test_recompute_keeps_less():
    """Saved bytes of tensors of residual size: one for each block instead of one for each layer."""

    def kept(module, residual):
        sizes = {}

        def pack(tensor):
            if tensor.shape == residual.shape:
                sizes[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = module(residual)
        return len(sizes), out

    residual = torch.randn(40, 4, D).requires_grad_()
    plan = ehc.mhc_recompute_plan(6, 4)
    many, _ = kept(nn.Sequential(*stack(6)), residual)
    assert many == 6
    # The block's own hooks take the place of the outer ones; what they keep is asked of them.
    from engramhc.torch import multilayer

    again = ehc.MultiLayerRecompute(stack(6), plan)
    count, before = [], multilayer._Block.pack

    def pack(self, tensor):
        packed = before(self, tensor)
        if isinstance(packed, torch.Tensor) and packed.shape == residual.shape:
            count.append(packed.untyped_storage().data_ptr())
        return packed

    multilayer._Block.pack = pack
    try:
        again(residual).sum().backward()
    finally:
        multilayer._Block.pack = before
    assert len(set(count)) == len(plan.block_starts) < 6


def test_recompute_takes_classic_sublayers():
    with pytest.raises(engramhc.UnsupportedError, match="classic"):
        ehc.MultiLayerRecompute([sublayer(form="single_pass")])


def test_a_stack_trains():
    torch.manual_seed(0)
    layers = [ehc.MhcSublayer(Mlp(), D, preset=presets.train, layer_norm=True) for _ in range(3)]
    model = nn.Sequential(ehc.MhcExpand(4), *layers, ehc.MhcHead(D), nn.Linear(D, 1))
    x = torch.randn(64, D)
    y = x[:, :1] * x[:, 1:2]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    same(copy.deepcopy(model)(x).detach(), model(x).detach())
