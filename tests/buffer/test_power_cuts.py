"""The power is cut anywhere: with ``fsync=True`` a buffer with a path has all that it had acknowledged."""

import os
import random
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import pytest
import torch
from disk import Disk, Image, Moment, images, key, write
from queues import persistent_queue

from ding_store.buffer import Prioritized, RateLimiter, StoreBuffer, limited
from ding_store.buffer.elements import ragged_elements
from ding_store.buffer.elements.packet_file import PacketFile
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.table import table as table_module
from ding_store.buffer.table.columns import TableColumns
from ding_store.buffer.table.durability import Durability
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.writes import RowWrites
from ding_store.errors import ConfigError

#: Mixtures of old and new pages at each moment; ``scripts/crash.sh`` asks for more.
MIXTURES = int(os.environ.get('DING_STORE_MIXTURES', '1'))
#: Every third image is looked at, and each one with ``scripts/crash.sh``.
EVERY = 1 if 'DING_STORE_MIXTURES' in os.environ else 3

SIZE = 6
#: The directory of a buffer, below the disk's root: it has yet to be made, with those above it.
PLACE = 'runs/of/replay'
#: Images of each workload in whose recovery the power is cut again.
NUM_RECOVERIES = 4


# Elements, by a number


def step(i: int, optional: bool = False) -> Dict[str, Any]:
    """A transition; with a leaf that others lack."""
    extra = torch.full((600,), i) if optional else None
    return {'obs': torch.arange(4.0) + i, 'action': torch.tensor([i]), 'extra': extra}


def frame(i: int, is_exact: bool = True) -> Dict[str, Any]:
    """A frame that is kept as bytes, unless it is not exact."""
    levels = (torch.arange(1200) * (i + 1)) % 256
    return {'frame': levels.float() / 255 if is_exact else levels + 0.5}


def units(i: int) -> Dict[str, Any]:
    """An element of 1 to 3 pages."""
    return {'units': torch.arange(500 * (i % 3 + 1)) * (i + 1), 'i': i}


def stacks(i: int, is_exact: bool = True) -> Dict[str, Any]:
    """Two stacks of bytes, unless they are not exact. They have three frames, of which the next element has two."""
    levels = torch.arange(1100)[None] * torch.arange(i + 1, i + 4)[:, None] % 256
    values = levels.float() / 255 if is_exact else levels + 0.5
    return {'obs': values[:2].clone(), 'next_obs': values[1:].clone()}


def episode(i: int, length: Optional[int] = None) -> List[Dict[str, Any]]:
    """A list of steps, of varying length."""
    length = 1 + i % 3 if length is None else length
    return [{'x': torch.arange(700) * (i + 1) + t, 't': t} for t in range(length)]


def plain(element: Any) -> Any:
    """What is in an element; leaves that are None are as if they were not there."""
    if isinstance(element, (list, tuple)):
        return [plain(each) for each in element]
    if isinstance(element, torch.Tensor):
        return tuple(element.shape), element.numpy().tobytes()
    if hasattr(element, 'items'):
        return {name: plain(each) for name, each in element.items() if each is not None}
    return element


# What a buffer should hold


class State(NamedTuple):
    """What a buffer holds, as plain values."""

    size: int = SIZE
    #: Row number -> element, meta.
    rows: Dict[int, Tuple[Any, Dict[str, Any]]] = {}
    next_row: int = 0
    note: Optional[Dict[str, Any]] = None
    #: What samplers and a limiter keep: see ``kept``.
    kept: Dict[str, float] = {}

    @classmethod
    def of(cls, buffer: StoreBuffer) -> 'State':
        rows = {int(item.index): (plain(item.data), plain(item.meta)) for item in buffer}
        return cls(int(buffer.size), rows, buffer.table.next_row, buffer.committed, kept(buffer))

    def added(self, elements: Sequence[Any], meta: Any = None, note: Any = None) -> 'State':
        rows = {**self.rows, **{self.next_row + i: (plain(e), meta or {}) for i, e in enumerate(elements)}}
        return self._replace(rows=rows, next_row=self.next_row + len(elements), note=note or self.note)._cut()

    def without(self, rows: Sequence[int]) -> 'State':
        return self._replace(rows={row: each for row, each in self.rows.items() if row not in rows})

    def changed(self, row: int, element: Any = None, meta: Any = None) -> 'State':
        old = self.rows[row]
        new = plain(element) if element is not None else old[0], old[1] if meta is None else meta
        return self._replace(rows={**self.rows, row: new})

    def resized(self, size: int) -> 'State':
        return self._replace(size=size)._cut()

    def _cut(self) -> 'State':
        return self._replace(rows={row: self.rows[row] for row in sorted(self.rows)[-self.size :]})


