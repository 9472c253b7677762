"""``python -m benchmarks replay`` measures what it says. No test asserts on speed."""

import itertools
import json
import re
from functools import partial

import pytest
from jobs import DEADLINE_S, environment
from zygote import zygote

from benchmarks import replay
from benchmarks.replay import choose, installed
from benchmarks.workloads import WORKLOADS, scaled
from ding_store.errors import ConfigError

pytest.importorskip('ding')


def test_replay_benchmark_reports_every_figure(tmp_path):
    command = ['replay', '--scale', '0.002', '--seconds', '0.05', '--json', str(tmp_path / 'out.json')]
    command += ['--workloads', 'small-per,sac-mujoco', '--buffers', 'ding_store,DequeBuffer']
    with open(tmp_path / 'out', 'wb') as out:
        child = zygote().call('benchmarks.__main__', 'main', [command], tmp_path, environment(), out.fileno())
    code, text = child.wait(DEADLINE_S), (tmp_path / 'out').read_text()
    assert code == 0, text[-3000:]
    small, sac = json.loads((tmp_path / 'out.json').read_text())
    for title in ('ding_store', 'DequeBuffer'):
        assert set(small['buffers'][title]) >= {'push', 'sample', 'sample_update'}
        assert 'bytes_per_row' in small['buffers'][title].pop('beyond_payload')
        for figures in small['buffers'][title].values():
            assert 0 < figures['median_s'] <= figures['p90_s'] <= figures['p99_s'] <= figures['max_s']
            assert figures['elements_per_s'] > 0
    assert 'sample_update' not in sac['buffers']['ding_store']
    assert 'push_columns' in sac['buffers']['ding_store']
    assert 'sum trees by' in text
    assert 'memory beyond the payload' in text


@pytest.mark.parametrize(
    ('memory', 'fill_s', 'says'),
    [
        pytest.param(
            1000,
            60.0,
            r'left out: 2,000 rows would take [\d.]+ GB more memory, of which 1 KB are there; --scale',
            marks=pytest.mark.long,
        ),
        (1 << 40, 0.0, r'left out: 2,000 rows would take \d+ s \(--fill-seconds 0\); --scale'),
    ],
)
def test_peer_that_cannot_be_filled_is_left_out(monkeypatch, memory, fill_s, says):
    """DequeBuffer would take 60 GB for 10 million rows, and tianshou ten minutes."""
    monkeypatch.setattr(replay, 'available_memory', lambda: memory)
    monkeypatch.setattr(replay, '_resident', partial(next, itertools.count(0, 10**9)))
    workload = scaled(choose('sac-mujoco')[0], 0.01)
    result = replay.measure(workload, ['ding_store', 'DequeBuffer'], 0.01, print, fill_s)
    assert 'sample' in result['buffers']['ding_store'], 'what this is about is measured whatever it takes'
    assert re.search(says, replay.render(result))


def test_elements_have_the_published_sizes():
    sizes = {workload.name: workload.row_bytes for workload in WORKLOADS}
    for name, size in {'dqn-atari': 113e3, 'r2d2-atari': 10e6, 'impala-atari': 3e6, 'sac-mujoco': 2.9e3}.items():
        assert abs(sizes[name] / size - 1) < 0.05
    assert abs(sizes['small-1M'] / 105 - 1) < 0.1


@pytest.mark.parametrize('fill_s', [0.0, -1.0, float('nan')])
def test_peers_need_some_time_to_be_filled(fill_s):
    with pytest.raises(ConfigError, match=r'--fill-seconds \(\S+\) must be above 0'):
        replay.main('small-per', None, 0.001, 0.01, fill_s, None)


def test_replay_benchmark_unknown_name_lists_valid_ones():
    with pytest.raises(ConfigError, match='known are dqn-atari'):
        choose('pong')
    with pytest.raises(ConfigError, match='known are ding_store'):
        installed('rllib')
