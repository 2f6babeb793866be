"""How functions of `engramhc.ops` are called: outputs, ranks, strides, types, threads, scratch memory."""

import concurrent.futures
import dataclasses
import importlib.util
import os
import subprocess
import sys

import engramhc
import ml_dtypes
import numpy as np
import pytest
from engramhc import ops, presets

HAS_TORCH = importlib.util.find_spec("torch") is not None
T, N, D = 6, 4, 48
RULES = dataclasses.asdict(presets.train)


@pytest.fixture(params=["numpy"] + ["torch"] * HAS_TORCH)
def array(request):
    """Random arrays of one framework, the same each time."""
    generator = np.random.default_rng(5)

    def make(*shape):
        made = generator.standard_normal(shape).astype(np.float32)
        if request.param == "numpy":
            return made
        import torch

        return torch.from_numpy(made)

    make.is_torch = request.param == "torch"
    return make


def same(a, b):
    return type(a) is type(b) and a.shape == b.shape and np.array_equal(np.asarray(a), np.asarray(b))


def post_arguments(array, *lead):
    return array(*lead, D), array(*lead, N, D), array(*lead, N), array(*lead, N, N)


def pre_arguments(array, *lead):
    return array(*lead, N, D), array(24, N * D) * 0.02, array(3), array(24)


def test_framework_of_the_first_array(array):
    y, residual, post, comb = post_arguments(array, T)
    made = ops.mhc_post_fwd(y, residual, post, comb)
    assert type(made) is type(y)
    if array.is_torch:  # the others may be of another
        assert same(ops.mhc_post_fwd(y, residual, post.numpy(), comb), made)
        requiring = residual.clone().requires_grad_()
        assert not ops.mhc_post_fwd(y, requiring, post, comb).requires_grad


def test_out(array):
    arguments = post_arguments(array, T)
    expected = ops.mhc_post_fwd(*arguments)
    out = array(T, N, D)
    assert ops.mhc_post_fwd(*arguments, out=out) is out and same(out, expected)
    gradients = ops.mhc_post_bwd(expected, *arguments)
    given = tuple(array(*g.shape) for g in gradients)
    made = ops.mhc_post_bwd(expected, *arguments, out=(given[0], None, given[2], None))
    assert made[0] is given[0] and made[2] is given[2]
    assert all(map(same, made, gradients))


def test_in_place(array):
    arguments = post_arguments(array, T)
    expected = ops.mhc_post_fwd(*arguments)
    made = ops.mhc_post_fwd(*arguments, inplace=True)
    assert made is arguments[1] and same(made, expected)


@pytest.mark.parametrize("lead", [(), (1,), (T,), (2, 3), (1, 2, 3), (0,), (2, 0)])
def test_ranks(array, lead):
    y, residual, post, comb = post_arguments(array, *lead)
    made = ops.mhc_post_fwd(y, residual, post, comb)
    assert tuple(made.shape) == (*lead, N, D)
    flat = ops.mhc_post_fwd(
        y.reshape(-1, D) if lead else y[None], *(a.reshape((int(np.prod(lead)), *a.shape[len(lead) :])) for a in (residual, post, comb))
    )
    assert same(made.reshape(flat.shape), flat)
    if lead:
        assert same(ops.mhc_post_fwd(y, residual, post[..., None], comb), made)

    streams, fn, scale, base = pre_arguments(array, *lead)
    mul, sqrsum = ops.mhc_prenorm_gemm_fwd(streams.reshape((*lead, N * D)), fn)
    assert tuple(mul.shape[1:]) == (*lead, 24) and tuple(sqrsum.shape[1:]) == lead
    mixes, *_ = ops.mhc_reduce_partials_and_rmsnorm_fwd(mul, sqrsum, k=N * D, eps=1e-6)
    assert tuple(mixes.shape) == (*lead, 24)
    pre, post, logits = ops.mhc_pre_split_mixes_fwd(mixes, scale, base, n=N, post_mult=2.0, pre_eps=1e-6)
    comb = ops.sinkhorn_fwd(logits, repeat=20, eps=1e-6)
    layer_input, mix = ops.mhc_pre(streams, fn, scale, base, preset="train")
    assert same(mix.post, post) and same(mix.comb, comb)
    assert same(layer_input, ops.mhc_pre_apply_mix_fwd(streams, pre))
    fused = ops.mhc_pre_big_fuse_fwd(mul, sqrsum, streams, scale, base, preset="train")
    assert same(fused[0], post) and same(fused[1], comb) and same(fused[2], layer_input)


