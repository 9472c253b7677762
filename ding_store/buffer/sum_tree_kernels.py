"""The loops of SumTree. Imported, and compiled, only where numba is: see ``kernels``."""

from __future__ import annotations

import numpy as np

from ding_store.buffer.arrays import Array
from ding_store.buffer.copy_kernels import LINE, prefetch
from ding_store.buffer.sum_tree import FAN_OUT, SHIFT

_FLOATS, _INTS = 'float64[::1]', 'int64[::1]'
SET = f'void({_FLOATS}, {_FLOATS}, {_FLOATS}, {_FLOATS}, {_INTS}, {_INTS}, {_FLOATS})'
FIND = f'void({_FLOATS}, {_FLOATS}, {_INTS}, {_FLOATS}, {_INTS})'


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
    """The slot of each target; level by level, so that the memory of many draws is on its way at once."""
    num_targets, block_bytes = targets.shape[0], FAN_OUT * 8
    prefix_address, mass_address = np.int64(prefixes.ctypes.data), np.int64(masses.ctypes.data)
    for i in range(num_targets):
        slots[i] = 0
    for level in range(starts.shape[0] - 2, -1, -1):
        below = prefix_address + starts[level - 1] * 8 if level > 0 else mass_address
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
            # What is looked at next, once all others have been here.
            prefetch(below + slots[i] * block_bytes)
            prefetch(below + slots[i] * block_bytes + LINE)
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
