"""Terminal output: progress while it measures, and tables of the results that fit the terminal."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from ding_store.compare.units import PEERS, elements_text, number, percent, seconds_text, size_text, times

#: Least characters per line if the output is no terminal: every table fits, with notes.
PIPED_WIDTH = 100
#: Tables have one space between columns on narrower terminals, and two on others.
NARROW = 72


def console_of(out: Any) -> Console:
    """Return a console for a stream. If it is no terminal, its lines are plain, and long enough for every table."""
    console = Console(file=out, highlight=False, emoji=False, markup=False)
    if not out.isatty():
        console.width = max(PIPED_WIDTH, console.width)
    return console


class StepProgress:
    """Progress on stderr: a bar with the time left on a terminal, elsewhere a line per step."""

    def __init__(self, num_steps: int) -> None:
        self._console = console_of(sys.stderr)
        self._num_steps = num_steps
        columns = [BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
        # Steps differ: all of them estimate the time left, not only those of the last half minute.
        self._bar = Progress(
            *columns,
            TextColumn('{task.description}', table_column=Column(no_wrap=True, ratio=1)),
            console=self._console,
            transient=True,
            expand=True,
            disable=not self._console.is_terminal,
            speed_estimate_period=float('inf'),
        )
        self._task = self._bar.add_task('', total=num_steps)

    def say(self, text: str) -> None:
        self._bar.update(self._task, description=text)
        if self._bar.disable:
            done = int(self._bar.tasks[0].completed)
            self._console.print(f'{done}/{self._num_steps} {text}', soft_wrap=True)

    def step(self) -> None:
        self._bar.advance(self._task)

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class Line(NamedTuple):
    """A peer's line of a table. ``note`` says what became of the peer if it has no figures."""

    peer: str
    cells: Sequence[str] = ()
    note: str = ''


#: Facts of a job, one below the other, and the lines beside them.
Group = Tuple[List[str], List[Line]]


class Section(NamedTuple):
    """One table: a title, the heads of its first column and of its figures, and its groups of lines."""

    title: str
    job: str
    heads: Sequence[str]
    groups: List[Group]


def show(result: Dict[str, Any], out: Any) -> None:
    """Print all tables of a result. See ``Results`` for the result's shape."""
    console = console_of(out)
    for make in SECTIONS:
        section = make(result)
        if section.groups:
            table = _table(section, console.width, has_column=True)
            if console.measure(table, options=console.options.update(width=1000)).maximum > console.width:
                table = _table(section, console.width, has_column=False)
            console.print(table)
            console.print()
    for note in [NOTES, *without_extra(result)]:
        console.print(note)


def without_extra(result: Dict[str, Any]) -> List[str]:
    """Name the rows whose elements should be real and are not, with the reasons."""
    return [
        f'{row["name"]} is synthetic: {row["why_synthetic"]}' for row in result['rows'].values() if row['why_synthetic']
    ]


NOTES = (
    'headroom: how many times both required rates, at once; 1x is just met. bound: what copies in memory could do. '
    'bytes: elements of real size, as many as fit into --memory. index: as many elements as the job has, made smaller.'
)


def _table(section: Section, width: int, has_column: bool) -> Table:
    """Return a section as a table, with a column for notes, if there are any, or with each note behind its peer."""
    lines = [line for _, group in section.groups for line in group]
    has_notes = has_column and any(line.note for line in lines)
    has_facts = any(facts for facts, _ in section.groups)
    table = Table(
        title=section.title,
        title_justify='left',
        title_style='bold',
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0) if width < NARROW else (0, 1, 0, 0),
    )
    if has_facts:
        table.add_column(section.job)
    table.add_column('peer', min_width=max(len(line.peer) for line in lines))
    for head in section.heads:
        table.add_column(head, justify='right', no_wrap=True)
    if has_notes:
        table.add_column('note', no_wrap=True)
    for facts, group in section.groups:
        for i in range(max(len(facts), len(group))):
            line = group[i] if i < len(group) else Line('')
            cells = [*line.cells, *[''] * (len(section.heads) - len(line.cells))]
            fact = Text(facts[i] if i < len(facts) else '', style='bold' if i == 0 else 'dim')
            note = Text(line.note, style='red')
            peer = Text(line.peer, style='' if line.peer in PEERS.values() or line.note else 'dim')
            if line.note and not has_notes:
                peer.append(': ' if line.peer else '').append(note)
            table.add_row(*[fact] * has_facts, peer, *cells, *[note] * has_notes)
    return table


