"""Central differences of plain float64 functions, to hold against gradients of the reference."""

import numpy as np
from engramhc.reference.dtypes import encode

EXACT = 2e-7  # F32 outputs of exact formulas, beside the largest element of their tensor
ROUNDED = 1e-6  # the same where something before the outputs is rounded to F32


def single_numbers(generator, *shape, center=0.0):
    """float64 values that F32 holds exactly."""
    return (center + generator.standard_normal(shape)).astype(np.float32).astype(np.float64)


def singles(arrays):
    return {name: encode(array, "F32") for name, array in arrays.items()}


def central_differences(function, arrays, name, step):
    """d function(arrays) / d arrays[name], element by element."""
    gradient = np.zeros(arrays[name].shape)
    for place in np.ndindex(*gradient.shape):
        ends = []
        for shift in (step, -step):
            moved = arrays[name].copy()
            moved[place] += shift
            ends.append(function({**arrays, name: moved}))
        gradient[place] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def check_gradients(function, arrays, gradients, step=1e-6, tolerance=EXACT):
    """`gradients`: tensors by the name of the array they belong to."""
    for name, got in gradients.items():
        wanted = central_differences(function, arrays, name, step)
        assert got.shape == wanted.shape, name
        error = np.abs(got.decode() - wanted).max(initial=0.0)  # NaN stays NaN, and fails
        largest = np.abs(wanted).max(initial=0.0)
        noise = 1e-15 / step if tolerance else 0.0  # of the differences, where all is tiny
        assert error <= tolerance * largest + noise, f"{name}: {error} beside {largest}"


def check_directions(function, arrays, gradients, step=1e-6, tolerance=ROUNDED):
    """check_gradients of tensors too large for one difference per element: along random signs, so
    that every element counts, in every tensor."""
    generator = np.random.default_rng(99)
    for name, got in gradients.items():
        assert got.shape == arrays[name].shape, name
        for _ in range(3):
            signs = generator.choice([-1.0, 1.0], arrays[name].shape)
            ends = [
                function({**arrays, name: arrays[name] + shift * signs}) for shift in (step, -step)
            ]
            wanted = (ends[0] - ends[1]) / (2 * step)
            error = abs(np.sum(got.decode() * signs) - wanted)
            size = np.sqrt(np.sum(got.decode() ** 2))  # of such a sum
            assert error <= tolerance * size + 1e-14 * abs(ends[0]) / step, f"{name}: {error}"
