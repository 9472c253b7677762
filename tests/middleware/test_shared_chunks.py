"""Frames that recur in a chunk travel once, and arrive bit by bit."""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip('ding')

from ding.data.buffer import DequeBuffer  # noqa: E402
from learners import HEADER, Learner, step  # noqa: E402

from ding_store.buffer import Prioritized, StoreBuffer  # noqa: E402
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.environment import ENV_NO_NUMBA  # noqa: E402
from ding_store.errors import CorruptPayload, SchemaMismatch  # noqa: E402
from ding_store.middleware.chunks import ChunkDecoder, ChunkWriter, narrowed_in, num_bytes  # noqa: E402
from ding_store.middleware.collector_exchanger import CollectorExchanger  # noqa: E402
from ding_store.run.recording import STREAM  # noqa: E402
from ding_store.storage import open_store  # noqa: E402
from ding_store.storage.encoding.framing import encode  # noqa: E402
from ding_store.storage.testing import eventually  # noqa: E402

RUNS = (f'shared{number}' for number in itertools.count())
SIZE = 40
RNG = np.random.default_rng(0)
LEVELS = torch.from_numpy(RNG.integers(0, 256, (400, SIZE, SIZE)).astype(np.float32)) / 255
VECTORS = torch.from_numpy(RNG.normal(size=(400, 1100)).astype(np.float32))


@pytest.fixture
def store():
    with open_store('memory://', run='r') as store:
        yield store


def stack(env, time):
    first = 100 * env + time
    return LEVELS[first : first + 4].clone()


def transition(time, env=0, **more):
    """A row of 3 steps, as DQN has it on Atari."""
    return step(time, env, **{'obs': stack(env, time), 'next_obs': stack(env, time + 3), **more})


def of_bytes(time, env=0):
    """A row whose frames are bytes, and not float32 values k/255."""
    obs, next_obs = ((stack(env, each) * 255).round().to(torch.uint8) for each in (time, time + 3))
    return step(time, env, obs=obs, next_obs=next_obs)


def of_vectors(time, env=0):
    """A row without stacks: only ``next_obs`` recurs, as ``obs`` of the next row."""
    first = 100 * env + time
    return step(time, env, obs=VECTORS[first].clone(), next_obs=VECTORS[first + 1].clone())


def sequence(time, env=0):
    """A sequence of R2D2: it overlaps with the next one by half."""
    first = 4 * (time % 20)
    return {'time': torch.tensor([time]), 'obs': [stack(env, first + i) for i in range(8)], 'core': torch.ones(8, 4)}


KINDS = [transition, of_bytes, of_vectors, sequence]


def chunks(make, num_chunks=3, num_rows=6, num_envs=2):
    for number in range(num_chunks):
        times = range(number * num_rows, (number + 1) * num_rows)
        yield [make(time, env) for env in range(num_envs) for time in times]


@contextmanager
def stores(transport, server, tmp_path):
    """The stores of a collector and of a learner."""
    options = {
        'memory': ({}, {}),
        'ring': ({}, {}),
        'wire': ({'host_plane': 'off'}, {'host_plane': 'off'}),
        'backfilled': ({'host_cache_dir': str(tmp_path)}, {'host_plane': 'off'}),
    }[transport]
    if transport == 'memory':
        with open_store('memory://', run='r') as store:
            yield store, store.another()
        return
    run = next(RUNS)
    with open_store(server.url, run, **options[0]) as one, open_store(server.url, run, **options[1]) as other:
        yield one, other


def write(store, elements, **options):
    writer = ChunkWriter(store, STREAM, **options)
    for chunk in elements:
        writer.write(chunk, HEADER)


def rows_in(buffer_):
    items = list(buffer_) if isinstance(buffer_, StoreBuffer) else list(buffer_.storage)
    return [item.data for item in items]


def leaves(element):
    obs = element['obs']
    parts = list(obs) if isinstance(obs, list) else [obs, element['next_obs']]
    return [np.asarray(part) for part in [*parts, element['time']]]


