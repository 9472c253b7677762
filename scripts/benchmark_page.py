#!/usr/bin/env python3
"""
Run the benchmarks of a page of results, and write what they print into it.

    python scripts/benchmark_page.py docs/results/data-and-objects.md
    python scripts/benchmark_page.py docs/results/data-and-objects.md --only objects bank

The page has a mark with the command of each benchmark, such as `<!-- table: python -m benchmarks objects -->`, and the
end mark of `scripts/pages.py` after it. Close other programs first: the benchmarks say how many cores others used.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path

from pages import ROOT, commit_name, machine_name, write_page

_MARK = re.compile(r'<!-- table: (python -m benchmarks (\w+).*) -->')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('page', type=Path)
    parser.add_argument('--only', nargs='+', metavar='WHAT', help='benchmarks to run (all of the page)')
    options = parser.parse_args()
    found = _MARK.findall(options.page.read_text())
    unknown = set(options.only or ()) - {what for _, what in found}
    if unknown or not found:
        raise SystemExit(f'{options.page} has no mark of {", ".join(sorted(unknown)) or "a benchmark"}')
    for command, what in found:
        if options.only is None or what in options.only:
            print(f'{command} ...', flush=True)
            write_page(options.page, command, printed(command))
    return 0


def printed(command: str) -> str:
    """Return what a benchmark prints, as a section of a page. A benchmark that fails ends this script."""
    words = [sys.executable, '-W', 'ignore', *shlex.split(command)[1:]]
    output = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    about = f'`{command}` on {date.today()}, at commit {commit_name()}, {machine_name()}'
    return f'{about}:\n\n```text\n{output}\n```\n'


if __name__ == '__main__':
    sys.exit(main())
