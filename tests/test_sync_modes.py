"""``scripts/sync_modes.py``: what it concludes from given curves, what it refuses, and a tiny run of it."""

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
SCRIPT = ROOT / 'scripts' / 'sync_modes.py'


def called(monkeypatch, *arguments):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, 'argv', ['sync_modes.py', *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name='__main__')


def curve(directory, mode, workers, seed, value, seconds_per_step=1.0):
    own = directory / f'{mode}-{workers}-s{seed}'
    own.mkdir()
    points = [
        dict(env_step=100 * i, train_iter=i, seconds=seconds_per_step * i, mean_return=0.0 if i < 2 else value)
        for i in range(5)
    ]
    (own / 'curve.jsonl').write_text(''.join(json.dumps(point) + '\n' for point in points))
    (own / 'ended').write_text('env steps')


def test_effects_of_modes_are_those_above_the_spread(monkeypatch, tmp_path, capsys):
    for seed in range(5):
        curve(tmp_path, 'gradients', 2, seed, 100.0 + seed, seconds_per_step=2.0)
        curve(tmp_path, 'async', 2, seed, 102.0 + seed)
        curve(tmp_path, 'average', 2, seed, 50.0 + seed, seconds_per_step=2.0)
    curve(tmp_path, 'gossip', 2, 0, 10.0)
    page = tmp_path / 'page.md'
    page.write_text('before\n<!-- table: scripts/sync_modes.py -->\nold\n<!-- end of table -->\nafter\n')
    command = ['--plot', '--workers', 2, '--directory', tmp_path, '--page', page, '--json', tmp_path / 'out.json']
    called(monkeypatch, *command)
    out = capsys.readouterr().out
    found = json.loads((tmp_path / 'out.json').read_text())
    assert found['time_s'] == 4.0
    effects = {(each['mode'], each['measure']): each['effect'] for each in found['conclusions']}
    assert effects == {
        ('async', 'steps'): 'none shown',
        ('async', 'time'): 'more',  # the synchronous one is half as fast
        ('average', 'steps'): 'less',
        ('average', 'time'): 'none shown',
        ('gossip', 'steps'): 'no conclusion: 1 of 5 seeds',
        ('gossip', 'time'): 'no conclusion: 1 of 5 seeds',
    }
    assert 'Over env steps, asynchronous training shows no effect with 2 workers, compared with synchronous' in out
    assert 'Over wall time, asynchronous training returns more with 2 (+' in out
    assert "'average' returns less with 2 (-" in out
    assert "'gossip' has too few seeds with 2 workers, compared" in out
    assert "'elastic' and 'hogwild' were not run" in out
    assert 'Missing runs: elastic with 2; gossip with 2: seeds 1, 2, 3, 4; hogwild with 2.' in out
    text = page.read_text()
    assert 'old' not in text
    assert text.startswith('before\n')
    assert '| 2 | async | 0, 1, 2, 3, 4 |' in text
    assert (tmp_path / 'sync_modes.svg').exists()


@pytest.mark.parametrize(
    ('arguments', 'text'),
    [
        (['--modes', 'ddp'], "invalid choice: 'ddp'"),
        (['--workers', '0'], '--workers (0) must be at least 1'),
        (['--env-steps', '0'], '--env-steps (0) must be at least 1'),
        (['--minutes', 'nan'], '--minutes (nan) must be above 0'),
    ],
)
def test_wrong_arguments_of_sync_modes_are_refused(monkeypatch, capsys, arguments, text):
    with pytest.raises(SystemExit):
        called(monkeypatch, *arguments)
    assert text in capsys.readouterr().err


def test_sync_modes_runs_of_another_length_are_refused(monkeypatch, tmp_path):
    (tmp_path / 'sync_modes.json').write_text('{"env_steps": 10000}')
    with pytest.raises(SystemExit, match='has runs with 10,000 env steps, not 500'):
        called(monkeypatch, '--env-steps', '500', '--directory', tmp_path)


@pytest.mark.long
def test_tiny_run_of_sync_modes_writes_a_curve(tmp_path):
    arguments = ['--modes', 'async', '--workers', '2', '--seeds', '3', '--env-steps', '800', '--directory', tmp_path]
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert 'async-2-s3 has ended before' in done.stdout
    points = [json.loads(line) for line in (tmp_path / 'async-2-s3' / 'curve.jsonl').read_text().splitlines()]
    assert points[-1]['env_step'] > points[0]['env_step'] > 0
    assert 'Missing runs: none.' in done.stdout
