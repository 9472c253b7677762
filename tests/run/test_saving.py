"""Who would end a process while it writes its last checkpoint: signals come after it, and others can see it."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ding_store.run.last_checkpoint import NAME, is_saving, saving

pytestmark = pytest.mark.timeout(60)
ITERATING = Path(__file__).parent / 'iterating.py'
SAVE = """
import select
import sys
from ding_store.run import last_checkpoint as module
from ding_store.run.last_checkpoint import saving
module.SAME_S = 0.0
try:
    with saving():
        print('saving', flush=True)
        while not select.select([sys.stdin], [], [], 0.1)[0]:
            pass  # in slices: who is told just before it waits hears of it afterwards
        print('saved', flush=True)
        if sys.argv[1:]:
            raise OSError('no disk')
    print('went on', flush=True)
except OSError:
    print('failed', flush=True)
except KeyboardInterrupt:
    print('interrupted', flush=True)
print('ended', flush=True)
"""


@pytest.fixture
def arguments():
    return []


@contextlib.contextmanager
def started(*arguments):
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    with subprocess.Popen([sys.executable, *arguments], **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def writer(arguments):
    with started('-c', SAVE, *arguments) as process:
        assert process.stdout.readline() == 'saving\n'
        assert is_saving(process.pid)
        yield process


@pytest.fixture
def iterating(arguments):
    with started(ITERATING, *arguments) as process:
        assert process.stdout.readline() == 'iterating\n'
        yield process


def end_of(process):
    process.stdin.write('\n')
    return process.stdout.read().split('\n')[:-1]


def test_saving_process_is_visible_to_others_and_ends(writer):
    assert len(NAME) <= 15  # of which the kernel keeps no more
    assert end_of(writer) == ['saved', 'went on', 'ended']
    assert writer.wait() == 0
    assert not is_saving(writer.pid)


@pytest.mark.parametrize('arguments', [[], ['and fail']], ids=['', 'failed'])
@pytest.mark.parametrize(
    ('numbers', 'said', 'code'),
    [
        ([signal.SIGINT], ['saved', 'interrupted', 'ended'], 0),
        ([signal.SIGTERM], ['saved'], -signal.SIGTERM),
        ([signal.SIGINT, signal.SIGTERM], ['saved'], -signal.SIGTERM),
    ],
)
def test_signal_during_a_save_arrives_after_it(writer, numbers, said, code):
    for number in numbers:
        writer.send_signal(number)
        assert 'signal received' in writer.stderr.readline()
    assert end_of(writer) == said
    assert writer.wait() == code


def test_second_signal_during_a_save_arrives_at_once(writer):
    writer.send_signal(signal.SIGTERM)
    assert 'signal received' in writer.stderr.readline()
    writer.send_signal(signal.SIGTERM)
    assert writer.wait() == -signal.SIGTERM
    assert writer.stdout.read() == ''


@pytest.mark.parametrize(
    ('number', 'said', 'code'),
    [(signal.SIGINT, ['saved', 'interrupted', 'ended'], 0), (signal.SIGTERM, ['saved'], -signal.SIGTERM)],
)
def test_signal_during_an_iteration_arrives_after_its_save(iterating, number, said, code):
    iterating.stdin.write('\n')
    assert iterating.stdout.readline() == 'iterating\n'
    iterating.send_signal(number)
    assert 'signal received' in iterating.stderr.readline()
    assert end_of(iterating) == said
    assert iterating.wait() == code


def test_signal_forwarded_by_a_launcher_is_not_a_second_one(iterating):
    for _ in range(2):
        iterating.send_signal(signal.SIGINT)
    assert 'signal received' in iterating.stderr.readline()
    assert end_of(iterating) == ['saved', 'interrupted', 'ended']


@pytest.mark.parametrize('arguments', [['60', '0']])
def test_second_signal_stops_an_iteration(iterating):
    iterating.send_signal(signal.SIGINT)
    assert 'signal received' in iterating.stderr.readline()
    iterating.send_signal(signal.SIGINT)
    assert iterating.stdout.read() == 'interrupted\nended\n'


@pytest.mark.parametrize('arguments', [['0.2', '0']])
@pytest.mark.parametrize(
    ('number', 'said', 'code'),
    [(signal.SIGINT, 'interrupted\nended\n', 0), (signal.SIGTERM, '', -signal.SIGTERM)],
)
def test_iteration_that_takes_too_long_is_stopped(iterating, number, said, code):
    iterating.send_signal(number)
    assert iterating.stdout.read() == said
    assert iterating.wait() == code
    assert 'no last checkpoint is written' in iterating.stderr.read()


def test_forked_child_ends_at_a_signal(iterating):
    iterating.stdin.write('fork\n')
    assert iterating.stdout.readline() == f'the child ended with {-signal.SIGTERM}\n'
    assert iterating.stdout.readline() == 'iterating\n'


def test_process_without_its_parent_has_time_for_its_checkpoint(iterating):
    iterating.stdin.write('lose parent\n')
    said = iterating.stdout.read().split()
    assert said[0] == 'saved'
    assert 'killed' in said


def test_signal_handler_that_raises_does_not_stop_the_others():
    def save():
        with saving():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
            assert heard == []

    heard, before = [], signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            save()
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


CHAINED = """
import signal, sys
from ding_store.run.last_checkpoint import LastCheckpoint
last = LastCheckpoint()
last.expect()
ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
last.done()
print('done', flush=True)
sys.stdin.read()
"""
#: ``done`` is called by another thread, before or after the signal.
ELSEWHERE = """
import signal, sys, threading
from ding_store.run import last_checkpoint
from ding_store.run.last_checkpoint import LastCheckpoint
last_checkpoint.ARRIVE_S = 1000.0
last = LastCheckpoint()
last.expect()
if sys.argv[1:]:
    signal.raise_signal(signal.SIGTERM)
thread = threading.Thread(target=last.done)
thread.start()
thread.join()
print('done', flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize('code', [CHAINED, ELSEWHERE], ids=['chained', 'elsewhere'])
def test_signal_handler_that_stays_passes_signals_on(code):
    with started('-c', code) as process:
        assert process.stdout.readline() == 'done\n'
        process.terminate()
        assert process.wait() == -signal.SIGTERM


def test_signal_held_back_arrives_from_another_thread():
    with started('-c', ELSEWHERE, 'told') as process:
        assert process.wait() == -signal.SIGTERM


def test_process_name_is_restored_after_saving():
    own = Path('/proc/self/comm')
    before = own.read_bytes()
    for _ in range(2):
        with saving():
            assert own.read_text() == f'{NAME}\n'
        assert own.read_bytes() == before


@pytest.mark.parametrize('error', [FileNotFoundError, PermissionError])
def test_saving_works_if_the_process_name_is_unreadable(monkeypatch, error):
    def unreadable(self):
        raise error(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, 'read_bytes', unreadable)
        done = False
        with saving():
            assert not is_saving(1)
            done = True
    assert done
    assert Path('/proc/self/comm').read_text() != f'{NAME}\n'
