"""Table: rows, slots, eviction, the schema, and a full disk."""

from pathlib import Path
from typing import Callable, Dict

import numpy as np
import pytest
from crashes import Child

from ding_store.buffer.table import column_memory
from ding_store.buffer.table.table import Table
from ding_store.errors import ConfigError, NotEnoughSpace, RowGone, SchemaMismatch, TableLocked

SPECS = {'number': (np.dtype(np.int64), ()), 'vector': (np.dtype(np.float32), (3,))}


def rows_of(first: int, count: int) -> Dict[str, np.ndarray]:
    numbers = np.arange(first, first + count, dtype=np.int64)
    return {'number': numbers, 'vector': np.repeat(numbers[:, None], 3, axis=1).astype(np.float32)}


def contents(table: Table) -> list:
    return table.gather(table.rows_by_age())['number'].tolist()


def test_gather_returns_rows_in_the_given_order() -> None:
    table = Table(SPECS, 10)
    assert table.extend(rows_of(0, 4)).tolist() == [0, 1, 2, 3]
    gathered = table.gather(np.array([3, 0, 3]))
    assert gathered['number'].tolist() == [3, 0, 3]
    assert gathered['vector'].tolist() == [[3.0] * 3, [0.0] * 3, [3.0] * 3]


def test_gather_writes_into_given_arrays() -> None:
    table = Table(SPECS, 10)
    table.extend(rows_of(0, 4))
    out = {name: np.empty((2, *shape), dtype) for name, (dtype, shape) in SPECS.items()}
    table.gather(np.array([1, 2]), out)
    assert out['number'].tolist() == [1, 2]


def test_full_table_drops_the_oldest_and_numbers_grow() -> None:
    table = Table(SPECS, 5)
    for first in range(0, 12, 3):
        table.extend(rows_of(first, 3))
    assert len(table) == 5
    assert table.rows_by_age().tolist() == [7, 8, 9, 10, 11] == contents(table)


def test_more_rows_than_fit_keep_the_last() -> None:
    table = Table(SPECS, 3)
    table.extend(rows_of(0, 2))
    assert table.extend(rows_of(2, 8)).tolist() == list(range(2, 10))
    assert table.rows_by_age().tolist() == [7, 8, 9] == contents(table)
    assert table.next_row == 10


def test_eviction_after_deletes_is_by_age() -> None:
    table = Table(SPECS, 5)
    table.extend(rows_of(0, 5))
    table.delete(np.array([1, 3]))
    table.extend(rows_of(5, 2))  # They take the free slots: nobody leaves.
    assert contents(table) == [0, 2, 4, 5, 6]
    table.extend(rows_of(7, 2))
    assert contents(table) == [4, 5, 6, 7, 8]


def test_deleted_row_numbers_are_not_used_again() -> None:
    table = Table(SPECS, 5)
    table.extend(rows_of(0, 5))
    table.delete(np.array([4, 4, 2, 77]))
    assert len(table) == 3
    with pytest.raises(RowGone, match='row 2 '):
        table.gather(np.array([0, 2]))
    assert table.extend(rows_of(5, 1)).tolist() == [5]
    assert table.contains(np.array([0, 2, 4, 5, 6, -1])).tolist() == [True, False, False, True, False, False]


@pytest.mark.parametrize('row', [-1, 5, 1 << 60])
def test_rows_that_never_existed_are_not_found(row: int) -> None:
    table = Table(SPECS, 5)
    table.extend(rows_of(0, 5))
    with pytest.raises(RowGone):
        table.gather(np.array([row]))


def test_update_overwrites_live_rows_only() -> None:
    table = Table(SPECS, 5)
    table.extend(rows_of(0, 5))
    table.delete(np.array([1]))
    assert table.update(np.array([1, 2]), {'number': np.array([100, 200])}).tolist() == [False, True]
    assert contents(table) == [0, 200, 3, 4]


def test_clear_does_not_reset_row_numbers() -> None:
    table = Table(SPECS, 5)
    table.extend(rows_of(0, 7))
    table.clear()
    assert len(table) == 0
    assert table.extend(rows_of(7, 1)).tolist() == [7]
    assert contents(table) == [7]


def test_new_column_has_its_fill_in_older_rows() -> None:
    table = Table(SPECS, 5)
    table.extend(rows_of(0, 2))
    table.shape.add_columns({'present': (np.dtype(bool), ()), 'extra': (np.dtype(np.int8), (2,))}, {'present': True})
    table.extend({**rows_of(2, 1), 'present': np.array([False]), 'extra': np.array([[7, 8]], np.int8)})
    gathered = table.gather(np.array([0, 1, 2]))
    assert gathered['present'].tolist() == [True, True, False]
    assert gathered['extra'].tolist() == [[0, 0], [0, 0], [7, 8]]
    with pytest.raises(ConfigError, match='present'):
        table.shape.add_columns({'present': (np.dtype(bool), ())})


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'number': np.zeros(2, np.int32)}, 'number: expected int64'),
        ({'vector': np.zeros((2, 4), np.float32)}, r'vector: expected float32 of shape \(2, \*\(3,\)\)'),
        ({'vector': np.zeros((1, 3), np.float32)}, 'vector'),
        ({'other': np.zeros(2)}, r"unknown \['other'\]"),
    ],
)
def test_extend_with_unfit_columns_changes_nothing(change: Dict[str, np.ndarray], message: str) -> None:
    table = Table(SPECS, 2)
    table.extend(rows_of(0, 2))
    with pytest.raises(SchemaMismatch, match=message):
        table.extend({**rows_of(2, 2), **change})
    with pytest.raises(SchemaMismatch, match="missing .'vector'"):
        table.extend({'number': np.zeros(2, np.int64)})
    assert contents(table) == [0, 1]
    assert table.next_row == 2


