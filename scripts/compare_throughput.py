"""
DI-engine's own buffer and exchanger and the store, on the eight jobs of the published requirements.

    python scripts/compare_throughput.py --quick                                  about 2 minutes
    python scripts/compare_throughput.py --json figures.json --html report.html   about 35 minutes

This is `ding-store compare`. --help lists the options.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ding_store.cli import main

if __name__ == '__main__':
    sys.exit(main(['compare', *sys.argv[1:]]))
