"""``ding-store plot``: the histories of runs as curves over environment steps and over time."""

from __future__ import annotations

import html
import io
import os
from typing import Dict, List, NamedTuple, Sequence, Tuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ding_store.metrics.record import Record

COLORS = ('#1f6f8b', '#c77d3a', '#4c8c4a', '#8d5a97', '#b3261e', '#7a6a53', '#3d4f9f', '#c2a83e')


PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title><style>svg {{ width: 100%; height: auto }}</style></head>
<body>
{svg}</body>
</html>
"""


class Panel(NamedTuple):
    """One row of the figure: a title, and for each name of a record its line style."""

    title: str
    lines: Dict[str, str]
    is_share: bool = False


PANELS = (
    Panel('evaluation return', {'eval_return': 'o-'}),
    Panel('env steps per second', {'env_steps_per_s': '-'}),
    Panel('training iterations per second', {'train_iters_per_s': '-'}),
    Panel(
        'share of time that the learner (solid) and the collectors (dashed) wait',
        {'learner_wait_experience': '-', 'collector_wait_learner': '--'},
        is_share=True,
    ),
)


def draw(runs: Dict[str, List[Record]], path: str) -> None:
    """
    Overview:
        Write the figure of some runs to a file. The file's suffix chooses the format: .png, .svg, .pdf or .html.
    Arguments:
        - runs (:obj:`Dict[str, list]`): Name of a run -> its records, see ``read_history``.
    """
    figure = Figure(figsize=(11.0, 2.6 * len(PANELS) + 0.6), layout='constrained')
    axes = figure.subplots(len(PANELS), 2, squeeze=False)
    for row, panel in zip(axes, PANELS):
        for is_time, ax in enumerate(row):
            for index, records in enumerate(runs.values()):
                _draw_run(ax, panel, records, bool(is_time), COLORS[index % len(COLORS)])
            _dress(ax, panel)
    axes[-1][0].set_xlabel('env steps')
    axes[-1][1].set_xlabel('minutes since the first record')
    handles = [axes[0][0].plot([], [], color=COLORS[i % len(COLORS)])[0] for i in range(len(runs))]
    figure.legend(handles, list(runs), loc='outside upper center', ncols=min(4, len(runs)), frameon=False)
    if path.endswith('.html'):
        _write_page(figure, ', '.join(runs), path)
    else:
        figure.savefig(path, dpi=110)


def _write_page(figure: Figure, title: str, path: str) -> None:
    """Write a web page that needs no other file."""
    drawn = io.StringIO()
    figure.savefig(drawn, format='svg')
    svg = drawn.getvalue()
    with open(path, 'w', encoding='utf-8') as page:
        page.write(PAGE.format(title=html.escape(title), svg=svg[svg.index('<svg') :]))


def _draw_run(ax: Axes, panel: Panel, records: Sequence[Record], is_time: bool, color: str) -> None:
    for name, style in panel.lines.items():
        x, y = _points(records, name, is_time)
        ax.plot(x, y, style, color=color, linewidth=1.2, markersize=3)


def _points(records: Sequence[Record], name: str, is_time: bool) -> Tuple[List[float], List[float]]:
    """Return the points of a name, in the order of the records."""
    known = [record for record in records if name in record]
    if is_time:
        return [(record['time'] - records[0]['time']) / 60 for record in known], [record[name] for record in known]
    # The return belongs to the step of its evaluation, which is before the record.
    axis = 'eval_step' if name == 'eval_return' else 'env_step'
    return [record.get(axis, record['env_step']) for record in known], [record[name] for record in known]


def _dress(ax: Axes, panel: Panel) -> None:
    ax.set_title(panel.title, loc='left', fontsize=9)
    ax.spines[['top', 'right']].set_visible(False)
    ax.grid(alpha=0.25)
    ax.tick_params(labelsize=8)
    if panel.is_share:
        ax.set_ylim(0.0, 1.0)
        ax.yaxis.set_major_formatter(lambda share, _: f'{share:.0%}')


def names_of(paths: Sequence[str]) -> List[str]:
    """Return a short name for each path: its directory, or the whole path if two directories have the same name."""
    found = [os.path.basename(os.path.dirname(path) if os.path.isfile(path) else path.rstrip('/')) for path in paths]
    return [path if found.count(name) > 1 or not name else name for path, name in zip(paths, found)]