def test_mismatch_found_during_a_write_undoes_the_eviction() -> None:
    table = Table(SPECS, 4)
    table.extend(rows_of(0, 6))
    table.delete(np.array([3]))
    with pytest.raises(SchemaMismatch), table.writing(3):
        raise SchemaMismatch('found late')
    assert contents(table) == [2, 4, 5]
    table.extend(rows_of(6, 2))
    assert contents(table) == [4, 5, 6, 7]


@pytest.mark.parametrize('capacity', [0, -1, 1.5, True, '3'])
def test_table_capacity_below_1_is_refused(capacity: object) -> None:
    with pytest.raises(ConfigError, match='capacity'):
        Table(SPECS, capacity)  # type: ignore[arg-type]


def test_columns_of_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match='fixed size'):
        Table({'x': (np.dtype(object), ())}, 3)


def test_columns_of_zero_bytes_are_kept() -> None:
    table = Table({'empty': (np.dtype(np.float32), (0, 4))}, 3)
    table.extend({'empty': np.zeros((5, 0, 4), np.float32)})
    assert table.gather(np.array([4]))['empty'].shape == (1, 0, 4)


def test_table_needs_few_bytes_per_row_beyond_the_payload() -> None:
    capacity = 100_000
    index = Table(SPECS, capacity).index
    held = sum(value.nbytes for value in vars(index).values() if isinstance(value, np.ndarray))
    assert held <= 64 * capacity


def test_table_with_a_path_has_its_columns_in_files(tmp_path: Path) -> None:
    path = tmp_path / 'table'
    table = Table(SPECS, 1000, str(path))
    table.extend(rows_of(0, 10))
    assert np.fromfile(path / '000.column', np.int64)[:10].tolist() == list(range(10))
    with pytest.raises(TableLocked, match='open already'):
        Table(SPECS, 1000, str(path))
    table.shape.replace_columns({'other': (np.dtype(np.int8), ())})
    assert len(list(path.glob('*.column'))) == 1
    table.close()


def test_table_uses_private_files_if_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_memory.free_space, 'available_memory', lambda: 1000)
    monkeypatch.setattr(column_memory.free_space, 'roomiest_directory', lambda: str(tmp_path))
    table = Table(SPECS, 1000)
    table.extend(rows_of(0, 1500))
    assert contents(table) == list(range(500, 1500))
    assert list(tmp_path.iterdir()) == []  # Unlinked: gone with the process, however it ends.
    table.close()


def fill(table: Table, block: Dict[str, np.ndarray]) -> None:
    for _ in range(5):
        table.extend(block)


def test_push_on_a_full_disk_is_refused_and_changes_nothing(small_disk: Path) -> None:
    table = Table({'block': (np.dtype(np.uint8), (1 << 16,))}, 1000, str(small_disk / 'table'))
    block = {'block': np.full((10, 1 << 16), 7, np.uint8)}
    fill(table, block)
    with pytest.raises(NotEnoughSpace, match=r'no room for rows .* [KM]iB more are needed .* free') as raised:
        fill(table, block)
    assert raised.value.errno == 28
    held = len(table)
    assert 50 <= held <= 64
    assert (table.gather(table.rows_by_age())['block'] == 7).all()
    table.delete(table.rows_by_age()[:20])
    table.extend(block)  # Slots that were written before need no more space.
    assert len(table) == held - 10
    table.close()


def test_column_that_does_not_fit_is_not_added(small_disk: Path) -> None:
    table = Table({'block': (np.dtype(np.uint8), (1 << 16,))}, 1000, str(small_disk / 'table'))
    table.extend({'block': np.ones((50, 1 << 16), np.uint8)})
    with pytest.raises(NotEnoughSpace):
        table.shape.add_columns({'more': (np.dtype(np.uint8), (1 << 16,))})
    assert list(table.columns) == ['block']
    assert len(list((small_disk / 'table').glob('*.column'))) == 1
    table.close()


@pytest.mark.parametrize('change', ['add', 'widen'])
def test_table_reopened_on_a_full_disk_raises_no_sigbus(change: str, small_disk: Path) -> None:
    """Writing to a file whose space nobody reserved is a SIGBUS then."""
    path, block = str(small_disk / 'table'), (1 << 14,)
    table = Table({}, 200, path)
    table.shape.replace_columns({'block': (np.dtype(np.float32), block)}, narrow_columns=['block'])
    table.extend({'block': np.ones((100, *block), np.float32)})
    assert table.columns.narrow
    table.close()

    def work(tell: Callable[[], None]) -> None:
        table = Table({}, 200, path)
        changes = {
            'add': lambda: table.shape.add_columns({'more': (np.dtype(np.float32), block)}, {'more': 1.0}),
            'widen': lambda: table.extend({'block': np.full((1, *block), 0.3, np.float32)}),
        }
        with pytest.raises(NotEnoughSpace):
            changes[change]()
        assert list(table.columns) == ['block']
        assert table.check() == []
        table.close()

    assert Child(work).wait() == 0
    table = Table({}, 200, path)
    assert (table.gather(table.rows_by_age())['block'] == 1).all()
    table.close()
