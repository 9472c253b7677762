"""Whole episodes through the store: DI-engine's hindsight replay, in real processes."""

import json

import pytest
from jobs import PIPELINES, ding_store, job, table

pytest.importorskip('ding')
pytest.importorskip('dizoo.bitflip')
pytestmark = pytest.mark.timeout(300)


def test_episodes_of_varying_length_stay_whole(tmp_path):
    trace = tmp_path / 'trace'
    command = ['run', '--run', 'r', '--roles', 'learner=1,collector=2', '--', 'python', PIPELINES / 'tiny_her.py']
    with job(ding_store(*command, '--trace', trace), tmp_path) as run:
        assert run.wait() == 0, run.text
    figures, seen = table(run.text), json.loads(trace.read_text())
    assert seen['kind'] == 'StoreBuffer'
    assert figures['rows appended'] == figures['rows ingested'] == sum(map(len, seen['dones'])), run.text
    assert len({len(done) for done in seen['dones']}) > 1, 'not of varying length: this shows nothing'
    assert len(seen['dones']) == seen['env_episode'] > 20
    for done, ids in zip(seen['dones'], seen['ids']):
        assert done == [False] * (len(done) - 1) + [True]
        assert len(ids) == 1, 'steps of several episodes'
    assert len({ids[0] for ids in seen['ids']}) == len(seen['ids'])
    assert seen['train_iter'] >= 40
