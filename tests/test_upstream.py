"""DI-engine's own unit tests of its middleware on the store; scripts/upstream_tests.py runs more of them."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip('ding')

_SCRIPT = Path(__file__).parents[1] / 'scripts' / 'upstream_tests.py'


@pytest.mark.timeout(300)
def test_upstream_middleware_tests_pass_on_the_store() -> None:
    spec = importlib.util.spec_from_file_location('upstream_tests', _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    outcomes = script.run('all that ding-store run replaces', script.in_wheel())
    assert len(outcomes) >= 14
    assert {test for test, outcome in outcomes.items() if outcome != 'PASSED'} == set()
