"""What the learner makes of entries: chunks as they are, what is no chunk, and chunks behind a loss."""

import copy
import dataclasses
import functools
import json
import os
import random
from time import monotonic
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip('ding')

from ding.framework import task  # noqa: E402
from ding.framework.context import OnlineRLContext  # noqa: E402
from learners import HEADER, Exchanger, Learner, step  # noqa: E402

from ding_store.buffer import StoreBuffer, Uniform, limited  # noqa: E402
from ding_store.config import StoreConfig  # noqa: E402
from ding_store.errors import ConfigError, CorruptPayload, SchemaMismatch  # noqa: E402
from ding_store.middleware import feed  # noqa: E402
from ding_store.middleware.backpressure import PROGRESS, Backpressure  # noqa: E402
from ding_store.middleware.chunks import ChunkDecoder, ChunkWriter, narrowed_in  # noqa: E402
from ding_store.middleware.collector_exchanger import CollectorExchanger  # noqa: E402
from ding_store.middleware.consumer_offset import ConsumerOffset  # noqa: E402
from ding_store.middleware.ingest_plan import replay_figures  # noqa: E402
from ding_store.run.recording import STREAM  # noqa: E402
from ding_store.run.time_spent import TimeSpent  # noqa: E402
from ding_store.storage import open_store  # noqa: E402
from ding_store.storage.base import Entry, EntryId  # noqa: E402
from ding_store.storage.exactly_once.reader import Reader  # noqa: E402
from ding_store.storage.testing import WAIT_S, abandon, eventually  # noqa: E402


@pytest.fixture
def store():
    with open_store('memory://', run='r') as store:
        yield store


@pytest.mark.parametrize('direct', [True, False])
def test_episodes_are_pushed_whole(store, direct):
    buffer_ = StoreBuffer(100)
    learner = Learner(store, buffer_, direct)
    steps = [step(number) for number in range(8)]
    ChunkWriter(store, STREAM).write(steps, {**HEADER, 'kind': 'episodes', 'lengths': [3, 5]})
    learner.take()
    assert [[int(each.time) for each in item.data] for item in buffer_] == [[0, 1, 2], [3, 4, 5, 6, 7]]


def test_chunk_with_ends_of_idle_envs_is_accepted(store):
    learner = Learner(store, StoreBuffer(20), direct=False)
    ChunkWriter(store, STREAM).write([step(0)], {**HEADER, 'end_idx': [-1, 0]})
    assert learner.take() == 1
    assert learner.consumer_offset.num_rows == 1


@pytest.mark.parametrize('direct', [True, False])
def test_rows_have_the_version_of_each_policy(store, direct):
    buffer_, writer = StoreBuffer(20), ChunkWriter(store, STREAM)
    learner, young = Learner(store, buffer_, direct), limited(Uniform(), max_age=1, version='policy_version/blue')
    for number, blue in ((1, 7), (2, 9)):
        writer.write([step(number)], {**HEADER, 'policy_version': 5, 'policy_versions': {'red': 5, 'blue': blue}})
        learner.take()
    both = [{'policy_version': 5, 'policy_version/red': 5, 'policy_version/blue': blue} for blue in (7, 9)]
    assert [item.meta for item in buffer_] == both
    assert int(buffer_.view(young).sample(1)[0].data.time) == 2
    writer.write([step(3)], {**HEADER, 'policy_version': 4, 'policy_versions': {'red': 4}})
    learner.take()
    assert [item.meta for item in buffer_] == [both[1], {'policy_version': 4}]


@pytest.mark.parametrize(('direct', 'known'), [(True, [4, 6]), (False, [4, 4])])
def test_rows_of_chunks_taken_together_have_the_oldest_version(store, direct, known):
    buffer_, writer = StoreBuffer(20), ChunkWriter(store, STREAM)
    for number, version in ((1, 4), (2, 6)):
        writer.write([step(number)], {**HEADER, 'policy_version': version})
    assert Learner(store, buffer_, direct).take() == 2
    assert [item.meta['policy_version'] for item in buffer_] == known


HOSTILE = [None, -1, 2**70, 'x', [], {}, 'object', '<U9999999', 1.5, True, [[]], '__class__', 10**9]


def places_in(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in items for place in places_in(each, (*path, key)))]


def changed(rng, value):
    value = copy.deepcopy(value)
    path = rng.choice(places_in(value))
    if not path:
        return rng.choice(HOSTILE)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if rng.random() < 0.2:
        del holder[path[-1]]
    else:
        holder[path[-1]] = rng.choice(HOSTILE)
    return value


