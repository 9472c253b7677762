"""Buffers that find out by themselves which frames to share, and when to stop."""

import logging
import threading
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch

from ding_store import free_space
from ding_store.buffer import Prioritized, StoreBuffer, Table, limited
from ding_store.buffer.table import column_memory, frame_pool
from ding_store.errors import ConfigError, NotEnoughSpace

FRAMES = np.random.default_rng(0).integers(0, 256, (1300, 32, 32), np.uint8)


def row(i: int, step: int = 1) -> Dict[str, torch.Tensor]:
    """A row whose stack has two frames. With a step of 1, the next row has one of them as well."""
    obs = torch.from_numpy(FRAMES[i * step : i * step + 2].copy())
    return {'obs': obs, 'number': torch.tensor([i])}


def push(buffer: StoreBuffer, rows: List[Any]) -> None:
    for each in rows:
        buffer.push(each)


def push_together(buffer: StoreBuffer, rows: List[Any]) -> None:
    for start in range(0, len(rows), 100):
        buffer.extend_elements(rows[start : start + 100])


def push_columns(buffer: StoreBuffer, rows: List[Any]) -> None:
    for start in range(0, len(rows), 100):
        part = rows[start : start + 100]
        buffer.extend({name: torch.stack([each[name] for each in part]).numpy() for name in ('obs', 'number')})


@pytest.mark.parametrize('add', [push, push_together, push_columns])
def test_frames_that_do_not_recur_are_stored_as_they_are(add: Any, caplog: pytest.LogCaptureFixture) -> None:
    buffer = StoreBuffer(1200)
    rows = [row(i, step=2) for i in range(600)]
    with caplog.at_level(logging.INFO):
        add(buffer, rows)
        assert list(buffer.table.columns.shared) == ['obs']
        # 1,000 rows with two frames each, of which hardly one recurs.
        add(buffer, [{**each, 'obs': each['obs'] ^ 255} for each in rows[:500]])
    assert list(buffer.table.columns.shared) == []
    assert "column 'obs' shares no frames from now on" in caplog.text
    assert buffer.check() == []
    items = list(buffer)
    assert torch.equal(items[3].data['obs'], rows[3]['obs'])
    assert torch.equal(items[1003].data['obs'], rows[403]['obs'] ^ 255)


def test_small_replay_is_judged_although_it_is_full(caplog: pytest.LogCaptureFixture) -> None:
    buffer = StoreBuffer(60)
    with caplog.at_level(logging.INFO):
        push_columns(buffer, [row(i % 600, step=2) for i in range(1100)])
    assert list(buffer.table.columns.shared) == []
    assert caplog.text.count('shares no frames from now on') == 1
    assert torch.equal(buffer[-1].data['obs'], row(499, step=2)['obs'])


def test_frames_that_outgrow_memory_move_to_a_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(column_memory, 'EXTENT_BYTES', 1 << 18)
    # At first, two thirds of it are enough for the frames. At the end they take more than all of it.
    memory, held = 9 << 20, [0]
    monkeypatch.setattr(free_space, 'available_memory', lambda: memory - held[0])
    size, rng = 3000, np.random.default_rng(1)
    noise = rng.integers(0, 256, (4 * size, 32, 32), np.uint8)
    stacks = np.lib.stride_tricks.sliding_window_view(noise, 4, axis=0).transpose(0, 3, 1, 2)
    buffer, plain = (StoreBuffer(size, seed=2, share_frames=share_frames) for share_frames in ('auto', False))

    def add(values: np.ndarray) -> None:
        for start in range(0, len(values), 100):
            part = np.ascontiguousarray(values[start : start + 100])
            numbers = np.array([buffer.extend({'obs': part}), plain.extend({'obs': part})])
            assert (numbers[0] == numbers[1]).all()
            held[0] = 0 if buffer.table.columns.has_files else buffer.num_bytes or 0
        given, expected = buffer.sample_batch(32), plain.sample_batch(32)
        assert (given.rows == expected.rows).all()
        assert torch.equal(given.data['obs'], expected.data['obs'])

    replacing = column_memory.ColumnMemory.replacing

    def replace_beside_a_reader(*arguments: Any) -> Any:
        reader = threading.Thread(target=lambda: buffer.gather_batch(buffer.table.rows_by_age()[-8:]), daemon=True)
        reader.start()
        reader.join(10)
        assert not reader.is_alive(), 'a sample waits until all frames have moved'
        return replacing(*arguments)

    monkeypatch.setattr(column_memory.ColumnMemory, 'replacing', replace_beside_a_reader)
    with caplog.at_level(logging.INFO):
        add(stacks[:2000])
        assert buffer.table.columns.num_bytes(1) < 3 << 20
        assert not buffer.table.columns.has_files
        for first in range(0, 12000, 2400):
            add(noise[first : first + 2400].reshape(-1, 4, 32, 32) ^ 255)
            assert buffer.check() == []
            assert buffer.table.columns.has_files == (first > 0)
    assert list(buffer.table.columns.shared) == []
    assert caplog.text.count('of frames move from memory to a file') == 1
    assert caplog.text.count('shares no frames from now on') == 1
    rows = plain.table.rows_by_age()
    assert torch.equal(buffer.gather_batch(rows).data['obs'], plain.gather_batch(rows).data['obs'])


