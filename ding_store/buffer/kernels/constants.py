"""Constants that compiled loops share with the numpy code that they replace."""

from __future__ import annotations

#: Value in ``row_of_slot`` of a slot that is free, or whose row is being written at this moment.
EMPTY = -1

#: Children per node of a sum tree. A block of 8 fills a cache line, and 400k rows need seven levels.
TREE_FAN_OUT = 8
TREE_SHIFT = 3

#: Slots per page of a group's rows. A group of one row takes a whole page, a long one 4 bytes per row.
PAGE_SHIFT = 5
PAGE = 1 << PAGE_SHIFT
