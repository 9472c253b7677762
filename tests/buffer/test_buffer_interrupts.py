"""Ctrl-C in a buffer: an exception behind any call of an operation leaves it as it was, or as it should become."""

import functools
import os
import threading
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import numpy as np
import pytest
import torch
from interrupting import InterruptedAt

import ding_store.buffer as buffer_package
from ding_store import free_space
from ding_store.buffer import (
    Fifo,
    MinHeap,
    Prioritized,
    RankPrioritized,
    RateLimiter,
    SequencePrioritized,
    Shuffled,
    StoreBuffer,
    Uniform,
    limited,
)
from ding_store.buffer.table import frame_sharing
from ding_store.errors import NotEnoughData

SIZE = 8
#: Everything of the buffer, and what it is made with.
FILES = tuple(str(path) for path in Path(buffer_package.__file__).parent.rglob('*.py') if 'kernels' not in path.parts)
FILES += ('/contextlib.py',)
#: How many places of each operation are tried, of each kind of buffer. ``scripts/interrupts.sh`` tries more.
NUM_PLACES = int(os.environ.get('DING_STORE_PLACES', '1'))
IS_FULL = NUM_PLACES > 1
WAIT_S = 30.0

Contents = Dict[str, Tuple[Any, Any]]


def step(i: int, version: int = 0) -> Any:
    return {
        'number': torch.tensor([i]),
        'version': torch.tensor([version]),
        'env': torch.tensor([i % 2]),
        'done': torch.tensor([i % 6 > 3]),
        'shade': torch.full((3,), i % 256 / 255),
        'extra': None,
    }


def episode(i: int, version: int = 0) -> Any:
    return [step(i, version) for _ in range(1 + i % 3)]


def columns(numbers: Any) -> Dict[str, np.ndarray]:
    numbers = np.asarray(numbers).reshape(-1, 1)
    shade = np.repeat(np.float32(numbers % 256 / 255), 3, axis=1)
    return {'number': numbers, 'version': 0 * numbers, 'env': numbers % 2, 'done': numbers % 6 > 3, 'shade': shade}


def fingerprint(element: Any) -> Any:
    if isinstance(element, list):
        assert len({fingerprint(each) for each in element}) == 1
        return (*fingerprint(element[0]), len(element))
    number, version = int(element['number']), int(element['version'])
    assert int(element['env']) == number % 2
    assert element['extra'] is None or element['extra'].tolist() == [1.0, 1.0]
    assert np.allclose(element['shade'].numpy() * 255, number % 256) or element['shade'].tolist() == [2.0] * 3
    return number, version, element['extra'] is None, float(element['shade'][0])


def contents(buffer: StoreBuffer) -> Contents:
    # Samples leave their weights in metas that are not shared.
    metas = {item.index: {key: value for key, value in item.meta.items() if key != 'priority_IS'} for item in buffer}
    return {item.index: (fingerprint(item.data), metas[item.index]) for item in buffer}


class Kind(NamedTuple):
    """How a buffer is made and filled, and how it is sampled."""

    sampler: Callable[[], Any]
    is_of_episodes: bool = False
    has_metas: bool = True
    has_path: bool = False
    has_files: bool = False
    shares_frames: bool = False
    options: Dict[str, Any] = {}

    def make(self, path: Path) -> StoreBuffer:
        place = str(path / 'table') if self.has_path else None
        return StoreBuffer(SIZE, path=place, sampler=self.sampler(), seed=0, **self.options)

    def element(self, i: int, version: int = 0) -> Any:
        return episode(i, version) if self.is_of_episodes else step(i, version)

    def meta(self, i: int) -> Any:
        return {'env': i % 2, 'half': i / 2} if self.has_metas and i % 4 else None

    def filled(self, path: Path, count: int = 13) -> StoreBuffer:
        buffer = self.make(path)
        for i in range(count):
            buffer.push(self.element(i), self.meta(i))
        if count > 9:
            buffer.delete(str(9))
        return buffer


KINDS = {
    'plain': Kind(Uniform, has_metas=False),
    'uniform': Kind(Uniform),
    'prioritized': Kind(lambda: limited(Prioritized(seed=0), max_times_sampled=500)),
    'rank': Kind(lambda: RankPrioritized(seed=0)),
    'sequences': Kind(lambda: SequencePrioritized(seed=0)),
    'queue': Kind(lambda: Fifo(times=99)),
    'heap': Kind(MinHeap),
    'shuffled': Kind(lambda: Shuffled(seed=0)),
    'ahead': Kind(lambda: Prioritized(seed=0), options={'prefetch': 2}),
    'objects': Kind(Uniform, is_of_episodes=True),
    'files': Kind(lambda: Prioritized(seed=0), has_files=True),
    'shared': Kind(Uniform, shares_frames=True),
    'path': Kind(lambda: limited(Prioritized(seed=0), max_times_sampled=500), has_path=True),
    'packed': Kind(lambda: limited(Prioritized(seed=0), max_times_sampled=500), is_of_episodes=True, has_path=True),
    'fsync': Kind(Uniform, has_path=True, options={'fsync': True}),
}


