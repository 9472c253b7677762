"""Plot of the records that `scripts/soak.py --csv FILE` wrote.

python scripts/plot_soak.py soak.csv docs/soak.svg
"""

from __future__ import annotations

import csv
import sys
from typing import Dict, List

PANELS = (
    ('rows_per_s', 'rows/s taken by the learner'),
    ('lag', 'entries not yet acked'),
    ('server_mb', "redis-server's memory, MB"),
    ('reader_mb', "the learner's own memory, MB"),
    ('writers_mb', "all writers' own memory, MB"),
    ('cache_mb', "the run's files in the host cache, MB"),
)
WIDTH, HEIGHT, LEFT, TOP, GAP = 720, 90, 60, 24, 36


def main(source: str, target: str) -> None:
    with open(source, newline='') as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    body = [panel(rows, name, title, TOP + i * (HEIGHT + GAP)) for i, (name, title) in enumerate(PANELS)]
    size = f'width="{WIDTH + LEFT + 20}" height="{TOP + len(PANELS) * (HEIGHT + GAP)}"'
    style = 'font-family="sans-serif" font-size="11" fill="#444"'
    with open(target, 'w') as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n')
        file.write('<rect width="100%" height="100%" fill="white"/>\n' + '\n'.join(body) + '\n</svg>\n')


def panel(rows: List[Dict[str, float]], name: str, title: str, top: float) -> str:
    """Return a plot of one figure over time, from zero."""
    peak, end = max(row[name] for row in rows) or 1.0, rows[-1]['at_s']
    points = ' '.join(
        f'{LEFT + WIDTH * row["at_s"] / end:.1f},{top + HEIGHT * (1 - row[name] / peak):.1f}' for row in rows
    )
    frame = f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ccc"/>'
    line = f'<polyline points="{points}" fill="none" stroke="#1f5fa8" stroke-width="1"/>'
    texts = [
        f'<text x="{LEFT}" y="{top - 6}">{title}</text>',
        f'<text x="{LEFT - 6}" y="{top + 9}" text-anchor="end">{peak:,.0f}</text>',
        f'<text x="{LEFT - 6}" y="{top + HEIGHT}" text-anchor="end">0</text>',
        f'<text x="{LEFT + WIDTH}" y="{top + HEIGHT + 13}" text-anchor="end">{end:.0f} s</text>',
    ]
    return '\n'.join([frame, line, *texts])


if __name__ == '__main__':
    main(*sys.argv[1:])
