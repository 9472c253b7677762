"""Who would end a process while it writes its last checkpoint: signals come after it, and others can see it."""

import signal
import subprocess
import sys

import pytest

from ding_store.middleware.saving import NAME, is_saving

pytestmark = pytest.mark.timeout(60)
SAVE = """
import sys
from ding_store.middleware.saving import saving
try:
    with saving():
        print('saving', flush=True)
        sys.stdin.readline()
        print('saved', flush=True)
    print('went on', flush=True)
except KeyboardInterrupt:
    print('interrupted', flush=True)
"""


@pytest.fixture
def writer():
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    with subprocess.Popen([sys.executable, '-c', SAVE], **pipes) as process:
        try:
            assert process.stdout.readline() == 'saving\n'
            assert is_saving(process.pid)
            yield process
        finally:
            process.kill()


def end_of(process):
    process.stdin.write('\n')
    return process.stdout.read().split('\n')[:-1]


def test_others_see_it_and_it_ends(writer):
    assert len(NAME) <= 15  # of which the kernel keeps no more
    assert end_of(writer) == ['saved', 'went on']
    assert writer.wait() == 0
    assert not is_saving(writer.pid)


@pytest.mark.parametrize(
    ('number', 'said', 'code'),
    [(signal.SIGINT, ['saved', 'interrupted'], 0), (signal.SIGTERM, ['saved'], -signal.SIGTERM)],
)
def test_a_signal_comes_after_it(writer, number, said, code):
    writer.send_signal(number)
    assert 'still being written' in writer.stderr.readline()
    assert end_of(writer) == said
    assert writer.wait() == code


def test_a_second_signal_comes_at_once(writer):
    writer.send_signal(signal.SIGTERM)
    assert 'still being written' in writer.stderr.readline()
    writer.send_signal(signal.SIGTERM)
    assert writer.wait() == -signal.SIGTERM
    assert writer.stdout.read() == ''
