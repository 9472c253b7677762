"""A live buffer of another size: in memory, in unlinked files and with a path; with metas, groups and priorities."""

import threading
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
from elements import number, transition

from ding_store.buffer import Prioritized, StoreBuffer, Table
from ding_store.buffer.table import regions


@pytest.fixture(params=['memory', 'files', 'path'])
def options(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    if request.param == 'files':
        monkeypatch.setattr(regions.space, 'available_memory', lambda: 1000)
        monkeypatch.setattr(regions.space, 'roomiest_directory', lambda: str(tmp_path))
    return {'path': str(tmp_path / 'replay')} if request.param == 'path' else {}


def numbers(buffer: StoreBuffer) -> List[int]:
    return [number(item.data) for item in buffer]


def test_shrink_and_grow(options: dict) -> None:
    buffer = StoreBuffer(10, **options)
    for i in range(17):
        buffer.push(transition(i), {'group': i % 3})
    buffer.delete(['9', '12'])
    buffer.resize(5)
    assert numbers(buffer) == [11, 13, 14, 15, 16]
    assert [item.meta['group'] for item in buffer] == [2, 1, 2, 0, 1]
    assert buffer.size == buffer.table.capacity == buffer.view().size == 5
    assert sorted(map(len, buffer.sample(3, groupby='group'))) == [1, 2, 2]
    buffer.resize(8)
    assert sorted(map(len, buffer.sample(3, groupby='group'))) == [1, 2, 2]
    for i in range(17, 25):
        buffer.push(transition(i), {'group': i})
    assert numbers(buffer) == list(range(17, 25))
    assert buffer.check() == []
    assert len(buffer.sample(8, groupby='group')) == 8
    buffer.close()


def test_priorities_follow(options: dict) -> None:
    buffer = StoreBuffer(10, sampler=Prioritized(seed=0), **options)
    rows = buffer.extend_elements([transition(i) for i in range(14)], priority=np.arange(14.0) + 1)
    for size in (6, 30):
        buffer.resize(size)
        assert buffer.sampler.priorities_of(rows[-6:]) == pytest.approx(np.arange(9.0, 15.0))
        assert set(buffer.sample_batch(6, replace=True).rows) <= set(rows[-6:])
    buffer.close()


def test_objects_too() -> None:
    buffer = StoreBuffer(6)
    for i in range(9):
        buffer.push(f'element {i}', {'i': i})
    buffer.resize(3)
    buffer.resize(4)
    buffer.push('last')
    assert [item.data for item in buffer] == ['element 6', 'element 7', 'element 8', 'last']
    assert [item.meta for item in buffer] == [{'i': 6}, {'i': 7}, {'i': 8}, {}]


@pytest.mark.parametrize('size', [0, -1, 2.5, None])
def test_bad_sizes_change_nothing(size: Any) -> None:
    buffer = StoreBuffer(4)
    buffer.push(transition(1))
    with pytest.raises(TypeError, match='size'):
        buffer.resize(size)
    assert (buffer.size, numbers(buffer)) == (4, [1])


def test_the_disk_gets_its_space_back(tmp_path: Path) -> None:
    table = Table({'block': (np.dtype(np.uint8), (1 << 16,))}, 100, str(tmp_path))
    table.extend({'block': np.ones((100, 1 << 16), np.uint8)})
    (file,) = tmp_path.glob('*.column')
    before = file.stat().st_blocks
    table.resize(10)
    assert file.stat().st_blocks <= before // 5
    assert (table.gather(table.rows_by_age())['block'] == 1).all()
    table.close()


def test_readers_and_writers_meanwhile(options: dict) -> None:
    buffer = StoreBuffer(50, **options)
    buffer.extend_elements([transition(i) for i in range(50)])
    wrong: List[Any] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                for item in buffer.sample(8):
                    if number(item.data) != int(item.index):
                        wrong.append((item.index, number(item.data)))
        except BaseException as e:  # noqa: BLE001  told to the test below
            wrong.append(e)

    def write() -> None:
        try:
            i = 50
            while not done.is_set():
                buffer.push(transition(i))
                i += 1
        except BaseException as e:  # noqa: BLE001  told to the test below
            wrong.append(e)

    threads = [threading.Thread(target=each) for each in (read, read, write)]
    for thread in threads:
        thread.start()
    for size in [20, 70, 9, 100, 33] * 10:
        buffer.resize(size)
        assert buffer.check() == []
    done.set()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    buffer.close()
