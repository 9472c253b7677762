"""A recorder beside a run: exactly once where it is durable, and skips that are counted where it is not."""

import contextlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from rows import element, numbers

from ding_store.cli import main
from ding_store.config import LearnersConfig, StoreConfig
from ding_store.datasets import DataSet, DataSetWriter, episodes_of
from ding_store.errors import NotEnoughSpace, SchemaMismatch
from ding_store.launch import record as record_module
from ding_store.launch.printing import print_to
from ding_store.middleware.chunks import ChunkWriter
from ding_store.middleware.partitions import Partitioner
from ding_store.middleware.recorder import Recorder
from ding_store.run.ending import FINISH
from ding_store.run.format import agree_on_format
from ding_store.run.members import STREAM_OPTIONS
from ding_store.run.recording import STREAM, reader_name
from ding_store.run.several_learners import decide_num_partitions, stream_of
from ding_store.storage import open_store
from ding_store.storage.testing import WAIT_S

HEADER = {'kind': 'trajectories', 'env_step': 1, 'env_episode': 0, 'end_idx': []}


class Session:
    """A run that is over when so many entries have been read."""

    def __init__(self, recorder, last):
        self._recorder, self._last = recorder, last

    @property
    def finished(self):
        return self._recorder.num_entries >= self._last

    def figures(self, **figures):
        self.reported = figures


@contextlib.contextmanager
def stream(**options):
    with open_store('memory://', run='recorded', **options) as store:
        yield store, ChunkWriter(store, STREAM)


@pytest.fixture(autouse=True)
def brief_reads(monkeypatch):
    """A recorder waits for its thread's present read, in which nothing comes."""
    monkeypatch.setattr('ding_store.middleware.read_ahead.READ_S', 0.05)


def chunk(writer, numbers, version=0, **leaves):
    elements = [ttorch.Tensor({**dict(element(i).items()), **leaves}) for i in numbers]
    return writer.write(elements, {**HEADER, 'policy_version': version, 'policy_versions': {'policy': version}})


def recorder(store, path, durable=True, num_partitions=1):
    return Recorder(store, 'recorded', str(path), durable, num_partitions)


def take(made, max_entries=1, timeout_s=WAIT_S):
    """Let a recorder write the next entries."""
    made._write(made._take(max_entries, timeout_s))


def rest(made):
    """Stop the threads of a recorder, and let it write what is there."""
    made._write(made._rest())


def kill(made):
    """Stop a recorder as the end of its process does."""
    made._wake()
    made._writer._lock.close()


def record(store, path, last, durable=True, num_partitions=1):
    """Record ``last`` entries, as a process that is told to end."""
    made = recorder(store, path, durable, num_partitions)
    made.record(Session(made, last))
    return made


