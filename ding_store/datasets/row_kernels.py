"""A loop over rows at addresses. Imported and compiled only if numba is installed, see ``kernels``."""

from __future__ import annotations

from ding_store.buffer.array_types import Array
from ding_store.compiled.cache_lines import LINE, copy_bytes, prefetch_early

#: Cache lines of a row that are prefetched, and how many rows ahead. The processor itself prefetches the rest.
_NUM_LINES, _ROWS_AHEAD = 12, 4


def gather_rows(
    source: int, row_bytes: int, offsets: Array, sizes: Array, targets: Array, rows: Array, places: Array
) -> None:
    """
    Overview:
        Copy rows to columns. Row ``r`` is at ``source + r * row_bytes``, and its column ``k`` has ``sizes[k]`` bytes at
        ``offsets[k]``. Row ``rows[i]`` becomes item ``places[i]`` of the columns at the addresses ``targets``.
    """
    num_columns, num_rows = offsets.shape[0], rows.shape[0]
    lines = min(row_bytes // LINE + 1, _NUM_LINES)
    for i in range(num_rows):
        if i + _ROWS_AHEAD < num_rows:
            ahead = source + rows[i + _ROWS_AHEAD] * row_bytes
            for line in range(lines):
                prefetch_early(ahead + line * LINE)
        row, place = source + rows[i] * row_bytes, places[i]
        for k in range(num_columns):
            copy_bytes(targets[k] + place * sizes[k], row + offsets[k], sizes[k])
