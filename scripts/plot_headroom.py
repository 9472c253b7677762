"""
Draw the headroom of all jobs from the tables that `ding-store compare` printed into a results page.

    python scripts/plot_headroom.py docs/results/compare.md docs/headroom.svg
"""

import re
import sys
from pathlib import Path
from typing import Dict, List, Tuple

Bars = Dict[str, Tuple[float, float]]  # job -> headroom of plain DI-engine and of the store


def main() -> None:
    page, picture = map(Path, sys.argv[1:])
    text = page.read_text(encoding='utf-8')
    draw(
        {'one process': headroom(text, 'one process '), 'across processes': headroom(text, 'across processes')}, picture
    )


def headroom(text: str, title: str) -> Bars:
    """Read a table's headroom. A job that was measured twice gets the lower figures."""
    (table,) = re.findall(rf'^{title}.*?(?=^$|^```)', text, re.M | re.S)
    titles, _, *lines = table.splitlines()
    begin, end = titles.index('headroom'), titles.find('memory per element')
    found: Bars = {}
    for line in lines:
        cells = line[begin : end if end > 0 else None].split()
        stock, store = (float(cell.rstrip('x').replace(',', '')) for cell in cells[:2])
        job = line.split()[0]
        before = found.get(job, (stock, store))
        found[job] = (min(stock, before[0]), min(store, before[1]))
    return found


def label(value: float) -> str:
    return f'{value:,g}x'


def draw(tables: Dict[str, Bars], picture: Path) -> None:
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    pyplot.rcParams.update({'svg.hashsalt': 'ding_store', 'svg.fonttype': 'none', 'font.family': 'sans-serif'})
    figure, axes = pyplot.subplots(1, len(tables), figsize=(10, 3.6), sharey=True)
    for one, (title, bars) in zip(axes, tables.items()):
        places: List[int] = list(range(len(bars), 0, -1))
        for shift, side, name, colour in ((0.2, 0, 'plain DI-engine', '#c97f3c'), (-0.2, 1, 'ding_store', '#1f6f8b')):
            values = [pair[side] for pair in bars.values()]
            one.barh([place + shift for place in places], values, 0.38, left=0, label=name, color=colour)
            for place, value in zip(places, values):
                one.text(value * 1.1, place + shift, label(value), va='center', fontsize=7)
        one.axvline(1, color='black', linewidth=1, linestyle='--')
        one.set(xscale='log', xlim=(0.3, 2e4), title=title, yticks=places, yticklabels=list(bars))
        one.set_xticks([1, 10, 100, 1000], ['1x', '10x', '100x', '1,000x'])
    axes[0].legend(loc='upper right', fontsize=8)
    figure.supxlabel('times the rates that the job requires (dashed: just met)', fontsize=9)
    figure.tight_layout()
    figure.savefig(picture, metadata={'Date': None})


if __name__ == '__main__':
    main()
