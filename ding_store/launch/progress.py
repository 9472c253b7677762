"""Figures of a run: the line while it runs, the table at its end."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ding_store.errors import StoreError
from ding_store.launch.printing import print_to, printable
from ding_store.middleware.members import Member, Members
from ding_store.storage.store import Store


@dataclass
class Figures:
    """
    Overview:
        Progress of a run so far, from its members' own reports. Times are seconds of CLOCK_MONOTONIC.
    """

    env_step: int = 0
    train_iter: int = 0
    rows_appended: int = 0
    collectors_not_left: int = 0  # after the run: they were killed, and had appended more than they reported
    rows_ingested: int = 0
    chunks_lost: int = 0
    entries_corrupt: int = 0
    replay_rows: int = 0
    policy_version: int = 0
    policy_lag: int = 0  # the largest
    policy_versions: Dict[str, int] = field(default_factory=dict)  # of the learner, by name
    policy_lags: Dict[str, int] = field(default_factory=dict)
    eval_value: Optional[float] = None
    eval_iter: Optional[int] = None
    began_s: Optional[float] = None
    ended_s: Optional[float] = None
    began_step: int = 0  # at began_s
    began_iter: int = 0

    @classmethod
    def of(cls, members: Members) -> Figures:
        learner = _newest(members.of('learner'))
        evaluator = _newest(members.of('evaluator'))
        figures = cls(
            rows_appended=int(members.total('collector', 'rows')),
            env_step=int(members.total('collector', 'env_step')),
        )
        figures.began_s = members.began_s('collector')
        for each in members.of('learner'):
            # A learner that resumed with the replay of those before it counts all of their rows.
            before = 0 if each.figures.get('is_resumed') else figures.rows_ingested
            figures.rows_ingested = before + int(each.figures.get('rows', 0))
        figures.chunks_lost = int(members.total('learner', 'lost'))
        figures.entries_corrupt = int(members.total('learner', 'corrupt'))
        # A killed collector's rows after its last report are counted when the learner reads them. The reports of
        # collectors that left are complete: there the two counts stay apart, because a difference shows a fault.
        figures.collectors_not_left = members.num_not_left('collector')
        if figures.collectors_not_left:
            figures.rows_appended = max(figures.rows_appended, figures.rows_ingested)
        if learner is not None:
            figures._add_learner(learner.figures, members)
            if len(members.of('learner')) > 1 and 'began_s' in learner.figures:
                figures._measure_loop_of(learner.figures)
        if evaluator is not None:
            figures.eval_value = evaluator.figures.get('eval_value')
            figures.eval_iter = evaluator.figures.get('eval_iter')
        return figures

    def _add_learner(self, learner: dict, members: Members) -> None:
        self.env_step = max(self.env_step, learner.get('env_step', 0))
        self.train_iter = learner.get('train_iter', 0)
        self.replay_rows = learner.get('replay_rows', 0)
        self.policy_version = learner.get('policy_version', 0)
        self.ended_s = learner.get('ended_s')
        self.policy_versions = learner.get('policy_versions', {})
        self.policy_lags = {name: members.policy_lag(name, version) for name, version in self.policy_versions.items()}
        self.policy_lag = max(self.policy_lags.values(), default=0)

    def _measure_loop_of(self, learner: dict) -> None:
        """Set times and rates to those of a restarted learner's own loop. Totals include the processes before it."""
        self.began_s, self.began_iter = learner['began_s'], learner.get('began_iter', 0)
        # A learner that did not resume the counts of those before it started at 0: its steps are the last of all.
        self.began_step = self.env_step - (learner.get('env_step', 0) - learner.get('began_step', 0))

    @property
    def loop_s(self) -> float:
        """Seconds from the first env step to the last iteration of the learner."""
        return max(self.ended_s - self.began_s, 1e-9) if self.began_s and self.ended_s else float('nan')

    def policies(self) -> str:
        """Return versions and lags as text, with names if there are several policies."""
        several = len(self.policy_versions) > 1
        texts = [
            f'{name + " " if several else ""}v{version} (lag {self.policy_lags.get(name, 0)})'
            for name, version in self.policy_versions.items()
        ]
        return ', '.join(texts) or 'v0 (lag 0)'

    def line(self) -> str:
        evaluated = '-' if self.eval_value is None else f'{self.eval_value:.1f} @ iter {self.eval_iter}'
        corrupt = f'  {self.entries_corrupt} corrupt entries skipped' if self.entries_corrupt else ''
        return (
            f'env steps {self.env_step}  train iters {self.train_iter}  replay {self.replay_rows} rows  '
            f'policy {self.policies()}  eval return {evaluated}{corrupt}'
        )


def _newest(members: List[Member]) -> Optional[Member]:
    # The last that joined: a learner that was killed together with its launcher still counts as alive.
    return members[-1] if members else None


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
            print_to(self._out, f'\r{text}\x1b[K' if self._tty else f'{text}\n')

    def _line(self) -> str:
        try:
            with self._store.nonblocking():
                return Figures.of(self._members.refresh()).line()
        except StoreError as error:
            return f'the store does not answer: {error}'

    def say(self, text: str) -> None:
        text = printable(text)
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
