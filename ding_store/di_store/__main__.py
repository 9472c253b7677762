"""``python -m ding_store.di_store``: prints the directory for PYTHONPATH."""

import sys

from ding_store.di_store import path

sys.stdout.write(f'{path}\n')
