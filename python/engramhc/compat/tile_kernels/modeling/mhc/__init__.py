"""`tile_kernels.modeling.mhc` of 1.x."""

from . import ops
from .functional import expand_from_embedding, mhc_head, mhc_pre
