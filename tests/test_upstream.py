"""DI-engine's own unit tests of its middleware on the store; scripts/upstream_tests.py runs more of them."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

import pytest
from jobs import DEADLINE_S
from zygote import zygote

pytest.importorskip('ding')

_SCRIPT = Path(__file__).parents[1] / 'scripts' / 'upstream_tests.py'


def run_forked(command: List[str], cwd: str, env: Dict[str, str], **_: Any) -> Any:
    """Run ``python -m pytest`` in a process that has imported DI-engine."""
    path = Path(cwd, 'out')
    with path.open('wb') as out:
        child = zygote().call('zygote', 'run_module', command[2:], cwd, env, out.fileno())
        child.wait(DEADLINE_S)
    return SimpleNamespace(stdout=path.read_text(), stderr='')


@pytest.mark.timeout(300)
def test_upstream_middleware_tests_pass_on_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location('upstream_tests', _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, 'subprocess', SimpleNamespace(run=run_forked))
    outcomes = script.run('all that ding-store run replaces', script.in_wheel())
    assert len(outcomes) >= 14
    assert {test for test, outcome in outcomes.items() if outcome != 'PASSED'} == set()
