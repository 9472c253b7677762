"""The stores of elements: what a read has copied keeps the schema of its copy, whatever store follows."""

from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch

from ding_store.buffer import StoreBuffer
from ding_store.buffer.table.columns import TableColumns
from ding_store.buffer.table.table import Table
from ding_store.errors import NotEnoughData, SchemaMismatch


def change_after_reads(change: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ``change`` once, as another thread would, between the copy of the next read and its decoding."""
    read, changes = Table.read, [change]

    def read_and_change(table: Table, *args: Any, **kwargs: Any) -> Any:
        found = read(table, *args, **kwargs)
        if changes:
            changes.pop()()
        return found

    monkeypatch.setattr(Table, 'read', read_and_change)


def steps(length: int) -> list:
    return [{'obs': torch.full((3,), float(i))} for i in range(length)]


def filled(make: Callable[[], Any]) -> StoreBuffer:
    buffer = StoreBuffer(8)
    for _ in range(8):
        buffer.push(make())
    return buffer


def transition() -> dict:
    return {'obs': torch.arange(3.0), 'done': torch.tensor(False)}


@pytest.mark.parametrize('other', [{'other': torch.zeros(2)}, {'obs': np.arange(3.0), 'done': np.array(0)}])
@pytest.mark.parametrize('is_sample', [True, False])
def test_batch_decodes_as_copied_when_others_replace_all(
    is_sample: bool, other: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = filled(transition)

    def replace() -> None:
        buffer.clear()
        buffer.push(other)

    change_after_reads(replace, monkeypatch)
    batch = buffer.sample_batch(4) if is_sample else buffer.gather_batch(np.arange(4))
    assert torch.equal(batch.data.obs, torch.arange(3.0).expand(4, 3))
    assert torch.equal(batch.elements()[0]['obs'], torch.arange(3.0))
    assert buffer.count() == 1


@pytest.mark.parametrize('name', ['sample_batch', 'sample_time_major', 'sample'])
def test_read_decodes_as_copied_when_lists_become_objects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = filled(lambda: steps(2))
    change_after_reads(lambda: buffer.push(steps(3)), monkeypatch)
    found = {'sample_batch': buffer.sample_batch, 'sample_time_major': buffer.sample_time_major}.get(name)
    if found is None:
        assert [len(item.data) for item in buffer.sample(4)] == [2] * 4
    else:
        assert found(4).rows.shape == (4,)
    assert buffer.schema is None
    with pytest.raises(SchemaMismatch):
        buffer.sample_batch(4)


def test_read_survives_a_leaf_that_becomes_known_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = torch.zeros(1 << 16)  # Too large to be copied with the index locked.
    buffer = filled(lambda: {'frame': frame, 'reward': None})
    sources, changes = TableColumns.sources, [lambda: buffer.push({'frame': frame, 'reward': torch.ones(1)})]

    def sources_then_change(columns: TableColumns) -> Any:
        found = sources.fget(columns)
        if changes:
            changes.pop()()
        return found

    monkeypatch.setattr(TableColumns, 'sources', property(sources_then_change))
    assert buffer.sample_batch(4).rows.shape == (4,)
    assert not changes
    assert buffer[-1].data['reward'].item() == 1


def test_table_has_no_columns_after_lists_became_objects() -> None:
    buffer = filled(lambda: steps(2))
    buffer.push(steps(3))
    assert len(buffer.table.columns) == 0
    assert [len(item.data) for item in buffer] == [2] * 7 + [3]
    assert buffer.check() == []


def test_load_that_fails_keeps_the_breaks_of_sequences(tmp_path: Path) -> None:
    saved, refused = StoreBuffer(8), StoreBuffer(8)
    for _ in range(4):
        saved.push(transition())
    refused.push(transition(), {'key': object()})
    saved.save_data(str(tmp_path / 'saved'))
    refused.save_data(str(tmp_path / 'refused'))
    buffer = StoreBuffer(8, path=str(tmp_path / 'table'))
    buffer.load_data(str(tmp_path / 'saved'))
    for _ in range(4):
        buffer.push(transition())
    with pytest.raises(SchemaMismatch):
        buffer.load_data(str(tmp_path / 'refused'))
    buffer.close()
    buffer = StoreBuffer(8, path=str(tmp_path / 'table'))
    assert buffer.count() == 8
    with pytest.raises(NotEnoughData):
        buffer.sample_sequences(1, 5, None, done=None)
    buffer.close()
