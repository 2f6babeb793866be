"""What is accepted, what is refused and in which words, in eager mode and while tracing."""

import engramhc
import engramhc.torch as ehc
import pytest
import torch
from cases import CASES, MIX, Sizes, requiring, run
from support import same

T, N, D = 3, 2, 4


def streams(**changes):
    given = {
        "layer_output": torch.randn(T, D),
        "residual": torch.randn(T, N, D),
        "post": torch.rand(T, N),
        "comb": torch.rand(T, N, N),
    }
    return {**given, **changes}


def entry(**changes):
    given = {
        "residual": torch.randn(T, N, D),
        "fn": torch.randn(8, N * D),
        "scale": torch.ones(3),
        "base": torch.zeros(8),
    }
    return {**given, **changes}


def gate(**changes):
    given = {
        "x": torch.randn(T, N, D),
        "kv": torch.randn(T, N + 1, D),
        "weight_hidden": torch.rand(N, D),
        "weight_embed": torch.rand(N, D),
    }
    return {**given, **changes}


REFUSED = [
    (ehc.mhc_post, streams(comb=torch.rand(T, N, 3)), engramhc.ShapeError, "mhc_post: tensor 'comb'"),
    (ehc.mhc_post, streams(comb=torch.rand(T, N * N)), engramhc.ShapeError, r"comb is \[input stream"),
    (ehc.mhc_post, streams(post=torch.rand(T, 3)), engramhc.ShapeError, "mhc_post: tensor 'post'"),
    (ehc.mhc_post, streams(post=None), engramhc.DTypeError, "mhc_post: tensor 'post'.*got none"),
    (ehc.mhc_post, streams(residual=[1.0]), (engramhc.DTypeError, AttributeError), "."),
    (ehc.mhc_post, streams(layer_output=torch.rand(T, 5)), engramhc.ShapeError, "tensor '(layer_output|residual)'"),
    (ehc.mhc_post, streams(post=torch.rand(T, N).double()), engramhc.DTypeError, "tensor 'post': expected F32"),
    (ehc.mhc_post, streams(residual=torch.rand(T, N, D).double()), engramhc.DTypeError, "F64"),
    (ehc.mhc_post, streams(residual=torch.ones(T, N, D, dtype=torch.int32)), engramhc.DTypeError, "I32"),
    (ehc.mhc_post, streams(residual=torch.rand(T, 9, D)), engramhc.ShapeError, "n in"),
    (lambda **t: ehc.mhc_pre(**t, **MIX), entry(fn=torch.randn(7, 8)), engramhc.ShapeError, "mhc_pre: tensor 'fn'"),
    (lambda **t: ehc.mhc_pre(**t, **MIX), entry(fn=torch.randn(8, 8).bfloat16()), engramhc.DTypeError, "mhc_pre: tensor 'fn'"),
    (lambda **t: ehc.mhc_pre(**t, **MIX), entry(scale=torch.ones(2)), engramhc.ShapeError, "mhc_pre: tensor 'scale'"),
    (lambda **t: ehc.mhc_pre(**t, **MIX), entry(residual=torch.randn(T)), engramhc.ShapeError, "mhc_pre: "),
    (lambda **t: ehc.mhc_pre(**t, **{**MIX, "rms_eps": 0.0}), entry(), engramhc.ArgumentError, "attribute 'rms_eps'"),
    (lambda **t: ehc.mhc_pre(**t, **{**MIX, "repeat": 65}), entry(), engramhc.ArgumentError, "attribute 'repeat'"),
    (lambda **t: ehc.mhc_pre(**t, **MIX, convention="else"), entry(), engramhc.ArgumentError, "convention"),
    (lambda **t: ehc.mhc_pre(**t, rms_eps=1e-6), entry(), TypeError, "mhc_pre.*(pre_eps|post_mult)"),
    (lambda **t: ehc.mhc_pre(**t, **MIX, layer_norm_weight=torch.ones(D)), entry(), TypeError, "layer_norm_eps"),
    (lambda **t: ehc.mhc_pre(**t, **MIX, typo=1), entry(), TypeError, "typo"),
    (lambda **t: ehc.engram_gate(**t, eps=1e-6, clamp=1e-6), gate(kv=torch.rand(T, N, D)), engramhc.ShapeError, "engram_gate: tensor 'kv'"),
    (lambda **t: ehc.engram_gate(**t, eps=1e-6, clamp=0.0), gate(), engramhc.ArgumentError, "engram_gate: attribute 'clamp'"),
    (lambda **t: ehc.engram_gate(**t, eps=1e-6, clamp=1e-6), gate(weight_embed=torch.rand(N, 5)), engramhc.ShapeError, "engram_gate: tensor 'weight_embed'"),
    (lambda **t: ehc.engram_gate(**t, eps=1e-6, clamp=1e-6), gate(kv=(torch.rand(T, N, D),)), engramhc.ShapeError, "engram_gate: tensor 'kv'"),
    (lambda **t: ehc.engram_gate(**t, eps=1e-6, clamp=1e-6, image_token_mask=torch.ones(T)), gate(), engramhc.DTypeError, "engram_gate: tensor 'image_token_mask'"),
    (ehc.engram_gather, {"table": torch.rand(4, 2), "idx": torch.tensor([[4]])}, engramhc.Error, "engram_gather: tensor 'idx'"),
    (ehc.engram_gather, {"table": torch.rand(4, 2), "idx": torch.ones(1, 1)}, engramhc.DTypeError, "engram_gather: tensor 'idx'"),
]  # fmt: skip


