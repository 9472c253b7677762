"""``ding-store compare`` measures every row on both sides; how fast they are is tested nowhere."""

import contextlib
import importlib.util
import io
import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from jobs import ROOT, ding_store, environment
from needs import lacking, need_extra

from ding_store.bench.compare import disk, sections, svg
from ding_store.bench.compare.across import across
from ding_store.bench.compare.cartpole import cartpole
from ding_store.bench.compare.disk import Limit, is_memory, on_disk
from ding_store.bench.compare.main import _facts, _measure, _real
from ding_store.bench.compare.page import page
from ding_store.bench.compare.plan import parts
from ding_store.bench.compare.results import Results, finite, machine
from ding_store.bench.compare.rows import ROWS
from ding_store.bench.compare.sections import OTHER_SECTIONS, ROW_SECTIONS
from ding_store.bench.compare.terminal import Progress, render
from ding_store.bench.compare.windows import bound_headroom
from ding_store.bench.compare.worker import WorkerFailed
from ding_store.errors import ConfigError

pytest.importorskip('ding')

TINY = ['--length', '150', '--memory', '0.01', '--repeats', '1', '--seconds', '0.02', '--elements', 'synthetic']


def compare(*arguments, code=0):
    done = subprocess.run(
        ding_store('compare', *arguments), env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done


def row(name):
    return next(one for one in ROWS if one.name == name)


def check_sides(sides, *positive):
    for side in ('stock', 'store'):
        assert all(sides[side][name] > 0 for name in positive), sides


def test_a_row_from_end_to_end_and_resume(tmp_path):
    file, html = tmp_path / 'out.json', tmp_path / 'out.html'
    compare(*TINY, '--sections', 'single', '--rows', 'sac', '--json', file)
    first = json.loads(file.read_text())
    (part,) = first['rows']['sac']['single']['parts']
    check_sides(part['sides'], 'bound_headroom', 'memory_per_element', 'iters_per_s', 'train_s')
    for figures in part['sides'].values():
        times = [figures[f'sample_{name}_s'] for name in ('p50', 'p90', 'p99', 'max')]
        assert times == sorted(times)
        assert times[0] > 0
        assert 0 < figures['headroom'] < min(figures['adds_per_s'] / 71, figures['samples_per_s'] / 138)
    done = compare(*TINY, '--sections', 'single', '--rows', 'sac', 'qmix', '--json', file, '--resume', '--html', html)
    second = json.loads(file.read_text())
    assert second['rows']['sac'] == first['rows']['sac']
    check_sides(second['rows']['qmix']['single']['parts'][0]['sides'], 'headroom', 'iters_per_s')
    assert 'qmix ' in done.stdout
    check_page(html.read_text())
    check_lengths(second)
    done = compare('--quick', '--sections', 'single', '--rows', 'sac', '--json', file, '--resume', code=2)
    assert 'was made with' in done.stderr


def check_lengths(result):
    """A replay shorter than the job's is called so."""
    text = page(result)
    assert 'KB x 150 of 1M<' in text
    assert 'in one process, with shorter replays; stock' in text
    assert 'and 150 elements' in text
    for row in result['rows'].values():
        row['length'] = 150
    text = page(result)
    assert 'KB x 150<' in text
    assert 'shorter replays' not in text


def check_page(text):
    """Well-formed, and whole by itself: nothing in it is fetched from anywhere."""
    root = ElementTree.fromstring(text.partition('\n')[2])
    plots = [each for each in root.iter() if each.tag == 'svg']
    assert len(plots) >= 3
    for each in root.iter():
        assert each.tag not in ('script', 'link', 'img', 'iframe')
        assert not {'src', 'href'} & set(each.attrib)
    assert '@import' not in text
    assert 'url(' not in text


def test_the_bound_of_a_learner_is_its_copies():
    one = row('masac')
    assert bound_headroom(one, 0.02) > 10  # of 5 MB/s


@pytest.mark.parametrize('side', ['stock', 'store'])
def test_across_processes(side):
    figures = across(row('masac'), 1, [side], 1, 0.1, lambda text: None)[side]
    assert figures['adds_per_s'] > 0
    # The learner samples at the ratio of the job, in whole batches.
    assert figures['samples_per_s'] / figures['adds_per_s'] == pytest.approx(63 / 116, rel=0.5)


def test_a_stock_job_that_hangs_leaves_no_workers(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location('cartpole_script', ROOT / 'scripts' / 'cartpole.py')
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, 'TIMEOUT_S', 0.5)
    (tmp_path / 'job').write_text('sleep 1000 & echo $! > worker; wait')
    _, code = script.timed(['bash', 'job'], tmp_path, {}, quiet=True)
    assert code == 124
    stat = Path('/proc', (tmp_path / 'worker').read_text().strip(), 'stat')
    deadline = time.monotonic() + 20
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while stat.read_text().split()[2] != 'Z':
            assert time.monotonic() < deadline, 'its worker lives on'
            time.sleep(0.02)


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
    monkeypatch.setattr('ding_store.bench.compare.cartpole.SCRIPT', script)
    found = cartpole([0, 2], lambda text: None)
    assert (found['store']['wall_s'], found['store']['failed']) == (6.0, 0)
    assert (found['parallel']['wall_s'], found['parallel']['failed']) == (None, 2)
    table = next(line for line in render({'rows': {}, 'cartpole': found}).splitlines() if 'parallel' in line)
    assert table.split() == ['parallel', '-', '-', '-', '-', '2']
    settings = {'elements': 'synthetic', 'repeats': 1, 'seconds': 0.1, 'memory_gb': 0.1, 'length': None}
    text = page({'rows': {}, 'machine': machine(), 'settings': settings, 'cartpole': found})
    assert 'stock in parallel: failed, serial: 6 s' in text


def test_a_table_on_disk_says_how_much_of_it_is_cached(tmp_path):
    one = row('qmix')
    found = on_disk(one, 50 * one.element_bytes, 2e9, 1, 0.01, str(tmp_path), lambda text: None)
    assert found['length'] == 4 * one.batch
    assert found['samples_per_s'] > 0
    assert found['learner_at'] > 0
    assert found['fraction'] == found['samples_per_s'] / found['disk_per_s']
    assert list(tmp_path.iterdir()) == []
    record = {'qmix': {**_facts(one), 'disk': found}}
    text = render({'rows': record})
    if found['limit_bytes'] is None:
        assert found['reason'] in text
    else:
        # It fits: then the disk is not what is measured, and the figures have to say so.
        assert found['cached'] > 0.9
        assert f'{100 * found["cached"]:.0f} %' in text


def test_a_table_on_disk_is_refused_in_memory():
    if not is_memory('/dev/shm'):
        lacking('needs a /dev/shm that is memory')
    command = ding_store('compare', *TINY, '--sections', 'disk', '--rows', 'impala')
    done = subprocess.run(command, env=environment(TMPDIR='/dev/shm'), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "'/dev/shm' is memory, and no disk: set TMPDIR to a directory on one" in done.stderr


@pytest.mark.parametrize(('own', 'place'), [('user.slice/job', 'user.slice'), ('', '.')])
def test_a_memory_cgroup_of_version_2(own, place, tmp_path, monkeypatch):
    """On a tree of files: the group is made where the controller is handed on."""
    (tmp_path / own).mkdir(parents=True, exist_ok=True)
    for group in {tmp_path / own, tmp_path}:
        (group / 'cgroup.subtree_control').write_text('')
    monkeypatch.setattr(disk, 'CGROUPS', tmp_path)
    monkeypatch.setattr(disk, '_own_group', lambda controller: own)
    assert 'no group above hands the memory controller on' in Limit(1e6).reason
    (tmp_path / place / 'cgroup.subtree_control').write_text('cpu memory pids')
    limit = Limit(1e6)
    assert limit.path.parent == tmp_path / place
    assert (limit.path / 'memory.max').read_text() == '1000000'
    (limit.path / 'memory.stat').write_text('anon 5\nfile 7\n')
    assert limit.cached_bytes() == 7
    for file in limit.path.iterdir():
        file.unlink()  # as the kernel's, which need not be removed before their directory
    limit.close()
    assert not limit.path.exists()


def test_what_is_left_goes_by_what_was_measured(monkeypatch):
    now = [0.0]
    monkeypatch.setattr('ding_store.bench.compare.terminal.time.monotonic', lambda: now[0])
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

    monkeypatch.setattr('ding_store.bench.compare.across._run', run)
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
    monkeypatch.setattr('ding_store.bench.compare.across._run', partial(run_fails, run))
    with pytest.raises(WorkerFailed):
        across(row('masac'), 2, ['store'], 1, 0.1, lambda text: None)


def run_fails(run, row, title, *arguments):
    return run(row, 'stock', *arguments)


def test_what_is_no_figure_is_null_in_the_file(tmp_path, monkeypatch):
    file, html = tmp_path / 'out.json', tmp_path / 'out.html'
    settings = {'quick': False, 'elements': 'synthetic', 'length': 150, 'memory_gb': 0.01, 'repeats': 1}
    results = Results(file, {**settings, 'seconds': 0.02}, resume=False)
    figures = dict.fromkeys(['adds_per_s', 'samples_per_s', 'sample_share', 'headroom', 'add_bytes_per_s'], 200.0)
    sides = {'stock': dict.fromkeys(figures, math.nan), 'store': figures}
    results.row('sac').update(_facts(row('sac')))
    monkeypatch.setitem(ROW_SECTIONS, 'across', lambda *_: {'num_collectors': 2, 'sides': sides})
    assert not _measure([row('sac')], row('dqn'), ['across'], settings, results)
    written = file.read_text()
    assert (
        json.loads(written, parse_constant=pytest.fail)['rows']['sac']['across']['sides']['stock']['headroom'] is None
    )
    file.write_text(written.replace('null', 'NaN'))  # as older files have it
    done = compare(*TINY, '--sections', 'across', '--rows', 'sac', '--json', file, '--resume', '--html', html)
    assert next(line for line in done.stdout.splitlines() if line.startswith('sac ')).split()[-3:] == ['-', '200x', '-']
    assert 'no figures' in html.read_text()
    json.loads(file.read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [
        (['--rows', 'pong'], "no row 'pong'; known are dqn, ppo"),
        (['--sections', 'all'], "no section 'all'; known are single, across"),
        (['--memory', '0.1', '--rows', 'r2d2'], 'holds 10 elements of r2d2: give it at least 0.32'),
        (['--repeats', '0'], '--repeats (0) must be above 0'),
        (['--json', '/nowhere/out.json'], 'there is no such directory'),
        (['--html', '/'], "--html '/' is a directory: name a file in it"),
        (['--html', 'one', '--json', 'one'], '--json and --html name the same file'),
        (['--seconds', 'nan'], '--seconds (nan) must be above 0, and finite'),
        (['--memory', 'inf'], '--memory (inf) must be above 0, and finite'),
        (['--resume', '--rows', 'sac', '--length', '100'], '--resume goes with --json FILE'),
    ],
)
def test_wrong_arguments(arguments, says):
    assert says in compare(*arguments, code=2).stderr


SETTINGS = {'repeats': 1}


def test_a_resumed_file_says_of_which_commits_it_is(tmp_path, monkeypatch):
    file = tmp_path / 'out.json'
    commits = ['aaaaaaa', 'bbbbbbb', 'aaaaaaa']
    monkeypatch.setattr('ding_store.bench.compare.results._commit', lambda: commits.pop(0))
    for _ in range(3):
        results = Results(file, SETTINGS, resume=True)
        results.save()
    assert results.data['machine']['commit'] == 'aaaaaaa, bbbbbbb'


def test_a_resumed_file_says_of_which_days_it_is(tmp_path, monkeypatch):
    file, settings = tmp_path / 'out.json', {'elements': 'synthetic', 'quick': True}
    monkeypatch.setitem(OTHER_SECTIONS, 'length', lambda *_: [])
    monkeypatch.setitem(OTHER_SECTIONS, 'size', lambda *_: [])
    for day, section in (('2026-01-01', 'length'), ('2026-01-02', 'length'), ('2026-01-03', 'size')):
        monkeypatch.setattr('ding_store.bench.compare.results._today', lambda day=day: day)
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


def test_the_script_is_the_command():
    script = [sys.executable, str(ROOT / 'scripts' / 'compare_throughput.py'), '--help']
    done = subprocess.run(script, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert '--resume' in done.stdout


@pytest.mark.parametrize('one', ROWS, ids=lambda row: row.name)
def test_elements_have_the_published_bytes(one):
    number, unit = one.published.split()
    assert abs(one.element_bytes / (float(number) * {'KB': 1e3, 'MB': 1e6}[unit]) - 1) < 0.08


@pytest.mark.parametrize('one', ROWS, ids=lambda row: row.name)
def test_smaller_elements_keep_their_leaves(one):
    small = one.smaller(6000)
    assert small.leaves.keys() == one.leaves.keys()
    assert all(len(small.leaves[path][1]) == len(shape) for path, (_, shape) in one.leaves.items())
    assert small.element_bytes < 40_000
    assert bool(small.steps) == bool(one.steps)


def test_a_row_is_measured_whole_or_by_bytes_and_by_index():
    assert [part.kind for part in parts(row('sac'), 4e9)] == ['whole']
    by_bytes, by_index = parts(row('dqn'), 4e9)
    assert (by_bytes.row.element_bytes, by_index.length) == (row('dqn').element_bytes, 400_000)
    assert by_bytes.length * by_bytes.row.element_bytes == pytest.approx(4e9, rel=0.01)
    assert by_index.length * by_index.row.element_bytes < 4e9


def test_both_sides_deliver_the_same_batch():
    """Of the same elements: the same keys, shapes and values."""
    from ding_store.bench.compare.sides import Store, collated, elements_of

    for one in ROWS:
        small = one.smaller(6000)
        columns = small.columns(small.batch)
        elements = elements_of(small, columns)
        expected = collated(small, elements)
        side = Store(small, small.batch)
        side.fill(small.columns(4))
        batch = side.sample()
        assert_equal(expected, batch, side.rows, 1 if small.steps else 0)


@pytest.mark.parametrize(
    ('name', 'extra', 'module', 'shape'),
    [
        ('sac', 'mujoco', 'mujoco', (11,)),
        ('impala', 'atari', 'ale_py', (4, 84, 84)),
        ('gobigger', 'gobigger', 'gobigger', (3, 224, 4)),
    ],
)
def test_real_elements_are_those_of_the_environment_and_train(name, extra, module, shape, tmp_path):
    need_extra(module, extra)
    from ding_store.bench.compare.policies import policy_of
    from ding_store.bench.compare.recorded import Recorder
    from ding_store.bench.compare.sides import Stock, Store, collated

    real = Recorder(str(tmp_path)).record(row(name))
    assert real.source
    assert {'action', 'reward', 'done'} <= real.leaves.keys()
    obs = 'obs/food' if name == 'gobigger' else 'obs'
    assert real.leaves[obs][1] == shape
    columns = real.columns(10)
    steps = {key: column.reshape(-1, *real.leaves[key][1]) for key, column in columns.items()}
    goes_on = np.flatnonzero(~steps['done'].reshape(-1)[:-1])
    np.testing.assert_array_equal(steps[f'next_{obs}'][goes_on], steps[obs][goes_on + 1])
    assert len(np.unique(steps[obs].reshape(len(steps[obs]), -1), axis=0)) > 5, 'something happens'
    few = replace(real, batch=4, kind='uniform')
    assert few.element_bytes == sum(column.nbytes for column in columns.values()) / 10
    losses = []
    for kind in (Stock, Store):
        side = kind(few, 8)
        side.fill(few.columns(8))
        policy = policy_of(few)
        loss = policy.learn_mode.forward(side.train_data())['total_loss']
        losses.append(float(torch.as_tensor(loss).detach()))
        assert collated(few, side.train_data())
    assert np.isfinite(losses).all()


def test_without_its_extra_a_row_stays_synthetic_and_says_what_to_install(monkeypatch, tmp_path):
    from ding_store.bench.compare.recorded import Recorder

    monkeypatch.setitem(sys.modules, 'mujoco', None)
    stays = Recorder(str(tmp_path)).record(row('sac'))
    assert "pip install 'numpy<2' '.[mujoco]'" in stays.why_synthetic
    assert (stays.leaves, stays.source) == (row('sac').leaves, '')


def test_without_a_checkout_no_extra_is_asked_for(monkeypatch, tmp_path):
    from ding_store.bench.compare.recorded import Recorder

    for name in [name for name in sys.modules if name.split('.')[0] == 'dizoo_configs']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, 'path', [path for path in sys.path if not Path(path, 'dizoo_configs').exists()])
    assert Recorder(str(tmp_path)).record(row('sac')).why_synthetic == 'only a checkout has dizoo_configs'


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


def test_collectors_hand_over_real_elements_of_dqn(monkeypatch):
    asked = []

    def recorded(rows, directory, say):
        asked.append([one.name for one in rows])
        return [replace(one, source='real') for one in rows]

    monkeypatch.setattr('ding_store.bench.compare.main.recorded', recorded)
    rows = [row('sac')]
    for names, wanted in ((['collectors'], ['dqn']), (['single', 'collectors'], ['sac', 'dqn']), (['length'], [])):
        made, dqn = _real(rows, row('dqn'), names, '')
        assert (made[0].source, dqn.source) == ('real' * ('sac' in wanted), 'real' * ('dqn' in wanted))
        assert not wanted or asked.pop() == wanted
    assert not asked


def assert_equal(expected, actual, rows, axis):
    for key, value in expected.items():
        if key == 'prev_state':
            continue
        if isinstance(value, dict):
            assert_equal(value, actual[key], rows, axis)
        else:
            np.testing.assert_array_equal(value.numpy().take(rows, axis), actual[key].numpy(), err_msg=key)
