"""`tile_kernels.rand`: torch's generator."""

from torch import manual_seed as set_seed
from torch import randn, randn_like

__all__ = ["randn", "randn_like", "set_seed"]