def test_hostile_chunk_is_pushed_or_refused_by_name(store):
    """Headers, schemas and columns that no collector wrote, in entries whose checksums are right."""
    rng, num_good, refused = random.Random(0), 0, set()
    elements = [
        {
            'obs': torch.zeros(4),
            'extra': {'a': torch.zeros(2), 'frame': torch.full((32, 32), number / 255)},
            'maybe': torch.ones(3) if number == 3 else None,
        }
        for number in range(6)
    ]
    ChunkWriter(store, STREAM).write(elements, {**HEADER, 'policy_versions': {'red': 0, 'blue': 3}})
    (entry,) = store.read(STREAM)
    schema = json.loads(entry.header['schema'])
    assert entry.header['narrowed'] == ['extra/frame']
    for _ in range(4000):
        header, arrays = dict(entry.header), dict(entry.arrays)
        header = changed(rng, header)
        if rng.random() < 0.7 and isinstance(header, dict):
            header['schema'] = json.dumps(changed(rng, schema))
        if not isinstance(header, dict):
            continue
        if rng.random() < 0.1:
            arrays.pop(rng.choice(list(arrays)))
        hostile = dataclasses.replace(entry, header=header, arrays=arrays)
        decoder = ChunkDecoder()
        try:
            decoder.check(hostile)
        except CorruptPayload as error:
            refused.add((error.entry_id, f'entry 1 of {STREAM!r}' in str(error)))
            continue
        num_good += 1
        if header['rows']:
            buffer_ = StoreBuffer(20)
            buffer_.extend(arrays, schema=decoder.schema(hostile), narrowed=narrowed_in(hostile))
            buffer_.sample_batch(2)
            assert len(decoder.elements(hostile)) == 6
    assert 20 < num_good < 2000
    assert refused == {(entry.id, True)}


def test_leaf_that_is_none_in_some_chunks_is_accepted(store):
    writer, learner = ChunkWriter(store, STREAM), Learner(store, StoreBuffer(20))
    for maybe in (None, torch.ones(3), None):
        writer.write([{'obs': torch.zeros(4), 'maybe': maybe}], HEADER)
    assert learner.take() == 3
    assert learner.consumer_offset.num_rows == 3


@pytest.mark.parametrize('direct', [True, False])
def test_entry_that_is_no_chunk_is_refused_or_skipped(store, direct):
    writer, buffer_ = ChunkWriter(store, STREAM), StoreBuffer(20)
    writer.write([step(0)], HEADER)
    store.append(STREAM, {**HEADER, 'rows': 7, 'schema': '{"format": 1}'}, {'x': np.zeros(7)})
    writer.write([step(1)], HEADER)
    for _ in range(2):
        with pytest.raises(CorruptPayload, match=f'entry 2 of {STREAM!r}'):
            Learner(store.another(), buffer_, direct).take()
    assert buffer_.count() == 0
    learner = Learner(store.another(), buffer_, direct, on_corrupt='skip')
    learner.take()
    assert [int(item.data.time) for item in buffer_] == [0, 1]
    assert (learner.reader.num_corrupt, learner.reader.lag()) == (1, 0)


class Fancy:
    """What no column can hold."""

    def __init__(self, number):
        self.number = number


def fancy(number, env=0):
    return {'time': torch.tensor([number]), 'env_data_id': torch.tensor([env]), 'note': Fancy(number)}


def test_python_objects_are_pickled_only_if_allowed(store):
    with pytest.raises(SchemaMismatch, match="leaf 'note': columns cannot hold"):
        ChunkWriter(store, STREAM).write([fancy(0)], HEADER)
    writer = ChunkWriter(store, STREAM, allow_pickle=True)
    element = fancy(0)
    for _ in range(2):  # as one that found no room at first
        writer.write([element, fancy(1)], HEADER, fixups={'env_data_id': 5 << 32})
    assert int(element['env_data_id']) == 0, "the caller's"
    for _ in range(2):
        with pytest.raises(CorruptPayload, match='allow_pickle'):
            Learner(store.another(), StoreBuffer(20)).take()
    buffer_ = StoreBuffer(20)
    learner = Learner(store.another(), buffer_, allow_pickle=True)
    learner.take()
    assert [item.data['note'].number for item in buffer_] == [0, 1, 0, 1]
    assert {int(item.data['env_data_id']) for item in buffer_} == {5 << 32}
    store.ack(STREAM, 'learner', writer.write([fancy(2)], HEADER))  # it is gone: nobody has read it
    writer.write([fancy(3)], HEADER)
    learner.take()
    assert [item.data['note'].number for item in buffer_][4:] == [3]
    assert int(buffer_[-1].data['env_data_id']) not in (0, 5 << 32), 'behind a loss it is another run'


