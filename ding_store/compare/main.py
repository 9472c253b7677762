"""Command line of ``compare``: checks the options, measures, and writes the figures."""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from ding_store.compare.disk import is_memory
from ding_store.compare.recorded import recorded
from ding_store.compare.results import Results, failures, finite
from ding_store.compare.rows import ROWS, Row
from ding_store.compare.scratch import scratch
from ding_store.compare.sections import (
    DQN_SECTIONS,
    ON_DISK,
    OTHER_SECTIONS,
    QUICK_SECTIONS,
    ROW_SECTIONS,
    SECTIONS,
    planned,
)
from ding_store.compare.worker import WorkerFailed
from ding_store.errors import ConfigError
from ding_store.launch.termination import signals_as_interrupt

#: Formats of the figure, by the file's suffix.
FORMATS = ('.png', '.svg', '.pdf')
#: Lines of a failed peer's log that are printed. The --json file has more.
LOG_LINES = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--rows', nargs='+', metavar='ROW', help=f'default: all of {" ".join(r.name for r in ROWS)}')
    parser.add_argument(
        '--sections',
        nargs='+',
        metavar='SECTION',
        help=f'what to measure: {" ".join(SECTIONS)}; default: all (quick: {" ".join(QUICK_SECTIONS)})',
    )
    parser.add_argument('--quick', action='store_true', help='about 2 minutes: small replays, short windows')
    parser.add_argument('--memory', type=float, metavar='GB', help='payload of one replay (default: 4; quick: 0.35)')
    parser.add_argument(
        '--length', type=int, metavar='N', help='maximum number of elements of a replay (default: all; quick: 10000)'
    )
    parser.add_argument(
        '--elements',
        choices=['real', 'synthetic'],
        help='from the environments whose extras are installed, or all random (default: real; quick: synthetic)',
    )
    parser.add_argument('--repeats', type=int, metavar='N', help='windows per figure (default: 5; quick: 2)')
    parser.add_argument('--seconds', type=float, metavar='S', help='seconds per window (default: 1; quick: 0.2)')
    parser.add_argument(
        '--timeout',
        type=float,
        metavar='S',
        default=300.0,
        help='seconds after which a peer that does not end a step is killed (default: 300)',
    )
    parser.add_argument('--json', metavar='FILE', help='write all figures to FILE after every step')
    parser.add_argument('--figure', metavar='FILE', help=f'draw the figures to FILE ({", ".join(FORMATS)})')
    parser.add_argument(
        '--resume', action='store_true', help='measure only what the --json FILE does not have yet, or failed'
    )
    parser.set_defaults(call=lambda options, command: main(options))


def main(options: argparse.Namespace) -> int:
    """Measure, and return 0. Return 1 if a peer failed: the tables say which, and have the figures of the others."""
    rows, sections, settings = _checked(options)
    from ding_store.compare.tables import show

    results = Results(Path(options.json) if options.json else None, settings, options.resume)
    effort = {**settings, 'timeout_s': options.timeout}  # a run may be resumed with another timeout
    with signals_as_interrupt(), scratch() as directory:
        # For all processes that follow: libraries leave temporary files, and killed processes leave more.
        os.environ['TMPDIR'] = directory
        # The forkserver's socket also: by default it is in a directory that a killed process would leave behind.
        multiprocessing.current_process()._config['tempdir'] = directory  # type: ignore[attr-defined]
        dqn = ROWS[0]
        if settings['elements'] == 'real':
            rows, dqn = _real(rows, dqn, sections, directory, options.timeout)
            for row in rows:
                planned(row, settings)
        _measure(rows, dqn, sections, effort, results)
    results.save()
    show(results.data, sys.stdout)
    if options.figure:
        from ding_store.compare.figure import draw

        draw(results.data, Path(options.figure))
    for written in (options.json, options.figure):
        if written:
            sys.stdout.write(f'wrote {os.path.abspath(written)}\n')
    failed = list(failures(results.data))
    for where, failure in failed:
        last_lines = failure['log'].splitlines()[-LOG_LINES:]
        sys.stderr.write('\n'.join([f'{where}: {failure["failed"]}', *last_lines, '']))
    return 1 if failed else 0


