"""What builders of inputs share: numbers, choices, and the choice of few cases."""

import itertools

import numpy as np
from engramhc.reference.dtypes import encode

TOKENS = [0, 1, 2, 31, 33]
STREAMS = [1, 2, 3, 4, 5, 6, 7, 8]
WIDTHS = [1, 7, 64, 96, 257, 576, 1000]
ACTIVATIONS = ["F32", "BF16", "F16"]
WEIGHTS = ["F32", "BF16"]


def covering(space, seed):
    """Few cases such that every pair of values of two factors occurs in one of them."""
    generator = np.random.default_rng(seed)
    names = list(space)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(space[names[a]]))
        for j in range(len(space[names[b]]))
    }
    cases = []
    while missing:
        # Start from a missing pair, then give every other factor its most useful value.
        case = dict(min(missing))
        for a in generator.permutation(len(names)).tolist():
            if a in case:
                continue
            values = generator.permutation(len(space[names[a]])).tolist()
            case[a] = max(
                values,
                key=lambda i: sum(
                    (((a, i), (b, j)) if a < b else ((b, j), (a, i))) in missing
                    for b, j in case.items()
                ),
            )
        missing -= {pair for pair in itertools.combinations(sorted(case.items()), 2)}
        cases.append({names[a]: space[names[a]][i] for a, i in sorted(case.items())})
    return cases


def floats(generator, shape, dtype, special="normal", center=0.0):
    """Normal numbers around `center`, made special here and there."""
    values = center + generator.standard_normal(shape)
    flat = values.reshape(-1)
    if special == "zero":
        flat[:] = np.where(generator.random(flat.size) < 0.5, 0.0, -0.0)
    elif special == "tiny":
        flat *= 2.0**-20 if dtype == "F16" else 2.0**-135
    elif special in ("nan", "inf") and flat.size:
        chosen = generator.integers(0, flat.size, 2)
        flat[chosen] = np.nan if special == "nan" else [np.inf, -np.inf]
    elif special == "strange" and flat.size:
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -3e-39, 3e38, 6e-8, 65520.0])
        chosen = generator.random(flat.size) < 0.3
        flat[chosen] = generator.choice(odd, int(chosen.sum()))
    with np.errstate(over="ignore"):
        return encode(values, dtype)


def set_if(**attrs):
    return {name: value for name, value in attrs.items() if value is not None}


def targets(g, **shapes):
    """Accumulation targets; a shape of None: absent."""
    return {x: floats(g, shape, "F32") for x, shape in shapes.items() if shape is not None}
