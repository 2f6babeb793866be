"""`tile_kernels.testing`: comparisons, names and shapes of its tests."""

from . import bench, generator, numeric
