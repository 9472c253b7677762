"""Loops over the row index and the lines of groups. Imported, and compiled, only where numba is: see ``kernels``."""

from __future__ import annotations

from numba.extending import register_jitable

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY, PAGE, PAGE_SHIFT
from ding_store.compiled.cache_lines import LINE, prefetch

_INTS, _SLOTS = 'int64[::1]', 'int32[::1]'
FREE = f'void({_INTS}, {_SLOTS}, {_SLOTS}, {_INTS}, int64)'
RETIRE = f'boolean({_INTS}, {_SLOTS}, {_SLOTS}, {_INTS}, {_SLOTS}, int64, int64, {_INTS}, {_INTS})'
PUBLISH = f'void({_INTS}, {_INTS}, {_SLOTS}, int64, {_INTS}, int64)'
WALK = f'boolean({_SLOTS}, {_SLOTS}, {_SLOTS}, {_INTS}, {_INTS}, int64[:, ::1], boolean[::1])'
ARE_AT = f'boolean({_INTS}, {_INTS}, {_INTS})'

#: Looks at places all over memory that are asked for before the first of them is made.
_AHEAD = 16


@register_jitable
def free(row_of_slot: Array, slots: Array, place: Array, removed: Array, count: int) -> None:
    """The last live slots move into the gaps, in their order, and those removed behind them: see ``RowIndex``."""
    num_removed = removed.shape[0]
    for i in range(num_removed):
        row_of_slot[removed[i]] = EMPTY
    remaining = count - num_removed
    last = remaining
    for i in range(num_removed):
        gap = place[removed[i]]
        if gap < remaining:
            while row_of_slot[slots[last]] == EMPTY:
                last += 1
            slots[gap] = slots[last]
            place[slots[last]] = gap
            last += 1
    for i in range(num_removed):
        slots[remaining + i] = removed[i]
        place[removed[i]] = remaining + i


def retire(
    row_of_slot: Array,
    slots: Array,
    place: Array,
    log_rows: Array,
    log_slots: Array,
    head: int,
    count: int,
    retired: Array,
    rows: Array,
) -> bool:
    """
    Overview:
        The oldest rows leave, as many as fit into ``retired`` (their slots) and ``rows`` (their numbers).
    Returns:
        - is_done (:obj:`bool`): False, and nothing changed, if one of them was deleted before.
    """
    for i in range(retired.shape[0]):
        retired[i], rows[i] = log_slots[head + i], log_rows[head + i]
        if row_of_slot[retired[i]] != rows[i]:
            return False
    free(row_of_slot, slots, place, retired, count)
    return True


def publish(row_of_slot: Array, log_rows: Array, log_slots: Array, tail: int, slots: Array, first_row: int) -> None:
    """Consecutive rows from ``first_row`` on live in these slots, and end the log."""
    for i in range(slots.shape[0]):
        log_rows[tail + i], log_slots[tail + i] = first_row + i, slots[i]
        row_of_slot[slots[i]] = first_row + i


@register_jitable
def _ask_for_page(held: Array, page: int) -> None:
    for place in range(page << PAGE_SHIFT, (page + 1) << PAGE_SHIFT, LINE // 4):
        prefetch(held.ctypes.data + place * held.itemsize)


def walk(
    at: Array, held: Array, after: Array, row_of_slot: Array, starts: Array, windows: Array, are_there: Array
) -> bool:
    """
    Overview:
        From each start on ``windows.shape[0]`` slots of its line, and whether all of these rows are there.
    Returns:
        - are_all_there (:obj:`bool`): Of all windows.
    """
    length, num_starts = windows.shape
    for i in range(num_starts):
        prefetch(at.ctypes.data + starts[i] * at.itemsize)
    for i in range(num_starts):
        are_there[i] = True
        page = at[starts[i]] >> PAGE_SHIFT
        if page >= 0:
            prefetch(after.ctypes.data + page * after.itemsize)
            _ask_for_page(held, page)
    for i in range(num_starts):
        page = at[starts[i]] >> PAGE_SHIFT
        if page >= 0 and after[page] >= 0:
            _ask_for_page(held, after[page])
    for i in range(num_starts):
        place = at[starts[i]]
        page, offset = place >> PAGE_SHIFT, place & (PAGE - 1)
        for step in range(length):
            # What lies beyond a line's end is on the last page, which holds nothing.
            slot = held[(page << PAGE_SHIFT) + offset] if page >= 0 else -1
            windows[step, i] = slot
            if slot >= 0:
                # Looked at below, when many of them are on their way.
                prefetch(row_of_slot.ctypes.data + slot * row_of_slot.itemsize)
            offset += 1
            if offset == PAGE:
                offset = 0
                page = after[page] if page >= 0 else -1
    are_all_there = True
    for step in range(length):
        for i in range(num_starts):
            slot = windows[step, i]
            if slot < 0 or row_of_slot[slot] < 0:
                are_there[i] = are_all_there = False
    return are_all_there


def are_at(row_of_slot: Array, slots: Array, rows: Array) -> bool:
    """Whether these rows are in these slots, each in its own."""
    num_slots, first = slots.shape[0], row_of_slot.ctypes.data
    for i in range(num_slots):
        if i + _AHEAD < num_slots:
            prefetch(first + slots[i + _AHEAD] * row_of_slot.itemsize)
        slot = slots[i]
        if not 0 <= slot < row_of_slot.shape[0] or row_of_slot[slot] != rows[i]:
            return False
    return True
