"""The embedded server: who starts it, who keeps it, and what stays when it goes."""

import itertools
import os
import pty
import signal
import sys
import threading
from pathlib import Path

import pytest
from embedded_helpers import MEMBER, Member, can_read, connect, count, in_forks, is_alive, kill, wait_for_end

from ding_store.errors import ConfigError, StoreError, StoreUnavailable
from ding_store.storage.embedded import private_server as embedded
from ding_store.storage.embedded.private_server import (
    ensure_server,
    leave_server,
    mark_finished,
    remove_run,
    running,
    stop_server,
)


@pytest.fixture(scope='module', autouse=True)
def _server_is_installed():
    try:
        embedded.find_server()
    except StoreUnavailable as e:
        if os.environ.get('CI'):
            raise
        pytest.skip(str(e))


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / 'run'
    yield path
    stop_server(path)


def wait_until_gone(info):
    wait_for_end(info.server_pid)
    wait_for_end(info.supervisor_pid)
    assert running(info.directory) is None
    assert not os.path.exists(os.path.dirname(info.socket))


class TestStart:
    def test_racing_processes_share_one_server(self, directory):
        def join():
            return f'{ensure_server(directory, grace_s=0.2)}:{os.getpid()}:{running(directory).server_pid}'

        answers = [answer.split(':') for answer in in_forks(8, join)]
        sockets, pids, servers = (set(column) for column in zip(*answers))
        assert len(pids) == 8
        assert len(sockets) == len(servers) == 1
        assert (directory / 'server.log').read_text().count(' started ') == 1

    def test_ensure_server_twice_returns_the_same_server(self, directory):
        first = ensure_server(directory)
        pid = running(directory).server_pid
        assert {ensure_server(directory) for _ in range(20)} == {first}
        assert running(directory).server_pid == pid
        assert running(directory).members == (os.getpid(),)

    def test_embedded_server_has_its_options(self, directory):
        with connect(ensure_server(directory)) as client:
            options = client.config_get()
        assert options['appendonly'] == 'yes'
        assert options['appendfsync'] == 'everysec'
        assert options['maxmemory-policy'] == 'noeviction'
        assert options['aof-load-truncated'] == 'yes'
        assert options['save'] == ''
        assert options['port'] == '0'
        assert options['dir'] == str(directory)

    def test_embedded_server_is_private(self, directory):
        socket = ensure_server(directory)
        assert os.stat(directory).st_mode & 0o777 == 0o700
        assert os.stat(os.path.dirname(socket)).st_mode & 0o777 == 0o700
        assert os.stat(socket).st_mode & 0o077 == 0
        # Of Redis 7 and Valkey a directory, within the run's own.
        assert (directory / 'appendonlydir').is_dir() or os.stat(directory / 'appendonly.aof').st_mode & 0o077 == 0

    def test_embedded_server_inherits_nothing_from_its_starter(self, directory, tmp_path):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            with open(tmp_path / 'inheritable', 'w') as file:
                os.set_inheritable(file.fileno(), True)
                ensure_server(directory)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        info = running(directory)
        for pid in (info.supervisor_pid, info.server_pid):
            opened = {os.readlink(path) for path in Path(f'/proc/{pid}/fd').iterdir() if os.path.lexists(path)}
            assert file.name not in opened
            standard = [os.readlink(f'/proc/{pid}/fd/{number}') for number in range(3)]
            assert standard == ['/dev/null', str(directory / 'server.log'), str(directory / 'server.log')]
            assert os.getsid(pid) != os.getsid(0)
            assert os.readlink(f'/proc/{pid}/cwd') in ('/', str(directory))  # redis goes to its data
        os.kill(info.supervisor_pid, signal.SIGTERM)  # not blocked there
        wait_until_gone(info)

    def test_embedded_server_is_no_child_of_its_starter(self, directory):
        ensure_server(directory)
        stat = Path(f'/proc/{running(directory).supervisor_pid}/stat').read_text()
        assert int(stat.rpartition(')')[2].split()[1]) != os.getpid()

    def test_two_runs_have_servers_of_their_own(self, directory, tmp_path):
        other = tmp_path / 'other'
        sockets = [ensure_server(directory), ensure_server(other)]
        try:
            assert [count(socket) for socket in sockets] == [1, 1]
            assert running(directory).server_pid != running(other).server_pid
        finally:
            stop_server(other)

    def test_directory_names_of_any_length_and_letters_work(self, tmp_path):
        directory = tmp_path / ('long' * 60) / ('longer' * 40) / 'with "quotes" \\ and spaces\tand ünïcode'
        socket = ensure_server(directory)
        try:
            assert len(os.fsencode(socket)) <= 107 < len(str(directory))
            assert count(socket) == 1
            assert any(name.startswith('appendonly') for name in os.listdir(directory))
        finally:
            stop_server(directory)

    def test_directory_by_two_names_is_one_server(self, directory, tmp_path, monkeypatch):
        socket = ensure_server(directory)
        (tmp_path / 'link').symlink_to(directory)
        monkeypatch.chdir(tmp_path)
        assert ensure_server('link') == ensure_server('run') == ensure_server('./other/../run') == socket

    def test_durations_that_are_invalid_are_refused(self, directory):
        with pytest.raises(ConfigError, match='grace_s \\(-1\\)'):
            ensure_server(directory, grace_s=-1)
        with pytest.raises(ConfigError, match='timeout_s \\(0\\)'):
            ensure_server(directory, timeout_s=0)


