"""A run's members, its end, and what the next run of its name finds; on the reference store, in threads."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from redis_server import left_by_runs

from ding_store.checkpoint import CheckpointDir
from ding_store.config import StoreConfig
from ding_store.errors import (
    AppendUnsettled,
    ConfigError,
    FormatMismatch,
    ServerFull,
    StoreTimeout,
    StoreUnavailable,
)
from ding_store.launch.status import read_status
from ding_store.metrics.figures import Figures
from ding_store.middleware.exchanger import Exchanger
from ding_store.middleware.weights import WeightsSender
from ding_store.run import ending
from ding_store.run import format as format_module
from ding_store.run import members as members_module
from ding_store.run import session as session_module
from ding_store.run.claim import claim_run
from ding_store.run.ending import CHECKPOINTS, FINISH, RETIRE, clear_ended_run
from ding_store.run.health import seen_in
from ding_store.run.lease import Lease, Owner
from ding_store.run.members import (
    STREAM,
    STREAM_OPTIONS,
    Member,
    Members,
    pid_space,
)
from ding_store.run.session import RunSession
from ding_store.run.waiting import PeerWatch
from ding_store.storage import open_store
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import eventually

pytest.importorskip('ditk')

CONFIG = StoreConfig(enable=True, heartbeat_s=0.05, wait_warn_s=0.2, peer_timeout_s=1.2)


class SideOfTest(Exchanger):
    role = 'learner'


@pytest.fixture
def store():
    with open_store('memory://', stream_options=STREAM_OPTIONS) as store:
        yield store


@pytest.fixture
def member(store):
    """``member('learner')``: a session that has joined the run."""
    sessions = []

    def make(role, node_id=0, first_node=None, joined=None, **kwargs):
        sessions.append(
            RunSession(replace(CONFIG, joined=joined), store=store.another(stream_options=STREAM_OPTIONS), **kwargs)
        )
        sessions[-1].join(role, node_id, first_node=first_node)
        return sessions[-1]

    yield make
    for session in sessions[::-1]:
        session.close()


def test_join_of_a_run_that_ends_does_not_restart_it(store, member, monkeypatch):
    monkeypatch.setattr(ending, 'wait_until_left', lambda *_: None)  # none of the members leaves here
    learner = member('learner')
    joined = store.stream_info(STREAM).epoch
    member('collector', 100, joined=joined)
    learner.finish('that is enough')
    member('collector', 101, joined=joined)  # it hears of the end
    store.retire()
    with pytest.raises(ConfigError, match='ended while this process started'):
        member('collector', 102, joined=joined)
    assert store.info().streams == {}


def test_join_during_a_memory_loss_succeeds(member):
    joined = 'of a former life'
    with pytest.raises(ConfigError, match='ended while'):
        member('collector', 100, joined=joined)
    member('learner')
    assert member('collector', 100, joined=joined).member.node_id == 100


def within(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def die(session):
    """As kill -9 leaves it: no more reports, and nothing said."""
    session._closing.set()
    session._thread.join(60)


def test_members_report_their_figures_until_they_leave(store, member):
    learner, collector = member('learner'), member('collector', 2)
    collector.figures(rows=8)
    members = Members(store)
    within(lambda: members.refresh().total('collector', 'rows') == 8)
    assert {m.role for m in members.alive()} == {'learner', 'collector'}
    collector.figures(rows=16)
    learner.finish('enough')
    within(lambda: collector.finished)
    collector.leave()
    assert [m.state for m in members.refresh().of('collector')] == ['left']
    assert members.total('collector', 'rows') == 16


def test_figures_do_not_change_in_the_middle_of_a_report(member):
    collector = member('collector', 2)
    reported = collector.member.figures
    collector.figures(rows=8)
    assert 'rows' not in reported
    assert collector.member.figures['rows'] == 8


def test_member_that_left_resends_only_forgotten_data(forgetful_server):
    with open_store(forgetful_server.url) as store:
        collector = RunSession(CONFIG, store=RedisStore(forgetful_server.url, stream_options=STREAM_OPTIONS))
        with contextlib.closing(collector):
            collector.join('collector', 2)
            collector.store.append('experience', {}, {})
            collector.leave()
            forgetful_server.restart()
            collector.store.client.own_writer.check(now=True)
            assert sorted(store.info().streams) == ['experience', 'members']
            store.retire()
            collector.store.client.own_writer.check(now=True)
            assert store.info().streams == {}


def test_late_member_of_a_retired_run_adds_nothing_to_next(forgetful_server):
    with RedisStore(forgetful_server.url) as store:
        collector = RunSession(CONFIG, store=RedisStore(forgetful_server.url, stream_options=STREAM_OPTIONS))
        with contextlib.closing(collector):
            collector.join('collector', 2)
            for _ in range(3):
                collector.store.append('experience', {}, {})
            store.put(FINISH, {'reason': 'enough', 'failed': False}, {})
            within(lambda: collector.finished)
            store.retire(last=(FINISH, RETIRE))
            within(lambda: not collector._thread.is_alive())
            store.register('experience', 'learner')
            beat = collector.member.beat
            collector.store.client.own_writer.check(now=True)
            collector.leave()
            assert collector.member.beat == beat + 1
        assert store.read('experience') == []


def test_unsettled_report_to_a_full_server_marks_it_full(member, monkeypatch):
    collector = member('collector', 2)

    def full(self, *arguments):
        raise AppendUnsettled('kept') from ServerFull('no room')

    monkeypatch.setattr(Member, 'report', full)
    within(lambda: collector.is_server_full)
    assert not collector.finished


@pytest.mark.parametrize('error', [StoreTimeout, AppendUnsettled])
def test_report_that_is_late_does_not_end_the_run(member, monkeypatch, error):
    # While the server is away, another thread of the process may hold what a report waits for; or it is not known
    # whether a server that came back at its maxmemory has it.
    collector = member('collector', 2)
    report, failures = Member.report, iter([error('busy')] * 2)

    def late(self, *arguments):
        for failure in failures:
            raise failure
        report(self, *arguments)

    monkeypatch.setattr(Member, 'report', late)
    before = collector.member.beat
    within(lambda: collector.member.beat > before + 1)
    assert not collector.finished


def test_last_report_that_is_unsettled_is_no_failure(store, member, monkeypatch):
    collector = member('collector', 2)
    report = Member.report

    def unsettled(self, *arguments):
        report(self, *arguments)
        raise AppendUnsettled('its writer sees to it')

    monkeypatch.setattr(Member, 'report', unsettled)
    collector.leave()
    assert [m.state for m in Members(store).refresh().of('collector')] == ['failed']
    learner = member('learner')
    assert not learner.finished


def test_server_at_maxmemory_does_not_end_the_run(forgetful_server, caplog):
    stores = [open_store(forgetful_server.url, stream_options=STREAM_OPTIONS) for _ in range(2)]
    learner, collector = (RunSession(CONFIG, store=store) for store in stores)
    with forgetful_server.client() as client, contextlib.closing(learner), contextlib.closing(collector):
        learner.join('learner', 0)
        collector.join('collector', 2)
        stores[0].put('progress', {'ingested': 1}, {})
        client.config_set('maxmemory', 1)
        within(lambda: learner.is_server_full and collector.is_server_full)
        assert stores[0].put('progress', {'ingested': 2}, {}) == 2, 'word of what was taken makes no more of it'
        with pytest.raises(ServerFull):
            stores[0].put('weights', {}, {'w': np.zeros(1000)})
        deadline = time.monotonic() + 2 * CONFIG.peer_timeout_s

        def news(timeout_s):
            return time.monotonic() > deadline or stores[1].get('x', 0, 0.05)

        assert collector.wait_for('news', news, 'learner')
        client.config_set('maxmemory', 0)
        before = Members(stores[1]).refresh().of('learner')[0].beat
        within(lambda: Members(stores[1]).refresh().of('learner')[0].beat > before)
        within(lambda: not learner.is_server_full)
        assert [learner.finished, collector.finished] == [False, False]
    warnings = [record for record in caplog.records if 'reports and weights are skipped' in record.message]
    assert len(warnings) == 2


def test_weights_refused_at_maxmemory_are_published_later(forgetful_server):
    """The first ones, too: a learner may be started again just then."""
    session = RunSession(CONFIG, store=open_store(forgetful_server.url, host_plane='off'))
    sender = WeightsSender(session, torch.nn.Linear(40, 40), 'main')

    def iterate():
        list(sender(SimpleNamespace(train_iter=0, total_step=0)))
        return sender.version

    with forgetful_server.client() as client, contextlib.closing(session):
        client.config_set('maxmemory', 1)
        assert [iterate(), iterate(), session.is_server_full] == [0, 0, True]
        client.config_set('maxmemory', 0)
        assert [iterate(), iterate()] == [1, 1]


@pytest.mark.parametrize('when', ['before', 'after'])
def test_at_maxmemory_members_join_and_leave(forgetful_server, when, caplog):
    learner, collector = (
        RunSession(CONFIG, store=open_store(forgetful_server.url, stream_options=STREAM_OPTIONS)) for _ in range(2)
    )
    with forgetful_server.client() as client, contextlib.closing(learner), contextlib.closing(collector):
        if when == 'before':
            client.config_set('maxmemory', 1)
        learner.join('learner', 0)
        collector.join('collector', 2)
        client.config_set('maxmemory', 1)
        learner.finish('done')
        within(lambda: collector.finished)
        collector.close()
        learner.close()
        assert not left_by_runs(client), 'the learner deletes what the run had'
        assert 'could not leave' not in caplog.text


@pytest.mark.parametrize('is_slow', [True, False])
def test_slow_connection_is_announced(monkeypatch, caplog, is_slow):
    logged = threading.Event()
    monkeypatch.setattr(session_module, 'NOTICE_AFTER_S', 0.01 if is_slow else 1e6)
    monkeypatch.setattr(
        session_module.logger, 'warning', lambda text: logged.set() if 'redis://host:1' in text else None
    )

    def connect(*arguments, **options):
        assert logged.wait(60 if is_slow else 0) == is_slow
        return open_store('memory://')

    monkeypatch.setattr(session_module, 'open_store', connect)
    with RunSession(StoreConfig(url='redis://user:secret@host:1')).store:
        pass


SLOW = """
import sys, threading
from ding_store.config import StoreConfig
from ding_store.run import session

