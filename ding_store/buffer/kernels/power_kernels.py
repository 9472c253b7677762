"""Powers of masses and priorities. Imported and compiled only if numba is installed, see ``load``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, register_jitable

from ding_store.buffer.array_types import Array

_FLOATS, _INTS = 'float64[::1]', 'int64[::1]'
MASS = f'void({_FLOATS}, float64, float64, {_FLOATS})'
WEIGH = f'void({_FLOATS}, {_INTS}, float64, float64, float32[::1])'

#: Unsigned, for the reason given in ``sum_tree_kernels``.
_u: Any = np.uint64
_WIDTH, _BIAS = _u(52), _u(1023 << 52)
_HALF_ROOT = _u(np.float64(math.sqrt(0.5)).view(np.uint64))
#: The bits of 2**52, whose low bits can hold an integer. Adding ``_ROUND`` to a float rounds it to an integer.
_INTEGER, _ROUND = _u((1023 + 52) << 52), 1.5 * 2.0**52
#: Values outside of this range use the library, because the exponent bits could overflow here.
_LOW, _HIGH = 2.0**-1000, 2.0**1000
#: Coefficients of the odd powers of s in log2((1 + s) / (1 - s)), and of the powers of x in 2**x.
_L = tuple(2 / math.log(2) / k for k in range(1, 18, 2))
_E = tuple(math.log(2) ** k / math.factorial(k) for k in range(1, 13))


def _cast(result: Any, argument: Any, word: Any) -> Any:
    """Return an intrinsic that reinterprets 64 bits as another type."""

    @intrinsic
    def cast(context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], word)

        return result(argument), generate

    return cast


_bits_of: Any = _cast(types.uint64, types.float64, ir.IntType(64))
_float_of: Any = _cast(types.float64, types.uint64, ir.DoubleType())


@register_jitable
def powers_of(values: Array, exponent: float, results: Array) -> None:
    """
    Overview:
        Compute ``values ** exponent`` for an exponent in [-1, 1], to about 1e-15 for values that are not extreme. The
        loop has no branches or calls, so that it compiles to vector instructions: 2 us for 512 values, against 5.4 us
        with library calls. Each result depends on its value alone, not on its neighbours.
    """
    count = _u(values.shape[0])
    if exponent == 1.0:
        # Exact, so that the priority can be recovered from the result.
        results[:] = values
        return
    for i in range(count):
        # value = 2**k * m, with m from sqrt(1/2) to sqrt(2). Then s is small, and few terms of atanh(s) suffice.
        bits = _bits_of(values[i])
        biased = (bits - _HALF_ROOT + _BIAS) >> _WIDTH
        m = _float_of(bits - (biased << _WIDTH) + _BIAS)
        s = (m - 1.0) / (m + 1.0)
        q, series = s * s, _L[8]
        for k in (7, 6, 5, 4, 3, 2, 1, 0):
            series = series * q + _L[k]
        power = exponent * ((_float_of(_INTEGER | biased) - (2.0**52 + 1023.0)) + s * series)
        # 2**power = 2**whole * 2**part, with a part of at most one half.
        whole = power + _ROUND
        part, series = power - (whole - _ROUND), _E[11]
        for k in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0):
            series = series * part + _E[k]
        results[i] = _float_of(_bits_of(1.0 + series * part) + (_bits_of(whole) << _WIDTH))
    for i in range(count):
        if not _LOW <= values[i] <= _HIGH:
            results[i] = values[i] ** exponent


def mass(priorities: Array, epsilon: float, alpha: float, masses: Array) -> None:
    """Compute ``(priority + epsilon) ** alpha``."""
    powers_of(priorities + epsilon, alpha, masses)


def weigh(masses: Array, slots: Array, smallest: float, exponent: float, weights: Array) -> None:
    """Compute ``(mass / smallest) ** exponent`` of each slot."""
    count = _u(slots.shape[0])
    ratios, powers = np.empty(count), np.empty(count)
    for i in range(count):
        ratios[i] = masses[_u(slots[i])] / smallest
    powers_of(ratios, exponent, powers)
    for i in range(count):
        weights[i] = powers[i]
