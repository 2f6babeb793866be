"""`tile_kernels.modeling`: functions with autograd."""

from . import engram, mhc