class TestMembers:
    @pytest.mark.parametrize('number', [0, signal.SIGKILL], ids=['exit', 'kill'])
    def test_server_stops_after_its_last_member(self, directory, number):
        members = [Member(directory) for _ in range(2)]
        assert len({member.line() for member in members}) == 1
        info = running(directory)
        assert info.members == tuple(sorted(member.pid for member in members))
        members[0].end(number)
        members[1].end(number)
        wait_until_gone(info)

    def test_server_lives_while_one_member_is_left(self, directory):
        socket = ensure_server(directory, grace_s=0.0)
        other = Member(directory)
        other.line()
        other.end()
        assert count(socket) == 1
        assert running(directory).members == (os.getpid(),)

    def test_forked_child_does_not_keep_the_server_alive(self, directory):
        then = 'if os.fork() == 0:\n    print(os.getpid(), flush=True)'  # then both wait for the end of their input
        member = Member(directory, then=then)
        member.line()
        child = int(member.line())
        info = running(directory)
        member.process.kill()
        wait_until_gone(info)
        assert is_alive(child)
        kill(child)
        member.end()

    def test_forked_child_that_joins_is_a_member(self, directory):
        then = 'if os.fork() == 0:\n    ensure_server(sys.argv[1])\n    print(os.getpid(), flush=True)'
        member = Member(directory, then=then)
        member.line()
        child = int(member.line())
        assert set(running(directory).members) == {member.pid, child}
        member.process.kill()
        member.process.wait()
        info = running(directory)
        assert info.members == (child,)
        kill(child)
        member.end()
        wait_until_gone(info)

    def test_ctrl_c_in_the_terminal_does_not_stop_the_server(self, directory):
        pid, terminal = pty.fork()
        if pid == 0:
            os.execv(sys.executable, [sys.executable, '-c', MEMBER.format(then=''), str(directory), '0.3'])
        assert can_read(terminal)
        socket = os.read(terminal, 4096).decode().strip()
        assert ensure_server(directory) == socket
        info = running(directory)
        os.write(terminal, b'\x03')
        assert os.waitpid(pid, 0)[1] != 0
        os.close(terminal)
        assert running(directory).members == (os.getpid(),)
        assert running(directory).server_pid == info.server_pid
        assert count(socket) == 1
        leave_server(directory)
        wait_until_gone(info)

    def test_leave_by_the_last_member_stops_the_server(self, directory):
        ensure_server(directory, grace_s=0.0)
        info = running(directory)
        leave_server(directory)
        wait_until_gone(info)
        leave_server(directory)

    def test_member_joining_during_the_stop_gets_a_server(self, directory):
        """Each round begins somewhere in the end of the server before; nobody gets a dead socket, nothing is lost."""
        num_servers = set()
        for i in itertools.count():
            if i >= 16 and len(num_servers) > 8:
                break
            assert i < 300, 'it hardly ever goes'
            assert count(ensure_server(directory, grace_s=0.0)) == i + 1
            num_servers.add(running(directory).supervisor_pid)
            leave_server(directory)
            threading.Event().wait(i % 8 * 0.004)

    def test_many_members_joining_during_the_stop_get_one_server(self, directory):
        for i in range(4):
            socket = ensure_server(directory, grace_s=0.0)
            count(socket)
            leave_server(directory)
            counts = in_forks(4, lambda: str(count(ensure_server(directory, grace_s=0.0))))
            assert sorted(map(int, counts)) == [5 * i + j for j in (2, 3, 4, 5)]


