"""Sinkhorn of the NumPy reference: gradients, the paper's iteration, edges, published numbers."""

import mhc_formulas
import numpy as np
import pytest
from engramhc.reference import run
from engramhc.reference.dtypes import encode
from engramhc.reference.mhc_sinkhorn import iterates, sinkhorn, sinkhorn_gradient

from finite_differences import EXACT, check_directions, check_gradients, single_numbers, singles
from test_reference_mhc import agree, random

CONVENTIONS = [
    ("deepseek", 1e-6),
    ("deepseek", 0.0),
    ("deepseek", 0.1),
    ("megatron", 1e-6),
    ("megatron", 0.7),
    ("log", 0.5),  # ignores it
]


def comb_of(logits, repeat, eps=1e-6, convention="deepseek"):
    attrs = {"repeat": repeat, "eps": eps, "convention": convention}
    return run("mhc.sinkhorn_fwd", {"comb_logits": encode(logits, "F32")}, attrs)["comb"]


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("convention, eps", CONVENTIONS)
@pytest.mark.parametrize(
    "shape, n, repeat",
    [
        ((0,), 4, 3),
        ((2,), 1, 3),
        ((3,), 2, 5),
        ((2, 1), 3, 20),
        ((2,), 4, 1),
        ((2,), 4, 10),
        ((1,), 5, 2),
        ((1,), 6, 4),
        ((1,), 7, 2),
        ((1,), 8, 20),
        ((31,), 4, 20),
        ((33,), 3, 64),
    ],
)
def test_gradient(shape, n, repeat, convention, eps):
    g = random(21, n, repeat)
    arrays = {"comb_logits": single_numbers(g, *shape, n, n)}
    upstream = single_numbers(g, *shape, n, n)
    exact_eps = float(np.float32(eps))

    def forward(a):
        return mhc_formulas.sinkhorn(a["comb_logits"], repeat, exact_eps, convention)

    agree(comb_of(arrays["comb_logits"], repeat, eps, convention), forward(arrays))
    attrs = {"repeat": repeat, "eps": eps, "convention": convention}
    inputs = singles({**arrays, "grad_comb": upstream})
    out = run("mhc.sinkhorn_bwd", inputs, attrs)
    check = check_directions if shape[0] > 30 else check_gradients
    check(
        lambda a: np.sum(upstream * forward(a)),
        arrays,
        {"comb_logits": out["grad_comb_logits"]},
        step=1e-5,
        tolerance=10 * EXACT,
    )


def test_megatron_clamps_without_gradient():
    """Sums on both sides of eps occur, and their half-steps are divided by eps or by the sum."""
    logits = np.array([[[0.0, -9.0, -9.0], [0.0, -9.0, -9.0], [-1.0, 0.0, -9.0]]])
    y = np.exp(logits - logits.max(-1, keepdims=True))
    y = y / np.maximum(y.sum(-1, keepdims=True), 0.7)
    sums = y.sum(-2)
    assert np.any(sums < 0.7) and np.any(sums > 0.7)
    arrays, upstream = {"comb_logits": logits}, single_numbers(random(22), 1, 3, 3)

    def loss(a):
        return np.sum(upstream * mhc_formulas.sinkhorn(a["comb_logits"], 3, eps, "megatron"))

    eps = float(np.float32(0.7))
    inputs = singles({**arrays, "grad_comb": upstream})
    out = run("mhc.sinkhorn_bwd", inputs, {"repeat": 3, "eps": 0.7, "convention": "megatron"})
    check_gradients(loss, arrays, {"comb_logits": out["grad_comb_logits"]}, step=1e-5)


# --- the paper's iteration -----------------------------------------------------------------------


def paper_iteration(h_res, count):
    """M from exp(H_res); every iteration normalises columns, then rows."""
    m = np.exp(h_res)
    for _ in range(count):
        m = m / m.sum(axis=-2, keepdims=True)
        m = m / m.sum(axis=-1, keepdims=True)
    return m


@pytest.mark.parametrize("count", [1, 2, 10, 20])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_repeat_is_the_count_of_the_paper(n, count):
    """comb = H_res^T, so the row softmax is the paper's first column step: repeat = t_max."""
    h_res = random(23).standard_normal((200, n, n))
    wanted = np.swapaxes(paper_iteration(h_res, count), -1, -2)
    transposed = np.swapaxes(h_res, -1, -2)
    for convention in ("deepseek", "megatron", "log"):
        got = sinkhorn(transposed, count, 0.0, convention)
        assert np.abs(got - wanted).max() < 1e-14, convention
    assert np.abs(sinkhorn(transposed, count, 1e-6, "deepseek") - wanted).max() < 1e-4


