"""Every function under torch.compile: whole graphs, and the bits of eager mode."""

import pytest
import torch
from cases import CASES, Sizes, gradients, loss, requiring, run
from support import same

SIZES = Sizes((4,), 2, 6)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_whole_graphs_with_the_bits_of_eager(name):
    case = CASES[name]
    tensors = case.tensors(torch.bfloat16, SIZES)
    expected, expected_gradients = gradients(case, tensors)
    compiled = torch.compile(lambda t: run(case, t), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for a, b in zip(compiled(tensors), expected, strict=True):
            same(a, b.detach())
    leaves = requiring(tensors)
    outputs = compiled(leaves)
    for a, b in zip(outputs, expected, strict=True):
        same(a, b)
    loss(outputs).backward()
    for which, gradient in expected_gradients.items():
        if gradient is None:
            assert leaves[which].grad is None
        else:
            same(leaves[which].grad, gradient)


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    case = CASES[name]
    if not case.ops:
        pytest.skip("made of other operators")
    for op, arguments in calls_of(case):
        torch.library.opcheck(op, arguments)


def calls_of(case):
    """The calls of torch.ops.ehc that a case makes, forward and backward, with and without gradients."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "ehc":
                seen.append((func, tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args)))
            return func(*args, **(kwargs or {}))

    tensors = case.tensors(torch.float32, SIZES)
    with Spy():
        loss(run(case, requiring(tensors))).backward()
        run(case, tensors)
    assert {f"ehc::{name}" for name in case.ops} <= {op._schema.name for op, _ in seen}
    for op, arguments in seen:
        name = op._schema.name
        if hasattr(torch.ops.ehc, f"{name.removeprefix('ehc::')}_backward"):
            arguments = tuple(
                a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                for a in arguments
            )
        yield op, arguments
