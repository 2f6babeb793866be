"""Code written for `tile_kernels` runs unchanged.

import engramhc.compat
engramhc.compat.install()       # before anything imports tile_kernels
import tile_kernels             # is engramhc.compat.tile_kernels, as are all its submodules
"""

from __future__ import annotations

import importlib
import sys

from ..errors import ArgumentError

__all__ = ["install", "uninstall"]

_OURS = f"{__name__}.tile_kernels"
_THEIRS = "tile_kernels"


def install(*, precision: str = "fp32", force: bool = False) -> None:
    """Puts the package and its submodules into `sys.modules` as `tile_kernels`. ImportError when a
    foreign one is there, unless `force`. `precision="tf32"` projects as precisely as it does."""
    if precision not in ("fp32", "tf32"):
        raise ArgumentError(f"install: attribute 'precision': expected fp32 or tf32, got {precision!r}")
    importlib.import_module(f"{_OURS}._settings").precision = precision
    ours = importlib.import_module(_OURS)
    foreign = sys.modules.get(_THEIRS)
    if foreign not in (None, ours):
        if not force:
            raise ImportError(
                f"install: expected no module 'tile_kernels', got {getattr(foreign, '__file__', foreign)}"
                "; hint: install() before it is imported, or force=True"
            )
        _forget()
    for name, module in list(sys.modules.items()):
        if name == _OURS or name.startswith(f"{_OURS}."):
            sys.modules[_THEIRS + name.removeprefix(_OURS)] = module


def uninstall() -> None:
    """Takes out what `install` put in."""
    if sys.modules.get(_THEIRS) is sys.modules.get(_OURS, ...):
        _forget()


def _forget() -> None:
    for name in [n for n in sys.modules if n == _THEIRS or n.startswith(f"{_THEIRS}.")]:
        del sys.modules[name]
