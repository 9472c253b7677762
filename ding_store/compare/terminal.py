"""Terminal output: a progress bar while it measures, and tables of the results."""

from __future__ import annotations

import functools
import shutil
import sys
import textwrap
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ding_store.compare.units import size_text

_WIDTH = 24


class Progress:
    """
    A bar that is overwritten on a terminal, a line per step elsewhere. It estimates the time left from past steps.
    """

    def __init__(self, num_steps: int, out: Any = None) -> None:
        self._out = out or sys.stderr
        self._is_terminal = self._out.isatty()
        self._num_steps, self._done, self._skipped = max(1, num_steps), 0, 0
        self._begin = self._stepped = time.monotonic()

    def say(self, text: str) -> None:
        filled = _WIDTH * self._done // self._num_steps
        bar = '█' * filled + '░' * (_WIDTH - filled)
        now = time.monotonic()
        line = f'{bar} {self._done}/{self._num_steps} {_clock(now - self._begin)}{self._left(now)}  {text}'
        self._out.write(
            f'\r\x1b[K{line[: shutil.get_terminal_size().columns - 2]}' if self._is_terminal else line + '\n'
        )
        self._out.flush()

    def step(self) -> None:
        self._done += 1
        self._stepped = time.monotonic()

    def skip(self) -> None:
        """Count a step that was measured before. It does not enter the estimate of the time left."""
        self._done += 1
        self._skipped += 1

    def _left(self, now: float) -> str:
        timed = self._done - self._skipped
        if not timed:
            return ''
        each = (self._stepped - self._begin) / timed
        left = each * (self._num_steps - self._done) - min(each, now - self._stepped)
        # The last step may take longer than those before it did.
        return f', about {_clock(left)} left' if left > 0 else ''

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._out.write('\r\x1b[K')


def _clock(seconds: float) -> str:
    return f'{int(seconds) // 60}:{int(seconds) % 60:02d}'


