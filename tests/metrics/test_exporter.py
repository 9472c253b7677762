"""The exporter: what Prometheus gets from a run, from a hostile one, and while the store is away."""

import contextlib
import http.client
import math
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ding_store import cli
from ding_store.errors import ConfigError, StoreUnavailable
from ding_store.launch.metrics import start_server
from ding_store.launch.status import Look, read_status
from ding_store.run.members import STREAM_OPTIONS, Member
from ding_store.storage import open_store


@contextlib.contextmanager
def exporter(store, read=None):
    """Yields a function that scrapes: (name, labels in alphabetical order without the run) -> value."""
    look = Look(store)
    server = start_server('pong', read or (lambda: look.read(0.0)), '127.0.0.1', 0)

    def scrape():
        connection = http.client.HTTPConnection('127.0.0.1', server.server_port, timeout=60)
        connection.request('GET', '/metrics')
        text = connection.getresponse().read().decode()
        connection.close()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # To Prometheus, an empty label is none.
                labels = {name: value for name, value in sorted(sample.labels.items()) if value and name != 'run'}
                assert sample.labels['run'] == 'pong'
                key = (sample.name, *labels.values())
                assert key not in found, 'a series twice'
                found[key] = sample.value
        return found

    try:
        yield scrape
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def store():
    with open_store('memory://', run='pong', stream_options=STREAM_OPTIONS) as store:
        yield store


def report(store, role, node_id=0, state='alive', name=None, **figures):
    Member(name or f'{role}-{node_id}', role, node_id, figures=figures).report(store, state)


