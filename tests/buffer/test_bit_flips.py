"""One flipped bit in any structural byte of a table's files is refused, repaired, or reported by ``check``."""

import os
import random
import shutil
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any, Callable, Iterator, List, Tuple

import numpy as np
import pytest
import torch
from crashes import Child
from queues import persistent_queue

from ding_store.buffer import Prioritized, RateLimiter, StoreBuffer, limited
from ding_store.errors import StoreError

CAPACITY = 16
#: So many flips are tried in each file; CONTRIBUTING.md says how to try more.
NUM_FLIPS = int(os.environ.get('DING_STORE_FLIPS', '4'))


class Opened:
    """A buffer with everything that is kept in files."""

    def __init__(self, path: Path) -> None:
        self.prioritized = Prioritized(epsilon=0.0, seed=1)
        self.limits = limited(self.prioritized, max_times_sampled=9)
        limiter = RateLimiter(1, max_insert=CAPACITY, max_sample=CAPACITY)
        self.buffer = StoreBuffer(CAPACITY, path=str(path), sampler=self.limits, limiter=limiter)
        try:
            self.queue = persistent_queue(self.buffer)
        except BaseException:
            self.buffer.close()
            raise

    def close(self) -> None:
        self.buffer.close()

    def contents(self) -> Any:
        """All that the next process has from this one."""
        buffer, rows = self.buffer, self.buffer.table.rows_by_age()
        place = self.queue.sampler.queue.place
        return (
            [(item.index, repr(item.data), sorted(item.meta.items())) for item in buffer],
            buffer.committed,
            buffer.table.next_row,
            self.prioritized.priorities.of(rows).tolist(),
            self.prioritized.priorities.max_priority,
            self.prioritized.step,
            self.limits.uses_of(rows).tolist(),
            self.buffer.limiter.state(),
            (place.next, place.unseen, place.ends),
            buffer._elements.sequences.breaks.list(),
        )


def element(kind: str, i: int) -> Any:
    if kind == 'episodes':
        return [{'x': torch.full((3,), i + step / 8)} for step in range(1 + i % 3)]
    return {'x': torch.full((3,), i / 7), 'n': i}


def work(opened: Opened, kind: str) -> None:
    """Pushes, deletes, updates, samples, and what else there is on record."""
    buffer = opened.buffer
    for i in range(20):
        buffer.push(element(kind, i), {'i': i, 'half': i / 2} if i % 2 else None)
    buffer.commit({'cursor': ['a', 3], 'marks': {'writer': 9}})
    buffer.delete(['6', '9'])
    buffer.update('8', element(kind, 80), {'a': (1, 'x')})
    rows = buffer.table.rows_by_age()
    buffer.update_priorities(rows, 1.0 + rows / 3)
    for _ in range(2):
        buffer.sample_batch(4) if kind == 'columns' else buffer.sample(4)
        opened.queue.sample_batch(3) if kind == 'columns' else opened.queue.sample(3)
    buffer[0].meta['later'] = 1.5
    buffer[3].meta['last'] = 2


def reloaded(opened: Opened, kind: str) -> None:
    """Of another generation, with other columns, cleared once, and resized."""
    work(opened, kind)
    save = f'{opened.buffer.table.table_dir.path}.save'
    opened.buffer.save_data(save)
    opened.buffer.load_data(save)
    os.unlink(save)
    opened.buffer.clear()
    work(opened, kind)


def in_middle_of_update(path: Path) -> None:
    """The process is killed while rows are overwritten in place: the next one repeats it."""

    def update(tell: Callable[[], None]) -> None:
        opened = Opened(path)
        work(opened, 'columns')
        opened.buffer.table.table_dir.redo.clear = lambda: os._exit(0)
        opened.buffer.update('10', element('columns', 100))

    assert Child(update).wait() == 0


def left(path: Path, how: str) -> None:
    """A table's directory, by a process that closed it, or by one that was killed."""
    kind = 'episodes' if 'episodes' in how else 'columns'
    if how == 'killed in an update':
        in_middle_of_update(path)
        return

    def make(tell: Callable[[], None]) -> None:
        opened = Opened(path)
        if 'again' in how:
            # Where a process ended is on record, too.
            work(opened, kind)
            opened.close()
            opened = Opened(path)
        (reloaded if 'reloaded' in how else work)(opened, kind)
        if 'closed' in how:
            opened.close()
        os._exit(0)

    assert Child(make).wait() == 0