def test_strides(array):
    y, residual, post, comb = post_arguments(array, T)
    wide, transposed = array(T, N, 2 * D), comb.swapaxes(-1, -2)
    wide[..., :D] = residual
    made = ops.mhc_post_fwd(y, wide[..., :D], post, comb)
    assert same(made, ops.mhc_post_fwd(y, residual, post, comb))
    if not array.is_torch:
        with pytest.raises(engramhc.ShapeError, match="tensor 'comb': expected stride 1 in the last dimension"):
            ops.mhc_post_fwd(y, residual, post, transposed)


def test_layer_outputs_of_another_type(array):
    y, residual, post, comb = post_arguments(array, T)
    half = ops._arguments.framework_of(y).cast(y, "F16")
    widened = ops._arguments.framework_of(y).cast(half, "F32")
    assert same(ops.mhc_post_fwd(half, residual, post, comb), ops.mhc_post_fwd(widened, residual, post, comb))
    g_half = ops.mhc_post_bwd(residual, half, residual, post, comb)[0]
    assert g_half.dtype == half.dtype


def test_identity_and_bias(array):
    y, residual, post, _ = post_arguments(array, 2, 3)
    bias = array(D)
    identity = array(2, 3, N, N) * 0 + (np.eye(N, dtype=np.float32) if not array.is_torch else 0)
    if array.is_torch:
        import torch

        identity = identity + torch.eye(N)
    assert same(ops.mhc_post_fwd(y, residual, post, None), ops.mhc_post_fwd(y, residual, post, identity))
    assert same(
        ops.mhc_post_fwd(y, residual, post, identity, bias=bias), ops.mhc_post_fwd(y + bias, residual, post, identity)
    )
    *others, g_bias = ops.mhc_post_bwd(residual, y, residual, post, identity, bias=bias)
    assert all(map(same, others, ops.mhc_post_bwd(residual, y + bias, residual, post, identity)))
    np.testing.assert_allclose(np.asarray(g_bias), np.asarray(others[0].reshape(-1, D).sum(0)), rtol=1e-5)


def test_accumulation(array):
    fn, weight, g = array(24, 16), array(16), array(24, 16)
    g_fn, g_weight = ops.mhc_fn_normw_merge_bwd(fn, weight, g)
    target, other = array(24, 16), array(16)
    before = target + 0
    made = ops.mhc_fn_normw_merge_bwd(fn, weight, g, g_fn=target, g_norm_weight=other)
    assert made[0] is target and made[1] is other
    np.testing.assert_allclose(np.asarray(target), np.asarray(before + g_fn), rtol=1e-6, atol=1e-6)
    ops.mhc_fn_normw_merge_bwd(fn, weight, g, g_fn=target, g_norm_weight=other, beta=0)
    assert same(target, g_fn) and same(other, g_weight)


