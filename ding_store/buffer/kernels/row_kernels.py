"""Loops over the row index and the lines of groups. Imported, and compiled, only where numba is: see ``kernels``."""

from __future__ import annotations

from numba.extending import register_jitable

from ding_store.buffer.arrays import Array
from ding_store.buffer.sequences.lines import PAGE, SHIFT
from ding_store.buffer.table.rows import EMPTY

_INTS, _SLOTS = 'int64[::1]', 'int32[::1]'
FREE = f'void({_INTS}, {_SLOTS}, {_SLOTS}, {_INTS}, int64)'
RETIRE = f'boolean({_INTS}, {_SLOTS}, {_SLOTS}, {_INTS}, {_SLOTS}, int64, int64, {_INTS}, {_INTS})'
WALK = f'boolean({_SLOTS}, {_SLOTS}, {_SLOTS}, {_INTS}, {_INTS}, int64[:, ::1], boolean[::1])'


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
    are_all_there = True
    for i in range(num_starts):
        place = at[starts[i]]
        is_there = place >= 0
        page, offset = place >> SHIFT, place & (PAGE - 1)
        for step in range(length):
            # What lies beyond a line's end is on the last page, which holds nothing.
            slot = held[(page << SHIFT) + offset] if page >= 0 else -1
            windows[step, i] = slot
            is_there = is_there and slot >= 0 and row_of_slot[slot] >= 0
            offset += 1
            if offset == PAGE:
                offset = 0
                page = after[page] if page >= 0 else -1
        are_there[i] = is_there
        are_all_there = are_all_there and is_there
    return are_all_there