class TestData:
    def test_run_is_resumed_after_a_crash_of_all_processes(self, directory):
        member = Member(directory)
        assert [count(member.line()), count(running(directory).socket)] == [1, 2]
        info = running(directory)
        kill(member.pid, info.supervisor_pid, info.server_pid)
        member.end()
        assert os.path.exists(info.socket)
        assert count(ensure_server(directory)) == 3
        assert not os.path.exists(info.socket)  # the dead one's

    def test_run_is_resumed_after_stop_server(self, directory):
        assert count(ensure_server(directory)) == 1
        assert stop_server(directory)
        assert running(directory) is None
        assert count(ensure_server(directory)) == 2

    def test_finished_run_is_not_resumed(self, directory):
        assert count(ensure_server(directory)) == 1
        info = running(directory)
        mark_finished(directory)
        wait_until_gone(info)  # without the 30 s of grace
        assert count(ensure_server(directory)) == 1
        assert any((directory / 'previous').iterdir())
        assert not running(directory).is_finished

    def test_next_run_waits_for_members_of_the_finished_one(self, directory):
        member = Member(directory)
        socket = member.line()
        ensure_server(directory)
        count(socket)
        mark_finished(directory)
        assert running(directory).is_finished
        assert count(socket) == 2  # its members go on
        with pytest.raises(StoreUnavailable, match=f'finished, but its processes \\[{member.pid}\\] have not ended'):
            ensure_server(directory, timeout_s=0.3)
        timer = threading.Timer(0.1, member.process.kill)
        timer.start()
        assert count(ensure_server(directory)) == 1
        timer.join()
        member.end()

    def test_finish_without_a_server_makes_the_next_run_empty(self, directory):
        count(ensure_server(directory))
        stop_server(directory)
        mark_finished(directory)
        assert count(ensure_server(directory)) == 1

    def test_finish_by_a_process_that_is_no_member_is_accepted(self, directory):
        member = Member(directory, grace_s=30.0)
        count(member.line())
        member.end()
        info = running(directory)
        mark_finished(directory)
        wait_until_gone(info)
        assert count(ensure_server(directory)) == 1

    def test_only_the_last_finished_run_is_kept(self, directory):
        for size in (100_000, 10):
            with connect(ensure_server(directory)) as client:
                client.set('key', b'x' * size)
            mark_finished(directory)
        ensure_server(directory)
        kept = sum(path.stat().st_size for path in (directory / 'previous').rglob('*') if path.is_file())
        assert 10 < kept < 100_000

    def test_mark_finished_without_a_run_makes_nothing(self, directory):
        mark_finished(directory)
        assert not directory.exists()

    def test_remove_deletes_the_directory_of_a_run(self, directory):
        count(ensure_server(directory))
        assert remove_run(directory)
        assert not directory.exists()
        assert not remove_run(directory)
        assert count(ensure_server(directory)) == 1

    def test_remove_deletes_half_written_files(self, directory):
        count(ensure_server(directory))
        for name in ('ends', 'finished'):
            (directory / f'{name}.new').write_text('')
        assert remove_run(directory)
        assert not directory.exists()

    def test_remove_keeps_files_of_other_programs(self, directory):
        ensure_server(directory)
        (directory / 'policy.pth').write_text('mine')
        mark_finished(directory)
        ensure_server(directory)
        assert remove_run(directory)
        assert [path.name for path in directory.iterdir()] == ['policy.pth']

    def test_remove_of_a_run_in_use_is_refused(self, directory):
        member = Member(directory)
        count(member.line())
        with pytest.raises(StoreError, match=str(member.pid)):
            remove_run(directory)
        assert count(running(directory).socket) == 2
        member.end()

    def test_stop_without_a_server_does_nothing(self, directory):
        assert running(directory) is None
        assert not stop_server(directory)
        assert not directory.exists()