def test_backward_of_the_split(array):
    """Two operators of the library, against differences of the forward."""
    mixes, scale, base = array(5, 24), array(3), array(24)
    upstream = array(5, N), array(5, N), array(5, N, N)
    g_mixes, g_scale, g_base = ops.mhc_pre_split_mixes_bwd(*upstream, mixes, scale, base, post_mult=2.0)

    def loss(mixes, scale, base):
        made = ops.mhc_pre_split_mixes_fwd(mixes, scale, base, n=N, post_mult=2.0, pre_eps=0.0)
        return sum(float((np.asarray(a, np.float64) * np.asarray(b, np.float64)).sum()) for a, b in zip(made, upstream))

    given = [mixes, scale, base]
    for position, gradient in enumerate((g_mixes, g_scale, g_base)):
        direction = array(*given[position].shape)
        step = 2e-3
        up, down = list(given), list(given)
        up[position] = given[position] + direction * step
        down[position] = given[position] - direction * step
        slope = (loss(*up) - loss(*down)) / (2 * step)
        expected = float((np.asarray(gradient) * np.asarray(direction)).sum())
        assert abs(slope - expected) <= 2e-3 * (1 + abs(expected))
    acc = array(3)
    before = acc + 0
    ops.mhc_pre_split_mixes_bwd(*upstream, mixes, scale, base, post_mult=2.0, g_scale=acc)
    np.testing.assert_allclose(np.asarray(acc), np.asarray(before + g_scale), rtol=1e-5, atol=1e-6)


def test_saved_state_changes_no_bit(array):
    arguments = pre_arguments(array, T)
    layer_input, mix, saved = ops.mhc_pre(*arguments, preset="train", save=True)
    assert same(ops.mhc_pre(*arguments, preset="train")[0], layer_input)
    upstream = array(T, D), array(T, N), array(T, N, N)
    with_state = ops.mhc_pre_bwd(*upstream, *arguments, preset="train", saved=saved)
    without = ops.mhc_pre_bwd(*upstream, *arguments, **RULES)
    assert same(with_state[0], without[0])
    assert all(same(a, b) for a, b in zip(with_state[1], without[1]) if a is not None)


def test_seams_are_their_parts(array):
    post_side, pre_side = post_arguments(array, T), pre_arguments(array, T)[1:]
    residual, mix, layer_input = ops.mhc_fused_post_pre_fwd(*post_side, *pre_side, preset="train")
    assert same(residual, ops.mhc_post_fwd(*post_side))
    expected, parts = ops.mhc_pre(residual, *pre_side, preset="train")
    assert same(layer_input, expected) and same(mix.post, parts.post) and same(mix.comb, parts.comb)

    pre_mix = array(T, N)
    delayed = ops.mhc_fused_post_pre_delayed_fwd(
        *post_side, *pre_side, pre_mix=pre_mix, preset="train", return_mean=True
    )
    assert same(delayed[0], residual) and same(delayed[1], ops.mhc_pre_apply_mix_fwd(residual, pre_mix))
    assert same(delayed[2].comb, mix.comb)
    np.testing.assert_allclose(np.asarray(delayed[4]), np.asarray(residual).mean(1), rtol=1e-5, atol=1e-6)
    alone = ops.mhc_pre_delayed(residual, *pre_side, pre_mix=pre_mix, preset="train")
    assert same(alone[0], delayed[1]) and same(alone[1].post, mix.post) and same(alone[2], delayed[3])
    first = ops.mhc_pre_delayed(residual, *pre_side, preset="train")
    np.testing.assert_array_equal(np.asarray(first[0]), np.asarray(residual)[:, 0])


def test_first_entry_of_a_stack(array):
    x, (_, fn, scale, base) = array(T, D), pre_arguments(array, T)
    residual, mix, layer_input = ops.mhc_pre_broadcast_fwd(x, fn, scale, base, preset="train")
    assert same(residual, ops.expand_to_mhc_fwd(x, N))
    fn_sum = fn[:, :D] + fn[:, D : 2 * D] + fn[:, 2 * D : 3 * D] + fn[:, 3 * D :]
    summed = ops.mhc_pre_broadcast_fwd(x, None, scale, base, fn_sum=fn_sum, preset="train")
    assert same(summed[0], residual) and same(summed[1].comb, mix.comb) and same(summed[2], layer_input)
    delayed = ops.mhc_pre_delayed(residual, fn_sum, scale, base, x=x, preset="train")
    assert same(delayed[0], x) and same(delayed[1].post, mix.post)


