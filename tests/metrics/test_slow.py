"""Why a run is slow: each answer is provoked by the reports of a run that has this fault."""

import io
import json
import re
import socket
import time

import pytest
from redis_server import RedisServer
from rich.console import Console

from ding_store import cli
from ding_store.launch.status import Look
from ding_store.metrics.screen import screen
from ding_store.metrics.slow import Answer, why_slow
from ding_store.run.members import STREAM_OPTIONS, Member
from ding_store.run.time_spent import TimeSpent
from ding_store.storage import open_store

#: Seconds of each part in the ten seconds between two looks, of a run in which all is well.
LEARNER = dict(wait_experience=1.0, ingest=0.2, sample=0.5, train=7.5, publish=0.3)
COLLECTOR = dict(wait_learner=1.0, wait_weights=0.0, append=0.2)
FIGURES = dict(max_lead=2, max_pending_bytes=1000, prefetch=0)


@pytest.fixture
def store():
    with open_store('memory://', run='pong', stream_options=STREAM_OPTIONS) as store:
        yield store


def report(store, role, parts, up_s, share, node_id=0, state='alive', **figures):
    seconds = {f'{part}_s': share * value for part, value in parts.items()}
    own = {'up_s': up_s, 'at_s': time.time(), **seconds, **figures}
    Member(f'{role}-{node_id}', role, node_id, figures=own).report(store, state, 'as told' if state != 'alive' else '')


def answers(store, learner=None, collector=None, collectors=1, **figures):
    """Name of an answer -> the answer, of a run whose parts took these seconds between two looks."""
    look = Look(store)
    for up_s, share in ((100.0, 0.0), (110.0, 1.0)):
        report(store, 'learner', {**LEARNER, **(learner or {})}, up_s, share, **{**FIGURES, **figures})
        for node_id in range(2, 2 + collectors):
            report(store, 'collector', {**COLLECTOR, **(collector or {})}, up_s, share, node_id)
        status = look.read(0.0)
    return {answer.name: answer for answer in why_slow(status)}


def test_run_in_which_all_is_well_needs_no_fix(store):
    store.append('experience', {}, {})
    found = answers(store, sampled=10)
    assert [name for name, answer in found.items() if answer.fix] == []
    assert found['learner'].found.startswith('waits for experience 10%')
    assert 'trains 75%' in found['learner'].found
    assert 'environments and policy 88%' in found['collectors'].found
    assert 'of 1 kB' in found['stream'].found


STARVED = dict(wait_experience=7.0, train=2.0)
RATIO = dict(samples_per_insert=8.0, sampled=790, rows=100)


@pytest.mark.parametrize(
    ('name', 'fix', 'fault'),
    [
        ('starved', 'ding-store join', dict(learner=STARVED)),
        ('starved', 'add one', dict(learner=STARVED, collectors=0)),
        ('starved', '--set max_lead=4 .now 2', dict(learner=STARVED, collector=dict(wait_learner=6.0))),
        ('starved', 'stale_toleration', dict(learner=STARVED, collector=dict(wait_weights=6.0))),
        ('starved', 'network', dict(learner=STARVED, collector=dict(append=6.0))),
        ('samples', '--set prefetch=2', dict(learner=dict(sample=5.0, train=3.0))),
        ('samples', 'raise store.prefetch .now 2', dict(learner=dict(sample=5.0, train=3.0), prefetch=2)),
        ('ingest', 'middleware', dict(learner=dict(ingest=5.0, train=3.0))),
        ('weights', 'weights_dtype', dict(learner=dict(publish=3.0, train=5.0))),
        ('rest', 'profile', dict(learner=dict(train=2.0))),
        ('checkpoints', 'max_overhead', dict(checkpoint_overhead=0.08)),
        ('checkpoints', 'max_overhead', dict(learner=dict(checkpoint=4.0, train=3.0))),
        ('pace', 'train_ratio=free', dict(collector=dict(wait_learner=8.0))),
        ('lost', 'Redis keeps its data', dict(lost=3)),
        ('corrupt', 'memory', dict(corrupt=3)),
        ('starved', 'environments faster', dict(learner=STARVED, collector=dict(environment=8.0))),
        ('starved', 'raise store.samples_per_insert .now 8', dict(learner=STARVED, **RATIO)),
        ('starved', 'min_size_to_sample', dict(learner=STARVED, min_size_to_sample=500, replay_rows=80)),
        ('ratio', 'raise store.samples_per_insert', dict(learner=dict(wait_experience=2.0, train=3.0), **RATIO)),
        ('pace', 'lower store.samples_per_insert', dict(collector=dict(wait_learner=8.0), **RATIO)),
    ],
)
def test_fault_is_named_with_its_fix(store, name, fix, fault):
    found = answers(store, **fault)
    assert name in found, found
    assert re.search(fix, found[name].fix), found[name]


