"""The loops of SumTree. Plain Python here; numba compiles them when there is one, and nothing imports it before."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from ding_store.buffer.arrays import Array

logger = logging.getLogger(__name__)

#: Set to anything but '' or '0' to do without numba.
NO_NUMBA = 'DING_STORE_NO_NUMBA'

#: Children per node: a block of them is two cache lines, and 400k rows are five levels.
FAN_OUT = 16
SHIFT = 4

_FLOATS, _INTS = 'float64[::1]', 'int64[::1]'
_SET = f'void({_FLOATS}, {_FLOATS}, {_FLOATS}, {_FLOATS}, {_INTS}, {_INTS}, {_FLOATS})'
_LOCATE = f'float64({_INTS}, {_INTS}, {_FLOATS}, float64, {_INTS})'
_FIND = f'void({_FLOATS}, {_FLOATS}, {_INTS}, {_FLOATS}, {_INTS})'


class Kernels(NamedTuple):
    """The compiled functions."""

    set_many: Callable[..., None]
    find_many: Callable[..., None]
    locate: Callable[..., float]


def set_many(
    masses: Array, sums: Array, prefixes: Array, minima: Array, starts: Array, slots: Array, values: Array
) -> None:
    """Set leaves, then make all nodes above them anew, level by level; arguments as in SumTree."""
    for i in range(slots.shape[0]):
        masses[slots[i]] = values[i]
    shift = 0
    for level in range(starts.shape[0]):
        shift += SHIFT
        here, last = starts[level], -1
        for i in range(slots.shape[0]):
            node = slots[i] >> shift
            if node == last:
                # Slots mostly come in order, so that this leaves each node of the upper levels to be made but once.
                continue
            last = node
            first = node << SHIFT
            total, smallest = 0.0, np.inf
            if level == 0:
                for child in range(first, first + FAN_OUT):
                    mass = masses[child]
                    total += mass
                    if 0.0 < mass < smallest:
                        smallest = mass
            else:
                first += starts[level - 1]
                for child in range(first, first + FAN_OUT):
                    total += sums[child]
                    prefixes[child] = total
                    if minima[child] < smallest:
                        smallest = minima[child]
            sums[here + node] = total
            minima[here + node] = smallest


def find_many(masses: Array, prefixes: Array, starts: Array, targets: Array, slots: Array) -> None:
    """The slot of each target; level by level, so that the memory of many draws is fetched at once."""
    num_targets = targets.shape[0]
    for i in range(num_targets):
        slots[i] = 0
    for level in range(starts.shape[0] - 2, -1, -1):
        for i in range(num_targets):
            first, target = starts[level] + (slots[i] << SHIFT), targets[i]
            limit = prefixes[first + FAN_OUT - 1]
            if target >= limit:
                target = np.nextafter(limit, 0.0)
            # No branch that depends on the target: half of them would be predicted wrongly.
            child = 0
            for k in range(FAN_OUT):
                child += prefixes[first + k] <= target
            if child > 0:
                target -= prefixes[first + child - 1]
            targets[i] = target
            slots[i] = (slots[i] << SHIFT) + child
    for i in range(num_targets):
        first, target = slots[i] << SHIFT, targets[i]
        total, child = 0.0, 0
        for k in range(FAN_OUT):
            total += masses[first + k]
            child += total <= target
        if child == FAN_OUT:
            target = np.nextafter(total, 0.0)
            total, child = 0.0, 0
            for k in range(FAN_OUT):
                total += masses[first + k]
                child += total <= target
        slots[i] = first + child


def locate(row_of_slot: Array, rows: Array, values: Array, limit: float, slots: Array) -> float:
    """
    Overview:
        The common case of an update in one pass: all rows are where their number says, and no value is out of range.
    Returns:
        - largest (:obj:`float`): The largest value, and ``slots`` are filled; -1 where this is not the common case.
    """
    largest, capacity = 0.0, row_of_slot.shape[0]
    for i in range(rows.shape[0]):
        row, value = rows[i], values[i]
        slot = row % capacity
        # No comparison with NaN holds.
        if row < 0 or row_of_slot[slot] != row or not 0.0 <= value <= limit:
            return -1.0
        slots[i] = slot
        if value > largest:
            largest = value
    return largest


def load_kernels() -> Optional[Kernels]:
    """The compiled kernels; None where there is no numba, or ``DING_STORE_NO_NUMBA`` is set."""
    return None if os.environ.get(NO_NUMBA, '') not in ('', '0') else _compiled()


@functools.cache
def _compiled() -> Optional[Kernels]:
    try:
        import numba
    except ImportError as e:
        # Also one that is too old for this numpy.
        logger.info('sum trees run in numpy (%s); pip install "ding_store[fast]" makes them several times faster', e)
        return None
    try:
        return _compile(numba, cache=True)
    except (OSError, RuntimeError) as e:
        # numba's cache lies beside this file, or in the user's cache directory; neither can be written to.
        logger.info('compiled sum trees are not cached, which costs seconds at every start: %s', e)
        return _compile(numba, cache=False)


def _compile(numba: Any, cache: bool) -> Kernels:
    # Signatures compile at once, so that whatever goes wrong does so here and not in the middle of training.
    return Kernels(
        set_many=numba.njit(_SET, cache=cache)(set_many),
        find_many=numba.njit(_FIND, cache=cache)(find_many),
        locate=numba.njit(_LOCATE, cache=cache)(locate),
    )