class Sampled(StoreBuffer):
    """A buffer whose samplers and limiter keep something: priorities, uses, a queue's place, counts."""

    def __init__(self, size: int, path: str, fsync: bool = False) -> None:
        self.prioritized = Prioritized(epsilon=0.0, seed=1)
        self.limits = limited(self.prioritized, max_times_sampled=99)
        limiter = RateLimiter(1, timeout_s=0, max_insert=4, max_sample=4)
        super().__init__(size, path=path, fsync=fsync, sampler=self.limits, limiter=limiter)
        self.queue = persistent_queue(self)


class Ragged(StoreBuffer):
    """A buffer with leaves of varying length, like that of a memory bank."""

    def __init__(self, size: int, path: str, fsync: bool = False) -> None:
        super().__init__(size, path=path, fsync=fsync, share_frames=False, ragged='all')


def kept(buffer: StoreBuffer) -> Dict[str, float]:
    """By name, which has a row number if it is of a row."""
    if not isinstance(buffer, Sampled):
        return {}
    rows = buffer.table.rows_by_age()
    num_left = buffer.queue.sampler.num_left()
    made = {
        'rows that were not inserted': buffer.limiter.state()['num_inserts'] - buffer.table.next_row,
        'samples': buffer.limiter.state()['num_samples'],
        'place of the queue': rows[len(rows) - num_left] if num_left else buffer.table.next_row,
    }
    for name, values in (('uses', buffer.limits.uses_of(rows)), ('priority', buffer.prioritized.priorities.of(rows))):
        made.update({f'{name} of row {row}': value for row, value in zip(rows.tolist(), values.tolist())})
    return made


def differences(found: State, known: Sequence[State], is_whole: bool = False) -> Iterator[str]:
    """
    Where an image is neither as before what was in progress, ``known[0]``, nor as after it, ``known[-1]``, nor in
    between. Rows that leave may be gone already, new ones come all at once.
    """
    before, after = known[0], known[-1]
    if (found.size, found.next_row) not in {(state.size, state.next_row) for state in known}:
        yield f'{found.size} slots, next row {found.next_row}'
    if is_whole and found.rows not in (before.rows, after.rows):
        yield f'rows {sorted(found.rows)}, neither {sorted(before.rows)} nor {sorted(after.rows)}'
    new = set(after.rows) - set(before.rows)
    has_new = bool(new & set(found.rows))
    if not is_whole and has_new and not new <= set(found.rows):
        yield f'rows {sorted(new & set(found.rows))} of the new ones {sorted(new)}'
    if found.note != after.note and (has_new or found.note != before.note):
        yield f'the note {found.note}'
    for row in set(before.rows) & set(after.rows) - set(found.rows) if not is_whole else ():
        yield f'row {row} is gone'
    for row, values in found.rows.items() if not is_whole else ():
        for number, what in enumerate(('element', 'meta')):
            expected = [state.rows[row][number] for state in known if row in state.rows]
            if values[number] not in expected:
                yield f'the {what} of row {row} is {values[number]!r:.90}, not one of {expected!r:.200}'
    for name, value in found.kept.items():
        counted = [state.kept[name] for state in known if name in state.kept]
        is_one = any(np.isclose(value, each) for each in counted)
        if not (is_one if 'priority' in name else min(counted) <= value <= max(counted)):
            yield f'the {name} is {value}, not one of {counted}'


