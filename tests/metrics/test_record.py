"""Records of a run: rates and shares between two looks, and the file of its history."""

import json
import re
from pathlib import Path

import pytest

from ding_store.errors import ConfigError
from ding_store.metrics.figures import Figures
from ding_store.metrics.history import FILE, HistoryWriter, read_history
from ding_store.metrics.record import COLUMNS, record_of
from ding_store.run.members import Member, Members
from ding_store.storage import open_store


@pytest.fixture
def run():
    """``run('learner', ...)``: a member reports these figures. Returns the figures of the run."""
    with open_store('memory://', run='r') as store:

        def reported(role, node_id=0, state='alive', **figures):
            Member(f'{role}-{node_id}', role, node_id, figures=figures).report(store, state)
            return Figures.of(Members(store).refresh())

        yield reported


def test_record_has_rates_and_shares_of_its_interval(run):
    run('collector', 2, up_s=10.0, wait_learner_s=9.0)
    before = run('learner', up_s=10.0, wait_experience_s=9.0, env_step=100, train_iter=10)
    run('collector', 2, up_s=12.0, wait_learner_s=9.5)
    after = run('learner', up_s=14.0, wait_experience_s=10.0, train_s=2.0, env_step=180, train_iter=30)
    record = record_of(before, after)
    assert (record['env_steps_per_s'], record['train_iters_per_s']) == (20.0, 5.0)
    assert (record['learner_wait_experience'], record['learner_train']) == (0.25, 0.5)
    assert record['collector_wait_learner'] == 0.25


def test_record_of_a_restarted_learner_counts_from_its_start(run):
    before = run('learner', 0, 'failed', up_s=90.0, env_step=900, train_iter=90, sampled=64, rows=900)
    began = dict(began_step=800, began_iter=80, began_rows=800)
    after = run('learner', 10, up_s=10.0, env_step=1000, train_iter=100, sampled=800, rows=1000, **began)
    record = record_of(before, after)
    assert (record['env_steps_per_s'], record['train_iters_per_s']) == (20.0, 2.0)
    assert record['samples_per_insert'] == 4.0


def test_record_without_a_new_report_has_no_rates(run):
    figures = run('learner', up_s=10.0, wait_experience_s=9.0, env_step=100, train_iter=10)
    record = record_of(figures, figures)
    assert not {'env_steps_per_s', 'learner_wait_experience', 'samples_per_insert'} & set(record)
    assert record['env_step'] == 100


def test_evaluation_is_in_the_first_record_after_it(run):
    before = run('learner')
    evaluated = run('evaluator', 1, eval_value=7.5, eval_iter=40, eval_step=300)
    assert record_of(before, evaluated)['eval_return'] == 7.5
    assert 'eval_return' not in record_of(evaluated, run('learner'))


@pytest.mark.parametrize('value', [float('-inf'), float('nan')])
def test_evaluation_that_is_not_finite_is_in_no_record(run, value):
    assert 'eval_return' not in record_of(Figures(), run('evaluator', 1, eval_value=value, eval_iter=0))


def test_page_lists_each_name():
    page = Path(__file__).resolve().parents[2] / 'docs' / 'reference' / 'metrics.md'
    rows = re.findall(r'^\| `(\w+)` \| (.*?) \| (.*?) \|$', page.read_text(), re.M)
    listed = {name: (unit, text) for name, unit, text in rows if not name.startswith('ding_store_')}
    assert listed == {name: tuple(column) for name, column in COLUMNS.items()}


def test_record_has_only_known_names(run):
    run('collector', 2, up_s=1.0, append_s=0.5, wait_weights_s=0.1)
    figures = run('learner', up_s=1.0, replay_rows=1, replay_size=2, replay_bytes=3, checkpoint_overhead=0.01)
    assert set(record_of(Figures(), figures, pending_bytes=[5])) <= set(COLUMNS)


# --- the file


def test_history_returns_what_was_appended(tmp_path):
    with_two = HistoryWriter(str(tmp_path / 'run'))
    for step in (1, 2):
        with_two.append({'time': 0.5, 'env_step': step})
    with_two.close()
    assert read_history(str(tmp_path / 'run')) == [{'time': 0.5, 'env_step': 1}, {'time': 0.5, 'env_step': 2}]
    assert read_history(with_two.path) == read_history(str(tmp_path / 'run'))


def test_history_goes_on_after_a_line_that_was_cut_off(tmp_path):
    (tmp_path / FILE).write_text('{"v": 1, "time": 1.0, "env_step": 1}\n{"v": 1, "time": 2.0, "en')
    resumed = HistoryWriter(str(tmp_path))
    resumed.append({'time': 3.0, 'env_step': 3})
    resumed.close()
    assert [record['env_step'] for record in read_history(str(tmp_path))] == [1, 3]


@pytest.mark.parametrize(
    'line',
    [
        '[1]',
        '{"v": 2, "time": 1, "env_step": 1}',
        '{"v": 1, "time": 1}',
        '{"v": 1, "time": "now", "env_step": 1}',
        '{"v": 1, "time": NaN, "env_step": 1}',
        '{"v": 1, "time": 1' + '0' * 5000 + ', "env_step": 1}',
        '[' * 100_000,
        '\x00\x1b[2J',
    ],
)
def test_line_that_is_no_record_is_skipped(tmp_path, line):
    good = {'v': 1, 'time': 1.0, 'env_step': 5}
    (tmp_path / FILE).write_text(f'{line}\n{json.dumps(good)}\n')
    assert [record['env_step'] for record in read_history(str(tmp_path))] == [5]


@pytest.mark.parametrize(('name', 'text'), [('none', None), (FILE, ''), (FILE, 'no record\n')])
def test_missing_history_is_refused_with_the_fix(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match='Name the'):
        read_history(str(tmp_path / name))