def test_chunk_that_cannot_be_unpickled_is_skipped(store, monkeypatch):
    writer, buffer_ = ChunkWriter(store, STREAM, allow_pickle=True), StoreBuffer(20)
    writer.write([fancy(0)], HEADER)
    learner = Learner(store.another(), buffer_, allow_pickle=True, on_corrupt='skip')
    monkeypatch.delitem(globals(), 'Fancy')  # a class that is not on the learner's host
    learner.take()
    monkeypatch.undo()
    writer.write([fancy(1)], HEADER)
    learner.take()
    assert [item.data['note'].number for item in buffer_] == [1]
    assert learner.reader.num_corrupt == 1


@pytest.mark.parametrize(
    ('url', 'is_good'),
    [
        ('embedded://', True),
        ('memory://', True),
        ('unix:///run/redis.sock', True),
        ('redis://host:6379', False),
        ('redis://127.0.0.1', False),
        ('redis://user@host', False),
        ('redis://host:6379/0?client_name=a@b', False),
        ('redis://user:@host', False),
        ('redis://host?password=', False),
        ('rediss://host', False),
        ('rediss://host?ssl_ca_certs=ca.pem', False),
        ('redis://:pw@host', True),
        ('redis://host?password=pw', True),
        ('rediss://user:pw@host', True),
        ('rediss://host?ssl_keyfile=k.pem&ssl_certfile=c.pem', True),
        ('redis://host?ssl_certfile=c.pem', False),
        ('REDIS://host', False),
        ('redis+sentinel://host:26379/primary', False),
        ('redis+sentinel://:pw@host:26379,other/primary', True),
        ('rediss+sentinel://host/primary?ssl_certfile=c.pem', True),
        ('rediss+cluster://host?ssl_certfile=c.pem', True),
        ('tcp://host', False),
    ],
)
def test_server_without_a_password_gets_no_pickles(monkeypatch, url, is_good):
    from ding_store.config import StoreConfig
    from ding_store.environment import ENV_URL

    monkeypatch.setenv(ENV_URL, url)
    if is_good:
        assert StoreConfig.from_block(dict(allow_pickle=True)).allow_pickle
        return
    with pytest.raises(ConfigError, match=ENV_URL):
        StoreConfig.from_block(dict(allow_pickle=True))
    assert not StoreConfig.from_block({}).allow_pickle


def write_all(writers, times):
    for time in times:
        for env, writer in enumerate(writers):
            writer.write([step(time, env=env)], HEADER)


def jumps(buffer_, length, size):
    """Of sampled sequences: how many there are of each env, and whether steps in them are missing."""
    sampled = buffer_.sample_sequences(size, length, 'env_data_id', done=None).data
    times = sampled.time.numpy().reshape(length, -1)
    return (np.diff(times, axis=0) != 1).any(axis=0)


@pytest.mark.parametrize('direct', [True, False])
def test_steps_around_a_loss_are_not_consecutive(direct):
    """A full stream drops a hundred chunks of one collector; another one's sequences go on."""
    with open_store('memory://', run='r', max_pending_bytes=200_000, overflow='drop_oldest') as store:
        buffer_ = StoreBuffer(1000, seed=0)
        learner = Learner(store.another(), buffer_, direct)
        one, other = (ChunkWriter(each, STREAM) for each in (store, store.another()))
        write_all([one, other], range(20))
        while learner.take():
            pass
        write_all([one], range(20, 1000))  # more than the stream holds, while the learner is away
        write_all([one], range(1000, 1001))
        other.write([step(20, env=1)], HEADER)
        before = buffer_.count()
        while learner.take():
            pass
        assert learner.reader.num_lost > 100
        assert buffer_.count() > before + 20
        assert not jumps(buffer_, 10, 200).any()
        ids = np.array([int(item.data.env_data_id) for item in buffer_])
        assert len(np.unique(ids[ids & 1 == 0])) == 2, 'one run before the loss, one behind it'
        assert len(np.unique(ids[ids & 1 == 1])) == 1, 'nothing of the other is lost'


