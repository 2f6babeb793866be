"""The optimizer of the NumPy reference: exact momentum, frozen zeros, sparse and lazy steps, and
the values that the published script of the iteration prints."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from engramhc.reference import run
from engramhc.reference.dtypes import Tensor, encode
from engramhc.reference.optimizer import (
    fma_single,
    optimizer_step_lazy,
    optimizer_step_sparse,
)
from engramhc.reference.tolerance import compare

STATES = ["F32", "BF16"]


def rounded(exact, bits=24, smallest=-149):
    """The F32 (or, with 8 bits and -133, BF16) number nearest to a fraction, ties to even."""
    if exact == 0:
        return Fraction(0)
    size = abs(exact)
    power = size.numerator.bit_length() - size.denominator.bit_length()
    power += size >= Fraction(2) ** (power + 1)
    power -= size < Fraction(2) ** power
    unit = Fraction(2) ** max(power - (bits - 1), smallest)
    return round(exact / unit) * unit  # Python rounds halves to even


def random_singles(generator, count):
    """F32 numbers of widely different size, subnormal ones among them."""
    values = generator.standard_normal(count) * np.exp2(generator.integers(-75, 60, count))
    return values.astype(np.float32)


def test_fma_rounds_once():
    g = np.random.default_rng(0)
    a, b, c = (random_singles(g, 3000) for _ in range(3))
    # Sums that almost cancel, and sums whose tail decides a tie.
    c[:1000] = -(a[:1000] * b[:1000])
    c[1000:2000] *= np.float32(2.0**-60)
    a[:4], b[:4] = 24929.0, 673 * 2.0**-24  # product 1 + 2^-24, halfway between two F32 numbers
    c[:4] = [0.0, 2.0**-60, -(2.0**-60), 2.0**-149]
    got = fma_single(*(x.astype(np.float64) for x in (a, b, c)))
    for values in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist()):
        x, y, z, result = map(Fraction, values)
        assert result == rounded(x * y + z), values
    assert got[:4].tolist() == [1.0, 1 + 2.0**-23, 1.0, 1 + 2.0**-23]


def test_fma_of_special_values():
    inf, nan, big = np.inf, np.nan, float(np.finfo(np.float32).max)
    a = np.array([inf, inf, nan, 1.0, big, big, -0.0, -0.0, 2.0**-149])
    b = np.array([1.0, 0.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, -0.5])
    c = np.array([-inf, 1.0, 1.0, nan, 0.0, -big, -0.0, 0.0, 0.0])
    wanted = np.array([nan, nan, nan, nan, inf, big, -0.0, 0.0, -0.0])
    assert fma_single(a, b, c).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("grad, momentum", itertools.product(STATES, STATES))
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.95, 0.99, 1.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_update(grad, momentum, beta, nesterov):
    """Step by step in fractions."""
    g = np.random.default_rng(1)
    inputs = {
        "grad": encode(random_singles(g, 60).reshape(4, 15), grad),
        "momentum": encode(random_singles(g, 60).reshape(4, 15), momentum),
    }
    out = run("engram.momentum_update", inputs, {"beta": beta, "nesterov": nesterov})
    assert [out["update"].dtype, out["momentum"].dtype] == ["F32", momentum]
    decay = Fraction(float(np.float32(beta)))
    fresh = Fraction(float(np.float32(1.0 - beta)))
    decoded = [t.decode().reshape(-1).tolist() for t in (*inputs.values(), *out.values())]
    for slope, old, update, stored in zip(*(map(Fraction, column) for column in decoded)):
        moved = rounded(old * decay + rounded(fresh * slope))
        ahead = rounded(slope * fresh + rounded(decay * moved)) if nesterov else moved
        assert update == ahead
        assert stored == (moved if momentum == "F32" else rounded(moved, 8, -133))


# --- the iteration -------------------------------------------------------------------------------

MATRIX = np.array(
    [
        [0.6613521575927734, 0.266924113035202, 0.06167725846171379, 0.6213173270225525],
        [-0.4519059658050537, -0.16613022983074188, -1.522768497467041, 0.38168391585350037],
        [-1.0276086330413818, -0.563052773475647, -0.8922905325889587, -0.05825017765164375],
    ]
)
COLUMN_NORMS = {  # before the column step of that round
    0: [1.02401, 0.48524, 1.10937, 0.6966],
    1: [0.82921, 0.83304, 0.98586, 0.80408],
    2: [0.85121, 0.85212, 0.91841, 0.84014],
    3: [0.86009, 0.85998, 0.88699, 0.8567],
    4: [0.86367, 0.86346, 0.87408, 0.86284],
    7: [0.86589, 0.86586, 0.86646, 0.8659],
}
FINAL = [
    [1.022537, 0.866552, 0.065289, 1.482984],
    [-0.681269, -0.525871, -1.571715, 0.888282],
    [-1.220624, -1.404312, -0.725655, -0.106814],
]


def test_printed_values_of_the_iteration():
    """8 rounds on the 3 x 4 matrix of the published script, each value to one unit of the last
    printed digit."""
    state = {
        "update": encode(MATRIX, "F32"),
        "row_scale": encode(np.ones(3), "F32"),
        "col_scale": encode(np.ones(4), "F32"),
    }
    eps = {"eps": 1e-20}
    for number in range(8):
        step = run("engram.sinkhorn_step", state, eps)
        state["row_scale"] = step["row_scale"]
        x = state["row_scale"].decode()[:, None] * MATRIX * state["col_scale"].decode()
        assert np.abs(np.sqrt(np.sum(x**2, axis=1)) - 1).max() < 1.5e-7
        reduced = run(
            "engram.sinkhorn_step_reduce",
            {"col_partial": step["col_partial"], "col_scale": state["col_scale"]},
            eps,
        )
        state["col_scale"] = reduced["col_scale"]
        if number in COLUMN_NORMS:
            norms = np.sqrt(reduced["col_sumsq"].decode())
            assert norms == pytest.approx(COLUMN_NORMS[number], abs=1e-5)
    last = run("engram.sinkhorn_step", state, eps)
    assert last["row_norm"].decode() == pytest.approx([1.15488, 1.15442, 1.1548], abs=1.01e-5)
    final = run("engram.sinkhorn_finalize", state, {**eps, "alpha": 2.0})["out"].decode()
    assert final == pytest.approx(np.array(FINAL), abs=1e-6)
    assert np.sqrt(np.sum(final**2, axis=1)) == pytest.approx([2.0] * 3, abs=1e-6)

    whole = {"weight": encode(np.zeros((3, 4)), "F32"), "grad": state["update"]}
    whole["momentum"] = whole["weight"]
    attrs = {"lr": 1.0, "gamma": 1.0, "beta": 0.0, "repeat": 8, "alpha": 2.0, **eps}
    moved = run("engram.optimizer_step", whole, attrs)["weight"].decode()
    assert -moved == pytest.approx(np.array(FINAL), abs=1e-6)


def table(seed, rows=20, hd=12, weight="F32", grad="F32", momentum="F32"):
    g = np.random.default_rng(seed)
    return {
        "weight": encode(g.standard_normal((rows, hd)), weight),
        "grad": encode(g.standard_normal((rows, hd)), grad),
        "momentum": encode(0.3 * g.standard_normal((rows, hd)), momentum),
    }


def with_zero(tensor, rows=(), columns=()):
    data = tensor.data.copy()
    data[list(rows)] = 0
    data[:, list(columns)] = 0
    return Tensor(tensor.dtype, data)


@pytest.mark.parametrize("weight, grad, momentum", itertools.product(STATES, STATES, STATES))
@pytest.mark.parametrize("nesterov", [False, True])
def test_step_is_its_primitives(weight, grad, momentum, nesterov):
    inputs = table(2, weight=weight, grad=grad, momentum=momentum)
    inputs["grad"] = with_zero(inputs["grad"], rows=[3, 4])
    inputs["momentum"] = with_zero(inputs["momentum"], rows=[3, 4])
    attrs = {"lr": 0.5, "eps": 1e-20, "nesterov": nesterov, "repeat": 3, "gamma": 0.2}
    whole = run("engram.optimizer_step", inputs, attrs)

    moments = {"grad": inputs["grad"], "momentum": inputs["momentum"]}
    moved = run("engram.momentum_update", moments, {"beta": 0.95, "nesterov": nesterov})
    assert np.array_equal(whole["momentum"].data, moved["momentum"].data)
    live = np.ones(20)
    live[[3, 4]] = 0.0
    state = {
        "update": moved["update"],
        "row_scale": encode(live, "F32"),
        "col_scale": encode(np.ones(12), "F32"),
    }
    for _ in range(3):
        step = run("engram.sinkhorn_step", state, {"eps": 1e-20})
        state["row_scale"] = step["row_scale"]
        columns = {"col_partial": step["col_partial"], "col_scale": state["col_scale"]}
        state["col_scale"] = run("engram.sinkhorn_step_reduce", columns, {"eps": 1e-20})[
            "col_scale"
        ]
    change = run("engram.sinkhorn_finalize", state, {"eps": 1e-20, "alpha": 12**0.5})["out"]
    rate = float(np.float32(0.5 * 0.2))
    expected = inputs["weight"].decode() - rate * change.decode()
    tolerance = [1, 1e-6] if weight == "F32" else [1, 1e-6, 0.02]
    assert compare(whole["weight"], encode(expected, weight), tolerance).passed
    assert np.array_equal(whole["weight"].data[[3, 4]], inputs["weight"].data[[3, 4]])


def test_change_of_a_row():
    """Live rows move by lr * gamma in root mean square (alpha: in norm), against the signs of A;
    columns end up alike; the scale of the gradient does not matter."""
    inputs = table(3, rows=50)
    inputs["weight"] = encode(np.zeros((50, 12)), "F32")
    inputs["momentum"] = inputs["weight"]
    attrs = {"lr": 0.5, "eps": 1e-20, "beta": 0.0, "repeat": 20}
    moved = run("engram.optimizer_step", inputs, attrs)["weight"].decode()
    assert np.sqrt(np.mean(moved**2, axis=1)) == pytest.approx(0.5 * 0.18, rel=1e-6)
    assert np.array_equal(np.sign(moved), -np.sign(inputs["grad"].decode()))
    assert np.ptp(np.sqrt(np.sum(moved**2, axis=0))) < 1e-5
    half = run("engram.optimizer_step", inputs, {**attrs, "alpha": 0.5})["weight"].decode()
    assert np.sqrt(np.sum(half**2, axis=1)) == pytest.approx(0.5 * 0.18 * 0.5, rel=1e-6)
    scaled = {**inputs, "grad": encode(inputs["grad"].decode() * 2.0**40, "F32")}
    again = run("engram.optimizer_step", scaled, attrs)["weight"].decode()
    assert again == pytest.approx(moved, rel=1e-6)


@pytest.mark.parametrize(
    "tau, norms, live",
    [
        (0.0, [4.0, 2.0, 2.0, 0.125, 0.0], [1, 1, 1, 1, 0]),
        (0.1, [4.0, 2.0, 2.0, 0.125, 0.0], [1, 1, 1, 0, 0]),  # the mean is 1.625
        (0.07, [4.0, 2.0, 2.0, 0.125, 0.0], [1, 1, 1, 1, 0]),  # without the zeros: 2.03
        (1.0, [2.0, 2.0], [0, 0]),  # equality is not above
    ],
)
def test_live_rows(tau, norms, live):
    """Strictly above tau times the mean norm over all rows, those of zeros included."""
    norms = np.array(norms)
    zeros = encode(np.zeros((norms.size, 4)), "F32")
    gradient = encode(np.repeat(norms[:, None] / 2, 4, axis=1), "F32")
    inputs = {"weight": zeros, "grad": gradient, "momentum": zeros}
    attrs = {"lr": 1.0, "eps": 1e-20, "tau": tau, "beta": 0.0}
    out = run("engram.optimizer_step", inputs, attrs)
    assert np.any(out["weight"].decode() != 0, axis=1).astype(int).tolist() == live
    assert np.array_equal(out["momentum"].data, gradient.data)  # kept for all rows


@pytest.mark.parametrize("weight, state", itertools.product(STATES, STATES))
@pytest.mark.parametrize("rows", [[], [0, 7, 19], range(20)])
@pytest.mark.parametrize("columns", [[], [0, 11], range(12)])
@pytest.mark.parametrize("tau", [0.0, 1e-3])
def test_zero_rows_and_columns(weight, state, rows, columns, tau):
    inputs = table(4, weight=weight, grad=state, momentum=state)
    for name in ("grad", "momentum"):
        inputs[name] = with_zero(inputs[name], rows, columns)
    for repeat in (1, 5, 64):
        attrs = {"lr": 0.1, "eps": 1e-20, "tau": tau, "repeat": repeat}
        out = run("engram.optimizer_step", inputs, attrs)
        assert np.isfinite(out["weight"].decode()).all()
        same = out["weight"].data == inputs["weight"].data
        assert same[list(rows)].all() and same[:, list(columns)].all()
        if len(rows) < 20 and len(columns) < 12:
            assert not same.all()


# --- sparse gradients ----------------------------------------------------------------------------


def sparse_part(inputs, seed, index_dtype):
    g = np.random.default_rng(seed)
    touched = np.flatnonzero(g.random(inputs["grad"].shape[0]) < 0.4)
    others = np.setdiff1d(np.arange(inputs["grad"].shape[0]), touched)
    dense = with_zero(inputs["grad"], rows=others)
    rows = Tensor(dense.dtype, dense.data[touched])
    return touched, others, dense, (encode(touched, index_dtype), rows)


@pytest.mark.parametrize("weight, grad, momentum", itertools.product(STATES, STATES, STATES))
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.95])
def test_sparse_step_is_the_dense_one(weight, grad, momentum, nesterov, beta):
    """The same bits, also where old momentum underflows to a zero of either sign."""
    inputs = table(5, weight=weight, grad=grad, momentum=momentum)
    tiny = inputs["momentum"].data.copy()
    tiny[::3] = encode(np.array([2.0**-133, -(2.0**-133), -0.0]).repeat(4), momentum).data
    inputs["momentum"] = Tensor(momentum, tiny)
    _, _, inputs["grad"], sparse = sparse_part(inputs, 6, "I32")
    attrs = {"lr": 0.1, "eps": 1e-20, "beta": beta, "nesterov": nesterov}
    dense = run("engram.optimizer_step", inputs, attrs)
    other = optimizer_step_sparse(inputs["weight"], *sparse, inputs["momentum"], **attrs)
    for name, tensor in dense.items():
        assert np.array_equal(other[name].data.view(np.uint8), tensor.data.view(np.uint8)), name


def test_several_sparse_steps():
    """Rows once touched keep moving by their momentum."""
    inputs = table(7)
    dense = sparse = {
        "weight": inputs["weight"],
        "momentum": encode(np.zeros(inputs["weight"].shape), "F32"),
    }
    attrs = {"lr": 0.1, "eps": 1e-20, "repeat": 2, "tau": 1e-3, "gamma": 0.5}
    for number in range(4):
        touched, _, gradient, part = sparse_part(table(number), number, "I64")
        before = dense["weight"].data
        dense = run("engram.optimizer_step", {**dense, "grad": gradient}, attrs)
        sparse = optimizer_step_sparse(sparse["weight"], *part, sparse["momentum"], **attrs)
        for name, tensor in dense.items():
            assert np.array_equal(sparse[name].data, tensor.data)
    moved = np.any(before != dense["weight"].data, axis=1)
    assert moved.sum() > len(touched)


@pytest.mark.parametrize("weight, momentum", itertools.product(STATES, STATES))
@pytest.mark.parametrize("index_dtype", ["I32", "I64"])
def test_lazy_step(weight, momentum, index_dtype):
    """Untouched rows keep their bits, and what they hold does not matter to the others."""
    inputs = table(8, weight=weight, momentum=momentum)
    touched, others, gradient, part = sparse_part(inputs, 9, index_dtype)
    attrs = {"lr": 0.1, "eps": 1e-20}
    out = optimizer_step_lazy(inputs["weight"], *part, inputs["momentum"], **attrs)
    noisy = inputs["momentum"].data.copy()
    noisy[others] = encode(np.float64(np.nan), momentum).data
    again = optimizer_step_lazy(inputs["weight"], *part, Tensor(momentum, noisy), **attrs)
    alone = run(
        "engram.optimizer_step",
        {
            "weight": Tensor(weight, inputs["weight"].data[touched]),
            "grad": part[1],
            "momentum": Tensor(momentum, inputs["momentum"].data[touched]),
        },
        attrs,
    )
    for name in out:
        assert np.array_equal(out[name].data[others], inputs[name].data[others])
        assert np.array_equal(out[name].data[touched], alone[name].data)
        assert np.array_equal(again[name].data[touched], alone[name].data)
    dense = run("engram.optimizer_step", {**inputs, "grad": gradient}, attrs)
    assert not np.array_equal(dense["weight"].data, out["weight"].data)


@pytest.mark.parametrize("step", [optimizer_step_sparse, optimizer_step_lazy])
@pytest.mark.parametrize("rows", [[1, 1], [2, 1], [-1, 1], [1, 20]])
def test_bad_rows_are_refused(step, rows):
    inputs = table(10)
    part = (encode(np.array(rows), "I32"), Tensor("F32", inputs["grad"].data[:2]))
    with pytest.raises(ValueError, match="unique_rows"):
        step(inputs["weight"], *part, inputs["momentum"], lr=0.1, eps=1e-20)


@pytest.mark.parametrize("step", [optimizer_step_sparse, optimizer_step_lazy])
def test_no_rows_at_all(step):
    inputs = table(11)
    none = (encode(np.zeros(0, int), "I32"), encode(np.zeros((0, 12)), "F32"))
    out = step(inputs["weight"], *none, inputs["momentum"], lr=0.1, eps=1e-20)
    unchanged = np.array_equal(out["weight"].data, inputs["weight"].data)
    assert unchanged is (step is optimizer_step_lazy)
    empty = table(12, rows=0)
    del empty["grad"]
    out = step(empty["weight"], *none, empty["momentum"], lr=0.1, eps=1e-20)
    assert out["weight"].shape == (0, 12)