def push(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.push(kind.element(20))


def push_with_meta(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.push(kind.element(21), {'env': 1, 'half': 10.5})


def push_wider(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    element = kind.element(21)
    for each in element if kind.is_of_episodes else [element]:
        each['extra'] = torch.ones(2)
    buffer.push(element)


def push_other_values(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    element = kind.element(21)
    for each in element if kind.is_of_episodes else [element]:
        each['shade'] = torch.full((3,), 2.0)  # Which is no k/255, as all before were.
    buffer.push(element)


def extend_elements(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.extend_elements([kind.element(i) for i in range(20, 23)], [kind.meta(i) for i in range(20, 23)])


def extend_all(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    numbers = np.arange(20, 20 + SIZE + 2)
    if kind.is_of_episodes:
        buffer.extend_elements([kind.element(i) for i in numbers.tolist()], commit={'cursor': 1})
    else:
        buffer.extend(columns(numbers), commit={'cursor': 1}, meta={'env': 0})


def extend_with_priorities(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    priority = np.full(3, 2.0) if buffer.sampler.priorities is not None else None
    numbers = [20, 21, 22]
    if kind.is_of_episodes:
        buffer.extend_elements([kind.element(i) for i in numbers], priority=priority, commit={'cursor': 1})
    else:
        buffer.extend(columns(numbers), priority=priority, commit={'cursor': 1})


def sample(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    draw(buffer, 3)


def sample_list(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    if not isinstance(buffer.sampler, SequencePrioritized):
        buffer.sample(3)


def sample_groups(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    if kind.has_metas:
        buffer.sample(2, groupby='env', replace=True)


def sample_sequences(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    if not kind.is_of_episodes:
        buffer.sample_sequences(2, 2, 'env', replace=True)


def sample_episodes(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    if not kind.is_of_episodes:
        try:
            buffer.sample_episodes(1, 'env')
        except NotEnoughData:
            pass


def update(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.update('10', kind.element(10, 1), {'env': 1, 'new': True})


def update_meta(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.get_by_index('11').meta['new'] = 1.5


def update_priorities(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    if buffer.sampler.priorities is not None:
        buffer.update_priorities(np.array([5, 6, 7, 11]), np.array([0.5, 2.0, 2.5, 4.0]))


def delete(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.delete('8')


def delete_many(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.delete(['5', '8', '12', '999'])


def shrink(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.resize(5)


def grow(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.resize(13)


def clear(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.clear()


def save(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.save_data(str(path / 'saves' / 'save'))


def load(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.load_data(str(path.parent / 'to_load'))


def commit(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    buffer.commit({'cursor': 1})


def look(kind: Kind, buffer: StoreBuffer, path: Path) -> None:
    view = buffer.view(Prioritized(seed=1))
    view.sample(2)
    buffer.meta_index = {'env': None}
    assert len(buffer.meta_index['env']) == buffer.count()


OPERATIONS = [
    push,
    push_with_meta,
    push_wider,
    push_other_values,
    extend_elements,
    extend_all,
    extend_with_priorities,
    sample,
    sample_list,
    sample_groups,
    sample_sequences,
    sample_episodes,
    update,
    update_meta,
    update_priorities,
    delete,
    delete_many,
    shrink,
    grow,
    clear,
    save,
    load,
    commit,
    look,
]
#: Operations that change which frames a buffer keeps.
OF_FRAMES = [push, push_other_values, extend_elements, extend_all, update, delete_many, shrink, grow, clear, load]
#: Those that change what samplers keep.
OF_SAMPLERS = [push, sample, update_priorities, load]


def draw(buffer: StoreBuffer, size: int, replace: bool = False) -> Any:
    """Row numbers of a draw, as the buffer's sampler makes them."""
    if isinstance(buffer.sampler, SequencePrioritized):
        return buffer.sample_sequences(size, 2, 'env', replace=True).rows.reshape(-1)
    if buffer.schema is None:
        return np.array([int(item.index) for item in buffer.sample(size, replace=replace)])
    return buffer.sample_batch(size, replace).rows


def in_another_thread(function: Callable[[], None]) -> None:
    """Which waits for ever where a lock is still held."""
    raised: List[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as e:  # noqa: BLE001 - raised below
            raised.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), 'a lock is held'
    if raised:
        raise raised[0]


def starts_of(buffer: StoreBuffer) -> Tuple[Set[Any], Set[Any]]:
    """Pairs of rows that follow each other in their group: those that a sample must give, and those that it may."""
    must, may = set(), set()
    of_env: Dict[int, Tuple[int, bool]] = {}
    rows = [(int(item.index), item.data) for item in buffer]
    previous = None
    for row, element in rows:
        env = int(element['env'])
        if env in of_env and not of_env[env][1]:
            may.add((of_env[env][0], row))
            if all(number in {each for each, _ in rows} for number in range(of_env[env][0], row)):
                must.add((of_env[env][0], row))
        of_env[env] = row, bool(element['done'])
        previous = row
    assert previous is not None
    return must, may


def examine(kind: Kind, buffer: StoreBuffer) -> None:
    """Whether it is one that its users may go on with."""
    assert buffer.check() == []
    found = contents(buffer)
    live = set(map(int, found))
    assert buffer.count() == len(live) == len(buffer.indices)
    assert buffer.table.rows_by_age().tolist() == sorted(live)
    assert all(buffer.indices.has(index) for index in found)
    if not live:
        return
    if not isinstance(buffer.sampler, SequencePrioritized):
        has_order = isinstance(buffer.sampler, (Fifo, MinHeap, Shuffled))
        drawn = draw(buffer, len(live)) if has_order else draw(buffer, 90, replace=True)
        assert set(drawn.tolist()) == live
    if not kind.is_of_episodes and len(live) > 3:
        must, may = starts_of(buffer)
        try:
            rows = buffer.sample_sequences(90, 2, 'env', replace=True).rows
        except NotEnoughData:
            rows = np.empty((2, 0), np.int64)
        assert must <= set(map(tuple, rows.T.tolist())) <= may
    if kind.has_metas:
        numbers = {number for number, (_, meta) in found.items() if 'env' in meta}
        if numbers:
            for group in buffer.sample(2, groupby='env', replace=True):
                assert {item.index for item in group} <= numbers
                assert len({item.meta['env'] for item in group}) == 1


def check_outcome(before: Contents, after: Contents, found: Contents) -> None:
    """Nothing that stays may be lost, nothing half done; rows that would have made room may be gone."""
    if found == after:
        return
    new = after.keys() - before.keys()
    assert not found.keys() & new, 'only a part of it is there'
    assert all(each in (before.get(index), after.get(index)) for index, each in found.items())
    if before.keys() & after.keys():
        assert before.keys() & after.keys() <= found.keys()
    else:
        assert found in (before, {})


def use_on(kind: Kind, buffer: StoreBuffer) -> None:
    """Go on with it, with each operation that changes it."""
    highest = max(map(int, buffer.table.rows_by_age().tolist()), default=0)
    numbers = range(40, 40 + int(buffer.size) // 2 + 1)
    rows = [int(buffer.push(kind.element(i), kind.meta(i)).index) for i in numbers]
    assert min(rows) > highest
    assert [fingerprint(buffer.get_by_index(str(row)).data)[0] for row in rows] == list(numbers)
    found = contents(buffer)
    assert [found[str(row)][1] for row in rows] == [kind.meta(i) or {} for i in numbers]
    buffer.delete(str(rows[1]))
    if buffer.sampler.priorities is not None:
        buffer.update_priorities(np.array(rows), np.linspace(1, 2, len(rows)))
    examine(kind, buffer)


def made(kind: Kind, path: Path) -> StoreBuffer:
    path.mkdir()
    (path / 'saves').mkdir()
    buffer = kind.filled(path)
    # What is kept up to date from now on.
    sample(kind, buffer, path)
    sample_groups(kind, buffer, path)
    sample_sequences(kind, buffer, path)
    return buffer


def save_another(kind: Kind, path: Path) -> None:
    other = StoreBuffer(SIZE)
    for i in range(30, 36):
        other.push(kind.element(i), kind.meta(i))
    other.save_data(str(path))


def check_interrupted(
    kind: Kind,
    operation: Callable[[Kind, StoreBuffer, Path], None],
    path: Path,
    files: Tuple[str, ...],
    num_places: Optional[int] = None,
) -> int:
    """Interrupt an operation at some places of these files, or at all; returns how many there are."""
    save_another(kind, path / 'to_load')
    buffer = made(kind, path / 'model')
    before = contents(buffer)
    with InterruptedAt(0, files) as counting:
        operation(kind, buffer, path / 'model')
    after = contents(buffer)
    buffer.close()
    stride = 1 if num_places is None else max(1, counting.num_places // num_places)
    for place in range(1 + zlib.crc32(str(path).encode()) % stride, counting.num_places + 1, stride):
        buffer = made(kind, path / str(place))
        with InterruptedAt(place, files) as interrupted:
            operation(kind, buffer, path / str(place))
        if interrupted.where is None:
            break
        try:
            in_another_thread(functools.partial(check_whole, kind, operation, buffer, path / str(place), before, after))
        except BaseException as e:
            raise AssertionError(f'interrupted at {interrupted.where}, place {place}') from e
    return counting.num_places


def check_whole(kind: Kind, operation: Any, buffer: StoreBuffer, path: Path, before: Contents, after: Contents) -> None:
    found = contents(buffer)
    check_outcome(before, after, found)
    if operation in (extend_all, extend_with_priorities):
        assert (buffer.committed is not None) == (found == after)
    examine(kind, buffer)
    assert sorted(each.name for each in (path / 'saves').iterdir()) in ([], ['save'])
    again = StoreBuffer(SIZE + 8)
    buffer.save_data(str(path / 'again'))
    again.load_data(str(path / 'again'))
    assert contents(again) == contents(buffer) == found
    use_on(kind, buffer)
    if not kind.has_path:
        buffer.close()
        return
    found, size = contents(buffer), int(buffer.size)
    buffer.close()
    reopened = StoreBuffer(size, path=str(path / 'table'), sampler=kind.sampler())
    assert contents(reopened) == found
    examine(kind, reopened)
    reopened.close()


def of_suite(name: str, operation: Any, loops: str) -> bool:
    """Whether it is tried in the suite: the others are much like these."""
    if name in ('plain', 'files', 'fsync') or loops == 'numpy':
        return False
    if name == 'shared':
        return operation in OF_FRAMES
    return name in ('uniform', 'path') or operation in OF_SAMPLERS


CASES = [
    pytest.param(name, operation, loops, id=f'{name}-{operation.__name__}-{loops}')
    for loops in ('compiled', 'numpy')
    for name in KINDS
    for operation in OPERATIONS
    if IS_FULL or of_suite(name, operation, loops)
]


@pytest.mark.parametrize(('name', 'operation', 'loops'), CASES)
def test_buffer_interrupted_anywhere_stays_whole(
    name: str, operation: Any, loops: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    if kind.has_files:
        monkeypatch.setattr(free_space, 'available_memory', lambda: 0)
    if kind.shares_frames:
        for limit in ('MIN_BYTES', 'MIN_LEAF_BYTES'):  # All columns of numbers of one dtype share their values.
            monkeypatch.setattr(frame_sharing, limit, 1)
    if loops == 'numpy':
        monkeypatch.setenv('DING_STORE_NO_NUMBA', '1')
    check_interrupted(kind, operation, tmp_path, FILES, NUM_PLACES)


@pytest.mark.parametrize(
    ('operation', 'loops'), [(push, 'compiled'), (extend_elements, 'compiled'), (delete_many, 'numpy')]
)
def test_row_index_interrupted_at_each_place(
    operation: Any, loops: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loops == 'numpy':
        monkeypatch.setenv('DING_STORE_NO_NUMBA', '1')
    num_places = None if IS_FULL else 12
    assert (
        check_interrupted(
            KINDS['prioritized'], operation, tmp_path, ('/table/rows.py', '/table/age_log.py'), num_places
        )
        > 5
    )


def test_interrupted_limiter_counts_completed_calls() -> None:
    files = ('/rate_limiter.py', '/contextlib.py')
    for operation, name in (
        (lambda buffer: buffer.push(step(9)), 'num_inserts'),
        (lambda buffer: buffer.sample_batch(4, replace=True), 'num_samples'),
    ):
        place, was_interrupted = 1, True
        while was_interrupted:
            buffer = StoreBuffer(SIZE, limiter=RateLimiter(1, 4.0, 8.0, max_sample=4))
            buffer.push(step(0))
            buffer.sample_batch(1)
            before = buffer.limiter.state()
            with InterruptedAt(place, files) as interrupted:
                operation(buffer)
            after = buffer.limiter.state()
            was_interrupted, place = interrupted.where is not None, place + 1
            done = {**before, name: before[name] + (1 if name == 'num_inserts' else 4)}
            assert after in ((before, done) if was_interrupted else (done,)), interrupted.where
            in_another_thread(functools.partial(buffer.push, step(1)))
            in_another_thread(functools.partial(buffer.sample_batch, 1))
        assert place > 10