@pytest.mark.parametrize("function, arguments, kind, text", REFUSED)
def test_refused(function, arguments, kind, text):
    with pytest.raises(kind, match=text):
        function(**arguments)
    wanting = {
        n: t.clone().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for n, t in arguments.items()
    }
    with pytest.raises(kind, match=text):
        function(**wanting)


@pytest.mark.parametrize("function, arguments, text", [
    (ehc.mhc_post, streams(comb=torch.rand(T, N, 3)), "mhc_post: tensor 'comb'"),
    (lambda **t: ehc.mhc_pre(**t, **MIX), entry(fn=torch.randn(7, 8)), "mhc_pre: tensor 'fn'"),
])  # fmt: skip
def test_refused_while_tracing(function, arguments, text):
    torch._dynamo.reset()
    ran = []

    def backend(graph, inputs):
        ran.append(graph)
        return graph

    with pytest.raises(Exception, match=text):
        torch.compile(function, backend=backend, fullgraph=True)(**arguments)
    assert not ran


def test_in_place_needs_gradients_off():
    given = streams(residual=torch.randn(T, N, D).requires_grad_())
    with pytest.raises(engramhc.UnsupportedError, match="mhc_post: argument 'inplace'"):
        ehc.mhc_post(**given, inplace=True)
    wanted = gate(weight_hidden=torch.rand(N, D).requires_grad_())
    with pytest.raises(engramhc.UnsupportedError, match="engram_gate: argument 'inplace'"):
        ehc.engram_gate(**wanted, eps=1e-6, clamp=1e-6, inplace=True)


def test_in_place_and_out_give_the_same_bits():
    given = streams()
    expected = ehc.mhc_post(**given)
    out = torch.empty_like(expected)
    assert ehc.mhc_post(**given, out=out) is out
    same(out, expected)
    residual = given["residual"]
    assert ehc.mhc_post(**given, inplace=True) is residual
    same(residual, expected)
    wanted = gate()
    expected = ehc.engram_gate(**wanted, eps=1e-6, clamp=1e-6)
    assert ehc.engram_gate(**wanted, eps=1e-6, clamp=1e-6, inplace=True) is wanted["x"]
    same(wanted["x"], expected)


def test_outputs_over_inputs_are_refused_and_nothing_is_written():
    given = streams()
    before = given["residual"].clone()
    with pytest.raises(engramhc.AliasError, match="mhc_post: tensor 'out'"):
        ehc.mhc_post(**given, out=given["residual"].as_strided((T, N, D), (D, T * D, 1)))
    same(given["residual"], before)


@pytest.mark.parametrize("name", CASES)
def test_no_leading_dimensions(name):
    if "conv" in name or "layer" in name and "multi" not in name:
        pytest.skip("needs tokens")
    case = CASES[name]
    one = case.tensors(sizes=Sizes((1,), 2, 4))
    none = case.tensors(sizes=Sizes((), 2, 4))
    for a, b in zip(run(case, none), run(case, one), strict=True):
        same(a, b.reshape(a.shape))
        assert a.dim() == b.dim() - 1
    for a in run(case, requiring(none)):
        assert a.requires_grad


def test_coefficients_with_a_last_dimension_of_one():
    given = streams()
    tall = {**given, "post": given["post"].unsqueeze(-1)}
    same(ehc.mhc_post(**tall), ehc.mhc_post(**given))
    pre = torch.rand(T, N, 1)
    same(
        ehc.mhc_pre_apply_mix(given["residual"], pre),
        ehc.mhc_pre_apply_mix(given["residual"], pre.squeeze(-1)),
    )


def test_layer_outputs_of_another_type():
    given = streams(residual=torch.randn(T, N, D).bfloat16())
    given["layer_output"].requires_grad_()
    out = ehc.mhc_post(**given)
    assert out.dtype is torch.bfloat16
    same(out.detach(), ehc.mhc_post(**{**given, "layer_output": given["layer_output"].detach().bfloat16()}))
    out.sum().backward()
    assert given["layer_output"].grad.dtype is torch.float32


def test_fp64_only_inside_the_reference():
    given = {n: t.double() for n, t in streams().items()}
    with engramhc.implementation("*", "reference"):
        assert ehc.mhc_post(**given).dtype is torch.float64
    with pytest.raises(engramhc.DTypeError, match="F64"):
        ehc.mhc_post(**given)
