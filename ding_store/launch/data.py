"""``ding-store data inspect``, ``export`` and ``import``: what a data set has, and other formats."""

from __future__ import annotations

import json
import sys
from typing import Any, Dict, List

from ding_store.datasets import DataSet
from ding_store.datasets.episodes import summary_of
from ding_store.datasets.formats import export as write_format
from ding_store.datasets.formats import import_ as read_format
from ding_store.free_space import format_bytes
from ding_store.launch.printing import printable

#: The longest bar of the histogram.
_WIDTH = 40


def inspect(path: str, as_json: bool) -> int:
    """Show a data set. Return 1 if a part of it is damaged."""
    with DataSet(path, on_damage='skip') as data_set:
        summary = summary_of(data_set)
    text = json.dumps(summary) if as_json else '\n'.join(_lines(summary))
    sys.stdout.write((text if as_json else printable(text)) + '\n')
    return 1 if summary['damaged'] else 0


def _lines(summary: Dict[str, Any]) -> List[str]:
    size, num_segments = format_bytes(summary['bytes']), summary['segments']
    lines = [
        f'rows        {summary["rows"]:,} in {num_segments} segments of {size}',
        f'episodes    {summary["episodes"]:,} whole, {summary["cut_episodes"]:,} cut',
    ]
    for name in ('length', 'return'):
        found = summary[name]
        if found is not None:
            lines.append(f'{name:12}{found["min"]:g} to {found["max"]:g}, mean {found["mean"]:.1f}')
    versions = [int(version) for version in summary['policy_versions']]
    if versions:
        lines.append(f'policies    {len(versions)} versions, {min(versions)} to {max(versions)}')
    lines.append('leaves')
    width = max(map(len, summary['leaves']), default=0) + 2
    lines += [f'  {name:{width}}{kind}' for name, kind in sorted(summary['leaves'].items())]
    if summary['histogram']:
        lines.append('returns of whole episodes')
        most = max(count for _, _, count in summary['histogram'])
        for low, high, count in summary['histogram']:
            lines.append(f'  {low:8.1f} to {high:8.1f}{count:8}  {"#" * round(_WIDTH * count / most)}'.rstrip())
    lines += [f'DAMAGED     segment {name}: {reason}' for name, reason in summary['damaged'].items()]
    return lines


def export(path: str, target: str, kind: str) -> int:
    """Write a data set in another format."""
    with DataSet(path) as data_set:
        num_rows = write_format(data_set, target, kind)
    sys.stdout.write(f'wrote {num_rows} rows of {printable(path)} to {printable(target)}\n')
    return 0


def import_(source: str, path: str) -> int:
    """Make a data set of another format."""
    num_rows = read_format(source, path)
    sys.stdout.write(f'wrote {num_rows} rows of {printable(source)} to {printable(path)}\n')
    return 0