def test_scrape_has_the_figures_of_a_run(store):
    learner = dict(train_iter=90, env_step=80, rows=80, replay_rows=70, replay_size=100, replay_bytes=4000, sampled=160)
    learner.update(up_s=50.0, wait_experience_s=5.0, train_s=30.0, checkpoint_overhead=0.02, max_pending_bytes=1000)
    report(store, 'learner', lost=1, policy_versions={'main': 9}, **learner)
    waits = dict(up_s=40.0, wait_learner_s=20.0, append_s=2.0, append_bucket_1=7, append_bucket_10=2, at_s=123.0)
    report(store, 'collector', 2, env_step=50, rows=50, policy_versions={'main': 7}, **waits)
    report(store, 'collector', 3, 'failed', name='before', env_step=10, rows=10)
    report(store, 'collector', 3, env_step=20, rows=20, append_bucket_1=1)
    report(store, 'evaluator', 1, eval_value=12.5, eval_iter=80)
    store.append('experience', {}, {})
    store.register('experience', 'learner')
    with exporter(store) as scrape:
        found = scrape()
    expected = {
        ('ding_store_server_up',): 1,
        ('ding_store_train_iterations_total',): 90,
        ('ding_store_env_steps_total', '2', 'collector'): 50,
        ('ding_store_env_steps_total', '3', 'collector'): 30,
        ('ding_store_rows_appended_total',): 80,
        ('ding_store_rows_ingested_total',): 80,
        ('ding_store_entries_lost_total',): 1,
        ('ding_store_replay_rows',): 70,
        ('ding_store_replay_capacity_rows',): 100,
        ('ding_store_replay_bytes',): 4000,
        ('ding_store_samples_per_insert',): 2,
        ('ding_store_policy_version', 'main'): 9,
        ('ding_store_policy_lag', 'main'): 2,
        ('ding_store_learner_wait_seconds_total', 'experience'): 5,
        ('ding_store_learner_work_seconds_total', 'train'): 30,
        ('ding_store_learner_seconds_total',): 50,
        ('ding_store_collector_wait_seconds_total', 'learner'): 20,
        ('ding_store_collector_seconds_total',): 40,
        ('ding_store_append_seconds_bucket', '0.001'): 0,
        ('ding_store_append_seconds_bucket', '0.003'): 8,
        ('ding_store_append_seconds_bucket', '30.0'): 8,
        ('ding_store_append_seconds_bucket', '+Inf'): 10,
        ('ding_store_append_seconds_sum',): 2,
        ('ding_store_append_seconds_count',): 10,
        ('ding_store_last_report_timestamp_seconds', '2', 'collector'): 123,
        ('ding_store_members', 'collector', 'alive'): 2,
        ('ding_store_members', 'collector', 'failed'): 1,
        ('ding_store_checkpoint_overhead_ratio',): 0.02,
        ('ding_store_eval_return',): 12.5,
        ('ding_store_stream_limit_bytes', 'experience'): 1000,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert found['ding_store_stream_pending_bytes', 'experience'] > 0
    assert ('ding_store_reader_lag_entries', 'learner', 'experience') in found


def test_each_learner_and_each_partition_has_its_series(store):
    for rank, wait_s in ((0, 40.0), (1, 2.0)):
        figures = dict(rank=rank, at_s=100.0 + rank, up_s=50.0, wait_ranks_s=wait_s, max_pending_bytes=1000)
        report(store, 'learner', name=f'rank {rank}', **figures)
        store.append(f'experience/{rank}', {}, {})
    with exporter(store) as scrape:
        found = scrape()
    expected = {
        ('ding_store_learner_wait_seconds_total', 'ranks'): 40,
        ('ding_store_rank_seconds_total', '1'): 50,
        ('ding_store_rank_part_seconds_total', 'wait_ranks', '0'): 40,
        ('ding_store_rank_part_seconds_total', 'wait_ranks', '1'): 2,
        ('ding_store_last_report_timestamp_seconds', '0', '0', 'learner'): 100,
        ('ding_store_last_report_timestamp_seconds', '0', '1', 'learner'): 101,
        ('ding_store_stream_limit_bytes', 'experience/0'): 1000,
        ('ding_store_stream_limit_bytes', 'experience/1'): 1000,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert ('ding_store_stream_limit_bytes', 'experience') not in found


def test_counters_grow_between_scrapes(store):
    with exporter(store) as scrape:
        report(store, 'learner', train_iter=5, up_s=1.0)
        before = scrape()
        report(store, 'learner', train_iter=9, up_s=2.0)
        after = scrape()
    assert (before['ding_store_train_iterations_total',], after['ding_store_train_iterations_total',]) == (5, 9)


def test_store_that_is_away_is_a_server_that_is_down(store):
    def read():
        raise StoreUnavailable('away')

    with exporter(store, read) as scrape:
        assert scrape() == {('ding_store_server_up',): 0}


def test_one_of_several_servers_that_is_away_counts_as_down(store):
    with exporter(store, lambda: {**read_status(store, 0.0), 'servers_away': ['away']}) as scrape:
        report(store, 'learner', train_iter=5)
        found = scrape()
        assert (found['ding_store_server_up',], found['ding_store_train_iterations_total',]) == (0, 5)


def test_hostile_reports_do_not_stop_the_exporter(store):
    name = 'x"\n\\\x1b[31m'
    store.append('members', {'id': name}, {})
    versions = {f'{number}': number for number in range(5000)}
    Member('a', f'{name}'.replace('\n', '').replace('\x1b', ''), -5, figures={'eval_value': math.nan}).report(store)
    report(store, 'learner', policy_versions=versions, eval_value=math.inf, up_s=-1.0, train_iter=-(1 << 62))
    report(store, 'evaluator', 1, eval_value=math.inf)
    with exporter(store) as scrape:
        found = scrape()
    assert found['ding_store_eval_return',] == math.inf
    assert len(found) < 2200


def test_cost_of_a_scrape_is_printed(store, record_property):
    for node_id in range(20):
        report(store, 'collector', node_id, env_step=1, up_s=1.0)
    with exporter(store) as scrape:
        began = time.process_time()
        for _ in range(20):
            scrape()
        seconds = (time.process_time() - began) / 20
    record_property('figure', f'a scrape of 20 members, with its client: {1e3 * seconds:.1f} ms of one core')


def test_port_in_use_is_refused(store):
    server = start_server('pong', dict, '127.0.0.1', 0)
    try:
        with pytest.raises(ConfigError, match='--port .* cannot be opened'):
            start_server('pong', dict, '127.0.0.1', server.server_port)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize('port', ['-1', '65536', 'http', '²'])
def test_port_that_is_none_is_refused(capsys, port):
    with pytest.raises(SystemExit):
        cli.main(['metrics', f'--port={port}'])
    assert 'should be a port from 0 to 65535' in capsys.readouterr().err
