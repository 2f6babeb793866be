"""EngramHC: Engram conditional memory and mHC hyper-connections.

`engramhc.ops` has every operator on NumPy, torch and other arrays, `engramhc.presets` the constants
of published models, `engramhc.reference` the double-precision NumPy reference. Importing the
package loads neither the library nor a framework.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
from typing import Any, Iterator

from . import presets
from .errors import (
    AliasError,
    ArgumentError,
    CudaError,
    DeviceError,
    DTypeError,
    Error,
    ShapeError,
    TableError,
    UnsupportedError,
)

__version__ = "0.1.0"
__all__ = [
    "AliasError", "ArgumentError", "CudaError", "DTypeError", "DeviceError", "Error", "ShapeError", "TableError",
    "UnsupportedError", "build_info", "device_info", "implementation", "presets", "set_num_threads", "verbose",
]  # fmt: skip


def build_info() -> dict[str, Any]:
    """What the installed library holds: version, instruction sets that this processor runs, matrix
    product, whether CUDA is in it, and the names of all operators."""
    from . import _core

    info = json.loads(_core.checked(_core.library().build_info()))
    return {**info, "operators": [op.name for op in _core.operators()]}


def device_info() -> dict[str, Any]:
    """Threads of the CPU backend, and the CUDA devices that are there."""
    from . import _core

    library = _core.library()
    return {
        "threads": _core.checked(library.num_threads()),
        "cuda": [device["description"] for device in json.loads(_core.checked(library.device_info()))],
    }


def set_num_threads(count: int) -> None:
    """Threads of calls on the CPU from now on; 0 takes all cores. No bit depends on them."""
    from . import _core

    _core.checked(_core.library().set_num_threads(int(count)), "set_num_threads")


def verbose() -> contextlib.AbstractContextManager[list[str]]:
    """A list that gets one line for each call inside: which implementation ran, and why those before
    it refused.

        with engramhc.verbose() as lines:
            ops.mhc_post_fwd(y, residual, post, comb)
    """
    from . import _core

    return _core.logged()


@contextlib.contextmanager
def implementation(op: str, name: str) -> Iterator[None]:
    """Inside, operators that match `op` ("mhc.post_fwd", "mhc.*", "*") run the implementation `name`
    ("reference", "cpu.avx2", a family like "cpu") and raise UnsupportedError where they have none.
    For all threads. The functions of `engramhc.ops` name their operators by `engramhc.verbose()`."""
    from . import _core

    chosen = [known for known in _core.operators() if fnmatch.fnmatchcase(known.name, op)]
    if not chosen:
        raise ArgumentError(f"implementation: expected the name of an operator or a pattern, got '{op}'")
    outer = [_core.force(known, name) for known in chosen]
    try:
        yield
    finally:
        for known, before in zip(chosen, outer):
            _core.force(known, before)