def test_full_stream_names_the_setting(store):
    store.register('experience', 'learner')
    store.append('experience', {'text': 'x' * 2000}, {})
    answer = answers(store)['stream']
    assert 'max_pending_bytes=2000' in answer.fix
    assert 'collectors will wait' in answer.found


def test_full_stream_names_a_reader_that_does_not_read(store):
    for reader in ('learner', 'recorder'):
        store.register('experience', reader)
    store.append('experience', {'text': 'x' * 2000}, {})
    fix = answers(store)['stream'].fix
    assert 'reader recorder is 1 entry behind: start it again, or drop it' in fix
    assert fix.endswith('ding-store forget --run pong --stream experience --reader recorder')
    starved = answers(store, learner=STARVED, collector=dict(append=9.0))['starved']
    assert 'wait for room in experience' in starved.found
    assert starved.fix == fix


def test_run_in_which_nothing_moves_fails(store):
    for reader in ('learner', 'recorder'):
        store.register('experience', reader)
    store.append('experience', {'text': 'x' * 2000}, {})
    found = answers(store, learner=dict(wait_experience=9.8, train=0.0), collector=dict(wait_learner=0.0, append=9.9))
    assert next(iter(found)) == 'stalled'
    assert found['stalled'].fails
    assert 'reader recorder' in found['stalled'].fix
    assert [name for name, answer in found.items() if answer.fails or answer.fix] == ['stalled']


def test_step_of_an_environment_that_takes_long_is_named_with_its_time(store):
    # 10 seconds in which one collector makes 50 steps.
    fault = dict(learner=STARVED, collector=dict(wait_learner=0.0, append=0.0, environment=9.0))
    look = Look(store)
    for up_s, share in ((100.0, 0.0), (110.0, 1.0)):
        report(store, 'learner', {**LEARNER, **fault['learner']}, up_s, share, **FIGURES, env_step=int(5 * up_s))
        report(store, 'collector', {**COLLECTOR, **fault['collector']}, up_s, share, 2, env_step=int(5 * up_s))
        status = look.read(0.0)
    answer = {answer.name: answer for answer in why_slow(status)}['starved']
    assert '180 ms per env step' in answer.found
    assert answer.fix.startswith('make the environments faster')


def test_what_must_be_changed_comes_first_and_pace_only_alone(store):
    fault = dict(collector=dict(wait_learner=8.0))
    assert list(answers(store, **fault))[0] == 'pace'
    found = answers(store, **fault, checkpoint_overhead=0.2)
    assert list(found)[0] == 'checkpoints'
    assert 'pace' not in found


def test_each_partition_near_its_limit_is_named(store):
    store.append('experience/0', {}, {})
    assert 'experience/0, the fullest partition' in answers_of_partitions(store)[0].found
    for partition in (1, 2):
        store.append(f'experience/{partition}', {'text': 'x' * 1000 * partition}, {})
    found = answers_of_partitions(store)
    assert [answer.found.split()[0] for answer in found] == ['experience/2', 'experience/1']


def answers_of_partitions(store):
    store.append('experience/3', {}, {})
    look = Look(store)
    for up_s in (100.0, 110.0):
        report(store, 'learner', LEARNER, up_s, up_s / 100.0, **FIGURES)
        status = look.read(0.0)
    return [answer for answer in why_slow(status) if answer.name == 'stream']