def number(value: Any, digits: int = 3) -> str:
    """Return a number with three significant digits: 1.06k, 24.5M."""
    if value is None:
        return '-'
    for limit, unit in ((1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
        if abs(value) >= limit:
            return f'{value / (1e3 if unit == "k" else limit):.{digits}g}{unit}'
    return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.{digits}g}'


def times(value: Any) -> str:
    return '-' if value is None else f'{number(value, 2 if value < 100 else 3)}x'


def terminal_width() -> Optional[int]:
    """Return the characters per line if stdout is a terminal, otherwise None."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(head: Sequence[str], lines: Sequence[Sequence[str]], width: Optional[int] = None) -> str:
    """
    Overview:
        Return columns of minimal width, the first aligned left, the others right. A table that is wider than ``width``
        is split into parts below one another. Each part repeats the first column.
    """
    widths = [max(len(row[i]) for row in (head, *lines)) for i in range(len(head))]
    parts: List[List[int]] = [[0]]
    for i in range(1, len(head)):
        if width and len(parts[-1]) > 1 and sum(widths[j] + 2 for j in parts[-1]) + widths[i] > width:
            parts.append([0])
        parts[-1].append(i)
    return '\n\n'.join(_part(part, widths, head, lines) for part in parts)


def _part(columns: Sequence[int], widths: Sequence[int], head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    text: List[str] = []
    for line in (head, ['-' * width for width in widths], *lines):
        cells = [f'{line[i]:>{widths[i]}}' if i else f'{line[i]:<{widths[i]}}' for i in columns]
        text.append('  '.join(cells).rstrip())
    return '\n'.join(text)


Table = Tuple[Sequence[str], List[List[str]]]


def render(result: Dict[str, Any], width: Optional[int] = None) -> str:
    """Return all tables of a result, with lines of ``width`` characters. See ``Results`` for the result's shape."""
    made = [make(result) for make in TABLES]
    notes = '\n'.join([NOTES, *without_extra(result)])
    if width:
        notes = '\n'.join(textwrap.fill(line, width) for line in notes.splitlines())
    return '\n\n'.join([*(table(head, lines, width) for head, lines in made if lines), notes])


def without_extra(result: Dict[str, Any]) -> List[str]:
    """Name the rows whose elements should be real and are not, with the reasons."""
    return [
        f'{row["name"]} is synthetic: {row["why_synthetic"]}' for row in result['rows'].values() if row['why_synthetic']
    ]


NOTES = (
    'whole: the replay as it is. bytes: elements of real size, as many as fit. index: as many elements as the job has, '
    'smaller ones.\nheadroom: how many times both required rates, at once; limit: what row copies and np.take could '
    'do, across processes in the learner. learner at: its speed while it samples from the disk as often as the job '
    'does, of its speed without. Elements are those of the environment that is named, played at random, or synthetic: '
    'random, of the structure and the published size of real ones.'
)

SINGLE_HEAD = (
    'one process', 'elements of', 'bytes', 'length', 'need add/s', 'stock', 'store', 'need sample/s', 'stock', 'store',
    'limit', 'headroom stock', 'store', 'limit', 'memory per element stock', 'store',
)  # fmt: skip


def single_table(result: Dict[str, Any]) -> Table:
    lines = []
    for row in result['rows'].values():
        for part in row.get('single', {}).get('parts', []):
            stock, store = part['sides']['stock'], part['sides']['store']
            lines.append(
                [
                    f'{row["name"]} {part["kind"]}',
                    part['source'],
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
    return SINGLE_HEAD, lines


def bytes_table(result: Dict[str, Any]) -> Table:
    """Return the rates of elements of real size in bytes: into the replay, and out of it in batches."""
    lines = []
    for row in result['rows'].values():
        for part in row.get('single', {}).get('parts', [])[:1]:
            size, required, store = part['element_bytes'], row['required'], part['sides']['store']
            cells = [f'{row["name"]} {part["kind"]}', part['source']]
            for name, bound in (('adds_per_s', 'copy_per_s'), ('samples_per_s', 'gather_per_s')):
                rates = [required[name], part['sides']['stock'][name], store[name], store[bound]]
                cells += [_rate(None if rate is None else rate * size) for rate in rates]
            lines.append(cells)
    head = (
        'bytes, one process', 'elements of', 'need in', 'stock', 'store', 'limit', 'need out', 'stock', 'store',
        'limit',
    )  # fmt: skip
    return head, lines


def training_table(result: Dict[str, Any]) -> Table:
    """Return the real loop's rates. The replay's share is the part of an iteration outside the policy's training."""
    lines = []
    for row in result['rows'].values():
        for part in row.get('single', {}).get('parts', []):
            stock, store = part['sides']['stock'], part['sides']['store']
            if 'iters_per_s' in store:
                shares = [1 - store['train_s'] * side['iters_per_s'] for side in (stock, store)]
                gain = store['iters_per_s'] / stock['iters_per_s']
                rates = [number(side['iters_per_s']) for side in (stock, store)]
                what = [row['name'], part['source'], f'{part["length"]:,}']
                lines.append([*what, *rates, f'{gain:.2f}', *map(percent, shares)])
    head = (
        'learner iterations/s', 'elements of', 'length', 'stock', 'store', 'store/stock', 'not training: stock',
        'store',
    )  # fmt: skip
    return head, lines


def percent(share: float) -> str:
    return f'{100 * max(0.0, share):.0f} %'


def across_table(result: Dict[str, Any]) -> Table:
    lines = []
    for row in result['rows'].values():
        if 'across' in row:
            stock, store = row['across']['sides']['stock'], row['across']['sides']['store']
            lines.append(
                [
                    row['name'],
                    _source(row['across']),
                    *(number(row['required'][name]) for name in ('adds_per_s', 'samples_per_s')),
                    *(number(side[name]) for name in ('adds_per_s', 'samples_per_s') for side in (stock, store)),
                    *(_rate(side['add_bytes_per_s']) for side in (stock, store)),
                    *(times(side['headroom']) for side in (stock, store)),
                    times(row['across'].get('bound_headroom')),
                ]
            )
    head = (
        'across processes', 'elements of', 'need add/s', 'sample/s', 'add/s stock', 'store', 'sample/s stock', 'store',
        'in stock', 'store', 'headroom stock', 'store', 'limit',
    )  # fmt: skip
    return head, lines


def _source(record: Dict[str, Any]) -> str:
    source: str = record.get('source', '-')  # older files have no source
    return source


def _rate(bytes_per_s: Optional[float]) -> str:
    return '-' if bytes_per_s is None else size_text(bytes_per_s) + '/s'


def disk_table(result: Dict[str, Any]) -> Table:
    lines = []
    for row in result['rows'].values():
        if 'disk' in row:
            found = row['disk']
            limit = size_text(found['limit_bytes']) if found['limit_bytes'] else found['reason']
            lines.append(
                [
                    row['name'],
                    _source(found),
                    f'{found["length"]:,}',
                    size_text(found['table_bytes']),
                    limit,
                    '-' if found.get('cached') is None else percent(found['cached']),
                    number(row['required']['samples_per_s']),
                    number(found['samples_per_s']),
                    number(found['disk_per_s']),
                    f'{found["fraction"]:.2f}',
                    '-' if found.get('learner_at') is None else percent(found['learner_at']),
                ]
            )
    head = (
        'store on disk', 'elements of', 'length', 'table', 'memory limit', 'cached', 'need sample/s', 'sample/s',
        'disk reads/s', 'fraction', 'learner at',
    )  # fmt: skip
    return head, lines


#: Section -> the number that grows, by its name in a record.
SERIES = {'length': 'length', 'size': 'element_bytes', 'collectors': 'num_collectors'}


def series_table(section: str, result: Dict[str, Any]) -> Table:
    lines = []
    for point in result.get(section, []):
        stock, store = point['sides']['stock'], point['sides']['store']
        rates = [number(side['samples_per_s']) for side in (stock, store)]
        headrooms = [times(side['headroom']) for side in (stock, store)]
        lines.append([f'{point[SERIES[section]]:,}', _source(point), *rates, *headrooms])
    title = f'dqn by {SERIES[section]}'.replace('_', ' ')
    head = (title, 'elements of', 'sample/s stock', 'store', 'headroom stock', 'store')
    return head, lines


def cartpole_table(result: Dict[str, Any]) -> Table:
    lines = []
    for found in result.get('cartpole', {}).values():
        values = ['-' if found[name] is None else f'{found[name]:.1f}' for name in ('loop_s', 'wall_s')]
        values += [number(found[name]) for name in ('env_step', 'iters_per_s')]
        lines.append([found['title'], *values, str(found.get('failed', 0))])
    head = ('CartPole to its stop value', 'in the loop (s)', 'whole command (s)', 'env steps', 'iterations/s', 'failed')
    return head, lines


TABLES: List[Callable[[Dict[str, Any]], Table]] = [
    single_table,
    bytes_table,
    training_table,
    across_table,
    disk_table,
    *(functools.partial(series_table, section) for section in SERIES),
    cartpole_table,
]