class Collectors:
    """Collectors of a run with several partitions. Each has two environments, whose episodes have ten steps."""

    def __init__(self, store, num_partitions, keeps_episodes, num=2):
        self.num_steps = [0] * num
        self._partitioners = [Partitioner(num_partitions, keeps_episodes, i % num_partitions) for i in range(num)]
        self._writers = [
            [ChunkWriter(each, stream_of(i, num_partitions)) for i in range(num_partitions)]
            for each in [store, *(store.another() for _ in range(num - 1))]
        ]

    def collect(self, number, num_steps, partitions=None):
        """Append a chunk of as many steps of each environment, to these partitions or to all."""
        first, self.num_steps[number] = self.num_steps[number], self.num_steps[number] + num_steps
        steps = range(first, self.num_steps[number])
        episodes = [(1000 * env + step, 100 * env + step // 10, step % 10 == 9) for env in range(2) for step in steps]
        parts = self._partitioners[number].split([element(*each) for each in episodes], HEADER)
        for i, part in enumerate(parts):
            if partitions is None or i in partitions:
                self._writers[number][i].write(part.elements, part.header, {'env_data_id': number << 32})


def episodes_in(data):
    """The numbers of the steps of each episode."""
    episodes = episodes_of(data)
    return [numbers(data.columns(episodes.rows(number))) for number in range(len(episodes.lengths))]


def expected_episodes(collectors):
    runs = [range(first, min(first + 10, num)) for num in collectors.num_steps for first in range(0, num, 10)]
    return sorted([1000 * env + step for step in run] for run in runs for env in range(2))


@pytest.mark.parametrize('keeps_episodes', [True, False])
def test_partitions_are_recorded_once_by_a_recorder_that_is_killed(tmp_path, keeps_episodes):
    """Entries come in any order of partitions, and the recorder is killed before or after its commits."""
    rng = random.Random(7)
    with open_store('memory://', run='recorded') as store:
        for partition in range(3):
            store.register(stream_of(partition, 3), reader_name(str(tmp_path / 'set')))
        collectors = Collectors(store, 3, keeps_episodes)
        made = recorder(store, tmp_path / 'set', num_partitions=3)
        for _ in range(25):
            if rng.random() < 0.6:
                collectors.collect(rng.randrange(2), rng.randrange(1, 8))
            elif rng.random() < 0.7:
                take(made, rng.randrange(1, 4), 0.05)
            else:
                if rng.random() < 0.7:
                    made._writer.flush()  # committed, and not acknowledged
                kill(made)
                made = recorder(store, tmp_path / 'set', num_partitions=3)
        rest(made)
        made.close()
        infos = [store.stream_info(stream_of(partition, 3)) for partition in range(3)]
    data = DataSet(tmp_path / 'set')
    assert len(data) == 2 * sum(collectors.num_steps)
    assert sorted(episodes_in(data)) == expected_episodes(collectors)
    assert len(data.begins()) == 1
    assert [info.readers for info in infos] == [{}] * 3


def test_pieces_around_a_loss_are_no_neighbours(tmp_path):
    with open_store('memory://', run='recorded') as store:
        collectors = Collectors(store, 2, keeps_episodes=False, num=1)
        streams = [stream_of(partition, 2) for partition in range(2)]
        store.register(streams[0], 'learner')
        made = recorder(store, tmp_path / 'set', durable=False, num_partitions=2)
        collectors.collect(0, 4)
        rest(made)
        collectors.collect(0, 4)  # partition 0 has the steps of environment 0
        store.ack(streams[0], 'learner', store.read(streams[0])[-1].id)
        collectors.collect(0, 4)
        rest(made)
        made.close()
    assert 'skipped 1 entries that it was too slow for' in made.summary()
    found = episodes_in(DataSet(tmp_path / 'set'))
    second = [list(range(1000, 1010)), [1010, 1011]]  # of the other environment, which lost nothing
    assert sorted(found) == [[0, 1, 2, 3], [8, 9], [10, 11], *second]


def test_recording_of_other_partitions_begins_anew(tmp_path):
    for num in (2, 3):
        with open_store('memory://', run='recorded') as store:
            Collectors(store, num, True).collect(0, 10)
            record(store, tmp_path / 'set', num, num_partitions=num)
    assert DataSet(tmp_path / 'set').begins() == [0, 20]


def test_rows_metas_and_episodes_of_a_run_are_recorded(tmp_path):
    with stream() as (store, writer):
        for version in range(3):
            last = chunk(writer, range(4 * version, 4 * version + 4), version)
        made = record(store, tmp_path / 'set', last.number)
    data = DataSet(tmp_path / 'set')
    assert numbers(data.columns(range(12))) == list(range(12))
    assert [meta['policy_version'] for meta in data.metas(range(12))] == [0] * 4 + [1] * 4 + [2] * 4
    assert made.summary() == f'recorded 12 rows of 3 entries into {tmp_path / "set"}; skipped nothing'
    assert episodes_of(data).lengths.tolist() == [12]


def test_leaves_that_vary_in_size_are_recorded(tmp_path):
    with stream() as (store, writer):
        writer.ragged = ('units',)
        for number in range(6):
            last = chunk(writer, [number, number], units=torch.full((number, 2), float(number)))
        made = record(store, tmp_path / 'set', last.number)
    assert made.summary() == f'recorded 12 rows of 6 entries into {tmp_path / "set"}; skipped nothing'
    with DataSet(tmp_path / 'set') as data:
        assert data.verify() == {}
        found = [each.units.tolist() for each in data.elements(range(12))]
        assert found == [[[float(number)] * 2] * number for number in range(6) for _ in range(2)]


def test_killed_durable_recorder_goes_on_without_a_gap_or_a_double(tmp_path):
    with stream() as (store, writer):
        store.register(STREAM, reader_name(str(tmp_path / 'set')))
        for i in range(5):
            chunk(writer, [2 * i, 2 * i + 1])
        killed = recorder(store, tmp_path / 'set')
        take(killed, 3)
        killed._writer.flush()
        take(killed)  # read, and not committed
        kill(killed)
        last = chunk(writer, [10, 11])
        record(store, tmp_path / 'set', last.number)
        info = store.stream_info(STREAM)
    data = DataSet(tmp_path / 'set')
    assert numbers(data.columns(range(len(data)))) == list(range(12))
    assert len(data.begins()) == 1
    assert info.readers == {}


def test_durable_recorder_acknowledges_only_what_is_committed(tmp_path):
    with stream() as (store, writer):
        store.register(STREAM, reader_name(str(tmp_path / 'set')))
        for i in range(4):
            chunk(writer, [i])
        made = recorder(store, tmp_path / 'set')
        made._writer._commit_s = 1e6
        for _ in range(2):
            take(made)
        assert list(store.stream_info(STREAM).readers.values()) == [0]
        made._writer.flush()
        made._write([])
        assert list(store.stream_info(STREAM).readers.values()) == [2]
        made.close()


def test_recorder_that_lags_counts_what_it_skipped(tmp_path):
    with stream() as (store, writer):
        store.register(STREAM, 'learner')
        made = recorder(store, tmp_path / 'set', durable=False)
        first = chunk(writer, [0])
        take(made)
        rest(made)
        for i in range(1, 5):
            last = chunk(writer, [i])
        store.ack(STREAM, 'learner', last)  # the learner is done with them, and the recorder has not read them
        last = chunk(writer, [5])
        assert last.number - first.number == 5
        rest(made)
        made.close()
    assert numbers(DataSet(tmp_path / 'set').columns([0, 1])) == [0, 5]
    assert 'skipped 4 entries that it was too slow for' in made.summary()


def test_steps_around_a_loss_are_no_neighbours(tmp_path):
    test_recorder_that_lags_counts_what_it_skipped(tmp_path)
    ids = DataSet(tmp_path / 'set').columns([0, 1])['env_data_id']
    assert ids[0] != ids[1]


def test_foreign_entries_are_skipped_and_counted(tmp_path):
    with stream() as (store, writer):
        chunk(writer, [0])
        store.append(STREAM, {'kind': 'other'}, {'x': np.zeros(3)})
        chunk(writer, [1])
        made = record(store, tmp_path / 'set', 2)
    assert numbers(DataSet(tmp_path / 'set').columns([0, 1])) == [0, 1]
    assert 'skipped 1 entries that are damaged' in made.summary()


def test_frames_that_travel_once_and_as_bytes_are_recorded_exactly(tmp_path):
    frames = torch.randint(0, 256, (12, 40, 40)).float() / 255
    steps = [
        {'obs': frames[i : i + 4].clone(), 'next_obs': frames[i + 1 : i + 5].clone(), 'action': torch.tensor([i])}
        for i in range(8)
    ]
    with stream() as (store, writer):
        last = writer.write(steps, HEADER)
        (entry,) = store.read(STREAM)
        assert set(entry.header['shared']) == {'obs', 'next_obs'}
        record(store, tmp_path / 'set', last.number)
    data = DataSet(tmp_path / 'set')
    assert data.layout.narrow == {'obs', 'next_obs'}
    for step, found in zip(steps, data.elements(range(8))):
        for name, leaf in step.items():
            assert torch.equal(found[name], leaf), name


def test_element_with_a_new_leaf_begins_a_new_segment(tmp_path):
    with stream() as (store, writer):
        writer.write([{'obs': torch.zeros(2), 'extra': None}], HEADER)
        last = writer.write([{'obs': torch.zeros(2), 'extra': torch.ones(1)}], HEADER)
        record(store, tmp_path / 'set', last.number)
    with pytest.raises(SchemaMismatch, match='segments 000000 and 000001'):
        DataSet(tmp_path / 'set')
    assert len(DataSet(tmp_path / 'set', segments=['000001'])) == 1


def test_recording_of_another_run_begins_anew(tmp_path):
    for run in ('one', 'two'):
        with open_store('memory://', run=run) as store:
            last = chunk(ChunkWriter(store, STREAM), [0, 1])
            made = Recorder(store, run, str(tmp_path / 'set'), True)
            made.record(Session(made, last.number))
    data = DataSet(tmp_path / 'set')
    assert data.begins() == [0, 2]
    assert episodes_of(data).lengths.tolist() == [2, 2]  # both runs number their episodes from 0


def test_recorder_stops_at_the_wanted_rows(tmp_path):
    with stream() as (store, writer):
        for i in range(4):
            chunk(writer, [2 * i, 2 * i + 1])
        made = recorder(store, tmp_path / 'set')
        made._writer._commit_bytes = 1
        made.record(SimpleNamespace(finished=False, figures=lambda **figures: None), 3)
    assert len(DataSet(tmp_path / 'set')) >= 3


@pytest.mark.parametrize('durable', [True, False])
def test_full_disk_ends_the_recorder_and_not_the_run(tmp_path, durable, monkeypatch):
    with stream() as (store, writer):
        chunk(writer, [0, 1])
        made = recorder(store, tmp_path / 'set', durable)
        take(made)

        def full(descriptor, data, offset):
            raise OSError(28, 'No space left on device')

        monkeypatch.setattr('os.pwrite', full)
        with pytest.raises(NotEnoughSpace, match='no room for 2 rows'):
            made.close()
        monkeypatch.undo()
        assert store.stream_info(STREAM).readers == {}


def test_data_record_of_a_run_that_does_not_run_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(['data', 'record', '--run', 'nobody', '--to', str(tmp_path / 'set')]) == 2
    assert "run 'nobody' is not running" in capsys.readouterr().err
    assert not (tmp_path / 'set').exists()


def test_data_record_command_waits_until_the_learner_reads(tmp_path, redis_server, capsys, monkeypatch):
    """The learner fixes the number of partitions, and this recorder must not do that."""
    path = str(tmp_path / 'set')
    with open_store(redis_server.url, run='divided', stream_options=STREAM_OPTIONS) as store:

        def begin(stream, text):
            monkeypatch.setattr(record_module, 'print_to', print_to)
            decide_num_partitions(store, StoreConfig(learners=LearnersConfig(partitions=3)))
            Collectors(store, 3, True, num=1).collect(0, 10)
            print_to(stream, text)

        monkeypatch.setattr(record_module, 'print_to', begin)
        agree_on_format(store)  # as the launcher does first
        where = ['--store', redis_server.url, '--run', 'divided', '--to', path]
        assert main(['data', 'record', *where, '--rows', '20']) == 0
        shown = capsys.readouterr()
        assert "waiting until the learner of run 'divided' begins to read" in shown.err
        assert 'recorded 20 rows of 3 entries' in shown.out
        assert [store.stream_info(stream_of(i, 3)).readers for i in range(3)] == [{}] * 3
    assert [len(each) for each in episodes_in(DataSet(path))] == [10, 10]


def test_data_record_command_records_until_the_run_ends(tmp_path, redis_server, capsys):
    """With the learner's and the collectors' parts played by this test."""
    where = ['--store', redis_server.url, '--run', 'recorded', '--to', str(tmp_path / 'set')]
    with open_store(redis_server.url, run='recorded', stream_options=STREAM_OPTIONS) as store:
        writer = ChunkWriter(store, STREAM)
        chunk(writer, [0, 1])
        chunk(writer, [2, 3])
        assert main(['data', 'record', *where, '--durable', '--rows', '4']) == 0
        assert f'recorded 4 rows of 2 entries into {tmp_path / "set"}; skipped nothing' in capsys.readouterr().out
        assert store.stream_info(STREAM).readers == {}
        with DataSetWriter(str(tmp_path / 'set')):  # as another recorder has it
            store.register(STREAM, reader_name(str(tmp_path / 'set')))
            assert main(['data', 'record', *where, '--durable']) == 1
            assert 'is being written already' in capsys.readouterr().err
            assert list(store.stream_info(STREAM).readers) == [reader_name(str(tmp_path / 'set'))]
        store.put(FINISH, {'reason': 'enough', 'failed': False, 'parent': None}, {}, 0)
        store.forget(STREAM, reader_name(str(tmp_path / 'set')))
        assert main(['data', 'record', *where]) == 2
        assert "run 'recorded' has ended: enough" in capsys.readouterr().err
    assert numbers(DataSet(tmp_path / 'set').columns(range(4))) == [0, 1, 2, 3]
