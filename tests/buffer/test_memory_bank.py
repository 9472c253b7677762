"""The memory bank, and its readers in other processes."""

import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np
import pytest
import torch
from crashes import Child, shared_words
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ding_store.buffer import MemoryBank, StoreBuffer, TableReader, table_reader
from ding_store.buffer.table.columns import TableColumns
from ding_store.errors import (
    ConfigError,
    CorruptPayload,
    NotEnoughSpace,
    RowGone,
    SchemaMismatch,
    StoreTimeout,
    TableLocked,
)

STEP, OPENED, STOP = range(3)


def element(i: int, length: int = 0) -> Dict[str, Any]:
    """An element of which every word says ``i``."""
    length = length or 1 + i * 37 % 400
    return {'key': torch.full((length, 4), i), 'value': np.full(3 * length, i, np.int32), 'number': i}


def number(found: Dict[str, Any]) -> int:
    i = int(found['number'])
    assert len(found['value']) == 3 * len(found['key'])
    assert (found['key'] == i).all()
    assert (found['value'] == i).all()
    return i


@pytest.fixture(params=['memory', 'path'])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return None if request.param == 'memory' else str(tmp_path / 'bank')


def test_bank_reads_elements_by_row_number(path: Any) -> None:
    bank = MemoryBank(10, path=path)
    assert [bank.append(element(i)) for i in range(12)] == list(range(12))
    assert (len(bank), list(bank)) == (10, list(range(2, 12)))
    assert number(bank[7]) == 7
    assert [number(each) for each in bank.gather([3, 11, 3])] == [3, 11, 3]
    assert bank.gather([]) == []
    batch = bank.gather_batch(np.array([4, 5]))
    assert batch.lengths['key'].tolist() == [149, 186]
    assert batch.data['key'].shape == (2, 186, 4)
    bank.update(7, element(70, 900))
    assert (number(bank[7]), len(bank[7]['key'])) == (70, 900)
    del bank[5]
    assert 5 not in bank
    assert 6 in bank
    assert bank.extend([element(12), element(13)]).tolist() == [12, 13]
    # A row number that was used never leads to another element.
    for gone in (0, 1, 5, 99, -1):
        with pytest.raises(RowGone):
            bank[gone]
        with pytest.raises(RowGone):
            bank.update(gone, element(3))
        with pytest.raises(RowGone):
            del bank[gone]
    assert bank.check() == []
    bank.clear()
    assert len(bank) == 0
    assert bank.append({'other': torch.zeros(3)}) == 14
    bank.close()


def test_max_bytes_lets_the_oldest_leave(path: Any) -> None:
    bank = MemoryBank(100, max_bytes=10_000, path=path)
    for i in range(30):
        bank.append({'x': np.full(1000 + i * 30, i, np.uint8)})
        assert bank.num_bytes <= 10_000 + 100 * len(bank)
        assert list(bank)[-1] == i
    assert list(bank) == list(range(25, 30))
    with pytest.raises(NotEnoughSpace, match=r'max_bytes allows 9\.766 KiB'):
        bank.append({'x': np.zeros(10_001, np.uint8)})
    with pytest.raises(SchemaMismatch):
        bank.append({'x': np.zeros(9_000, np.int64)[:100]})
    assert list(bank) == list(range(25, 30))
    bank.close()
    if path is not None:
        bank = MemoryBank(100, max_bytes=4000, path=path)
        assert list(bank) == [28, 29]
        assert bank[29]['x'].tolist() == [29] * 1870
        bank.close()


def test_bank_refuses_bad_arguments(tmp_path: Path) -> None:
    for arguments in ({'size': 0}, {'size': 3, 'max_bytes': 0}):
        with pytest.raises(ConfigError):
            MemoryBank(**arguments)
    with pytest.raises(ConfigError, match='holds no table'):
        MemoryBank.open(str(tmp_path / 'none'))
    with pytest.raises(ConfigError, match="must be 'r'"):
        MemoryBank.open(str(tmp_path / 'none'), mode='w')


