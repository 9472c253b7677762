"""scripts/soak.py: what it counts as a fault, and a short run of it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import environment

SCRIPT = Path(__file__).parents[1] / 'scripts' / 'soak.py'


@pytest.fixture(scope='module')
def soak():
    specification = importlib.util.spec_from_file_location('soak', SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules['soak'] = module  # Dataclasses look their module up.
    try:
        specification.loader.exec_module(module)
        yield module
    finally:
        del sys.modules['soak']


def found(soak, num_ended=64, **growing):
    """The faults of 100 s at the asked rate in which these columns grow from 0, and all others stay."""
    names = soak.Sample.__dataclass_fields__
    growing = {'at_s': 99, 'num_rows': 99 * 400, **growing}
    samples = [soak.Sample(**{name: growing.get(name, 0) * at / 99 for name in names}) for at in range(100)]
    learner, reader = SimpleNamespace(num_rows=7, num_wrong=0), SimpleNamespace(num_lost=0)
    options = SimpleNamespace(rate=400.0, chunk=1, processes=4, threads=16)
    return soak.faults(samples, learner, reader, 7, num_ended, options)


@pytest.mark.parametrize('name', ['lag', 'server_mb', 'reader_mb', 'writers_mb', 'cache_mb'])
def test_soak_growth_is_a_fault(soak, name):
    assert found(soak) == []
    (fault,) = found(soak, **{name: 4000})
    assert fault.startswith(f'{name} grew from')


def test_soak_rate_below_the_requested_is_a_fault(soak):
    assert found(soak, num_rows=99 * 390) == []
    assert found(soak, num_rows=99 * 300) == ['400 rows a second were requested, 300 came']


def test_soak_writer_that_does_not_end_is_a_fault(soak):
    """One of 64 is not seen by the rate."""
    assert found(soak, num_ended=63) == ['1 of 64 writers did not come to their end']


def test_soak_too_short_to_judge_is_refused(soak, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['soak.py', '--seconds', '1'])
    with pytest.raises(SystemExit):
        soak.parse()
    assert '--seconds' in capsys.readouterr().err


def test_soak_short_run_finds_no_fault(tmp_path, redis_binary):
    size = ['--seconds', '2.5', '--processes', '1', '--threads', '2', '--rate', '100', '--element-bytes', '50000']
    files = ['--json', str(tmp_path / 'result.json'), '--csv', str(tmp_path / 'samples.csv')]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *size, *files], env=environment(), capture_output=True, text=True, timeout=150
    )
    result = json.loads((tmp_path / 'result.json').read_text())
    assert done.returncode == bool(result['faults']), done.stderr
    assert result['num_ingested'] == result['num_appended'] > 0
    assert (result['num_lost'], result['num_wrong'], result['num_writers']) == (0, 0, 2)
    header, *rows = (tmp_path / 'samples.csv').read_text().splitlines()
    last = dict(zip(header.split(','), map(float, rows[-1].split(','))))
    assert last['cache_mb'] > 16  # a ring, at least