class Errors:
    def write(self, text):
        sys.stdout.write(text)
        if 'still connecting' in text:
            written.set()

    def flush(self):
        pass

def connect(*arguments, **options):
    assert written.wait(60)

written, sys.stderr = threading.Event(), Errors()
session.NOTICE_AFTER_S, session.open_store = 0.0, connect
session.RunSession(StoreConfig(url='redis://host:1')).store
print('torch' in sys.modules)
"""


def test_slow_connection_of_a_command_imports_no_torch():
    done = subprocess.run([sys.executable, '-c', SLOW], stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ['ding_store: still connecting to redis://host:1', 'False']


def test_killed_member_is_not_reporting(store, member):
    learner = member('learner')
    members = Members(store)
    assert members.reporting('learner', 5.0).role == 'learner'
    die(learner)
    members.refresh()
    assert members.reporting('learner', 0.3) is None
    assert members.reporting('evaluator', 5.0) is None  # at once: there never was one


def test_status_names_killed_members(store):
    with subprocess.Popen(['sleep', '60']) as process:
        collector = Member('c', 'collector', 2, pid=process.pid)
        elsewhere = Member('e', 'collector', 3, pid=process.pid, pid_space='another host')
        for one in (collector, elsewhere):
            one.report(store)
        assert states(store) == {'c': 'alive', 'e': 'alive'}
        process.kill()
    assert states(store) == {'c': 'killed', 'e': 'alive'}
    collector.report(store, 'left')
    assert states(store) == {'c': 'left', 'e': 'alive'}


def states(store):
    return {member['id']: member['state'] for member in read_status(store, rate_s=0.0)['members']}


def test_report_that_cannot_be_read_hides_no_other(redis_server, caplog):
    run = f'reports-{os.getpid()}'
    with open_store(redis_server.url, run, stream_options=STREAM_OPTIONS) as store, redis_server.client() as client:
        for number in range(4):
            Member(f'{number}', 'collector', number).report(store)
        store.append('members', {'id': '4', 'colour': 'blue'}, {})
        store.append('members', {**asdict(Member('5', 'collector', 5)), 'id': []}, {})
        Member('6', 'learner', 6).report(store)
        log = f'ding:{{{run}/members/0}}:log'
        entries = client.xrange(log)
        client.delete(log)
        for redis_id, fields in entries:
            if redis_id in (entries[0][0], entries[2][0]):
                fields[b'p'] = b'no payload'
            client.xadd(log, fields, id=redis_id)
        members = Members(store)
        assert members.reporting('evaluator', 0.0) is None
        assert set(members.by_id) == {'1', '3', '6'}
        assert len([record for record in caplog.records if 'is skipped' in record.message]) == 1


def test_finish_reaches_every_member_with_the_first_reason(member):
    learner, collector = member('learner'), member('collector', 2)
    heard = []
    collector.on_finish(heard.append)
    learner.finish('converged')
    learner.finish('something else')
    within(lambda: heard == ['converged'])
    assert collector.finished


def test_late_finish_returns_that_the_run_had_failed(member):
    first, late = member('learner'), member('evaluator', 1)
    first.finish('interrupted', failed=True)
    late.finish('good enough')
    assert (late.finish_reason, late.failed) == ('interrupted', True)


def test_wait_ends_with_the_run(member):
    learner, collector = member('learner'), member('collector', 2)
    begun = threading.Event()

    def never(timeout_s):
        begun.set()
        time.sleep(min(timeout_s, 0.01))

    results = []
    thread = threading.Thread(target=lambda: results.append(collector.wait_for('what never comes', never)))
    thread.start()
    assert begun.wait(60)
    learner.finish('done')
    thread.join(60)
    assert results == [None]


def test_wait_ends_with_the_task(member):
    flag = threading.Event()
    collector = member('collector', 2, finished=flag.is_set)
    flag.set()
    assert collector.wait_for('anything', lambda timeout_s: pytest.fail('not asked any more')) is None


def test_wait_for_a_dead_learner_ends_with_its_name(member):
    learner, collector = member('learner'), member('collector', 2)
    die(learner)
    begin = time.monotonic()
    with pytest.raises(StoreTimeout, match=r'learner \(node 0, pid \d+ on .*is silent and was not started again'):
        collector.wait_for('chunks', lambda timeout_s: time.sleep(0.02), 'learner')
    assert time.monotonic() - begin >= collector.waited_s >= CONFIG.peer_timeout_s


def test_wait_names_the_learner_that_was_started_last(store, member):
    learner = member('learner')
    die(learner)
    learner._release_leases()
    die(member('learner', 7))
    peers = PeerWatch(store, 'learner', 60.0, lambda: True, lambda: False)
    peers.look()
    assert 'learner (node 7, pid' in peers.look()


def test_wait_names_the_collector_that_joined_last(store, member):
    learner = member('learner')
    first, second = Member('first', 'collector', 1, pid=111), Member('second', 'collector', 2, pid=222)
    for each in (first, first, first, second):
        each.report(store)
    peers = PeerWatch(learner.store, 'collector', 60.0, lambda: True, lambda: False)
    peers.look()
    assert 'collector (node 2, pid 222 on' in peers.look()


def refuse(*arguments, **options):
    raise StoreUnavailable('the disk is full')


def test_peers_are_not_silent_while_own_reports_fail(member, monkeypatch):
    """As where the server's disk is full: it can be read, and refuses all reports."""
    learner, collector = member('learner'), member('collector', 2)
    timeout_s, is_full = collector.config.peer_timeout_s, lambda: collector.is_server_full
    peers = PeerWatch(collector.store, 'learner', timeout_s, lambda: collector.has_reported, is_full)
    die(learner)
    die(collector)  # its thread, which would report it
    peers.look()
    with monkeypatch.context() as patch, contextlib.suppress(StoreUnavailable):
        patch.setattr(collector.store, 'append', refuse)
        collector._report_member()
    monkeypatch.setattr(peers, '_moved_at', -1e6)
    assert 'takes no reports' in peers.look()
    collector._report_member()
    assert 'has gone silent' in peers.look()
    monkeypatch.setattr(peers, '_moved_at', -1e6)
    with pytest.raises(StoreTimeout, match='is silent'):
        peers.look()


