"""Killed while it loads a save, a buffer with a path has all rows that it had, or all of the save."""

import os
import random
from pathlib import Path
from typing import Any, Callable, Iterator, List

import numpy as np
import pytest
from crashes import Opened, crash_repeatedly, linger, noticed, verified
from elements import number, transition
from queues import persistent_queue

from ding_store.buffer import Prioritized, RateLimiter, StoreBuffer
from ding_store.buffer.table import table as table_module
from ding_store.buffer.table.shape import TableShape

#: ``scripts/crash.sh`` asks for more.
KILLS = int(os.environ.get('DING_STORE_KILLS', '40')) // 5

CAPACITY, BATCH = 60, 4
#: How many elements each save has, and what their numbers begin at.
SAVES = {'a': (20, 1000), 'b': (35, 2000)}
LOADED, INSERTED = range(2)


def write_saves(directory: Path) -> None:
    for name, (count, first) in SAVES.items():
        buffer = StoreBuffer(CAPACITY)
        for i in range(count):
            buffer.push(transition(first + i), {'of': name, 'i': i})
        buffer.save_data(str(directory / name))


class Loaded(Opened):
    def __init__(self, path: str) -> None:
        limiter = RateLimiter(1, timeout_s=0, max_insert=1, max_sample=CAPACITY)
        self.sampler = Prioritized(epsilon=0.0, seed=1)
        self.buffer = StoreBuffer(CAPACITY, path=path, sampler=self.sampler, limiter=limiter)
        self.queue = persistent_queue(self.buffer)


class LoadingWorker(Loaded):
    """Loads one save after the other, and pushes, samples and updates a little in between."""

    def __init__(self, path: str, words: Any, seed: int) -> None:
        super().__init__(path)
        self.saves, self.words, self.random = Path(path).parent, words, random.Random(seed)

    def run(self, tell: Callable[[], None]) -> None:
        tell()
        while True:
            self.buffer.load_data(str(self.saves / self.random.choice(list(SAVES))))
            self.words[LOADED] = 1
            for i in range(self.random.randint(0, 3)):
                self.buffer.push(transition(i), {'of': 'worker', 'i': i})
                self.words[INSERTED] += 1
            self.buffer.update_priorities(self.queue.sample_batch(BATCH).rows, np.full(BATCH, 7.0))


def verify(path: str, words: Any) -> List[str]:
    return verified(Loaded, path, lambda opened: _findings(opened, words))


def _findings(opened: Loaded, words: Any) -> Iterator[str]:
    items = list(opened.buffer)
    found = [(item.meta.get('of'), item.meta.get('i'), number(item.data)) for item in items]
    wholes = {
        name: [(name, i, first + i) for i in range(count)] + [('worker', i, i) for i in range(len(found) - count)]
        for name, (count, first) in SAVES.items()
    }
    name = next((name for name, whole in wholes.items() if found == whole), None)
    if name is None and (found or words[LOADED]):
        yield f'there are {found}'
        return
    words[LOADED] |= bool(found)
    counts = opened.buffer.limiter.state()
    if not words[INSERTED] <= counts['num_inserts'] <= words[INSERTED] + 1:
        yield f'the limiter counts {counts["num_inserts"]} inserts of {words[INSERTED]}'
    words[INSERTED] = counts['num_inserts']
    if items:
        # A queue's place, or priorities, of rows that were replaced would be those of others now.
        is_seen = opened.sampler.priorities.of(np.array([int(item.index) for item in items])) == 7.0
        place = len(items) - opened.queue.sampler.num_left()
        if place not in (0, BATCH) or (is_seen[BATCH:].any() and not is_seen.all()):
            yield f'after a load of {name!r} the queue goes on at {place}, priorities are 7 of {is_seen}'


def test_load_killed_anywhere_keeps_old_rows_or_new(tmp_path: Path) -> None:
    write_saves(tmp_path)
    found = crash_repeatedly(
        tmp_path / 'replay', KILLS, KILLS, worker=LoadingWorker, verify=verify, reached=lambda words: words[INSERTED]
    )
    assert found == []


class ClearsFirst(TableShape):
    """Takes all rows out before the new ones are there."""

    def replace(self, *args: Any, **kwargs: Any) -> None:
        with self._index.lock:
            self._durability.clear()
            self._index.clear()
        linger()
        super().replace(*args, **kwargs)


def test_load_in_two_steps_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, 'TableShape', ClearsFirst)
    write_saves(tmp_path)
    assert noticed(tmp_path / 'replay', worker=LoadingWorker, verify=verify)
