"""What autograd and its neighbours see: main_grad, accumulators, checkpoints, autocast, threads."""

import threading

import engramhc
import engramhc.torch as ehc
import pytest
import torch
from cases import CASES, MIX, Sizes, gradients, loss, requiring, run
from support import same
from torch.utils.checkpoint import checkpoint

WITH_WEIGHTS = [
    name
    for name, case in CASES.items()
    if any(kind[0] in ("weight", "fp32") for kind in case.shapes(Sizes()).values())
]
WEIGHTS = {
    "fn", "scale", "base", "norm_weight", "layer_norm_weight", "weight_hidden", "weight_embed",
    "weight", "bias", "table",
}  # fmt: skip


def parameters(case, dtype=torch.float32):
    leaves = requiring(case.tensors(dtype, Sizes((5,), 2, 6)))
    return leaves, [n for n in leaves if n in WEIGHTS]


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "megatron"])
@pytest.mark.parametrize("name", CASES)
def test_main_grad_gets_the_gradient(name, hook):
    case = CASES[name]
    leaves, weights = parameters(case)
    if not weights:
        pytest.skip("no parameters")
    loss(run(case, leaves)).backward()
    mine, _ = parameters(case)
    for which in weights:
        mine[which].main_grad = torch.full_like(mine[which], 0.5)
        if hook:
            mine[which].grad_added_to_main_grad = False
    loss(run(case, mine)).backward()
    for which in weights:
        if leaves[which].grad is None:
            continue
        expected = leaves[which].grad + 0.5
        torch.testing.assert_close(mine[which].main_grad, expected, rtol=1e-5, atol=1e-5)
        if hook:
            assert mine[which].grad_added_to_main_grad
            assert mine[which].grad.dtype == mine[which].dtype and not mine[which].grad.any()
        else:
            assert mine[which].grad is None


def test_main_grad_of_another_type_or_layout():
    case = CASES["mhc_pre"]
    leaves, _ = parameters(case)
    loss(run(case, leaves)).backward()
    mine, _ = parameters(case)
    mine["fn"].main_grad = torch.zeros(mine["fn"].mT.shape).mT
    mine["base"].main_grad = torch.zeros_like(mine["base"], dtype=torch.float64)
    loss(run(case, mine)).backward()
    torch.testing.assert_close(mine["fn"].main_grad, leaves["fn"].grad, rtol=0, atol=0)
    torch.testing.assert_close(mine["base"].main_grad, leaves["base"].grad.double(), rtol=0, atol=0)


