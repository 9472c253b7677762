"""What becomes of the figures of ``ding-store compare``: the file, which is resumed, the tables and the report."""

import contextlib
import io
import math
import re
from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import pytest
from compare_rows import row

from ding_store.compare import sections, svg
from ding_store.compare.across import across
from ding_store.compare.main import _facts, _measure
from ding_store.compare.page import page
from ding_store.compare.results import Results, finite, machine
from ding_store.compare.sections import OTHER_SECTIONS, cartpole
from ding_store.compare.terminal import Progress, render, times
from ding_store.compare.worker import WorkerFailed
from ding_store.errors import ConfigError

pytest.importorskip('ding')


def test_a_stock_job_that_fails_costs_only_its_own_figures(tmp_path, monkeypatch):
    script = tmp_path / 'script.py'
    script.write_text(
        'def ran(seed, directory, quiet=True):\n'
        '    return dict(code=0, wall_s=5.0 + seed, loop_s=1.0, env_step=800, train_iter=500, iters_per_s=300.0)\n'
        'def hung(seed, directory):\n'
        "    return {**ran(seed, directory), 'code': 124}\n"
        'run_store = ran\n'
        "RUN = {'store': ran, 'serial': ran, 'parallel': hung}\n"
        "TITLES, LOG = {kind: kind for kind in RUN}, 'log'\n"
    )
    monkeypatch.setattr('ding_store.compare.sections.SCRIPT', script)
    found = cartpole([0, 2], lambda text: None)
    assert (found['store']['wall_s'], found['store']['failed']) == (6.0, 0)
    assert (found['parallel']['wall_s'], found['parallel']['failed']) == (None, 2)
    table = next(line for line in render({'rows': {}, 'cartpole': found}).splitlines() if 'parallel' in line)
    assert table.split() == ['parallel', '-', '-', '-', '-', '2']
    settings = {'elements': 'synthetic', 'repeats': 1, 'seconds': 0.1, 'memory_gb': 0.1, 'length': None}
    text = page({'rows': {}, 'machine': machine(), 'settings': settings, 'cartpole': found})
    assert 'stock in parallel: failed, serial: 6 s' in text


def test_what_is_left_goes_by_what_was_measured(monkeypatch):
    now = [0.0]
    monkeypatch.setattr('ding_store.compare.terminal.time.monotonic', lambda: now[0])
    out = io.StringIO()
    progress = Progress(4, out)

    def said():
        out.seek(out.truncate(0))
        progress.say('on')
        return out.getvalue()

    progress.skip()  # by --resume
    assert 'left' not in said()
    now[0] = 60.0
    progress.step()
    assert '2/4 1:00, about 2:00 left' in said()
    progress.step()
    now[0] = 200.0
    assert 'left' not in said(), 'it takes longer than those before'


def test_a_label_does_not_stand_on_the_line_of_what_is_required():
    """A bar that ends just before it: its value goes behind."""
    lines = [svg.Bar('qmix', '', {'stock': 0.79, 'store': 128.0})]
    drawn = svg.bars(lines, times, {'required': 1.0})
    line = float(re.search(r'class="required" d="M([\d.]+) ', drawn)[1])
    label = float(re.search(r'<text x="([\d.]+)"[^>]*>0.79x<', drawn)[1])
    assert label > line


@pytest.mark.parametrize('ratio', [0.004, 0.97, 1.63, 2.0, 11.0])
def test_bars_of_ratios_are_as_long_as_these_are(ratio):
    lines = [svg.Bar('dqn', '', {'stock': 1.0, 'store': ratio}, texts={'store': '54.5/s, 1.40x'})]
    drawn = ElementTree.fromstring(svg.bars(lines, times, {}, svg.Linear))
    widths = [float(each.attrib['width']) for each in drawn.iter() if each.tag == 'rect']
    assert widths[1] / widths[0] == pytest.approx(ratio, abs=0.02)
    texts = {each.text: float(each.attrib['x']) for each in drawn.iter() if each.tag == 'text'}
    assert {'1x', '54.5/s, 1.40x', times(0)} <= set(texts)
    assert texts['54.5/s, 1.40x'] + 7 * len('54.5/s, 1.40x') <= 760, 'there is room for what stands behind the bar'


