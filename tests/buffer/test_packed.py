"""Lists of varying length in a buffer with a path; what they share with others is in test_store_buffer."""

import random
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch
from test_durable import header_of
from test_threads import run_all

from ding_store.buffer import Prioritized, StoreBuffer, limited
from ding_store.buffer.array_types import Array
from ding_store.buffer.elements import packet_file
from ding_store.buffer.elements.extents import Extents
from ding_store.buffer.elements.packed_elements import INFO, PackedElements
from ding_store.buffer.table import reads as table_reads
from ding_store.errors import CorruptPayload, FormatMismatch, NotEnoughSpace


def episode(i: int, length: int = 0) -> List[Dict[str, Any]]:
    """Of 2 to 6 steps, which all say ``i``."""
    length = length or 2 + i % 5
    return [{'obs': torch.full((400,), i), 'done': t == length - 1} for t in range(length)]


def number(steps: List[Dict[str, Any]]) -> int:
    (i,) = set(torch.cat([step['obs'] for step in steps]).tolist())
    assert [step['done'] for step in steps] == [False] * (len(steps) - 1) + [True]
    assert len(steps) == 2 + i % 5
    return i


def numbers(buffer: StoreBuffer) -> List[Tuple[str, int, Any]]:
    return [(item.index, number(item.data), item.meta) for item in buffer]


def test_packed_rows_keep_metas_priorities_and_uses(tmp_path: Path) -> None:
    def opened() -> StoreBuffer:
        sampler = limited(Prioritized(epsilon=0.0, seed=0), max_times_sampled=9)
        return StoreBuffer(10, path=str(tmp_path), sampler=sampler)

    buffer = opened()
    rows = buffer.extend_elements([episode(0), episode(5)], [{'i': 0}, {'i': 5}], priority=[2.0, 3.0])
    buffer.sample(2, groupby=None)
    assert buffer.schema is not None
    buffer.push(episode(1), {'i': 1})
    assert buffer.schema is None
    for _ in range(2):
        # 2, 2 and 3 steps of 3,200 bytes.
        assert 22_400 < (buffer.num_bytes or 0) < 25_000
        assert numbers(buffer) == [('0', 0, {'i': 0}), ('1', 5, {'i': 5}), ('2', 1, {'i': 1})]
        assert buffer.sampler.sampler.priorities.of(rows).tolist() == pytest.approx([2.0, 3.0])  # made of masses
        assert buffer.sampler.uses_of(rows).tolist() == [1, 1]
        assert not list(tmp_path.glob('*.column'))[len(packet_file.SPECS) :]
        buffer.close()
        buffer = opened()
    buffer.close()


def test_packed_save_loads_into_memory_and_into_a_path(tmp_path: Path) -> None:
    memory, name = StoreBuffer(30), str(tmp_path / 'save')
    for i in range(20):
        memory.push(episode(i), {'i': i})
    memory.save_data(name)
    kept = StoreBuffer(12, path=str(tmp_path / 'kept'))
    for i in range(3):
        kept.push(episode(i))
    for _ in range(3):
        kept.load_data(name)
        assert numbers(kept) == numbers(memory)[-12:]
        assert kept.check() == []
    kept.save_data(name)
    size = (tmp_path / 'kept' / 'packed').stat().st_size
    kept.close()
    kept = StoreBuffer(12, path=str(tmp_path / 'kept'))
    assert (tmp_path / 'kept' / 'packed').stat().st_size <= size
    memory.load_data(name)
    assert numbers(memory) == numbers(kept)
    kept.resize(5)
    kept.push(episode(40))
    assert [i for _, i, _ in numbers(kept)] == [16, 17, 18, 19, 40]
    # A load of elements in columns, and back.
    columns = StoreBuffer(5)
    columns.push({'x': torch.ones(2)})
    columns.save_data(name)
    kept.load_data(name)
    assert [item.data['x'].tolist() for item in kept] == [[1.0, 1.0]]
    assert not (tmp_path / 'kept' / 'packed').exists()
    kept.close()


def test_packed_push_on_a_full_disk_changes_nothing(small_disk: Path) -> None:
    buffer = StoreBuffer(2000, path=str(small_disk / 'kept'))

    def fill() -> None:
        for i in range(2000):
            buffer.push(episode(i * 5) if i else episode(1))

    with pytest.raises(NotEnoughSpace, match='packed'):
        fill()
    pushed = buffer.count()
    assert 300 < pushed < 2000
    assert [i for _, i, _ in numbers(buffer)] == [1, *range(5, pushed * 5, 5)]
    with pytest.raises(NotEnoughSpace):
        buffer.update('3', [*episode(1), *episode(1)] * 200)
    assert buffer.check() == []
    # Where one left there is room for another.
    buffer.delete([str(i) for i in range(4)])
    buffer.push(episode(2))
    assert buffer.count() == pushed - 3
    assert buffer.check() == []
    buffer.close()


