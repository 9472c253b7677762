"""``ding-store compare`` measures every row on both sides; how fast they are is tested nowhere."""

import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compare_rows import row
from jobs import ROOT, ding_store, environment
from needs import lacking

from ding_store.cli import main
from ding_store.compare import disk
from ding_store.compare.across import across
from ding_store.compare.disk import Limit, is_memory, on_disk
from ding_store.compare.main import _facts
from ding_store.compare.tables import show
from ding_store.compare.worker import Effort, Worker

pytest.importorskip('ding')

TINY = ['--length', '150', '--memory', '0.1', '--repeats', '1', '--seconds', '0.02', '--elements', 'synthetic']


@pytest.fixture(scope='module', autouse=True)
def _forkserver():
    """Start the process that all peers are forked from before a test sets directories that end with the test."""
    with contextlib.closing(Worker('builtins:dict', timeout_s=240.0)) as worker:
        worker.call('copy')


@contextlib.contextmanager
def signalled(numbers):
    """Send signals to peers' processes: {n: signal} goes to the one that is asked for the nth window."""
    asked, begin = [], Worker._begin

    def begin_disturbed(self, name, arguments):
        if name == 'window':
            asked.append(self)
            if len(asked) in numbers:
                os.kill(self._process.pid, numbers[len(asked)])
                self._timeout_s = 0.5
        begin(self, name, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, '_begin', begin_disturbed)
        yield


def test_killed_and_hung_peers_fail_only_their_rows(tmp_path, capsys, monkeypatch):
    # The command sets it for all that it starts. Here other tests follow.
    monkeypatch.setitem(multiprocessing.current_process()._config, 'tempdir', str(tmp_path))
    file, figure = tmp_path / 'out.json', tmp_path / 'out.png'
    options = [*TINY, '--sections', 'single', '--rows', 'sac', 'qmix', '--json', str(file), '--figure', str(figure)]
    with signalled({1: signal.SIGKILL, 4: signal.SIGSTOP}):
        assert main(['compare', *options]) == 1
    out, err = capsys.readouterr()
    rows = json.loads(file.read_text())['rows']
    ((sac,), (qmix,)) = (rows[name]['single']['parts'] for name in ('sac', 'qmix'))
    assert sac['sides']['stock']['failed'] == 'crashed (signal 9)'
    assert qmix['sides']['store']['failed'] == 'hung: no end within 0.5 s'
    assert 'sac single DI-engine: crashed (signal 9)' in err
    check_side(sac['sides']['store'], 71, 138)
    check_side(qmix['sides']['stock'], 19, 60)
    lines = [line.split() for line in out.splitlines()]
    assert 'synthetic DI-engine crashed (signal 9)'.split() in lines
    assert any(line[-7:] == 'ding_store hung: no end within 0.5 s'.split() for line in lines)
    assert out.endswith(f'wrote {file}\nwrote {figure}\n')
    assert figure.stat().st_size > 0
    assert '\x1b' not in out + err, 'no colours where the output is no terminal'


def check_side(figures, adds_per_s, samples_per_s):
    assert all(figures[name] > 0 for name in ('bound_headroom', 'memory_per_element', 'iters_per_s', 'train_s'))
    times = [figures[f'sample_{name}_s'] for name in ('p50', 'p90', 'p99', 'max')]
    assert times == sorted(times)
    assert times[0] > 0
    most = min(figures['adds_per_s'] / adds_per_s, figures['samples_per_s'] / samples_per_s)
    assert 0 < figures['headroom'] < most


@pytest.mark.parametrize('side', ['stock', 'queue', 'store'])
@pytest.mark.long
def test_compare_across_processes_measures_both_rates(side):
    figures = across(row('masac'), 1, [side], Effort(1, 0.1, 120.0), lambda text: None)[side]
    assert figures['adds_per_s'] > 0
    # The learner samples at the ratio of the job, in whole batches.
    assert figures['samples_per_s'] / figures['adds_per_s'] == pytest.approx(63 / 116, rel=0.5)


