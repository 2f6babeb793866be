"""The adapter for vLLM: its order of arguments and results, against formulas in torch."""

import inspect

import pytest

torch = pytest.importorskip("torch")

from engramhc.integrate import vllm  # noqa: E402

T, N, D = 5, 4, 48
K, MIXES = N * D, N * N + 2 * N
CONSTANTS = dict(rms_eps=1e-5, pre_eps=2e-3, sinkhorn_eps=3e-4, post_mult=1.7, repeat=6)
POSITIONAL = tuple(CONSTANTS.values())


@pytest.fixture
def w():
    g = torch.Generator().manual_seed(3)

    def numbers(*shape, scale=1.0):
        return torch.randn(shape, generator=g) * scale

    return {
        "residual": numbers(T, N, D),
        "x": numbers(T, D),
        "fn": numbers(MIXES, K, scale=0.1),
        "scale": numbers(3),
        "base": numbers(MIXES),
        "norm": 1 + numbers(D, scale=0.2),
        "post": numbers(T, N, 1),
        "comb": torch.softmax(numbers(T, N, N), -1),
        "pre": torch.sigmoid(numbers(T, N)),
    }


def mixes_of(flat, fn, w):
    """pre [T, n], post [T, n, 1], comb [T, n, n]."""
    flat = flat.double()
    mixes = flat @ fn.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + CONSTANTS["rms_eps"])
    scale = w["scale"].double().repeat_interleave(torch.tensor([N, N, N * N]))
    pre, post, comb = (mixes * scale + w["base"].double()).split([N, N, N * N], -1)
    comb = comb.unflatten(-1, (N, N)).softmax(-1) + CONSTANTS["sinkhorn_eps"]
    for half_step in range(2 * CONSTANTS["repeat"] - 1):
        comb = comb / (comb.sum(-2 if half_step % 2 == 0 else -1, keepdim=True) + CONSTANTS["sinkhorn_eps"])
    return pre.sigmoid() + CONSTANTS["pre_eps"], CONSTANTS["post_mult"] * post.sigmoid().unsqueeze(-1), comb


def collapsed(streams, pre, norm=None, eps=0.0):
    row = (streams.double() * pre.double().unsqueeze(-1)).sum(-2)
    if norm is None:
        return row
    return row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps) * norm.double()


def posted(w):
    mixed = torch.einsum("tio,tid->tod", w["comb"].double(), w["residual"].double())
    return mixed + w["post"].double() * w["x"].double().unsqueeze(-2)


def same(got, expected):
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("with_norm", [False, True])
def test_pre(w, with_norm):
    norm = (w["norm"], 1e-3) if with_norm else ()
    got = vllm.mhc_pre(w["residual"], w["fn"], w["scale"], w["base"], *POSITIONAL, 4, *norm)
    pre, post, comb = mixes_of(w["residual"].flatten(1), w["fn"], w)
    same(got, (post, comb, collapsed(w["residual"], pre, *norm)))


def test_post(w):
    same([vllm.mhc_post(w["x"], w["residual"], w["post"], w["comb"])], [posted(w)])


@pytest.mark.parametrize("with_norm", [False, True])
def test_fused_post_pre(w, with_norm):
    norm = (w["norm"], 1e-3) if with_norm else ()
    coefficients = w["x"], w["residual"], w["post"], w["comb"]
    got = vllm.mhc_fused_post_pre(*coefficients, w["fn"], w["scale"], w["base"], *POSITIONAL, 1, 1, *norm)
    streams = posted(w)
    pre, post, comb = mixes_of(streams.flatten(1), w["fn"], w)
    same(got, (streams, post, comb, collapsed(streams, pre, *norm)))


@pytest.mark.parametrize("given_sum", [False, True])
def test_pre_broadcast(w, given_sum):
    fn_sum = w["fn"].unflatten(-1, (N, D)).sum(1) if given_sum else None
    got = vllm.mhc_pre_broadcast(w["x"], w["fn"], w["scale"], w["base"], *POSITIONAL, w["norm"], 1e-3, fn_sum)
    streams = w["x"].double().unsqueeze(1).expand(T, N, D)
    pre, post, comb = mixes_of(streams.flatten(1), w["fn"], w)
    same(got, (streams, post, comb, collapsed(streams, pre, w["norm"], 1e-3)))


def test_pre_delayed(w):
    arguments = w["residual"], w["fn"], w["scale"], w["base"], *POSITIONAL
    pre, post, comb = mixes_of(w["residual"].flatten(1), w["fn"], w)
    got = vllm.mhc_pre_delayed(*arguments, w["pre"], None, w["norm"], 1e-3)
    same(got, (post, comb, collapsed(w["residual"], w["pre"], w["norm"], 1e-3), pre))
    first = vllm.mhc_pre_delayed(*arguments)  # no mix yet: stream 0
    same(first, (post, comb, w["residual"][:, 0].double(), pre))


def test_pre_delayed_of_an_embedding(w):
    fn_sum = w["fn"].unflatten(-1, (N, D)).sum(1)
    streams = w["x"].unsqueeze(1).expand(T, N, D).contiguous()
    got = vllm.mhc_pre_delayed(streams, fn_sum, w["scale"], w["base"], *POSITIONAL, None, w["x"])
    pre, post, comb = mixes_of(streams.flatten(1), w["fn"], w)
    same(got, (post, comb, w["x"].double(), pre))


@pytest.mark.parametrize("capture_aux", [False, True])
def test_fused_post_pre_delayed(w, capture_aux):
    coefficients = w["x"], w["residual"], w["post"], w["comb"]
    got = vllm.mhc_fused_post_pre_delayed(
        *coefficients, w["fn"], w["scale"], w["base"], *POSITIONAL, w["pre"], w["norm"], 1e-3, capture_aux
    )
    streams = posted(w)
    pre, post, comb = mixes_of(streams.flatten(1), w["fn"], w)
    mean = streams.mean(1) if capture_aux else torch.empty(0, D, dtype=torch.float64)
    same(got, (streams, post, comb, collapsed(streams, w["pre"], w["norm"], 1e-3), pre, mean))


def test_head_and_collapse(w):
    fn, scale, base = w["fn"][:N], w["scale"][:1], w["base"][:N]
    flat = w["residual"].flatten(1).double()
    mixes = flat @ fn.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-5)
    pre = torch.sigmoid(mixes * scale.double() + base.double()) + 2e-3
    same([vllm.hc_head(w["residual"], fn, scale, base, 1e-5, 2e-3)], [collapsed(w["residual"], pre)])
    same([vllm.hc_collapse(w["residual"], w["pre"])], [collapsed(w["residual"], w["pre"])])


def test_positions_are_those_of_vllm():
    five = ["rms_eps", "hc_pre_eps", "hc_sinkhorn_eps", "hc_post_mult_value", "sinkhorn_repeat"]
    weights = ["fn", "hc_scale", "hc_base"]
    step = ["x", "residual", "post_layer_mix", "comb_res_mix", *weights, *five]
    for function, names in [
        (vllm.mhc_pre, ["residual", *weights, *five, "n_splits", "norm_weight", "norm_eps"]),
        (vllm.mhc_fused_post_pre, [*step, "n_splits", "tile_n", "norm_weight", "norm_eps"]),
        (vllm.mhc_fused_post_pre_delayed, [*step, "pre_mix", "norm_weight", "norm_eps", "capture_aux"]),
        (vllm.hc_head, ["hidden_states", "hc_fn", "hc_scale", "hc_base", "rms_norm_eps", "hc_eps"]),
    ]:
        assert list(inspect.signature(function).parameters) == names
