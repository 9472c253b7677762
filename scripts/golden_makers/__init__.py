"""The parts of scripts/make_golden.py."""

import sys
from pathlib import Path

# What they share with the tests is there.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'tests'))