# Workloads


class Step(NamedTuple):
    """One call, and what it makes of what a buffer should hold; a buffer that it returns is the one from then on."""

    name: str
    act: Callable[[StoreBuffer], Any]
    then: Callable[[State], State] = lambda state: state
    #: Whether an image has all of it, or nothing.
    is_whole: bool = False
    #: Whether it is acknowledged when it returns; else when a step does that is.
    lasts: bool = True


def push(element: Any, meta: Any = None) -> Step:
    return Step('push', lambda buffer: buffer.push(element, meta), lambda state: state.added([element], meta))


def extend(elements: Sequence[Any], meta: Any = None, note: Any = None) -> Step:
    metas = None if meta is None else [meta] * len(elements)
    return Step(
        'extend',
        lambda buffer: buffer.extend_elements(elements, metas, commit=note),
        lambda state: state.added(elements, meta, note),
    )


def update(row: int, element: Any = None, meta: Any = None) -> Step:
    return Step(
        'update', lambda buffer: buffer.update(str(row), element, meta), lambda state: state.changed(row, element, meta)
    )


def delete(*rows: int) -> Step:
    return Step('delete', lambda buffer: buffer.delete([str(row) for row in rows]), lambda state: state.without(rows))


def resize(size: int) -> Step:
    return Step('resize', lambda buffer: buffer.resize(size), lambda state: state.resized(size))


def commit(note: Any) -> Step:
    return Step('commit', lambda buffer: buffer.commit(note), lambda state: state._replace(note=note))


def write_into_meta(row: int, key: str, value: Any) -> Step:
    """What middleware does with metas of elements that were sampled: on the disk with the next push."""

    def act(buffer: StoreBuffer) -> None:
        next(item for item in buffer if item.index == str(row)).meta[key] = value

    return Step('meta', act, lambda state: state.changed(row, meta={**state.rows[row][1], key: value}), lasts=False)


def open_again(buffer: StoreBuffer) -> StoreBuffer:
    path, size = buffer.table.table_dir.path, int(buffer.size)
    buffer.close()
    return type(buffer)(size, path=path, fsync=True)


def sample(count: int) -> Step:
    return Step('sample', lambda buffer: buffer.sample_batch(count, replace=True), lasts=False)


def take(count: int) -> Step:
    """Out of the queue."""
    return Step('take', lambda buffer: buffer.queue.sample_batch(count), lasts=False)


def prioritize(largest: float) -> Step:
    def act(buffer: StoreBuffer) -> None:
        rows = buffer.table.rows_by_age()
        buffer.update_priorities(rows, largest / np.arange(1, len(rows) + 1))

    return Step('prioritize', act, lasts=False)


OPEN_AGAIN = Step('open', open_again)
CLEAR = Step('clear', lambda buffer: buffer.clear(), lambda state: state._replace(rows={}), is_whole=True)


def load(make: Callable[[int], Any], first: int, count: int, directory: Path) -> Step:
    """A save of so many elements."""
    saved, path = StoreBuffer(SIZE), str(directory / f'save{first}')
    for i in range(first, first + count):
        saved.push(make(i), {'of': 'save'})
    saved.save_data(path)
    of_save = State.of(saved)
    return Step(
        'load',
        lambda buffer: buffer.load_data(path),
        lambda state: state._replace(rows=of_save.rows, next_row=max(of_save.next_row, state.next_row)),
        is_whole=True,
    )


RAGGED = [
    extend([units(i) for i in range(5)], note={'cursor': 1}),
    *(push(units(i)) for i in range(5, 8)),
    update(5, units(9)),
]