class BankModel(RuleBasedStateMachine):
    """The model is a list of [row number, number, length], oldest first."""

    @initialize(size=st.integers(1, 6), max_items=st.one_of(st.none(), st.integers(40, 200)))
    def make(self, size: int, max_items: Any) -> None:
        self.size, self.max_items, self.next_row = size, max_items, 0
        self.bank = MemoryBank(size, None if max_items is None else 64 * max_items)
        self.model: List[List[int]] = []

    @rule(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4))
    def extend(self, lengths: List[int]) -> None:
        rows = list(range(self.next_row, self.next_row + len(lengths)))
        elements = [{'x': torch.full((length, 8), row)} for row, length in zip(rows, lengths)]
        if self.max_items is not None and sum(lengths) > self.max_items:
            return
        assert self.bank.extend(elements).tolist() == rows
        self.next_row += len(lengths)
        self.model = [*self.model, *([row, row, length] for row, length in zip(rows, lengths))][-self.size :]
        while self.max_items is not None and sum(item[2] for item in self.model) > self.max_items:
            self.model.pop(0)

    @rule(data=st.data(), length=st.integers(0, 20), value=st.integers(1000, 2000))
    def update(self, data: st.DataObject, length: int, value: int) -> None:
        row = data.draw(st.integers(0, self.next_row))
        found = [item for item in self.model if item[0] == row]
        changed = {'x': torch.full((length, 8), value)}
        if not found or not hasattr(self.bank.schema, 'ragged'):
            with pytest.raises(RowGone):
                self.bank.update(row, changed)
        else:
            self.bank.update(row, changed)
            found[0][1:] = [value, length]

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, self.next_row))
        if row in self.bank:
            del self.bank[row]
        self.model = [item for item in self.model if item[0] != row]

    @invariant()
    def same(self) -> None:
        if not hasattr(self, 'bank'):
            return
        rows = [item[0] for item in self.model]
        assert list(self.bank) == rows
        assert [each['x'].tolist() for each in self.bank.gather(rows)] == [
            [[value] * 8] * length for _, value, length in self.model
        ]
        assert self.bank.check() == []


TestBankModel = BankModel.TestCase
TestBankModel.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)


# Readers


def test_reader_sees_changes_of_the_owner(tmp_path: Path) -> None:
    path = str(tmp_path / 'bank')
    bank = MemoryBank(8, path=path)
    reader = MemoryBank.open(path)
    assert (len(reader), reader.schema, reader.gather([])) == (0, None, [])
    for i in range(11):
        bank.append(element(i))
    with pytest.raises(TableLocked):
        MemoryBank(8, path=path)
    assert list(reader) == list(range(3, 11))
    assert [number(each) for each in reader.gather([9, 3, 9])] == [9, 3, 9]
    assert number(reader[4]) == 4
    batch, of_owner = reader.gather_batch([5, 10]), bank.gather_batch([5, 10])
    assert torch.equal(batch.data['key'], of_owner.data['key'])
    assert batch.mask('key').tolist() == of_owner.mask('key').tolist()
    with pytest.raises(RowGone, match='row 2 is not in'):
        reader[2]
    bank.update(5, element(50, 5000))
    assert number(reader[5]) == 50
    # Rows are no longer in the slots of their numbers.
    del bank[6], bank[7]
    for i in range(11, 15):
        bank.append(element(i))
    assert [number(each) for each in reader.gather(list(bank))] == [number(each) for each in bank.gather(list(bank))]
    assert (6 in reader, 14 in reader) == (False, True)
    bank.buffer.resize(20)
    bank.append(element(15, 30_000))
    assert number(reader[15]) == 15
    bank.buffer.save_data(str(tmp_path / 'save'))
    bank.clear()
    assert list(reader) == []
    bank.append({'other': torch.arange(3)})
    assert reader[16]['other'].tolist() == [0, 1, 2]
    bank.buffer.load_data(str(tmp_path / 'save'))
    assert [number(each) for each in reader.gather(list(bank))] == [number(each) for each in bank.gather(list(bank))]
    bank.close()
    # Without an owner as well.
    with MemoryBank.open(path) as again:
        assert number(again[15]) == number(reader[15]) == 15


def test_reader_of_a_buffer_reads_fixed_columns(tmp_path: Path) -> None:
    buffer = StoreBuffer(9, path=str(tmp_path / 'a'))
    for i in range(20):
        buffer.push({'image': torch.full((3000,), i % 3 / 255), 'x': i, 'y': None if i < 15 else torch.ones(2)})
    reader = TableReader(buffer.table.table_dir.path)
    batch, same = reader.gather_batch([13, 19]), buffer.gather_batch(np.array([13, 19]))
    assert torch.equal(batch.data['image'], same.data['image'])
    assert [each['x'] for each in reader.gather([13, 19])] == [13, 19]
    assert (reader[13]['y'], reader[19]['y'].tolist()) == (None, [1, 1])
    buffer.close()
    frames = StoreBuffer(9, path=str(tmp_path / 'b'))
    frames.push({'obs': torch.rand(4, 40, 40)})
    with pytest.raises(ConfigError, match='shares frames'):
        TableReader(frames.table.table_dir.path)
    frames.close()
    episodes = StoreBuffer(9, path=str(tmp_path / 'c'))
    for length in (2, 3):
        episodes.push([{'x': torch.zeros(3)}] * length)
    with pytest.raises(ConfigError, match='holds packed elements'):
        TableReader(episodes.table.table_dir.path)
    episodes.close()


