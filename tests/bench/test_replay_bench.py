"""``ding-store bench replay`` measures what it says; how fast that is depends on the machine, and is tested nowhere."""

import json
import subprocess

import pytest
from jobs import ding_store, environment

from ding_store.bench.workloads import WORKLOADS
from ding_store.errors import ConfigError

pytest.importorskip('ding')


def test_every_figure_is_there(tmp_path):
    command = ding_store('bench', 'replay', '--scale', '0.002', '--seconds', '0.05', '--json', tmp_path / 'out.json')
    command += ['--workloads', 'small-per,sac-mujoco', '--buffers', 'ding_store,DequeBuffer']
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    small, sac = json.loads((tmp_path / 'out.json').read_text())
    for title in ('ding_store', 'DequeBuffer'):
        assert set(small['buffers'][title]) >= {'push', 'sample', 'sample_update'}
        assert 'bytes_per_row' in small['buffers'][title].pop('beyond_payload')
        for figures in small['buffers'][title].values():
            assert 0 < figures['median_s'] <= figures['p90_s'] <= figures['p99_s'] <= figures['max_s']
            assert figures['elements_per_s'] > 0
    assert 'sample_update' not in sac['buffers']['ding_store']
    assert 'push_columns' in sac['buffers']['ding_store']
    assert b'sum trees by' in done.stdout
    assert b'memory beyond the payload' in done.stdout


def test_elements_have_the_published_sizes():
    sizes = {workload.name: workload.row_bytes for workload in WORKLOADS}
    for name, size in {'dqn-atari': 113e3, 'r2d2-atari': 10e6, 'impala-atari': 3e6, 'sac-mujoco': 2.9e3}.items():
        assert abs(sizes[name] / size - 1) < 0.05
    assert abs(sizes['small-1M'] / 105 - 1) < 0.1


def test_unknown_names_list_the_known():
    from ding_store.bench.replay import choose, installed

    with pytest.raises(ConfigError, match='known are dqn-atari'):
        choose('pong')
    with pytest.raises(ConfigError, match='known are ding_store'):
        installed('rllib')
