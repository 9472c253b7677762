"""``ding-store reshard``: a stopped run's replay and unread experience, distributed over another number of learners."""

import json
import os

import numpy as np
import pytest
import torch

pytest.importorskip('ding')

from learners import HEADER, step  # noqa: E402

from ding_store.buffer import Prioritized, StoreBuffer  # noqa: E402
from ding_store.checkpoint import CheckpointDir  # noqa: E402
from ding_store.cli import main  # noqa: E402
from ding_store.config import LearnersConfig, StoreConfig  # noqa: E402
from ding_store.errors import ConfigError  # noqa: E402
from ding_store.launch import reshard as reshard_module  # noqa: E402
from ding_store.middleware.backpressure import coarse  # noqa: E402
from ding_store.middleware.chunks import ChunkWriter  # noqa: E402
from ding_store.middleware.consumer_offset import OTHERS, ConsumerOffset, offsets_in  # noqa: E402
from ding_store.middleware.partitions import (  # noqa: E402
    check_replay_path,
    own_partitions,
    progress_name_of,
)
from ding_store.run.several_learners import (  # noqa: E402
    PARTITIONS,
    decide_num_learners,
    decide_num_partitions,
    num_learners_of,
    num_partitions_of,
    replay_of,
    stream_of,
)
from ding_store.storage import open_store  # noqa: E402
from ding_store.storage.exactly_once.reader import Reader  # noqa: E402

pytestmark = pytest.mark.timeout(120)

SIZE = 120  # of all tables together
ROWS, UNREAD, EPISODE = 20, 6, 5  # rows in a table of each partition, rows of each unread entry, steps of an episode


def layout(num, partitions):
    return StoreConfig(num_learners=num, learners=LearnersConfig(partitions=partitions))


