"""What the figures of a run say after processes of it were killed, or started again."""

import io

import pytest

from ding_store.errors import StoreUnavailable
from ding_store.launch.progress import Display, summary
from ding_store.metrics.figures import Figures
from ding_store.run.members import Member, Members
from ding_store.storage import open_store


@pytest.fixture
def run():
    with open_store('memory://', run='r') as store:

        def reported(role, node_id, state='left', boot='a', **figures):
            space = f'{boot} pid:[1]'
            Member(f'{role}-{node_id}', role, node_id, pid_space=space, figures=figures).report(store, state)
            return Figures.of(Members(store).refresh())

        yield reported


def test_rows_of_a_killed_collector_are_counted_at_the_learner(run):
    run('collector', 2, 'alive', rows=16, env_step=16)
    run('collector', 3, rows=80, env_step=80)
    figures = run('learner', 0, rows=104, env_step=104)
    assert (figures.rows_appended, figures.rows_ingested, figures.env_step) == (104, 104, 104)
    cells = summary(figures, 1.0)
    assert cells['rows appended (at least: 1 collector gave no last report)'] == 104
    assert 'rows appended' not in cells


def test_rows_ingested_beyond_those_appended_are_shown(run):
    run('collector', 2, rows=16, env_step=16)
    figures = run('learner', 0, rows=24, env_step=24)
    assert summary(figures, 1.0)['rows appended'] == 16
    assert figures.rows_ingested == 24


def test_learner_that_starts_again_leaves_the_counts(run):
    run('learner', 0, 'failed', rows=400, env_step=400, train_iter=900, policy_versions={'main': 90})
    figures = run('learner', 10, 'alive')
    assert 'train iters 900 ' in figures.line()
    assert run('learner', 10, 'alive', train_iter=880).train_iter == 880


def test_rates_of_a_restarted_learner_are_of_its_own_loop(run):
    run('collector', 2, began_s=100.0, rows=600, env_step=600)
    run('learner', 0, 'failed', rows=400, env_step=400, train_iter=900, began_s=101.0, ended_s=141.0)
    counts = dict(rows=600, env_step=600, train_iter=1300)
    began = dict(began_s=200.0, began_step=400, began_iter=800)
    figures = run('learner', 10, **counts, **began, ended_s=210.0, is_resumed=True)
    cells = summary(figures, 120.0)
    assert (cells['env steps'], cells['train iterations']) == (600, 1300)
    assert (cells['env steps/s'], cells['train iterations/s']) == ('20', '50')


def test_rates_of_a_learner_without_checkpoint_are_of_its_loop(run):
    run('collector', 2, began_s=100.0, rows=600, env_step=600)
    run('learner', 0, 'failed', rows=400, env_step=400, train_iter=900, began_s=101.0, ended_s=141.0)
    began = dict(began_s=200.0, began_step=0, began_iter=0)
    figures = run('learner', 10, rows=200, env_step=200, train_iter=500, **began, ended_s=210.0)
    cells = summary(figures, 120.0)
    assert (cells['env steps'], cells['rows ingested']) == (600, 600)
    assert (cells['env steps/s'], cells['train iterations/s']) == ('20', '50')


def test_rates_of_a_run_resumed_on_a_new_server_are_of_its_loop(run):
    run('collector', 2, began_s=199.0, rows=200, env_step=200)
    began = dict(began_s=200.0, began_step=400, began_iter=800)
    figures = run('learner', 0, env_step=600, train_iter=1300, **began, ended_s=210.0, is_resumed=True)
    cells = summary(figures, 120.0)
    assert (cells['env steps'], cells['train iterations']) == (600, 1300)
    assert (cells['env steps/s'], cells['train iterations/s']) == ('20', '50')


def test_rates_of_workers_that_resumed_are_of_their_loop(run):
    run('worker', 0, 'failed', rank=0, env_step=250, run_env_step=480, train_iter=900, began_s=101.0, ended_s=141.0)
    run('worker', 1, 'failed', rank=1, env_step=230, run_env_step=470, train_iter=880)
    began = dict(began_s=200.0, began_step=480, began_iter=800)
    run('worker', 10, rank=0, env_step=90, run_env_step=660, train_iter=1300, **began, ended_s=210.0)
    figures = run('worker', 11, rank=1, env_step=100, run_env_step=680, train_iter=400)
    cells = summary(figures, 120.0)
    assert (cells['env steps'], cells['train iterations']) == (680, 1300)
    assert (cells['env steps/s'], cells['train iterations/s']) == ('20', '50')


def test_replays_of_workers_add_up(run):
    run('worker', 0, 'alive', rank=0, train_iter=3, replay_rows=30, replay_size=64, replay_bytes=300)
    figures = run('worker', 1, 'alive', rank=1, train_iter=2, replay_rows=20, replay_size=64, replay_bytes=200)
    assert 'replay 50 rows' in figures.line()
    assert (figures.replay_size, figures.replay_bytes) == (128, 500)


def test_loop_of_collectors_on_other_hosts_begins_at_learner(run):
    # CLOCK_MONOTONIC counts from a host's boot: times of two hosts differ by days.
    run('collector', 2, boot='b', began_s=9e6, rows=600, env_step=600)
    assert run('learner', 0, boot='a', env_step=600, began_s=101.0, ended_s=121.0).loop_s == 20.0
    assert run('collector', 3, boot='a', began_s=100.0).loop_s == 21.0


def test_display_survives_a_store_that_is_away():
    with open_store('memory://', run='r') as store:
        Member('c', 'collector', 2, figures=dict(env_step=16)).report(store)
        out, failures, read = io.StringIO(), iter([StoreUnavailable('away')] * 2), store.read

        def failing(*arguments, **options):
            for failure in failures:
                raise failure
            return read(*arguments, **options)

        store.read = failing
        display = Display(store, out, file_every_s=0.0, first_s=0.0)
        for _ in range(3):
            display.tick()
        before, after = out.getvalue().splitlines()[0], out.getvalue().splitlines()[-1]
        assert 'the store does not answer' in before
        assert 'env steps 16' in after
