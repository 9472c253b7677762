"""Elements with leaves of varying length travel from collectors to the learner's replay."""

import numpy as np
import pytest
import torch

pytest.importorskip('ding')

from ding.data.buffer import DequeBuffer  # noqa: E402
from learners import HEADER, Learner, step  # noqa: E402

from ding_store.buffer import StoreBuffer  # noqa: E402
from ding_store.errors import ConfigError, CorruptPayload, SchemaMismatch  # noqa: E402
from ding_store.middleware.chunks import ChunkDecoder, ChunkWriter  # noqa: E402
from ding_store.run.recording import STREAM, check_names_ragged  # noqa: E402
from ding_store.storage import open_store  # noqa: E402

UNITS = [3, 0, 5, 1, 2, 0, 0]


@pytest.fixture
def store():
    with open_store('memory://', run='r') as store:
        yield store


def with_units(number, length):
    units = torch.arange(4.0 * length).reshape(length, 4) + number
    return step(number, units=units, frame=torch.full((40, 40), (number % 5) / 255))


def writer_of(store, ragged=('units',)):
    writer = ChunkWriter(store, STREAM)
    writer.ragged = ragged
    return writer


ELEMENTS = [with_units(number, length) for number, length in enumerate(UNITS)]


@pytest.mark.parametrize('make', [lambda: StoreBuffer(100, ragged=('units',)), lambda: DequeBuffer(100)])
def test_ragged_leaves_arrive_as_they_were_sent(store, make):
    writer, buffer_ = writer_of(store), make()
    learner = Learner(store.another(), buffer_)
    writer.write(ELEMENTS[:5], HEADER)
    writer.write(ELEMENTS[5:], HEADER)  # all of them empty
    assert learner.take() == 2
    found = [item.data for item in (buffer_ if isinstance(buffer_, StoreBuffer) else buffer_.storage)]
    assert len(found) == len(ELEMENTS)
    for one, other in zip(found, ELEMENTS):
        assert sorted(one.keys()) == sorted(other.keys())
        for name, leaf in other.items():
            assert one[name].dtype == leaf.dtype
            assert torch.equal(torch.as_tensor(one[name]), leaf), name


def test_ragged_leaf_may_be_missing_in_some_elements(store):
    writer, buffer_ = writer_of(store), StoreBuffer(100, ragged=('units',))
    learner = Learner(store.another(), buffer_)
    elements = [{'x': np.zeros(1, np.float32), 'units': None if i % 2 else np.ones((i, 2), np.int64)} for i in range(6)]
    writer.write(elements[:1], HEADER)
    writer.write(elements[1:], HEADER)
    assert learner.take() == 2
    found = [item.data['units'] for item in buffer_]
    assert [None if each is None else each.shape for each in found] == [(0, 2), None, (2, 2), None, (4, 2), None]


def test_leaf_that_varies_without_the_option_is_refused_by_name(store):
    with pytest.raises(SchemaMismatch, match="'units'.*set policy.other.replay_buffer.ragged=.'units'."):
        writer_of(store, ragged=()).write(ELEMENTS, HEADER)
    writer_of(store, ragged=()).write(ELEMENTS[:1], HEADER)
    with pytest.raises(SchemaMismatch, match='earlier writers.*set policy.other.replay_buffer.ragged'):
        writer_of(store, ragged=()).write(ELEMENTS[1:2], HEADER)
    with pytest.raises(SchemaMismatch, match='earlier writers.*name another run with --run NAME'):
        writer_of(store).write(ELEMENTS[1:2], HEADER)


@pytest.mark.parametrize('ragged', ['all', ('units', 'units_of_demonstrations', 'env_data_id')])
def test_ragged_leaves_of_a_second_collector_keep_their_env_ids(store, ragged):
    """The writer adds an offset to the ids of its environments, and the reader of a continued run another one."""
    writer, buffer_ = writer_of(store, ragged), StoreBuffer(100, ragged='all')
    learner = Learner(store.another(), buffer_)
    writer.write(ELEMENTS, HEADER, fixups={'env_data_id': 1 << 32})
    assert learner.take() == 1
    assert [int(item.data['env_data_id']) for item in buffer_] == [1 << 32] * len(ELEMENTS)


def test_ragged_leaf_without_items_per_unit_arrives(store):
    elements = [{'x': np.zeros(1, np.float32), 'units': np.zeros((i, 0), np.float32)} for i in range(3)]
    writer, buffer_ = writer_of(store), StoreBuffer(100, ragged=('units',))
    learner = Learner(store.another(), buffer_)
    writer.write(elements, HEADER)
    assert learner.take() == 1
    assert [item.data['units'].shape for item in buffer_] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize(
    ('name', 'change', 'reason'),
    [
        ('units', lambda lengths: lengths + 1, 'its lengths have'),
        ('units', lambda lengths: lengths - lengths.max() + np.arange(len(lengths))[::-1], 'its lengths have'),
        ('units', lambda lengths: np.array([1 << 62] * 4 + [11] + [0] * (len(lengths) - 5)), 'its lengths have'),
        ('~items/units', lambda items: items.astype(np.float64), 'expected float32'),
        ('~items/units', lambda items: items[:, :2], 'expected float32'),
        ('~items/others', lambda items: np.zeros(3), 'is no column'),
    ],
)
def test_chunk_with_damaged_items_is_no_chunk(store, name, change, reason):
    writer_of(store).write(ELEMENTS, HEADER)
    (entry,) = store.read(STREAM)
    store.append(STREAM, entry.header, {**entry.arrays, name: change(entry.arrays.get(name))})
    (damaged,) = store.read(STREAM, after=entry.id)
    with pytest.raises(CorruptPayload, match=reason):
        ChunkDecoder().check(damaged)


def test_run_with_all_leaves_ragged_is_not_recorded():
    check_names_ragged([StoreBuffer(10), StoreBuffer(10, ragged=('units',))])
    with pytest.raises(ConfigError, match="replay_buffer.ragged \\('all'\\) cannot be recorded"):
        check_names_ragged([StoreBuffer(10), StoreBuffer(10, ragged='all')])