def test_packed_episodes_are_never_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_reads, 'QUICK_BYTES', -1)
    buffer = StoreBuffer(20, path=str(tmp_path))
    for i in range(20):
        buffer.push(episode(i))
    rng = random.Random(1)

    def write() -> None:
        for i in range(20, 400):
            row = int(buffer.push(episode(i)).index)
            buffer.update(str(row - rng.randint(0, 15)), episode(row + 1000))
            if i % 9 == 0:
                buffer.delete(str(row - 5))

    def read() -> None:
        for _ in range(200):
            for item in buffer.sample(8, replace=True):
                number(item.data)

    run_all(write, read, read)
    assert buffer.check() == []
    buffer.close()


def test_packed_extents_equal_those_of_a_bitmap() -> None:
    rng, extents, used = random.Random(0), Extents(), {}
    bitmap = np.zeros(1 << 17, bool)
    for step in range(3000):
        if used and rng.random() < 0.65:
            # Mostly the oldest.
            start = next(iter(used)) if rng.random() < 0.7 else rng.choice(list(used))
            size = used.pop(start)
            bitmap[start : start + size] = False
            extents.free(start, size)
        else:
            sizes = [rng.randint(1, 300) if rng.random() < 0.9 else 0 for _ in range(rng.choice([1, 1, 5]))]
            for start, size in zip(extents.allocate_each(sizes), sizes):
                assert not bitmap[start : start + size].any()
                bitmap[start : start + size] = True
                used.update({start: size} if size else {})
        if step % 100 == 0:
            again = Extents(used.items())
            assert again.__dict__ == {**extents.__dict__, '_next': 0}
        assert extents.end == (np.flatnonzero(bitmap).max(initial=-1) + 1)
    for start, size in used.items():
        extents.free(start, size)
    assert extents.end == 0


def test_packed_file_truncated_is_refused_and_not_changed(tmp_path: Path) -> None:
    buffer = StoreBuffer(4, path=str(tmp_path))
    for i in range(3):
        buffer.push(episode(i))
    buffer.close()
    file, whole = tmp_path / 'packed', (tmp_path / 'packed').read_bytes()
    file.write_bytes(whole[:3000])
    with pytest.raises(CorruptPayload, match=r"packed' has 3000 bytes, but .* are needed"):
        StoreBuffer(4, path=str(tmp_path))
    assert file.stat().st_size == 3000
    file.unlink()
    with pytest.raises(CorruptPayload, match=r"packed' is missing"):
        StoreBuffer(4, path=str(tmp_path))
    assert not file.exists()
    file.write_bytes(whole)
    buffer = StoreBuffer(4, path=str(tmp_path))
    assert [i for _, i, _ in numbers(buffer)] == [0, 1, 2]
    buffer.close()


def test_packed_push_does_not_wait_for_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = StoreBuffer(8, path=str(tmp_path))
    for i in range(8):
        buffer.push(episode(i, 100 + i))
    take, pushed = PackedElements.take, []

    def take_slowly(elements: PackedElements, slots: Array, is_warm: bool) -> Any:
        if not pushed:
            pushed.append(1)
            run_all(lambda: buffer.push(episode(8, 108)))
        return take(elements, slots, is_warm)

    monkeypatch.setattr(PackedElements, 'take', take_slowly)
    # It is read again where what was drawn left meanwhile.
    assert sorted(len(item.data) for item in buffer.sample(8)) == list(range(101, 109))
    assert pushed
    buffer.close()


def test_packed_file_without_rows_is_removed(small_disk: Path) -> None:
    buffer = StoreBuffer(200, path=str(small_disk / 'kept'))
    for i in range(200):
        buffer.push([{'obs': torch.full((2000,), i)}])
    with pytest.raises(NotEnoughSpace):
        buffer.push([{'obs': torch.full((2000,), i)} for i in range(2)])
    assert not (small_disk / 'kept' / 'packed').exists()
    assert buffer.schema is not None
    assert buffer.count() == 200
    # Killed after other columns took the place of its own, and before its file was gone.
    buffer.clear()
    buffer.push([{'obs': torch.zeros(2000)}])
    (small_disk / 'kept' / 'packed').write_bytes(bytes(10_000))
    buffer.close()
    buffer = StoreBuffer(200, path=str(small_disk / 'kept'))
    assert buffer.count() == 1
    assert not (small_disk / 'kept' / 'packed').exists()
    buffer.close()