def test_steps_around_the_loss_of_one_chunk_are_not_consecutive():
    position, runs = ConsumerOffset(), []
    for sequence in (1, 2, 4, 5):
        arrays = {'env_data_id': np.zeros(1, np.int64)}
        entry = Entry(STREAM, EntryId('epoch', sequence), 'writer', sequence, {**HEADER, 'rows': 1}, arrays)
        runs.append(int(position.take(entry).arrays['env_data_id'][0]))
    assert runs[0] == runs[1] != runs[2] == runs[3]


def test_position_is_committed_before_it_is_published(store, tmp_path):
    """A chunk without rows: its position is committed by itself."""
    buffer_, known = StoreBuffer(20), []
    made = Learner(store, buffer_)
    made.plan.replay_figures = lambda: replay_figures(buffer_)
    session = SimpleNamespace(
        store=store,
        config=StoreConfig(),
        replay_path=str(tmp_path / 'replay'),
        checkpoints=SimpleNamespace(run='r'),
        figures=lambda **_: None,
        finished=True,
    )
    learner = Exchanger(session, made)
    learner.begin()
    ChunkWriter(store, STREAM).write([], HEADER)
    learner.merge(learner.read_ahead.take(1, WAIT_S))
    learner.reader.advance = lambda *_: known.append(buffer_.committed)
    learner.send()
    learner.read_ahead.wake()
    assert [note and note['chunks'] for note in known] == [1]
    buffer_.close()


def test_chunks_dropped_while_held_are_not_pushed(redis_server, tmp_path):
    """The learner trains, and what it had read ahead lies in a ring that its writer fills anew."""
    total, run = 60, f'held-{os.getpid()}'
    options = dict(max_pending_bytes=60_000, overflow='drop_oldest', host_cache_dir=str(tmp_path))
    with open_store(redis_server.url, run, **options) as store, open_store(redis_server.url, run, **options) as other:
        buffer_ = StoreBuffer(1000)
        made = Learner(store, buffer_)
        config = StoreConfig(overflow='drop_oldest')
        learner = Exchanger(SimpleNamespace(store=store, config=config, replay_path=None, checkpoints=None), made)
        learner.begin()
        writer = ChunkWriter(other, STREAM)
        for number in range(total):
            writer.write([step(number, obs=torch.full((1500,), float(number)))], HEADER)
        eventually(lambda: learner.reader.cursor.number == total, 'all is read ahead')
        while entries := learner.read_ahead.take(64, 0.0):
            learner.merge(entries)
        learner.read_ahead.wake()
        rows = [item.data for item in buffer_]
        times = [int(row.time) for row in rows]
        assert times == sorted(set(times))
        assert [float(row.obs[0]) for row in rows] == times
        assert len(times) + learner.reader.num_lost == total
        runs = [int(row.env_data_id) for row in rows]
        gaps = [after - before > 1 for before, after in zip(times, times[1:])]
        assert gaps == [after != before for before, after in zip(runs, runs[1:])]


def test_resumed_learner_keeps_trajectories_apart(store, tmp_path):
    """The position, with what was lost until now, is in the table: also behind a restart no old run is gone on with."""

    def learner():
        position = ConsumerOffset()
        buffer_ = StoreBuffer(1000, seed=0)
        made = Learner(store.another(), buffer_, position=position, on_corrupt='skip')
        position.keep_in(made.plan.replay, str(tmp_path / 'replay'), 'r')
        made.reader = position.reader(store.another(), STREAM, 'learner', loss_grace_s=0.0)
        return made, buffer_

    writer = ChunkWriter(store, STREAM)
    for times, lost in ((range(5), range(5, 8)), (range(8, 12), ()), (range(12, 16), ())):
        made, buffer_ = learner()
        write_all([writer], times)
        while made.take():
            pass
        buffer_.close()
        write_all([writer], lost)
        # What its writer had when it was killed: the entries are gone for good.
        store.ack(STREAM, 'learner', store.read(STREAM)[-1].id) if lost else None
    buffer_ = StoreBuffer(1000, path=str(tmp_path / 'replay'), seed=0)
    ids = [int(item.data.env_data_id) for item in buffer_]
    assert [int(item.data.time) for item in buffer_] == [*range(5), *range(8, 16)]
    assert len(set(ids)) == 2
    assert ids == sorted(ids)
    buffer_.close()


