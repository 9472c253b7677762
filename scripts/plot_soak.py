"""Plot of the records that `scripts/soak.py --csv FILE` wrote.

python scripts/plot_soak.py soak.csv docs/soak.svg
"""

from __future__ import annotations

import csv
import sys

from matplotlib.figure import Figure

PANELS = (
    ('rows_per_s', 'rows/s taken by the learner'),
    ('lag', 'entries not yet acked'),
    ('server_mb', "redis-server's memory, MB"),
    ('reader_mb', "the learner's own memory, MB"),
    ('writers_mb', "all writers' own memory, MB"),
    ('cache_mb', "the run's files in the host cache, MB"),
)


def main(source: str, target: str) -> None:
    """Draw a panel for each figure over time, from zero."""
    with open(source, newline='') as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    figure = Figure(figsize=(8, 1.4 * len(PANELS)), layout='constrained')
    axes = figure.subplots(len(PANELS), 1, sharex=True)
    for axis, (name, title) in zip(axes, PANELS):
        axis.plot([row['at_s'] for row in rows], [row[name] for row in rows], color='#1f5fa8', linewidth=0.8)
        axis.set_title(title, fontsize=9, loc='left')
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
    axes[-1].set_xlabel('seconds')
    figure.savefig(target)


if __name__ == '__main__':
    main(*sys.argv[1:])