def test_across_processes_a_killed_collector_is_a_crash(monkeypatch):
    begin = Worker._begin

    def killed(self, name, arguments):
        begin(self, name, arguments)
        os.kill(self._process.pid, signal.SIGKILL)

    monkeypatch.setattr(Worker, '_begin', killed)
    sides = across(row('masac'), 1, ['stock'], Effort(2, 0.1, 120.0), lambda text: None)
    assert sides['stock']['failed'] == 'crashed (signal 9)'


def test_across_processes_a_hung_job_ends_at_the_timeout():
    sides = across(row('masac'), 1, ['stock', 'store'], Effort(1, 0.1, 0.3), lambda text: None)
    assert [side['failed'] for side in sides.values()] == ['hung: no end within 0.3 s'] * 2


def test_plain_di_engine_job_that_hangs_leaves_no_workers(tmp_path, monkeypatch):
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


def test_table_on_disk_reports_its_cached_fraction(tmp_path):
    one = row('qmix')
    found = on_disk(one, 50 * one.element_bytes, 2e9, Effort(1, 0.01, 120.0), str(tmp_path), lambda text: None)
    assert found['length'] == 4 * one.batch
    assert found['samples_per_s'] > 0
    assert found['learner_at'] > 0
    assert found['fraction'] == found['samples_per_s'] / found['disk_per_s']
    assert list(tmp_path.iterdir()) == []
    out = io.StringIO()
    show({'rows': {'qmix': {**_facts(one), 'disk': {**found, 'source': 'synthetic'}}}}, out)
    text = ' '.join(out.getvalue().split())
    if found['limit_bytes'] is None:
        assert found['reason'] in text
    else:
        # It fits: then the disk is not what is measured, and the figures have to say so.
        assert found['cached'] > 0.9
        assert f'{100 * found["cached"]:.0f} %' in text


def test_table_on_disk_is_refused_in_memory():
    if not is_memory('/dev/shm'):
        lacking('needs a /dev/shm that is memory')
    command = ding_store('compare', *TINY, '--sections', 'disk', '--rows', 'impala')
    done = subprocess.run(command, env=environment(TMPDIR='/dev/shm'), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "'/dev/shm' is memory, and no disk: set TMPDIR to a directory on one" in done.stderr


@pytest.mark.parametrize(('own', 'place'), [('user.slice/job', 'user.slice'), ('', '.')])
def test_memory_limit_creates_and_removes_a_v2_cgroup(own, place, tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [
        (['--rows', 'pong'], "no row 'pong'; known are dqn, ppo"),
        (['--sections', 'all'], "no section 'all'; known are single, across"),
        (['--memory', '0.1', '--rows', 'r2d2'], 'holds 10 elements of r2d2: give it at least 0.32'),
        (['--repeats', '0'], '--repeats (0) must be above 0'),
        (['--json', '/nowhere/out.json'], 'there is no such directory'),
        (['--figure', '/'], "--figure '/' is a directory: name a file in it"),
        (['--figure', 'one', '--json', 'one'], '--json and --figure name the same file'),
        (['--figure', 'one.html'], "--figure 'one.html' must end in one of .png, .svg, .pdf"),
        (['--timeout', '0'], '--timeout (0) must be above 0'),
        (['--seconds', 'nan'], '--seconds (nan) must be above 0, and finite'),
        (['--memory', 'inf'], '--memory (inf) must be above 0, and finite'),
        (['--resume', '--rows', 'sac', '--length', '100'], '--resume goes with --json FILE'),
    ],
)
def test_compare_wrong_arguments_are_refused(arguments, says, capsys):
    assert main(['compare', *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize('missing', ['rich', 'matplotlib'])
def test_compare_without_its_extra_names_what_to_install(missing):
    code = f'import sys; sys.modules[{missing!r}] = None; from ding_store.cli import main; sys.exit(main())'
    command = [sys.executable, '-c', code, 'compare', '--quick', '--figure', 'figure.png']
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        f"ding-store: compare needs {missing}, which is not installed. Run: pip install 'ding_store[compare]'\n"
    )


def test_compare_command_does_not_import_torch():
    """Which are many, and short of memory; and who starts them is asked to end at any time, also while it imports."""
    code = 'import sys; from ding_store.compare import main, sections; print("torch" in sys.modules)'
    done = subprocess.run([sys.executable, '-c', code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout == 'False\n', done.stderr
