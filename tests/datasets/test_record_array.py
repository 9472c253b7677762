"""Arrays of records: what is written is read back, whole or not at all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ding_store.datasets import RecordArray
from ding_store.errors import CorruptPayload, RowGone, SchemaMismatch


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=30))
def test_byte_strings_are_read_back(tmp_path_factory, records):
    path = tmp_path_factory.mktemp('records') / 'names'
    assert RecordArray.write(path, iter(records)) == len(records)
    with RecordArray(path) as array:
        array.verify()
        assert list(array) == records
        assert array.take(range(len(records))) == records
        with pytest.raises(RowGone):
            array[len(records)]


def test_arrays_of_several_lengths_are_views_of_the_file(tmp_path):
    records = [np.arange(2 * n, dtype=np.float32).reshape(n, 2) for n in (3, 0, 5)]
    RecordArray.write(tmp_path / 'a', records)
    array = RecordArray(tmp_path / 'a')
    for index, record in enumerate(records):
        assert np.array_equal(array[index], record)
    assert np.array_equal(array[-1], records[-1])
    assert not array[0].flags.writeable
    assert not array[0].flags.owndata
    assert [len(each) for each in array.take([2, 0])] == [5, 3]


def test_records_of_an_epoch_come_once(tmp_path):
    RecordArray.write(tmp_path / 'a', (b'%d' % i for i in range(1000)))
    array = RecordArray(tmp_path / 'a')
    seen = [each for batch in array.epochs(7, seed=1, rank=1, world_size=2, num_epochs=1) for each in batch]
    seen += [each for batch in array.epochs(7, seed=1, rank=0, world_size=2, num_epochs=1) for each in batch]
    assert sorted(seen, key=int) == [b'%d' % i for i in range(1000)]


def test_records_of_two_kinds_are_refused_and_leave_nothing(tmp_path):
    with pytest.raises(SchemaMismatch, match='record 1 is a ndarray'):
        RecordArray.write(tmp_path / 'a', [b'x', np.zeros(3)])
    with pytest.raises(SchemaMismatch, match='byte strings or arrays, not str'):
        RecordArray.write(tmp_path / 'a', ['x'])
    assert list(tmp_path.iterdir()) == []


def test_damaged_records_are_found(tmp_path):
    path = tmp_path / 'a'
    RecordArray.write(path, [b'one', b'two'])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptPayload, match='cut short'):
        RecordArray(path)
    path.write_bytes(whole.replace(b'num_records', b'Num_records'))
    with pytest.raises(CorruptPayload, match='description'):
        RecordArray(path)
    path.write_bytes(whole.replace(b'two', b'tWo'))
    with pytest.raises(CorruptPayload, match='its records'):
        RecordArray(path).verify()