def test_learner_that_returns_ends_the_countdown(member):
    learner, collector = member('learner'), member('collector', 2)
    die(learner)
    again = []

    def attempt(timeout_s):
        time.sleep(0.02)
        if not again:
            again.append(member('learner'))
        return True if time.monotonic() - begin > 2 * CONFIG.peer_timeout_s else None

    begin = time.monotonic()
    assert collector.wait_for('chunks', attempt, 'learner') is True


def test_checkpoints_of_a_finished_run_are_not_resumed(store, tmp_path):
    """Its learner was killed before it could say so in their directory: rows and model begin afresh together."""
    directory, other = (CheckpointDir(str(tmp_path / name)) for name in ('ours', 'other'))
    for each in (directory, other):
        each.begin()
    run = directory.run
    for failed, where, whose in ((True, directory, run), (False, other, run), (False, directory, run)):
        store.put(CHECKPOINTS, {'path': where.path, 'run': whose, 'max_restarts': 5}, {})
        store.put(FINISH, {'reason': 'it is good enough', 'failed': failed}, {})
        assert directory.run is not None
        clear_ended_run(store, CONFIG)
    assert directory.run is None
    assert other.run is not None


def test_leaving_learner_ends_the_run_as_failed(store, member):
    member('learner').leave()
    value = store.get(FINISH)
    assert value.header['failed'] is True
    assert 'learner' in value.header['reason']


