"""Every operator on arrays of any framework with DLPack: NumPy, torch, CuPy, JAX.

Forward and backward, without autograd and without hidden state. Results come back in the framework
of the first array, new and contiguous, or in the caller's `out=`. CUDA work goes to the framework's
current stream, or to the integer handle `stream=`; scratch memory is the framework's, or the caller's
`workspace=` (bytes, as many as `workspace_size` says). Leading dimensions are free. Wrong arguments
raise subclasses of `engramhc.Error` before anything is written.
"""

from __future__ import annotations

from typing import Any, Callable

from .. import _core
from . import engram, mhc, optimizer, sublayer
from .engram import *  # noqa: F403
from .mhc import *  # noqa: F403
from .optimizer import *  # noqa: F403
from .sublayer import *  # noqa: F403

__all__ = sorted([*engram.__all__, *mhc.__all__, *optimizer.__all__, *sublayer.__all__, "workspace_size"])


def workspace_size(op: str | Callable, *args: Any, **kwargs: Any) -> int:
    """Bytes of `workspace=` for a call of the function or of its name with these arguments."""
    return _core.workspace_size(globals()[op] if isinstance(op, str) else op, *args, **kwargs)