@pytest.mark.parametrize('error', [KeyboardInterrupt, OSError])
def test_frames_whose_move_to_a_file_fails_move_later(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_memory, 'EXTENT_BYTES', 1 << 16)
    available = 2 << 20
    monkeypatch.setattr(free_space, 'available_memory', lambda: available)
    copy, calls = frame_pool._copy, [0]

    def fail_once(*arrays: Any) -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise error
        copy(*arrays)

    monkeypatch.setattr(frame_pool, '_copy', fail_once)
    buffer = StoreBuffer(3000)
    buffer.extend({'obs': FRAMES[:800].reshape(-1, 2, 32, 32)})
    available = 1 << 18
    with pytest.raises(error):
        buffer.extend({'obs': FRAMES[800:1000].reshape(-1, 2, 32, 32)})
    assert not buffer.table.columns.has_files
    buffer.extend({'obs': FRAMES[1000:1200].reshape(-1, 2, 32, 32)})
    assert buffer.table.columns.has_files
    assert (buffer.check(), buffer.count()) == ([], 500)
    assert np.array_equal(buffer.gather_batch([0, 450]).data['obs'], [FRAMES[:2], FRAMES[1100:1102]])


def test_frames_stay_in_memory_if_no_directory_is_on_a_disk(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(free_space, 'is_in_memory', lambda directory: True)
    monkeypatch.setattr(column_memory, 'EXTENT_BYTES', 1 << 16)
    available = 2 << 20
    monkeypatch.setattr(free_space, 'available_memory', lambda: available)
    monkeypatch.setattr(column_memory, '_MAX_AHEAD_BYTES', 1 << 10)
    buffer = StoreBuffer(3000)
    for first in range(0, 1000, 200):
        buffer.extend({'obs': FRAMES[first : first + 200].reshape(-1, 2, 32, 32)})
        available = 1 << 18
    assert list(buffer.table.columns.shared) == ['obs']
    assert not buffer.table.columns.has_files
    assert 'stay in it: no disk: files in' in caplog.text


@pytest.mark.parametrize('small_disk', ['16m'], indirect=True)
def test_frames_that_outgrow_memory_stay_in_it_while_the_disk_is_full(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(column_memory, 'EXTENT_BYTES', 1 << 18)
    monkeypatch.setattr(column_memory, '_MAX_AHEAD_BYTES', 1 << 18)
    monkeypatch.setattr(free_space, 'roomiest_directory', lambda: str(small_disk))
    monkeypatch.setattr(free_space, 'is_in_memory', lambda directory: False)
    filler = small_disk / 'filler'
    filler.write_bytes(bytes(free_space.free_space(str(small_disk))))
    available = 6 << 20
    monkeypatch.setattr(free_space, 'available_memory', lambda: available)
    noise = np.random.default_rng(1).integers(0, 256, (4400, 32, 32), np.uint8)
    buffer = StoreBuffer(3000)
    buffer.extend({'obs': np.lib.stride_tricks.sliding_window_view(noise[:803], 4, axis=0).transpose(0, 3, 1, 2)})

    def push_frames(first: int) -> int:
        """Push 900 frames that do not recur."""
        return buffer.extend({'obs': noise[first : first + 900].reshape(-1, 4, 32, 32)}).item(0)

    rows = [0, 799, push_frames(800), push_frames(1700)]
    available = 3 << 19
    rows.append(push_frames(2600))
    available = 1 << 20
    with pytest.raises(NotEnoughSpace, match='memory has only 1 MiB left, and there is no room for frames 0 to '):
        push_frames(3500)
    assert caplog.text.count('stay in it: no room for frames') == 1
    assert not buffer.table.columns.has_files
    assert (buffer.check(), buffer.count()) == ([], 1475)
    filler.unlink()
    rows.append(push_frames(3500))
    assert buffer.table.columns.has_files
    assert (buffer.check(), buffer.count()) == ([], 1700)
    firsts = (0, 799, 800, 1700, 2600, 3500)
    assert np.array_equal(buffer.gather_batch(rows).data['obs'], [noise[first : first + 4] for first in firsts])


def test_shared_frames_give_the_same_draws_as_without() -> None:
    batches = []
    for share_frames in ('auto', False):
        sampler = limited(Prioritized(seed=1), max_times_sampled=3)
        buffer = StoreBuffer(100, sampler=sampler, share_frames=share_frames)
        push(buffer, [row(i) for i in range(150)])
        buffer.update('120', row(7))
        for _ in range(6):
            batch = buffer.sample_batch(16)
            buffer.update_priorities(batch.rows, np.linspace(0.1, 2.0, 16))
            batches.append((share_frames, batch.rows.tolist(), batch.data.obs.numpy().copy(), batch.weights.copy()))
    for shared, plain in zip(batches[:6], batches[6:]):
        assert shared[1] == plain[1]
        assert np.array_equal(shared[2], plain[2])
        assert np.array_equal(shared[3], plain[3])


def test_shared_frames_are_off_on_demand(tmp_path: Any) -> None:
    for path in (None, str(tmp_path / 'table')):
        buffer = StoreBuffer(10, path=path, share_frames=False)
        push(buffer, [row(i) for i in range(5)])
        assert dict(buffer.table.columns.shared) == {}
        buffer.close()
    with pytest.raises(ConfigError, match=r"share_frames \(True\) must be 'auto' or False"):
        StoreBuffer(10, share_frames=True)


def test_column_that_becomes_wider_gives_up_its_frames() -> None:
    spec = np.dtype(np.float32), (32, 32)
    table = Table({'obs': spec, 'next_obs': spec}, 20, share_frames=True)
    values = FRAMES[:60].astype(np.float32)
    table.extend({'obs': values[:15], 'next_obs': values[1:16]})
    table.shape.add_columns({}, wider={'obs': (np.dtype(np.float64), (32, 32))})
    assert list(table.columns.shared) == ['next_obs']
    assert table.check() == []
    table.extend({'obs': values[15:55].astype(np.float64), 'next_obs': values[16:56]})
    assert table.check() == []
    newest = table.gather(table.rows_by_age()[-1:])
    assert np.array_equal(newest['obs'][0], values[54])
    assert np.array_equal(newest['next_obs'][0], values[55])


#: Sequences of stacks of frames. Each stack has two frames of the one before. The last value tells the frames apart.
def float_stacks(length: int) -> np.ndarray:
    levels = np.repeat(FRAMES[:1], 40, axis=0)
    levels[:, -1, -1] = np.arange(40)
    levels[7], levels[20] = levels[3], levels[19]
    stacks = np.lib.stride_tricks.sliding_window_view(levels, 3, axis=0).transpose(0, 3, 1, 2)
    values = (stacks[:36] / np.float32(255)).astype(np.float32)
    return values if not length else values.reshape(-1, length, *values.shape[1:])


def as_steps(value: Any) -> Any:
    return torch.from_numpy(value) if value.ndim == 3 else [torch.from_numpy(step) for step in value]


@pytest.mark.parametrize('length', [0, 4])
@pytest.mark.parametrize('is_strided', [False, True])
@pytest.mark.parametrize('add', ['extend', 'extend_elements', 'push'])
def test_frames_of_floats_are_shared_as_their_bytes(add: str, is_strided: bool, length: int) -> None:
    values = float_stacks(length)
    given = np.asfortranarray(values) if is_strided else values
    buffer = StoreBuffer(40)
    buffer.extend_elements([{'obs': as_steps(each)} for each in given[:1]])
    if add == 'extend':
        buffer.extend({'obs': given[1:]}, buffer.schema)
    else:
        elements = [{'obs': as_steps(each)} for each in given[1:]]
        push(buffer, elements) if add == 'push' else buffer.extend_elements(elements)
    shared = buffer.table.columns.shared['obs']
    assert shared.pool.frames.dtype == np.uint8
    assert shared.pool.num_used == 36  # of 38, two are equal to others
    found = buffer.table.gather(buffer.table.rows_by_age())['obs']
    assert found.tobytes() == values.tobytes()
    assert buffer.check() == []


@pytest.mark.parametrize('wrong', [0.3, -0.0, float('nan'), 256 / 255])
@pytest.mark.parametrize('place', [(0, 0), (5, 2), (17, 1), (35, 2)])
def test_float_that_is_no_byte_makes_the_column_wide(place: Any, wrong: float) -> None:
    values = float_stacks(0)
    values[place][0, 0] = wrong
    buffer = StoreBuffer(40)
    buffer.extend({'obs': float_stacks(0)[:2]})
    assert buffer.table.columns.narrow
    buffer.extend({'obs': values})
    assert not buffer.table.columns.narrow
    found = buffer.table.gather(buffer.table.rows_by_age()[2:])['obs']
    assert found.tobytes() == values.tobytes()
    assert buffer.check() == []
