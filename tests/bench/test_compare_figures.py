"""What becomes of the figures of ``ding-store compare``: the file, which is resumed, the tables and the figure."""

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from compare_rows import row

from ding_store.compare import sections
from ding_store.compare.figure import draw
from ding_store.compare.main import _facts, _measure
from ding_store.compare.results import Results, failures
from ding_store.compare.sections import OTHER_SECTIONS, ROW_SECTIONS, cartpole
from ding_store.compare.tables import show
from ding_store.compare.worker import WorkerFailed
from ding_store.errors import ConfigError

pytest.importorskip('ding')

SETTINGS = {
    'quick': True, 'elements': 'real', 'length': 150, 'memory_gb': 0.5, 'repeats': 1, 'seconds': 0.1, 'timeout_s': 60.0,
}  # fmt: skip


def shown(result, width=None):
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        if width is not None:
            out.isatty = lambda: True
            patch.setenv('COLUMNS', str(width))
            patch.setenv('TERM', 'xterm')
            patch.setenv('NO_COLOR', '1')
        show(result, out)
    return re.sub('\x1b\\[[0-9;]*m', '', out.getvalue())


def test_cartpole_a_run_that_hangs_or_crashes_is_named(tmp_path, monkeypatch):
    script = tmp_path / 'script.py'
    script.write_text(
        'from pathlib import Path\n'
        'def ran(seed, directory, quiet=True):\n'
        "    Path(directory, LOG).write_text('its log')\n"
        '    return dict(code=0, wall_s=5.0 + seed, loop_s=1.0, env_step=800, train_iter=500, iters_per_s=300.0)\n'
        'def hung(seed, directory):\n'
        "    return {**ran(seed, directory), 'code': 124}\n"
        'def crashed(seed, directory):\n'
        "    return {**ran(seed, directory), 'code': 3}\n"
        'run_store = ran\n'
        "RUN = {'store': ran, 'serial': crashed, 'parallel': hung}\n"
        "TITLES, LOG = {kind: kind for kind in RUN}, 'log'\n"
    )
    monkeypatch.setattr('ding_store.compare.sections.SCRIPT', script)
    found = cartpole({**SETTINGS, 'quick': False}, lambda text: None)
    assert found['store']['wall_s'] == 5.5, 'the median of two seeds'
    lines = [line.split() for line in shown({'rows': {}, 'cartpole': found}).splitlines()]
    assert ['store', '5.5', 's', '1.0', 's', '800', '300'] in lines
    assert 'serial crashed (exit 3)'.split() in lines
    assert 'parallel hung: no end within 60 s'.split() in lines
    assert found['serial']['log'] == 'its log'


def test_section_that_failed_is_measured_again(tmp_path, monkeypatch):
    file = tmp_path / 'out.json'
    calls = []

    def across(row, settings, say):
        calls.append(row.name)
        if len(calls) == 1:
            raise WorkerFailed('crashed (exit 1)', 'its log')
        sides = {side: {'headroom': 2.0, 'adds_per_s': float('nan')} for side in ('stock', 'store')}
        return {'num_collectors': 2, 'source': 'synthetic', 'sides': sides}

    monkeypatch.setitem(ROW_SECTIONS, 'across', across)
    for names in (['sac', 'qmix'], ['sac', 'qmix'], ['sac', 'qmix']):
        results = Results(file, SETTINGS, resume=True)
        _measure([row(name) for name in names], row('dqn'), ['across'], SETTINGS, results)
        calls.append('again')
    assert calls == ['sac', 'qmix', 'again', 'sac', 'again', 'again']
    assert list(failures(results.data)) == []
    assert 'NaN' not in file.read_text()


def test_resumed_file_lists_its_commits(tmp_path, monkeypatch):
    file = tmp_path / 'out.json'
    commits = ['aaaaaaa', 'bbbbbbb', 'aaaaaaa']
    monkeypatch.setattr('ding_store.compare.results._commit', lambda: commits.pop(0))
    for _ in range(3):
        results = Results(file, SETTINGS, resume=True)
        results.save()
    assert results.data['machine']['commit'] == 'aaaaaaa, bbbbbbb'


def test_resumed_file_lists_its_dates(tmp_path, monkeypatch):
    file, settings = tmp_path / 'out.json', {'elements': 'synthetic', 'quick': True}
    monkeypatch.setitem(OTHER_SECTIONS, 'length', lambda *_: [])
    monkeypatch.setitem(OTHER_SECTIONS, 'size', lambda *_: [])
    for day, section in (('2026-01-01', 'length'), ('2026-01-02', 'length'), ('2026-01-03', 'size')):
        monkeypatch.setattr('ding_store.compare.results._today', lambda day=day: day)
        results = Results(file, settings, resume=True)
        _measure([], row('dqn'), [section], settings, results)
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
def test_resume_of_an_unfit_file_is_refused(tmp_path, change, says):
    file = tmp_path / 'out.json'
    results = Results(file, SETTINGS, resume=False)
    results.data['machine'].update(change or {})
    results.save()
    if change is None:
        file.write_text('[]')
    with pytest.raises(ConfigError, match=says) if says else contextlib.nullcontext():
        Results(file, SETTINGS, resume=True)