@pytest.mark.parametrize(('error', 'failed'), [(None, False), (SystemExit(0), False), (OSError('the log'), True)])
def test_learner_failing_after_its_task_finished_has_failed(store, member, monkeypatch, error, failed):
    """Its checkpoints are then to be resumed, with what is left of the run."""
    task, seen = pytest.importorskip('ding.framework').task, []
    with contextlib.suppress(OSError, SystemExit), task.start():
        monkeypatch.setattr(task.router, 'node_id', 0)
        learner = member('learner', finished=lambda: task.finish)
        SideOfTest(learner, 0)
        learner.before_leaving.append(seen.append)
        task.finish = True
        if error:
            raise error
    learner.leave()
    assert seen == [failed]
    assert store.get(FINISH).header['failed'] is failed


def test_learner_retires_a_run_that_ended_in_order(store, member):
    learner, collector = member('learner'), member('collector', 2)
    store.append('experience', {}, {})
    store.put('weights/main', {}, {})
    store.add('collectors', 1)
    learner.finish('converged')
    within(lambda: collector.finished)
    collector.close()
    learner.close()
    info = store.info()
    assert (info.streams, info.values, info.counters) == ({}, {}, {})


def test_next_run_clears_a_finished_run_and_keeps_a_failed_one(store):
    for failed in (False, True):
        store.append('experience', {}, {})
        store.put(FINISH, {'reason': 'r', 'failed': failed}, {})
        clear_ended_run(store, CONFIG)
        assert store.get(FINISH) is None
        assert store.get(RETIRE) is None
        assert ('experience' in store.info().streams) is failed


