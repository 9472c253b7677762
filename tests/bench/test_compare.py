"""``ding-store compare`` measures every row on both sides; how fast they are is tested nowhere."""

import contextlib
import importlib.util
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from compare_rows import row
from jobs import ROOT, ding_store, environment
from needs import lacking

from ding_store.compare import disk
from ding_store.compare.across import across
from ding_store.compare.disk import Limit, is_memory, on_disk
from ding_store.compare.main import _facts, _measure
from ding_store.compare.page import page
from ding_store.compare.results import Results
from ding_store.compare.sections import ROW_SECTIONS
from ding_store.compare.terminal import render

pytest.importorskip('ding')

TINY = ['--length', '150', '--memory', '0.01', '--repeats', '1', '--seconds', '0.02', '--elements', 'synthetic']


def compare(*arguments, code=0):
    done = subprocess.run(
        ding_store('compare', *arguments), env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done


def check_sides(sides, *positive):
    for side in ('stock', 'store'):
        assert all(sides[side][name] > 0 for name in positive), sides


def test_a_row_from_end_to_end_and_resume(tmp_path):
    file, html = tmp_path / 'out.json', tmp_path / 'out.html'
    done = compare(*TINY, '--sections', 'single', '--rows', 'sac', '--json', file)
    assert f'wrote {file}\n' in done.stdout
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
    for record in result['rows'].values():
        record['length'] = 150
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


def test_the_script_is_the_command():
    script = [sys.executable, str(ROOT / 'scripts' / 'compare_throughput.py'), '--help']
    done = subprocess.run(script, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert '--resume' in done.stdout


def test_torch_is_for_the_processes_that_it_starts():
    """Which are many, and short of memory; and who starts them is asked to end at any time, also while it imports."""
    code = 'import sys; from ding_store.compare import main, sections; print("torch" in sys.modules)'
    done = subprocess.run([sys.executable, '-c', code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout == 'False\n', done.stderr