@pytest.fixture
def result(monkeypatch):
    """A result with every section, all of whose rates are 9."""
    names = 'adds_per_s samples_per_s headroom add_bytes_per_s train_s iters_per_s gather_per_s copy_per_s'.split()
    figures = dict.fromkeys([*names, 'bound_headroom', 'memory_per_element'], 9.0)
    figures.update(dict.fromkeys(['sample_p50_s', 'sample_p90_s', 'sample_p99_s'], 0.1))
    sides = {'stock': figures, 'store': figures}
    monkeypatch.setattr(sections, 'across', lambda *_: sides)
    monkeypatch.setattr(sections, 'interleaved', lambda *_: sides)
    found = {'samples_per_s': 9.0, 'disk_per_s': 9.0, 'fraction': 1.0, 'length': 5, 'table_bytes': 9}
    found.update(limit_bytes=8, cached=0.5, reason='', learner_at=0.97)
    monkeypatch.setattr(sections, 'on_disk', lambda *_: found)
    monkeypatch.setattr(sections, 'bound_headroom', lambda *_: 123.0)
    kinds = {'store': 'ding_store', 'serial': 'DI-engine, serial', 'parallel': 'DI-engine, ditask'}
    seconds = {'wall_s': 9.0, 'loop_s': 3.0, 'env_step': 800, 'iters_per_s': 300.0}
    record = {kind: {'title': title, **seconds} for kind, title in kinds.items()}
    monkeypatch.setitem(OTHER_SECTIONS, 'cartpole', lambda *_: record)
    results = Results(None, SETTINGS, resume=False)
    rows = [replace(row('impala'), source='ALE Qbert'), replace(row('r2d2'), why_synthetic='no ale_py')]
    chosen = ['single', 'across', 'disk', 'collectors', 'length', 'cartpole']
    _measure(rows, replace(row('dqn'), source='ALE Qbert'), chosen, SETTINGS, results)
    return results.data


TITLES = [
    'One process', 'Time of one sample', "The learner's loop", 'Across processes', 'Table on disk', 'DQN by length',
    'DQN by collectors', 'CartPole to its stop value',
]  # fmt: skip


@pytest.mark.parametrize('width', [60, 80, 200])
def test_tables_fit_the_terminal_and_lose_no_figure(result, width):
    """Also those with a note of a peer that failed."""
    plain = shown(result)
    narrow = shown(result, width)
    assert max(len(line.rstrip()) for line in narrow.splitlines()) <= width
    assert [line.strip() for line in narrow.splitlines() if line.strip() in TITLES] == TITLES
    assert '…' not in narrow
    assert numbers(narrow) == numbers(plain)
    result['rows']['impala']['across']['sides']['stock'] = {'failed': 'hung: no end within 300 s', 'log': ''}
    narrow = shown(result, width)
    assert max(len(line.rstrip()) for line in narrow.splitlines()) <= width
    assert '…' not in narrow
    assert {'hung:', '300', 's'} <= set(narrow.split())


def numbers(text):
    """The figures of tables, in their order."""
    return re.findall(r'(?<![\w.])[\d.,]+x?(?: [KMG]?B\b| %| ms)?', text[: text.index('headroom:')])


def test_tables_name_the_elements_and_the_bound(result):
    text = shown(result)
    tables = dict(zip(TITLES, re.split('|'.join(map(re.escape, TITLES)), text)[1:]))
    for title in ('One process', "The learner's loop", 'Across processes', 'Table on disk'):
        impala, r2d2 = tables[title].split('r2d2', 1)
        assert 'ALE Qbert' in impala, title
        assert 'synthetic' in r2d2, title
    assert 'synthetic' in tables['DQN by length']
    assert 'ALE Qbert' in tables['DQN by collectors']
    # 2.94 MB of 4 adds and 253 samples that are required, 9 that were made.
    lines = [line.split() for line in tables['Across processes'].splitlines()]
    assert ['impala', 'required', '4', '253', '1x'] in lines
    assert ['bound', '123x'] in lines
    assert '97 %' in tables['Table on disk']
    assert 'r2d2 is synthetic: no ale_py' in text


@pytest.mark.parametrize('suffix', ['.png', '.svg'])
def test_figure_has_a_panel_for_each_section(result, suffix, tmp_path):
    path = tmp_path / f'figure{suffix}'
    draw(result, path)
    if suffix == '.svg':
        titles = re.findall('<!-- (.*?) -->', path.read_text())
        panels = ['One process: headroom over the job', 'Table on disk: samples/s (bound: reads of the disk)']
        panels += ['Time of one sample (P99)', 'DQN: samples/s by length of the replay', 'CartPole to its stop value']
        assert set(panels) <= set(titles)
        return
    high, wide = matplotlib.image.imread(path).shape[:2]
    assert (high > 1000, wide > 1000) == (True, True)


def test_figure_names_peers_that_failed(result, tmp_path):
    failed = {'failed': 'crashed (exit 1)', 'log': ''}
    for record in result['rows'].values():
        record['single']['parts'][0]['sides'] = {'stock': failed, 'store': failed}
        record['across']['sides']['stock'] = failed
    result['length'][0]['sides']['store'] = failed
    result['cartpole']['store'] = {'title': 'ding_store', **failed}
    draw(result, Path(tmp_path, 'figure.svg'))
    text = (tmp_path / 'figure.svg').read_text()
    assert 'no figures' in text
    assert 'crashed (exit 1)' in text
    draw({**result, 'rows': {}, 'length': failed, 'collectors': failed, 'cartpole': failed}, Path(tmp_path, 'none.png'))


def test_resumed_row_keeps_its_elements(tmp_path):
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
    _measure([synthetic], row('dqn'), [], settings, results)
    assert results.row('sac')['source'] == 'Hopper-v5'