def test_many_members_of_the_next_run_clear_it_once(store):
    store.append('experience', {}, {})
    store.put(FINISH, {'reason': 'r', 'failed': False}, {})
    threads = [threading.Thread(target=clear_ended_run, args=(store.another(), CONFIG)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not [thread for thread in threads if thread.is_alive()]
    assert store.info().streams == {}


@pytest.mark.parametrize('failed', [False, True])
def test_process_killed_while_clearing_a_run_is_replaced(store, caplog, failed):
    store.append('experience', {}, {})
    store.put(FINISH, {'reason': 'r', 'failed': failed}, {})
    gone = Owner('gone', 'another space', 1, '1', 'host')
    assert Lease(store, RETIRE, gone, 'a process', 0.2).acquire() is None
    begin = time.monotonic()
    threads = [threading.Thread(target=clear_ended_run, args=(store.another(), CONFIG), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not [thread for thread in threads if thread.is_alive()]
    assert time.monotonic() - begin >= 0.2
    assert store.get(FINISH) is store.get(RETIRE) is None
    assert ('experience' in store.info().streams) is failed
    assert "clearing run 'default' is gone" in caplog.text


def other_lease(store, name, pid):
    """A lease of another process, which is starting."""
    owner = Owner.first_process(f'{pid_space()} {pid}')
    return Lease(store.another(), name, owner, f'a job that starts there ({owner.place})', 1.0, is_starting=True)


def test_second_living_learner_of_another_launch_is_refused(store, member):
    with subprocess.Popen(['sleep', '60']) as process:
        assert other_lease(store, 'role/learner', process.pid).acquire() is None
        with pytest.raises(ConfigError, match=rf'pid {process.pid} on .*--run NAME.*ding-store status'):
            member('learner')
        member('collector', 2)  # may come from anywhere
        process.kill()
    member('learner')


def test_second_of_two_launches_that_claim_at_once_is_refused(store, monkeypatch):
    with subprocess.Popen(['sleep', '60']) as process:

        def late(*claim):
            monkeypatch.undo()
            assert other_lease(store, 'launch/0', process.pid).acquire() is None  # behind our look
            return store.decide(*claim)

        monkeypatch.setattr(store, 'decide', late)
        try:
            with pytest.raises(ConfigError, match=f'starts there .pid {process.pid}'):
                claim_run(store, 0, 1.0, {})
        finally:
            process.kill()


def test_workers_of_a_second_job_are_refused_without_a_learner(store, member):
    with subprocess.Popen(['sleep', '60']) as process:
        assert other_lease(store, 'launch/0', process.pid).acquire() is None
        with pytest.raises(ConfigError, match=f'starts there .pid {process.pid}'):
            member('collector', 2, first_node=0)
        member('collector', 9, first_node=9)  # workers of further nodes of that job
        process.kill()
    member('collector', 2, first_node=0)


@pytest.mark.parametrize('has_failed', [True, False])
def test_run_left_by_one_script_is_refused_to_another(store, monkeypatch, has_failed):
    """Failed, or killed."""
    with subprocess.Popen(['sleep', '60']) as process:
        gone = {'owner': 'gone', 'pid': process.pid, 'birth': '1', 'is_released': False}
        process.kill()

    def start(*argv, **left):
        monkeypatch.setattr(sys, 'argv', list(argv))
        session = RunSession(CONFIG, store=store.another(stream_options=STREAM_OPTIONS))
        with contextlib.closing(session):
            session.join('learner', 0)
        store.delete(FINISH)
        held = store.get('launch/0')
        store.put('launch/0', {**held.header, **gone}, {}, held.version)
        for name in left:
            store.append(name, {}, {})
        if has_failed:
            store.put(FINISH, {'reason': 'r', 'failed': True}, {})

    start('/a/pong.py', '--config', 'z')
    start('/a/qbert.py', experience=True)  # there was nothing yet to go on with
    start('/a/qbert.py', '--config', 'x')  # z was the other's
    start('/b/qbert.py', '--seed', '1')
    for argv in (['/a/pong.py'], ['/a/qbert.py', '--config=y']):
        with pytest.raises(ConfigError, match=r'was of qbert --config x, .* this is (pong|qbert --config y)\.'):
            start(*argv)
        assert (store.get(FINISH) is not None) is has_failed, 'whose end is not forgotten'
    start('/usr/bin/ditask')  # which nobody knows, and so forgets nothing
    with pytest.raises(ConfigError, match='was of qbert'):
        start('pong.py')
    start('/a/qbert.py', '--config', 'x')


def test_two_learners_of_one_launch_are_accepted(member):
    one, other = member('learner', 0), member('learner', 1)
    for each in (one, other):
        beat = each.member.beat
        within(lambda: each.member.beat > beat + 2)  # noqa: B023 - called at once
    assert not one.finished
    assert not other.finished


def test_job_elsewhere_is_refused_while_it_renews(store, member):
    owner, stop = Owner('other', 'another space', 1, '1', 'far'), threading.Event()
    other = Lease(store.another(), 'role/learner', owner, 'the learner on far', 0.2)
    assert other.acquire() is None

    def renew():
        while not stop.wait(0.02):
            other.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(ConfigError, match='has a learner already: the learner on far'):
            member('learner')
        assert store.get('launch/0').header['is_released']
    finally:
        stop.set()
        thread.join(60)
    member('learner')


def test_member_renews_its_leases_and_releases_them(store, member):
    learner = member('learner', 0)
    for name in ('launch/0', 'role/learner'):
        within(lambda: store.get(name).header['beat'] > 1)  # noqa: B023 - called at once
        header = store.get(name).header
        assert (header['title'], header['is_starting']) == (learner.member.title, False)
    learner.leave(failed=True)
    assert store.get('launch/0').header['is_released']
    assert store.get('role/learner').header['is_released']


def test_lease_lost_by_the_server_is_put_again(store, member):
    learner = member('learner', 0)
    within(lambda: store.get('launch/0').header['beat'] > 0)
    store.lose_memory()
    within(lambda: store.get('launch/0') is not None)
    assert store.get('launch/0').header['token'] == 1
    assert not learner.finished


def test_job_whose_run_was_taken_over_leaves_as_failed(store, member):
    learner = member('learner', 0)
    store.append('experience', {}, {})
    within(lambda: store.get('launch/0').header['beat'] > 0)
    store.put('launch/0', {**store.get('launch/0').header, 'owner': 'other', 'title': 'the other job'}, {})
    within(lambda: learner.finished)
    assert 'the other job has taken' in learner.finish_reason
    learner.close()
    assert [member.state for member in Members(store).refresh().of('learner')] == ['failed']
    assert store.get(FINISH) is None, 'the run is of the other job'
    assert store.stream_info('experience').last == 1


def test_end_lost_by_the_server_is_put_again(store, member):
    learner = member('learner', 0)
    learner.finish('that is enough')
    store.lose_memory()
    within(lambda: store.get(FINISH) is not None)
    assert store.get(FINISH).header['reason'] == 'that is enough'


def test_end_and_leases_survive_a_restart_without_memory(forgetful_server):
    config = replace(CONFIG, url=forgetful_server.url, run='restarted')
    with (
        contextlib.closing(RunSession(config)) as learner,
        contextlib.closing(RunSession(config)) as collector,
        open_store(config.url, config.run) as other,
    ):
        learner.join('learner', 0)
        collector.join('collector', 1)
        forgetful_server.restart()
        within(lambda: other.get('launch/0') is not None)
        assert other.get('launch/0').header['title'] == learner.member.title
        learner.finish('that is enough')
        forgetful_server.restart()
        within(lambda: other.get(FINISH) is not None)
        within(lambda: collector.finished)
    assert collector.finish_reason == 'that is enough'


def test_members_that_left_are_removed_and_their_figures_stay(store, monkeypatch):
    """Collectors come and go, in order or killed, while the learner and one collector stay."""
    monkeypatch.setattr(members_module, 'MAX_DEPARTED', 5)
    followed, whole = Members(store), Members(store)
    learner, stays = Member('learner', 'learner', 0), Member('stays', 'collector', 1)
    for number in range(60):
        passing = Member(f'passes{number}', 'collector', 2 + number)
        passing.figures = {'rows': 10, 'env_step': 1, 'began_s': float(60 - number), 'policy_versions': {'main': 3}}
        passing.report(store)
        if number % 2:
            passing.report(store, 'left')
        for member in (learner, stays) * 6:
            member.figures = {'rows': number}
            member.report(store)
        assert len(followed.refresh().by_id) <= 2 * 5 + 6
    monkeypatch.setattr(members_module, 'MAX_DEPARTED', 1000)
    assert len(whole.refresh().by_id) == 62
    assert Figures.of(followed) == Figures.of(whole)
    assert Figures.of(whole).began_s == 1.0
    assert {learner.id, stays.id, 'passes59'} <= followed.by_id.keys()
    assert followed.policy_lag('main', 3) == 0


class TestFormat:
    def test_run_begun_by_another_version_refuses_this_one(self, store, member, monkeypatch):
        member('collector', 2)
        monkeypatch.setattr(format_module, 'FORMAT', format_module.FORMAT + 1)
        with pytest.raises(FormatMismatch, match=r"run 'default' has format 1, .* format 2\. Install the same version"):
            member('learner')
        assert store.get('role/learner') is None, 'a refused process claims nothing'

    def test_failed_run_keeps_its_format(self, store, member, monkeypatch):
        first = member('learner')
        first.leave(failed=True)
        first.close()
        monkeypatch.setattr(format_module, 'FORMAT', format_module.FORMAT + 1)
        with pytest.raises(FormatMismatch):
            member('learner')
        assert store.get(FINISH).header['failed'], 'a refused process changes nothing'

    def test_run_that_ended_in_order_frees_its_format(self, store, member, monkeypatch):
        first = member('learner')
        first.finish('that is enough')
        first.close()
        monkeypatch.setattr(format_module, 'FORMAT', format_module.FORMAT + 1)
        member('learner')

    def test_server_without_memory_gets_the_format_again(self, store, member):
        member('learner')
        store.lose_memory()
        eventually(lambda: store.get(format_module.VALUE) is not None, 'the member puts it again')

    def test_format_put_by_another_program_is_replaced(self, store, member):
        store.put(format_module.VALUE, {'number': 'five'}, {})
        member('learner')
        assert store.get(format_module.VALUE).header['number'] == format_module.FORMAT


def test_learners_of_one_host_have_a_health_file_each(store, tmp_path):
    sessions = []
    for rank in (0, 1):
        config = replace(CONFIG, health=str(tmp_path), num_learners=2, rank=rank)
        sessions.append(RunSession(config, store=store.another(stream_options=STREAM_OPTIONS)))
        sessions[-1].join('learner', 0)
        sessions[-1].show_health()
    assert [each.name for each in seen_in(str(tmp_path))] == ['learner-0', 'learner-1']
    for session in sessions:
        session.close()
