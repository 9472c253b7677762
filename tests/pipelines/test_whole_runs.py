"""
Whole runs of mains with real environments, collectors and replays in which elements leave: where the same places of the
replay are drawn, store and stock have the same losses, bit by bit.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from jobs import PIPELINES as HERE
from jobs import environment
from needs import need_extra
from zygote import zygote

pytest.importorskip('ding')
pytest.importorskip('gym')
sys.path.insert(0, str(HERE))
from tiny import PIPELINES  # noqa: E402

#: Pipeline -> its environment steps: so many that elements leave the replay.
ENV_STEPS = {'pong_dqn': 200, 'hopper_sac': 120}


@pytest.fixture(scope='module')
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the runs of all selected pipelines whose environments are installed."""
    directory = tmp_path_factory.mktemp('runs')
    chosen = {item.callspec.params['name'] for item in request.session.items if item.module is request.module}
    wanted = [f'{name}:{ENV_STEPS[name]}' for name in chosen if importlib.util.find_spec(PIPELINES[name][3])]
    script = [str(HERE / 'same_draws.py'), *wanted]
    with open(directory / 'out', 'wb') as out:
        child = zygote().call('zygote', 'run_script', script, directory, environment(), out.fileno())
    assert child.wait(400) == 0, (directory / 'out').read_text()
    return directory


@pytest.mark.parametrize('name', ['pong_dqn', pytest.param('hopper_sac', marks=pytest.mark.long)])
def test_same_draws_give_the_same_losses(name: str, runs: Path) -> None:
    _, _, extra, module = PIPELINES[name]
    need_extra(module, extra)
    records = {}
    for kind in ('store', 'stock'):
        record = runs / f'{name}-{kind}' / 'record.json'
        assert record.exists(), record.with_name('out').read_text(errors='replace')[-4000:]
        records[kind] = json.loads(record.read_text())
    store, stock = records['store'], records['stock']
    assert len(store['losses']) > 20
    assert max(draw[0] for draw in store['drawn']) == 100, 'full: elements have left'
    assert store['drawn'] == stock['drawn']
    assert store['losses'] == stock['losses']
