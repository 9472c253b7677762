"""Loops over the row index and the lines of groups. Imported and compiled only if numba is installed, see ``load``."""

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

#: Number of memory accesses that are prefetched ahead.
_AHEAD = 16


@register_jitable
def free(row_of_slot: Array, slots: Array, place: Array, removed: Array, count: int) -> None:
    """Free slots. The last live slots fill the gaps, in order, and the freed slots follow them, see ``RowIndex``."""
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
        Evict the oldest rows, as many as ``retired`` has places. Write their slots to ``retired`` and their numbers to
        ``rows``.
    Returns:
        - is_done (:obj:`bool`): False, and the index is unchanged, if one of them was deleted before.
    """
    for i in range(retired.shape[0]):
        retired[i], rows[i] = log_slots[head + i], log_rows[head + i]
        if row_of_slot[retired[i]] != rows[i]:
            return False
    free(row_of_slot, slots, place, retired, count)
    return True


def publish(row_of_slot: Array, log_rows: Array, log_slots: Array, tail: int, slots: Array, first_row: int) -> None:
    """Make consecutive rows from ``first_row`` on live in these slots, and append them to the log."""
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
        Follow the line of each start for ``windows.shape[0]`` slots. Set ``are_there`` to whether all rows of a window
        are live.
    Returns:
        - are_all_there (:obj:`bool`): Whether this is so for all windows.
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
            # Steps beyond the end of a line read the last page, which is empty.
            slot = held[(page << PAGE_SHIFT) + offset] if page >= 0 else -1
            windows[step, i] = slot
            if slot >= 0:
                # Prefetch it for the loop below.
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
    """Return whether each of these rows is in its slot."""
    num_slots, first = slots.shape[0], row_of_slot.ctypes.data
    for i in range(num_slots):
        if i + _AHEAD < num_slots:
            prefetch(first + slots[i + _AHEAD] * row_of_slot.itemsize)
        slot = slots[i]
        if not 0 <= slot < row_of_slot.shape[0] or row_of_slot[slot] != rows[i]:
            return False
    return True
