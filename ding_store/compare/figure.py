"""The results as one figure, drawn by matplotlib: a panel for each section that was measured."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from ding_store.compare.units import PEERS, elements_text, number, seconds_text, size_text, times

COLORS = {'stock': '#c77d3a', 'queue': '#e3bf94', 'store': '#1f6f8b'}
BOUND, REQUIRED = '#1d2025', '#b3261e'
#: Inches: width of a panel, height of a panel without its bars, of a group of bars, and of the lines above all panels.
WIDTH, FRAME, GROUP, HEAD = 5.6, 0.9, 0.42, 0.5
#: A panel of curves is as high as this many groups.
CURVE_GROUPS = 6

Values = Sequence[Optional[float]]


class Panel(NamedTuple):
    """A part of the figure: how it is drawn, and the number of its groups of bars."""

    draw: Callable[[Axes], None]
    num_groups: int


def draw(result: Dict[str, Any], path: Path) -> None:
    """Write the figure of a result to a file. The file's suffix chooses the format: .png, .svg or .pdf."""
    panels = [panel for make in PANELS for panel in make(result)]
    num_columns = min(2, max(1, len(panels)))
    rows = [panels[i : i + num_columns] for i in range(0, len(panels), num_columns)] or [[]]
    heights = [FRAME + GROUP * max((panel.num_groups for panel in row), default=1) for row in rows]
    figure = Figure(figsize=(max(WIDTH * num_columns, 8.0), sum(heights) + HEAD), layout='constrained')
    figure.suptitle(_title(result), fontsize=8, x=0.01, ha='left')
    figure.legend(handles=_legend(result), loc='outside lower left', ncols=4, fontsize=8, frameon=False)
    axes = figure.subplots(len(rows), num_columns, squeeze=False, height_ratios=heights)
    for row, row_axes in zip(rows, axes):
        for panel, axis in zip(row, row_axes):
            panel.draw(axis)
            axis.spines[['top', 'right']].set_visible(False)
            axis.tick_params(labelsize=8)
            axis.set_axisbelow(True)
        for axis in row_axes[len(row) :]:
            axis.set_axis_off()
    figure.savefig(path, dpi=120)


def _legend(result: Dict[str, Any]) -> List[Any]:
    measured = {'stock', 'store', *_sides_in(result)}
    peers = [Patch(color=COLORS[side], label=name) for side, name in PEERS.items() if side in measured]
    return [*peers, Line2D([], [], color=BOUND, label='bound'), Line2D([], [], color=REQUIRED, label='required')]


def _sides_in(result: Any) -> Iterator[str]:
    """Yield the names of the peers that any record of the result has."""
    if isinstance(result, dict):
        yield from result.get('sides', ())
        result = list(result.values())
    if isinstance(result, list):
        for each in result:
            yield from _sides_in(each)


def _title(result: Dict[str, Any]) -> str:
    machine, settings = result['machine'], result['settings']
    elements = 'synthetic elements' if settings['elements'] == 'synthetic' else 'elements of real environments'
    return (
        f'{machine["cpu"]}, {machine["cores"]} cores, {machine["memory_bytes"] / 2**30:.0f} GiB. DI-engine '
        f'{machine["di_engine"]}, torch {machine["torch"]}, ding_store {machine["commit"] or machine["ding_store"]}.\n'
        f'Measured on {result.get("date", "-")}: medians of {settings["repeats"]} x '
        f'{settings["seconds"]:g} s, replays of up to {settings["memory_gb"]:g} GB, {elements}.'
    )


