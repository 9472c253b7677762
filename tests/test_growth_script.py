"""``scripts/growth.py``, small."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / 'scripts' / 'growth.py'


def test_growth_script_small_finds_no_count_above_its_bound():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), '--scale', '0.005'], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count('done') == 4
    assert 'over' not in done.stdout
