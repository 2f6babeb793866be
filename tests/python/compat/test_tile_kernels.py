"""What `tile_kernels` computes, by its names: kernels with out-arguments and functions with autograd,
against plain torch in float64."""

import pytest

torch = pytest.importorskip("torch")

import engramhc.compat  # noqa: E402
import engramhc.compat.tile_kernels as tk  # noqa: E402
from engramhc.errors import Error  # noqa: E402

B, T, N, D = 2, 3, 4, 40
K, MIXES = N * D, N * N + 2 * N
ops, kernels = tk.modeling.mhc.ops, tk.mhc


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(11)


def numbers(*shape, scale=1.0, grad=False):
    return (torch.randn(shape) * scale).requires_grad_(grad)


def close(got, expected, tolerance=2e-5):
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


def gradients_agree(function, reference, inputs):
    """Outputs and gradients of a function and of its reference in float64."""
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    got, expected = function(*inputs), reference(*wide)
    got, expected = [x if isinstance(x, tuple) else (x,) for x in (got, expected)]
    directions = [torch.randn_like(x) for x in got]
    for mine, theirs in zip(got, expected):
        close(mine, theirs)
    wanted = [t for t in inputs if t.requires_grad]
    mine = torch.autograd.grad(got, wanted, directions)
    theirs = torch.autograd.grad(
        expected, [t for t in wide if t.requires_grad], [d.double() for d in directions]
    )
    for a, b in zip(mine, theirs):
        close(a, b, 2e-4)


# --- functions with autograd ------------------------------------------------------------------------


def test_expand():
    gradients_agree(
        lambda x: ops.expand_to_mhc(x, N),
        lambda x: tk.torch.expand_to_mhc_ref(x, N),
        [numbers(B, T, D, grad=True)],
    )
    out = torch.empty(B, T, N, D)
    hidden = numbers(B, T, D)
    assert ops.expand_to_mhc(hidden, N, out) is out
    assert torch.equal(out, tk.modeling.mhc.expand_from_embedding(hidden, mhc_mult=N))


def test_split_sinkhorn_and_head():
    mixes, scale, base = numbers(B, T, MIXES, grad=True), numbers(3, grad=True), numbers(MIXES, grad=True)
    gradients_agree(
        lambda *a: ops.mhc_pre_split_mixes(*a, N, 1.5, 1e-2),
        lambda *a: tk.torch.mhc_pre_split_mixes_ref(*a, N, 1.5, 1e-2),
        [mixes, scale, base],
    )
    gradients_agree(
        lambda x: ops.sinkhorn_normalize(x, repeat=6, eps=1e-3),
        lambda x: tk.torch.sinkhorn_normalize_ref(x, 6, 1e-3),
        [numbers(B, T, N, N, grad=True)],
    )
    gradients_agree(
        lambda *a: ops.mhc_head_compute_mix(*a, 1e-2),
        lambda *a: tk.torch.mhc_head_compute_mix_ref(*a, 1e-2),
        [numbers(B, T, N, grad=True), numbers(1, grad=True), numbers(N, grad=True)],
    )


def wide_post(x, residual, post, comb):
    return comb.mT @ residual + post * x.unsqueeze(-2)


def wide_mixes(residual, fn, norm_weight, eps):
    row = residual.flatten(-2)
    return row @ (fn * norm_weight).T * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)


def test_post_and_pre_apply():
    coefficients = [
        numbers(B, T, D, grad=True),
        numbers(B, T, N, D, grad=True),
        numbers(B, T, N, 1, grad=True),
        numbers(B, T, N, N, grad=True),
    ]
    gradients_agree(ops.mhc_post, wide_post, coefficients)
    plain = [t.detach() for t in coefficients]
    assert torch.equal(ops.mhc_post_fwd(*plain), ops.mhc_post(*plain))
    direction = numbers(B, T, N, D)
    got = ops.mhc_post_bwd(*plain, direction)
    expected = torch.autograd.grad(wide_post(*coefficients), coefficients, direction)
    for mine, theirs in zip(got, expected):
        close(mine, theirs)
    assert not hasattr(plain[1].untyped_storage(), "grad_from_mhc_post")

    streams, mix = numbers(B, T, N, D, grad=True), numbers(B, T, N, 1, grad=True)
    gradients_agree(ops.mhc_pre_apply_mix, lambda x, mix: (x * mix).sum(-2), [streams, mix])


