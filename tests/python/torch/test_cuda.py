"""What only a GPU shows: values, streams, graphs, devices. Skipped where there is none."""

import threading

import engramhc
import engramhc.torch as ehc
import pytest
import torch
from cases import CASES, Sizes, gradients, loss, requiring, run
from support import same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SIZES = Sizes((7,), 4, 64)
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def on_gpu(tensors):
    return {name: tensor.cuda() for name, tensor in tensors.items()}


def assert_near(got, expected, tolerance, what):
    scale = max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    torch.testing.assert_close(
        got.cpu().double(), expected.double(), rtol=0, atol=tolerance * scale, msg=lambda m: f"{what}: {m}"
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_cpu(name, dtype):
    case = CASES[name]
    tensors = case.tensors(dtype, SIZES)
    expected, expected_gradients = gradients(case, tensors)
    for _ in range(2):
        outputs, got = gradients(case, on_gpu(tensors))
        for i, (a, b) in enumerate(zip(outputs, expected, strict=True)):
            assert a.is_cuda and a.is_contiguous()
            assert_near(a.detach(), b.detach(), TOLERANCES[dtype], f"output {i}")
        for which, gradient in expected_gradients.items():
            if gradient is not None:
                assert_near(got[which], gradient, 10 * TOLERANCES[dtype], which)


@pytest.mark.parametrize("name", CASES)
def test_same_bits_from_run_to_run_and_compiled(name):
    torch._dynamo.reset()
    case = CASES[name]
    tensors = on_gpu(case.tensors(torch.bfloat16, SIZES))
    expected, expected_gradients = gradients(case, tensors)
    compiled = torch.compile(lambda t: run(case, t), backend="aot_eager", fullgraph=True)
    for function in (lambda t: run(case, t), compiled):
        leaves = requiring(tensors)
        outputs = function(leaves)
        for a, b in zip(outputs, expected, strict=True):
            same(a.detach(), b.detach())
        loss(outputs).backward()
        for which, gradient in expected_gradients.items():
            if gradient is not None:
                same(leaves[which].grad, gradient)


@pytest.mark.parametrize("name", CASES)
def test_captured_on_the_first_call_and_replayed(name):
    """Nothing is compiled, tuned or allocated by the library when a function first runs."""
    case = CASES[name]
    tensors = on_gpu(case.tensors(torch.bfloat16, SIZES))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        outputs = run(case, tensors)
    fresh = on_gpu(case.tensors(torch.bfloat16, SIZES, seed=9))
    for which, tensor in fresh.items():
        tensors[which].copy_(tensor)
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        for a, b in zip(outputs, run(case, fresh), strict=True):
            same(a, b)


@pytest.mark.parametrize("name", ["mhc_pre", "mhc_post", "mhc_fused_post_pre", "engram_gate", "engram_layer"])
def test_forward_and_backward_in_a_graph(name):
    case = CASES[name]
    leaves = requiring(on_gpu(case.tensors(torch.bfloat16, SIZES)))
    wanted = [t for t in leaves.values() if t.is_floating_point()]
    upstream = [torch.randn_like(o) for o in run(case, leaves)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(run(case, leaves), wanted, upstream)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(got, torch.autograd.grad(run(case, leaves), wanted, upstream)):
        same(a, b)


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_for_the_device(name):
    case = CASES[name]
    tensors = on_gpu(case.tensors(torch.bfloat16, SIZES))
    leaves = requiring(tensors)
    outputs = run(case, leaves)
    upstream = [torch.ones_like(o) for o in outputs if o.requires_grad]
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [o for o in run(case, leaves) if o.requires_grad]
        torch.autograd.backward(outputs, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["mhc_pre", "mhc_post", "engram_gate", "engram_layer"])
def test_work_goes_to_the_current_stream(name):
    case = CASES[name]
    tensors = on_gpu(case.tensors(torch.bfloat16, Sizes((300,), 4, 256)))
    with torch.no_grad():
        expected = run(case, tensors)
    late = {which: torch.zeros_like(t) for which, t in tensors.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # inputs come late; another stream would read zeros
        for which, tensor in tensors.items():
            late[which].copy_(tensor)
        outputs = run(case, late)
    stream.synchronize()
    for a, b in zip(outputs, expected, strict=True):
        same(a, b)


def test_two_threads_with_streams_of_their_own():
    case = CASES["mhc_pre"]
    tensors = on_gpu(case.tensors(torch.float32, Sizes((50,), 4, 64)))
    _, expected = gradients(case, tensors)
    torch.cuda.synchronize()
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                _, got = gradients(case, tensors)
                torch.cuda.current_stream().synchronize()
                wrong.extend(n for n in expected if not torch.equal(got[n], expected[n]))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_of_two_devices_are_refused():
    tensors = CASES["mhc_post"].tensors(torch.float32, SIZES)
    for odd in tensors:
        mixed = {n: t if n == odd else t.cuda() for n, t in tensors.items()}
        with pytest.raises(engramhc.DeviceError, match="mhc_post: tensor '"):
            ehc.mhc_post(**mixed)


def test_padding_never_touches_live_rows():
    case = CASES["mhc_fused_post_pre"]
    live = on_gpu(case.tensors(torch.bfloat16, Sizes((5,), 4, 64)))
    padded = {
        n: torch.cat([t, torch.full_like(t[:3], float("nan"))]) if t.shape[0] == 5 else t
        for n, t in live.items()
    }
    with torch.no_grad():
        for a, b in zip(run(case, padded), run(case, live), strict=True):
            same(a[:5], b)


def test_optimizer_on_a_device():
    found = []
    for device in ("cpu", "cuda"):
        parameter = torch.nn.Parameter(torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).to(device))
        parameter.grad = torch.randn(50, 32, generator=torch.Generator().manual_seed(1)).to(device)
        ehc.EngramSinkhorn([parameter], 0.1).step()
        found.append(parameter.detach().cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_main_grad_on_a_device():
    tensors = on_gpu(CASES["mhc_pre"].tensors(torch.bfloat16, SIZES))
    _, expected = gradients(CASES["mhc_pre"], tensors)
    leaves = requiring(tensors)
    leaves["fn"].main_grad = torch.zeros_like(leaves["fn"])
    loss(run(CASES["mhc_pre"], leaves)).backward()
    same(leaves["fn"].main_grad, expected["fn"])
    assert leaves["fn"].grad is None
