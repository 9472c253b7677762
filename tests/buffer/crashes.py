"""A process that works on a buffer with a path until it is killed, and what must hold of the files then."""

import contextlib
import itertools
import mmap
import os
import random
import select
import signal
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Type, TypeVar

import numpy as np
import torch
import treetensor.torch as ttorch

from ding_store.buffer import StoreBuffer

T = TypeVar('T', bound='Opened')

CAPACITY = 100
MAX_CHUNK = 40
PAYLOAD = 2000
#: Bytes of a frame. Each row has two frames, and shares one with the next row.
FRAME = 1031

_SAY_EVERY = 50

#: Words that the worker shares with whoever kills it: what it knows to be done.
PUSHED, DELETED, UPDATED, CURSOR = range(4)


def is_deleted(rows: Any) -> Any:
    return rows % 7 == 3


def is_updated(rows: Any) -> Any:
    return (rows % 5 == 1) & ~is_deleted(rows)


def columns_of(rows: np.ndarray, version: int = 0, has_meta: int = 0) -> Dict[str, np.ndarray]:
    """Everything follows from the row number and the version."""
    base = (rows[:, None] * 2654435761 + version * 40503 + np.arange(PAYLOAD)) & 0xFFFFFFFF
    payload = base.astype(np.uint32).view(np.int32)
    sums = np.array([zlib.crc32(each.tobytes()) for each in payload], np.int64)
    return {
        'row': rows.astype(np.int64),
        'version': np.full(len(rows), version, np.int64),
        'has_meta': np.full(len(rows), has_meta, np.int64),
        'payload': payload,
        'sum': sums,
        'stack': np.stack([frames_of(rows + k, version) for k in range(2)], axis=1),
    }