def test_on_corrupt_is_a_key_of_the_config():
    from ding_store.config import StoreConfig

    assert StoreConfig.from_block(dict(on_corrupt='skip')).on_corrupt == 'skip'
    with pytest.raises(ConfigError, match='on_corrupt'):
        StoreConfig.from_block(dict(on_corrupt='ignore'))


def test_progress_shows_skipped_entries():
    from ding_store.launch.progress import summary
    from ding_store.metrics.figures import Figures

    assert '3 corrupt entries skipped' in Figures(entries_corrupt=3).line()
    assert 'corrupt' not in Figures().line()
    assert summary(Figures(entries_corrupt=3), 1.0)['corrupt entries skipped'] == 3
    nothing = summary(Figures(), 1.0)
    assert 'corrupt entries skipped' not in nothing
    assert 'nan' not in nothing.values(), 'a run that ended before its first step'
    assert nothing['env steps/s'] == '-'


def test_ends_of_trajectories_shift_by_the_chunks_before(store):
    learner, writer = Learner(store, StoreBuffer(100), direct=False), ChunkWriter(store, STREAM)
    for num_rows, ends in ((4, [1, 3]), (0, []), (3, [0, 2])):
        writer.write([step(number) for number in range(num_rows)], {**HEADER, 'end_idx': ends})
    ctx = OnlineRLContext()
    assert learner._merge(ctx, learner.reader.read(64))
    assert [int(each.time) for each in ctx.trajectories] == [0, 1, 2, 3, 0, 1, 2]
    assert ctx.trajectory_end_idx == [1, 3, 4, 6]


@pytest.mark.parametrize(('ratio', 'num_taken'), [('keep', 1), ('free', 3)])
def test_free_learner_takes_all_chunks_at_once(store, ratio, num_taken):
    made, writer = Learner(store, StoreBuffer(100)), ChunkWriter(store, STREAM)
    for number in range(3):
        writer.write([step(number)], HEADER)
    session = SimpleNamespace(
        config=StoreConfig(train_ratio=ratio),
        store=store,
        wait_for=lambda what, attempt, *_: attempt(20.0),
        time_spent=TimeSpent(),
    )
    learner, ctx = Exchanger(session, made), OnlineRLContext()
    learner.read_with(made.reader)
    assert (learner.receive(ctx), ctx.env_step) == (num_taken, num_taken)
    learner.read_ahead.wake()


@pytest.mark.parametrize(('ratio', 'waits'), [('keep', [None]), ('free', [])])
def test_free_collector_does_not_wait_for_a_learner(store, ratio, waits):
    asked = []
    session = SimpleNamespace(
        config=StoreConfig(train_ratio=ratio),
        is_leaving=False,
        wait_for=lambda what, attempt, *_: asked.append(attempt(0.0)),
    )
    backpressure = Backpressure(store, max_lead=2)
    backpressure.appended(EntryId('a', 9))  # nothing of it was taken
    exchanger = SimpleNamespace(_session=session, _backpressures=[backpressure], _num_chunks=1, _skip_n_iter=1)
    exchanger._wait_within_lead = functools.partial(CollectorExchanger._wait_within_lead, exchanger)
    assert CollectorExchanger._receive(exchanger, OnlineRLContext(total_step=5))
    assert asked == waits


def test_resumed_learner_counts_chunks_lost_meanwhile(store, tmp_path):
    """Collector and learner were killed, and the server came back empty: the table knows what they had heard of."""

    def learner():
        position = ConsumerOffset()
        buffer_ = StoreBuffer(1000, seed=0)
        made = Learner(store.another(), buffer_, position=position)
        position.keep_in(made.plan.replay, str(tmp_path / 'replay'), 'r')
        made.reader = position.reader(store.another(), STREAM, 'learner', loss_grace_s=0.0)
        return made, buffer_

    made, buffer_ = learner()
    killed = store.another()
    write_all([ChunkWriter(killed, STREAM)], range(6))
    made.take(4)
    buffer_.close()
    abandon(killed)
    store.lose_memory()
    made, buffer_ = learner()
    for _ in range(3):
        made.reader.losses.looked_at = 0
        made.take()
    assert (buffer_.count(), made.reader.num_lost) == (4, 2)
    buffer_.close()