def ranks(store, waits, **slow):
    """Answers of a run whose learners wait so many of ten seconds for each other."""
    look = Look(store)
    for up_s, share in ((100.0, 0.0), (110.0, 1.0)):
        for rank, wait_s in enumerate(waits):
            parts = {**LEARNER, 'train': 1.0, 'wait_ranks': wait_s, **(slow if wait_s == min(waits) else {})}
            seconds = {f'{part}_s': share * value for part, value in parts.items()}
            figures = {'up_s': up_s, 'at_s': time.time(), 'rank': rank, **seconds, **FIGURES}
            Member(f'rank {rank}', 'learner', 0, figures=figures).report(store)
        status = look.read(0.0)
    return {answer.name: answer for answer in why_slow(status)}


def test_slowest_of_several_learners_is_named_with_what_it_does(store):
    answer = ranks(store, [7.0, 6.5, 0.5], train=8.0)['ranks']
    assert answer.found.startswith('learners wait up to 70% of their time for rank 2 ')
    assert 'trains 80%' in answer.found
    assert 'cores' in answer.fix
    assert 'py-spy dump --pid' in ranks(store, [7.0, 6.5, 0.5], train=1.0)['ranks'].fix


def test_learner_that_waits_for_its_partition_is_named(store):
    answer = ranks(store, [0.2, 7.0], wait_experience=8.0)['ranks']
    assert 'for rank 0 ' in answer.found
    assert 'waits for experience 80%' in answer.found
    assert 'its partition gets less experience' in answer.fix


def test_learners_of_one_speed_need_no_fix(store):
    assert 'ranks' not in ranks(store, [1.0, 2.0])


def policies(store, lag):
    look = Look(store)
    for up_s, version in ((100.0, 1000), (110.0, 1100)):
        report(store, 'learner', LEARNER, up_s, up_s / 100, policy_version=version, policy_versions={'main': version})
        report(
            store, 'collector', COLLECTOR, up_s, 0.0, 2, chunks=int(2 * up_s), policy_versions={'main': version - lag}
        )
        status = look.read(0.0)
    return {answer.name: answer for answer in why_slow(status)}['policy']


def test_policy_that_is_older_than_a_few_chunks_is_named(store):
    assert policies(store, lag=10) == Answer('policy', 'the oldest policy of a collector is 10 versions (1s) behind')
    answer = policies(store, lag=400)
    assert '400 versions (40s) behind, and a collector makes a chunk in 0.5 s' in answer.found
    assert 'PeriodicalModelExchanger' in answer.fix


def test_process_that_fails_again_and_again_is_one_answer(store):
    for number in range(3):
        member = Member(f'evaluator {number}', 'evaluator', 1, figures={'at_s': time.time()})
        member.report(store, 'failed', 'OverflowError: too far')
    Member('evaluator', 'evaluator', 1).report(store)
    found = answers(store)
    assert 'evaluator (node 1, pid' in found['restarts'].found
    assert (
        'failed 3 times, the last time 0s ago, and was started again: OverflowError: too far' in found['restarts'].found
    )
    assert 'ding-store logs evaluator --run pong' in found['restarts'].fix
    assert 'died' not in found


def test_dead_members_are_named_with_their_reason(store):
    report(store, 'collector', {}, 5.0, 1.0, node_id=9, state='failed')
    assert 'collector (node 9, pid' in answers(store)['died'].found
    assert 'failed 0s ago: as told' in answers(store)['died'].found


def test_learner_that_does_not_report_is_named(store):
    report(store, 'learner', LEARNER, 5.0, 1.0, **FIGURES)
    look = Look(store)
    look.read(0.0)
    found = {answer.name: answer for answer in why_slow(look.read(0.0))}
    assert 'the learner hangs' in found['learner'].fix


def workers(store, *up_s, **parts):
    look = Look(store)
    for count, up in enumerate(up_s):
        report(store, 'worker', parts, up, 1.0, rank=0, train_iter=20 * (count + 1))
        status = look.read(0.0)
    return {answer.name: answer for answer in why_slow(status)}


