"""Every function in fp32, bf16 and fp16: near the fp64 reference, and the same bits every way."""

import pytest
import torch
from cases import CASES, Sizes, gradients, loss, requiring, run
from support import reference_in_double, same

TOLERANCES = {torch.float32: 3e-4, torch.bfloat16: 2e-1, torch.float16: 3e-2}
SIZES = [Sizes(), Sizes((), 1, 3), Sizes((2, 3), 4, 17), Sizes((1,), 3, 1)]


def without_leading(name, sizes):
    """Convolutions need a dimension of tokens."""
    return sizes.lead == () and ("conv" in name or "layer" in name and "multi" not in name)


def doubles(tensors):
    return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}


def assert_near(got, expected, tolerance, what):
    scale = max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    error = (got.double() - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= tolerance * scale, f"{what}: error {error} at scale {scale}"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_near_the_reference(name, dtype, sizes):
    if without_leading(name, sizes):
        pytest.skip("needs tokens")
    case = CASES[name]
    tensors = case.tensors(dtype, sizes)
    got, got_gradients = gradients(case, tensors)
    with reference_in_double():
        expected, expected_gradients = gradients(case, doubles(tensors))
    for i, (output, target) in enumerate(zip(got, expected, strict=True)):
        assert output.shape == target.shape and output.is_contiguous()
        assert_near(output, target, TOLERANCES[dtype], f"output {i}")
    for which, target in expected_gradients.items():
        gradient = got_gradients[which]
        assert (gradient is None) == (target is None), which
        if target is not None:
            assert gradient.dtype == tensors[which].dtype
            assert_near(gradient, target, 10 * TOLERANCES[dtype], which)


@pytest.mark.parametrize("name", CASES)
def test_recording_changes_no_bit(name):
    case = CASES[name]
    tensors = case.tensors(torch.bfloat16, Sizes((5,), 4, 24))
    with torch.no_grad():
        plain = run(case, tensors)
    recorded = run(case, requiring(tensors))
    for a, b in zip(plain, recorded, strict=True):
        assert not a.requires_grad
        same(a, b)


@pytest.mark.parametrize("name", CASES)
def test_no_tokens(name):
    case = CASES[name]
    tensors = case.tensors(sizes=Sizes((0,)))
    outputs, got = gradients(case, tensors)
    for output in outputs:
        assert output.numel() == 0 or name == "engram_gather"
    for which, gradient in got.items():
        if gradient is not None:
            assert gradient.shape == tensors[which].shape
            assert not gradient.any(), which


@pytest.mark.parametrize("name", CASES)
def test_strides_change_no_bit(name):
    case = CASES[name]
    tensors = case.tensors(sizes=Sizes((3,), 4, 6))
    expected, expected_gradients = gradients(case, tensors)
    for strided in (transposed, spread):
        views = {n: strided(t) for n, t in tensors.items()}
        leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in views.items()}
        outputs = run(case, leaves)
        loss(outputs).backward()
        for a, b in zip(outputs, expected, strict=True):
            same(a, b)
        for which, gradient in expected_gradients.items():
            if gradient is not None:
                same(leaves[which].grad, gradient)


def transposed(t):
    """The same values with a last stride that is not 1."""
    return t.clone() if t.dim() < 2 else t.mT.contiguous().mT.detach()


def spread(t):
    """The same values, rows apart."""
    if t.dim() < 2:
        return t.clone()
    wide = t.new_zeros((*t.shape[:-1], t.shape[-1] + 3))
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]].detach()


@pytest.mark.parametrize("name", CASES)
def test_unused_outputs_count_as_zeros(name):
    case = CASES[name]
    tensors = case.tensors(sizes=Sizes((3,), 2, 4))
    count = len(run(case, tensors))
    if count == 1:
        pytest.skip("one output")
    for used in range(count):
        leaves = requiring(tensors)
        outputs = run(case, leaves)
        loss([outputs[used]]).backward()
        zeroed = requiring(tensors)
        outputs = run(case, zeroed)
        loss([o if i == used else 0 * o for i, o in enumerate(outputs)][used : used + 1]).backward()
        for which in leaves:
            if leaves[which].grad is not None:
                same(leaves[which].grad, zeroed[which].grad)