@pytest.mark.parametrize("count, apart", [(1, 5e-2), (10, 1e-8)])
def test_without_the_transposition_it_is_another_matrix(count, apart):
    h_res = random(24).standard_normal((200, 4, 4))
    assert np.abs(sinkhorn(h_res, count, 0.0, "log") - paper_iteration(h_res, count)).max() > apart


@pytest.mark.parametrize("repeat", [1, 2, 10, 20, 64])
def test_log_is_deepseek_and_megatron_without_eps(repeat):
    logits = random(25).standard_normal((100, 5, 5))
    upstream = random(26).standard_normal((100, 5, 5))
    wanted = sinkhorn(logits, repeat, 0.0, "log")
    gradient = sinkhorn_gradient(upstream, logits, repeat, 0.0, "log")
    for convention in ("deepseek", "megatron"):
        assert np.abs(sinkhorn(logits, repeat, 0.0, convention) - wanted).max() < 1e-14
        other = sinkhorn_gradient(upstream, logits, repeat, 0.0, convention)
        assert np.abs(other - gradient).max() < 1e-13


# --- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeat", [1, 10, 20])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_columns_end_at_the_floor_of_eps(n, repeat):
    """The last half-step is a column step: column sums are S / (S + eps), just below 1."""
    eps = 1e-6
    logits = random(27).standard_normal((300, n, n))
    _, comb, before = iterates(logits, repeat, eps, "deepseek")[-1]
    sums = comb.sum(axis=-2, keepdims=True)
    assert np.abs(sums - before / (before + eps)).max() < 1e-15
    assert np.all(sums < 1) and np.all(comb > 0)
    if repeat > 1:
        assert np.all(sums > 1 - 1.5 * eps)


def defect_of(repeat, spread):
    logits = spread * random(28).standard_normal((2400, 4, 4))
    out = run("mhc.defect", {"comb": comb_of(logits, repeat)})
    return out["row_defect"].decode().max(), out["column_defect"].decode().max()


@pytest.mark.parametrize(
    "spread, worst",
    [(1, (2.3e-2, 1.2e-4, 1e-6)), (2, (6.9e-2, 2.3e-2, 8.8e-3)), (4, (2.0e-1, 6.0e-2, 2.7e-2))],
)
def test_defect_of_random_maps(spread, worst):
    """Of the size that the contract reports for 2400 other maps; the worst one varies widely."""
    found = [defect_of(repeat, spread) for repeat in (10, 20, 40)]
    for (rows, columns), expected in zip(found, worst):
        assert expected / 20 < rows < 8 * expected and columns < 3e-6
    assert found[0][0] > found[1][0] > found[2][0]


def test_product_of_sixty_maps_stays_doubly_stochastic():
    combs = comb_of(random(29).standard_normal((60, 40, 4, 4)), 20)
    out = run("mhc.amax_gain", {"comb": combs})
    for side in ("forward", "backward"):
        gain = out[f"composite_{side}_gain"].decode()
        assert np.all(np.abs(gain - 1) < 2e-4)  # 60 times the floor, and what R = 20 leaves
        assert np.all(np.abs(out[f"{side}_gain"].decode() - 1) < 5e-3)
    composite = np.eye(4)
    for layer in combs.decode():
        composite = composite @ layer
    assert np.abs(composite.sum(-1) - 1).max() < 2e-4


# --- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("convention, eps", CONVENTIONS)
def test_a_single_stream_is_one(convention, eps):
    comb = sinkhorn(np.array([[[-80.0]], [[3.0]]]), 4, eps, convention)
    assert np.abs(comb - 1).max() <= 1.01 * eps


def test_far_below_the_row_maximum():
    """Entries stay positive thanks to eps, and their gradient is exactly 0."""
    logits = np.zeros((1, 3, 3))
    logits[0, 0, 1] = -800.0
    comb = comb_of(logits, 10)
    assert 0 < comb.decode()[0, 0, 1] < 1e-5
    inputs = singles({"comb_logits": logits, "grad_comb": random(30).standard_normal((1, 3, 3))})
    gradient = run("mhc.sinkhorn_bwd", inputs, {"repeat": 10, "eps": 1e-6})["grad_comb_logits"]
    assert gradient.decode()[0, 0, 1] == 0 and np.all(np.isfinite(gradient.decode()))
    assert np.any(gradient.decode())


