"""Frames that are exactly k/255 take a quarter of the memory, and come back bit by bit."""

import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, List, Tuple

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from needs import lacking

from ding_store.buffer import StoreBuffer, Table
from ding_store.buffer.kernels.load import load_kernels
from ding_store.buffer.table.durability import Durability
from ding_store.buffer.table.encodings import NarrowColumn
from ding_store.buffer.table.narrowing import gather, narrow, widen
from ding_store.columns import Schema
from ding_store.environment import ENV_NO_NUMBA
from ding_store.errors import NotEnoughSpace, SchemaMismatch
from ding_store.storage.testing import WAIT_S

LEVELS = np.arange(256, dtype=np.float32) / np.float32(255)
SHAPE = (4, 40, 40)


def frame(i: int, exact: bool = True) -> np.ndarray:
    levels = np.random.RandomState(i).randint(0, 256, SHAPE)
    values = LEVELS[levels]
    if not exact:
        values[-1, -1, -1] = np.nextafter(values[-1, -1, -1], np.float32(2))
    return values


def element(i: int, exact: bool = True) -> ttorch.Tensor:
    return ttorch.as_tensor(
        {'obs': torch.from_numpy(frame(i, exact)), 'small': torch.ones(4), 'reward': torch.tensor([float(i)])}
    )


def bits(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint32)


def same(found: Any, i: int, exact: bool = True) -> bool:
    return np.array_equal(bits(found), bits(frame(i, exact)))


