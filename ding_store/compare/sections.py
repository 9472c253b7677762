"""Sections of the comparison: measurements of a row or of the whole store. Each is one record of the results."""

from __future__ import annotations

import functools
import importlib.util
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from ding_store.compare.across import across
from ding_store.compare.disk import OWN_BYTES, on_disk
from ding_store.compare.rows import ROWS, Row
from ding_store.compare.scratch import scratch
from ding_store.compare.single import bound_headroom, interleaved
from ding_store.compare.worker import Effort, WorkerFailed, crashed, hung
from ding_store.errors import ConfigError
from ding_store.free_space import available_memory

Say = Callable[[str], None]
Settings = Dict[str, Any]

TITLES = ['stock', 'store']
#: Across processes also with DI-engine's message queue in Redis (``ditask --mq-type redis``).
ACROSS_TITLES = ['stock', 'queue', 'store']
NUM_COLLECTORS = 2
LENGTHS = [1_000, 10_000, 100_000, 400_000]
SIZES = [1_000, 10_000, 100_000, 1_000_000]
COLLECTORS = [1, 2, 4]
#: Bytes of DequeBuffer per element besides its payload, for Python objects, an index and metas. Measured: 6.0 KB.
STOCK_OBJECT_BYTES = 6000
#: Share of the budget that the elements take when the index is measured.
INDEX_SHARE = 0.25
SCRIPT = Path(__file__).resolve().parents[2] / 'scripts' / 'cartpole.py'
CARTPOLE_SEEDS = [0, 1]
#: Exit code that the script gives a run that it had to end.
HUNG_CODE = 124
CARTPOLE_FIGURES = ('wall_s', 'loop_s', 'env_step', 'train_iter', 'iters_per_s')


@dataclass(frozen=True)
class Part:
    """
    Overview:
        A replay that fits into memory. ``kind`` is 'whole', 'bytes' or 'index'. 'bytes' has elements of real size, as
        many as fit. 'index' has as many elements as the job, but smaller ones.
    """

    kind: str
    row: Row
    length: int


def parts(row: Row, budget_bytes: float, max_length: Optional[int] = None) -> List[Part]:
    """
    Overview:
        Return the parts to measure of a row. The row's figures are the lower ones of its parts.
    Arguments:
        - budget_bytes (:obj:`float`): Payload bytes of one replay.
        - max_length (:obj:`Optional[int]`): Maximum length of any part, for quick runs.
    """
    length = min(row.length, max_length or row.length)
    if length == row.length and length * row.element_bytes <= budget_bytes:
        return [Part('whole', row, length)]
    fitting = min(int(budget_bytes // row.element_bytes), length)
    if fitting < row.batch:
        raise ConfigError(
            f'--memory {budget_bytes / 1e9:g} holds {fitting} elements of {row.name}: give it at least '
            f'{row.batch * row.element_bytes / 1e9:.2f}, for a batch of {row.batch}'
        )
    if fitting == length:
        return [Part('bytes', row, fitting)]
    return [
        Part('bytes', row, fitting),
        Part('index', row.smaller(INDEX_SHARE * budget_bytes / length), length),
    ]


def memory_needed(part: Part) -> float:
    """Return the bytes of both sides together, because both exist at the same time."""
    payload = part.length * part.row.element_bytes
    per_step = max(1, part.row.steps) * len(part.row.leaves)
    return 2 * payload + part.length * STOCK_OBJECT_BYTES * max(1.0, per_step / 8)


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


def _effort(settings: Settings) -> Effort:
    return Effort(settings['repeats'], settings['seconds'], settings['timeout_s'])


def single(row: Row, settings: Settings, say: Say) -> Dict[str, Any]:
    """Measure adds and samples in one process, and train the row's policy."""
    return {'parts': [_part(part, settings, say, train=part.kind != 'index') for part in planned(row, settings)]}


def _part(part: Part, settings: Settings, say: Say, train: bool) -> Dict[str, Any]:
    sides = interleaved(part.row, part.length, TITLES, _effort(settings), train, say)
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
    effort = _effort(settings)
    longer = effort._replace(repeats=max(1, effort.repeats // 2), seconds=3 * effort.seconds)
    sides = across(row, num_collectors, ACROSS_TITLES, longer, say)
    say('memory copies of the learner')
    bound = bound_headroom(row, effort)
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
    effort = _effort(settings)._replace(seconds=2 * settings['seconds'])
    return {**_elements(row), **on_disk(row, table, limit, effort, tempfile.gettempdir(), say)}


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


def cartpole(settings: Settings, say: Say) -> Dict[str, Any]:
    """
    Overview:
        Measure the time until CartPole DQN reaches its stop value, by scripts/cartpole.py: on the store in four
        processes, in plain DI-engine serially and by ditask. The runs take turns.
    Returns:
        - kinds (:obj:`dict`): 'store', 'serial', 'parallel' -> title and medians over seeds, or what failed first.
    Raises:
        - WorkerFailed: This is no checkout of the repository.
    """
    script = _script()
    script.TIMEOUT_S = settings['timeout_s']
    run_by_kind = {**script.RUN, 'store': functools.partial(script.run_store, quiet=True)}
    runs: Dict[str, List[Dict[str, Any]]] = {kind: [] for kind in run_by_kind}
    failed: Dict[str, Dict[str, Any]] = {}
    with scratch() as directory:
        for seed in CARTPOLE_SEEDS[: 1 if settings['quick'] else None]:
            for kind, run in run_by_kind.items():
                if kind in failed:
                    continue
                say(f'{script.TITLES[kind]}, seed {seed}')
                made = run(seed, Path(directory))
                runs[kind].append(made)
                if made['code']:
                    reason = hung(script.TIMEOUT_S) if made['code'] == HUNG_CODE else crashed(made['code'])
                    log = Path(directory, script.LOG).read_text(errors='replace')
                    failed[kind] = WorkerFailed(reason, log).record
    return {
        kind: {
            'title': script.TITLES[kind],
            **(failed.get(kind) or {name: statistics.median(one[name] for one in each) for name in CARTPOLE_FIGURES}),
        }
        for kind, each in runs.items()
    }


def _script() -> Any:
    if not SCRIPT.exists():
        raise WorkerFailed('failed: only a checkout has scripts/cartpole.py')
    spec = importlib.util.spec_from_file_location('compare_cartpole', SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


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
    'cartpole': cartpole,
}
#: Sections of DQN's row, whichever rows are chosen.
DQN_SECTIONS: Dict[str, Callable[[Row, Settings, Say], Any]] = {'collectors': by_collectors}
SECTIONS = [*ROW_SECTIONS, *OTHER_SECTIONS, *DQN_SECTIONS]
QUICK_SECTIONS = ['single', 'length', 'size']
#: Rows whose replay is larger than most learners' memory.
ON_DISK = ('r2d2', 'impala')
