"""scripts/simulate.py: its law, and a short run of it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import environment

SCRIPT = Path(__file__).parents[1] / 'scripts' / 'simulate.py'


@pytest.fixture(scope='module')
def simulate():
    specification = importlib.util.spec_from_file_location('simulate', SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def row(members):
    return {
        'members': members,
        'us_per_chunk': 300 + 25 * members,
        'reports_share': 0.001 + 0.0004 * members,
        'waiting_share': 0.0001 * members,
    }


def test_simulate_law_is_the_line_of_its_rows(simulate):
    law = simulate.law_of([row(members) for members in (10, 50, 1000)])
    assert law['us_per_chunk'] == pytest.approx(300)
    assert law['us_per_chunk_and_waiting_collector'] == pytest.approx(25)
    assert law['us_per_member_second'] == pytest.approx(400)
    assert law['us_per_waiting_collector_second'] == pytest.approx(100)
    assert simulate.share_of(law, 1000, 10) == pytest.approx(0.253 + 0.401 + 0.1)
    most = simulate.most_members(law, 10)
    assert simulate.share_of(law, most, 10) <= simulate.FULL < simulate.share_of(law, most + 1, 10)


def test_simulate_measures_10_and_50_members(tmp_path):
    result = tmp_path / 'result.json'
    options = ['--members', '10,50', '--seconds', '0.3', '--settle-s', '0', '--chunks-per-s', '50']
    command = [sys.executable, str(SCRIPT), *options, '--json', str(result)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(result.read_text())
    assert [row['members'] for row in found['rows']] == [10, 50]
    for each in found['rows']:
        assert each['chunks_per_s'] > 0
        assert 0 < each['share'] < 1
        assert each['connections_per_member'] >= 1
    assert 'law: ' in done.stdout


@pytest.mark.parametrize('members', ['0', '5001', 'ten'])
def test_simulate_refuses_other_numbers_of_members(simulate, monkeypatch, capsys, members):
    monkeypatch.setattr(sys, 'argv', ['simulate.py', '--members', members])
    with pytest.raises(SystemExit):
        simulate.parse()
    assert '--members' in capsys.readouterr().err
