"""Command line of ``compare``: checks the options, measures, and writes the figures."""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from ding_store.compare.disk import is_memory
from ding_store.compare.page import page
from ding_store.compare.recorded import recorded
from ding_store.compare.results import Results, finite
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
from ding_store.compare.terminal import Progress, render, terminal_width
from ding_store.compare.worker import WorkerFailed
from ding_store.errors import ConfigError
from ding_store.launch.termination import signals_as_interrupt


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
    parser.add_argument('--json', metavar='FILE', help='write all figures to FILE after every step')
    parser.add_argument('--html', metavar='FILE', help='write a report with plots to FILE')
    parser.add_argument('--resume', action='store_true', help='measure only what the --json FILE does not have yet')
    parser.set_defaults(call=lambda options, command: main(options))


def main(options: argparse.Namespace) -> int:
    """Measure, and return 0. Return 1 if a measurement failed: the tables say which."""
    rows, sections, settings = _checked(options)
    results = Results(Path(options.json) if options.json else None, settings, options.resume)
    with signals_as_interrupt(), scratch() as directory:
        # For all processes that follow: libraries leave temporary files, and killed processes leave more.
        os.environ['TMPDIR'] = directory
        # The forkserver's socket also: by default it is in a directory that a killed process would leave behind.
        multiprocessing.current_process()._config['tempdir'] = directory  # type: ignore[attr-defined]
        dqn = ROWS[0]
        if settings['elements'] == 'real':
            rows, dqn = _real(rows, dqn, sections, directory)
            for row in rows:
                planned(row, settings)
        failures = _measure(rows, dqn, sections, settings, results)
    results.save()
    sys.stdout.write(render(results.data, terminal_width()) + '\n')
    if options.html:
        Path(options.html).write_text(page(results.data), encoding='utf-8')
    for written in (options.json, options.html):
        if written:
            sys.stdout.write(f'wrote {os.path.abspath(written)}\n')
    for failure in failures:
        sys.stderr.write(failure + '\n')
    return 1 if failures else 0


def _checked(options: argparse.Namespace) -> Tuple[List[Row], List[str], Dict[str, Any]]:
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
    for name in ('memory', 'length', 'repeats', 'seconds'):
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


def _real(rows: List[Row], dqn: Row, sections: Sequence[str], directory: str) -> Tuple[List[Row], Row]:
    """Return the rows and DQN's with elements of their environments, if a chosen section measures them."""
    wanted = {row.name: row for row in rows} if set(sections) & set(ROW_SECTIONS) else {}
    if set(sections) & set(DQN_SECTIONS):
        wanted[dqn.name] = dqn
    if not wanted:
        return rows, dqn
    made = {row.name: row for row in recorded(list(wanted.values()), directory, _to_stderr)}
    return [made.get(row.name, row) for row in rows], made.get(dqn.name, dqn)


def _measure(
    rows: Sequence[Row], dqn: Row, sections: Sequence[str], settings: Dict[str, Any], results: Results
) -> List[str]:
    failures: List[str] = []
    steps = list(_steps(rows, dqn, sections, settings, results))
    with Progress(len(steps)) as progress:
        for record, section, name, measure in steps:
            if section in record:
                progress.skip()
                continue
            try:
                record[section] = finite(measure(functools.partial(_say, progress, name)))
                results.add_date()
            except WorkerFailed as error:
                failures.append(f'{name} {section}: {error}')
            results.save()
            progress.step()
    return failures


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


def _say(progress: Progress, name: str, text: str) -> None:
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
