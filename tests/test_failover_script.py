"""scripts/failover.py: what it counts, and a short run of it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import environment

SCRIPT = Path(__file__).parents[1] / 'scripts' / 'failover.py'


@pytest.fixture(scope='module')
def failover():
    specification = importlib.util.spec_from_file_location('failover', SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ('read', 'lost', 'twice', 'out_of_order'),
    [((1, 2, 3), 0, 0, 0), ((1, 3), 1, 0, 0), ((1, 2, 2, 3), 0, 1, 0), ((2, 1, 3), 0, 0, 1), ((1, 2, 3, 1), 0, 1, 1)],
)
def test_failover_script_counts_what_differs(failover, tmp_path, read, lost, twice, out_of_order):
    options = SimpleNamespace(directory=tmp_path, seed=1)
    one = failover.Failovers(options, group=None)
    for number in (1, 2, 3):
        one.books['write-store'].write(number, 0.0)
    for number in read:
        one.books['read-store'].write(number, 0.0)
    counts = {'appended': 3, 'read': len(read), 'lost': lost, 'twice': twice, 'out of order': out_of_order}
    assert one.balance('store') == counts


@pytest.mark.long
@pytest.mark.timeout(600)
def test_failover_script_finds_no_loss(tmp_path):
    result = tmp_path / 'result.json'
    command = [sys.executable, str(SCRIPT), '--failovers', '10', '--seed', '7', '--json', str(result)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert len(found['failovers']) == 10
    assert found['store']['read'] == found['store']['appended'] > 100
    assert 'down-after: 1' in done.stdout