def assert_same(rows, elements):
    assert len(rows) == len(elements)
    for row, element in zip(rows, elements):
        for one, other in zip(leaves(row), leaves(element)):
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()


WAYS = [('memory', make, direct) for make in KINDS for direct in (True, False)]
WAYS += [(way, *each) for way in ('ring', 'wire', 'backfilled') for each in ((transition, True), (sequence, False))]


@pytest.mark.parametrize(('transport', 'make', 'direct'), WAYS)
def test_shared_chunks_arrive_as_without_sharing(request, transport, make, direct, tmp_path):
    server = None if transport == 'memory' else request.getfixturevalue('redis_server')
    elements = list(chunks(make))
    found = []
    for share_frames in (True, False):
        with stores(transport, server, tmp_path) as (collector, learner_store):
            buffer_ = StoreBuffer(100, sampler=Prioritized(seed=0))
            learner = Learner(learner_store, buffer_, direct)
            write(collector, elements, share_frames=share_frames)
            take_all(learner, buffer_, 36)
        assert buffer_.check() == []
        assert_same(rows_in(buffer_), [each for chunk in elements for each in chunk])
        batch = buffer_.sample_batch(16)
        obs = batch.data['obs']
        found.append((batch.rows.tolist(), [np.asarray(part).tobytes() for part in obs]))
    assert found[0] == found[1]


def take_all(learner, buffer_, num_rows):
    eventually(lambda: learner.take() >= 0 and len(buffer_) == num_rows, 'the learner has all rows')


def entries_of(store, elements, **options):
    write(store, elements, **options)
    return store.read(STREAM)


@pytest.mark.parametrize('make', KINDS)
def test_shared_chunk_has_each_frame_once(store, make):
    elements = list(chunks(make, num_chunks=2))
    for entry, chunk in zip(entries_of(store, elements), elements):
        names = sorted(entry.header['shared'])
        assert len(set(entry.header['shared'].values())) == 1
        frames = entry.arrays[entry.header['shared'][names[0]]]
        assert len({frame.tobytes() for frame in frames}) == len(frames)
        distinct = {part.tobytes() for each in chunk for leaf in leaves(each)[:-1] for part in parts_of(leaf)}
        assert len(frames) == len(distinct)
        assert all(entry.arrays[name].dtype == np.int32 for name in names)


def test_shared_chunk_is_sent_again_with_the_same_bytes(store):
    """The server loses its memory after the first chunks, and the writer sends them again."""
    writer, elements = ChunkWriter(store, STREAM), list(chunks(transition, num_chunks=4))
    learner, buffer_ = store.another(), StoreBuffer(100)
    learner.register(STREAM, 'learner')
    for chunk in elements[:3]:
        writer.write(chunk, HEADER)
    before = [encode(entry.header, entry.arrays) for entry in learner.read(STREAM)]
    store.lose_memory()
    writer.write(elements[3], HEADER)
    entries = store.read(STREAM)
    assert [encode(entry.header, entry.arrays) for entry in entries[:3]] == before
    assert Learner(store.another(), buffer_).take() == 4
    assert_same(rows_in(buffer_), [each for chunk in elements for each in chunk])


def parts_of(leaf):
    return leaf if leaf.ndim > 1 else [leaf]