def _need_extra(*modules: str) -> None:
    """Refuse to begin without the modules that print and draw, so that no measurement is lost."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"compare needs {error.name}, which is not installed. Run: pip install 'ding_store[compare]'"
            ) from error


def _checked(options: argparse.Namespace) -> Tuple[List[Row], List[str], Dict[str, Any]]:
    _need_extra('rich', *(['matplotlib'] if options.figure else []))
    if options.figure and Path(options.figure).suffix not in FORMATS:
        raise ConfigError(f'--figure {options.figure!r} must end in one of {", ".join(FORMATS)}')
    known = {row.name: row for row in ROWS}
    names = options.rows or list(known)
    sections = options.sections or list(QUICK_SECTIONS if options.quick else SECTIONS)
    for kind, given, all_ in (('row', names, list(known)), ('section', sections, list(SECTIONS))):
        for name in given:
            if name not in all_:
                raise ConfigError(f'no {kind} {name!r}; known are {", ".join(all_)}')
    quick = options.quick
    settings = {
        'quick': quick,
        'elements': options.elements or ('synthetic' if quick else 'real'),
        'length': options.length or (10_000 if quick else None),
        'memory_gb': options.memory or (0.35 if quick else 4.0),
        'repeats': options.repeats or (2 if quick else 5),
        'seconds': options.seconds or (0.2 if quick else 1.0),
    }
    for name in ('memory', 'length', 'repeats', 'seconds', 'timeout'):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f'--{name} ({value:g}) must be above 0, and finite')
    if 'disk' in sections and set(names) & set(ON_DISK) and is_memory(tempfile.gettempdir()):
        raise ConfigError(
            f'--sections disk: {tempfile.gettempdir()!r} is memory, and no disk: set TMPDIR to a directory on one, or '
            'name the other --sections'
        )
    rows = [known[name] for name in names]
    for row in rows:
        planned(row, settings)
    return rows, sections, settings


def _real(
    rows: List[Row], dqn: Row, sections: Sequence[str], directory: str, timeout_s: float
) -> Tuple[List[Row], Row]:
    """Return the rows and DQN's with elements of their environments, if a chosen section measures them."""
    wanted = {row.name: row for row in rows} if set(sections) & set(ROW_SECTIONS) else {}
    if set(sections) & set(DQN_SECTIONS):
        wanted[dqn.name] = dqn
    if not wanted:
        return rows, dqn
    made = {row.name: row for row in recorded(list(wanted.values()), directory, timeout_s, _to_stderr)}
    return [made.get(row.name, row) for row in rows], made.get(dqn.name, dqn)


def _measure(
    rows: Sequence[Row], dqn: Row, sections: Sequence[str], settings: Dict[str, Any], results: Results
) -> None:
    """Measure each step that the results do not have. A step that fails leaves a record of it, and the next begins."""
    from ding_store.compare.tables import StepProgress

    steps = [each for each in _steps(rows, dqn, sections, settings, results) if _is_left(each[0], each[1])]
    with StepProgress(len(steps)) as progress:
        for record, section, name, measure in steps:
            try:
                record[section] = finite(measure(functools.partial(_say, progress, name)))
            except WorkerFailed as error:
                progress.say(f'{name} {error}')
                record[section] = error.record
            results.add_date()
            results.save()
            progress.step()


def _is_left(record: Dict[str, Any], section: str) -> bool:
    """Return True for a section that was not measured, or that has a failure."""
    return section not in record or any(failures(record[section]))


def _steps(
    rows: Sequence[Row], dqn: Row, sections: Sequence[str], settings: Dict[str, Any], results: Results
) -> Iterator[Tuple[Dict[str, Any], str, str, Callable]]:
    """Yield each step: the record that it belongs to, its section, the name to show, and the function that measures."""
    if set(sections) & set(ROW_SECTIONS):
        for row in rows:
            results.describe(_facts(row))
    for section in sections:
        if section in OTHER_SECTIONS:
            yield results.data, section, section, functools.partial(OTHER_SECTIONS[section], settings)
            continue
        if section in DQN_SECTIONS:
            yield results.data, section, section, functools.partial(DQN_SECTIONS[section], dqn, settings)
            continue
        for row in rows:
            if section != 'disk' or row.name in ON_DISK:
                yield results.row(row.name), section, row.name, functools.partial(ROW_SECTIONS[section], row, settings)


def _say(progress: Any, name: str, text: str) -> None:
    progress.say(f'{name} {text}')


def _to_stderr(text: str) -> None:
    sys.stderr.write(text + '\n')


def _facts(row: Row) -> Dict[str, Any]:
    return {
        'name': row.name,
        'title': row.title,
        'length': row.length,
        'kind': row.kind,
        'published_bytes': row.published,
        'element_bytes': row.element_bytes,
        'source': row.source,
        'why_synthetic': row.why_synthetic,
        'batch': row.batch,
        'required': {'adds_per_s': row.adds_per_s, 'samples_per_s': row.samples_per_s},
    }
