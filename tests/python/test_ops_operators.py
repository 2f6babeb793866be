"""Every function of `engramhc.ops` against the reference, at the edges of the contract: the cases of
test_op_against_reference.py, with NumPy's and with torch's arrays."""

import importlib.util

import pytest
from engramhc.reference import REFERENCE

import ops_calls
from op_cases import SPACES, build, cases_of
from test_op_against_reference import check

FRAMEWORKS = ["numpy"] + ["torch"] * (importlib.util.find_spec("torch") is not None)
# Two functions of Python make what is one here: split_bwd and its reduction (test_ops_values.py).
WITHOUT = {"mhc.split_bwd", "mhc.split_bwd_reduce"}


def test_every_operator_has_a_function():
    assert set(ops_calls.CALLS) | WITHOUT == set(SPACES)


@pytest.mark.parametrize("name", sorted(ops_calls.CALLS))
def test_function(name):
    failures = []
    for number, case in cases_of(name)[number_of(name) % 3 :: 3]:  # the program runs all of them
        inputs, attrs = build(name, number, case)
        if has_groups(name, inputs, attrs):
            continue
        expected = REFERENCE[name](inputs, attrs)
        for framework in FRAMEWORKS if inputs else ["numpy"]:
            try:
                outputs = ops_calls.run(name, inputs, attrs, framework)
                if name == "mhc.seam_broadcast_fwd":  # the function saves to give `pre`
                    outputs = {key: outputs[key] for key in expected}
                if attrs.get("mode") == "stats":  # engram_gate_stats has two
                    expected = {key: expected[key] for key in ("alpha", "value_mean_square")}
                check(name, inputs, attrs, outputs, expected)
            except AssertionError as error:
                failures.append(f"{framework}, {case}: {str(error).splitlines()[0]}")
    assert not failures, f"{len(failures)} failures\n" + "\n".join(failures)


def number_of(name):
    return sorted(ops_calls.CALLS).index(name)


def has_groups(name, inputs, attrs):
    """RMS groups are not among the arguments of the functions."""
    ranks = {
        "mhc.reduce_partials_fwd": ("sqr_partial", 2),
        "mhc.pre_big_fuse": ("sqr_partial", 2),
        "mhc.reduce_partials_bwd": ("sqr", 1),
        "mhc.norm_fn_bwd": ("grad_sqr", 1),
    }
    sums, rank = ranks.get(name, (None, 0))
    return attrs.get("groups", 1) != 1 or (sums is not None and len(inputs[sums].shape) > rank)
