"""The figures of a run on the terminal: the line while it runs, the table at its end."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any, Sequence, Tuple

from ding_store.errors import StoreError
from ding_store.launch.log_lines import line
from ding_store.launch.printing import print_to, printable
from ding_store.metrics.figures import Figures
from ding_store.run.members import Members
from ding_store.storage.store import Store


class Display:
    """
    Overview:
        One line that is overwritten on a terminal. Elsewhere, a line every few seconds, and the first one soon.
    """

    def __init__(
        self, store: Store, out: Any, every_s: float = 1.0, file_every_s: float = 5.0, first_s: float = 1.0
    ) -> None:
        self._store = store
        self._members = Members(store)
        self._out = out
        self._tty = out.isatty()
        self._every_s = every_s if self._tty else file_every_s
        self._begin = time.monotonic()
        self._next = self._begin + first_s

    def figures(self, waits: bool = True) -> Figures:
        """
        Return the figures, or the last ones read if the store is away. ``waits``: wait until a timeout for the store.
        """
        try:
            with contextlib.nullcontext() if waits else self._store.nonblocking():
                self._members.refresh()
        except StoreError as error:
            self.say(f'the last figures may be missing: {error}')
        return Figures.of(self._members)

    def tick(self) -> None:
        """
        Show the line if it is due. Never wait for a store that is away, and do not fail: the caller watches a run.
        """
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            text = printable(f'[{now - self._begin:5.0f} s] {self._line()}')
            print_to(self._out, f'\r{text}\x1b[K' if self._tty else f'{line(text)}\n')

    def _line(self) -> str:
        try:
            with self._store.nonblocking():
                return Figures.of(self._members.refresh()).line()
        except StoreError as error:
            return f'the store does not answer: {error}'

    def say(self, text: str) -> None:
        text = line(printable(text))
        print_to(self._out, f'\r\x1b[K{text}\n' if self._tty else f'{text}\n')


def table(columns: Sequence[Tuple[str, dict]]) -> str:
    """
    Overview:
        Return rows of figures side by side. ``columns`` are (title, {row name: text}). Rows have the first's order.
    """
    names = list(dict.fromkeys(name for _, cells in columns for name in cells))
    widths = [max(len(title), *(len(str(cells.get(n, '-'))) for n in names)) for title, cells in columns]
    first = max(map(len, names))
    lines = [' ' * first + ''.join(f'  {title:>{w}}' for (title, _), w in zip(columns, widths))]
    for name in names:
        cells = (f'  {cells.get(name, "-")!s:>{w}}' for (_, cells), w in zip(columns, widths))
        lines.append(f'{name:<{first}}' + ''.join(cells))
    return '\n'.join(lines)


def summary(figures: Figures, wall_s: float) -> dict:
    """Return the end table's column of a run through the store."""
    corrupt = {'corrupt entries skipped': figures.entries_corrupt} if figures.entries_corrupt else {}
    silent = figures.collectors_not_left
    at_least = f' (at least: {silent} collector{"s" * (silent > 1)} gave no last report)' if silent else ''
    return {
        'wall time, whole command (s)': f'{wall_s:.1f}',
        'first env step to the end (s)': _if_known(figures.loop_s, '.1f'),
        'env steps': figures.env_step,
        'train iterations': figures.train_iter,
        'env steps/s': _if_known((figures.env_step - figures.began_step) / figures.loop_s, '.0f'),
        'train iterations/s': _if_known((figures.train_iter - figures.began_iter) / figures.loop_s, '.0f'),
        'train iterations per env step': f'{figures.train_iter / max(figures.env_step, 1):.3f}',
        'last evaluation return': '-' if figures.eval_value is None else f'{figures.eval_value:.1f}',
        f'rows appended{at_least}': figures.rows_appended,
        'rows ingested': figures.rows_ingested,
        'chunks lost': figures.chunks_lost,
        **corrupt,
    }


def _if_known(value: float, form: str) -> str:
    """Return '-' for NaN: a run that ended before its first env step has no loop."""
    return '-' if math.isnan(value) else format(value, form)
