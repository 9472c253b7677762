"""The terminal's part: a bar while it measures, tables of what it found."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, Dict, List, Sequence

from ding_store.bench.workloads import size_text

_WIDTH = 24


class Progress:
    """A bar that renews itself on a terminal, a line per step elsewhere."""

    def __init__(self, num_steps: int, out: Any = None) -> None:
        self._out = out or sys.stderr
        self._is_terminal = self._out.isatty()
        self._num_steps, self._done = max(1, num_steps), 0
        self._begin = time.monotonic()

    def say(self, text: str) -> None:
        filled = _WIDTH * self._done // self._num_steps
        bar = '█' * filled + '░' * (_WIDTH - filled)
        minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
        line = f'{bar} {self._done}/{self._num_steps} {minutes}:{seconds:02d}  {text}'
        self._out.write(f'\r\x1b[K{line[:118]}' if self._is_terminal else line + '\n')
        self._out.flush()

    def step(self) -> None:
        self._done += 1

    def end(self) -> None:
        if self._is_terminal:
            self._out.write('\r\x1b[K')


def number(value: Any, digits: int = 3) -> str:
    """Three digits that count: 1.06k, 24.5M."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return '-'
    for limit, unit in ((1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
        if abs(value) >= limit:
            return f'{value / (1e3 if unit == "k" else limit):.{digits}g}{unit}'
    return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.{digits}g}'


def times(value: Any) -> str:
    return '-' if value is None or math.isnan(value) else f'{number(value, 2 if value < 100 else 3)}x'


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *lines)) for i in range(len(head))]
    text: List[str] = []
    for line in (head, ['-' * width for width in widths], *lines):
        cells = [f'{cell:<{w}}' if i == 0 else f'{cell:>{w}}' for i, (cell, w) in enumerate(zip(line, widths))]
        text.append('  '.join(cells).rstrip())
    return '\n'.join(text)


def render(result: Dict[str, Any]) -> str:
    """All tables of a result; see ``results`` for its shape."""
    rows = result['rows']
    blocks = [_single(rows)] if any('single' in row for row in rows.values()) else []
    return '\n\n'.join(blocks)


SINGLE_HEAD = (
    'one process', 'element', 'length', 'need add/s', 'stock', 'store', 'need sample/s', 'stock', 'store', 'limit',
    'stock', 'store', 'limit', 'B/element stock', 'store',
)  # fmt: skip


def _single(rows: Dict[str, Any]) -> str:
    lines = []
    for row in rows.values():
        for part in row.get('single', {}).get('parts', []):
            stock, store = part['sides']['stock'], part['sides']['store']
            lines.append(
                [
                    f'{row["name"]} {part["kind"]}',
                    size_text(part['element_bytes']),
                    f'{part["length"]:,}',
                    number(row['required']['adds_per_s']),
                    *(number(side['adds_per_s']) for side in (stock, store)),
                    number(row['required']['samples_per_s']),
                    *(number(side['samples_per_s']) for side in (stock, store)),
                    number(store['gather_per_s']),
                    *(times(side['headroom']) for side in (stock, store)),
                    times(store['bound_headroom']),
                    *(size_text(side['memory_per_element']) for side in (stock, store)),
                ]
            )
    notes = (
        'whole: the replay as it is. bytes: elements of real size, as many as fit. index: as many elements as the job '
        'has, smaller ones.\nThe third group is the headroom: how many times both required rates together; limit: what '
        'row copies and np.take could do.'
    )
    return table(SINGLE_HEAD, lines) + '\n' + notes