def test_pre_norm_fn():
    inputs = [
        numbers(B, T, N, D, grad=True),
        numbers(MIXES, K, scale=0.1, grad=True),
        (1 + numbers(K, scale=0.1)).requires_grad_(),
    ]
    gradients_agree(
        lambda *a: ops.mhc_pre_norm_fn(*a, 1e-3, fuse_grad_acc=False, n_splits=4),
        lambda *a: wide_mixes(*a, 1e-3),
        inputs,
    )
    residual, fn, _ = (t.detach() for t in inputs)
    close(
        ops.mhc_pre_norm_fn(residual, fn, None, 1e-3), tk.torch.mhc_pre_norm_fn_ref(residual, fn, None, 1e-3)
    )


@pytest.mark.parametrize("lead", [(B, T), (), (5,), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pre_and_head_of_any_rank(lead, dtype):
    residual = numbers(*lead, N, D).to(dtype)
    fn, scale, base = numbers(MIXES, K, scale=0.1), numbers(3), numbers(MIXES)
    norm_weight = 1 + numbers(K, scale=0.1)
    constants = dict(
        norm_weight=norm_weight,
        norm_eps=1e-4,
        post_mult_value=2.0,
        pre_eps=1e-3,
        sinkhorn_eps=1e-5,
        sinkhorn_repeat=8,
    )
    layer_input, (post, comb) = tk.modeling.mhc.mhc_pre(residual, fn, scale, base, **constants)
    mixes = wide_mixes(residual.double(), fn.double(), norm_weight.double(), 1e-4)
    pre, expected_post, logits = tk.torch.mhc_pre_split_mixes_ref(
        mixes, scale.double(), base.double(), N, 2.0, 1e-3
    )
    close(post, expected_post)
    close(comb, tk.torch.sinkhorn_normalize_ref(logits, 8, 1e-5))
    assert layer_input.dtype == dtype
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    close(layer_input, (residual.double() * pre).sum(-2), tolerance)
    with torch.no_grad():  # the same bits, with the norm's weight
        again, (post_again, comb_again) = tk.modeling.mhc.mhc_pre(residual, fn, scale, base, **constants)
        fused = ops.mhc_pre_big_fuse(residual, fn * norm_weight, scale, base, 1e-4, 1e-3, 1e-5, 2.0, 8)
    for mine, theirs in zip((post_again, comb_again, again), (post, comb, layer_input)):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(fused, (post, comb, layer_input)):
        assert torch.equal(mine, theirs)

    head = tk.modeling.mhc.mhc_head(residual, fn[:N], scale[0], base[:N], norm_eps=1e-4, pre_eps=1e-3)
    mixes = wide_mixes(residual.double(), fn[:N].double(), 1.0, 1e-4)
    mix = torch.sigmoid(mixes * scale[0].double() + base[:N].double()) + 1e-3
    close(head, (residual.double() * mix.unsqueeze(-1)).sum(-2), tolerance)


def test_defaults_are_those_of_tile_kernels():
    residual, fn, scale, base = numbers(T, N, D), numbers(MIXES, K, scale=0.1), numbers(3), numbers(MIXES)
    _, (post, comb) = tk.modeling.mhc.mhc_pre(residual, fn, scale, base)
    mixes = wide_mixes(residual.double(), fn.double(), 1.0, 1e-6)
    _, expected, logits = tk.torch.mhc_pre_split_mixes_ref(mixes, scale.double(), base.double(), N, 1.0, 1e-6)
    close(post, expected)
    close(comb, tk.torch.sinkhorn_normalize_ref(logits, 10, 1e-6))


def test_a_whole_sublayer_trains():
    """pre, a layer, post and the head, with every gradient."""
    inputs = [
        numbers(B, T, N, D, grad=True),
        numbers(MIXES, K, scale=0.1, grad=True),
        numbers(3, grad=True),
        numbers(MIXES, grad=True),
        numbers(N, K, scale=0.1, grad=True),
        numbers(1, grad=True),
        numbers(N, grad=True),
    ]

    def ours(residual, fn, scale, base, head_fn, head_scale, head_base):
        x, context = tk.modeling.mhc.mhc_pre(residual, fn, scale, base)
        return tk.modeling.mhc.mhc_head(
            ops.mhc_post(torch.tanh(x), residual, *context), head_fn, head_scale, head_base
        )

    def theirs(residual, fn, scale, base, head_fn, head_scale, head_base):
        pre, post, logits = tk.torch.mhc_pre_split_mixes_ref(
            wide_mixes(residual, fn, 1.0, 1e-6), scale, base, N, 1.0, 1e-6
        )
        comb = tk.torch.sinkhorn_normalize_ref(logits)
        streams = wide_post(torch.tanh((residual * pre).sum(-2)), residual, post, comb)
        mix = torch.sigmoid(wide_mixes(streams, head_fn, 1.0, 1e-6) * head_scale + head_base) + 1e-6
        return (streams * mix.unsqueeze(-1)).sum(-2)

    gradients_agree(ours, theirs, inputs)


def test_a_gradient_buffer_of_the_caller():
    """`grad_from_mhc_post` on the residual's storage takes the gradients; nobody else sets it."""
    streams, mix = numbers(B, T, N, D, grad=True), numbers(B, T, N, 1)
    fn, direction = numbers(MIXES, K, scale=0.1), numbers(B, T, D)
    (plain,) = torch.autograd.grad(ops.mhc_pre_apply_mix(streams, mix), streams, direction)
    mixes = ops.mhc_pre_norm_fn(streams, fn, None, 1e-6)
    (of_mixes,) = torch.autograd.grad(mixes.sum(), streams)

    buffer = numbers(B, T, N, D)
    before = buffer.clone()
    storage = streams.untyped_storage()
    storage.grad_from_mhc_post = buffer
    ops.mhc_pre_apply_mix(streams, mix).backward(direction)
    assert streams.grad is None
    close(buffer, before + plain)
    ops.mhc_pre_norm_fn(streams, fn, None, 1e-6).sum().backward()
    close(buffer, before + plain + of_mixes)
    assert streams.grad is None
    ops.mhc_pre_norm_fn(streams, fn, None, 1e-6, fuse_grad_acc=False).sum().backward()
    close(streams.grad, of_mixes)
    assert storage.grad_from_mhc_post is buffer


def test_main_grad():
    residual, fn = numbers(T, N, D), torch.nn.Parameter(numbers(MIXES, K, scale=0.1))
    mixes = ops.mhc_pre_norm_fn(residual, fn, None, 1e-6)
    (expected,) = torch.autograd.grad(mixes.square().sum(), fn)
    fn.main_grad = torch.ones_like(fn)
    ops.mhc_pre_norm_fn(residual, fn, None, 1e-6).square().sum().backward()
    assert fn.grad is None
    close(fn.main_grad, 1 + expected, 1e-4)


def test_precision_of_1x():
    """install(precision="tf32") rounds fn as TileKernels does."""
    residual, fn = numbers(T, N, D).bfloat16(), numbers(MIXES, K)
    exact = wide_mixes(residual.double(), fn.double(), 1.0, 1e-6)
    rounded = wide_mixes(residual.double(), kernels.round_to_tf32(fn).double(), 1.0, 1e-6)
    close(ops.mhc_pre_norm_fn(residual, fn, None, 1e-6), exact, 1e-5)
    engramhc.compat.install(precision="tf32")
    try:
        got = ops.mhc_pre_norm_fn(residual, fn, None, 1e-6)
    finally:
        engramhc.compat.install()
        engramhc.compat.uninstall()
    close(got, rounded, 1e-5)
    assert (got - exact).abs().max() > 1e-4


# --- kernels with outputs as arguments ------------------------------------------------------------------


def test_expand_kernels():
    x, streams = numbers(T, D), torch.empty(T, N, D)
    kernels.expand_to_mhc_fwd(x, streams)
    assert torch.equal(streams, x.unsqueeze(1).expand(T, N, D))
    grad, x_grad = numbers(T, N, D), torch.empty(T, D)
    kernels.expand_to_mhc_bwd(grad, x_grad)
    close(x_grad, grad.sum(1))


def test_head_kernels_fill_every_slot():
    mix, scale, base = numbers(T, N, grad=True), numbers(1, grad=True), numbers(N, grad=True)
    out, direction = torch.empty(T, N), numbers(T, N)
    kernels.mhc_head_compute_mix_fwd(mix.detach(), scale.detach(), base.detach(), out, 1e-2)
    expected = tk.torch.mhc_head_compute_mix_ref(mix, scale, base, 1e-2)
    close(out, expected)
    grads = [torch.full_like(mix, 9.0), torch.full((5, 1), 9.0), torch.full((5, N), 9.0)]
    kernels.mhc_head_compute_mix_bwd(direction, mix.detach(), scale.detach(), base.detach(), *grads, 5)
    for got, theirs in zip(
        (grads[0], grads[1].sum(0), grads[2].sum(0)),
        torch.autograd.grad(expected, (mix, scale, base), direction),
    ):
        close(got, theirs)


def test_merge_kernels_add():
    fn, weight = numbers(MIXES, K), numbers(K)
    merged, direction = torch.empty(MIXES, K), numbers(MIXES, K)
    kernels.mhc_fn_normw_merge_fwd(fn, weight, merged)
    assert torch.equal(merged, fn * weight)
    fn_grad, weight_grad = torch.ones(MIXES, K), torch.ones(K)
    kernels.mhc_fn_normw_merge_bwd(fn, weight, direction, fn_grad, weight_grad)
    close(fn_grad, 1 + direction * weight)
    close(weight_grad, 1 + (direction * fn).sum(0))


@pytest.mark.parametrize("groups", [1, 2])
def test_reduce_kernels(groups):
    splits, group_size = 5, K // groups
    mul, sqr = numbers(splits + 1, T, groups, MIXES), numbers(splits + 1, T, groups).square()
    out_mul, sqrsum, out = torch.empty(T, groups, MIXES), torch.empty(T, groups), torch.empty(T, MIXES)
    kernels.mhc_reduce_partials_and_rmsnorm_fwd(mul, sqr, out_mul, sqrsum, out, group_size, 1e-3, splits)
    close(out_mul, mul[:splits].sum(0))
    close(sqrsum, sqr[:splits].sum(0))
    m, q = out_mul.double().requires_grad_(), sqrsum.double().requires_grad_()
    expected = (m * torch.rsqrt(q / group_size + 1e-3).unsqueeze(-1)).sum(1)
    close(out, expected)
    direction, mul_grad, sqr_grad = numbers(T, MIXES), torch.empty(T, groups, MIXES), torch.empty(T, groups)
    kernels.mhc_reduce_partials_and_rmsnorm_bwd(
        direction, out_mul, sqrsum, mul_grad, sqr_grad, group_size, 1e-3
    )
    for got, theirs in zip((mul_grad, sqr_grad), torch.autograd.grad(expected, (m, q), direction.double())):
        close(got, theirs)


def test_apply_mix_kernels():
    x, mix, out = numbers(T, N, D, grad=True), numbers(T, N, grad=True), torch.empty(T, D)
    kernels.mhc_pre_apply_mix_fwd(x.detach(), mix.detach(), out)
    expected = (x * mix.unsqueeze(-1)).sum(1)
    close(out, expected)
    direction, x_grad = numbers(T, D), torch.ones(T, N, D)
    mix_grad = kernels.mhc_pre_apply_mix_bwd(direction, x.detach(), mix.detach(), x_grad)
    for got, theirs in zip((x_grad - 1, mix_grad), torch.autograd.grad(expected, (x, mix), direction)):
        close(got, theirs)


@pytest.mark.parametrize("flat_comb", [False, True])
def test_split_and_sinkhorn_kernels(flat_comb):
    comb_shape = (T, N * N) if flat_comb else (T, N, N)
    mixes, scale, base = numbers(T, MIXES, grad=True), numbers(3, grad=True), numbers(MIXES, grad=True)
    plain = [t.detach() for t in (mixes, scale, base)]
    pre, post, comb = torch.empty(T, N), torch.empty(T, N), torch.empty(comb_shape)
    kernels.mhc_pre_split_mixes_fwd(*plain, pre, post, comb, 1.5, 1e-2)
    expected = tk.torch.mhc_pre_split_mixes_ref(mixes, scale, base, N, 1.5, 1e-2)
    for got, theirs in zip((pre, post, comb.view(T, N, N)), expected):
        close(got.view_as(theirs), theirs)
    directions = [numbers(T, N), numbers(T, N), numbers(*comb_shape)]
    grads = [torch.empty(T, MIXES), torch.full((3,), 9.0), torch.full((MIXES,), 9.0)]
    kernels.mhc_pre_split_mixes_bwd(*directions, plain[0], post, *plain[1:], *grads, 1.5)
    theirs = torch.autograd.grad(
        expected, (mixes, scale, base), [d.view_as(e) for d, e in zip(directions, expected)]
    )
    for got, wanted in zip(grads, theirs):
        close(got, wanted)
    partials = [torch.empty(T, MIXES), torch.full((3, 3), 9.0), torch.full((3, MIXES), 9.0)]
    kernels.mhc_pre_split_mixes_bwd(*directions, plain[0], post, *plain[1:], *partials, 1.5)
    close(partials[2].sum(0), theirs[2])

    logits, out, grad_in = numbers(T, N, N, grad=True), torch.empty(T, N, N), torch.empty(T, N, N)
    kernels.mhc_sinkhorn_fwd(logits.detach(), out, 7, 1e-3)
    expected = tk.torch.sinkhorn_normalize_ref(logits, 7, 1e-3)
    close(out, expected)
    direction = numbers(T, N, N)
    kernels.mhc_sinkhorn_bwd(direction, logits.detach(), grad_in, 7, 1e-3)
    close(grad_in, torch.autograd.grad(expected, logits, direction)[0], 1e-4)


@pytest.mark.parametrize("flat_comb", [False, True])
def test_big_fuse_kernel(flat_comb):
    residual, fn, scale, base = numbers(1, T, N, D), numbers(MIXES, K, scale=0.1), numbers(3), numbers(MIXES)
    mul, sqr = tk.torch.mhc_pre_norm_fn_partials_ref(residual, fn, 4)
    post, comb, row = (
        torch.empty(T, N),
        torch.empty((T, N * N) if flat_comb else (T, N, N)),
        torch.empty(T, D),
    )
    kernels.mhc_pre_big_fuse_fwd(
        mul.squeeze(2),
        sqr.squeeze(2),
        scale,
        base,
        residual[0],
        post,
        comb,
        row,
        1e-6,
        1e-3,
        1e-5,
        2.0,
        9,
        n_splits=4,
    )
    expected = ops.mhc_pre_big_fuse(residual[0], fn, scale, base, 1e-6, 1e-3, 1e-5, 2.0, 9)
    for got, theirs in zip((post, comb, row), expected):
        close(got.view_as(theirs), theirs)


def test_multilayer_recompute():
    layers = 3
    x0 = numbers(B, T, N, D).bfloat16()
    pre = [numbers(B, T, N, 1) for _ in range(layers)]
    outputs = [numbers(B, T, D).bfloat16() for _ in range(layers)]
    post = [numbers(B, T, N, 1) for _ in range(layers)]
    comb = [numbers(B, T, N, N).softmax(-1) for _ in range(layers)]
    inputs = [torch.empty(B, T, D, dtype=torch.bfloat16) for _ in range(layers)]
    residuals = [torch.empty(B, T, N, D, dtype=torch.bfloat16) for _ in range(layers)]
    assert kernels.mhc_multilayer_recompute(x0, pre, outputs, post, comb, inputs, residuals) is None
    x = x0
    for i in range(layers):
        assert torch.equal(inputs[i], ops.mhc_pre_apply_mix(x, pre[i]))
        x = ops.mhc_post(outputs[i], x, post[i], comb[i])
        assert torch.equal(residuals[i], x)


# --- engram -----------------------------------------------------------------------------------------------


@pytest.fixture
def gate():
    x, kv = numbers(T, N, D), numbers(T, N + 1, D)
    weights = numbers(N, D), numbers(N, D)
    return x, kv, kv[:, :N], kv[:, N], *weights


def test_gate_of_both_versions(gate):
    """The call's own arguments say which one is meant."""
    x, kv, k, v, wh, we = gate
    fused = tk.engram.fused_weight(wh, we)
    assert torch.equal(fused, wh * we)
    expected = tk.torch.engram_gate_ref(x.double(), kv.double(), wh.double(), we.double(), 1e-6, 1e-5, True)
    calls = [
        tk.engram.engram_gate_fwd(x, kv, fused, 1e-5, 1e-6),
        tk.engram.engram_gate_fwd(x, k, v, fused, 1e-5, 1e-6),
        tk.engram.engram_gate_fwd(x, k=k, v=v, weight_fused=fused, eps=1e-5, clamp_value=1e-6),
        tk.engram.engram_gate_fwd(x, k, v, weight_fused=fused, eps=1e-5, clamp_value=1e-6),
        tk.engram.engram_gate_fwd(
            x, kv, weight_fused=fused, eps=1e-5, clamp_value=1e-6, save_for_backward=True
        ),
    ]
    for call in calls:
        for got, theirs in zip(call, expected):
            close(got, theirs, 1e-4)
        assert torch.equal(call[0], calls[0][0])
    assert tk.engram.engram_gate_fwd(x, kv, fused, 1e-5, 1e-6, False)[1:] == (None,) * 4
    assert tk.engram.engram_gate_fwd(x, k, v, fused, 1e-5, 1e-6, False)[1:] == (None,) * 4

    direction, saved = numbers(T, N, D), calls[0][1:]
    gx, gkv, partial = tk.engram.engram_gate_bwd(direction, x, kv, fused, *saved, 1e-6)
    gx1, gk, gv, partial1 = tk.engram.engram_gate_bwd(direction, x, k, v, fused, *saved, 1e-6)
    for a, b in ((gx, gx1), (gkv[:, :N], gk), (gkv[:, N], gv), (partial, partial1)):
        assert torch.equal(a, b)
    inputs = [t.double().requires_grad_() for t in (x, kv, wh, we)]
    theirs = torch.autograd.grad(tk.torch.engram_gate_ref(*inputs, 1e-6, 1e-5), inputs, direction.double())
    close(gx, theirs[0], 1e-3)
    close(gkv, theirs[1], 1e-3)
    gwh, gwe = torch.ones(N, D), torch.ones(N, D)
    tk.engram.grad_w_reduce(partial, wh, we, gwh, gwe)
    close(gwh, 1 + theirs[2], 1e-3)
    close(gwe, 1 + theirs[3], 1e-3)


def test_gate_inplace_and_images(gate):
    x, kv, _, _, wh, we = gate
    fused, mask = tk.engram.fused_weight(wh, we), torch.tensor([False, True, False])
    expected = tk.engram.engram_gate_fwd(x, kv, fused, 1e-5, 1e-6, image_token_mask=mask)
    assert torch.equal(expected[0][1], x[1])
    assert not any(saved[1].any() for saved in expected[1:])
    work = x.clone()
    out = tk.engram.engram_gate_fwd(work, kv, fused, 1e-5, 1e-6, False, mask, True)[0]
    assert out is work
    assert torch.equal(work, expected[0])
    gx, gkv, _ = tk.engram.engram_gate_bwd(x, x, kv, fused, *expected[1:], 1e-6, mask)
    assert torch.equal(gx[1], x[1]) and not gkv[1].any()


def test_gate_with_autograd_in_both_versions(gate):
    x, kv, k, v, wh, we = (t.clone().requires_grad_() for t in gate)
    reference = lambda *a: tk.torch.engram_gate_ref(*a, 1e-6, 1e-5)  # noqa: E731
    for apply in (tk.modeling.engram.engram_gate, tk.modeling.engram.EngramGateFn.apply):
        gradients_agree(lambda *a: apply(*a, 1e-6, 1e-5), reference, [x, k, v, wh, we])
        packed = lambda x, kv, wh, we: apply(x, kv.flatten(-2), wh, we, 1e-6, 1e-5, None)  # noqa: E731
        gradients_agree(packed, reference, [x, kv, wh, we])
    mask = torch.tensor([True, False, False])
    out = tk.modeling.engram.engram_gate(x, kv.flatten(-2), wh, we, 1e-6, 1e-5, mask)
    assert torch.equal(out[0], x[0])


def test_gate_weights_with_main_grad(gate):
    x, kv, k, v, wh, we = gate
    wh, we = torch.nn.Parameter(wh), torch.nn.Parameter(we)
    expected = torch.autograd.grad(
        tk.modeling.engram.engram_gate(x, k, v, wh, we, 1e-6, 1e-5).sum(), (wh, we)
    )
    wh.main_grad, we.main_grad = torch.ones(N, D), torch.ones(N, D)
    tk.modeling.engram.engram_gate(x.requires_grad_(), k, v, wh, we, 1e-6, 1e-5).sum().backward()
    assert wh.grad is None and we.grad is None
    close(wh.main_grad, 1 + expected[0], 1e-4)
    close(we.main_grad, 1 + expected[1], 1e-4)


def test_hash():
    g = torch.Generator().manual_seed(2)
    window = torch.randint(0, 99092, (7, 3), dtype=torch.int32, generator=g)
    multipliers = torch.randint(0, 2**40, (2, 3), generator=g) * 2 + 1
    sizes = torch.tensor([[[101, 103], [107, 109]], [[113, 127], [131, 137]]], dtype=torch.int32)
    offsets = tk.torch.make_offsets(sizes)
    assert offsets.tolist() == [[0, 101, 204, 311], [0, 113, 240, 371]]
    rows = tk.engram.engram_hash(window, multipliers, sizes, offsets)
    assert rows.dtype == torch.int32
    assert torch.equal(rows, tk.torch.engram_hash_ref(window, multipliers, sizes, offsets))
    mask = torch.arange(7) == 4
    masked = tk.engram.engram_hash(window, multipliers, sizes, offsets, image_token_mask=mask)
    assert torch.equal(masked, tk.torch.engram_hash_ref(window, multipliers, sizes, offsets, mask))
    assert (masked[:, 4] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum(dtype, nesterov):
    grad, momentum = numbers(512).to(torch.bfloat16), numbers(512).to(dtype)
    expected_momentum = momentum.clone()
    expected = tk.torch.engram_sinkhorn_momentum_update_ref(grad, expected_momentum, 0.95, nesterov)
    got = tk.engram.engram_sinkhorn_momentum_update(grad, momentum, 0.95, nesterov)
    assert got.dtype == torch.float32
    close(got, expected)
    close(momentum, expected_momentum, 1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_sinkhorn_steps():
    rows, width = 37, 24
    matrix, row_scale, col_scale = numbers(rows, width), torch.ones(rows), 1 + numbers(width).abs()
    expected_scale, expected_sumsq = row_scale.clone(), torch.empty(width)
    expected_norm = tk.torch.engram_sinkhorn_step_ref(
        matrix, expected_scale, col_scale, expected_sumsq, 1e-20
    )
    row_norm, partial = tk.engram.engram_sinkhorn_step(matrix, row_scale, col_scale, 1e-20)
    sumsq = torch.empty(width)
    tk.engram.engram_sinkhorn_step_reduce(partial, sumsq)
    for got, theirs in ((row_norm, expected_norm), (row_scale, expected_scale), (sumsq, expected_sumsq)):
        close(got, theirs)
    out = torch.empty(rows, width)
    assert tk.engram.engram_sinkhorn_finalize(matrix, row_scale, col_scale, 1e-20, 2.0, out) is out
    close(out, tk.torch.engram_sinkhorn_finalize_ref(matrix, row_scale, col_scale, 1e-20, 2.0))
    assert torch.equal(out, tk.engram.engram_sinkhorn_finalize(matrix, row_scale, col_scale, 1e-20, 2.0))
    close(out.norm(dim=1), torch.full((rows,), 2.0))


def test_wrong_arguments_are_our_errors():
    with pytest.raises(Error, match="mhc_post_bwd: tensor 'comb'|mhc_post: tensor 'comb'"):
        ops.mhc_post_fwd(numbers(T, D), numbers(T, N, D), numbers(T, N, 1), numbers(T, N))
    with pytest.raises(TypeError):
        tk.engram.engram_gate_fwd(numbers(T, N, D))


# --- what its tests use -------------------------------------------------------------------------------------


def test_config():
    config = tk.config
    most = config.get_device_num_sms()
    assert most >= 1
    assert config.get_num_sms() == most
    config.set_num_sms(1)
    assert (config.get_num_sms(), config.get_num_ai_cores(), config.get_num_vec_cores()) == (1, 1, 2)
    with pytest.raises(ValueError, match="set_num_sms"):
        config.set_num_sms(most + 1)
    config.set_pdl(True)
    config.use_deterministic_algorithms(True)
    config.set_token_alignment(64)
    assert (config.get_pdl(), config.get_deterministic_algorithms(), config.get_token_alignment()) == (
        True,
        True,
        64,
    )
    config.reset_runtime_config()
    assert (config.get_num_sms(), config.get_pdl(), config.get_token_alignment()) == (most, False, 128)
    assert (config.get_device(), config.is_ascend()) == ("cuda", False)


def test_utils():
    u = tk.utils
    assert [u.ceil_div(7, 3), u.ceil_div(6, 3), u.align(7, 4)] == [3, 2, 8]
    assert [u.is_power_of_two(n) for n in (0, 1, 6, 8)] == [False, True, False, True]
    assert [u.next_power_of_two(n) for n in (1, 5, 8)] == [1, 8, 8]
    assert u.str_to_dtype(u.dtype_to_str(torch.bfloat16)) is torch.bfloat16
    with pytest.raises(ValueError, match="float64"):
        u.dtype_to_str(torch.float64)
    with pytest.raises(ValueError, match="'f99'"):
        u.str_to_dtype("f99")


def test_round_to_tf32():
    x = torch.cat(
        [
            numbers(1000),
            torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, 1 + 2.0**-11, 1 + 3 * 2.0**-11]),
        ]
    )
    rounded = kernels.round_to_tf32(x)
    assert not (rounded.view(torch.int32) & 0x1FFF).any()
    finite = x.isfinite()
    assert ((rounded - x)[finite].abs() <= x[finite].abs() * 2.0**-11).all()
    assert torch.equal(rounded[~finite], x[~finite])
    assert rounded[-2:].tolist() == [1.0, 1 + 2 * 2.0**-10]  # halves go to even
    assert kernels.round_to_tf32(torch.tensor([float("nan")])).isnan().all()


def test_numeric():
    numeric = tk.testing.numeric
    x = numbers(50, 8)
    numeric.assert_equal(x, x.clone())
    for y in (x + 1, x.double(), x[:, :4], x.t().contiguous().t()):
        with pytest.raises(AssertionError):
            numeric.assert_equal(x, y)
    assert numeric.calc_diff(x, x) == 0 and numeric.calc_diff(0 * x, 0 * x) == 0
    assert float(numeric.calc_diff(x, -x)) == pytest.approx(2.0)
    big = torch.randn(100000)
    numeric.check_bias(big.bfloat16().float(), big)
    with pytest.raises(AssertionError):
        numeric.check_bias(big - 0.1, big)
    assert numeric.count_bytes(x, [x.bfloat16(), (None, x)]) == 1600 + 800 + 1600


def test_parameters():
    bench, generator = tk.testing.bench, tk.testing.generator
    assert (
        bench.make_param_key({"num_tokens": 64, "num_experts": 8, "x": None})
        == "num_tokens=   64,experts=  8"
    )
    assert bench.make_param_id({"a": (1, 2), "dtype": torch.bfloat16}) == "a=1x2-dtype=bf16"
    assert bench.make_param_id({}) == "default"
    assert generator.generate_num_tokens() == [4001, 8001]
    assert generator.generate_num_tokens(64) == generator.generate_num_tokens(alignment=64) == [4032, 8064]
    assert generator.generate_num_tokens(is_benchmark=True) == [4001, 8001]
    assert generator.generate_num_tokens(2) == [0, 1, 512, 8001]
    assert generator.generate_num_tokens(0, backward_only=True) == [8001]
    assert all(size % 256 == 0 for size in generator.generate_hidden_sizes(256))
    assert generator.generate_num_sms()[-1] == tk.config.get_device_num_sms()
    assert list(generator.generate_samples(1, a=[1, 2, 3], b=[4, 5])) == [
        {"a": 1, "b": 4},
        {"a": 2, "b": 5},
        {"a": 3, "b": 4},
    ]
    assert len(list(generator.generate_samples(2, a=[1, 2, 3], b=[4, 5]))) == 6
    assert (generator.get_test_level(), generator.is_precompile()) == (1, False)