def test_workers_that_train_need_no_fix(store):
    found = workers(store, 100.0, 110.0, train=2.0)
    assert [answer for answer in found.values() if answer.fix] == []
    assert found['worker'].found == 'worker 0 makes 2 iterations per second'


def test_worker_that_does_not_report_is_named(store):
    assert 'worker 0 hangs' in workers(store, 100.0, 100.0)['worker'].fix


def test_run_without_a_learner_or_with_an_end_says_so(store):
    (answer,) = why_slow(Look(store).read(0.0))
    assert 'no learner has reported, and no process' in answer.found
    store.put('finish', {'reason': 'enough', 'failed': False}, {})
    (answer,) = why_slow(Look(store).read(0.0))
    assert answer.found == 'it has ended: enough'


def test_doctor_of_a_run_prints_findings(redis_server, capsys, monkeypatch):
    monkeypatch.setattr('ding_store.launch.slow.MEASURE_S', 0.0)
    with open_store(redis_server.url, run='slow-run', stream_options=STREAM_OPTIONS) as store:
        report(store, 'learner', LEARNER, 5.0, 1.0, lost=2, **FIGURES)
        arguments = ['doctor', '--store', redis_server.url, '--run', 'slow-run']
        assert cli.main(arguments) == 1
        assert '2 chunks of experience were lost' in capsys.readouterr().out
        assert cli.main([*arguments, '--json']) == 1
        assert {'name', 'status', 'found', 'fix'} == set(json.loads(capsys.readouterr().out)[0])
        assert cli.main([*arguments[:-1], 'none']) == 2
        store.retire()


def test_server_near_its_maxmemory_is_named(redis_server):
    client = redis_server.client()
    try:
        with open_store(redis_server.url, run='full-server', stream_options=STREAM_OPTIONS) as store:
            look = Look(store)
            report(store, 'learner', LEARNER, 5.0, 1.0, **FIGURES)
            ((address, memory),) = look.read(0.0)['memory'].items()
            assert redis_server.url.endswith(address)
            assert memory['limit_bytes'] is None
            for ratio, is_near in ((100.0, False), (1.1, True)):
                client.config_set('maxmemory', int(ratio * client.info('memory')['used_memory']))
                status = look.read(0.0)
                (answer,) = (each for each in why_slow(status) if each.name == 'memory')
                assert f'{address} uses ' in answer.found
                assert bool(answer.fix) == is_near
                shown = io.StringIO()
                Console(file=shown, width=150).print(screen(status))
                assert ('of its maxmemory of' in shown.getvalue()) == is_near
            store.retire()
    finally:
        client.config_set('maxmemory', 0)


def test_server_is_named_by_host_and_port_if_its_url_has_none(redis_binary):
    with socket.socket() as probe:
        if probe.connect_ex(('localhost', 6379)) == 0:
            pytest.skip('another server has the default port')
    with RedisServer(redis_binary, '--port', '6379'):
        with open_store('redis://localhost', run='default-port', connect_timeout_s=10.0) as store:
            assert list(store.info().memory) == ['localhost:6379']
            store.retire()


def test_time_spent_has_parts_and_the_part_that_runs_now():
    spent = TimeSpent()
    with spent.measure('train'):
        inside = spent.figures()
    after = spent.figures()
    assert 0 <= inside['train_s'] <= after['train_s'] <= after['up_s']
    with spent.measure('train'):
        pass
    assert spent.figures()['train_s'] >= after['train_s']


def test_time_of_a_part_counts_for_no_other_part(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr('ding_store.run.time_spent.time.monotonic', lambda: float(next(now)))
    spent = TimeSpent()  # at 0
    with spent.measure('train'):  # 1
        with spent.measure('wait_ranks'):  # 2
            inside = spent.figures()  # 3
        # 4
    # 5
    assert (inside['train_s'], inside['wait_ranks_s']) == (1.0, 1.0)
    found = spent.figures()
    assert (found['train_s'], found['wait_ranks_s'], found['up_s']) == (2.0, 2.0, 6.0)
