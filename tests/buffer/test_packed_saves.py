"""Saves of whole episodes in a path: one episode at a time in memory, of one moment, and nothing damaged in them."""

import tracemalloc
from pathlib import Path
from typing import Any, Callable, List, Tuple

import numpy as np
import pytest
import torch
from test_loads import flipped
from test_packed import episode, number, numbers

from ding_store.buffer import StoreBuffer
from ding_store.buffer.elements import packet_file
from ding_store.buffer.elements.packet_file import PacketFile
from ding_store.buffer.elements.packets import Packet, Place
from ding_store.buffer.saving import saves
from ding_store.errors import CorruptPayload, FormatMismatch

#: Bytes of one episode of ``large``, of which there are so many.
LARGE, COUNT = 1 << 18, 24


def large(i: int) -> List[Any]:
    """Of two lengths, which makes them no columns."""
    return [{'obs': torch.full((LARGE // 8,), i, dtype=torch.uint8)} for _ in range(8 + i % 2)]


def peak_bytes(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_packed_save_holds_few_episodes_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, name = StoreBuffer(COUNT, path=str(tmp_path / 'one')), str(tmp_path / 'save')
    for i in range(COUNT):
        buffer.push(large(i), {'i': i})
    # With writers waiting, and without.
    for few_bytes in (0, 2 * COUNT * LARGE):
        monkeypatch.setattr(saves, 'FEW_BYTES', few_bytes)
        assert peak_bytes(lambda: buffer.save_data(name)) < 5 * LARGE
    other = StoreBuffer(COUNT - 5, path=str(tmp_path / 'other'))
    other.push(large(0))
    assert peak_bytes(lambda: other.load_data(name)) < 5 * LARGE
    assert peak_bytes(other.check) < 5 * LARGE
    assert other.check() == []
    found = [other.get_by_index(str(i)) for i in range(5, COUNT)]
    assert [item.meta for item in found] == [{'i': i} for i in range(5, COUNT)]
    for i, item in enumerate(found, 5):
        assert all(torch.equal(one['obs'], two['obs']) for one, two in zip(item.data, large(i)))
    buffer.close()
    other.close()


def filled(path: Path, size: int = 8, count: int = 12) -> StoreBuffer:
    buffer = StoreBuffer(size, path=str(path))
    for i in range(count):
        buffer.push(episode(i), {'i': i})
    return buffer


def loaded(name: Path) -> List[Tuple[str, int, Any]]:
    buffer = StoreBuffer(8)
    buffer.load_data(str(name))
    return numbers(buffer)


def change(buffer: StoreBuffer) -> None:
    buffer.update('8', episode(108))
    buffer.update('4', episode(104))
    buffer.delete('9')
    for i in range(12, 15):
        buffer.push(episode(i), {'i': i})


def load_others(buffer: StoreBuffer) -> None:
    buffer.load_data(str(Path(buffer.table.table_dir.path).parent / 'others'))


def clear(buffer: StoreBuffer) -> None:
    buffer.clear()
    for i in range(3):
        buffer.push(episode(i), {'i': i})


@pytest.mark.parametrize('what', [change, load_others, clear])
@pytest.mark.parametrize('row', [4, 6, 11])
def test_packed_save_during_writes_is_of_one_moment(
    row: int, what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = filled(tmp_path / 'some')
    others.extend_elements([episode(100 + i) for i in range(8)])
    others.save_data(str(tmp_path / 'others'))
    others.close()
    buffer, changed = filled(tmp_path / 'table'), []
    read = PacketFile.read

    def read_changed(file: PacketFile, place: Place) -> Packet:
        if place.row == row and not changed:
            changed.append(True)
            what(buffer)
        return read(file, place)

    monkeypatch.setattr(saves, 'FEW_BYTES', 0)
    monkeypatch.setattr(PacketFile, 'read', read_changed)
    buffer.save_data(str(tmp_path / 'save'))
    assert changed
    assert loaded(tmp_path / 'save') == numbers(buffer)
    assert buffer.check() == []
    buffer.close()


def test_packed_save_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    name, random = tmp_path / 'save', np.random.default_rng(0)
    filled(tmp_path / 'table').save_data(str(name))
    data = name.read_bytes()
    buffer = StoreBuffer(4, path=str(tmp_path / 'other'))
    for i in range(2):
        buffer.push(episode(i))
    for _ in range(100):
        name.write_bytes(flipped(data, random))
        with pytest.raises((CorruptPayload, FormatMismatch)):
            buffer.load_data(str(name))
    assert [i for _, i, _ in numbers(buffer)] == [0, 1]
    damaged = bytearray(data)
    damaged[data.index(episode(7)[0]['obs'].numpy().tobytes())] ^= 1
    name.write_bytes(damaged)
    with pytest.raises(CorruptPayload, match=r'the element of row 7 in .*save.* is damaged'):
        buffer.load_data(str(name))
    name.write_bytes(data)
    buffer.load_data(str(name))
    assert [i for _, i, _ in numbers(buffer)] == [8, 9, 10, 11]
    buffer.close()


def test_packed_save_of_a_damaged_episode_is_refused(tmp_path: Path) -> None:
    buffer, name = filled(tmp_path / 'table'), tmp_path / 'save'
    buffer.save_data(str(name))
    before = name.read_bytes()
    slot = buffer.table.index.find(np.array([6]))[0][0]
    place = int(buffer.table.columns.read(packet_file.PLACE, np.array([slot]))[0])
    np.memmap(tmp_path / 'table' / 'packed', np.uint8)[place + 100] ^= 1
    with pytest.raises(CorruptPayload, match=r'the element of row 6 in .*table.* is damaged'):
        buffer.save_data(str(name))
    assert name.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    buffer.delete('6')
    buffer.save_data(str(name))
    assert [i for _, i, _ in loaded(name)] == [4, 5, 7, 8, 9, 10, 11]
    assert number(buffer[0].data) == 4
    buffer.close()