def test_damaged_element_is_named_by_row(tmp_path: Path) -> None:
    path = str(tmp_path / 'bank')
    bank = MemoryBank(8, path=path)
    for i in range(8):
        bank.append(element(i, 2000))
    packets = bank._elements.store._packets
    place = int(bank.buffer.table.columns.read('~place', np.array([5]))[0])
    bank.close()
    file = np.memmap(packets.path, np.uint8)
    file[place + 777] ^= 4
    bank, reader = MemoryBank(8, path=path), MemoryBank.open(path)
    for reading in (bank, reader):
        with pytest.raises(CorruptPayload, match='row 5 in .* is damaged'):
            reading[5]
        with pytest.raises(CorruptPayload, match='row 5 in'):
            reading.gather_batch([3, 5])
        assert [number(each) for each in reading.gather([3, 4, 6])] == [3, 4, 6]
    (finding,) = bank.check()
    assert finding.startswith('the element of row 5 in')
    # Lengths and places that are impossible.
    for name, row in (('key', 2), ('~place', 3), ('~bytes', 4)):
        bank.buffer.table.columns.current[name].stored[row] ^= np.int64(1 << 40)
        for reading in (bank, reader):
            with pytest.raises(CorruptPayload, match=f'row {row} in .* is damaged'):
                reading[row]
    assert [number(each) for each in bank.gather([0, 1, 6, 7])] == [0, 1, 6, 7]
    bank.close()


def overwrite(path: str, words: Any) -> Callable[[Callable[[], None]], None]:
    """Return the work of a process that appends, updates and deletes elements until it is stopped."""

    def work(tell: Callable[[], None]) -> None:
        bank = MemoryBank(12, path=path)
        tell()
        rng = np.random.default_rng(0)
        while not words[STOP]:
            row = bank.append(element(bank.buffer.table.next_row))
            words[STEP] = row
            changed = row - int(rng.integers(8))
            if changed in bank:
                bank.update(changed, element(row + 1_000_000))
            if row % 9 == 4:
                del bank[row]
            if row % 200 == 150:
                bank.buffer.resize(12 if len(bank) > 12 else 16)
        bank.close()

    return work


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Tuple[str, Any]]:
    path, words = str(tmp_path / 'bank'), shared_words()
    child = Child(overwrite(path, words))
    child.wait_until_told()
    child.wait_until_told()
    try:
        yield path, words
    finally:
        words[STOP] = 1
        child.wait_until_it_ends()
        assert child.wait() == 0


def test_reader_beside_a_writer_gets_whole_elements(writer: Tuple[str, Any]) -> None:
    path, words = writer
    reader, deadline = MemoryBank.open(path), time.monotonic() + 60
    num_read = num_gone = 0
    rng = np.random.default_rng(1)
    while num_read < 400 or words[STEP] < 500:
        assert time.monotonic() < deadline
        wanted = np.unique(words[STEP] - rng.integers(0, 8, 3))
        try:
            found = reader.gather(wanted) if num_read % 2 else reader.gather_batch(wanted).elements()
        except RowGone:
            num_gone += 1
            continue
        for row, each in zip(wanted.tolist(), found):
            i = number(each)
            assert i == row or i - 1_000_000 >= row
        num_read += 1
    assert num_gone


def test_reader_of_a_half_updated_element_waits_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner is killed when some columns of an element are those of its update, and others are not yet."""
    path = str(tmp_path / 'bank')
    with closing(MemoryBank(8, path=path)) as bank:
        for i in range(4):
            bank.append(element(i))
    overwrite = TableColumns.overwrite

    def killed_half_way(self: TableColumns, slots: Any, columns: Any) -> None:
        overwrite(self, slots, dict(list(columns.items())[: len(columns) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)

    def work(tell: Callable[[], None]) -> None:
        bank = MemoryBank(8, path=path)
        TableColumns.overwrite = killed_half_way  # type: ignore[method-assign]
        bank.update(2, element(1_000_002))

    assert Child(work).wait() == -signal.SIGKILL
    reader = MemoryBank.open(path)
    monkeypatch.setattr(table_reader, 'PATIENCE_S', 0.05)
    for read in (reader.gather, reader.gather_batch):
        with pytest.raises(StoreTimeout, match=r'an update was interrupted. Open the table in its owner, which'):
            read([2])
        # Nothing says which rows the update changes.
        with pytest.raises(StoreTimeout, match=r'within 0.05 s'):
            read([1])
    with closing(MemoryBank(8, path=path)) as bank:
        assert bank.check() == []
        assert [number(each) for each in reader.gather([0, 1, 2, 3])] == [0, 1, 1_000_002, 3]


def test_threads_share_a_bank() -> None:
    bank, errors = MemoryBank(16), []
    for i in range(16):
        bank.append(element(i))

    def read() -> None:
        try:
            for _ in range(100):
                rows = bank.rows()[-4:]
                assert [number(each) for each in bank.gather(rows)] == rows.tolist()
        except BaseException as e:  # noqa: BLE001  raised again below
            errors.append(e)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(16, 200):
        bank.append(element(i))
    for thread in threads:
        thread.join(60)
    assert [e for e in errors if not isinstance(e, RowGone)] == []
