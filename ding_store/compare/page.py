"""Report of a comparison: one HTML file with its plots and tables, readable on paper, in light and in dark."""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ding_store.compare import svg
from ding_store.compare.terminal import TABLES, number, percent, times, without_extra
from ding_store.compare.units import size_text

STYLE = resources.files(__package__).joinpath('report.css').read_text()


def page(result: Dict[str, Any]) -> str:
    """Return a result (see ``Results``) as a whole HTML page that needs no other file."""
    rows = list(result['rows'].values())
    body = [_head(result), _cards(result, rows), _legend(), _one_process(rows), _across(rows), _training(rows)]
    body += [_scaling(result), _latency(rows), _disk(rows), _cartpole(result), _tables(result), _notes(result)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f'<title>ding_store and DI-engine, compared</title><style>{STYLE}</style></head>'
        f'<body><main>{"".join(part for part in body if part)}</main></body></html>\n'
    )


def _head(result: Dict[str, Any]) -> str:
    machine, settings = result['machine'], result['settings']
    facts = (
        f'{machine["cpu"]}, {machine["cores"]} cores, {machine["memory_bytes"] / 2**30:.0f} GiB · one thread per '
        f'process · '
        f'DI-engine {machine["di_engine"]}, torch {machine["torch"]}, numpy {machine["numpy"]} · ding_store '
        f'{machine["commit"] or machine["ding_store"]} · {result.get("date", "")} · medians of '
        f'{settings["repeats"]} '
        f'interleaved windows of {settings["seconds"]:g} s · replays of up to {settings["memory_gb"]:g} GB'
    )
    if settings['length']:
        facts += f' and {settings["length"]:,} elements'
    facts += f' · {_elements(result)}'
    return (
        '<h1>The same jobs, on two stores</h1><p class="lead">Eight published reinforcement-learning jobs say how many '
        'elements a replay takes in and gives out per second. Here DI-engine’s own buffer and exchanger, and '
        'ding_store, '
        f'carry them on one machine.</p><p class="facts">{escape(facts)}</p>'
    )


def _elements(result: Dict[str, Any]) -> str:
    if result['settings']['elements'] == 'synthetic':
        return 'all elements synthetic'
    synthetic = [row['name'] for row in result['rows'].values() if not row['source']]
    return 'elements of real environments' + (f', but synthetic of {", ".join(synthetic)}' if synthetic else '')


def _name(row: Dict[str, Any]) -> str:
    """Return a row's name in a plot. Other rows of the plot may have real elements."""
    return row['name'] + (', synthetic' if row['why_synthetic'] else '')


def lowest(row: Dict[str, Any], side: str, figure: str = 'headroom') -> Optional[float]:
    """Return a row's figure: the lowest of its parts."""
    values = [part['sides'][side][figure] for part in row.get('single', {}).get('parts', [])]
    return min((value for value in values if value is not None), default=None)


def measured_length(row: Dict[str, Any]) -> int:
    """Return the length of the longest part. It is the job's own length, unless --length limits it."""
    return max(part['length'] for part in row['single']['parts'])


def _cards(result: Dict[str, Any], rows: Sequence[Dict[str, Any]]) -> str:
    measured = [row for row in rows if 'single' in row]
    joined = [row for row in rows if 'across' in row]
    cards = []
    if measured:
        met = {side: sum((lowest(row, side) or 0) >= 1 for row in measured) for side in ('stock', 'store')}
        least = min(lowest(row, 'store') or 0 for row in measured)
        cut = ', with shorter replays' if any(measured_length(row) < row['length'] for row in measured) else ''
        text = f'jobs met at once in one process{cut}; stock: {met["stock"]}'
        cards.append((f'{met["store"]} of {len(measured)}', text))
        cards.append((times(least), 'the least headroom of the store over a job, in one process'))
    if joined:
        met = {
            side: sum((row['across']['sides'][side]['headroom'] or 0) >= 1 for row in joined)
            for side in ('stock', 'store')
        }
        cards.append((f'{met["store"]} of {len(joined)}', f'jobs met across processes; stock: {met["stock"]}'))
    if 'cartpole' in result:
        found = result['cartpole']
        store, serial, parallel = (_seconds(found[kind]['wall_s']) for kind in ('store', 'serial', 'parallel'))
        text = f'CartPole to its stop value, whole command; stock in parallel: {parallel}, serial: {serial}'
        cards.append((store, text))
    return (
        '<div class="cards">'
        + ''.join(f'<div class="card"><b>{b}</b><span>{t}</span></div>' for b, t in cards)
        + '</div>'
    )


def _seconds(value: Optional[float]) -> str:
    return 'failed' if value is None else f'{value:.0f} s'