def test_main_grad_of_micro_batches():
    fn, scale, base = (torch.randn(8, 12) * 0.1).requires_grad_(), torch.ones(3), torch.zeros(8)
    fn.main_grad = torch.zeros(8, 12)
    total = 0
    for seed in range(3):
        residual = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(seed))
        x, _ = ehc.mhc_pre(residual, fn, scale, base, **MIX)
        (gradient,) = torch.autograd.grad(x.sum(), fn, allow_unused=True) or (None,)
        assert gradient is None
        plain = fn.detach().clone().requires_grad_()
        total = total + torch.autograd.grad(ehc.mhc_pre(residual, plain, scale, base, **MIX)[0].sum(), plain)[0]
    torch.testing.assert_close(fn.main_grad, total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mhc_pre", "engram_gate", "engram_short_conv", "engram_layer"])
def test_bf16_weights_get_gradients_rounded_once(name):
    case = CASES[name]
    low = {"layer_norm_weight", "weight_hidden", "weight_embed", "weight", "norm_weight"}
    if name == "mhc_pre":
        low = {"layer_norm_weight"}
    leaves, _ = parameters(case)
    with torch.no_grad():
        for which in low & set(leaves):
            leaves[which].copy_(leaves[which].bfloat16())
    loss(run(case, leaves)).backward()
    rounded = {
        n: t.detach().to(torch.bfloat16 if n in low else t.dtype).requires_grad_(t.requires_grad)
        for n, t in leaves.items()
    }
    loss(run(case, rounded)).backward()
    for which in low & set(leaves):
        same(rounded[which].grad, leaves[which].grad.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulator_sums_before_rounding(dtype):
    def sublayer(residual, acc):
        x, mix = ehc.mhc_pre(residual, *weights, **MIX, grad_acc=acc)
        return ehc.mhc_post(x * 2, residual, *mix, grad_acc=acc)

    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(8, 12, generator=generator) * 0.3, torch.ones(3), torch.zeros(8)
    values = torch.randn(5, 2, 6, generator=generator).to(dtype)
    upstream = torch.randn(5, 2, 6, generator=generator).to(dtype)
    found = []
    for use in (False, True):
        residual = values.clone().requires_grad_()
        acc = ehc.GradAccumulator(residual) if use else None
        for _ in range(2 if use else 1):  # a second pass finds the buffer empty
            out = sublayer(residual, acc)
            (gradient,) = torch.autograd.grad(out, residual, upstream)
        found.append(gradient)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


def test_accumulator_without_some_of_its_users():
    residual = torch.randn(3, 2, 4).requires_grad_()
    pre, post, comb = torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 2, 2)
    acc = ehc.GradAccumulator(residual)
    x = ehc.mhc_pre_apply_mix(residual, pre, grad_acc=acc)
    ehc.mhc_post(x, residual, post, comb, grad_acc=acc)  # not part of the loss
    x.sum().backward()
    expected = torch.autograd.grad(ehc.mhc_pre_apply_mix(residual, pre).sum(), residual)[0]
    same(residual.grad, expected)
    with pytest.raises(engramhc.AliasError, match="mhc_pre_apply_mix: tensor 'residual'"):
        ehc.mhc_pre_apply_mix(residual.clone(), pre, grad_acc=acc)


def test_accumulator_beside_another_consumer():
    residual = torch.randn(3, 2, 4).requires_grad_()
    pre = torch.rand(3, 2)
    acc = ehc.GradAccumulator(residual, dtype=torch.float32)
    out = ehc.mhc_pre_apply_mix(residual, pre, grad_acc=acc).sum() + (residual * 3).sum()
    out.backward()
    torch.testing.assert_close(residual.grad, 3 + pre.unsqueeze(-1).expand(3, 2, 4))


@pytest.mark.parametrize("name", CASES)
def test_double_backward_is_refused(name):
    case = CASES[name]
    leaves = requiring(case.tensors(sizes=Sizes((3,), 2, 4)))
    wanted = [t for t in leaves.values() if t.is_floating_point()]
    total = loss([o.square() for o in run(case, leaves)])
    first = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
    again = sum(g.sum() for g in first if g is not None and g.requires_grad)
    with pytest.raises((engramhc.UnsupportedError, RuntimeError), match="once|double backward"):
        again.backward()


def test_gradients_under_create_graph_can_be_used():
    leaves = requiring(CASES["mhc_post"].tensors(sizes=Sizes((3,), 2, 4)))
    total = loss(run(CASES["mhc_post"], leaves))
    (gradient,) = torch.autograd.grad(total, leaves["residual"], create_graph=True)
    expected = torch.autograd.grad(loss(run(CASES["mhc_post"], leaves)), leaves["residual"])[0]
    same(gradient.detach(), expected)


@pytest.mark.parametrize("name", CASES)
def test_checkpointing_changes_no_bit(name):
    case = CASES[name]
    tensors = case.tensors(torch.bfloat16, Sizes((4,), 2, 6))
    expected, expected_gradients = gradients(case, tensors)
    for reentrant in (False, True):
        leaves = requiring(tensors)
        names = list(leaves)
        outputs = checkpoint(
            lambda *values: tuple(run(case, dict(zip(names, values)))),
            *leaves.values(),
            use_reentrant=reentrant,
        )
        for a, b in zip(outputs, expected, strict=True):
            same(a, b)
        loss(outputs).backward()
        for which, gradient in expected_gradients.items():
            if gradient is not None:
                same(leaves[which].grad, gradient)


@pytest.mark.parametrize("name", CASES)
def test_autocast_changes_no_bit(name):
    case = CASES[name]
    tensors = case.tensors(torch.float32, Sizes((4,), 2, 6))
    expected, expected_gradients = gradients(case, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, got = gradients(case, tensors)
    for a, b in zip(outputs, expected, strict=True):
        same(a, b)
    for which, gradient in expected_gradients.items():
        if gradient is not None:
            same(got[which], gradient)


def test_saved_tensors_may_move():
    case = CASES["mhc_pre"]
    tensors = case.tensors(torch.bfloat16, Sizes((40,), 4, 64))
    _, expected = gradients(case, tensors)
    leaves = requiring(tensors)
    leaves["fn"].main_grad = torch.zeros_like(leaves["fn"])
    with torch.autograd.graph.save_on_cpu():
        outputs = run(case, leaves)
    loss(outputs).backward()
    same(leaves["residual"].grad, expected["residual"])
    same(leaves["fn"].main_grad, expected["fn"])


def test_few_and_many_tokens_have_the_same_gradients():
    """Below some size a backward makes again what it would else have kept."""
    case = CASES["mhc_pre"]
    many = case.tensors(torch.bfloat16, Sizes((64,), 4, 64))
    one = {n: t[:1] if n == "residual" else t for n, t in many.items()}
    leaves, first = requiring(many), requiring(one)
    upstream = torch.randn(64, 64).bfloat16()
    run(case, leaves)[0].backward(upstream)
    run(case, first)[0].backward(upstream[:1])
    same(first["residual"].grad, leaves["residual"].grad[:1])


def test_two_threads():
    case = CASES["mhc_pre"]
    tensors = case.tensors(torch.float32, Sizes((50,), 4, 32))
    _, expected = gradients(case, tensors)
    wrong = []

    def work():
        for _ in range(20):
            _, got = gradients(case, tensors)
            if any(not torch.equal(got[n], expected[n]) for n in expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_sparse_gradient_of_a_table():
    table = torch.randn(9, 4).requires_grad_()
    idx = torch.tensor([[3, 3, -1], [0, 8, 3]])
    dense = torch.autograd.grad(ehc.engram_gather(table, idx).sum(), table)[0]
    table.sparse_grad = True
    ehc.engram_gather(table, idx).sum().backward()
    assert table.grad.is_sparse and table.grad._nnz() == 3
    same(table.grad.to_dense(), dense)


def test_nondeterministic_sums_are_the_same_numbers():
    table, idx = torch.randn(9, 4).requires_grad_(), torch.tensor([[3, 3, -1], [0, 8, 3]])
    expected = torch.autograd.grad(ehc.engram_gather(table, idx).sum(), table)[0]
    assert ehc.allow_nondeterministic(True) is False
    try:
        got = torch.autograd.grad(ehc.engram_gather(table, idx).sum(), table)[0]
    finally:
        assert ehc.allow_nondeterministic(False) is True
    torch.testing.assert_close(got, expected)


def test_vmap_is_refused():
    with pytest.raises(engramhc.UnsupportedError, match="mhc_pre_apply_mix.*leading dimensions are free"):
        torch.vmap(ehc.mhc_pre_apply_mix)(torch.randn(3, 2, 2, 4), torch.randn(3, 2, 2))
