"""Scripts that measure a replay: what they count, print and refuse. Their runs take minutes."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch

pytest.importorskip('ding')
SCRIPTS = Path(__file__).parents[1] / 'scripts'


def called(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: Any) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, 'argv', [name, *map(str, arguments)])
    try:
        runpy.run_path(str(SCRIPTS / f'{name}.py'), run_name='__main__')
    except SystemExit as end:
        if end.code:
            raise


def element(i: int) -> Dict[str, Any]:
    return {'obs': torch.full((5,), float(i)), 'action': torch.tensor([i]), 'nothing': None}


@pytest.mark.parametrize('is_stock', [True, False])
def test_traffic_counts_elements_and_bytes(is_stock: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import replay_traffic
    from ding.data import DequeBuffer

    from ding_store.buffer import StoreBuffer

    kind, methods = (DequeBuffer, replay_traffic.STOCK) if is_stock else (StoreBuffer, replay_traffic.STORE)
    for method in methods:
        monkeypatch.setattr(kind, method, getattr(kind, method))  # ``watch`` is undone with it
    traffic, out = replay_traffic.Traffic(), tmp_path / 'out.json'
    traffic.watch(is_stock)
    replay = kind(100)
    replay.push(element(0))
    traffic.restart()
    for i in range(6):
        replay.push(element(i))
    replay.sample(4)
    expected = dict(adds_per_s=3.0, samples_per_s=2.0)
    if not is_stock:
        replay.extend_elements([element(i) for i in range(8)])
        replay.extend({'obs': np.zeros((2, 5), np.float32), 'action': np.zeros((2, 1), np.int64)}, replay.schema)
        replay.sample_batch(6)
        expected = dict(adds_per_s=8.0, samples_per_s=5.0)
    traffic.end(2.0, {'of': 'the loop'}, str(out))
    with pytest.raises(SystemExit):
        replay.sample(4)
    found = json.loads(out.read_text())
    assert {name: found[name] for name in expected} == expected
    assert (found['of'], found['element_bytes'], found['rows']) == ('the loop', 28.0, 7 if is_stock else 17)
    # A tensor of DI-engine's rows is an object of its own, with more bytes than the values take.
    least, most = (7 * 500, 7 * 5000) if is_stock else (17 * 28, 17 * 28)
    assert least <= found['memory_bytes'] <= most


def window(train_iter: float, push: float, sample: float, **more: Any) -> str:
    figures = dict(train_iter=train_iter, adds_per_s=10.0, samples_per_s=100.0, element_bytes=1e5, rows=50, wall_s=60.0)
    figures.update(
        ms=dict(push=push, sample=sample, train=6.0, CPU=9.0), commit='`abc`', date='2026-11-26', seconds=8.0
    )
    return json.dumps({**figures, 'machine': 'a machine', 'other_cores': 0.0, 'memory_bytes': 5e6, **more})


def test_needs_are_written_beside_the_published_ones(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    for turn, rate in enumerate((9.0, 10.0, 20.0)):
        (tmp_path / f'dqn-stock-{turn}.json').write_text(window(rate, 2.0, 2.0))
    (tmp_path / 'dqn-store-0.json').write_text(window(20.0, 1.0, 1.0, memory_bytes=350_000, other_cores=1.5))
    page = tmp_path / 'page.md'
    page.write_text('before\n<!-- table: scripts/pipeline_needs.py -->\nold\n<!-- end of table -->\nafter\n')
    out = tmp_path / 'out.json'
    called(monkeypatch, 'pipeline_needs', '--plot', '--directory', tmp_path, '--page', page, '--json', out)
    text = page.read_text()
    assert text.startswith('before\n')
    assert text.endswith('after\n')
    assert 'old' not in text
    assert '| DQN, Atari Qbert | 400,000 | 110 KB | 400 | 1,650 | 100 KB | 10 | 10 | 100 | 100 |' in text
    assert '| DQN, Atari Qbert | 10 | 20 | 40.0 % | 25.0 % | train, 75 % | 2,000 | 2,000 |' in text
    assert '| DQN, Atari Qbert | 50 | 50 | 100 KB | 7 KB | 14.3 | 40 GB | 2.8 GB |' in text
    assert '**The machine was busy at times**' in text
    assert 'Not measured: ppo stock, ppo store,' in text
    figures = json.loads(out.read_text())['dqn']['store']
    # 400 adds/s of 2,000 us and 1,650 samples/s of 200 us.
    assert figures['cores_at_published_rates'] == pytest.approx(0.8 + 0.33)
    assert 'at commit `abc`' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('name', 'arguments', 'text'),
    [
        ('pipeline_needs', ['tetris'], "no job 'tetris'; known are dqn"),
        ('pipeline_needs', ['--turns', '0'], '--turns (0) must be at least 1'),
        ('pipeline_needs', ['--seconds', 'nan'], '--seconds (nan) must be above 0'),
        ('replay_memory', ['dqn', '--rows', '640'], '--rows (640) must be more than 10 batches of 64'),
        ('replay_memory', ['r2d2', '--limit', '0'], '--limit (0) must be above 0'),
        ('replay_memory', ['dqn', '--small', '0'], '--small (0) must be at least 1'),
        ('pong_memory', ['--env-steps', '0'], '--env-steps (0) must be at least 1'),
        ('pong_memory', ['--minutes', 'inf'], '--minutes (inf) must be above 0, and finite'),
    ],
)
def test_wrong_arguments_are_refused(name: str, arguments: Any, text: str, monkeypatch: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        called(monkeypatch, name, *arguments)
    assert text in capsys.readouterr().err


def test_runs_of_pong_are_listed_with_their_resumes(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    about = dict(rows=90, replay_bytes=3e6, process_bytes=5e8, mean_return=-20.0)
    points = [dict(about, env_step=step, first_step=first) for step, first in ((96, 96), (192, 96), (384, 288))]
    for name in ('store-s0', 'stock-s0'):
        (tmp_path / name).mkdir()
        lines = [json.dumps({**point, **({'replay_bytes': None} if name == 'stock-s0' else {})}) for point in points]
        (tmp_path / name / 'curve.jsonl').write_text('\n'.join(lines))
    called(monkeypatch, 'pong_memory', '--plot', '--directory', tmp_path)
    out = capsys.readouterr().out
    assert '| store, frames shared, seed 0 | 200,000 | 384 | 90 | 0.003 GB | 0.50 GB | 288 | -20.00 | -20.00 |' in out
    assert '| plain DI-engine, seed 0 | 25,000 | 384 | 90 | not counted | 0.50 GB | 288 | -20.00 | -20.00 |' in out
    assert (tmp_path / 'pong_memory.svg').exists()
