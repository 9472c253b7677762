"""Frames that are exactly k/255 travel as the bytes k, and arrive bit by bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip('ding')

from ding.data.buffer import DequeBuffer  # noqa: E402
from learners import HEADER, Exchanger, Learner, step  # noqa: E402

from ding_store.buffer import Prioritized, StoreBuffer  # noqa: E402
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.errors import CorruptPayload  # noqa: E402
from ding_store.middleware.chunks import ChunkDecoder, ChunkWriter  # noqa: E402
from ding_store.run.recording import STREAM  # noqa: E402
from ding_store.storage import open_store  # noqa: E402
from ding_store.storage.testing import eventually  # noqa: E402

SHAPE = (4, 40, 40)
EPISODES = {'kind': 'episodes', 'lengths': [2]}


@pytest.fixture
def store():
    with open_store('memory://', run='r') as store:
        yield store


def frame(number, exact=True):
    levels = torch.from_numpy(np.random.RandomState(number).randint(0, 256, SHAPE).astype(np.float32))
    values = levels / 255
    if not exact:
        values[-1, -1, -1] = 2.0
    return values


def frames(*numbers, exact=True):
    return [step(number, obs=frame(number, exact), next_obs=torch.ones(4)) for number in numbers]


def bits(values):
    return np.asarray(values).view(np.uint32)


def assert_are(buffer_, expected):
    """``expected``: (number, exact) of each row."""
    items = list(buffer_) if isinstance(buffer_, StoreBuffer) else list(buffer_.storage)
    assert [int(item.data.time) for item in items] == [number for number, _ in expected]
    for item, (number, exact) in zip(items, expected):
        assert item.data.obs.dtype == torch.float32
        assert np.array_equal(bits(item.data.obs), bits(frame(number, exact)))


@pytest.mark.parametrize('direct', [True, False])
@pytest.mark.parametrize('made', [StoreBuffer, DequeBuffer])
def test_narrow_chunks_take_a_quarter_of_the_bytes(store, made, direct):
    buffer_ = made(20)
    writer, learner = ChunkWriter(store, STREAM), Learner(store, buffer_, direct and made is StoreBuffer)
    for numbers in ((0, 1, 2), (3,)):
        writer.write(frames(*numbers), HEADER, {'env_data_id': 7})
    entries = store.read(STREAM)
    assert [entry.arrays['obs'].dtype for entry in entries] == [np.uint8] * 2
    assert [entry.header['narrowed'] for entry in entries] == [['obs']] * 2
    assert entries[0].arrays['time'].dtype == np.int64
    assert learner.take() == 2
    assert_are(buffer_, [(number, True) for number in range(4)])
    if made is StoreBuffer:
        assert buffer_.table.columns.narrow == {'obs'}
        assert buffer_.check() == []


@pytest.mark.parametrize('direct', [True, False])
def test_narrow_chunks_end_at_the_first_other_value(store, direct):
    buffer_ = StoreBuffer(20)
    writer, learner = ChunkWriter(store, STREAM), Learner(store, buffer_, direct)
    writer.write(frames(0, 1), HEADER)
    writer.write(frames(2) + frames(3, exact=False), HEADER)
    # Not even where its writer agrees on a schema once more.
    (last,) = frames(4)
    last.next_obs = None
    writer.write([last], HEADER)
    dtypes = [entry.arrays['obs'].dtype for entry in store.read(STREAM)]
    assert dtypes == [np.uint8, np.float32, np.float32]
    assert learner.take() == 3
    assert_are(buffer_, [(0, True), (1, True), (2, True), (3, False), (4, True)])
    assert buffer_.table.columns.narrow == set()


@pytest.mark.parametrize('is_first', [True, False])
def test_narrow_chunks_end_at_another_value_and_schema(store, is_first, caplog):
    """It counts, and is said, and no schema after that changes it."""
    writer = ChunkWriter(store, STREAM)
    writer.write(frames(0, 1), HEADER)
    chunk = frames(2, exact=not is_first) + frames(3, exact=is_first)
    chunk[0].next_obs = None
    with caplog.at_level('INFO'):
        writer.write(chunk, HEADER)
    assert caplog.text.count('travels as float32 from now on') == 1
    last = frames(4, 5)
    last[0].done = None
    writer.write(last, HEADER)
    assert [entry.header.get('narrowed', []) for entry in store.read(STREAM)] == [['obs'], [], []]


@pytest.mark.parametrize('direct', [True, False])
def test_narrow_chunks_mix_with_wide_ones_of_another_writer(store, direct):
    """A table that is kept wide since takes what still comes narrow."""
    buffer_ = StoreBuffer(20)
    narrow, other = ChunkWriter(store, STREAM), ChunkWriter(store.another(), STREAM)
    learner = Learner(store, buffer_, direct)
    narrow.write(frames(0), HEADER)
    other.write(frames(1, exact=False), HEADER)
    narrow.write(frames(2, 3), HEADER)
    assert [len(entry.header.get('narrowed', [])) for entry in store.read(STREAM)] == [1, 0, 1]
    learner.take()
    assert_are(buffer_, [(0, True), (1, False), (2, True), (3, True)])
    assert buffer_.check() == []


@pytest.mark.parametrize('direct', [True, False])
def test_narrow_sequences_with_missing_frames_arrive(store, direct):
    buffer_ = StoreBuffer(20)
    writer, learner = ChunkWriter(store, STREAM), Learner(store, buffer_, direct)
    plain = [{'seq': [{'obs': frame(3 * i + t)} for t in range(3)], 'maybe': None} for i in range(2)]
    filled = [{**element, 'maybe': frame(9) if i else None} for i, element in enumerate(plain)]
    writer.write(plain, HEADER)
    writer.write(filled, HEADER)
    writer.write(plain, HEADER)
    narrowed = [set(entry.header['narrowed']) for entry in store.read(STREAM)]
    assert [len(names) for names in narrowed] == [1, 2, 2]
    assert learner.take() == 3
    for item, element in zip(buffer_, plain + filled + plain):
        for t in range(3):
            assert np.array_equal(bits(item.data['seq'][t]['obs']), bits(element['seq'][t]['obs']))
        assert (item.data['maybe'] is None) == (element['maybe'] is None)
        assert element['maybe'] is None or np.array_equal(bits(item.data['maybe']), bits(element['maybe']))


@pytest.mark.parametrize('direct', [True, False])
def test_narrow_episodes_arrive_bit_by_bit(store, direct):
    buffer_ = StoreBuffer(20)
    learner = Learner(store, buffer_, direct)
    ChunkWriter(store, STREAM).write(frames(*range(5)), {**HEADER, 'kind': 'episodes', 'lengths': [2, 3]})
    learner.take()
    episodes = [[int(each.time) for each in item.data] for item in buffer_]
    assert episodes == [[0, 1], [2, 3, 4]]
    for item in buffer_:
        for each in item.data:
            assert np.array_equal(bits(each.obs), bits(frame(int(each.time))))


@pytest.mark.parametrize('direct', [True, False])
@pytest.mark.parametrize('shape', [(), (1,)])
def test_narrow_priorities_are_numbers(store, shape, direct):
    """Our writers leave small leaves alone, but an entry says which are narrow, and any of float32 may be."""
    buffer_ = StoreBuffer(20, sampler=Prioritized(alpha=1.0))
    levels = [51, 255]
    ChunkWriter(store, STREAM).write([step(i, priority=torch.full(shape, i / 255)) for i in levels], HEADER)
    (entry,) = store.read(STREAM)
    priorities = np.array(levels, np.uint8).reshape(entry.arrays['priority'].shape)
    store.append(STREAM, {**entry.header, 'narrowed': ['priority']}, {**entry.arrays, 'priority': priorities})
    Learner(store, buffer_, direct).take()
    assert buffer_.sampler.priorities.of(np.arange(4)).tolist() == pytest.approx([0.2, 1.0, 0.2, 1.0])


def test_narrow_frames_of_elements_have_their_own_memory(store):
    """What elements are made of outlives the entry, and may be written to."""
    ChunkWriter(store, STREAM).write(frames(0, 1), HEADER)
    (entry,) = store.read(STREAM)
    decoder = ChunkDecoder()
    decoder.check(entry)
    for element in decoder.elements(entry):
        element.obs.fill_(3.0)
    assert np.array_equal(entry.arrays['obs'][0], (frame(0) * 255).round().numpy().astype(np.uint8))


@pytest.mark.parametrize(
    'names', ['obs', ['obs', 3], ['time'], ['obs', 'there is no such'], ['done', 'obs'], None, {'obs': 1}, [['obs']]]
)
def test_narrow_chunk_with_wrong_names_is_refused(store, names):
    ChunkWriter(store, STREAM).write(frames(0), HEADER)
    (entry,) = store.read(STREAM)
    store.append(STREAM, {**entry.header, 'narrowed': names}, entry.arrays)
    store.append(STREAM, {**entry.header, 'narrowed': []}, entry.arrays)
    floats = {**entry.arrays, 'obs': entry.arrays['obs'].astype(np.float32)}
    store.append(STREAM, entry.header, floats)
    for hostile in store.read(STREAM)[1:]:
        with pytest.raises(CorruptPayload, match='it is not a chunk'):
            ChunkDecoder().check(hostile)


@pytest.mark.parametrize(('direct', 'kind', 'counts'), [(True, {}, 1), (False, {}, 4), (True, EPISODES, 4)])
def test_read_ahead_counts_narrow_chunks_as_the_learner_keeps(store, direct, kind, counts):
    """Of elements a learner would hold four times of what it may."""
    made = Learner(store.another(), StoreBuffer(20), direct)
    config = StoreConfig(max_pending_bytes=10_000_000)
    learner = Exchanger(SimpleNamespace(store=store, config=config, replay_path=None, checkpoints=None), made)
    learner.begin()
    ChunkWriter(store.another(), STREAM).write(frames(0, 1), {**HEADER, **kind})
    eventually(lambda: len(learner.read_ahead) == 1, 'it is read')
    assert 0 <= learner.read_ahead.num_bytes - counts * 2 * int(np.prod(SHAPE)) < 500
    learner.read_ahead.wake()