def test_skipped_entry_is_reported_to_its_collector(redis_server):
    """Else, with nothing but corrupt entries behind the last good one, learner and collectors wait for each other."""
    log = f'ding:{{skips/{STREAM}/0}}:log'
    with open_store(redis_server.url, run='skips') as store, redis_server.client() as client:
        learner = Exchanger(SimpleNamespace(store=store, figures=lambda **_: None, finished=True))
        reader = Reader(store, STREAM, 'learner', on_corrupt='skip')
        writer, backpressure = ChunkWriter(store, STREAM), Backpressure(store, max_lead=2)
        for number in range(3):
            backpressure.appended(writer.write([step(number)], HEADER))
        rows = client.xrange(log)
        client.delete(log)
        for redis_id, fields in rows:
            client.xadd(log, {**fields, b'p': b''}, id=redis_id)
        assert backpressure.wait_within_lead(0.0) is None
        learner.read_with(reader)
        with task.start(async_mode=False, ctx=OnlineRLContext()):
            deadline = monotonic() + 60
            while backpressure.wait_within_lead(0.0) is None and monotonic() < deadline:
                assert not learner.take(0.1)
        assert backpressure.wait_within_lead(0.0)
        assert learner.reader.num_corrupt == 3
        learner.read_ahead.wake()
        learner.read_ahead.rest()


def test_progress_is_published_for_lost_chunks(store):
    told, learner = [], Exchanger(SimpleNamespace(store=store, figures=lambda **_: None, finished=True))
    learner.reader = SimpleNamespace(
        stream=STREAM, num_corrupt=0, num_lost=0, advance=lambda upto, *_: told.append(upto)
    )
    learner.read_ahead = SimpleNamespace(passed=lambda: EntryId('a', 9))
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        learner.pass_over_skipped()
        assert told == []
        learner.reader.num_lost = 2
        learner.pass_over_skipped()
        learner.pass_over_skipped()
    assert told == [EntryId('a', 9)]


@pytest.mark.parametrize('lost', ['all', 'the newest'])
def test_idle_learner_puts_lost_progress_again(store, lost, monkeypatch):
    """Else learner and collectors wait for each other: nothing that the learner has not seen comes to it."""
    monkeypatch.setattr(feed, 'LOOK_EVERY_S', 0.0)
    other = store.another()
    learner = Exchanger(SimpleNamespace(store=other, figures=lambda **_: None, finished=True))
    learner.read_with(Reader(other, STREAM, 'learner'))
    writer, backpressure = ChunkWriter(store, STREAM), Backpressure(store, max_lead=0)
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        for number in range(6):
            before = store.snapshot()
            backpressure.appended(writer.write([step(number)], HEADER))
            (entry,) = learner.take(60)
            learner.advance(entry.id)
        assert store.get(PROGRESS).header['ingested'] == list(entry.id)
        store.lose_memory(keep=None if lost == 'all' else before)
        deadline = monotonic() + 60
        while backpressure.wait_within_lead(0.0) is None and monotonic() < deadline:
            assert not learner.take(0.1)
    assert backpressure.wait_within_lead(0.0)
    assert store.get(PROGRESS).header['ingested'] == list(entry.id)
    learner.read_ahead.wake()


@pytest.mark.parametrize('has_chain', [True, False])
def test_resumed_learner_reads_entries_with_reused_numbers(store, tmp_path, has_chain):
    """It was killed before its ack, and the server went back: another collector's chunks have those numbers now."""

    def learner():
        position = ConsumerOffset()
        buffer_ = StoreBuffer(1000, seed=0)
        made = Learner(store.another(), buffer_, position=position)
        position.keep_in(made.plan.replay, str(tmp_path / 'replay'), 'r')
        made.reader = position.reader(store.another(), STREAM, 'learner')
        return made, buffer_

    made, buffer_ = learner()
    killed, other = store.another(), store.another()
    write_all([ChunkWriter(killed, STREAM)], range(1))
    before = store.snapshot()
    write_all([ChunkWriter(killed, STREAM)], range(1, 4))
    made.reader.ack = lambda *args: None
    made.take()
    if not has_chain:  # as a version before this one committed it
        note = dict(buffer_.committed)
        assert note.pop('chain')
        buffer_.commit(note)
    buffer_.close()
    abandon(killed)
    store._memory.go_back(before)
    write_all([ChunkWriter(other, STREAM)], range(10, 13))
    made, buffer_ = learner()
    assert made.consumer_offset.is_resumed
    made.reader.advance(made.consumer_offset.cursor, PROGRESS, {})
    made.take()
    rows = sorted(int(item.data.time) for item in buffer_)
    assert rows[:4] == [0, 1, 2, 3], 'a note without a chain is read'
    if has_chain:
        assert rows[4:] == [10, 11, 12]
    buffer_.close()
