"""The embedded server with few descriptors, and without the directory of its sockets."""

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from embedded_helpers import MEMBER, WAIT_S, Member, count, in_forks, is_alive

from ding_store.errors import StoreUnavailable
from ding_store.storage import open_store
from ding_store.storage.base import OLDEST
from ding_store.storage.embedded.private_server import ensure_server, find_server, running, stop_server
from ding_store.storage.testing import chunk, eventually

MAX_FILES = 72


@pytest.fixture(scope='module', autouse=True)
def _server_is_installed():
    try:
        find_server()
    except StoreUnavailable as e:
        if os.environ.get('CI'):
            raise
        pytest.skip(str(e))


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / 'run'
    yield path
    stop_server(path)


def start_with(directory, soft, hard):
    """A member that started the server under ``ulimit -n``."""

    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    command = [sys.executable, '-c', MEMBER.format(then=''), str(directory), '30']
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=limit)
    assert process.stdout.readline()
    return process


class TestDescriptors:
    def test_server_with_fewer_descriptors_than_members_stays(self, directory):
        first = start_with(directory, MAX_FILES, MAX_FILES)
        before = running(directory)
        try:
            sockets = in_forks(MAX_FILES + 8, lambda: ensure_server(directory, timeout_s=WAIT_S))
            assert set(sockets) == {before.socket}
            count(before.socket)
            after = running(directory)
            assert (after.supervisor_pid, after.server_pid) == (before.supervisor_pid, before.server_pid)
            # Those that have ended are seen, also without a descriptor for each.
            eventually(lambda: running(directory).members == (first.pid,), 'the members that ended are gone')
        finally:
            first.communicate(timeout=WAIT_S)

    def test_server_raises_its_soft_limit(self, directory):
        first = start_with(directory, MAX_FILES, 400)
        try:
            info = running(directory)
            (line,) = [
                one
                for one in Path(f'/proc/{info.supervisor_pid}/limits').read_text().splitlines()
                if one.startswith('Max open files')
            ]
            assert line.split()[3:5] == ['400', '400']
        finally:
            first.communicate(timeout=WAIT_S)

    def test_silent_connections_do_not_stop_the_server(self, directory):
        """They take what the supervisor has for connections; with their end it goes on."""
        first = start_with(directory, MAX_FILES, MAX_FILES)
        info = running(directory)
        control = os.path.join(os.path.dirname(info.socket), 'control.sock')
        holder = subprocess.Popen(
            [
                sys.executable,
                '-c',
                'import socket, sys\n'
                'held = [socket.socket(socket.AF_UNIX) for _ in range(200)]\n'
                '[one.connect(sys.argv[1]) for one in held]\n'
                'print(flush=True); sys.stdin.read()',
                control,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert holder.stdout.readline()
            num_open = len(os.listdir(f'/proc/{info.supervisor_pid}/fd'))
            assert num_open < MAX_FILES
            holder.communicate(timeout=WAIT_S)
            assert ensure_server(directory, timeout_s=WAIT_S) == info.socket
            assert is_alive(info.server_pid)
        finally:
            holder.kill()
            holder.wait()
            first.communicate(timeout=WAIT_S)


class TestSocketsThatAreDeleted:
    def delete(self, socket, what):
        parent = os.path.dirname(socket)
        if what == 'all':
            shutil.rmtree(parent)
        else:
            os.unlink(os.path.join(parent, what))

    @pytest.mark.parametrize('what', ['all', 'control.sock', 'redis.sock'])
    def test_process_that_joins_after_the_deletion_gets_a_server(self, directory, what):
        member = Member(directory, grace_s=30)
        before = member.line()
        count(before)
        pid = running(directory).supervisor_pid
        self.delete(before, what)
        # With its control socket a supervisor answers; it finds out about the other one within a second.
        eventually(lambda: ensure_server(directory) != before, 'the server moved')
        assert count(ensure_server(directory)) == 2, 'it has its data'
        assert running(directory).supervisor_pid == pid
        member.end(signal.SIGKILL)

    def test_store_survives_deleted_socket_directory(self, directory):
        """What it was connected to ends; nothing is lost."""
        with open_store(f'embedded://{directory}', run='cleaned') as store:
            info = running(store_directory(store))
            store.append('s', {}, chunk(0))
            self.delete(info.socket, 'all')
            with open_store(f'embedded://{directory}', run='cleaned') as other:
                other.append('s', {}, chunk(1))
                store.append('s', {}, chunk(2))
                found = [int(one.arrays['x'][0]) for one in other.read('s', OLDEST)]
                assert found == [0, 1, 2]
            stop_server(store_directory(store))

    def test_directory_is_locked_against_cleaners(self, directory):
        """systemd-tmpfiles passes over what is locked."""
        socket = ensure_server(directory)
        descriptor = os.open(os.path.dirname(socket), os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


def store_directory(store):
    return store.address.partition('://')[2]