def test_batches_are_sequences(array):
    v, weight, norm = array(2, T, N, 16), array(N, 16, 4), array(N, 16)
    made = ops.engram_short_conv_fwd(v, weight, norm, eps=1e-5, dilation=2)
    for row in range(2):
        assert same(made[row], ops.engram_short_conv_fwd(v[row], weight, norm, eps=1e-5, dilation=2))
    ids = (array(2, T) * 100)
    ids = ids.astype(np.int64) if not array.is_torch else ids.long()
    window = ops.engram_window(abs(ids), max_ngram=3, pad_id=2, blocking="slot")
    for row in range(2):
        assert same(window[row], ops.engram_window(abs(ids[row]), max_ngram=3, pad_id=2, blocking="slot"))
    empty = ops.engram_short_conv_fwd(v[:, :0], weight, norm, eps=1e-5, dilation=2)
    assert tuple(empty.shape) == (2, 0, N, 16)


def test_hash_layouts(array):
    window = ops.engram_window(np.arange(T, dtype=np.int32).reshape(2, 3), max_ngram=3, pad_id=0, blocking="slot")
    multipliers = ops.engram_multipliers([1, 3], max_ngram=3, compressed_vocab=100)
    sizes = ops.engram_primes([50, 60], layers=2, heads=2)
    offsets = ops.engram_offsets(sizes, out_dtype="int64")
    ltc = ops.engram_hash(window, multipliers, sizes, offsets, out_dtype=np.int64)
    tlc = ops.engram_hash(window, multipliers, sizes, offsets, layout="tlc")
    assert ltc.shape == (2, 2, 3, 4) and ltc.dtype == np.int64 and tlc.shape == (2, 3, 2, 4)
    np.testing.assert_array_equal(np.moveaxis(tlc, 2, 0), ltc)
    g_rows, g_sums = ops.engram_gather_bwd(np.ones((2, 3, 4 * 8), np.float32), ltc[0], rows=500, sparse=True)
    assert len(g_rows) == len(set(ltc[0].ravel().tolist())) == len(g_sums) and (np.diff(g_rows) > 0).all()


def test_bfloat16_of_numpy():
    rng = np.random.default_rng(0)
    y, residual = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((T, D), (T, N, D)))
    post, comb = rng.random((T, N), np.float32), rng.random((T, N, N), np.float32)
    made = ops.mhc_post_fwd(y, residual, post, comb)
    assert made.dtype == ml_dtypes.bfloat16
    out = np.empty_like(made)
    assert ops.mhc_post_fwd(y, residual, post, comb, out=out) is out
    np.testing.assert_array_equal(out.view(np.uint16), made.view(np.uint16))
    assert same(ops.mhc_post_fwd(y[0], residual[0], post[0], comb[0]), made[0])


def test_workspace(array):
    arguments = pre_arguments(array, T)
    size = ops.workspace_size("mhc_pre", *arguments, preset="train")
    assert size == ops.workspace_size(ops.mhc_pre, *arguments, preset="train") > 0
    assert ops.workspace_size("mhc_post_fwd", *post_arguments(array, T)) == 0
    memory = np.zeros(size, np.uint8)
    expected = ops.mhc_pre(*arguments, preset="train")
    made = ops.mhc_pre(*arguments, preset="train", workspace=memory)
    assert same(made[0], expected[0]) and memory.any()


