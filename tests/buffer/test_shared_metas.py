"""Columns with one meta for all rows: what a chunk of experience knows about the policy that collected it."""

import numpy as np
import pytest
import torch

from ding_store.buffer import StoreBuffer, Uniform, limited
from ding_store.buffer.table.rows import RowListener
from ding_store.errors import NotEnoughData


def push(buffer_, version, num_rows=4):
    return buffer_.extend({'x': np.full((num_rows, 2), float(version))}, meta={'policy_version': version})


def metas_of(buffer_):
    """By row, with what is in the row: both must belong together."""
    found = {}
    for item in buffer_:
        assert float(item.data['x'][0]) == item.meta.get('policy_version', -1)
        found[int(item.index)] = dict(item.meta)
    return found


@pytest.mark.parametrize('where', ['memory', 'path'])
def test_each_row_has_the_meta_of_its_chunk(where, tmp_path):
    path = str(tmp_path / 'replay') if where == 'path' else None
    buffer_ = StoreBuffer(10, path=path)
    for version in range(1, 8):  # around the ring, so that slots are not in one piece
        rows = push(buffer_, version, 3)
        assert {row: meta for row, meta in metas_of(buffer_).items() if row in rows} == {
            row: {'policy_version': version} for row in rows.tolist()
        }
        buffer_.delete([str(rows[1])])
    push(buffer_, 9, 25)  # more than fit
    assert set(map(str, metas_of(buffer_).values())) == {"{'policy_version': 9}"}
    buffer_.extend({'x': np.full((2, 2), -1.0)})  # a chunk that knows nothing
    assert list(metas_of(buffer_).values())[-2:] == [{}, {}]
    expected = metas_of(buffer_)
    assert [item.meta for item in buffer_.sample(10)] != []
    buffer_.close()
    if path is not None:
        again = StoreBuffer(10, path=path)
        assert metas_of(again) == expected
        assert again.check() == []
        again.close()


def test_shared_meta_written_to_changes_one_row_only():
    buffer_ = StoreBuffer(10)
    rows = push(buffer_, 1)
    buffer_.get_by_index(str(rows[0])).meta['mark'] = 1
    assert [item.meta for item in buffer_][0] == {'policy_version': 1, 'mark': 1}
    assert [item.meta for item in buffer_][1] == {'policy_version': 1}


def test_shared_meta_is_visible_to_groups_and_middleware():
    buffer_ = StoreBuffer(20)
    push(buffer_, 1)
    assert len(buffer_.sample(1, groupby='policy_version')[0]) == 4
    push(buffer_, 2)
    assert sorted(group[0].meta['policy_version'] for group in buffer_.sample(2, groupby='policy_version')) == [1, 2]
    seen = []
    buffer_.use(lambda action, chain, *args, **kwargs: seen.append(kwargs.get('meta')) or chain(*args, **kwargs))
    push(buffer_, 3, 2)
    assert seen[:2] == [{'policy_version': 3}] * 2
    assert metas_of(buffer_)[9] == {'policy_version': 3}


def test_rows_of_old_policies_are_removed():
    buffer_ = StoreBuffer(100, sampler=limited(Uniform(seed=0), max_age=2))
    for version in range(1, 7):
        push(buffer_, version)
        batch = buffer_.sample_batch(4)
        assert (batch.data.x.numpy() >= version - 2).all()
    assert len(buffer_) == 12
    with pytest.raises(NotEnoughData):
        buffer_.sample_batch(13)


@pytest.mark.parametrize('how', ['push', 'push of tensors', 'extend'])
def test_row_without_a_meta_never_gets_the_previous_one(how):
    """Not even for the moment between its publication and the end of the call."""
    buffer_, seen = StoreBuffer(4), []

    def element(value):
        return {'r': torch.full((4,), value) if how == 'push of tensors' else value}

    for i in range(4):
        buffer_.push(element(float(i)), {'v': i})
    index, metas = buffer_.table.index, buffer_._elements.metas

    class Reader(RowListener):
        def published(self, slots):
            seen.extend(dict(metas.get(slot, index.row_of_slot[slot])) for slot in slots.tolist())

    reader = Reader()
    index.listen(reader)
    for _ in range(2):
        if how == 'extend':
            buffer_.extend({'r': np.array([100.0])}, schema=buffer_.schema)
        else:
            buffer_.push(element(100.0))
    assert seen == [{}, {}]
