"""Sections of the comparison: measurements of a row or of the whole store. Each is one record of the results."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any, Callable, Dict, List

from ding_store.compare.across import across
from ding_store.compare.cartpole import cartpole
from ding_store.compare.disk import OWN_BYTES, on_disk
from ding_store.compare.plan import INDEX_SHARE, Part, memory_needed, parts
from ding_store.compare.rows import ROWS, Row
from ding_store.compare.windows import bound_headroom, interleaved
from ding_store.errors import ConfigError
from ding_store.free_space import available_memory

Say = Callable[[str], None]
Settings = Dict[str, Any]

TITLES = ['stock', 'store']
NUM_COLLECTORS = 2
LENGTHS = [1_000, 10_000, 100_000, 400_000]
SIZES = [1_000, 10_000, 100_000, 1_000_000]
COLLECTORS = [1, 2, 4]


def planned(row: Row, settings: Settings) -> List[Part]:
    """Return the parts of a row to measure in one process. Refuse them if both sides do not fit into free memory."""
    chosen = parts(row, settings['memory_gb'] * 1e9, settings['length'])
    for part in chosen:
        _check_memory(part, settings)
    return chosen


def _check_memory(part: Part, settings: Settings) -> None:
    needed, there = memory_needed(part), available_memory()
    if needed > 0.9 * there:
        raise ConfigError(
            f'{part.row.name} needs about {needed / 1e9:.1f} GB for both replays, {there / 1e9:.1f} are free: '
            f'give less with --memory ({settings["memory_gb"]:g} now)'
        )


def single(row: Row, settings: Settings, say: Say) -> Dict[str, Any]:
    """Measure adds and samples in one process, and train the row's policy."""
    return {'parts': [_part(part, settings, say, train=part.kind != 'index') for part in planned(row, settings)]}


def _part(part: Part, settings: Settings, say: Say, train: bool) -> Dict[str, Any]:
    sides = interleaved(part.row, part.length, TITLES, settings['repeats'], settings['seconds'], train, say)
    return {
        'kind': part.kind,
        **_elements(part.row),
        'length': part.length,
        'sides': sides,
    }


def processes(row: Row, settings: Settings, say: Say) -> Dict[str, Any]:
    """Measure collectors and a learner that are separate processes."""
    return _across(row, NUM_COLLECTORS, settings, say)


def _across(row: Row, num_collectors: int, settings: Settings, say: Say) -> Dict[str, Any]:
    repeats, seconds = max(1, settings['repeats'] // 2), 3 * settings['seconds']
    sides = across(row, num_collectors, TITLES, repeats, seconds, say)
    say('memory copies of the learner')
    bound = bound_headroom(row, settings['seconds'])
    return {'num_collectors': num_collectors, **_elements(row), 'bound_headroom': bound, 'sides': sides}


def _elements(row: Row) -> Dict[str, Any]:
    """Return the source and size of a record's elements."""
    return {'source': row.source or 'synthetic', 'element_bytes': row.element_bytes}


def disk(row: Row, settings: Settings, say: Say) -> Dict[str, Any]:
    """Measure a table on disk that is larger than its process's memory limit."""
    # A few batches are in memory at once. The rest of the limit may hold parts of the table.
    own = OWN_BYTES + 4.0 * row.batch * row.element_bytes
    table = max(2e9 * settings['memory_gb'], 2 * own)
    limit = own + table / 8
    found = on_disk(row, table, limit, settings['repeats'], 2 * settings['seconds'], tempfile.gettempdir(), say)
    return {**_elements(row), **found}


def by_length(settings: Settings, say: Say) -> List[Dict[str, Any]]:
    """Measure DQN's job at growing lengths, with elements so small that the longest fits."""
    dqn, longest = ROWS[0], min(LENGTHS[-1], settings['length'] or LENGTHS[-1])
    row = dqn.smaller(INDEX_SHARE * settings['memory_gb'] * 1e9 / longest)
    lengths = [length for length in LENGTHS if length < longest] + [longest]
    return _series([Part('index', row, length) for length in lengths], settings, say)


def by_size(settings: Settings, say: Say) -> List[Dict[str, Any]]:
    """Measure DQN's job without priorities, with elements of growing size."""
    dqn = replace(ROWS[0], kind='uniform')
    rows = [dqn.smaller(size) if size < dqn.element_bytes else _larger(dqn, size) for size in SIZES]
    budget = settings['memory_gb'] * 1e9 / 4
    return _series(
        [Part('bytes', row, int(max(2 * row.batch, min(50_000, budget // row.element_bytes)))) for row in rows],
        settings,
        say,
    )


def _larger(row: Row, size: int) -> Row:
    factor = size / row.element_bytes
    leaves = {
        path: (dtype, (round(shape[0] * factor), *shape[1:]) if len(shape) == 3 else shape)
        for path, (dtype, shape) in row.leaves.items()
    }
    return replace(row, leaves=leaves)


def _series(points: List[Part], settings: Settings, say: Say) -> List[Dict[str, Any]]:
    short = {**settings, 'repeats': min(2, settings['repeats'])}
    return [_part(point, short, say, train=False) for point in points]


def by_collectors(dqn: Row, settings: Settings, say: Say) -> List[Dict[str, Any]]:
    """Measure DQN's job across processes with growing numbers of collectors."""
    short = {**settings, 'repeats': 1}
    return [_across(dqn, number, short, say) for number in COLLECTORS]


def converge(settings: Settings, say: Say) -> Dict[str, Any]:
    return cartpole([0] if settings['quick'] else [0, 1], say)


#: Sections that are measured for each chosen row.
ROW_SECTIONS: Dict[str, Callable[[Row, Settings, Say], Dict[str, Any]]] = {
    'single': single,
    'across': processes,
    'disk': disk,
}
#: Sections of no row. The first two make elements of special sizes.
OTHER_SECTIONS: Dict[str, Callable[[Settings, Say], Any]] = {
    'length': by_length,
    'size': by_size,
    'cartpole': converge,
}
#: Sections of DQN's row, whichever rows are chosen.
DQN_SECTIONS: Dict[str, Callable[[Row, Settings, Say], Any]] = {'collectors': by_collectors}
SECTIONS = [*ROW_SECTIONS, *OTHER_SECTIONS, *DQN_SECTIONS]
QUICK_SECTIONS = ['single', 'length', 'size']
#: Rows whose replay is larger than most learners' memory.
ON_DISK = ('r2d2', 'impala')
