"""The C interface through ctypes (benches/c_library.py): the calls of benches/compare_torch.py on
NumPy arrays, against the reference."""

import sys

import numpy as np
import pytest
from engramhc.reference import REFERENCE
from engramhc.reference.dtypes import Tensor

from conftest import BUILD, ROOT

sys.path.insert(0, str(ROOT / "benches"))
from c_library import Library, View  # noqa: E402

LIBRARY = BUILD / "lib/libehc.so"


@pytest.fixture
def library():
    return Library(
        LIBRARY,
        threads=2,
        view=lambda a: View(a.ctypes.data, "F32", a.shape),
        new=lambda dtype, shape: np.full(shape, np.nan, {"F32": np.float32}[dtype]),
    )


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(library, name, inputs, attributes):
    run, outputs = library.prepare(name, inputs, attributes)
    run()
    expected = REFERENCE[name]({k: Tensor("F32", v) for k, v in inputs.items()}, attributes)
    assert set(outputs) == set(expected)
    for output, target in expected.items():
        got, target = outputs[output], target.decode()
        if output.endswith("_partial"):  # any number of them
            got, target = got.sum(axis=0), target.sum(axis=0)
        np.testing.assert_allclose(got, target, rtol=1e-4, atol=1e-4, err_msg=output)
    return outputs


def test_the_gate_there_and_back(library):
    gate = {
        "residual": numbers(1, 40, 4, 96),
        "key": numbers(2, 40, 4, 96),
        "value": numbers(3, 40, 96),
        "weight_fused": numbers(4, 4, 96),
    }
    saved = check(library, "engram.gate_fwd", gate, {"eps": 1e-6, "clamp": 1e-6, "save": True})
    saved.pop("out")
    rows = check(
        library,
        "engram.gate_bwd",
        {"grad_out": numbers(5, 40, 4, 96), **gate, **saved},
        {"clamp": 1e-6},
    )
    assert rows["grad_weight_partial"].shape == (5, 4, 96)
    weights = {"weight_hidden": numbers(6, 4, 96), "weight_embed": numbers(7, 4, 96)}
    partials = {"grad_weight_partial": rows["grad_weight_partial"]}
    check(library, "engram.grad_w_reduce", partials | weights, {})


def test_an_operator_with_workspace(library):
    table = {name: numbers(8, 60, 32) for name in ("weight", "grad", "momentum")}
    check(library, "engram.optimizer_step", table, {"lr": 0.1, "eps": 1e-20})
    assert len(library.workspace) > 0


def test_errors_are_those_of_the_library(library):
    with pytest.raises(RuntimeError, match="engram.nothing"):
        library.prepare("engram.nothing", {}, {})
    with pytest.raises(RuntimeError, match="tensor 'weight_embed': expected"):
        library.prepare("engram.fused_weight", {"weight_hidden": numbers(1, 2, 3)}, {})