def _cell(record: Dict[str, Any], name: str, form: Callable[[Any], str]) -> str:
    value = record.get(name)
    return '-' if value is None else form(value)


def _peers(sides: Dict[str, Any], cells: Callable[[Dict[str, Any]], Sequence[str]]) -> List[Line]:
    """Return a line per peer. One that failed has no figures."""
    return [
        Line(PEERS[side], (), record['failed']) if 'failed' in record else Line(PEERS[side], cells(record))
        for side, record in sides.items()
    ]


def _failed(record: Any) -> List[Line]:
    """Return the line of a section that failed as a whole, if it did."""
    return [Line('', (), record['failed'])] if isinstance(record, dict) and 'failed' in record else []


def _rows(result: Dict[str, Any], section: str) -> Iterator[Tuple[Dict[str, Any], Dict[str, Any]]]:
    for row in result['rows'].values():
        if section in row:
            yield row, row[section]


def _parts(result: Dict[str, Any]) -> Iterator[Tuple[Dict[str, Any], Dict[str, Any]]]:
    for row, record in _rows(result, 'single'):
        for part in record.get('parts', []):
            yield row, part


def _facts(row: Dict[str, Any], part: Dict[str, Any]) -> List[str]:
    return [f'{row["name"]} {part["kind"]}', part['source'], elements_text(part)]


def _required(row: Dict[str, Any]) -> Line:
    required = row['required']
    return Line('required', [number(required['adds_per_s']), number(required['samples_per_s']), '1x'])


def single_section(result: Dict[str, Any]) -> Section:
    groups: List[Group] = [
        ([row['name']], _failed(record)) for row, record in _rows(result, 'single') if _failed(record)
    ]
    for row, part in _parts(result):
        lines = _peers(
            part['sides'],
            lambda side: [
                _cell(side, 'adds_per_s', number),
                _cell(side, 'samples_per_s', number),
                _cell(side, 'headroom', times),
                _cell(side, 'memory_per_element', size_text),
            ],
        )
        store = part['sides'].get('store', {})
        cells = [
            _cell(store, 'copy_per_s', number),
            _cell(store, 'gather_per_s', number),
            _cell(store, 'bound_headroom', times),
        ]
        groups.append((_facts(row, part), [_required(row), *lines, Line('bound', cells)]))
    return Section('One process', 'job', ['add/s', 'sample/s', 'headroom', 'memory'], groups)


def sample_section(result: Dict[str, Any]) -> Section:
    names = ('sample_p50_s', 'sample_p90_s', 'sample_p99_s')
    groups = [
        (
            [f'{row["name"]} {part["kind"]}', part['source']],
            _peers(part['sides'], lambda side: [_cell(side, name, seconds_text) for name in names]),
        )
        for row, part in _parts(result)
        if part['kind'] != 'index' and any(names[0] in side for side in part['sides'].values())
    ]
    return Section('Time of one sample', 'job', ['median', 'P90', 'P99'], groups)


def training_section(result: Dict[str, Any]) -> Section:
    groups: List[Group] = []
    for row, part in _parts(result):
        sides = part['sides']
        if not any('iters_per_s' in side for side in sides.values()):
            continue
        base, store = sides.get('stock', {}).get('iters_per_s'), sides.get('store', {}).get('train_s')
        lines = _peers(
            sides,
            lambda side, base=base, store=store: [  # type: ignore[misc]
                number(side['iters_per_s']),
                f'{side["iters_per_s"] / base:.2f}x' if base else '-',
                percent(1 - store * side['iters_per_s']) if store else '-',
            ],
        )
        groups.append(([row['name'], part['source']], lines))
    return Section("The learner's loop", 'job', ['iteration/s', 'relative', 'not training'], groups)


