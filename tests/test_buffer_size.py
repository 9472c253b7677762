"""``scripts/buffer_size.py``: a tiny run of it, what it concludes from given curves, and what it refuses."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('ding')
pytest.importorskip('gym')
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / 'scripts' / 'buffer_size.py'


def called(monkeypatch, *arguments):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, 'argv', ['buffer_size.py', *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name='__main__')


def curve(directory, size, seed, *returns):
    own = directory / f'cartpole-{size}-s{seed}'
    own.mkdir()
    measured = dict(iterations=50, training_s=2.0, training_cpu_s=1.0, size=10, rows=10, bytes=610)
    points = [dict(env_step=8 + i, mean_return=value, **measured) for i, value in enumerate((9.0, *returns))]
    (own / 'curve.jsonl').write_text(''.join(json.dumps(point) + '\n' for point in points))
    (own / 'ended').write_text('env steps')


def test_tiny_run_grows_and_is_resumed(monkeypatch, capsys, tmp_path):
    arguments = ['cartpole', '--sizes', '64-90', '--seeds', '3', '--env-steps', '96', '--directory', str(tmp_path)]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert 'has ended before' not in done.stdout
    points = [json.loads(line) for line in (tmp_path / 'cartpole-64-90-s3' / 'curve.jsonl').read_text().splitlines()]
    sizes = [point['size'] for point in points]
    assert 64 <= sizes[0] < sizes[-1] <= 90
    assert sizes == sorted(sizes)
    assert points[-1]['rows'] == sizes[-1]
    called(monkeypatch, *arguments, '--json', tmp_path / 'out.json')
    out = capsys.readouterr().out
    assert 'cartpole-64-90-s3 has ended before' in out
    assert 'Missing runs: none.' in out
    (row,) = json.loads((tmp_path / 'out.json').read_text())['cartpole']['sizes']
    assert (row['size'], row['seeds']) == ('64-90', [3])
    assert row['iterations_per_s'] > 0
    assert (tmp_path / 'buffer_size.svg').exists()


def test_effects_are_those_above_the_seeds_spread(monkeypatch, tmp_path, capsys):
    for seed in range(5):
        curve(tmp_path, '1000000', seed, 100.0 + seed, 100.0 + seed)
        curve(tmp_path, '1000', seed, 97.0 + seed, 95.0 + seed)
    for seed in range(4):  # The difference of equal curves does not depend on seeds that only one of both has.
        curve(tmp_path, '10000', seed, 100.0 + seed, 100.0 + seed)
    curve(tmp_path, '1000-5000', 0, 10.0, 10.0)
    page = tmp_path / 'page.md'
    page.write_text('before\n<!-- table: scripts/buffer_size.py cartpole -->\nold\n<!-- end of table -->\nafter\n')
    called(monkeypatch, 'cartpole', '--plot', '--directory', tmp_path, '--page', page, '--json', tmp_path / 'out.json')
    out = capsys.readouterr().out
    found = json.loads((tmp_path / 'out.json').read_text())['cartpole']['conclusions']
    effects = {(each['size'], each['measure']): (each['difference'], each['spread'], each['effect']) for each in found}
    assert effects == {
        ('1000', 'whole'): (-4.0, 4.0, 'none shown'),
        ('1000', 'end'): (-5.0, 4.0, 'yes'),
        ('10000', 'whole'): (0.0, 4.0, 'none: equal curves'),
        ('10000', 'end'): (0.0, 4.0, 'none: equal curves'),
        ('1000-5000', 'whole'): (-92.0, 4.0, 'no conclusion: 1 of 5 seeds'),
        ('1000-5000', 'end'): (-92.0, 4.0, 'no conclusion: 1 of 5 seeds'),
    }
    assert {each['base'] for each in found} == {'1000000'}
    assert 'Rule: a size has an effect if its mean differs' in out
    assert 'Missing runs: 3,000: seeds 0, 1, 2, 3, 4; 10,000: seeds 4; 1,000 to 5,000: seeds 1, 2, 3, 4.' in out
    assert '| 1,000,000 | 0, 1, 2, 3, 4 | 102.0 (100.0 to 104.0) |' in out
    text = page.read_text()
    assert text.startswith('before\n<!-- table')
    assert 'old' not in text
    assert text.endswith('<!-- end of table -->\nafter\n')
    assert '| 1,000 | 1,000,000 | return, mean of its last third | -5.0 | 4.0 | yes |' in text


@pytest.mark.parametrize(
    ('arguments', 'text'),
    [
        (['tetris'], "no task 'tetris'; there are: cartpole"),
        ([], 'name a task: cartpole'),
        (['cartpole', '--sizes', '5-5'], "'5-5' must be a size such as 1000, or a growing one"),
        (['cartpole', '--jobs', '0'], '--jobs (0) must be at least 1'),
        (['cartpole', '--env-steps', '0'], '--env-steps (0) must be at least 1'),
        (['cartpole', '--minutes', 'nan'], '--minutes (nan) must be above 0'),
    ],
)
def test_wrong_arguments_are_refused(monkeypatch, capsys, arguments, text):
    with pytest.raises(SystemExit):
        called(monkeypatch, *arguments)
    assert text in capsys.readouterr().err


def test_runs_of_another_length_are_refused(monkeypatch, tmp_path):
    (tmp_path / 'cartpole.json').write_text('{"env_steps": 10000}')
    with pytest.raises(SystemExit, match='has runs of cartpole with 10,000 env steps, not 500'):
        called(monkeypatch, 'cartpole', '--env-steps', '500', '--directory', tmp_path)