def test_verbose_and_implementation(array):
    arguments = post_arguments(array, T)
    with engramhc.verbose() as lines:
        made = ops.mhc_post_fwd(*arguments)
        with engramhc.implementation("mhc.post*", "reference.f32"), engramhc.verbose() as inner:
            assert same(ops.mhc_post_fwd(*arguments), made)  # class E
        ops.mhc_post_fwd(*arguments)
    assert inner == ["mhc.post_fwd: reference.f32"]
    assert len(lines) == 3 and lines[0].startswith("mhc.post_fwd: cpu.") and lines[1] == inner[0] and lines[2] == lines[0]
    ops.mhc_post_fwd(*arguments)
    assert len(lines) == 3


def test_threads_of_the_caller(array):
    arguments = pre_arguments(array, 40)
    expected = ops.mhc_pre(*arguments, preset="train")[0]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        made = pool.map(lambda _: ops.mhc_pre(*arguments, preset="train")[0], range(200))
        assert all(same(one, expected) for one in made)


def test_number_of_threads(array):
    arguments = pre_arguments(array, 40)
    expected = ops.mhc_pre(*arguments, preset="train")[0]
    before = engramhc.device_info()["threads"]
    try:
        for count in (1, 3):
            engramhc.set_num_threads(count)
            assert engramhc.device_info()["threads"] == count
            assert same(ops.mhc_pre(*arguments, preset="train")[0], expected)
        with pytest.raises(engramhc.ArgumentError, match="set_num_threads: threads: expected 0..1024, got -1"):
            engramhc.set_num_threads(-1)
    finally:
        engramhc.set_num_threads(0)
    assert engramhc.device_info()["threads"] == before


def child(code, **environment):
    """A process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_fork_after_use():
    code = """
import os
import numpy as np
from engramhc import ops
arguments = [np.ones(s, np.float32) for s in ((500, 64), (500, 4, 64), (500, 4), (500, 4, 4))]
expected = ops.mhc_post_fwd(*arguments)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(ops.mhc_post_fwd(*arguments), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
assert np.array_equal(ops.mhc_post_fwd(*arguments), expected)
"""
    child(code)


def test_import_is_light():
    code = """
import sys, time
start = time.perf_counter()
import engramhc
assert engramhc.presets.train.repeat == 20
print(time.perf_counter() - start)
assert not {"torch", "numpy", "tvm_ffi"} & set(sys.modules), sorted(sys.modules)
import engramhc.ops
assert not {"torch", "tvm_ffi"} & set(sys.modules)
"""
    assert float(child(code)) < 0.3


def test_a_library_that_is_not_there():
    code = """
import numpy as np
from engramhc import ops
try:
    ops.expand_to_mhc_fwd(np.ones((1, 8), np.float32), 2)
except ImportError as error:
    print(error)
"""
    text = child(code, ENGRAMHC_LIBRARY="/nowhere")
    assert text == "engramhc: expected _ehc.so in one of: /nowhere\n"


def test_information():
    info = engramhc.build_info()
    assert info["version"] == engramhc.__version__
    assert "mhc.post_fwd" in info["operators"] and "generic" in info["instruction_sets"]
    assert engramhc.device_info()["threads"] >= 1
    result = subprocess.run(
        [sys.executable, "-m", "engramhc", "info"], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert f"engramhc {engramhc.__version__}" in result.stdout


def test_presets():
    config = {"rms_norm_eps": 1e-5, "text_config": {"hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "rms_norm_eps": 1e-20}}
    assert presets.from_config(config) == presets.deepseek_v41
    with pytest.raises(ValueError, match="config: expected 'hc_eps', got none"):
        presets.from_config({"rms_norm_eps": 1e-5})
    assert presets.find("paper").convention == "log" and presets.find(presets.glm5) is presets.glm5
    with pytest.raises(dataclasses.FrozenInstanceError):
        presets.train.repeat = 3


def test_all_is_complete():
    public = {name for name in vars(ops) if not name.startswith("_") and callable(getattr(ops, name))}
    defined = {name for name in public if getattr(ops, name).__module__.startswith("engramhc.ops")}
    assert defined == set(ops.__all__)
    assert all(getattr(ops, name).__doc__ for name in ops.__all__)
