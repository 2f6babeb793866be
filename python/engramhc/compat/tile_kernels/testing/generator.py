"""`tile_kernels.testing.generator`: shapes that its tests go through."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ..config import get_device_num_sms
from ..utils import align as aligned

_LEVEL = 1  # 0 few, 1 as usual, 2 all


def get_test_level() -> int:
    return _LEVEL


def is_precompile() -> bool:
    """Nothing is compiled at run time."""
    return False


def generate_samples(level: int, **dimensions: Any) -> Iterator[dict[str, Any]]:
    """All combinations at level 2; below, as many as show every value once."""
    values = {name: list(given) for name, given in dimensions.items()}
    if level >= 2:
        for combination in itertools.product(*values.values()):
            yield dict(zip(values, combination))
        return
    for i in range(max(map(len, values.values()))):
        yield {name: given[i % len(given)] for name, given in values.items()}


def generate_num_tokens(
    level: int | None = None,
    alignment: int = 1,
    backward_only: bool = False,
    is_benchmark: bool = False,
) -> list[int]:
    """2.x with its `level`, a number up to 2; else those of 1.x, whose first argument is `alignment`."""
    if level is None or level > 2:
        return [aligned(tokens, level or alignment) for tokens in (4001, 8001)]
    tokens = [8001] if level == 0 and backward_only else [512, 8001]
    return [aligned(count, alignment) for count in ([0, 1] if level == 2 else []) + tokens]


def generate_hidden_sizes(align: int = 64) -> list[int]:
    """Of 1.x and 2.x."""
    sizes = [128, 192, 384, 576, 768, 2048, 2560, 3072, 4096, 6144, 7168]
    return [size for size in sizes if size % align == 0]


def generate_num_sms(level: int | None = None) -> list[int]:
    """The most last. Fewer than 20 multiprocessors have no second number."""
    most = get_device_num_sms()
    fewer = [] if level == 0 else [most - (20 if level is None else 19)]
    return ([1] if level == 2 else []) + [count for count in fewer if count > 0] + [most]
