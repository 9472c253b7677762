"""``python -m benchmarks bank`` measures what it says. No test asserts on speed."""

import json
import subprocess
from pathlib import Path

import pytest
from jobs import benchmark, environment

pytest.importorskip('ding')


@pytest.mark.long
def test_bank_benchmark_reports_every_figure(tmp_path: Path) -> None:
    command = benchmark('bank', '--megabytes', '3', '--seconds', '0.01', '--json', tmp_path / 'out.json')
    done = subprocess.run(
        [*command, '--directory', tmp_path], env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads((tmp_path / 'out.json').read_text())
    assert set(figures['sizes']) == {'10 KB', '100 KB', '10 KB to 1 MB'}
    for each in figures['sizes'].values():
        ours = [each['memcpy'], *(each['kinds'][kind] for kind in each['kinds'] if kind.startswith('MemoryBank'))]
        assert len(ours) == 4
        assert all(found['gather_s'] > 0 and found['append_s'] > 0 and found['extend_s'] > 0 for found in ours)
    readers = figures['readers']
    # One copy for all, and not one for each.
    assert readers['bank_bytes'] * 0.9 < readers['pss_bytes'] < readers['bank_bytes'] * 2
    assert '8 reader processes and the owner' in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ['out.json']