def test_shared_chunk_is_the_same_without_numba(store, monkeypatch):
    elements = list(chunks(transition)) + list(chunks(of_vectors))
    compiled = [ChunkWriter(store, str(i)) for i in range(2)]
    monkeypatch.setenv(ENV_NO_NUMBA, '1')
    plain = [ChunkWriter(store, f'plain{i}') for i in range(2)]
    for number, chunk in enumerate(elements):
        monkeypatch.setenv(ENV_NO_NUMBA, '0')
        compiled[number // 3].write(chunk, HEADER)
        monkeypatch.setenv(ENV_NO_NUMBA, '1')
        plain[number // 3].write(chunk, HEADER)
    for i in range(2):
        one, other = store.read(str(i)), store.read(f'plain{i}')
        assert len(one) == 3
        assert [each.header for each in one] == [each.header for each in other]
        for each, twin in zip(one, other):
            assert 'shared' in each.header
            assert list(each.arrays) == list(twin.arrays)
            assert all(np.array_equal(array, twin.arrays[name]) for name, array in each.arrays.items())


@pytest.mark.parametrize('direct', [True, False])
@pytest.mark.parametrize('make', KINDS)
def test_shared_chunks_arrive_without_numba(store, make, direct, monkeypatch):
    monkeypatch.setenv(ENV_NO_NUMBA, '1')
    buffer_, elements = StoreBuffer(100), list(chunks(make))
    learner = Learner(store, buffer_, direct)
    write(store, elements)
    learner.take()
    assert_same(rows_in(buffer_), [each for chunk in elements for each in chunk])
    assert buffer_.check() == []


def alone(time, **more):
    """A row whose frames are in no other row."""
    return step(time, obs=LEVELS[8 * time : 8 * time + 4], next_obs=LEVELS[8 * time + 4 : 8 * time + 8], **more)


def test_chunk_whose_frames_do_not_recur_stays_as_it_is(store):
    """Later chunks are looked at less and less often."""
    writer, known = ChunkWriter(store, STREAM), []
    useless, useful = [alone(time) for time in range(6)], [transition(time) for time in range(6)]
    for chunk in (useless, useless, useless, useful, useful, useful, useful, useful):
        writer.write(chunk, HEADER)
    entries = store.read(STREAM)
    assert [('shared' in entry.header) for entry in entries] == [False] * 6 + [True] * 2
    specs = ChunkDecoder().schema(entries[0]).columns()
    for entry in entries[:6]:
        assert entry.arrays.keys() == specs.keys()
        assert known in ([], list(entry.header))
        known = list(entry.header)


def test_chunk_with_other_leaves_shares_only_frames(store):
    """Small leaves, missing values and leaves of another shape are sent as they are."""
    elements = [transition(time, other=VECTORS[time], small=torch.ones(3)) for time in range(8)]
    for element in elements[::2]:
        element.maybe = None
    for element in elements[1::2]:
        element.maybe = torch.ones(2)
    buffer_ = StoreBuffer(20)
    learner = Learner(store, buffer_)
    write(store, [elements, elements])
    entry = store.read(STREAM)[0]
    assert sorted(entry.header['shared']) == ['next_obs', 'obs']
    assert entry.arrays['other'].shape == (8, 1100)
    learner.take()
    rows = rows_in(buffer_)
    assert_same(rows, elements * 2)
    assert [row['maybe'] is None for row in rows] == [True, False] * 8
    assert all(torch.equal(row['other'], VECTORS[int(row['time'])]) for row in rows)


def test_pickled_chunk_is_not_shared(store):
    buffer_ = StoreBuffer(20)
    learner = Learner(store, buffer_, allow_pickle=True)
    elements = [{'obs': stack(0, time), 'next_obs': stack(0, time + 1), 'note': 'text'} for time in range(6)]
    write(store, [elements], allow_pickle=True)
    assert 'shared' not in store.read(STREAM)[0].header
    learner.take()
    assert [item.data['note'] for item in buffer_] == ['text'] * 6


def deque(size, tmp_path):
    return DequeBuffer(size)


def not_shared(size, tmp_path):
    return StoreBuffer(size, share_frames=False)


def with_path(size, tmp_path):
    return StoreBuffer(size, path=str(tmp_path / 'table'))


def full(size, tmp_path):
    buffer_ = StoreBuffer(size)
    for time in range(size):
        buffer_.push(transition(time, env=2))
    return buffer_


@pytest.mark.parametrize('size', [5, 90])
@pytest.mark.parametrize('made', [deque, not_shared, with_path, full])
def test_shared_chunks_arrive_in_every_buffer(store, made, size, tmp_path):
    """The buffers include one that is smaller than a chunk, and one that is full."""
    buffer_ = made(size, tmp_path)
    learner = Learner(store, buffer_, direct=made is not deque)
    elements = list(chunks(transition, num_chunks=4))
    write(store, elements)
    assert learner.take() == 4
    rows = rows_in(buffer_)
    newest = [each for chunk in elements for each in chunk][-min(size, 48) :]
    assert_same(rows[-len(newest) :], newest)
    if made is not deque:
        assert buffer_.check() == []
        buffer_.close()


@pytest.mark.parametrize('direct', [True, False])
def test_pool_has_each_frame_of_shared_chunks_once(store, direct):
    buffer_ = StoreBuffer(100)
    learner = Learner(store, buffer_, direct)
    elements = list(chunks(transition, num_chunks=4))
    write(store, elements)
    learner.take()
    pool = buffer_.table.columns.shared['obs'].pool
    distinct = {part.tobytes() for chunk in elements for each in chunk for leaf in leaves(each)[:2] for part in leaf}
    assert pool.num_used == len(distinct)
    assert buffer_.check() == []
    buffer_.delete([str(row) for row in range(48)])
    assert pool.num_used == 0


@pytest.mark.parametrize('is_first', [True, False])
def test_shared_chunks_mix_with_wide_ones(store, is_first):
    """A table that keeps floats receives frames in bytes, and a table of bytes receives floats."""
    buffer_ = StoreBuffer(100)
    learner = Learner(store, buffer_)
    narrow, wide = ChunkWriter(store, STREAM), ChunkWriter(store.another(), STREAM)
    mine = [transition(time) for time in range(8)]
    others = [transition(time, env=1, obs=stack(1, time) + 2, next_obs=stack(1, time + 3) + 2) for time in range(8)]
    order = [(wide, others), (narrow, mine)] if is_first else [(narrow, mine), (wide, others)]
    for writer, chunk in order * 2:
        writer.write(chunk, HEADER)
    entries = store.read(STREAM)
    assert sorted(map(bool, (narrowed_in(entry) for entry in entries))) == [False, False, True, True]
    assert all('shared' in entry.header for entry in entries)
    learner.take()
    assert_same(rows_in(buffer_), [each for _, chunk in order * 2 for each in chunk])
    assert buffer_.check() == []


def test_shared_chunks_pass_a_buffer_with_middleware(store):
    buffer_ = StoreBuffer(100)
    seen = []

    def note(action, chain, *args, **kwargs):
        seen.append(action)
        return chain(*args, **kwargs)

    buffer_.use(note)
    elements = list(chunks(transition, num_chunks=2))
    for entry in entries_of(store, elements):
        decoder = ChunkDecoder()
        buffer_.extend(decoder.columns(entry), decoder.schema(entry), narrowed=narrowed_in(entry))
    assert seen.count('push') == 24
    assert_same(rows_in(buffer_), [each for chunk in elements for each in chunk])


def test_elements_of_shared_chunks_have_their_own_memory(store):
    (entry,) = entries_of(store, [[of_bytes(time) for time in range(6)]])
    before = {name: array.copy() for name, array in entry.arrays.items()}
    elements = ChunkDecoder().elements(entry)
    elements[0].obs.fill_(3)
    assert torch.equal(elements[1].obs, of_bytes(1).obs)
    assert all(np.array_equal(array, before[name]) for name, array in entry.arrays.items())


def test_version_that_knows_no_shared_frames_refuses_them(store):
    """It compares the arrays with the schema's columns, and names the array of frames."""
    (entry,) = entries_of(store, [[transition(time) for time in range(6)]])
    with pytest.raises(SchemaMismatch, match='~frames/0'):
        ChunkDecoder().schema(entry).check(entry.arrays, 6, narrowed_in(entry))


HOSTILE = [
    {'shared': ['obs']},
    {'shared': {'obs': 3}},
    {'shared': {'obs': '~frames/0'}},
    {'shared': {'obs': '~frames/0', 'next_obs': '~frames/1'}},
    {'shared': {'obs': '~frames/0', 'next_obs': 'obs'}},
    {'shared': {'obs': '~frames/0', 'next_obs': 'time'}},
    {'shared': {'obs': '~frames/0', 'next_obs': '~frames/0', 'priority': '~frames/0'}},
    {'shared': {'obs': '~frames/0', 'next_obs': '~frames/0', 'time': '~frames/0'}},
    {'narrowed': ['obs']},
    {'rows': 5},
]


@pytest.mark.parametrize('header', HOSTILE)
def test_shared_chunk_with_a_wrong_header_is_refused(store, header):
    (entry,) = entries_of(store, [[transition(time) for time in range(6)]])
    store.append(STREAM, {**entry.header, **header}, entry.arrays)
    refuse(store.read(STREAM)[-1])


def refuse(entry):
    num_bytes(entry, as_elements=True)
    with pytest.raises(CorruptPayload, match='it is not a chunk'):
        ChunkDecoder().check(entry)


@pytest.mark.parametrize(
    'arrays',
    [
        {'obs': np.full((6, 4), 99, np.int32)},
        {'obs': np.full((6, 4), -1, np.int32)},
        {'obs': np.zeros((6, 4), np.int64)},
        {'obs': np.zeros((6, 3), np.int32)},
        {'obs': np.zeros(24, np.int32)},
        {'obs': np.zeros((5, 4), np.int32)},
        {'~frames/0': np.zeros((20, SIZE), np.uint8)},
        {'~frames/0': np.zeros((0, SIZE, SIZE), np.uint8)},
        {'~frames/0': np.zeros((), np.uint8)},
        {'~frames/0': np.zeros((20, SIZE, SIZE), np.int8)},
        {'~frames/0': np.zeros((20, 1, 1, 1, SIZE, SIZE), np.uint8)},
        {'more': np.zeros(6, np.uint8)},
    ],
)
def test_shared_chunk_with_wrong_arrays_is_refused(store, arrays):
    (entry,) = entries_of(store, [[transition(time) for time in range(6)]])
    store.append(STREAM, entry.header, {**entry.arrays, **arrays})
    refuse(store.read(STREAM)[-1])


def test_chunk_of_equal_frames_from_another_writer_is_counted(store):
    """Ours sends no frame twice, but the pool must not rely on that."""
    (entry,) = entries_of(store, [[transition(time) for time in range(6)]])
    frames, names = entry.arrays['~frames/0'], ('obs', 'next_obs')
    # Each frame twice, and one that no row has.
    doubled = {name: entry.arrays[name] + np.int32(len(frames)) * (name == 'obs') for name in names}
    frames = np.concatenate([frames, frames, frames[:1] + np.uint8(1)])
    buffer_ = StoreBuffer(40)
    for _ in range(2):
        store.append(STREAM, entry.header, {**entry.arrays, **doubled, '~frames/0': frames})
    Learner(store, buffer_).take()
    assert_same(rows_in(buffer_), [transition(time) for time in range(6)] * 3)
    assert buffer_.check() == []


@pytest.mark.parametrize(('as_elements', 'counts'), [(True, 6 * 8 * 4), (False, 12)])
def test_shared_chunk_counts_as_what_the_learner_holds(store, as_elements, counts):
    """Elements have all frames, and as float32."""
    (entry,) = entries_of(store, [[transition(time) for time in range(6)]])
    assert 0 <= num_bytes(entry, as_elements) - counts * SIZE * SIZE < 2000


@pytest.mark.usefixtures('serial_task')
@pytest.mark.parametrize('share_frames', ['auto', False])
def test_share_frames_of_the_config_holds_for_chunks(store, share_frames, monkeypatch):
    config = StoreConfig(share_frames=share_frames)
    session = SimpleNamespace(store=store, config=config, num_partitions=1, figures=lambda **figures: None)
    monkeypatch.setattr('ding_store.middleware.exchanger.Exchanger.__init__', _init)
    exchanger = CollectorExchanger(session, 0)
    exchanger._chunks[0].write([transition(time) for time in range(6)], HEADER)
    assert ('shared' in store.read(STREAM)[0].header) == (share_frames == 'auto')


def _init(exchanger, session, skip_n_iter):
    exchanger._session = session