def _legend() -> str:
    return (
        '<div class="legend"><span><i class="stock"></i>DI-engine</span><span><i class="store"></i>ding_store</span>'
        '<span><i class="line bound"></i>bound: what memory copies could do</span>'
        '<span><i class="line required"></i>required</span><span>scales are logarithmic, if not named</span></div>'
    )


def _section(title: str, text: str, *figures: str) -> str:
    return f'<section><h2>{title}</h2><p>{text}</p>{"".join(figures)}</section>'


def _figure(caption: str, drawing: str) -> str:
    return f'<figure><figcaption>{caption}</figcaption>{drawing}</figure>'


def _one_process(rows: Sequence[Dict[str, Any]]) -> str:
    lines = [
        svg.Bar(
            _name(row),
            f'{size_text(row["element_bytes"])} x {_length(row)}',
            {side: lowest(row, side) for side in ('stock', 'store')},
            lowest(row, 'store', 'bound_headroom'),
        )
        for row in rows
        if 'single' in row
    ]
    if not lines:
        return ''
    return _section(
        'One process',
        'A full replay, where every add evicts the oldest element. Adds and samples take turns at the ratio of the '
        'job, up '
        'to the collated batch that a policy trains on. Headroom is how many times the required adds and samples, both '
        'together, fit into a second. A replay that does not fit into memory is measured twice, with all its bytes per '
        'element and with its whole length, and the lower figure counts.',
        _figure(
            '<strong>Headroom over the job</strong>, both rates at once', svg.bars(lines, times, {'required': 1.0})
        ),
    )


def _length(row: Dict[str, Any]) -> str:
    measured = measured_length(row)
    return number(measured) + (f' of {number(row["length"])}' if measured < row['length'] else '')


def _across(rows: Sequence[Dict[str, Any]]) -> str:
    lines = [
        svg.Bar(
            _name(row),
            f'{number(row["required"]["adds_per_s"])} adds/s',
            {side: row['across']['sides'][side]['headroom'] for side in ('stock', 'store')},
            row['across'].get('bound_headroom'),
        )
        for row in rows
        if 'across' in row
    ]
    if not lines:
        return ''
    return _section(
        'Across processes',
        'Two collectors in processes of their own hand over ready-made elements as fast as they are let, and a learner '
        'pushes and samples them at the ratio of the job: the same script, with DI-engine’s exchanger and with the '
        'store’s. The bound is the learner’s: one copy of each element that comes, and one of each sample.',
        _figure('<strong>Headroom over the job</strong>, end to end', svg.bars(lines, times, {'required': 1.0})),
    )


def _training(rows: Sequence[Dict[str, Any]]) -> str:
    lines: List[svg.Bar] = []
    for row in rows:
        for part in row.get('single', {}).get('parts', []):
            sides = part['sides']
            if 'iters_per_s' in sides['store']:
                share = 1 - sides['store']['train_s'] * sides['stock']['iters_per_s']
                note = f'DI-engine: {max(0.0, share):.0%} not training'
                rates = {side: sides[side]['iters_per_s'] for side in ('stock', 'store')}
                ratio = rates['store'] / rates['stock']
                texts = {'stock': f'{number(rates["stock"])}/s', 'store': f'{number(rates["store"])}/s, {ratio:.2f}x'}
                lines.append(svg.Bar(_name(row), note, {'stock': 1.0, 'store': ratio}, texts=texts))
    if not lines:
        return ''
    return _section(
        'The real loop',
        'DI-engine’s own policy of each job with a small model, on one thread: push, fetch, train, update '
        'priorities. The '
        'larger the model, the smaller the difference. MASAC has a model that its policy can call, on both sides: '
        'DI-engine 0.5.3’s own fails.',
        _figure(
            '<strong>Learner iterations per second</strong>, relative to DI-engine’s (linear)',
            svg.bars(lines, lambda ratio: f'{ratio:g}x', {}, svg.Linear),
        ),
    )


def _points(result: Dict[str, Any], section: str, key: str, figure: str) -> Dict[str, Sequence[Tuple[float, float]]]:
    """Return the points of each side that have figures. A plain DI-engine job may have given none."""
    found: Dict[str, Sequence[Tuple[float, float]]] = {}
    for side in ('stock', 'store'):
        values = [(point[key], point['sides'][side][figure]) for point in result.get(section, [])]
        found[side] = [(x, y) for x, y in values if y is not None]
    return {side: points for side, points in found.items() if points}


