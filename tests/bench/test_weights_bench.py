"""``python -m benchmarks weights`` measures what it says. No test asserts on speed."""

import json
import subprocess
from importlib.util import find_spec

import pytest
from jobs import benchmark, environment

from ding_store.errors import ConfigError

pytest.importorskip('torch')
pytest.importorskip('ding')


@pytest.mark.long
def test_weights_benchmark_reports_every_figure(tmp_path, redis_binary):
    command = benchmark('weights', '--sizes', '2', '--rounds', '3', '--readers', '2')
    command += ['--json', tmp_path / 'out.json']
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    (result,) = json.loads((tmp_path / 'out.json').read_text())
    assert result['mb'] == 2
    ways = ['bare', 'ding_store', 'in_place', 'torch', 'nng', 'ray']
    assert list(result['ways']) == (ways if find_spec('ray') else ways[:-1])
    for figures in result['ways'].values():
        assert figures['publish_s'] > 0
        assert figures['cpu_s'] > 0
        assert figures['ratio_to_bare'] == pytest.approx(figures['loaded_s'] / figures['bare_s'])
        assert 0 < figures['loaded_s'] <= figures['p90_s'] <= figures['max_s']
    assert result['ways']['bare']['ratio_to_bare'] == 1
    assert result['ways']['ding_store']['publish_without_readers_s'] > 0
    assert result['ways']['ding_store']['cpu_without_readers_s'] > 0
    assert 'copies_of_8_readers_in_place' in result  # of 2 MB it is noise
    assert b'sum of PSS' in done.stdout


def test_weights_benchmark_over_redis_reports_every_figure(tmp_path, redis_binary):
    command = benchmark('weights', '--wire', '--sizes', '2', '--rounds', '3', '--readers', '2')
    command += ['--json', tmp_path / 'out.json']
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    (result,) = json.loads((tmp_path / 'out.json').read_text())
    assert list(result['ways']) == ['redis_whole', 'redis_mib', 'redis_quarter', 'ding_store', 'half_frozen']
    best = min(figures['loaded_s'] for name, figures in result['ways'].items() if name.startswith('redis'))
    for figures in result['ways'].values():
        assert 0 < figures['publish_s'] < figures['max_s']
        assert figures['fraction_of_redis_py'] == pytest.approx(best / figures['loaded_s'])
    assert b'of redis-py' in done.stdout


def test_bad_settings_are_refused():
    from benchmarks.weights import choose, main

    with pytest.raises(ConfigError, match='known are bare'):
        choose('pigeon')
    if find_spec('ray') is None:
        with pytest.raises(ConfigError, match='pip install ray'):
            choose('ray')
    assert choose('nng,ding_store') == ['bare', 'ding_store', 'nng']
    for sizes, readers in (('5,x', 1), ('0', 1), ('5', 0)):
        with pytest.raises(ConfigError, match='--'):
            main(sizes, 'bare', readers, 1, None)


@pytest.mark.parametrize('how', ['writer raises', 'reader raises', 'writer dies', 'writer hangs'])
def test_way_that_fails_has_a_row_with_its_error(how, monkeypatch):
    import os
    import time

    from benchmarks import weights, weights_ways

    class Broken(weights_ways.TorchSave):
        title = 'a broken peer'

        def publish(self):
            if how == 'writer raises':
                raise OSError('no such queue')
            if how == 'writer dies':
                os._exit(3)
            if how == 'writer hangs':
                time.sleep(600)
            super().publish()

        def load(self):
            if how == 'reader raises':
                raise OSError('no such queue')
            super().load()

    monkeypatch.setitem(weights.WAYS, 'broken', Broken)
    monkeypatch.setattr(weights, 'LIMIT_S', 2.0)
    monkeypatch.setattr(weights_ways, 'LIMIT_S', 2.0)
    result = weights._of_size(1, ['bare', 'broken', 'torch'], 2, 1)
    reason = {
        'writer raises': 'OSError: no such queue',
        'reader raises': 'a reader failed',
        'writer dies': 'its process died',
        'writer hangs': 'not done within',
    }[how]
    assert list(result['ways']) == ['bare', 'broken', 'torch']
    assert reason in result['ways']['broken']['error']
    assert result['ways']['torch']['loaded_s'] > 0
    assert f'a broken peer            failed: {result["ways"]["broken"]["error"]}' in weights.render(result)
