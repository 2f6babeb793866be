"""What goes wrong, as exceptions: `<op>: tensor '<argument>': expected <what>, got <what>[; hint: ...]`."""

from __future__ import annotations

import re


class Error(Exception):
    """Base of all errors of the package. Outputs are untouched when one is raised."""


class ShapeError(Error, ValueError):
    """Shape, rank or strides of an array."""


class AliasError(Error, ValueError):
    """Arrays that share memory where they must not."""


class DTypeError(Error, TypeError):
    """Element type of an array, or something that is no array at all."""


class DeviceError(Error, ValueError):
    """Memory of another device, or a device that is not there."""


class ArgumentError(Error, ValueError):
    """A number, choice or workspace outside its range."""


class UnsupportedError(Error, NotImplementedError):
    """No implementation on this device takes the call."""


class TableError(Error, OSError):
    """A file or table that cannot be read, written or understood."""


class CudaError(Error, RuntimeError):
    """The CUDA driver, or memory, failed."""


_CONTRACT, _IO, _UNAVAILABLE = 3, 4, 5  # ehc_status
_EXPECTED = re.compile(r"expected (.*), got (.*)$", re.DOTALL)
_TYPED = re.compile(r"([A-Z0-9_|/]+(?:(?:, | or )[A-Z0-9_]+)*)(?:\[.*\])?$")
_HINTS = (
    ("stride 1 in the last dimension", "pass a contiguous copy"),
    ("leading dimensions that flatten", "pass a contiguous copy"),
    ("strides >= 0", "pass a contiguous copy"),
)


def translated(status: int, text: str, title: str, names: dict[str, str]) -> Error:
    """The exception for a text of the library: its operator is called `title` here, and tensors and
    attributes may have other `names`."""
    _, _, what = text.partition(": ")
    rename = lambda found: f"'{names.get(found[1], found[1])}'"  # noqa: E731
    what = re.sub(r"'([A-Za-z_0-9.]+)'", rename, what)
    kind = _kind(status, what)
    return kind(f"{title}: {what}{_hint(what)}")


def _kind(status: int, what: str) -> type[Error]:
    if status == _IO:
        return TableError
    if status == _UNAVAILABLE:
        return UnsupportedError if "implementation" in what else DeviceError
    if status != _CONTRACT:
        return CudaError
    found = _EXPECTED.search(what)
    if not what.startswith("tensor '") or not found:
        return ArgumentError
    expected, got = found.groups()
    if "overlapping memory" in got:
        return AliasError
    if expected.startswith("memory o"):
        return DeviceError
    wanted, came = _TYPED.match(expected), _TYPED.match(got)
    if expected.startswith("an array") or expected.startswith("a sequence of arrays") or got == "none":
        return DTypeError
    if wanted and came and came[1] not in re.split(r"\||/|, | or ", wanted[1]):
        return DTypeError
    return ShapeError


def _hint(what: str) -> str:
    found = _EXPECTED.search(what)
    if not found:
        return ""
    expected, got = found.groups()
    if what.startswith(("tensor 'comb'", "tensor 'comb.")) and _TYPED.match(expected) and got.startswith("F32["):
        return "; hint: comb is [input stream, output stream]"
    if got.startswith("F64"):
        return "; hint: convert to float32"
    return next((f"; hint: {hint}" for sign, hint in _HINTS if sign in expected), "")
