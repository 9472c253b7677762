"""Loops over row numbers and slots, for draws and updates. Compiled by ``load``, without numba here."""

from __future__ import annotations

import numpy as np

from ding_store.buffer.array_types import Array

_FLOATS, _INTS = 'float64[::1]', 'int64[::1]'
LOCATE = f'float64({_INTS}, {_INTS}, {_FLOATS}, float64, {_INTS})'
PICK = f'boolean({_FLOATS}, int32[::1], boolean, {_INTS})'


def locate(row_of_slot: Array, rows: Array, values: Array, limit: float, slots: Array) -> float:
    """
    Overview:
        Find the slots of rows in the common case of an update. All rows are in the slots given by their numbers, and no
        value is out of range.
    Returns:
        - largest (:obj:`float`): The largest value, with ``slots`` filled. Or -1 if this is not the common case.
    """
    largest, capacity = 0.0, row_of_slot.shape[0]
    inverse = 1.0 / capacity
    for i in range(rows.shape[0]):
        row, value = rows[i], values[i]
        # row % capacity without a division. The rounding error of the product is at most one capacity.
        slot = row - np.int64(row * inverse) * capacity
        slot += capacity * (slot < 0) - capacity * (slot >= capacity)
        # An invalid number leaves this range. Comparisons with NaN are false.
        if row < 0 or not 0 <= slot < capacity or row_of_slot[slot] != row or not 0.0 <= value <= limit:
            return -1.0
        slots[i] = slot
        if value > largest:
            largest = value
    return largest


def pick(uniforms: Array, members: Array, replace: bool, slots: Array) -> bool:
    """
    Overview:
        Draw members by numbers in [0, 1), and write them to ``slots``.
    Returns:
        - is_done (:obj:`bool`): False if a member was drawn twice without ``replace``.
    """
    num_drawn, num_members = uniforms.shape[0], members.shape[0]
    mask = 1
    while mask < 4 * num_drawn:
        mask *= 2
    # A hash table of the drawn positions, by their low bits. Collisions use the next free entry.
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