@pytest.fixture(params=['compiled', 'numpy'])
def either(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with numba, once without."""
    monkeypatch.setenv(ENV_NO_NUMBA, '0' if request.param == 'compiled' else '1')
    if request.param == 'compiled' and load_kernels() is None:
        lacking('no numba, which scripts/setup.sh installs')


@pytest.mark.usefixtures('either')
def test_narrow_levels_widen_bit_by_bit() -> None:
    for levels in (LEVELS, torch.arange(256).float().div(255).numpy(), np.arange(256).astype(np.float32) / 255):
        narrowed = narrow(levels.astype(np.float32))
        assert narrowed.tolist() == list(range(256))
        out = np.empty(256, np.float32)
        widen(narrowed, out)
        assert np.array_equal(bits(out), bits(levels.astype(np.float32)))


@pytest.mark.parametrize(
    'value',
    [-0.0, np.nan, np.inf, -np.inf, -1 / 255, 256 / 255, 0.5, 1e30, -1e30, np.nextafter(LEVELS[7], np.float32(1))],
)
@pytest.mark.usefixtures('either')
def test_narrow_refuses_a_value_between_levels(value: float) -> None:
    values = np.tile(LEVELS, 700)
    values[-3] = value
    assert narrow(values) is None
    assert narrow(values[:-3]) is not None


@pytest.mark.usefixtures('either')
def test_narrow_accepts_read_only_and_strided_arrays() -> None:
    values = np.tile(LEVELS, (6, 2))
    expected = np.tile(np.arange(256, dtype=np.uint8), (6, 2))
    values.flags.writeable = False
    assert np.array_equal(narrow(values), expected)
    assert np.array_equal(narrow(values[::2, 5:]), expected[::2, 5:])
    shifted = np.zeros(4 * 256 + 1, np.uint8)
    shifted[1:] = LEVELS.view(np.uint8)
    assert np.array_equal(narrow(np.frombuffer(shifted.tobytes(), np.float32, 256, 1)), expected[0, :256])
    assert narrow(np.empty((0, 4), np.float32)).shape == (0, 4)


@pytest.mark.usefixtures('either')
def test_random_floats_are_narrow_only_without_loss() -> None:
    random = np.random.RandomState(0)
    for _ in range(300):
        values = random.randint(0, 1 << 32, 5, dtype=np.uint64).astype(np.uint32).view(np.float32)
        assert narrow(values) is None or np.isin(bits(values), bits(LEVELS)).all()
    near = LEVELS[random.randint(0, 256, 100_000)]
    steps = random.randint(-1, 2, len(near)).astype(np.int32)
    moved = (near.view(np.int32) + steps).view(np.float32)
    for start in range(0, len(near), 50):
        part = slice(start, start + 50)
        assert (narrow(moved[part]) is not None) == np.isin(bits(moved[part]), bits(LEVELS)).all()


@pytest.mark.parametrize('size', [0, 1, 15, 16, 70, 4097])
@pytest.mark.parametrize('shift', range(4))
@pytest.mark.parametrize('num_rows', [3, 700])
@pytest.mark.usefixtures('either')
def test_widening_writes_rows_to_any_place(size: int, shift: int, num_rows: int) -> None:
    """Few values, and more than caches hold, which are written line by line from where one begins."""
    column = np.random.RandomState(size).randint(0, 256, (50, size)).astype(np.uint8)
    slots = np.arange(num_rows) * 7 % 50
    memory = np.full(num_rows * size + 8, 7, np.float32)
    out = memory[shift : shift + num_rows * size].reshape(num_rows, size)
    gather(column, slots, out)
    assert np.array_equal(bits(out), bits(LEVELS[column[slots]]))
    assert (memory[:shift] == 7).all()
    assert (memory[shift + out.size :] == 7).all()


@pytest.mark.parametrize('shape', [(3, 10), (3, 40), (2, 20), (4, 20), (60,), (20, 3)])
@pytest.mark.usefixtures('either')
def test_widening_into_another_shape_is_refused(shape: Tuple[int, ...]) -> None:
    """It may belong to columns that another thread has replaced meanwhile."""
    memory = np.full(1000, 7, np.float32)
    size = int(np.prod(shape))
    with pytest.raises(ValueError, match='shape'):
        gather(np.zeros((50, 20), np.uint8), np.arange(3), memory[:size].reshape(shape))
    assert (memory == 7).all()


@pytest.mark.usefixtures('either')
def test_widening_of_no_rows_gives_an_empty_array() -> None:
    assert gather(np.zeros((50, 2, 10), np.uint8), np.empty(0, np.int64), None).shape == (0, 2, 10)


@pytest.mark.usefixtures('either')
@pytest.mark.parametrize('size', [100, 100_000])
@pytest.mark.parametrize('layout', ['batch first', 'time first', 'neither'])
def test_widening_writes_single_rows_to_their_places(layout: str, size: int) -> None:
    row = np.random.RandomState(0).randint(0, 256, (5, size)).astype(np.uint8)
    memory = np.full(3 * row.size, 7, np.float32)
    out = {
        'batch first': lambda: memory.reshape(3, 5, size)[1],
        'time first': lambda: memory.reshape(5, 3, size)[:, 1],
        'neither': lambda: memory.reshape(5, size, 3)[:, :, 1],
    }[layout]()
    NarrowColumn(row[None]).put(row, out)
    assert np.array_equal(bits(out), bits(row.astype(np.float32) / np.float32(255)))
    assert (memory == 7).sum() == 2 * row.size


@pytest.mark.parametrize('size', [0, 1, 15, 16, 70, 4097])
@pytest.mark.parametrize('shift', range(4))
def test_widening_writes_steps_to_rows_with_gaps(size: int, shift: int) -> None:
    kernels = load_kernels()
    if kernels is None:
        lacking('no numba')
    row = np.random.RandomState(size).randint(0, 256, (5, size)).astype(np.uint8)
    row.flags.writeable = False
    memory = np.full(5 * 3 * size + 4, 7, np.float32)
    out = memory[shift : shift + 5 * 3 * size].reshape(5, 3, size)
    assert kernels.widen_steps(row, out[:, 1])
    assert np.array_equal(bits(out[:, 1]), bits(LEVELS[row]))
    assert (memory == 7).sum() == memory.size - row.size


def test_widening_skips_steps_of_another_shape_or_with_gaps() -> None:
    kernels = load_kernels()
    if kernels is None:
        lacking('no numba')
    row, memory = np.zeros((5, 20), np.uint8), np.full((5, 40), 7, np.float32)
    for out in (memory[:4, :20], memory[:, :21], memory[:, ::2]):
        assert not kernels.widen_steps(row, out)
    assert (memory == 7).all()


@pytest.mark.parametrize('name', ['gather_freely', 'put_freely', 'narrow_freely', 'widen_many', 'widen_steps'])
def test_widening_of_large_arrays_releases_the_gil(name: str) -> None:
    """Compiled for that, numba's cache must not give what was compiled without."""
    kernels = load_kernels()
    if kernels is None:
        lacking('no numba')
    values, levels = np.zeros(1 << 22, np.float32), np.zeros(1 << 22, np.uint8)
    one, rows = np.array([values.ctypes.data]), np.zeros(1, np.int64)
    arguments = {
        'gather_freely': (one, np.array([values.nbytes // 2]), one + values.nbytes // 2, rows, 1, True),
        'put_freely': (one, np.array([values.nbytes // 2]), one + values.nbytes // 2, 0),
        'narrow_freely': (values, levels),
        'widen_many': (levels.reshape(1, -1), rows, values.reshape(1, -1)),
        'widen_steps': (levels.reshape(4, -1), values.reshape(4, -1)),
    }[name]
    go, ran = threading.Event(), []

    def run() -> None:
        go.wait()
        ran.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    interval, deadline = sys.getswitchinterval(), time.monotonic() + WAIT_S
    sys.setswitchinterval(1000.0)  # Only who lets go of the interpreter lets others run.
    try:
        go.set()
        while not ran and time.monotonic() < deadline:
            getattr(kernels, name)(*arguments)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert time.monotonic() < deadline, 'it held the interpreter all the time'


@pytest.mark.parametrize('num_rows', [1, 700])
@pytest.mark.usefixtures('either')
def test_widening_of_slots_out_of_range_reads_the_nearest(num_rows: int) -> None:
    column = np.repeat(np.arange(3, dtype=np.uint8), 500).reshape(3, 500)
    slots = np.tile([-5, 1, 1 << 60], num_rows)
    assert np.array_equal(gather(column, slots, None)[:, 0], LEVELS[np.tile([0, 1, 2], num_rows)])


@pytest.fixture(params=[False, True], ids=['memory', 'path'])
def options(request: Any, tmp_path: Path) -> dict:
    return {'path': str(tmp_path / 'table')} if request.param else {}


def test_narrow_columns_are_found_automatically(options: dict) -> None:
    buffer = StoreBuffer(20, **options)
    for i in range(5):
        buffer.push(element(i))
    buffer.extend(buffer.schema.encode([element(i) for i in range(5, 30)]))
    assert 'obs' in buffer.table.columns.narrow
    assert 'small' not in buffer.table.columns.narrow
    assert buffer.table.columns.specs['obs'] == (np.float32, SHAPE)
    assert all(same(item.data.obs, 10 + i) for i, item in enumerate(buffer))
    batch = buffer.sample_batch(7)
    assert batch.data.obs.dtype == torch.float32
    assert all(same(obs, row) for obs, row in zip(batch.data.obs.numpy(), batch.rows.tolist()))
    assert all(same(obs, row) for obs, row in zip(buffer.table.gather(batch.rows)['obs'], batch.rows.tolist()))
    buffer.update('15', element(3))
    assert same(buffer[5].data.obs, 3)
    buffer.resize(8)
    assert same(buffer[0].data.obs, 22)
    assert buffer.check() == []
    buffer.close()


@pytest.mark.parametrize('how', ['push', 'extend', 'update'])
def test_narrow_column_is_widened_once_without_loss(options: dict, how: str, caplog: pytest.LogCaptureFixture) -> None:
    buffer = StoreBuffer(10, **options)
    for i in range(12):
        buffer.push(element(i))
    with caplog.at_level(logging.WARNING):
        for i in (12, 13):
            if how == 'push':
                buffer.push(element(i, exact=False))
            elif how == 'extend':
                buffer.extend(buffer.schema.encode([element(i, exact=False)]))
            else:
                buffer.push(element(i))
                buffer.update(str(i), element(i, exact=False))
    assert len([r for r in caplog.records if 'Nothing is lost' in r.message]) == 1
    assert 'obs' not in buffer.table.columns.narrow
    assert all(same(item.data.obs, 4 + i, exact=i < 8) for i, item in enumerate(buffer))
    assert buffer.check() == []
    if options:
        buffer.close()
        buffer = StoreBuffer(10, **options)
        assert all(same(item.data.obs, 4 + i, exact=i < 8) for i, item in enumerate(buffer))
        assert len(list(Path(options['path']).glob('*.column'))) == 3
    buffer.close()


def both(i: int, exact: bool = True) -> ttorch.Tensor:
    """Two frames, of which the second may be none."""
    leaves = {'obs': torch.from_numpy(frame(i)), 'next_obs': torch.from_numpy(frame(i + 100, exact))}
    return ttorch.as_tensor({**leaves, 'reward': torch.tensor([float(i)])})


@pytest.mark.parametrize('how', ['one', 'several'])
@pytest.mark.usefixtures('either')
def test_narrow_push_with_a_later_unfit_leaf_keeps_rows(options: dict, how: str) -> None:
    """Nothing of the row is written before all of it is looked at: those that it takes the place of are whole."""
    buffer = StoreBuffer(5, **options)
    for i in range(7):
        buffer.push(both(i))
    assert set(buffer.table.columns.narrow) == {'obs', 'next_obs'}
    pushed = [both(i, exact=i != 8) for i in range(7, 10)]
    if how == 'one':
        for element_ in pushed:
            buffer.push(element_)
    else:
        buffer.extend_elements(pushed)
    assert set(buffer.table.columns.narrow) == {'obs'}
    assert [item.index for item in buffer] == ['5', '6', '7', '8', '9']
    for i, item in zip(range(5, 10), buffer):
        assert same(item.data.obs, i)
        assert same(item.data.next_obs, i + 100, exact=i != 8)
        assert item.data.reward.item() == i
    assert buffer.check() == []
    buffer.close()


@pytest.mark.usefixtures('either')
def test_push_without_room_to_widen_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = StoreBuffer(5)
    for i in range(7):
        buffer.push(both(i))

    def full(*arguments: Any) -> None:
        raise NotEnoughSpace('the disk is full')

    monkeypatch.setattr(buffer.table.columns, 'replacing', full)
    for push in (lambda one: buffer.push(one), lambda one: buffer.extend_elements([both(50), one])):
        with pytest.raises(NotEnoughSpace):
            push(both(7, exact=False))
        assert [item.index for item in buffer] == ['2', '3', '4', '5', '6']
        assert all(same(item.data.obs, i) and same(item.data.next_obs, i + 100) for i, item in enumerate(buffer, 2))
        assert buffer.check() == []


def test_narrow_column_read_during_widening_is_whole(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader begins while the wide column is made, and copies from the narrow one when the wide one is in place."""
    shape = (300, 1024)  # So large that rows are copied without a lock.
    table = Table({}, 4, **options)
    table.shape.replace_columns({'obs': (np.dtype(np.float32), shape)}, narrow_columns=['obs'])
    table.extend({'obs': np.ones((2, *shape), np.float32)})
    is_reading, is_wide = threading.Event(), threading.Event()
    found: List[np.ndarray] = []
    reader = threading.Thread(target=lambda: found.append(table.gather(np.array([1]))['obs']))
    decode, read, describe = NarrowColumn.decode, NarrowColumn.read, Durability.describing

    def decoded(*arguments: Any) -> None:
        decode(*arguments)
        reader.start()
        assert is_reading.wait(60)

    def read_late(self: NarrowColumn, slots: np.ndarray) -> np.ndarray:
        if threading.current_thread() is reader:
            is_reading.set()
            assert is_wide.wait(60)
        return read(self, slots)

    def described(self: Durability, *made: Any) -> Callable[[], None]:
        commit = describe(self, *made)
        return lambda: (is_wide.set(), commit())

    monkeypatch.setattr(NarrowColumn, 'decode', decoded)
    monkeypatch.setattr(NarrowColumn, 'read', read_late)
    monkeypatch.setattr(Durability, 'describing', described)
    table.extend({'obs': np.full((1, *shape), 0.3, np.float32)})
    reader.join(60)
    assert [(each.dtype, each.max()) for each in found] == [(np.float32, 1.0)]
    table.close()


def test_frames_of_other_values_are_kept_wide() -> None:
    buffer = StoreBuffer(5)
    buffer.push(element(1, exact=False))
    assert 'obs' not in buffer.table.columns.narrow
    buffer.clear()
    buffer.push(ttorch.as_tensor({'other': torch.zeros(8, 2000)}))
    assert 'other' in buffer.table.columns.narrow


def test_narrow_columns_survive_files_and_restarts(options: dict, tmp_path: Path) -> None:
    buffer = StoreBuffer(10, **options)
    for i in range(14):
        buffer.push(element(i))
    buffer.save_data(str(tmp_path / 'save'))
    assert (tmp_path / 'save').stat().st_size < 10 * 4 * 1600 * 1.2
    buffer.close()
    if options:
        buffer = StoreBuffer(10, **options)
        assert 'obs' in buffer.table.columns.narrow
        assert all(same(item.data.obs, 4 + i) for i, item in enumerate(buffer))
        buffer.close()
    loaded = StoreBuffer(6)
    loaded.load_data(str(tmp_path / 'save'))
    assert 'obs' in loaded.table.columns.narrow
    assert all(same(item.data.obs, 8 + i) for i, item in enumerate(loaded))


def test_narrow_column_of_a_wider_kind_keeps_its_values() -> None:
    levels = (np.arange(1024) % 256).astype(np.float32) / np.float32(255)
    buffer = StoreBuffer(5)
    buffer.push({'obs': list(levels)})
    assert buffer.table.columns.narrow
    buffer.push({'obs': [0.3] * 1024})
    assert not buffer.table.columns.narrow
    assert [item.data['obs'] for item in buffer] == [levels.tolist(), [0.3] * 1024]


def test_narrow_lists_of_frames_are_read_time_first() -> None:
    buffer = StoreBuffer(10)
    for i in range(4):
        buffer.push([{'obs': torch.from_numpy(frame(10 * i + t)), 'reward': torch.ones(1)} for t in range(3)])
    assert buffer.table.columns.narrow
    for i, item in enumerate(buffer):
        assert all(same(step['obs'], 10 * i + t) for t, step in enumerate(item.data))


def as_columns(rows: Any, exact: bool = True, narrowed: bool = False) -> Any:
    frames = np.stack([frame(i, exact) for i in rows])
    obs = narrow(frames) if narrowed else frames
    return {'obs': obs, 'small': np.ones((len(rows), 4), np.float32), 'reward': np.array([[i] for i in rows], 'f4')}


@pytest.mark.usefixtures('either')
def test_narrowed_push_into_narrow_columns_is_equal(options: dict) -> None:
    """Among others that do not, more than there is room for, before and after the column had to be widened."""
    buffer, expected, schema = StoreBuffer(5, **options), [], Schema.infer([element(0)])
    pushes = [(2, True, True), (1, True, False), (9, True, True), (1, False, False), (3, True, True), (7, True, True)]
    for count, exact, narrowed in pushes:
        rows = range(len(expected), len(expected) + count)
        columns = as_columns(rows, exact, narrowed)
        if narrowed:
            columns['obs'].flags.writeable = False
        found = buffer.extend(columns, schema, narrowed=['obs'] if narrowed else ())
        assert found.tolist() == list(rows)
        expected += [exact] * count
        assert set(buffer.table.columns.narrow) == (set() if False in expected else {'obs'})
        for item in buffer:
            assert same(item.data.obs, int(item.index), expected[int(item.index)])
            assert item.data.reward.item() == int(item.index)
        assert len(buffer) == min(5, len(expected))
        assert buffer.check() == []
    buffer.close()


def test_narrowed_push_into_wide_columns_is_equal(options: dict) -> None:
    """To buffers of objects, behind middleware, without a schema, and of leaves that are too small."""
    seen: List[Any] = []

    def look(action: str, chain: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(args[0])
        return chain(*args, **kwargs)

    columns = as_columns(range(3), narrowed=True)
    watched = StoreBuffer(5, **options).use(look)
    watched.extend(columns, Schema.infer([element(0)]), narrowed=['obs'])
    assert [same(each.obs, i) for i, each in enumerate(seen)] == [True] * 3
    watched.close()
    objects = StoreBuffer(5)
    objects.push({'obs': object()})
    objects.extend(columns, Schema.infer([element(0)]), narrowed=['obs'])
    assert [same(item.data.obs, i) for i, item in enumerate(list(objects)[1:])] == [True] * 3
    plain = StoreBuffer(5)
    plain.extend(columns, narrowed=['obs'])
    assert [same(item.data.obs, i) for i, item in enumerate(plain)] == [True] * 3
    small = StoreBuffer(5)
    small.extend({'x': np.array([[0, 51, 255]], np.uint8)}, narrowed=['x'])
    assert small.table.columns.narrow == set()
    assert small.sample_batch(1).data.x.tolist() == [[0.0, np.float32(0.2), 1.0]]


@pytest.mark.parametrize(('name', 'dtype'), [('obs', np.float32), ('there', None)])
@pytest.mark.parametrize('known', [True, False])
def test_narrowed_push_of_an_unfit_column_is_refused(name: str, dtype: Any, known: bool) -> None:
    """And nothing changed."""
    buffer, schema = StoreBuffer(5), Schema.infer([element(0)])
    if known:
        buffer.extend(as_columns(range(2), narrowed=True), schema, narrowed=['obs'])
    columns = as_columns(range(2), narrowed=True)
    if dtype is not None:
        columns[name] = columns[name].astype(dtype)
    with pytest.raises(SchemaMismatch, match=f'{name}.*uint8') as refusal:
        buffer.extend(columns, schema, narrowed=[name])
    assert 'float32' in str(refusal.value)
    assert len(buffer) == 2 * known
    buffer.extend(as_columns(range(2), narrowed=True), schema, narrowed=['obs'])
    assert [same(item.data.obs, i % 2) for i, item in enumerate(buffer)] == [True] * len(buffer)
    counts = StoreBuffer(5)
    with pytest.raises(SchemaMismatch, match='x: expected int64'):
        counts.extend({'x': np.ones((1, 3), np.uint8)}, Schema.infer([{'x': np.ones(3, np.int64)}]), narrowed=['x'])
    assert len(counts) == 0


def test_narrow_columns_of_an_emptied_buffer_are_found_anew(options: dict) -> None:
    """What is k/255 is found out for a schema that follows another, too."""
    buffer = StoreBuffer(5, **options)
    buffer.extend({'x': np.ones((2, 3), np.float32)})
    buffer.clear()
    buffer.extend(as_columns(range(2)), Schema.infer([element(0)]))
    assert set(buffer.table.columns.narrow) == {'obs'}
    buffer.close()
