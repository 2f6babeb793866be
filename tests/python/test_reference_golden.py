"""The NumPy reference passes every golden case of the operators it has, and its own tools work."""

import json
import pathlib
import re

import numpy as np
import pytest
from engramhc.reference import REFERENCE
from engramhc.reference.dtypes import STORAGE, Tensor, encode, spacing
from engramhc.reference.files import FileError, load, parse, serialize
from engramhc.reference.tolerance import comparable, compare

from broken_files import broken_files
from legality import attributes_of, legal, outputs_of

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
CASES = sorted(
    path for path in GOLDEN.glob("*.safetensors") if path.name.rsplit(".", 2)[0] in REFERENCE
)


def test_every_operator_has_golden_cases():
    assert {path.name.rsplit(".", 2)[0] for path in CASES} == set(REFERENCE)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name.removesuffix(".safetensors"))
def test_golden(path):
    tensors, metadata = load(path)
    case = json.loads(metadata["ehc"])
    inputs = {name: t for name, t in tensors.items() if not name.startswith("expected.")}
    outputs = comparable(REFERENCE[case["op"]](inputs, case["set"]))
    expected = {
        name.removeprefix("expected."): t
        for name, t in tensors.items()
        if name.startswith("expected.")
    }
    assert set(outputs) == set(expected)
    for name, target in expected.items():
        result = compare(outputs[name], target, case["tolerance"][name])
        assert result.passed, f"{name}: {result.text}"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name.removesuffix(".safetensors"))
def test_rows_describe_golden_cases(path):
    """The inputs are legal and the outputs listed, with their dtypes."""
    tensors, metadata = load(path)
    case = json.loads(metadata["ehc"])
    inputs = {name: t for name, t in tensors.items() if not name.startswith("expected.")}
    assert legal(case["op"], inputs, case["set"])
    assert set(case["set"]) <= set(attributes_of(case["op"]))
    rows = outputs_of(case["op"])
    for name, t in tensors.items():
        if name.startswith("expected."):
            row = rows[re.sub(r"\.\d+$", ".L", name.removeprefix("expected."))]
            assert row["class"] == "X" or t.dtype in row["dtypes"]


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F8_E4M3"])
def test_every_code_survives(dtype):
    """Widening is exact, and narrowing finds every code again; NaN stays NaN."""
    width = STORAGE[dtype].itemsize
    codes = np.arange(256**width).astype(f"<u{width}")
    values = Tensor(dtype, codes.view(STORAGE[dtype])).decode()
    again = encode(values, dtype)
    nan = np.isnan(values)
    assert np.array_equal(again.data.view(codes.dtype)[~nan], codes[~nan])
    assert np.isnan(again.decode()[nan]).all()
    assert nan.sum() == {"F16": 2046, "BF16": 254, "F8_E4M3": 2}[dtype]


@pytest.mark.parametrize(
    "value, dtype, rounded",
    [
        (1 + 2.0**-8, "BF16", 1.0),
        (1 + 3 * 2.0**-8, "BF16", 1 + 2.0**-6),  # ties to even
        (1 + 2.0**-8 + 2.0**-40, "BF16", 1 + 2.0**-7),  # one rounding, not two by way of F32
        (1 + 2.0**-11 + 2.0**-40, "F16", 1 + 2.0**-10),
        (1 + 2.0**-24 + 2.0**-50, "F32", 1 + 2.0**-23),
        (65519.9, "F16", 65504.0),
        (65520.0, "F16", np.inf),
        (2.0**-134, "BF16", 0.0),
        (3 * 2.0**-134, "BF16", 2.0**-132),
        (-(2.0**-150), "F32", -0.0),
        (1e39, "F32", np.inf),
        (17.0, "F8_E4M3", 16.0),
        (19.0, "F8_E4M3", 20.0),
        (464.1, "F8_E4M3", 448.0),
        (-np.inf, "F8_E4M3", -448.0),
        (2.0**-10, "F8_E4M3", 0.0),
        (3 * 2.0**-10, "F8_E4M3", 2.0**-8),
    ],
)
def test_rounding(value, dtype, rounded):
    got = encode(np.array([value, -value]), dtype).decode()
    assert got.tobytes() == np.array([rounded, -rounded]).tobytes(), got


def test_spacing():
    assert spacing(np.array([1.0, 0.99, 0.0, 2.0**-127, 3e38]), "BF16").tolist() == [
        2.0**-7,
        2.0**-8,
        2.0**-133,
        2.0**-133,
        2.0**120,
    ]


@pytest.mark.parametrize("case", broken_files())
def test_reader_refuses(case):
    with pytest.raises(FileError):
        parse(broken_files()[case])


def test_file_round_trip():
    tensors = {
        f"{dtype}.{rank}": Tensor(dtype, np.zeros((2, 3, 0, 5)[:rank], storage))
        for dtype, storage in STORAGE.items()
        for rank in range(5)
    }
    again, metadata = parse(serialize(tensors, {"key": "\u00fc\n"}))
    assert metadata == {"key": "\u00fc\n"}
    assert {name: repr(t) for name, t in again.items()} == {n: repr(t) for n, t in tensors.items()}


@pytest.mark.parametrize(
    "tolerance, error, passed",
    [
        ([1, 0], 2.0**-22, True),
        ([1, 0], 2.0**-21, False),
        ([0, 2.0**-21], 2.0**-21, True),
        ([1, 0, 0.5], 2.0**-22, False),
        ([0, 0], 0.0, True),
        ([0, 0], 2.0**-22, False),
    ],
)
def test_tolerance_rule(tolerance, error, passed):
    expected, got = np.full(8, 2.0), np.full(8, 2.0 + error)
    assert compare(encode(got, "F32"), encode(expected, "F32"), tolerance).passed is passed
