"""Loops over row numbers and slots. Plain Python here: see ``kernels``."""

from __future__ import annotations

import numpy as np

from ding_store.buffer.array_types import Array

_FLOATS, _INTS = 'float64[::1]', 'int64[::1]'
LOCATE = f'float64({_INTS}, {_INTS}, {_FLOATS}, float64, {_INTS})'
PICK = f'boolean({_FLOATS}, int32[::1], boolean, {_INTS})'
SPREAD = f'void({_FLOATS}, float64)'


def spread(uniforms: Array, total: float) -> None:
    """Numbers in [0, 1) become one place in each of so many equal shares of ``total``."""
    num_shares = uniforms.shape[0]
    share = total / num_shares
    for i in range(num_shares):
        uniforms[i] = (uniforms[i] + i) * share


def locate(row_of_slot: Array, rows: Array, values: Array, limit: float, slots: Array) -> float:
    """
    Overview:
        The common case of an update in one pass: all rows are where their number says, and no value is out of range.
    Returns:
        - largest (:obj:`float`): The largest value, and ``slots`` are filled; -1 where this is not the common case.
    """
    largest, capacity = 0.0, row_of_slot.shape[0]
    inverse = 1.0 / capacity
    for i in range(rows.shape[0]):
        row, value = rows[i], values[i]
        # row % capacity, without a division: what the product is rounded by is at most one capacity.
        slot = row - np.int64(row * inverse) * capacity
        slot += capacity * (slot < 0) - capacity * (slot >= capacity)
        # Otherwise it is no row's number. No comparison with NaN holds.
        if row < 0 or not 0 <= slot < capacity or row_of_slot[slot] != row or not 0.0 <= value <= limit:
            return -1.0
        slots[i] = slot
        if value > largest:
            largest = value
    return largest


def pick(uniforms: Array, members: Array, replace: bool, slots: Array) -> bool:
    """
    Overview:
        Members drawn by numbers in [0, 1), into ``slots``.
    Returns:
        - is_done (:obj:`bool`): False if one was drawn twice and ``replace`` is not.
    """
    num_drawn, num_members = uniforms.shape[0], members.shape[0]
    mask = 1
    while mask < 4 * num_drawn:
        mask *= 2
    # Places that were drawn, by their last bits; those of different places may be equal.
    seen = np.full(mask, -1, np.int64)
    mask -= 1
    for i in range(num_drawn):
        place = int(uniforms[i] * num_members)
        if not replace:
            entry = place & mask
            while seen[entry] >= 0:
                if seen[entry] == place:
                    return False
                entry = (entry + 1) & mask
            seen[entry] = place
        slots[i] = members[place]
    return True