def frames_of(numbers: np.ndarray, version: int) -> np.ndarray:
    return ((numbers[:, None] * 2654435761 + version * 40503) // (1 + np.arange(FRAME))).astype(np.uint8)


def element_of(row: int, version: int = 0, has_meta: int = 0) -> ttorch.Tensor:
    columns = columns_of(np.array([row]), version, has_meta)
    return ttorch.as_tensor(
        {
            name: torch.from_numpy(column[0].copy()) if column.ndim > 1 else torch.tensor(column[0])
            for name, column in columns.items()
        }
    )


class Opened:
    """A buffer with a path."""

    capacity = CAPACITY
    options: Dict[str, Any] = {}

    def __init__(self, path: str) -> None:
        self.buffer = StoreBuffer(self.capacity, path=path, **self.options)


def verified(opened: Type[T], path: str, findings: Callable[[T], Iterable[str]]) -> List[str]:
    """What is wrong with a buffer whose process was killed; opens it, so that the next one can go on."""
    try:
        found = opened(path)
    except Exception as e:  # noqa: BLE001  whatever it is, it is a finding
        return [f'it does not open: {e!r}']
    try:
        return found.buffer.check() or list(findings(found))
    finally:
        found.buffer.close()


class Worker(Opened):
    """Pushes, deletes and updates as fast as it can; starts with what a killed one left undone."""

    def __init__(self, path: str, words: Any, seed: int) -> None:
        super().__init__(path)
        self.words, self.random = words, random.Random(seed)

    def run(self, tell: Callable[[], None]) -> None:
        self.finish(self.buffer.table.rows_by_age())
        tell()
        while True:
            first = self.buffer.table.next_row
            end = self.push(first)
            self.words[PUSHED] = end
            self.finish(np.arange(first, end))

    def finish(self, rows: np.ndarray) -> None:
        """Delete and update what has to be of these rows."""
        self.buffer.delete([str(row) for row in rows[is_deleted(rows)]])
        self.words[DELETED] = self.words[PUSHED]
        self.update(rows[is_updated(rows)])
        self.words[UPDATED] = self.words[PUSHED]

    def push(self, first: int) -> int:
        """Rows from ``first`` on; the row behind the last."""
        if self.random.random() < 0.3:
            self.buffer.push(element_of(first, has_meta=1), {'row': first, 'half': first / 2})
            return first + 1
        end = first + self.random.randint(1, MAX_CHUNK)
        cursor = (self.buffer.committed or {'cursor': 0})['cursor'] + 1
        self.buffer.extend(columns_of(np.arange(first, end)), commit={'cursor': cursor, 'next_row': end})
        self.words[CURSOR] = cursor
        return end

    def update(self, rows: np.ndarray) -> None:
        rows = rows[self.buffer.table.contains(rows)]
        if len(rows):
            has_meta = self.buffer.table.gather(rows)['has_meta']
            self.buffer.table.update(rows, {**columns_of(rows, 1), 'has_meta': has_meta})


def verify(path: str, words: Any) -> List[str]:
    """As ``verified``, of what a Worker left."""
    return verified(Opened, path, lambda opened: _findings(opened.buffer, words))


def _findings(buffer: StoreBuffer, words: Any) -> Iterator[str]:
    next_row, rows = buffer.table.next_row, buffer.table.rows_by_age()
    if not words[PUSHED] <= next_row <= words[PUSHED] + MAX_CHUNK:
        yield f'next row is {next_row}, pushed were {words[PUSHED]}'
    wanted = np.arange(next_row)
    wanted = wanted[~is_deleted(wanted)][-(CAPACITY - MAX_CHUNK - 6) :]
    missing = np.setdiff1d(wanted, rows)
    if len(missing):
        yield f'rows {missing[:9]} of {len(missing)} are missing'
    undead = rows[is_deleted(rows) & (rows < words[DELETED])]
    if len(undead):
        yield f'rows {undead[:9]} were deleted'
    if len(rows):
        yield from _wrong_payloads(buffer, rows, words)
        yield from _wrong_notes(buffer, rows, words)
    # What was pushed last without the time to say so is there: so it must be after the next kill.
    words[PUSHED], words[CURSOR] = next_row, (buffer.committed or {'cursor': 0})['cursor']


def _wrong_payloads(buffer: StoreBuffer, rows: np.ndarray, words: Any) -> Iterator[str]:
    found = buffer.table.gather(rows)
    for version in (0, 1):
        of_it = found['version'] == version
        expected = columns_of(rows[of_it], version)
        for name in ('row', 'payload', 'sum', 'stack'):
            same = found[name][of_it] == expected[name]
            same = same.all(axis=tuple(range(1, same.ndim)))
            if not same.all():
                yield f'{name} of row {rows[of_it][~same][0]} (version {version}) is torn'
    late = rows[(found['version'] == 0) & is_updated(rows) & (rows < words[UPDATED])]
    if len(late):
        yield f'rows {late[:9]} were updated'
    if ((found['version'] == 1) & ~is_updated(rows)).any():
        yield 'a row was updated that should not'
    for item, has_meta in zip(buffer, found['has_meta'].tolist()):
        row = int(item.index)
        if item.meta != ({'row': row, 'half': row / 2} if has_meta else {}):
            yield f'the meta of row {row} is {item.meta}'


def _wrong_notes(buffer: StoreBuffer, rows: np.ndarray, words: Any) -> Iterator[str]:
    note = buffer.committed or {'cursor': 0, 'next_row': 0}
    if not words[CURSOR] <= note['cursor'] <= words[CURSOR] + 1:
        yield f'the cursor is {note["cursor"]}, committed was {words[CURSOR]}'
    behind = rows[rows >= note['next_row']]
    if not (buffer.table.gather(behind)['has_meta'] == 1).all() or note['next_row'] > buffer.table.next_row:
        yield f'the note is of {note["next_row"]} rows, the table of {buffer.table.next_row}'


def shared_words(num_words: int = 512) -> Any:
    """Zeros that a forked child shares with us."""
    return np.frombuffer(mmap.mmap(-1, 8 * num_words), np.int64)


class Child:
    """A forked process that does one thing, and none of what pytest would; it may tell us how far it is."""

    def __init__(self, work: Callable[[Callable[[], None]], None]) -> None:
        self._told, telling = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.write(telling, b'.')
                work(lambda: os.write(telling, b'.'))
            except BaseException:  # noqa: BLE001  the child must not return into the test
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(telling)

    def wait_until_told(self) -> None:
        assert select.select([self._told], [], [], 60)[0], 'nothing was heard of the child for 60 s'
        assert os.read(self._told, 1), f'the child ended by itself with {self.wait()}'

    def wait_until_it_ends(self) -> None:
        deadline = time.monotonic() + 60
        while select.select([self._told], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not os.read(self._told, 100):
                return
        raise AssertionError('the child has not ended for 60 s')

    def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """How it ended."""
        os.close(self._told)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


#: In a child that is to be killed where it lingers: how often it may linger before. Else it only sleeps there.
_lingers_left: Optional[int] = None


def linger(seconds: float = 0.005) -> None:
    """In the middle of what is wrong: by themselves the moments are so short that hardly any kill would hit them."""
    global _lingers_left
    if _lingers_left is None:
        time.sleep(seconds)
        return
    if not _lingers_left:
        os.kill(os.getpid(), signal.SIGKILL)
    _lingers_left -= 1


def noticed(path: Path, worker: Any = Worker, verify: Callable[[str, Any], List[str]] = verify) -> List[str]:
    """
    What is found of a worker that goes wrong where it lingers: it is killed there, each time one ``linger`` later,
    until something is found.
    """
    words, deadline = shared_words(1 << 20), time.monotonic() + 60
    for number in itertools.count():
        assert time.monotonic() < deadline, f'{number} kills, and nothing was found'

        def work(tell: Callable[[], None], number: int = number) -> None:
            global _lingers_left
            _lingers_left = number
            worker(str(path), words, number).run(tell)

        child = Child(work)
        child.wait_until_it_ends()
        assert child.wait() == -signal.SIGKILL
        found = verify(str(path), words)
        if found:
            return found
    return []


def noticed_at_any_time(path: Path, **kwargs: Any) -> List[str]:
    """
    What ``crash_repeatedly`` finds of a worker that goes wrong: it is killed later and later, until something is
    found. However busy the machine is, it gets to where it goes wrong.
    """
    return crash_repeatedly(path, 0, seed=0, reached=lambda words: False, **kwargs)


def crash_repeatedly(
    path: Path,
    kills: int,
    seed: int,
    longest_s: float = 0.02,
    worker: Any = Worker,
    verify: Callable[[str, Any], List[str]] = verify,
    reached: Callable[[Any], Any] = lambda words: True,
) -> List[str]:
    """
    Kill workers of one buffer at random points of time, so often at least, and until they have ``reached`` what is to
    be killed, going by the shared words; the findings of the first that left something wrong.
    """
    rng, words, deadline = random.Random(seed), shared_words(1 << 20), 0.0
    for number in itertools.count():
        if number >= kills and reached(words):
            break
        if number == kills:
            deadline = time.monotonic() + 60
        if number and number % _SAY_EVERY == 0:
            # Shown by ``scripts/crash.sh`` only, which is silent for minutes otherwise.
            sys.stderr.write(f'{number} of {kills} kills\n')
        assert number < kills or time.monotonic() < deadline, f'{number} kills, and none was late enough'
        child = Child(lambda tell, seed=seed + number: worker(str(path), words, seed).run(tell))
        child.wait_until_told()
        if number % 4:
            # One in four is killed while it opens what the last one left.
            child.wait_until_told()
        # Not to wait for something: to kill it just anywhere. On a busy machine that has to be later.
        time.sleep(rng.uniform(0, longest_s * max(1, number - kills)))
        code = child.kill()
        assert code == -signal.SIGKILL, f'the worker of kill {number} ended by itself with {code}'
        found = verify(str(path), words)
        if found:
            return [f'kill {number}: {each}' for each in found]
    return []