def findings_of(buffer: StoreBuffer, row: int) -> List[str]:
    return [
        f'the element of row {row} in {buffer.table.table_dir.path!r} is damaged: the checksum of its packet is wrong'
    ]


def check_damage(buffer: StoreBuffer, row: int, others: List[int]) -> None:
    """It is named, and nobody gets it; all others are what they were."""
    assert findings_of(buffer, row)[0] in buffer.check()
    with pytest.raises(CorruptPayload, match=f'row {row} in .* is damaged'):
        buffer.get_by_index(str(row))
    with pytest.raises(CorruptPayload, match=f'row {row} in'):
        buffer.sample(buffer.count())
    assert [number(buffer.get_by_index(str(each)).data) for each in others] == others


def test_packed_episode_with_a_flipped_bit_is_found(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    buffer = StoreBuffer(8, path=str(tmp_path))
    for i in range(12):
        buffer.push(episode(i))
    columns = {name: column.stored for name, column in buffer.table.columns.current.items()}
    file = np.memmap(tmp_path / 'packed', np.uint8)
    for _ in range(100):
        row = int(random.integers(4, 12))
        slot = buffer.table.index.find(np.array([row]))[0][0]
        place, size = columns[packet_file.PLACE][slot], columns[packet_file.BYTES][slot]
        byte, bit = place + random.integers(size), 1 << random.integers(8)
        file[byte] ^= bit
        check_damage(buffer, row, [each for each in range(4, 12) if each != row])
        assert buffer.check() == findings_of(buffer, row)
        file[byte] ^= bit
    for name in packet_file.SPECS:
        for bit in range(63):
            columns[name][3] ^= np.int64(1 << bit)
            row = int(buffer.table.index.row_of_slot[3])
            check_damage(buffer, row, [each for each in range(4, 12) if each != row])
            columns[name][3] ^= np.int64(1 << bit)
    assert buffer.check() == []
    file[columns[packet_file.PLACE][0] + 9] ^= 1
    buffer.close()
    buffer = StoreBuffer(8, path=str(tmp_path))
    row = int(buffer.table.index.row_of_slot[0])
    assert buffer.check() == findings_of(buffer, row)
    buffer.delete(str(row))
    assert buffer.check() == []
    assert sorted(number(item.data) for item in buffer.sample(7)) == [i for i in range(4, 12) if i != row]
    buffer.close()


@pytest.mark.parametrize('name', [packet_file.PLACE, packet_file.BYTES])
@pytest.mark.parametrize('is_opened_again', [False, True])
def test_packed_damaged_place_loses_no_other_row(name: str, is_opened_again: bool, tmp_path: Path) -> None:
    for bit in (6, 9, 12, 13, 14, 15, 16, 40, 62, 63):
        path = str(tmp_path / str(bit))
        buffer = StoreBuffer(8, path=path)
        for i in range(12):
            buffer.push(episode(i))
        # Row 11.
        buffer.table.columns.current[name].stored.view(np.uint64)[3] ^= np.uint64(1 << bit)
        if is_opened_again:
            buffer.close()
            buffer = StoreBuffer(8, path=path)
        check_damage(buffer, 11, [4, 5, 6, 7, 8, 9, 10])
        for i in (12, 13, 14):
            buffer.push(episode(i))
        check_damage(buffer, 11, [7, 8, 9, 10, 12, 13, 14])
        buffer.delete('11')
        for i in range(15, 24):
            buffer.push(episode(i))
            assert all(number(item.data) == int(item.index) for item in buffer)
        assert buffer.check() == []
        buffer.close()


def test_packed_bytes_of_two_rows_are_freed_once(tmp_path: Path) -> None:
    buffer = StoreBuffer(4, path=str(tmp_path))
    for i in (1, 5, 5, 5):
        buffer.push(episode(i))
    places = buffer.table.columns.current[packet_file.PLACE].stored
    places[3] = places[1]
    buffer.close()
    buffer = StoreBuffer(4, path=str(tmp_path))
    buffer.delete('1')
    buffer.push(episode(10))
    buffer.delete('3')
    for i in (15, 20):
        buffer.push(episode(i))
    assert [i for _, i, _ in numbers(buffer)] == [5, 10, 15, 20]
    assert buffer.check() == []
    buffer.close()


def test_packed_file_of_another_version_is_refused(tmp_path: Path) -> None:
    buffer = StoreBuffer(8, path=str(tmp_path))
    for i in range(2):
        buffer.push(episode(i))
    buffer.close()
    header_of(tmp_path, info={'packed': 1})
    with pytest.raises(FormatMismatch, match='packed elements of version 1'):
        StoreBuffer(8, path=str(tmp_path))
    header_of(tmp_path, info=INFO)
    assert StoreBuffer(8, path=str(tmp_path)).count() == 2