def across_section(result: Dict[str, Any]) -> Section:
    groups: List[Group] = []
    for row, record in _rows(result, 'across'):
        lines = _failed(record) or [
            _required(row),
            *_across_peers(record),
            Line('bound', ['', '', _cell(record, 'bound_headroom', times)]),
        ]
        facts = [row['name'], record.get('source', '')]
        groups.append((facts, lines))
    return Section('Across processes', 'job', ['add/s', 'sample/s', 'headroom', 'data/s'], groups)


def _across_peers(record: Dict[str, Any]) -> List[Line]:
    return _peers(
        record['sides'],
        lambda side: [
            _cell(side, 'adds_per_s', number),
            _cell(side, 'samples_per_s', number),
            _cell(side, 'headroom', times),
            _cell(side, 'add_bytes_per_s', size_text),
        ],
    )


def disk_section(result: Dict[str, Any]) -> Section:
    groups: List[Group] = []
    for row, record in _rows(result, 'disk'):
        if _failed(record):
            groups.append(([row['name']], _failed(record)))
            continue
        limit = f'in {size_text(record["limit_bytes"])}' if record['limit_bytes'] else 'not limited'
        facts = [row['name'], record['source'], f'{size_text(record["table_bytes"])} {limit}']
        cells = [
            number(record['samples_per_s']),
            f'{record["fraction"]:.2f}',
            _cell(record, 'cached', percent),
            _cell(record, 'learner_at', percent),
        ]
        lines = [
            Line('required', [number(row['required']['samples_per_s'])]),
            Line(PEERS['store'], cells),
            Line('disk reads', [number(record['disk_per_s'])]),
        ]
        lines += [Line('', (), record['reason'])] if record['reason'] else []
        groups.append((facts, lines))
    return Section('Table on disk', 'job', ['sample/s', 'of disk', 'cached', 'learner'], groups)


#: Section -> the number that grows: its name in a record, its head, and its text.
SERIES: Dict[str, Tuple[str, str, Callable[[float], str]]] = {
    'length': ('length', 'length', number),
    'size': ('element_bytes', 'element', size_text),
    'collectors': ('num_collectors', 'collectors', number),
}


def series_section(name: str, result: Dict[str, Any]) -> Section:
    key, head, form = SERIES[name]
    record = result.get(name, [])
    groups: List[Group] = [([], _failed(record))] if _failed(record) else []
    for point in record if isinstance(record, list) else []:
        lines = _peers(
            point['sides'], lambda side: [_cell(side, 'samples_per_s', number), _cell(side, 'headroom', times)]
        )
        groups.append(([form(point[key]), point['source']], lines))
    return Section(f'DQN by {head}', head, ['sample/s', 'headroom'], groups)


def cartpole_section(result: Dict[str, Any]) -> Section:
    record = result.get('cartpole', {})
    lines = _failed(record)
    for kind in () if lines else record.values():
        cells = [_cell(kind, name, lambda value: f'{value:.1f} s') for name in ('wall_s', 'loop_s')]
        cells += [_cell(kind, name, number) for name in ('env_step', 'iters_per_s')]
        lines.append(Line(kind['title'], () if 'failed' in kind else cells, kind.get('failed', '')))
    heads = ['command', 'loop', 'env step', 'iteration/s']
    return Section('CartPole to its stop value', '', heads, [([], lines)] if lines else [])


SECTIONS: List[Callable[[Dict[str, Any]], Section]] = [
    single_section,
    sample_section,
    training_section,
    across_section,
    disk_section,
    *(lambda result, name=name: series_section(name, result) for name in SERIES),  # type: ignore[misc]
    cartpole_section,
]
