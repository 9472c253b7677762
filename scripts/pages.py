"""Tables that scripts write into pages of results, between two marks."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

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
