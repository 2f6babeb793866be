"""The error bounds of the mHC operators hold for an F32 evaluation, and tell a TF32 one apart."""

import numpy as np
import pytest
from engramhc.reference import REFERENCE, mhc_pre, mhc_projection, mhc_seams
from engramhc.reference.dtypes import Tensor, nearest
from engramhc.reference.tolerance import comparable, compare

from error_bounds import tolerances
from error_bounds_mhc import BOUNDS
from op_cases import build, cases_of
from running_error import UNIT, Approximate, exact

decode = Tensor.decode


@pytest.fixture
def evaluate(monkeypatch):
    """evaluate(name, inputs, attrs, operands): the reference on F32 arrays instead of double ones,
    whose F32 operands may be rounded further."""

    def run(name, inputs, attrs, operands="F32"):
        def narrow(array, dtype):
            return nearest(array, dtype).astype(np.float32)

        def decoded(tensor):
            array = decode(tensor)
            if array.dtype != np.float64:
                return array
            return narrow(array, operands if tensor.dtype == "F32" else tensor.dtype)

        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "decode", decoded)
            for module in (mhc_pre, mhc_projection, mhc_seams):
                patch.setattr(module, "nearest", narrow)
            outputs = REFERENCE[name](inputs, attrs)
        return comparable(outputs)

    return run


def misses(name, inputs, attrs, outputs):
    """Texts of the outputs that are too far off."""
    expected = comparable(REFERENCE[name](inputs, attrs))
    allowed = tolerances(name, inputs, attrs, expected)
    results = {x: compare(outputs[x], t, allowed[x]) for x, t in expected.items()}
    return [f"{x}: {result.text}" for x, result in results.items() if not result.passed]


@pytest.mark.parametrize("name", list(BOUNDS))
def test_an_evaluation_in_f32_stays_inside(evaluate, name):
    for number, case in cases_of(name)[::5]:
        inputs, attrs = build(name, number, case)
        outputs = evaluate(name, inputs, attrs)
        assert not misses(name, inputs, attrs, outputs), (
            case,
            misses(name, inputs, attrs, outputs),
        )


@pytest.mark.parametrize("name", sorted(set(BOUNDS) - {"mhc.expand_bwd"}))
def test_operands_in_tf32_do_not(evaluate, name):
    """Where there is something to see: some tokens, ordinary numbers, outputs in F32."""
    seen = told = 0
    clear = {"special": "normal", "dtype": "F32", "upstream": "all", "precision": None}
    for number, case in cases_of(name)[::6]:
        case = {x: clear.get(x, value) for x, value in case.items()}
        inputs, attrs = build(name, number, case)
        if all(t.data.size for t in inputs.values()):
            seen += 1
            told += bool(misses(name, inputs, attrs, evaluate(name, inputs, attrs, "TF32")))
    assert seen >= 2 and told >= 0.7 * seen, f"{told} of {seen}"


# --- arrays that carry errors --------------------------------------------------------------------


def test_an_error_is_never_lost():
    x = exact(np.ones((2, 3)))
    for lossy in (np.asarray, np.sort, np.linalg.norm, np.cos, lambda a: np.add.reduce(a)):
        with pytest.raises(TypeError):
            lossy(x)


def test_values_are_those_of_plain_arrays():
    g = np.random.default_rng(5)
    a, b = g.uniform(0.5, 2, (3, 4)), g.uniform(0.5, 2, (4, 3))

    def formula(x, y):
        product = x @ y - np.einsum("ij,jk->ik", x, y) * 0.5
        rows = np.concatenate(
            [product / np.sqrt(np.mean(product**2, axis=-1, keepdims=True)), x], 1
        )
        return np.where(a[:, :1] > 1, np.exp(-np.abs(rows)), rows).sum(axis=0)

    got = formula(exact(a), exact(b))
    assert np.array_equal(got.value, formula(a, b))
    single = formula(a.astype(np.float32), b.astype(np.float32))
    from_rounding = formula(Approximate(a, UNIT * a), Approximate(b, UNIT * b))
    assert np.all(np.abs(single - got.value) <= from_rounding.error + UNIT * np.abs(got.value))
    assert np.all(got.error < 2e-5) and np.all(got.error > 0)


def test_a_rounding_flips_only_near_a_tie():
    half = 1 + 2.0**-8  # between two numbers of BF16
    x = Approximate(np.array([1.0, half, half + 1e-6, half + 1e-4]), 1e-5)
    rounded = x.rounded("BF16")
    assert rounded.error.tolist() == [0, 2.0**-7, 2.0**-7, 0]
    assert np.array_equal(rounded.value, nearest(x.value, "BF16"))