def _scaling(result: Dict[str, Any]) -> str:
    required = {'adds_per_s': 400, 'samples_per_s': 1650}
    plots = (
        (
            'length',
            'length',
            'samples_per_s',
            number,
            'Samples/s by <strong>length of the replay</strong> (prioritized)',
        ),
        (
            'size',
            'element_bytes',
            'samples_per_s',
            size_text,
            'Samples/s by <strong>size of an element</strong> (uniform)',
        ),
        (
            'collectors',
            'num_collectors',
            'adds_per_s',
            number,
            'Adds/s across processes by <strong>collectors</strong>',
        ),
    )
    figures = [
        _figure(caption, svg.curves(_points(result, section, key, figure), form, number, required[figure]))
        for section, key, figure, form, caption in plots
        if section in result
    ]
    if not figures:
        return ''
    return _section(
        'How it scales', 'The DQN job, one thing varied at a time.', f'<div class="row">{"".join(figures)}</div>'
    )


def _latency(rows: Sequence[Dict[str, Any]]) -> str:
    lines: List[Tuple[str, Dict[str, Sequence[float]]]] = []
    for row in rows:
        for part in row.get('single', {}).get('parts', [])[:1]:
            names = ('sample_p50_s', 'sample_p90_s', 'sample_p99_s')
            lines.append((_name(row), {side: [part['sides'][side][n] for n in names] for side in ('stock', 'store')}))
    if not lines:
        return ''
    return _section(
        'How long a sample takes',
        'One batch, collated, with the update of its priorities where the job has such, of elements of real size.',
        _figure('<strong>Median, P90 and P99</strong> of a sample; the figure is P99', svg.ranges(lines, seconds)),
    )


def seconds(value: float) -> str:
    if value < 1e-3:
        return f'{value * 1e6:.0f} µs'
    return f'{value * 1e3:.3g} ms' if value < 1 else f'{value:.3g} s'


def _disk(rows: Sequence[Dict[str, Any]]) -> str:
    lines, said, learners = [], [], []
    for row in rows:
        found = row.get('disk')
        if found:
            values = {'store': found['samples_per_s']}
            note, required = f'{size_text(found["table_bytes"])} table', row['required']['samples_per_s']
            lines.append(svg.Bar(_name(row), note, values, found['disk_per_s'], required))
            limit = f'{size_text(found["limit_bytes"])} of memory' if found['limit_bytes'] else found['reason']
            cached = '' if found.get('cached') is None else f', {found["cached"]:.0%} of the table cached'
            said.append(f'{row["name"]}: {limit}{cached}')
            if found.get('learner_at') is not None:
                learners.append(f'{row["name"]}: {percent(found["learner_at"])}')
    if not lines:
        return ''
    return _section(
        'Larger than memory',
        f'A table on disk, sampled by a process that may keep less than it ({"; ".join(said)}). The dark mark is what '
        'the disk gives for random reads of that size past the page cache, measured in turn; the red one is required. '
        + (
            f'A learner that samples as often as the job does trains on meanwhile, at so much of its speed without: '
            f'{"; ".join(learners)}.'
            if learners
            else ''
        ),
        _figure('<strong>Samples per second</strong>', svg.bars(lines, number, {})),
    )


def _cartpole(result: Dict[str, Any]) -> str:
    if 'cartpole' not in result:
        return ''
    found = result['cartpole']
    kinds = {'store': 'store', 'serial': 'stock', 'parallel': 'stock'}
    lines = [
        svg.Bar(found[kind]['title'], 'in the loop', {side: found[kind]['loop_s']})
        for kind, side in kinds.items()
        if found[kind]['loop_s'] is not None
    ]
    return _section(
        'Time to converge',
        'CartPole DQN to its stop value: on the store with one learner, two collectors and one evaluator; in plain '
        'DI-engine '
        'in one process, and in parallel with as many.',
        _figure(
            '<strong>Seconds in the loop</strong> (linear)',
            svg.bars(lines, lambda value: f'{value:.3g} s', {}, svg.Linear),
        ),
    )


def _tables(result: Dict[str, Any]) -> str:
    made = []
    for make in TABLES:
        head, lines = make(result)
        if lines:
            cells = ''.join('<tr>' + ''.join(f'<td>{escape(cell)}</td>' for cell in line) + '</tr>' for line in lines)
            titles = ''.join(f'<th>{escape(title)}</th>' for title in head)
            made.append(
                f'<div class="table"><table><thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table></div>'
            )
    return '<section><h2>All figures</h2>' + ''.join(made) + '</section>'


def _notes(result: Dict[str, Any]) -> str:
    return (
        '<section><h2>How it was measured</h2><p><code>ding-store compare</code>, or '
        '<code>scripts/compare_throughput.py</code>. Each side has processes of its own, which take turns; elements '
        'are those of the environment that the table names, played at random, or have the structure and the published '
        'bytes of real ones and random contents, so that nothing of them compresses. The bound '
        'is <code>np.take(column, rows, out=warm, mode="clip")</code> for samples and row copies for adds, in the '
        'process '
        'of the store. Memory per element includes the payload. Series by length and size are of synthetic elements, '
        'and so are those that were made smaller to have as many as the job has. '
        f'{escape(". ".join(without_extra(result)))}</p></section>'
    )
