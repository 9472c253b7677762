"""``ding-store compare`` that is told to end leaves nothing: no file, no process of its own or of the jobs it runs."""

import contextlib
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from jobs import job

from ding_store.compare.disk import CGROUPS, Limit
from ding_store.compare.scratch import scratch
from ding_store.storage.testing import eventually

pytest.importorskip('ding')

#: The command, of one side only.
COMMAND = """
import sys
from ding_store.compare import sections
sections.TITLES[:] = sys.argv.pop(1).split()
from ding_store.cli import main
sys.exit(main())
"""
TINY = ['--length', '150', '--memory', '0.2', '--repeats', '1', '--seconds', '60', '--elements', 'synthetic']


@pytest.fixture
def short():
    """A directory in whose path there is room for sockets."""
    with tempfile.TemporaryDirectory() as directory:
        yield directory


def test_compare_ctrl_c_during_imports_prints_one_line(tmp_path):
    """A terminal tells all of them."""
    mark = uuid.uuid4().hex
    command = [sys.executable, '-c', COMMAND, 'store', 'compare', *TINY, '--sections', 'single', '--rows', 'sac']
    with job(command, tmp_path, MARK=mark) as compare:
        compare.wait_for(lambda: any(map(has_begun_to_import, processes(mark))), 'a process that imports')
        os.killpg(compare.process.pid, signal.SIGINT)
        assert compare.wait() == 1
        assert 'ding-store: interrupted' in compare.text
        assert 'Traceback' not in compare.text


@pytest.mark.parametrize(
    ('section', 'side', 'number', 'says', 'num_processes'),
    [
        ('single', 'store', signal.SIGTERM, 'ding_store: window 1', 4),
        pytest.param('across', 'stock', signal.SIGINT, 'DI-engine: 2 collectors', 6, marks=pytest.mark.long),
        pytest.param('across', 'store', signal.SIGTERM, 'ding_store: 2 collectors', 5, marks=pytest.mark.long),
        pytest.param('disk', 'store', signal.SIGINT, 'on disk: filling', 4, marks=pytest.mark.long),
    ],
)
def test_compare_interrupted_leaves_no_process_or_file(section, side, number, says, num_processes, tmp_path, short):
    mark = uuid.uuid4().hex
    row = 'impala' if section == 'disk' else 'sac'
    command = [sys.executable, '-c', COMMAND, side, 'compare', *TINY, '--sections', section, '--rows', row]
    try:
        with job(command, tmp_path, TMPDIR=short, MARK=mark) as compare:
            compare.wait_for(lambda: says in compare.text, says)
            compare.wait_for(lambda: len(processes(mark)) >= num_processes, 'all are there')
            assert os.listdir(short)
            if (section, side) == ('across', 'store'):
                compare.wait_for(lambda: host_caches(mark), 'a host cache')
            caches = host_caches(mark)
            os.kill(compare.process.pid, number)
            assert compare.wait() == 1
            assert compare.text.endswith('ding-store: interrupted\n')
        eventually(lambda: not processes(mark), 'all have left')
        assert os.listdir(short) == []
        assert not any(map(os.path.exists, caches))
    finally:
        for pid in processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_compare_next_run_removes_what_a_killed_one_left(tmp_path, short):
    mark = uuid.uuid4().hex
    command = [sys.executable, '-c', COMMAND, 'store', 'compare', *TINY, '--sections', 'disk', '--rows', 'impala']
    try:
        with job(command, tmp_path, TMPDIR=short, MARK=mark) as compare:
            compare.wait_for(lambda: has_table(short), 'a table')
            group = f'ding_store-{compare.process.pid}-'
            assert is_there(group) or Limit(1e8).reason
    finally:
        for pid in processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    eventually(lambda: not processes(mark), 'all have left')
    left = [*Path(short).glob('ding-store-bench-*')]
    assert any(map(has_table, left))
    with scratch(short):
        assert not any(path.exists() for path in left)
    assert os.listdir(short) == []

    def next_one():
        Limit(1e8).close()
        return not is_there(group)

    eventually(next_one, 'the group is removed')  # when the kernel has let go of its last process


def has_begun_to_import(pid):
    with contextlib.suppress(OSError):
        return 'torch' in Path(f'/proc/{pid}/maps').read_text()
    return False


def has_table(directory):
    """Whether there is a large file; others come and go meanwhile."""
    for path, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(os.path.join(path, name)).st_size > 1e6:
                    return True
    return False


def is_there(group):
    """Whether there is a cgroup whose name begins so; others come and go meanwhile."""
    return any(name.startswith(group) for _, names, _ in os.walk(CGROUPS) for name in names)


def host_caches(mark):
    """Directories of runs in it that these processes are members of."""
    found = set()
    for pid in processes(mark):
        with contextlib.suppress(OSError):
            found.update(os.readlink(one) for one in Path(f'/proc/{pid}/fd').iterdir())
    return [os.path.dirname(path) for path in found if path.endswith('/members')]


def processes(mark):
    """Those that live and have this word in their environment, by which they are known wherever they are."""
    found = []
    for path in Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError):
            if mark.encode() in (path / 'environ').read_bytes():
                found.append(int(path.name))
    return found
