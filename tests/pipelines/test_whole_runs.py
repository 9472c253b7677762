"""
Whole runs of mains with real environments, collectors and replays in which elements leave: where the same places of the
replay are drawn, store and stock have the same losses, bit by bit.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import PIPELINES as HERE
from jobs import environment
from needs import need_extra

pytest.importorskip('ding')
pytest.importorskip('gym')
sys.path.insert(0, str(HERE))
from tiny import PIPELINES  # noqa: E402


@pytest.mark.parametrize(('name', 'env_steps'), [('pong_dqn', 300), ('hopper_sac', 200)])
def test_same_draws_give_the_same_losses(name: str, env_steps: int, tmp_path: Path) -> None:
    _, _, extra, module = PIPELINES[name]
    need_extra(module, extra)
    runs = {}
    for kind in ('store', 'stock'):
        (tmp_path / kind).mkdir()
        command = [
            sys.executable,
            '-W',
            'ignore',
            str(HERE / 'same_draws.py'),
            name,
            kind,
            str(env_steps),
            'record.json',
        ]
        with open(tmp_path / kind / 'out', 'wb') as out:
            runs[kind] = subprocess.Popen(command, cwd=tmp_path / kind, env=environment(), stdout=out, stderr=out)
    records = {}
    codes = {kind: run.wait(240) for kind, run in runs.items()}
    for kind, code in codes.items():
        assert code == 0, (tmp_path / kind / 'out').read_text(errors='replace')[-4000:]
        records[kind] = json.loads((tmp_path / kind / 'record.json').read_text())
    store, stock = records['store'], records['stock']
    assert len(store['losses']) > 20
    assert max(draw[0] for draw in store['drawn']) == 100, 'full: elements have left'
    assert store['drawn'] == stock['drawn']
    assert store['losses'] == stock['losses']