def _bars(
    axis: Axes,
    title: str,
    names: Sequence[str],
    values: Mapping[str, Values],
    form: Callable[[float], str],
    texts: Optional[Mapping[str, Sequence[str]]] = None,
    bounds: Values = (),
    required: Values = (),
    is_log: bool = True,
) -> None:
    """Draw a group of bars for each name: a bar per peer, with its value, and marks of the bound and the required."""
    known = [each for group in (*values.values(), bounds, required) for each in group if each]
    if is_log and known:
        axis.set_xscale('log')
        axis.set_xlim(min(known) / 2, max(known) * 6)
    else:
        axis.set_xlim(0, max(known, default=1.0) * 1.3)
    left, height = axis.get_xlim()[0], min(0.36, 0.72 / max(1, len(values)))
    for i, (side, each) in enumerate(values.items()):
        for place, value in enumerate(each):
            y = place + (i - (len(values) - 1) / 2) * height
            if value is None:
                axis.annotate('no figures', (left, y), (3, 0), textcoords='offset points', va='center', fontsize=7)
                continue
            axis.barh(y, value - left if is_log else value, height, left if is_log else 0, color=COLORS[side])
            text = form(value) if texts is None else texts[side][place]
            marks = [*_at(bounds, place), *_at(required, place)]
            # A text that would overlap the mark behind it is moved.
            end = max([value, *(mark for mark in marks if value <= mark <= value * 2.5)])
            axis.annotate(text, (end, y), (4, 0), textcoords='offset points', va='center', fontsize=7)
    for own, color in ((bounds, BOUND), (required, REQUIRED)):
        for place, value in enumerate(own):
            if value:
                axis.plot([value, value], [place - height, place + height], color=color, linewidth=1.5)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=10, loc='left')
    axis.grid(axis='x', alpha=0.3)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _at(marks: Values, place: int) -> List[float]:
    return [mark for mark in marks[place : place + 1] if mark]


def _figures(sides: Sequence[Dict[str, Any]], name: str) -> Dict[str, List[Optional[float]]]:
    """Return each peer's values of a figure, with None where it has none."""
    return {side: [each.get(side, {}).get(name) for each in sides] for side in PEERS if any(side in s for s in sides)}


def _single(result: Dict[str, Any]) -> List[Panel]:
    rows = [row for row in result['rows'].values() if row.get('single', {}).get('parts')]
    if not rows:
        return []
    lowest = [{side: {'headroom': _lowest(row, side, 'headroom')} for side in ('stock', 'store')} for row in rows]
    names = [f'{row["name"]}\n{elements_text(row, max(p["length"] for p in row["single"]["parts"]))}' for row in rows]
    bounds = [_lowest(row, 'store', 'bound_headroom') for row in rows]
    title = 'One process: headroom over the job'
    values = _figures(lowest, 'headroom')
    return [
        Panel(
            lambda axis: _bars(axis, title, names, values, times, bounds=bounds, required=[1.0] * len(rows)), len(names)
        )
    ]


def _lowest(row: Dict[str, Any], side: str, name: str) -> Optional[float]:
    """Return a row's figure: the lowest of its parts."""
    values = [part['sides'].get(side, {}).get(name) for part in row['single']['parts']]
    return min((value for value in values if value is not None), default=None)


def _across(result: Dict[str, Any]) -> List[Panel]:
    rows = [row for row in result['rows'].values() if row.get('across', {}).get('sides')]
    if not rows:
        return []
    values = _figures([row['across']['sides'] for row in rows], 'headroom')
    bounds = [row['across'].get('bound_headroom') for row in rows]
    names, title = [row['name'] for row in rows], 'Across processes: headroom over the job'
    return [
        Panel(
            lambda axis: _bars(axis, title, names, values, times, bounds=bounds, required=[1.0] * len(rows)), len(names)
        )
    ]


def _training(result: Dict[str, Any]) -> List[Panel]:
    names: List[str] = []
    found: List[Dict[str, Any]] = []
    for row in result['rows'].values():
        for part in row.get('single', {}).get('parts', []):
            base = part['sides'].get('stock', {}).get('iters_per_s')
            if base:
                names.append(row['name'])
                rates = {side: each.get('iters_per_s') for side, each in part['sides'].items()}
                found.append({side: {'rate': rate, 'ratio': rate and rate / base} for side, rate in rates.items()})
    if not names:
        return []
    values, rates = _figures(found, 'ratio'), _figures(found, 'rate')
    texts = {side: [f'{number(rate)}/s' if rate else '' for rate in each] for side, each in rates.items()}
    title = "The learner's iterations, relative to DI-engine's"
    return [
        Panel(
            lambda axis: _bars(axis, title, names, values, lambda ratio: f'{ratio:g}x', texts, is_log=False), len(names)
        )
    ]


