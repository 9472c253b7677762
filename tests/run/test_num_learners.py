"""The number of a run's learners is fixed while it has experience that is distributed over them."""

from pathlib import Path

import pytest

from ding_store.config import LearnersConfig, StoreConfig
from ding_store.errors import ConfigError
from ding_store.run import session as session_module
from ding_store.run.members import STREAM_OPTIONS
from ding_store.run.session import RunSession
from ding_store.run.several_learners import (
    LEARNERS,
    check_num_learners,
    decide_num_learners,
    decide_num_partitions,
    num_learners_of,
    num_partitions_of,
)
from ding_store.storage import open_store
from ding_store.storage.testing import eventually


def test_run_with_one_learner_puts_no_value():
    with open_store('memory://') as store:
        check_num_learners(store, 1)
        decide_num_learners(store, 1)
        assert num_learners_of(store) == 1
        assert LEARNERS not in store.info().values


def test_run_with_several_learners_keeps_their_number():
    with open_store('memory://', run='r') as store:
        check_num_learners(store, 3)
        decide_num_learners(store, 3)
        decide_num_learners(store, 3)
        assert num_learners_of(store) == 3
        for other in (1, 2):
            with pytest.raises(ConfigError, match='has the experience of 3 learners, and this command has learner='):
                check_num_learners(store, other)
        with pytest.raises(ConfigError, match='Use learner=3 to continue it'):
            decide_num_learners(store, 2)


def test_experience_of_one_learner_is_refused_to_several():
    with open_store('memory://', run='r') as store:
        store.append('experience', {}, {})
        check_num_learners(store, 1)
        with pytest.raises(ConfigError, match='has the experience of 1 learner, and this command has learner=2'):
            check_num_learners(store, 2)


def test_value_of_another_program_is_no_number_of_learners():
    with open_store('memory://') as store:
        store.put(LEARNERS, {'num': 'many'}, {})
        assert num_learners_of(store) == 1


SIX = StoreConfig(learners=LearnersConfig(partitions=6), heartbeat_s=0.05)


@pytest.fixture
def store():
    with open_store('memory://', run='r', stream_options=STREAM_OPTIONS) as store:
        yield store


@pytest.fixture
def session_of(store):
    """``session_of(config)``: a session of a process that has not joined the run yet."""
    sessions = []

    def make(config):
        sessions.append(RunSession(config, store=store.another(stream_options=STREAM_OPTIONS)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


@pytest.mark.parametrize(('fix', 'expected'), [(lambda s: decide_num_partitions(s, SIX), 6), (None, 1)])
def test_process_that_joins_before_the_learner_waits_for_it(store, session_of, monkeypatch, fix, expected):
    monkeypatch.setattr(session_module, 'ON_JOIN', [RunSession.wait_for_partitions])
    collector = session_of(StoreConfig())
    begin_to_read = lambda s: s.register('experience', 'learner')  # noqa: E731 - as the learner of one partition
    collector.while_waiting.append(lambda: (fix or begin_to_read)(store))
    collector.join('collector', 1)
    assert collector.num_partitions == expected


def test_learner_upholds_the_partitions_that_another_decided(store, session_of):
    with store.another() as collector:
        decide_num_partitions(collector, SIX)
    learner = session_of(SIX)
    learner.join('learner', 0)
    assert learner.num_partitions == 6
    store.lose_memory()
    eventually(lambda: num_partitions_of(store) == 6, 'the learner decides it again')


def test_replay_of_a_worker_that_joined_is_outside_of_the_others(tmp_path):
    def path(rank, num):
        config = StoreConfig(buffer_path=f'{tmp_path}/replay/', rank=rank, num_learners=num)
        return Path(RunSession(config).replay_path)

    for num in (1, 2):
        paths = [path(rank, num) for rank in (*range(num), 100, 101)]
        assert len(set(paths)) == len(paths)
        assert not [one for one in paths for other in paths if other in one.parents]
