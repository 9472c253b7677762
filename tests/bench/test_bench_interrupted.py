"""A benchmark that is interrupted or killed leaves no process, and no directory that stays."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from jobs import benchmark, job

from ding_store.compare.scratch import scratch
from ding_store.launch.termination import interrupts_later, signals_as_interrupt
from ding_store.storage.testing import eventually

pytest.importorskip('ding')

WEIGHTS = ['weights', '--sizes', '2', '--readers', '2', '--rounds', '100000']
CHECKPOINT = ['checkpoint', '--megabytes', '4', '--repeats', '100000']
TRANSPORT = ['transport', '--elements', 'cartpole', '--paths', 'bare ring', '--seconds', '2']


@pytest.mark.parametrize(
    ('arguments', 'num_processes'),
    [
        pytest.param([*WEIGHTS, '--ways', 'bare'], 4, marks=pytest.mark.long),
        pytest.param([*WEIGHTS, '--wire'], 4, marks=pytest.mark.long),
        pytest.param(CHECKPOINT, 1, marks=pytest.mark.long),
        (TRANSPORT, 2),
    ],
    ids=lambda value: value[0] + '_wire' * ('--wire' in value) if isinstance(value, list) else '',
)
def test_benchmark_interrupted_leaves_no_process_or_file(arguments, num_processes, tmp_path, redis_binary):
    with job(benchmark(*arguments), tmp_path, OMP_NUM_THREADS='1') as bench:
        bench.wait_for(lambda: len(processes(bench)) >= num_processes and any(directories(bench)), 'it measures')
        if arguments[0] == 'weights':
            bench.wait_for(lambda: 'round 2' in bench.text, 'a round')
        left = directories(bench)
        os.kill(bench.process.pid, signal.SIGTERM)
        assert bench.wait() == 1
        if arguments[0] != 'weights':  # whose barriers have errors of their own when they are interrupted
            assert bench.text.endswith('benchmarks: interrupted\n')
        eventually(lambda: not processes(bench), 'all have left')
    assert not any(path.exists() for path in left)


def test_benchmark_killed_stops_its_redis_server(tmp_path, redis_binary):
    with job(benchmark(*WEIGHTS, '--wire'), tmp_path) as bench:
        bench.wait_for(lambda: 'round 2' in bench.text, 'a round')
        (server,) = [pid for pid in processes(bench) if b'redis' in of(pid, 'comm')]
        os.kill(bench.process.pid, signal.SIGKILL)
        eventually(lambda: server not in processes(bench), 'the server ends')


def test_benchmark_killed_stops_its_producer_and_frees_files(tmp_path):
    with job(benchmark(*TRANSPORT), tmp_path) as bench:
        left, producer = bench.wait_for(lambda: sending(bench), 'something is sent')
        os.kill(bench.process.pid, signal.SIGKILL)
        eventually(lambda: producer not in processes(bench), 'the producer ends')
        eventually(lambda: not processes(bench), 'so do all that hold the directory')
    with scratch(str(left[0].parent)):
        assert not any(path.exists() for path in left)


def test_benchmark_next_run_removes_directory_of_a_killed_one(tmp_path):
    place = tmp_path / 'place'
    place.mkdir()
    with job(benchmark(*CHECKPOINT, '--directory', place), tmp_path) as bench:
        bench.wait_for(lambda: any(place.glob('ding-store-bench-*')), 'its directory')
        os.kill(bench.process.pid, signal.SIGKILL)
        bench.wait()
    assert os.listdir(place)
    with scratch(str(place)) as directory:
        assert os.listdir(place) == [os.path.basename(directory)]


def processes(bench):
    """Those that live of its session, which is its own."""
    found = []
    for path in Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError):
            state, _, _, session = (path / 'stat').read_text().rpartition(')')[2].split()[:4]
            if session == str(bench.process.pid) and state not in 'ZX':
                found.append(path.name)
    return found


def directories(bench):
    """Scratch directories that its processes hold, or have files of."""
    found = set()
    for pid in processes(bench):
        with contextlib.suppress(OSError):
            found.update(os.readlink(one) for one in (Path('/proc') / pid / 'fd').iterdir())
    paths = {above for path in found for above in (Path(path), *Path(path).parents)}
    return [path for path in paths if path.name.startswith('ding-store-bench-')]


def sending(bench):
    """Its directories and the process that sends, at a moment at which one does."""
    paths, pids = directories(bench), producers(bench.process.pid)
    return (paths, pids[0]) if pids and any(map(num_sent, paths)) else None


def num_sent(directory):
    ring = directory / 'ring'  # It begins with that counter.
    with contextlib.suppress(FileNotFoundError):
        return int.from_bytes(ring.read_bytes()[:8], 'little')
    return 0


def producers(pid):
    """Processes of a benchmark that have begun to produce: what helps to start them runs another command."""
    children = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
    return [one for one in children if b'spawn_main' in of(one, 'cmdline')]


def of(pid, name):
    """What /proc says of a process; nothing when it has ended meanwhile."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path('/proc', pid, name).read_bytes()
    return b''


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_process_start_is_not_interrupted_halfway(number):
    """Or it reads half of what it is to do, and says EOFError behind whatever the command says."""
    done = []

    def start():
        with interrupts_later():
            signal.raise_signal(number)
            signal.raise_signal(number)
            done.append('all of it')
        done.append('more')

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where nohup started the tests
    try:
        with signals_as_interrupt(), pytest.raises(KeyboardInterrupt):
            start()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done == ['all of it']
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