def _sample(result: Dict[str, Any]) -> List[Panel]:
    rows = [row for row in result['rows'].values() if row.get('single', {}).get('parts')]
    values = _figures([row['single']['parts'][0]['sides'] for row in rows], 'sample_p99_s')
    if not any(each for group in values.values() for each in group):
        return []
    names = [row['name'] for row in rows]
    return [Panel(lambda axis: _bars(axis, 'Time of one sample (P99)', names, values, seconds_text), len(names))]


def _disk(result: Dict[str, Any]) -> List[Panel]:
    rows = [row for row in result['rows'].values() if row.get('disk', {}).get('samples_per_s')]
    if not rows:
        return []
    names = [f'{row["name"]}\n{size_text(row["disk"]["table_bytes"])}' for row in rows]
    values = {'store': [row['disk']['samples_per_s'] for row in rows]}
    bounds = [row['disk']['disk_per_s'] for row in rows]
    required = [row['required']['samples_per_s'] for row in rows]
    title = 'Table on disk: samples/s (bound: reads of the disk)'
    return [Panel(lambda axis: _bars(axis, title, names, values, number, bounds=bounds, required=required), len(names))]


def _series(result: Dict[str, Any]) -> List[Panel]:
    kinds: List[Tuple[str, str, Callable[[float], str], str]] = [
        ('length', 'length', number, 'length of the replay'),
        ('size', 'element_bytes', size_text, 'size of an element'),
        ('collectors', 'num_collectors', number, 'number of collectors'),
    ]
    return [
        Panel(functools.partial(_curves, _points(result, name), key, form, f'DQN: samples/s by {title}'), CURVE_GROUPS)
        for name, key, form, title in kinds
        if any('samples_per_s' in side for point in _points(result, name) for side in point['sides'].values())
    ]


def _points(result: Dict[str, Any], name: str) -> List[Dict[str, Any]]:
    points = result.get(name)
    return points if isinstance(points, list) else []  # it failed as a whole


def _curves(points: List[Dict[str, Any]], key: str, form: Callable[[float], str], title: str, axis: Axes) -> None:
    ticks = [point[key] for point in points]
    for side in PEERS:
        rates = [point['sides'].get(side, {}).get('samples_per_s') for point in points]
        axis.plot(ticks, [math.nan if rate is None else rate for rate in rates], 'o-', color=COLORS[side])
    axis.set_xscale('log')
    axis.set_yscale('log')
    axis.set_xticks(ticks, [form(tick) for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.3)
    axis.set_title(title, fontsize=10, loc='left')


def _cartpole(result: Dict[str, Any]) -> List[Panel]:
    kinds = {'store': 'store', 'serial': 'stock', 'parallel': 'stock'}
    record = result.get('cartpole', {})
    found = [(record[kind], side) for kind, side in kinds.items() if kind in record]
    if not found:
        return []

    def panel(axis: Axes) -> None:
        for place, (kind, side) in enumerate(found):
            seconds = kind.get('wall_s')
            axis.barh(place, seconds or 0, 0.6, color=COLORS[side])
            text = kind.get('failed', 'no figures') if seconds is None else f'{seconds:.1f} s'
            axis.annotate(text, (seconds or 0, place), (4, 0), textcoords='offset points', va='center', fontsize=7)
        axis.set_yticks(range(len(found)), [kind['title'] for kind, _ in found])
        axis.set_xlim(0, max([kind.get('wall_s') or 0 for kind, _ in found] + [1]) * 1.25)
        axis.set_xlabel('seconds of the whole command', fontsize=8)
        axis.invert_yaxis()
        axis.set_title('CartPole to its stop value', fontsize=10, loc='left')

    return [Panel(panel, len(found))]


PANELS: List[Callable[[Dict[str, Any]], List[Panel]]] = [
    _single, _across, _training, _sample, _disk, _series, _cartpole,
]  # fmt: skip
