"""What scripts write into pages of results: tables between two marks, the commit, and the machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Sequence

ROOT = Path(__file__).resolve().parents[1]
END = '<!-- end of table -->'


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table in Markdown. The first has the titles."""
    head, *others = rows
    lines = [head, ['---'] * len(head), *others]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def write_page(path: Path, name: str, text: str) -> None:
    """Write text into a page, between the mark that names a script, such as ``scripts/x.py task``, and the next end."""
    mark = f'<!-- table: {name} -->'
    before, begin, after = path.read_text().partition(mark + '\n')
    if not begin or END not in after:
        raise SystemExit(f'{path} lacks the lines {mark!r} and {END!r}. Add them, in this order.')
    path.write_text(f'{before}{begin}{text}{END}{after.partition(END)[2]}')


def commit_name() -> str:
    """Return the commit of the checkout, with a note if files differ from it."""
    answers = [
        subprocess.run(['git', '-C', str(ROOT), *words], capture_output=True, text=True).stdout.strip()
        for words in (['rev-parse', '--short=8', 'HEAD'], ['status', '--porcelain', '--untracked-files=no'])
    ]
    return f'`{answers[0] or "unknown"}`{" and changes" if answers[1] else ""}'


def machine_name() -> str:
    lines = Path('/proc/cpuinfo').read_text().splitlines()
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return f'{os.cpu_count()} cores of {names[0] if names else "an unknown processor"}'
