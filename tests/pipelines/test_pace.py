"""A ratio of samples to inserts across processes: the learner's replay keeps to it, and collectors wait for that."""

import pytest
from jobs import PIPELINES, ding_store, job, records, table

pytest.importorskip('ding')
pytest.importorskip('gym')
pytestmark = pytest.mark.timeout(300)

BATCH = 16
SMALL = {
    'policy.learn.batch_size': BATCH,
    'policy.learn.update_per_collect': 2,
    'policy.eval.evaluator.eval_freq': 10**9,
    'env.stop_value': 10**9,
    'policy.model.encoder_hidden_size_list': '[8]',
}


def run_at(tmp_path, ratio, max_train_iter, **store):
    store = {**store, **({} if ratio is None else {'samples_per_insert': ratio})}
    settings = {**SMALL, **{f'store.{key}': value for key, value in store.items()}}
    sets = [word for key, value in settings.items() for word in ('--set', f'{key}={value}')]
    command = ['run', '--run', 'r', '--roles', 'learner=1,collector=2', '--', 'python', PIPELINES / 'watched_pace.py']
    ends = ['--max-train-iter', max_train_iter]
    with job(ding_store(*command, *ends, *sets), tmp_path, PACE_TRACE=str(tmp_path / 'trace')) as run:
        assert run.wait() == 0, run.text
    return run.text, records(tmp_path / 'trace')


@pytest.mark.parametrize(('ratio', 'collectors_wait'), [(40.0, True), pytest.param(0.5, False, marks=pytest.mark.long)])
def test_inserts_and_samples_keep_within_the_tolerance(tmp_path, ratio, collectors_wait):
    """Ten times as many samples as the pipeline's own ratio (4 per insert), and an eighth of them."""
    least, tolerance = 40, 400.0
    options = dict(error_buffer=tolerance, min_size_to_sample=least)
    text, seen = run_at(tmp_path, ratio, 80 if collectors_wait else 20, **options)
    learner = [each for each in seen if 'num_samples' in each]
    for each in learner:
        # Until the minimal size is there nothing is limited, and nothing sampled.
        if each['num_samples']:
            difference = (each['num_inserts'] - least) * ratio - each['num_samples']
            assert abs(difference) <= tolerance, each
        else:
            assert each['train_iter'] == 0
    assert max(each['num_samples'] for each in learner) >= 80 * BATCH if collectors_wait else 20 * BATCH
    figures = table(text)
    assert figures['rows appended'] == figures['rows ingested'], text
    # What collectors had appended when the run ended, a few chunks of 8: they did not run ahead of the learner.
    assert figures['rows ingested'] - max(each['num_inserts'] for each in learner) <= 8 * 6
    waits = sum(max(each['waits'] for each in seen if each['node'] == node and 'waits' in each) for node in (2, 3))
    assert not collectors_wait or waits > 0


def test_minimal_size_alone_keeps_the_ratio_of_the_pipeline(tmp_path):
    """Two iterations per chunk of 8 rows, from the minimal size on: 40 of them need 19 chunks more."""
    least = 40
    _, seen = run_at(tmp_path, None, 40, min_size_to_sample=least)
    last = [each for each in seen if 'num_samples' in each][-1]
    assert last['train_iter'] >= 40
    assert last['num_inserts'] >= least + 19 * 8
