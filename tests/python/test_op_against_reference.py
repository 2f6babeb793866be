"""The program against the NumPy reference, through files, at the edges of the contract.

Every case runs with the implementation that the library chooses and with one named implementation,
taken in turn from all that `ehc op --list` shows for the CPU.
"""

import numpy as np
import pytest
from engramhc.reference import REFERENCE
from engramhc.reference.tolerance import comparable, compare

from conftest import Refused
from error_bounds import tolerances
from op_cases import SPACES, build, cases_of


def test_every_operator_of_the_reference_has_cases():
    assert set(SPACES) == set(REFERENCE)


def check(name, inputs, attrs, outputs, expected):
    assert set(outputs) == set(expected)
    outputs, expected = comparable(outputs), comparable(expected)
    allowed = tolerances(name, inputs, attrs, expected)
    for output, target in expected.items():
        result = compare(outputs[output], target, allowed[output])
        assert result.passed, f"{output}: {result.text}"
    mask = inputs.get("image_token_mask")
    for source, copy in (("residual", "out"), ("grad_out", "grad_residual")):
        if (
            mask is not None
            and source in inputs
            and copy in outputs
            and attrs.get("mode") != "value"
        ):
            bits = inputs[source].data.view(np.uint8)
            assert np.array_equal(outputs[copy].data.view(np.uint8)[mask.data], bits[mask.data])


@pytest.mark.parametrize("name", list(SPACES))
def test_operator(ehc, name):
    if name not in ehc.table:
        pytest.skip("not in this build")
    implementations = ehc.implementations(name)
    cases = cases_of(name)
    assert len(cases) >= len(implementations)
    failures = []
    for number, case in cases:
        inputs, attrs = build(name, number, case)
        expected = REFERENCE[name](inputs, attrs)
        for impl in (None, implementations[number % len(implementations)]):
            try:
                outputs = ehc.op(name, inputs, attrs, impl=impl, in_metadata=number % 2 == 0)
                check(name, inputs, attrs, outputs, expected)
            except Refused:
                continue
            except AssertionError as error:
                failures.append(f"{impl or 'default'} on {case}: {str(error).splitlines()[0]}")
    assert not failures, f"{len(failures)} failures\n" + "\n".join(failures)


def test_named_implementations_are_covered(ehc):
    """Taking turns must reach every implementation on at least two different cases."""
    for name in SPACES:
        if name in ehc.table:
            turns = len(cases_of(name)) // len(ehc.implementations(name))
            assert turns >= 2, name
