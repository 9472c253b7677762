"""The more members report, the less often each collector does. The learner counts them, and the others read that."""

import time

import pytest

from ding_store.config import StoreConfig
from ding_store.run import pace
from ding_store.run.members import STREAM_OPTIONS, Member
from ding_store.run.pace import PACE, Pace, interval_s
from ding_store.run.session import RunSession
from ding_store.storage import open_store

pytest.importorskip('ditk')

CONFIG = StoreConfig(heartbeat_s=1.0, peer_timeout_s=60.0)
WAIT_S = 60.0


@pytest.fixture
def store():
    with open_store('memory://', stream_options=STREAM_OPTIONS) as store:
        yield store


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(pace, 'LOOK_EVERY_S', 0.0)


def report_all(store, members):
    for member in members:
        member.report(store)


def collectors(number):
    return [Member(f'collector-{node}', 'collector', node) for node in range(number)]


@pytest.mark.parametrize(('number', 'expected'), [(1, 1.0), (50, 1.0), (100, 2.0), (1000, 20.0), (5000, 20.0)])
def test_interval_grows_with_members_below_the_peer_timeout(number, expected):
    assert interval_s(CONFIG, number) == expected


def test_interval_is_never_shorter_than_the_heartbeat():
    assert interval_s(StoreConfig(heartbeat_s=30.0, peer_timeout_s=60.0), 1000) == 30.0


@pytest.mark.usefixtures('no_pause')
def test_pace_of_a_small_run_is_not_put(store):
    learner, other = Pace(store, CONFIG, True), Pace(store, CONFIG, False)
    report_all(store, collectors(pace.FULL_PACE))
    assert (learner.interval_s(), other.interval_s()) == (1.0, 1.0)
    assert store.get(PACE) is None


@pytest.mark.usefixtures('no_pause')
def test_pace_follows_the_members_that_report(store):
    learner, other = Pace(store, CONFIG, True), Pace(store, CONFIG, False)
    many = collectors(200)
    report_all(store, many)
    assert (learner.interval_s(), other.interval_s()) == (4.0, 4.0)
    version = store.get(PACE).version
    report_all(store, many[:190])
    learner.interval_s()
    assert store.get(PACE).version == version, 'a small change is not put'
    for member in many[20:]:
        member.report(store, 'left')
    assert (learner.interval_s(), other.interval_s()) == (1.0, 1.0)


@pytest.mark.usefixtures('no_pause')
def test_lost_pace_is_put_again(store, monkeypatch):
    learner = Pace(store, CONFIG, True)
    report_all(store, collectors(200))
    learner.interval_s()
    store.delete(PACE)
    learner.interval_s()
    assert store.get(PACE) is None
    monkeypatch.setattr(pace, 'PUT_EVERY_S', 0.0)
    learner.interval_s()
    assert Pace(store, CONFIG, False).interval_s() == 4.0


@pytest.mark.usefixtures('no_pause')
@pytest.mark.parametrize('header', [{}, {'members': -1}, {'members': 'many'}])
def test_pace_of_another_program_is_ignored(store, header):
    store.put(PACE, header, {})
    assert Pace(store, CONFIG, False).interval_s() == 1.0


def within(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.usefixtures('no_pause')
def test_collector_of_a_large_run_reports_less_often(store):
    """The other roles do not, nor a collector that renews a lease. And the run's end comes at once."""
    config = StoreConfig(heartbeat_s=0.01, peer_timeout_s=3e5)  # an interval of a day
    store.put(PACE, {'members': 5 * 10**8}, {})
    sessions = [RunSession(config, store=store.another()) for _ in range(3)]
    evaluator, first, second = sessions
    try:
        evaluator.join('evaluator', 1, first_node=0)
        first.join('collector', 0)  # It has the lowest node id, and so the lease of the launch.
        second.join('collector', 2, first_node=0)
        seen = (0, 0, 0)

        def has_paused():
            nonlocal seen
            beats = tuple(session.member.beat for session in sessions)
            if beats[2] != seen[2]:
                seen = beats
            return min(beats[0] - seen[0], beats[1] - seen[1]) >= 20

        within(has_paused)
        evaluator.finish('enough')
        within(lambda: second.finished)
    finally:
        for session in reversed(sessions):
            session.close()