@pytest.mark.parametrize("spread", [30.0, 300.0])
def test_log_domain_of_spiky_logits(spread):
    """Without eps the linear form is 0/0 there; the logarithms are not."""
    logits = spread * random(31).standard_normal((50, 4, 4))
    comb = sinkhorn(logits, 20, 0.0, "log")
    assert np.all(np.isfinite(comb)) and np.abs(comb.sum(axis=-2) - 1).max() < 1e-12


def test_row_maximum_is_subtracted():
    """Large logits do not overflow, and a constant of a row changes nothing."""
    logits = random(32).standard_normal((20, 4, 4))
    shifted = logits + random(33).uniform(-700, 700, (20, 4, 1))
    for convention in ("deepseek", "megatron", "log"):
        got = sinkhorn(shifted, 5, 1e-6, convention)
        assert np.abs(got - sinkhorn(logits, 5, 1e-6, convention)).max() < 1e-12


@pytest.mark.parametrize("convention", ["deepseek", "megatron", "log"])
def test_nan_spoils_its_matrix_alone(convention):
    logits = random(34).standard_normal((3, 4, 4))
    logits[1, 2, 3] = np.nan
    comb = comb_of(logits, 5, convention=convention).decode()
    assert np.isnan(comb[1]).all() and np.isfinite(comb[[0, 2]]).all()


# --- published numbers ---------------------------------------------------------------------------


def mersenne_normals(seed, count):
    """Normals from MT19937: 24-bit uniforms, blocks of 16, Box-Muller over halves of a block."""
    twister = np.random.MT19937()
    twister._legacy_seeding(seed)
    uniform = (twister.random_raw(count) & ((1 << 24) - 1)).reshape(-1, 16) * 2.0**-24
    radius, angle = np.sqrt(-2 * np.log(1 - uniform[:, :8])), 2 * np.pi * uniform[:, 8:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def test_printed_matrix_after_ten_iterations():
    logits = mersenne_normals(0, 48).reshape(3, 4, 4)
    printed = [
        [-1.1258398, -1.1523602, -0.2505786, -0.4338788],
        [0.8487103, 0.6920093, -0.3160128, -2.1152196],
        [0.322275, -1.2633348, 0.3499832, 0.3081339],
        [0.1198415, 1.2376579, 1.1167772, -0.2472777],
    ]
    assert np.abs(logits[0] - printed).max() < 1e-6
    result = [
        [0.078159, 0.0687967, 0.3554636, 0.4975992],
        [0.5682985, 0.38556, 0.0437015, 0.0024172],
        [0.2919925, 0.0113706, 0.2437905, 0.4528599],
        [0.0615492, 0.5342717, 0.3570434, 0.0471227],
    ]
    assert np.abs(comb_of(2 * logits, 10).decode()[0] - result).max() < 3e-7


@pytest.mark.parametrize(
    "repeat, row, column",
    [
        (1, 5.337e-1, 2.1e-6),
        (2, 2.569e-1, None),
        (3, 1.539e-1, None),
        (5, 5.911e-2, None),
        (10, 5.696e-3, 1.01e-6),
        (20, 5.376e-5, 1.07e-6),
        (30, 1.371e-6, 1.07e-6),
    ],
)
def test_printed_defects(repeat, row, column):
    """Within the last digit, and within two units of an F32 sum (the printed ones are of F32)."""
    comb = comb_of(2 * mersenne_normals(0, 48).reshape(3, 4, 4), repeat)
    out = run("mhc.defect", {"comb": comb})
    assert abs(out["row_defect"].decode().max() - row) < 6e-4 * row + 2.4e-7
    if column is not None:
        assert abs(out["column_defect"].decode().max() - column) < 2.4e-7


def test_columns_and_rows_of_a_mix_print_as_one():
    """The flow of one mix with eps 1e-6: all sums within [1 - 2e-6, 1]."""
    n, d = 4, 64
    g = random(35)
    inputs = {"residual": encode(g.standard_normal((3, n, d)), "BF16")}
    weights = {"fn": 1e-2 * g.standard_normal((24, n * d)), "scale": np.full(3, 0.5)}
    inputs |= singles({**weights, "base": 0.1 * g.standard_normal(24)})
    attrs = {"norm_eps": 1e-6, "pre_eps": 1e-6, "post_mult": 2.0}
    out = run("mhc.pre_fwd", inputs, {**attrs, "repeat": 20, "sinkhorn_eps": 1e-6, "save": True})
    assert out["layer_input"].shape == (3, 64) and out["layer_input"].dtype == "BF16"
    assert out["pre"].shape == out["post"].shape == (3, 4)
    comb = out["comb"].decode()
    for axis in (-1, -2):
        assert np.all((comb.sum(axis) <= 1 + 1e-7) & (comb.sum(axis) >= 1 - 2e-6))
