"""Running error analysis: arrays that carry a bound of how far an F32 evaluation may be off.

The functions of the reference that work on plain arrays take an Approximate instead, and every
operation that NumPy would do adds what one rounding to F32 costs to what the operands bring along.
An operation without a rule raises, so no error is lost on the way.
"""

import numpy as np
from engramhc.reference.dtypes import nearest

UNIT = 2.0**-24
TINY = 2.0**-149
SMALLEST_NORMAL = 2.0**-126


def sum_units(terms):
    """Of a sum of so many terms in any sensible order, in units of sum |terms|. (Twice what random
    terms need: squares of short significands leave remainders that mostly round down.)"""
    return (4 + np.sqrt(terms)) * UNIT


def parts(x):
    """Value and error; plain numbers are exact."""
    return (x.value, x.error) if isinstance(x, Approximate) else (np.asarray(x), 0.0)


def exact(value):
    return Approximate(np.asarray(value, np.float64), 0.0)


def rounded_result(value, error, inexact=True):
    """With the rounding of a result to F32; `inexact`: where it is one."""
    return Approximate(value, error + np.where(inexact, UNIT * np.abs(value) + TINY, 0.0))


class Approximate(np.lib.mixins.NDArrayOperatorsMixin):
    def __init__(self, value, error):
        self.value, self.error = value, np.broadcast_to(error, value.shape)

    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)
    T = property(lambda self: self.swapaxes(-1, -2))

    def __array__(self, *_, **__):
        raise TypeError("an Approximate must not lose its error")

    def each(self, function):
        """A function that only moves elements."""
        return Approximate(function(self.value), function(self.error))

    def __getitem__(self, place):
        return self.each(lambda a: a[place])

    def reshape(self, *shape):
        return self.each(lambda a: a.reshape(*shape))

    def swapaxes(self, *axes):
        return self.each(lambda a: a.swapaxes(*axes))

    def sum(self, axis=None, keepdims=False):
        return _sum(self, axis, keepdims)

    def max(self, axis, keepdims=False):
        value = self.value.max(axis=axis, keepdims=keepdims)
        return Approximate(value, self.error.max(axis=axis, keepdims=keepdims))

    def rounded(self, dtype):
        """Rounded to `dtype`: the error is 0, or where the value may fall to the other side, the
        distance to there."""
        value = nearest(self.value, dtype)
        ends = (nearest(self.value + sign * self.error, dtype) for sign in (1, -1))
        flips = np.maximum(*(np.abs(end - value) for end in ends))
        return Approximate(value, np.where(np.isfinite(flips), flips, 0.0))

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        if method != "__call__" or options or ufunc not in _UFUNCS:
            return NotImplemented
        return _UFUNCS[ufunc](*inputs)

    def __array_function__(self, function, types, args, options):
        if function not in _FUNCTIONS:
            return NotImplemented
        return _FUNCTIONS[function](*args, **options)


# --- rules ---------------------------------------------------------------------------------------


def _add(x, y, sign=1):
    (a, ea), (b, eb) = parts(x), parts(y)
    return rounded_result(a + sign * b, ea + eb, (a != 0) & (b != 0))


def _multiply(x, y):
    (a, ea), (b, eb) = parts(x), parts(y)
    return rounded_result(a * b, np.abs(a) * eb + np.abs(b) * ea + ea * eb, (a != 0) & (b != 0))


def _divide(x, y):
    (a, ea), (b, eb) = parts(x), parts(y)
    value = a / b
    return rounded_result(
        value, (ea + np.abs(value) * eb) / np.maximum(np.abs(b) - eb, TINY), a != 0
    )


def _power(x, exponent):
    return x * x if exponent == 2 else x * _power(x, exponent - 1)


def _exp(x):
    """Within two units of the last place, and below the normal numbers anything down to 0."""
    a, ea = parts(x)
    value = np.exp(a)
    return Approximate(value, value * (np.expm1(np.minimum(ea, 1.0)) + 4 * UNIT) + SMALLEST_NORMAL)


def _sqrt(x):
    a, ea = parts(x)
    value = np.sqrt(a)
    moved = np.minimum(ea / np.where(value > 0, value, 1.0), np.sqrt(ea))
    return rounded_result(value, np.where(value > 0, moved, np.sqrt(ea)))


def _product(contract, terms, x, y):
    """A sum of `terms` products; `contract` forms it of plain arrays."""
    (a, ea), (b, eb) = parts(x), parts(y)
    size, ea, eb = np.abs(a), np.broadcast_to(ea, a.shape), np.broadcast_to(eb, b.shape)
    error = contract(size, eb) + contract(ea, np.abs(b) + eb)
    return Approximate(
        contract(a, b), error + sum_units(terms) * contract(size, np.abs(b)) + terms * TINY
    )


def _matmul(x, y):
    return _product(np.matmul, parts(x)[0].shape[-1], x, y)


def _einsum(subscripts, x, y):
    (a, _), (b, _) = parts(x), parts(y)
    sources, result = subscripts.split("->")
    lengths = {}
    for labels, array in zip(sources.split(","), (a, b)):
        labels = labels.replace("...", "")
        lengths |= dict(zip(labels, array.shape[array.ndim - len(labels) :]))
    terms = np.prod([length for label, length in lengths.items() if label not in result])
    return _product(lambda *arrays: np.einsum(subscripts, *arrays, optimize=True), terms, x, y)


def _sum(x, axis=None, keepdims=False):
    a, ea = parts(x)
    value = np.sum(a, axis=axis, keepdims=keepdims)
    terms = a.size // max(1, value.size)
    error = np.sum(ea, axis=axis, keepdims=keepdims)
    size = np.sum(np.abs(a), axis=axis, keepdims=keepdims)
    return Approximate(value, error + (sum_units(terms) * size if terms > 1 else 0.0))


def _mean(x, axis, keepdims=False):
    return _sum(x, axis, keepdims) / parts(x)[0].shape[axis]


def _where(condition, x, y):
    (a, ea), (b, eb) = parts(x), parts(y)
    return Approximate(np.where(condition, a, b), np.where(condition, ea, eb))


def _joined(function):
    def call(arrays, axis=0):
        values, errors = zip(*map(parts, arrays))
        errors = [np.broadcast_to(e, v.shape) for e, v in zip(errors, values)]
        return Approximate(function(values, axis), function(errors, axis))

    return call


def _moved(function):
    return lambda x, *args, **options: x.each(lambda a: function(a, *args, **options))


def _split(x, places):
    return [x[begin:end] for begin, end in zip([0, *places], [*places, None])]


_UFUNCS = {
    np.add: _add,
    np.subtract: lambda x, y: _add(x, y, -1),
    np.multiply: _multiply,
    np.divide: _divide,
    np.power: _power,
    np.square: lambda x: x * x,
    np.matmul: _matmul,
    np.exp: _exp,
    np.sqrt: _sqrt,
    np.negative: lambda x: Approximate(-x.value, x.error),
    np.absolute: lambda x: Approximate(np.abs(x.value), x.error),
    np.equal: lambda x, y: parts(x)[0] == parts(y)[0],
    np.greater_equal: lambda x, y: parts(x)[0] >= parts(y)[0],
}
_FUNCTIONS = {
    np.sum: _sum,
    np.mean: _mean,
    np.einsum: _einsum,
    np.where: _where,
    np.concatenate: _joined(np.concatenate),
    np.stack: _joined(np.stack),
    np.split: _split,
    np.repeat: _moved(np.repeat),
    np.tile: _moved(np.tile),
}