WORKLOADS: Dict[str, Callable[[Path], List[Step]]] = {
    'pushes': lambda directory: [
        push(step(0)),
        extend([step(1), step(2)], note={'cursor': 1}),
        *(push(step(i)) for i in range(3, 9)),
        extend([step(i) for i in range(9, 13)], note={'cursor': 2}),
        commit({'cursor': 3}),
    ],
    'a new column': lambda directory: [
        extend([step(i) for i in range(3)]),
        push(step(3, optional=True)),
        push(step(4)),
    ],
    'a column of what is absent': lambda directory: [
        extend([step(i, optional=True) for i in range(3)]),
        push(step(3)),
        push(step(4, optional=True)),
    ],
    'widening': lambda directory: [
        extend([frame(i) for i in range(3)]),
        push(frame(3, is_exact=False)),
        push(frame(4)),
    ],
    'widening by an update': lambda directory: [
        extend([frame(i) for i in range(3)]),
        update(1, frame(5, is_exact=False)),
    ],
    'metas': lambda directory: [
        push(step(0), {'i': 0}),
        extend([step(1), step(2)], {'text': 'x' * 5000}),
        update(1, meta={'text': 'y' * 3000}),
        update(0, meta={}),
        *(write_into_meta(row, 'text', 'z' * 3000) for row in (0, 2, 1)),
        *(push(step(i), {'i': i} if i % 2 else None) for i in range(3, 8)),
    ],
    'opened again': lambda directory: [
        extend([step(i) for i in range(4)], {'a': 1}, note={'cursor': 1}),
        OPEN_AGAIN,
        push(step(4, optional=True)),
        delete(2),
        OPEN_AGAIN,
        extend([step(5), step(6)]),
    ],
    'deletes': lambda directory: [
        extend([step(i) for i in range(6)], {'a': 1}),
        delete(1, 4),
        extend([step(i) for i in range(6, 10)]),
        delete(3),
        push(step(10)),
    ],
    'frames': lambda directory: [
        extend([stacks(i) for i in range(4)], note={'cursor': 1}),
        update(2, stacks(20)),
        delete(1),
        OPEN_AGAIN,
        extend([stacks(i) for i in range(4, 9)]),
        resize(7),
        push(stacks(9, is_exact=False)),
    ],
    'updates': lambda directory: [
        extend([step(i) for i in range(6)]),
        update(2, step(20)),
        update(2, step(21), {'twice': True}),
        push(step(6)),
        update(6, step(22)),
    ],
    'resizes': lambda directory: [
        extend([step(i) for i in range(5)], {'a': 1}),
        delete(1),
        resize(9),
        extend([step(i) for i in range(5, 10)]),
        resize(4),
        push(step(10)),
        resize(6),
        push(step(11)),
    ],
    'clears': lambda directory: [
        extend([step(i) for i in range(4)], {'a': 1}),
        CLEAR,
        push(step(4)),
        CLEAR,
        push(frame(0)),
    ],
    'loads': lambda directory: [
        extend([step(i) for i in range(5)], {'a': 1}),
        load(step, 100, 3, directory),
        push(step(5), {'b': 1}),
        load(stacks, 200, 4, directory),
        load(episode, 300, 4, directory),
        push(episode(7)),
    ],
    'episodes': lambda directory: [
        push(episode(0), {'i': 0}),
        extend([episode(i) for i in range(1, 7)]),
        update(4, episode(11)),
        delete(3),
        push(episode(8)),
        push(episode(9)),
        resize(3),
        push(episode(10)),
        CLEAR,
        push(episode(12)),
    ],
    'lists that become episodes': lambda directory: [
        extend([episode(i, 2) for i in range(4)], {'a': 1}),
        push(episode(4, 3)),
        push(episode(5, 1)),
    ],
}

SAMPLED = [
    extend([step(i) for i in range(4)]),
    take(1),
    sample(3),
    prioritize(5.0),
    take(1),
    take(1),
    sample(2),
    push(step(4)),
    prioritize(7.0),
    take(1),
    sample(3),
    sample(3),
    delete(1)._replace(lasts=False),
    extend([step(5), step(6), step(7)]),
    OPEN_AGAIN,
    take(1),
    take(1),
    resize(4),
    prioritize(9.0),
    sample(1),
    push(step(8)),
]


# Cuts


