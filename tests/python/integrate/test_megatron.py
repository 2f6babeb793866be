"""HyperConnectionModule with Megatron-LM's methods, against its formulas in torch."""

import types

import pytest

torch = pytest.importorskip("torch")

from engramhc.errors import ArgumentError, UnsupportedError  # noqa: E402
from engramhc.integrate.megatron import HyperConnectionModule  # noqa: E402

S, B, N, C = 3, 2, 4, 24
CONFIG = types.SimpleNamespace(
    num_residual_streams=N,
    hidden_size=C,
    mhc_sinkhorn_iterations=7,
    mhc_init_gating_factor=0.3,
    sequence_parallel=True,
)


@pytest.fixture(params=["megatron", "deepseek"])
def module(request):
    torch.manual_seed(1)
    module = HyperConnectionModule(CONFIG, 2, convention=request.param)
    with torch.no_grad():
        module.bias.normal_()
    return module


def numbers(*shape):
    return torch.randn(shape, requires_grad=True)


def mappings(module, x):
    """The same in float64."""
    x = x.double()
    rms = 1 / (x.norm(dim=-1, keepdim=True) / (N * C) ** 0.5 + 1e-6)
    alpha = torch.cat(
        [module.alpha_pre.expand(N), module.alpha_post.expand(N), module.alpha_res.expand(N * N)]
    )
    h = rms * (x @ module.mapping_proj.weight.double().T) * alpha.double() + module.bias.double()
    h_res = h[..., 2 * N :].unflatten(-1, (N, N))
    if module.convention == "megatron":
        h_res = torch.exp(h_res - h_res.amax(-1, keepdim=True))
        for _ in range(7):
            h_res = h_res / h_res.sum(-1, keepdim=True).clamp(min=1e-6)
            h_res = h_res / h_res.sum(-2, keepdim=True).clamp(min=1e-6)
        return h[..., :N].sigmoid(), 2 * h[..., N : 2 * N].sigmoid(), h_res
    h_res = h_res.softmax(-1) + 1e-6
    h_res = h_res / (h_res.sum(-2, keepdim=True) + 1e-6)
    for _ in range(6):
        h_res = h_res / (h_res.sum(-1, keepdim=True) + 1e-6)
        h_res = h_res / (h_res.sum(-2, keepdim=True) + 1e-6)
    return h[..., :N].sigmoid() + 1e-6, 2 * h[..., N : 2 * N].sigmoid(), h_res


def close(got, expected):
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_forward_and_the_parts_of_it(module):
    x = numbers(S, B, N * C)
    h_pre, h_post, h_res = mappings(module, x)
    aggregated, got_res, got_post = module(x)
    close(got_res, h_res)
    close(got_post, h_post)
    close(aggregated, (x.double().unflatten(-1, (N, C)) * h_pre.unsqueeze(-1)).sum(2))
    for got, expected in zip(module.compute_mappings(x), (h_pre, h_post, h_res)):
        close(got, expected)
    close(module.aggregate(x, h_pre.float()), aggregated.double())


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_sublayer_with_gradients(module, with_bias):
    """Forward, a layer, and the fused step behind it, there and back."""
    x, weight = numbers(S, B, N * C), numbers(C, C)
    bias = numbers(C) if with_bias else None
    inputs = [x, weight, *([bias] if with_bias else []), *module.parameters()]

    aggregated, h_res, h_post = module(x)
    output = (torch.tanh(aggregated @ weight), bias)
    got = module.fused_h_res_h_post_bda(h_res, x, h_post, output, 0.1, False, True)

    h_pre, h_post, h_res = mappings(module, x)
    streams = x.double().unflatten(-1, (N, C))
    row = torch.tanh((streams * h_pre.unsqueeze(-1)).sum(2) @ weight.double())
    row = row if bias is None else row + bias.double()
    mixed = torch.einsum("sbio,sbic->sboc", h_res, streams)
    expected = (mixed + h_post.unsqueeze(-1) * row.unsqueeze(2)).flatten(-2)
    close(got, expected)

    direction = torch.randn(S, B, N * C)
    for mine, theirs in zip(
        torch.autograd.grad((got * direction).sum(), inputs),
        torch.autograd.grad((expected * direction.double()).sum(), inputs),
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_unfused_steps(module):
    x, row, bias = numbers(S, B, N * C), numbers(S, B, C), numbers(C)
    _, h_res, h_post = module(x)
    mixed = torch.einsum("sbio,sbic->sboc", h_res, x.unflatten(-1, (N, C))).flatten(-2)
    close(module.apply_h_res(h_res, x), mixed.double())
    expanded, expanded_bias = module.apply_h_post((row, bias), h_post)
    close(expanded, (h_post.unsqueeze(-1) * row.unsqueeze(2)).flatten(-2).double())
    close(expanded_bias, (h_post.unsqueeze(-1) * bias).flatten(-2).double())
    assert module.apply_h_post((row, None), h_post)[1] is None


def test_dropout_falls_on_the_layer_alone(module):
    x, row = numbers(S, B, N * C), numbers(S, B, C)
    _, h_res, h_post = module(x)
    all_dropped = module.fused_h_res_h_post_bda(h_res, x, h_post, (row, None), 1.0, True, False)
    close(all_dropped, module.apply_h_res(h_res, x).double())
    some = module.fused_h_res_h_post_bda(h_res, x, h_post, (row, None), 0.5, True, False)
    added = some - all_dropped
    assert 0.2 < (added.abs() < 1e-6).float().mean() < 0.8


def test_ends_of_the_stack():
    row = torch.randn(S, B, C)
    streams = HyperConnectionModule.input_expand(row, N)
    assert streams.shape == (S, B, N * C)
    assert torch.equal(streams.unflatten(-1, (N, C))[:, :, 2], row)
    x = torch.randn(S, B, N * C)
    close(HyperConnectionModule.output_contract(x, N), x.double().unflatten(-1, (N, C)).mean(2))


def test_parameters_are_those_of_its_checkpoints():
    module = HyperConnectionModule(CONFIG, 1)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {
        "mapping_proj.weight": (24, N * C),
        "alpha_pre": (1,),
        "alpha_post": (1,),
        "alpha_res": (1,),
        "bias": (24,),
    }
    assert all(p.sequence_parallel for p in module.parameters())


def test_what_is_refused():
    with pytest.raises(ArgumentError, match="'convention': expected megatron or deepseek, got 'log'"):
        HyperConnectionModule(CONFIG, 1, convention="log")
    module = HyperConnectionModule(CONFIG, 1)
    with pytest.raises(UnsupportedError, match="mhc_recompute_manager"):
        module(torch.randn(S, B, N * C), object())