def test_a_curve_of_one_point_stands_in_the_middle():
    drawn = ElementTree.fromstring(svg.curves({'store': [(300, 5.0)], 'stock': [(300, 7.0)]}, str, str, 6.0))
    circles = [each for each in drawn.iter() if each.tag == 'circle']
    _, _, width, _ = map(float, drawn.attrib['viewBox'].split())
    assert [width * 0.4 < float(each.attrib['cx']) < width * 0.6 for each in circles] == [True, True]


def test_a_stock_job_that_gives_no_figures_is_a_result(monkeypatch):
    def run(row, title, num_collectors, seconds):
        if title == 'stock':
            raise WorkerFailed('stuck')
        return {'adds_per_s': 100.0, 'samples_per_s': 50.0, 'sample_share': 0.5}

    monkeypatch.setattr('ding_store.compare.across._run', run)
    sides = across(row('masac'), 2, ['stock', 'store'], 3, 0.1, lambda text: None)
    assert math.isnan(sides['stock']['headroom'])
    assert sides['store']['headroom'] == pytest.approx(50 / 63)
    record = {'masac': {**_facts(row('masac')), 'across': {'sides': sides, 'num_collectors': 2}}}
    point = {'num_collectors': 2, 'sides': sides}
    settings = {'elements': 'synthetic', 'repeats': 1, 'seconds': 0.1, 'memory_gb': 0.1, 'length': None}
    result = {'rows': record, 'collectors': [point, {**point, 'num_collectors': 4}], 'settings': settings}
    result = finite({**result, 'machine': machine()})
    assert result['rows']['masac']['across']['sides']['stock']['headroom'] is None
    text = page(result)
    assert 'no figures' in text
    assert 'nan' not in text + render(result)
    assert 'None' not in text + render(result)
    monkeypatch.setattr('ding_store.compare.across._run', partial(run_fails, run))
    with pytest.raises(WorkerFailed):
        across(row('masac'), 2, ['store'], 1, 0.1, lambda text: None)


def run_fails(run, row, title, *arguments):
    return run(row, 'stock', *arguments)


SETTINGS = {'repeats': 1}


def test_a_resumed_file_says_of_which_commits_it_is(tmp_path, monkeypatch):
    file = tmp_path / 'out.json'
    commits = ['aaaaaaa', 'bbbbbbb', 'aaaaaaa']
    monkeypatch.setattr('ding_store.compare.results._commit', lambda: commits.pop(0))
    for _ in range(3):
        results = Results(file, SETTINGS, resume=True)
        results.save()
    assert results.data['machine']['commit'] == 'aaaaaaa, bbbbbbb'


def test_a_resumed_file_says_of_which_days_it_is(tmp_path, monkeypatch):
    file, settings = tmp_path / 'out.json', {'elements': 'synthetic', 'quick': True}
    monkeypatch.setitem(OTHER_SECTIONS, 'length', lambda *_: [])
    monkeypatch.setitem(OTHER_SECTIONS, 'size', lambda *_: [])
    for day, section in (('2026-01-01', 'length'), ('2026-01-02', 'length'), ('2026-01-03', 'size')):
        monkeypatch.setattr('ding_store.compare.results._today', lambda day=day: day)
        results = Results(file, settings, resume=True)
        assert not _measure([], row('dqn'), [section], settings, results)
    assert results.data['date'] == '2026-01-01, 2026-01-03', 'on the second nothing was left to measure'


@pytest.mark.parametrize(
    ('change', 'says'),
    [
        (
            {'cpu': 'another', 'torch': '0'},
            r"measured elsewhere: cpu 'another', here .*, torch '0', here .*; use another",
        ),
        ({'memory_bytes': 1}, None),
        (None, 'holds no figures of this command'),
    ],
)
def test_what_is_not_resumed(tmp_path, change, says):
    file = tmp_path / 'out.json'
    results = Results(file, SETTINGS, resume=False)
    results.data['machine'].update(change or {})
    results.save()
    if change is None:
        file.write_text('[]')
    with pytest.raises(ConfigError, match=says) if says else contextlib.nullcontext():
        Results(file, SETTINGS, resume=True)


