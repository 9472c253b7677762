"""A whole run that is recorded by the flag, whose recorder is killed and goes on."""

import os
import signal

import numpy as np
from jobs import ROOT, ding_store, job, status, table

from ding_store.datasets import DataSet, episodes_of

TINY = ROOT / 'tests' / 'pipelines' / 'tiny_dqn.py'


def test_run_with_a_killed_recorder_is_recorded_exactly_once(tmp_path):
    script = ['python', TINY, '--trace', tmp_path / 'trace', '--until', tmp_path / 'end']
    options = ['--roles', 'learner=1,collector=1', '--run', 'rec', '--set', f'record={tmp_path / "set"}']
    with job(ding_store('run', *options, '--', *script), tmp_path) as run:

        def recorder():
            """The recorder that has recorded rows, if there is one."""
            if not (tmp_path / '.ding_store' / 'rec').is_dir() or 'train iters' not in run.text:
                return None
            members = [each for each in status(tmp_path, 'rec')['members'] if each['role'] == 'recorder']
            return next((each for each in members if each['figures'].get('rows') and each['state'] == 'alive'), None)

        killed = run.wait_for(recorder, 'rows of the recorder')
        os.kill(killed['pid'], signal.SIGKILL)
        run.wait_for(lambda: (recorder() or killed)['pid'] != killed['pid'], 'rows of the next recorder')
        (tmp_path / 'end').touch()
        assert run.wait() == 0, run.text
        appended = table(run.text)['rows appended']
    data = DataSet(tmp_path / 'set')
    assert len(data) == appended
    assert data.verify() == {}
    episodes = episodes_of(data)
    # The steps of an episode follow each other: no step is missing or doubled, also where the recorder was killed.
    for number in range(len(episodes.lengths)):
        columns = data.columns(episodes.rows(number))
        assert np.array_equal(columns['obs'][1:], columns['next_obs'][:-1])
    versions = [meta['policy_version'] for meta in data.metas(range(len(data)))]
    assert versions == sorted(versions)
    assert versions[-1] > 0
