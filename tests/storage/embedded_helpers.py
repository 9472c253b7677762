"""Real member processes, and real ends of processes, for the tests of the embedded server."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Callable, List

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

WAIT_S = 60.0  # a deadline, not a duration: nothing here takes a second

MEMBER = """
import os, sys
from ding_store.storage.embedded.private_server import ensure_server
print(ensure_server(sys.argv[1], grace_s=float(sys.argv[2])), flush=True)
{then}
sys.stdin.read()
"""


class Member:
    """A process that joined; it ends when told to. ``then`` is Python that it runs after joining."""

    def __init__(self, directory: Path, grace_s: float = 0.3, then: str = '') -> None:
        command = [sys.executable, '-c', MEMBER.format(then=then), str(directory), str(grace_s)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self.process.pid
        self._output = b''

    def line(self) -> str:
        """What it says next; first the socket."""
        while b'\n' not in self._output:
            assert can_read(self.process.stdout), f'member {self.pid} says nothing'
            part = os.read(self.process.stdout.fileno(), 4096)
            assert part, f'member {self.pid} ended, its last words: {self._output!r}'
            self._output += part
        line, _, self._output = self._output.partition(b'\n')
        return line.decode()

    def end(self, number: int = 0) -> None:
        """By itself, or by a signal."""
        if number:
            self.process.send_signal(number)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(WAIT_S)


def can_read(file) -> bool:
    return bool(select.select([file], [], [], WAIT_S)[0])


def wait_for_end(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], WAIT_S)[0], f'process {pid} did not end'
    finally:
        os.close(pidfd)


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_for_end(pid)


def is_alive(pid: int) -> bool:
    """Neither ended nor a zombie that nobody reaps."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except (FileNotFoundError, ProcessLookupError):
        return False


def in_forks(number: int, function: Callable[[], str]) -> List[str]:
    """
    What ``function`` returns in each of so many forked children that begin at the same moment. They end with the call.
    """
    go_reader, go_writer = os.pipe()
    done_reader, done_writer = os.pipe()
    out_reader, out_writer = os.pipe()
    children = []
    for _ in range(number):
        child = os.fork()
        if child == 0:
            os.close(go_writer)
            os.close(done_writer)
            os.read(go_reader, 1)  # its end: everybody's start
            try:
                os.write(out_writer, f'{function()}\n'.encode())
                os.read(done_reader, 1)
            finally:
                os._exit(0)
        children.append(child)
    for descriptor in (go_reader, done_reader, out_writer, go_writer):
        os.close(descriptor)
    output = b''
    while output.count(b'\n') < number:
        assert can_read(out_reader), f'only {output!r} came from {number} children'
        part = os.read(out_reader, 1 << 16)
        assert part, f'only {output!r} came from {number} children'
        output += part
    os.close(done_writer)
    os.close(out_reader)
    for child in children:
        os.waitpid(child, 0)
    return output.decode().split()


def connect(socket: str) -> redis.Redis:
    """Without retries: a socket that comes from us works at once."""
    return redis.Redis(unix_socket_path=socket, retry=Retry(NoBackoff(), 0))


def count(socket: str) -> int:
    """One more than the last time, if nothing was lost."""
    with connect(socket) as client:
        return client.incr('count')