@pytest.fixture
def directory() -> Iterator[Path]:
    """In memory, as there are thousands of images; nothing here waits for a real disk."""
    with tempfile.TemporaryDirectory(dir='/dev/shm' if os.access('/dev/shm', os.W_OK) else None) as made:
        yield Path(made)


@contextmanager
def watching(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(root)
    with monkeypatch.context() as context:
        disk.watch(context)
        yield disk
    disk.close()


class Mark(NamedTuple):
    """How far the steps are: so many are done, and one is in progress."""

    num_done: int
    is_between: bool


def do(steps: Sequence[Step], disk: Disk, buffer: StoreBuffer, state: Optional[State] = None) -> List[State]:
    """Do these steps on the disk; what the buffer should hold before the first and after each of them."""
    states = [State.of(buffer) if state is None else state]
    for number, each in enumerate(steps):
        disk.mark = Mark(number, False)
        made = each.act(buffer)
        buffer = made if isinstance(made, StoreBuffer) else buffer
        states.append(each.then(states[-1])._replace(kept=kept(buffer)))
        assert State.of(buffer) == states[-1], f'{each.name} (step {number})'
        disk.mark = Mark(number + 1, True)
        disk.look('the next step')
    disk.mark = Mark(len(steps), True)
    buffer.close()
    return states


def images_of(moments: Sequence[Moment]) -> Iterator[Tuple[Moment, str, Image]]:
    """Images that differ, of moments that have a mark."""
    rng, seen = random.Random(1), set()
    for moment in moments:
        for what, image in images(moment, rng, MIXTURES) if moment.mark is not None else ():
            if (moment.mark, key(image)) not in seen:
                seen.add((moment.mark, key(image)))
                yield moment, what, image


def found_at(
    disk: Disk, steps: Sequence[Step], states: Sequence[State], directory: Path, kind: Any = StoreBuffer
) -> List[str]:
    """What is wrong after a cut, up to the first image of which something is."""
    rng, cuts = random.Random(2), list(images_of(disk.moments))
    assert len(cuts) > 3 * len(steps)
    for moment, what, image in cuts[::EVERY]:
        done, is_between = moment.mark
        last = done if is_between else done + 1
        first = done
        while first and not steps[first - 1].lasts:
            first -= 1
        step = steps[min(done, len(steps) - 1)]
        write(image, directory)
        found = list(looked_at(kind, directory / PLACE, states[first : last + 1], step.is_whole, rng))
        if found:
            return [f'{step.name} (step {done}), before {moment.event!r}, {what}: {each}' for each in found]
    return []


def reopened(kind: Any, path: Path, sizes: Sequence[int], fsync: bool = False) -> StoreBuffer:
    for size in sizes:
        try:
            return kind(size, path=str(path), fsync=fsync)
        except ConfigError:
            pass
    raise AssertionError(f'it is of none of the sizes {sizes}')


def looked_at(kind: Any, path: Path, known: Sequence[State], is_whole: bool, rng: random.Random) -> Iterator[str]:
    """What is wrong with an image; some are gone on with."""
    try:
        buffer = reopened(kind, path, [state.size for state in known])
        state = State.of(buffer)
    except Exception as e:  # noqa: BLE001  whatever it is, it is a finding
        yield f'it cannot be opened and read: {e!r}'
        return
    yield from buffer.check()
    yield from differences(state, known, is_whole)
    if kind is StoreBuffer and rng.random() < 0.1 and state.rows:
        element = buffer[len(buffer) - 1].data
        state = state.added([element], {'more': 1})
        buffer.push(element, {'more': 1})
        buffer.close()
        buffer = reopened(kind, path, [state.size])
        yield from buffer.check()
        if State.of(buffer) != state:
            yield f'one row more: {State.of(buffer)!r:.200}, not {state!r:.200}'
    buffer.close()


def found_by_cuts(
    steps: Sequence[Step], directory: Path, monkeypatch: pytest.MonkeyPatch, kind: Any = StoreBuffer
) -> List[str]:
    """Do all steps in a new buffer, in a directory that has yet to be made, and cut anywhere."""
    with watching(directory / 'disk', monkeypatch) as disk:
        disk.mark = Mark(0, True)
        buffer = kind(SIZE, path=str(directory / 'disk' / PLACE), fsync=True)
        states = do(steps, disk, buffer, State(kept=kept(buffer)))
    return found_at(disk, steps, states, directory / 'cut', kind)


@pytest.mark.parametrize('name', WORKLOADS)
def test_power_cut_anywhere_loses_nothing(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by_cuts(WORKLOADS[name](directory), directory, monkeypatch) == []


def test_power_cut_anywhere_loses_no_state_of_samplers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is as it was when rows were pushed last, or as it was since."""
    assert found_by_cuts(SAMPLED, directory, monkeypatch, Sampled) == []


def test_power_cut_anywhere_loses_no_ragged_leaf(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by_cuts(RAGGED, directory, monkeypatch, Ragged) == []


def test_power_cut_after_a_run_without_fsync_loses_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is there when a buffer is opened with ``fsync=True`` is acknowledged then."""
    with watching(directory / 'disk', monkeypatch) as disk:
        path = str(directory / 'disk' / PLACE)
        buffer = StoreBuffer(SIZE, path=path)
        buffer.extend_elements([step(i) for i in range(4)], [{'i': i} for i in range(4)])
        buffer.delete('1')
        buffer.close()
        buffer = StoreBuffer(SIZE, path=path, fsync=True)
        steps = [push(step(4)), extend([step(5), step(6)]), delete(2)]
        states = do(steps, disk, buffer)
    assert sorted(states[0].rows) == [0, 2, 3]
    assert found_at(disk, steps, states, directory / 'cut') == []


@pytest.mark.parametrize('name', ['frames', 'widening', 'loads', 'episodes'])
def test_power_cut_in_recovery_loses_nothing(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The power is cut, and once more while what is left is opened."""
    with watching(directory / 'disk', monkeypatch) as disk:
        first = do(
            WORKLOADS[name](directory), disk, StoreBuffer(SIZE, path=str(directory / 'disk' / PLACE), fsync=True)
        )
    cuts = list(images_of(disk.moments))
    for number, (moment, _, image) in enumerate(random.Random(3).sample(cuts, NUM_RECOVERIES)):
        write(image, directory / f'again{number}')
        sizes = [state.size for state in first[moment.mark.num_done :]]
        with watching(directory / f'again{number}', monkeypatch) as again:
            again.mark = Mark(0, True)
            buffer = reopened(StoreBuffer, directory / f'again{number}' / PLACE, sizes, fsync=True)
            # What an update in progress left to be done again was done, as it would be after the second cut.
            states = do([commit({'opened': True})], again, buffer)
        assert found_at(again, [commit({})], states, directory / 'cut') == []


# Wrong orders, which must be found


class NamesColumnsFirst(Durability):
    """Makes the header that names columns durable before what is in them: new ones, or those that replace others."""

    def sync_new(self, columns: Any) -> None:
        pass


class CommitsFirst(RowWrites):
    """Makes rows live before they are on the disk."""

    def publish(self, slots: Any, skipped: int = 0, note: Any = None, encoded: Any = None) -> None:
        with self._index.lock:
            self._index.publish(slots, skipped)
        self._durability.sync_numbers()
        self._durability.commit(note, encoded)
        self._durability.sync_columns()

    def publish_one(self, slot: int) -> int:
        self.publish(np.array([slot]))
        return self._index.next_row - 1


class SyncsNoFrames(TableColumns):
    """Makes rows live before the frames to which they refer are on the disk."""

    def sync(self) -> None:
        self._memory.sync()


class EvictsTooLate(RowWrites):
    """Overwrites the oldest rows before it is on the disk that they left."""

    def allocate(self, num_rows: int) -> Any:
        with self._index.lock:
            slots, evicted = self._index.allocate(num_rows)
        self._columns.num_used = self._index.capacity
        return slots, evicted

    def allocate_one(self) -> int:
        return int(self.allocate(1)[0][0])


class SyncsNoPackets(PacketFile):
    """Makes rows live before their packets are on the disk."""

    def _sync(self) -> None:
        pass


class UpdatesWithoutRecord(Durability):
    """Overwrites rows in place, and keeps nothing on the disk to do it again from."""

    def overwrite(self, rows: Any, columns: Any, write: Any) -> None:
        write()
        self.sync_columns()


@pytest.mark.parametrize(
    ('wrong', 'name'),
    [
        (NamesColumnsFirst, 'widening'),
        (NamesColumnsFirst, 'a column of what is absent'),
        (NamesColumnsFirst, 'loads'),
        (NamesColumnsFirst, 'lists that become episodes'),
        (CommitsFirst, 'pushes'),
        (EvictsTooLate, 'pushes'),
        (EvictsTooLate, 'frames'),
        (SyncsNoFrames, 'frames'),
        (UpdatesWithoutRecord, 'updates'),
    ],
)
def test_power_cut_with_a_wrong_order_is_found(
    wrong: type, name: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, wrong.__base__.__name__, wrong)
    assert found_by_cuts(WORKLOADS[name](directory), directory, monkeypatch)


@pytest.mark.parametrize(
    ('module', 'wrong'),
    [(table_module, CommitsFirst), (table_module, EvictsTooLate), (ragged_elements, SyncsNoPackets)],
)
def test_power_cut_with_a_wrong_order_of_ragged_leaves_is_found(
    module: Any, wrong: type, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, wrong.__base__.__name__, wrong)
    assert found_by_cuts(RAGGED, directory, monkeypatch, Ragged)


# Saves


def test_power_cut_in_a_save_leaves_the_old_or_the_new(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, states = StoreBuffer(SIZE), []
    with watching(directory / 'disk', monkeypatch) as disk:
        for number in range(2):
            buffer.extend_elements([step(4 * number + i) for i in range(4)])
            states.append(State.of(buffer))
            disk.mark = Mark(number, False)
            buffer.save_data(str(directory / 'disk/new/directory/save'))
            disk.mark = Mark(number + 1, True)
            disk.look('the next save')
    cuts = list(images_of(disk.moments))
    assert len(cuts) > 10
    for moment, what, image in cuts:
        done, is_between = moment.mark
        known = [None, *states][done : done + (1 if is_between else 2)]
        assert saved(image, directory) in known, f'{moment}, {what}'


def saved(image: Image, directory: Path) -> Optional[State]:
    """What is in the save of an image; None if there is none."""
    write(image, directory / 'cut')
    path = directory / 'cut/new/directory/save'
    if not path.exists():
        return None
    buffer = StoreBuffer(SIZE)
    buffer.load_data(str(path))
    return State.of(buffer)


@pytest.mark.parametrize(
    ('name', 'act'),
    [
        ('allocate_one', lambda buffer: buffer.push(units(9))),
        ('allocate', lambda buffer: buffer.extend_elements([units(8), units(9)])),
        ('remove', lambda buffer: buffer.delete(['1', '2'])),
    ],
    ids=['push', 'extend', 'delete'],
)
def test_removals_of_an_interrupted_call_are_on_the_disk(
    name: str, act: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next push overwrites the bytes of these rows."""
    synced: List[Any] = []
    sync, remove = TableDirectory.sync_numbers, getattr(RowIndex, name)

    def noted(self: TableDirectory) -> None:
        sync(self)
        synced.append(sorted(self.numbers[self.numbers >= 0].tolist()))

    def interrupted(self: RowIndex, *arguments: Any) -> None:
        remove(self, *arguments)
        raise KeyboardInterrupt

    buffer = Ragged(SIZE, str(tmp_path / 'replay'), fsync=True)
    buffer.extend_elements([units(i) for i in range(SIZE)])
    monkeypatch.setattr(TableDirectory, 'sync_numbers', noted)
    monkeypatch.setattr(RowIndex, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        act(buffer)
    rows = sorted(buffer.table.rows_by_age().tolist())
    assert len(rows) < SIZE
    assert synced[-1:] == [rows]
    buffer.close()
