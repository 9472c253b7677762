"""Killed while it is cleared, a buffer with a path has all rows that it had, or none."""

import os
import random
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple

import pytest
from crashes import Opened, crash_repeatedly, linger, noticed, verified
from elements import number, transition
from test_packed import episode
from test_packed import number as number_of_episode

from ding_store.buffer.elements import elements
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.table import Table

#: ``scripts/crash.sh`` asks for more.
KILLS = int(os.environ.get('DING_STORE_KILLS', '40')) // 5

CAPACITY = 12
#: Words that the worker shares with whoever kills it: the next row, and what it was when a clear began, or had ended.
PUSHED, BEGUN, CLEARED = range(3)


class Kind(NamedTuple):
    """Elements of rows, and what they are of."""

    make: Callable[[int], Any]
    number: Callable[[Any], int]


KINDS = {'columns': Kind(transition, number), 'packed': Kind(episode, number_of_episode)}


class Cleared(Opened):
    capacity = CAPACITY


class ClearingWorker(Cleared):
    """Fills a buffer and clears it, again and again."""

    def __init__(self, path: str, words: Any, seed: int, kind: Kind) -> None:
        super().__init__(path)
        self.kind = kind
        self.words, self.random = words, random.Random(seed)

    def run(self, tell: Callable[[], None]) -> None:
        tell()
        while True:
            for _ in range(self.buffer.count(), self.random.randint(2, CAPACITY)):
                row = self.buffer.table.next_row
                self.buffer.push(self.kind.make(row), {'row': row})
                self.words[PUSHED] = row + 1
            self.words[BEGUN] = self.words[PUSHED]
            self.buffer.clear()
            self.words[CLEARED] = self.words[PUSHED]


def crashing(kind: Kind) -> Dict[str, Callable]:
    """What ``crash_repeatedly`` kills, and how it looks at what is left."""

    def verify(path: str, words: Any) -> List[str]:
        return verified(Cleared, path, lambda opened: _findings(opened, words, kind))

    return {'worker': partial(ClearingWorker, kind=kind), 'verify': verify}


def _findings(opened: Cleared, words: Any, kind: Kind) -> Iterator[str]:
    next_row, rows = opened.buffer.table.next_row, opened.buffer.table.rows_by_age()
    if not words[PUSHED] <= next_row <= words[PUSHED] + 1:
        yield f'next row is {next_row}, pushed were {words[PUSHED]}'
    words[PUSHED] = next_row
    if not len(rows) and words[BEGUN] == next_row:
        words[CLEARED] = next_row
    if rows.tolist() != list(range(words[CLEARED], next_row)):
        yield f'of the rows {words[CLEARED]} to {next_row} there are {rows}, a clear began at {words[BEGUN]}'
    for item in opened.buffer:
        row = int(item.index)
        if kind.number(item.data) != row or item.meta != {'row': row}:
            yield f'row {row} is torn, or its meta: {item.meta}'


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes microseconds takes long enough to be killed in."""
    clear = RowIndex.clear

    def clear_slowly(index: RowIndex) -> None:
        for slot in index.live_slots.tolist():
            index.row_of_slot[slot] = EMPTY
            linger(0.001)
        clear(index)

    monkeypatch.setattr(RowIndex, 'clear', clear_slowly)


@pytest.mark.usefixtures('slowly')
@pytest.mark.parametrize('kind', KINDS)
def test_clear_killed_anywhere_keeps_all_rows_or_none(kind: str, tmp_path: Path) -> None:
    found = crash_repeatedly(
        tmp_path / 'replay', KILLS, KILLS, reached=lambda words: words[CLEARED], **crashing(KINDS[kind])
    )
    assert found == []


class ErasesFirst(Table):
    """Erases row numbers before there is one record that no row counts."""

    def clear(self) -> None:
        with self.write_lock, self.index.lock:
            self.index.clear()
        super().clear()


@pytest.mark.usefixtures('slowly')
@pytest.mark.parametrize('kind', KINDS)
def test_clear_in_two_steps_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, 'Table', ErasesFirst)
    assert noticed(tmp_path / 'replay', **crashing(KINDS[kind]))