def test_every_table_and_the_report_say_of_which_elements(monkeypatch):
    figures = dict.fromkeys(['adds_per_s', 'samples_per_s', 'headroom', 'add_bytes_per_s', 'train_s'], 9.0)
    more = ['iters_per_s', 'gather_per_s', 'copy_per_s', 'bound_headroom', 'memory_per_element']
    figures.update(dict.fromkeys(more, 9.0))
    figures.update(dict.fromkeys(['sample_p50_s', 'sample_p90_s', 'sample_p99_s'], 0.1))
    sides = {'stock': figures, 'store': figures}
    monkeypatch.setattr(sections, 'across', lambda *_: sides)
    monkeypatch.setattr(sections, 'interleaved', lambda *_: sides)
    found = {'samples_per_s': 9.0, 'disk_per_s': 9.0, 'fraction': 1.0, 'length': 5, 'table_bytes': 9}
    found.update(limit_bytes=8, cached=0.5, reason='', learner_at=0.97)
    monkeypatch.setattr(sections, 'on_disk', lambda *_: found)
    monkeypatch.setattr(sections, 'bound_headroom', lambda *_: 123.0)
    settings = {'elements': 'real', 'repeats': 1, 'seconds': 0.1, 'memory_gb': 0.5, 'length': 150}
    results = Results(None, settings, resume=False)
    rows = [replace(row('impala'), source='ALE Qbert'), replace(row('r2d2'), why_synthetic='no ale_py')]
    dqn = replace(row('dqn'), source='ALE Qbert')
    assert not _measure(rows, dqn, ['single', 'across', 'disk', 'collectors', 'length'], settings, results)
    text = render(results.data)
    for width in (80, 150):
        narrow = render(results.data, width)
        assert max(map(len, narrow.splitlines())) <= width
        assert {word for word in text.split() if word.strip('-')} <= set(narrow.split()), 'a cell is missing'
    tables = [each for each in text.split('\n\n') if '---' in each]
    assert [table.split('  ')[0] for table in tables] == [
        'one process', 'bytes, one process', 'learner iterations/s', 'across processes', 'store on disk',
        'dqn by length', 'dqn by num collectors',
    ]  # fmt: skip
    for table in tables:
        head, _, *lines = table.splitlines()
        assert 'elements of' in head
        for line in lines:
            real = ('impala ' in line and 'index' not in line) or 'collectors' in head
            assert ('ALE Qbert' in line, 'synthetic' in line) == (real, not real)
    cells = {table.split('  ')[0]: re.split('  +', table.splitlines()[2]) for table in tables}
    # 2.94 MB of 4 adds and 253 samples that are required, 9 that were made.
    assert cells['bytes, one process'][2:] == ['11.7 MB/s', *['26.4 MB/s'] * 3, '743 MB/s', *['26.4 MB/s'] * 3]
    assert cells['across processes'][-1] == '123x'
    assert cells['store on disk'][-1] == '97 %'
    report = page(results.data)
    assert '<title>impala, bound: 123x</title>' in report
    assert 'at so much of its speed without: impala: 97 %; r2d2: 97 %.' in report
    assert 'elements of real environments, but synthetic of r2d2<' in report
    assert 'r2d2, synthetic<' in report
    assert 'r2d2 is synthetic: no ale_py' in report
    assert 'all elements synthetic' in page({**results.data, 'settings': {**settings, 'elements': 'synthetic'}})


def test_a_resumed_row_is_of_the_same_elements(tmp_path):
    file = tmp_path / 'out.json'
    settings = {'elements': 'real'}
    real, synthetic = replace(row('sac'), source='Hopper-v5'), replace(row('sac'), why_synthetic='no mujoco')
    results = Results(file, settings, resume=True)
    results.describe(_facts(synthetic))
    results.describe(_facts(real))  # nothing is measured yet
    results.row('sac')['single'] = {'parts': []}
    results.save()
    results = Results(file, settings, resume=True)
    results.describe(_facts(real))
    with pytest.raises(ConfigError, match=r"sac was measured with source 'Hopper-v5', here '' \(no mujoco\); use anot"):
        results.describe(_facts(synthetic))
    # Sections that are of no row leave the rows as they are.
    assert not _measure([synthetic], row('dqn'), [], settings, results)
    assert results.row('sac')['source'] == 'Hopper-v5'