class StoppedRun:
    """The replays of some learners, and a server with one unread entry in each partition."""

    def __init__(self, url, run, directory, num, has_priorities=False, partitions=None, ragged=()):
        self.url, self.run, self.directory = url, run, str(directory)
        partitions = partitions or num
        self.sampler = Prioritized if has_priorities else lambda: None
        checkpoints = CheckpointDir(self.directory)
        checkpoints.begin()
        number = 0
        with open_store(url, run) as store:
            decide_num_learners(store, num)
            if partitions != num:
                decide_num_partitions(store, layout(num, partitions))
            for rank in range(num):
                os.makedirs(os.path.dirname(self.path(rank, num)), exist_ok=True)
                path = self.path(rank, num)
                buffer_ = StoreBuffer(SIZE // num, path=path, sampler=self.sampler(), ragged=ragged)
                offsets = {}
                for partition in own_partitions(rank, num, partitions):
                    stream, offset = stream_of(partition, partitions), ConsumerOffset()
                    offsets[stream] = offset
                    writer = ChunkWriter(store, stream)
                    writer.ragged = ragged
                    varying = [{name: torch.ones(i % 3, 2) for name in ragged} for i in range(ROWS + UNREAD)]
                    rows = [step(number + i, (number + i) // EPISODE, **more) for i, more in enumerate(varying)]
                    number += len(rows)
                    reader = Reader(store, stream, 'learner')
                    for part in (rows[:ROWS], rows[ROWS:]):
                        writer.write(part, dict(HEADER, env_step=7, env_episode=1), timeout_s=5.0)
                    (entry,) = reader.read(1)
                    offset.take(entry)
                    priority = np.arange(1.0, ROWS + 1) if has_priorities else None
                    buffer_.extend_elements(rows[:ROWS], priority=priority)
                first, *others = [{**offset.state(), 'run': checkpoints.run} for offset in offsets.values()]
                buffer_.commit({**first, OTHERS: dict(zip(list(offsets)[1:], others))} if others else first)
                buffer_.close()
        self.num_rows = number

    def path(self, rank, num):
        return replay_of(os.path.join(self.directory, 'replay'), rank, num)

    def reshard(self, num, *options):
        words = [self.directory, '--store', self.url, '--run', self.run, '--learners', str(num)]
        return main(['reshard', *words, *options])

    def check(self, num, partitions=None):
        """Check that all rows are there once, in tables or unread, and that the counts have not changed."""
        seen, notes, steps, place_of, num_entries = [], [], [], {}, set()
        partitions = partitions or num
        with open_store(self.url, self.run) as store:
            assert num_learners_of(store) == num
            assert num_partitions_of(store) == (partitions if partitions > 1 else None)
            for rank in range(num):
                check_replay_path(self.path(rank, num), StoreConfig(num_learners=num, rank=rank))
                buffer_ = StoreBuffer(SIZE // num, path=self.path(rank, num), sampler=self.sampler())
                items = list(buffer_.storage)
                notes.append(buffer_.committed)
                if buffer_.sampler.priorities is not None:
                    rows = buffer_.table.rows_by_age()
                    found = buffer_.sampler.priorities.of(rows)
                    expected = [int(item.data.time) % (ROWS + UNREAD) + 1 for item in items]
                    assert np.allclose(found, expected, rtol=1e-6)
                buffer_.close()
                times = [int(item.data.time) for item in items]
                by_episode = {}
                for item in items:
                    episode = int(item.data.env_data_id)
                    by_episode.setdefault(episode, []).append(int(item.data.time))
                    assert place_of.setdefault(episode, rank) == rank
                assert all(several == sorted(several) for several in by_episode.values())
                offsets = offsets_in(notes[-1])
                for partition, offset in zip(own_partitions(rank, num, partitions), offsets):
                    reader = Reader(store, stream_of(partition, partitions), 'learner', marks=offset['marks'])
                    entries = reader.read(64)
                    num_entries.add(len(entries))
                    times += [int(number) for each in entries if each.header['rows'] for number in each.arrays['time']]
                    steps.append(offset['env_step'] + sum(each.header['env_step'] for each in entries))
                seen += times
        assert sorted(seen) == list(range(self.num_rows))
        assert steps == [14] * partitions
        assert len(num_entries) == 1, 'learners take one entry of each partition at a time'
        rows = [offset['rows'] for note in notes for offset in offsets_in(note)]
        assert sum(rows) == self.num_rows // (ROWS + UNREAD) * ROWS


@pytest.mark.parametrize(('found', 'num'), [(2, 1), (1, 2), (2, 3)])
def test_reshard_moves_all_rows_and_unread_entries(tmp_path, redis_server, capsys, found, num):
    stopped = StoppedRun(redis_server.url, f'reshard-{found}-{num}', tmp_path, found)
    assert stopped.reshard(num) == 0
    assert f'Go on with --roles learner={num} and store.learners.partitions={num}' in capsys.readouterr().out
    stopped.check(num)
    assert stopped.reshard(num) == 0
    assert f'is distributed over {num} learner{"s" * (num > 1)} already' in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ['lock', 'replay', 'run.json']


@pytest.mark.parametrize(('found', 'new'), [((2, 4), (1, 3)), ((1, 1), (1, 2)), ((2, 2), (2, 4))])
def test_reshard_changes_the_number_of_partitions(tmp_path, redis_server, capsys, found, new):
    num, partitions = new
    stopped = StoppedRun(
        redis_server.url, f'reshard-{found[1]}-{num}-{partitions}', tmp_path, found[0], partitions=found[1]
    )
    assert stopped.reshard(num, '--partitions', str(partitions)) == 0
    stopped.check(num, partitions)
    assert stopped.reshard(num, '--partitions', str(partitions)) == 0
    assert f'with {partitions} partitions already' in capsys.readouterr().out
    assert stopped.reshard(2, '--partitions', '3') == 2
    assert 'must be a multiple of --learners 2' in capsys.readouterr().err


def test_new_partitions_are_refused_until_reshard(tmp_path, redis_server):
    """The run has one partition, whose unread entries nothing would read."""
    stopped = StoppedRun(redis_server.url, 'reshard-first', tmp_path, 1)
    with open_store(stopped.url, stopped.run) as store:
        with pytest.raises(ConfigError, match=r'in 1 partition, .* partitions to 1 .* --learners 1 --partitions 4'):
            decide_num_partitions(store, layout(1, 4))
    stopped.check(1)
    assert stopped.reshard(1, '--partitions', '4') == 0
    stopped.check(1, 4)


@pytest.mark.parametrize('new', [1, 4])
def test_reshard_after_a_failed_start_trusts_the_tables(tmp_path, redis_server, capsys, new):
    stopped = StoppedRun(redis_server.url, f'reshard-failed-{new}', tmp_path, 1)
    with open_store(stopped.url, stopped.run) as store:
        store.decide(PARTITIONS, {'num': 4}, 0)
    assert stopped.reshard(1, '--partitions', str(new)) == 0
    stopped.check(1, new)


def test_reshard_of_the_replay_of_another_run_is_refused(tmp_path, redis_server, capsys):
    stopped = StoppedRun(redis_server.url, 'reshard-other', tmp_path, 1)
    with open_store(stopped.url, stopped.run) as store:
        store.decide(PARTITIONS, {'num': 2}, 0)
        store.append(stream_of(0, 2), {}, {})
    assert stopped.reshard(1) == 2
    assert 'has experience in 2 partitions, and the replay' in capsys.readouterr().err


def test_reshard_over_the_rests_of_a_killed_one_succeeds(tmp_path, redis_server):
    stopped = StoppedRun(redis_server.url, 'reshard-rests', tmp_path, 1)
    assert stopped.reshard(2) == 0
    old = tmp_path / 'replay.reshard-old'
    old.mkdir()
    (old / 'header').write_bytes(b'the replay of one learner')
    assert stopped.reshard(3) == 0
    stopped.check(3)
    assert not old.exists()


def test_reshard_removes_the_progress_of_all_partitions(tmp_path, redis_server):
    stopped = StoppedRun(redis_server.url, 'reshard-progress', tmp_path, 2)
    names = [progress_name_of(rank, num) for num in (1, 2) for rank in range(num)]
    with open_store(stopped.url, stopped.run) as store:
        for name in names:
            store.put(name, {}, {})
            store.put(coarse(name), {}, {})
        assert stopped.reshard(1) == 0
        assert [name for name in store.info().values if 'progress' in name] == []


@pytest.mark.parametrize('ragged', [(), ('units',)])
def test_reshard_keeps_priorities(tmp_path, redis_server, ragged):
    run = f'reshard-priorities-{len(ragged)}'
    stopped = StoppedRun(redis_server.url, run, tmp_path, 1, has_priorities=True, ragged=ragged)
    assert stopped.reshard(2) == 0
    stopped.check(2)


class Killed(BaseException):
    """Stands for the death of the command."""


def test_reshard_that_is_killed_goes_on_when_run_again(tmp_path, redis_server, monkeypatch):
    steps = [(reshard_module.os, name) for name in ('rename', 'unlink')]
    steps += [(reshard_module.shutil, 'rmtree'), (reshard_module.json, 'load'), (reshard_module, 'sync_directory')]
    steps += [(reshard_module, 'decide_num_learners'), (reshard_module, '_saved')]
    num_kills = 0
    for kill_at in range(1, 40):
        calls = []

        def dying(call, calls=calls, kill_at=kill_at):
            def called(*arguments, **options):
                calls.append(call)
                if len(calls) == kill_at:
                    raise Killed
                return call(*arguments, **options)

            return called

        stopped = StoppedRun(redis_server.url, f'reshard-killed-{kill_at}', tmp_path / str(kill_at), 2)
        with monkeypatch.context() as patched:
            for where, name in steps:
                patched.setattr(where, name, dying(getattr(where, name)))
            try:
                assert stopped.reshard(1) == 0
            except Killed:
                num_kills += 1  # and another process runs the command again
        assert stopped.reshard(1) == 0
        stopped.check(1)
        assert sorted(os.listdir(stopped.directory)) == ['lock', 'replay', 'run.json']
        if len(calls) < kill_at:
            break
    assert num_kills > 8


def test_reshard_of_another_number_is_refused_meanwhile(tmp_path, redis_server, capsys):
    stopped = StoppedRun(redis_server.url, 'reshard-meanwhile', tmp_path, 2)
    work = tmp_path / 'replay.reshard'
    work.mkdir()
    (work / 'ready').write_text(json.dumps(dict(found=2, num=1)))
    assert stopped.reshard(3) == 2
    assert 'Complete that first: --learners 1' in capsys.readouterr().err
    (work / 'ready').write_text(json.dumps(dict(found=2, num=1, partitions=[2, 3])))
    with pytest.raises(ConfigError, match='was interrupted. Run it again: .* --learners 1 --partitions 3'):
        check_replay_path(stopped.path(0, 2), StoreConfig(num_learners=2))


def test_reshard_without_a_run_is_refused(tmp_path, redis_server, capsys):
    words = [str(tmp_path), '--store', redis_server.url, '--learners', '2']
    assert main(['reshard', *words]) == 2
    assert 'has no run that could resume' in capsys.readouterr().err