def structural(path: Path) -> Iterator[Tuple[Path, List[int]]]:
    """Files and their bytes that are not rows' payload. Where a file is mostly zeros, what is not, and some of it."""
    rng = random.Random(7)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        if not content or file.name.endswith('.column') and 'closed episodes' not in str(path):
            continue
        used = np.flatnonzero(np.frombuffer(content, np.uint8)).tolist()
        near = {min(len(content) - 1, at + step) for at in used for step in range(8)}
        places = sorted(near if len(near) < len(content) // 2 else range(len(content)))
        yield file, rng.sample(places, min(NUM_FLIPS, len(places)))


@pytest.mark.parametrize(
    'how',
    ['closed columns', 'killed columns', 'closed episodes', 'closed again reloaded columns', 'killed in an update'],
)
def test_flipped_bit_is_refused_repaired_or_reported(tmp_path: Path, how: str) -> None:
    path = tmp_path / how
    left(path, how)
    files = {file: file.read_bytes() for file in path.iterdir()}
    shutil.copytree(path, tmp_path / 'sound')
    with closing(Opened(tmp_path / 'sound')) as sound:
        truth = sound.contents()
        assert sound.buffer.check() == []
    rng, wrong, outcomes = random.Random(8), [], defaultdict(set)
    for file, places in structural(path):
        for place in places:
            bit = rng.randrange(8)
            damaged = bytearray(files[file])
            damaged[place] ^= 1 << bit
            file.write_bytes(damaged)
            outcome = outcome_of(path, truth)
            outcomes[file.name].add(outcome.partition(':')[0])
            if outcome.startswith('silently'):
                wrong.append(f'{file.name}, byte {place}, bit {bit}: {outcome}')
            for other in path.iterdir():
                if other not in files:
                    other.unlink()
            for other, content in files.items():
                other.write_bytes(content)
    assert not wrong, '\n'.join(wrong)
    assert 'refused' in outcomes['header']


def outcome_of(path: Path, truth: Any) -> str:
    try:
        opened = Opened(path)
    except StoreError:
        return 'refused'
    with closing(opened):
        try:
            found = opened.contents()
        except StoreError:
            return 'refused when it is read'
        if opened.buffer.check():
            return 'reported'
        if found == truth:
            return 'repaired'
        return f'silently other: {[(a, b) for a, b in zip(found, truth) if a != b]}'[:600]


def test_flipped_bit_while_the_table_is_open_is_reported(tmp_path: Path) -> None:
    path = tmp_path / 'table'
    with closing(Opened(path)) as opened:
        work(opened, 'columns')
        assert opened.buffer.check() == []
        content = (path / 'commit').read_bytes()
        newest = max(0, len(content) // 2, key=lambda start: int.from_bytes(content[start : start + 8], 'little'))
        places = [
            ('rows', 9),
            ('marks', 17),
            ('commit', newest + 9),
            ('metas', 30),
            ('metas', 9),
            ('priority.values', 4099),
        ]
        for file, place in places:
            flip(path / file, place)
            assert opened.buffer.check() != [], file
            flip(path / file, place)
            assert opened.buffer.check() == [], file


def flip(path: Path, place: int) -> None:
    with open(path, 'r+b') as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def test_metas_after_a_damaged_one_are_kept(tmp_path: Path) -> None:
    """Nor is the file written again without them."""
    with closing(StoreBuffer(8, path=str(tmp_path))) as buffer:
        for i in range(6):
            buffer.push({'x': torch.ones(1)}, {'i': i, 'text': 'x' * 50})
    content = (tmp_path / 'metas').read_bytes()
    for place in range(0, len(content.rstrip(b'\0')), 1 if NUM_FLIPS > 4 else 5):
        (tmp_path / 'metas').write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(StoreError, match='metas.*Restore'):
            StoreBuffer(8, path=str(tmp_path))
        assert (tmp_path / 'metas').read_bytes()[place] == content[place] ^ 1
    (tmp_path / 'metas').write_bytes(content)
    with closing(StoreBuffer(8, path=str(tmp_path))) as buffer:
        assert [item.meta['i'] for item in buffer] == list(range(6))


def test_torn_push_is_not_reported_as_damage(tmp_path: Path) -> None:
    """What a killed process had begun to write is dropped, and nothing else."""
    buffer = StoreBuffer(8, path=str(tmp_path))
    for i in range(3):
        buffer.push({'x': torch.ones(1)}, {'i': i})
    end = buffer.table.table_dir.metas.end
    buffer.close()
    content = (tmp_path / 'metas').read_bytes()
    for torn in (b'\x40', b'\x40\0\0\0\1\2', b'\x40\0\0\0\1\2\3\4{"i', bytes(100)):
        (tmp_path / 'metas').write_bytes(content[:end] + torn + content[end + len(torn) :])
        with closing(StoreBuffer(8, path=str(tmp_path))) as again:
            assert [item.meta['i'] for item in again] == [0, 1, 2]
            assert again.check() == []
