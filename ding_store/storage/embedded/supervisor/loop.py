"""The supervisor's loop: one thread that waits for events of clients, redis and the supervisor itself."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import resource
import selectors
import signal
import socket
import sys
import time
from typing import Callable, Deque, Dict, Optional, Set

from .clients import Clients
from .control import Control, PingResult
from .redis_process import PingResult as Pong
from .redis_process import Server, read_answer
from .run_files import RunFiles
from .sockets import REDIS, control_path, make_socket_directory, peer, remove_socket_directory

#: Delay before the next PING: with redis ready and new clients waiting, while it loads its data, and while it starts.
PING_AGAIN_S = {Pong.READY: 0.0, Pong.LOADING: 0.05, Pong.NONE: 0.005}
FIRST_MEMBER_S = 5.0  # minimum grace at the start: the process that started the supervisor has yet to join
TERMINATE_S = 60.0  # Redis is killed after this. What it acknowledged is in its append-only file.
MAX_RESTARTS, RESTARTS_WITHIN_S = 5, 60.0
#: Interval of checks that the sockets still exist: programs that clean /tmp delete old files.
LOOK_AT_SOCKETS_S = 1.0
#: Delay before another attempt after a lack of descriptors.
PAUSE_S = 0.1


def log(text: str) -> None:
    with contextlib.suppress(OSError):  # The log's disk may be full, which must not end the supervisor.
        sys.stderr.write(f'{os.getpid()}:supervisor {time.strftime("%d %b %Y %H:%M:%S")} {text}\n')
        sys.stderr.flush()


class Supervisor:
    """
    Overview:
        Runs redis for the clients of one run. Stops it and exits after ``grace_s`` without a client. Create it with the
        run's lock held, then call ``serve()``.
    """

    def __init__(self, files: RunFiles, binary: str, grace_s: float, lock: int, redis_socket: str) -> None:
        self._files, self._binary, self._grace_s, self._lock = files, binary, grace_s, lock
        self._redis_socket = redis_socket
        self._guard: Optional[int] = None
        self._guard_sockets()
        self._selector = selectors.DefaultSelector()
        # Clients get half of the descriptors. The others are for a restart of redis, files and checks of processes.
        max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._members = Clients(self._selector, self._member_died, max_files // 2)
        self._waiting: Set[socket.socket] = set()  # joined, answered after a PING that is sent *after* they came
        self._pinged: Set[socket.socket] = set()  # joined before the current PING was sent
        self._held: Set[socket.socket] = set()  # of the next run, while this finished run still has clients
        self._stoppers: Set[socket.socket] = set()
        self._ping: Optional[socket.socket] = None
        self._restarts: Deque[float] = collections.deque(maxlen=MAX_RESTARTS)
        self._is_stopping = False
        self._is_moving = False  # redis stops, to start again on another socket
        self._is_over = False
        self._timers: Dict[Callable[[], None], float] = {}
        self._watch_signals()
        path = control_path(redis_socket)
        self._control = Control(path, self._selector, self._on_request, self._on_end, max(8, max_files // 4))
        files.write(files.pointer, redis_socket + '\n')
        self._server = self._start_server()
        self._set_timer(self._no_member_came, max(grace_s, FIRST_MEMBER_S))
        self._set_timer(self._look_at_sockets, LOOK_AT_SOCKETS_S)

    def serve(self) -> None:
        """Run until no process needs the server. Only its data is left then."""
        while not self._is_over:
            for key, _ in self._selector.select(self._timeout()):
                if self._selector.get_map().get(key.fd) is key:  # An earlier event may have dropped it.
                    key.data(key.fileobj)
            self._run_timers()
        remove_socket_directory(self._redis_socket)
        if self._files.socket_path() == self._redis_socket:  # another, if the directory was made again
            os.unlink(self._files.pointer)
        os.close(self._lock)
        for connection in list(self._stoppers):
            self._control.answer(connection, {'ok': True})
        log('over')

    # Time

    def _set_timer(self, action: Callable[[], None], after_s: float) -> None:
        self._timers[action] = time.monotonic() + after_s

    def _timeout(self) -> Optional[float]:
        waits = [max(at - time.monotonic(), 0) for at in self._timers.values()]
        if self._members.look_every_s is not None:
            waits.append(self._members.look_every_s)
        if self._control.is_paused:
            waits.append(PAUSE_S)
        return min(waits, default=None)

    def _run_timers(self) -> None:
        self._members.look()
        self._control.resume()
        for action, at in list(self._timers.items()):
            if time.monotonic() >= at and self._timers.pop(action, None) is not None:
                action()

    # Signals

    def _watch_signals(self) -> None:
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        self._wakeup = writer  # keeps it open
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._selector.register(reader, selectors.EVENT_READ, self._on_signal)

    def _on_signal(self, reader: socket.socket) -> None:
        for number in set(reader.recv(256)):
            if number != signal.SIGCHLD:
                self._stop(f'signal {number}')
        if self._server.exit_status() is not None:
            self._server_died()

    # Requests

    def _on_request(self, connection: socket.socket, action: str) -> None:
        pid = peer(connection)[0]
        if action == 'join':
            self._join(connection, pid)
        elif action == 'leave':
            self._leave(connection, pid)
        elif action == 'info':
            self._control.answer(connection, self._info())
        elif action == 'stop':
            self._stoppers.add(connection)
            self._stop(f'process {pid} requested it')
        else:
            self._control.answer(connection, {'error': f'unknown request {action!r}'})

    def _on_end(self, connection: socket.socket) -> None:
        for group in (self._waiting, self._pinged, self._held, self._stoppers):
            group.discard(connection)

    def _join(self, connection: socket.socket, pid: int) -> None:
        if self._files.is_finished() and pid not in self._members:
            self._hold(connection)
            return
        try:
            self._members.join(pid)
        except ProcessLookupError as e:
            self._control.answer(
                connection, {'error': f'the supervisor cannot see this process ({e}): run both in one container'}
            )
            return
        except OSError as e:
            self._control.answer(connection, {'error': f'the supervisor has no descriptor left ({e}): raise ulimit -n'})
            return
        self._timers.pop(self._no_member_came, None)
        self._waiting.add(connection)
        self._start_ping()

    def _hold(self, connection: socket.socket) -> None:
        if self._members:
            self._held.add(connection)
        else:
            self._stop('the run finished, and another one begins')

    def _leave(self, connection: socket.socket, pid: int) -> None:
        was_member = pid in self._members
        self._members.leave(pid)
        self._control.answer(connection, {'ok': True})
        if was_member or self._files.is_finished():
            self._member_died(pid)

    def _member_died(self, pid: int) -> None:
        if self._members or self._is_stopping:
            return
        if self._files.is_finished():
            self._stop('the run finished, and its last client left')
        else:
            self._set_timer(self._no_member_came, self._grace_s)

    def _no_member_came(self) -> None:
        self._stop(f'no client for {self._grace_s:g} s')

    def _info(self) -> PingResult:
        return {
            'socket': self._redis_socket,
            'supervisor_pid': os.getpid(),
            'server_pid': self._server.pid,
            'members': self._members.pids(),
            'finished': self._files.is_finished(),
            'grace_s': self._grace_s,
        }

    # Redis

    def _start_server(self) -> Server:
        server = Server(self._binary, self._files.directory, self._redis_socket, self._lock)
        self._files.say_who(self._lock, server.pid)
        log(f'started {self._binary} as process {server.pid} in {self._files.directory}')
        return server

    def _start_ping(self) -> None:
        if self._ping is not None or self._is_stopping or self._is_moving:
            return
        self._ping = self._server.ping()
        if self._ping is None:
            self._set_timer(self._start_ping, PING_AGAIN_S[Pong.NONE])
            return
        self._pinged, self._waiting = self._waiting, set()
        self._selector.register(self._ping, selectors.EVENT_READ, self._on_pong)

    def _on_pong(self, ping: socket.socket) -> None:
        pong = read_answer(ping)
        self._drop_ping()
        for connection in list(self._pinged):
            if pong is Pong.READY:
                self._control.answer(connection, {'ok': True, 'socket': self._redis_socket})
            elif pong is Pong.LOADING:
                self._control.ask_for_patience(connection)
        self._server.was_ready |= pong is Pong.READY
        self._waiting |= self._pinged
        self._pinged = set()
        if self._waiting:
            self._set_timer(self._start_ping, PING_AGAIN_S[pong])

    def _drop_ping(self) -> None:
        if self._ping is not None:
            self._selector.unregister(self._ping)
            self._ping.close()
            self._ping = None

    def _server_died(self) -> None:
        status = self._server.exit_status()
        log(f'redis ended with status {status}')
        if self._is_stopping:
            self._is_over = True
            return
        if self._is_moving:
            self._is_moving = False
            self._timers.pop(self._kill_server, None)
            self._restart_server()
            return
        now = time.monotonic()
        too_often = len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < RESTARTS_WITHIN_S
        if too_often or not self._server.was_ready:
            self._give_up(f'redis-server ended with status {status} ' + ('again' if too_often else 'at once'))
            return
        self._restarts.append(now)
        self._restart_server()

    def _restart_server(self) -> None:
        self._drop_ping()
        self._waiting |= self._pinged
        try:
            self._server = self._start_server()
        except OSError as e:
            self._give_up(f'redis-server could not be started again: {e}')
            return
        self._start_ping()

    # Sockets

    def _look_at_sockets(self) -> None:
        self._set_timer(self._look_at_sockets, LOOK_AT_SOCKETS_S)
        sockets = [control_path(self._redis_socket)] + [self._redis_socket] * self._server.was_ready
        if self._is_moving or all(os.path.exists(path) for path in sockets):
            return
        log(f'{os.path.dirname(self._redis_socket)} was deleted: moving to another directory')
        try:
            self._move()
        except OSError as e:
            log(f'cannot move the sockets: {e}')

    def _move(self) -> None:
        """Move the sockets to another directory. Clients lose their connections, and join again for the path."""
        old, new = self._redis_socket, os.path.join(make_socket_directory(), REDIS)
        try:
            self._control.move(control_path(new))
            self._files.write(self._files.pointer, new + '\n')
        except OSError:
            remove_socket_directory(new)  # The next check finds the sockets missing again.
            raise
        self._redis_socket = new
        remove_socket_directory(old)
        self._guard_sockets()
        self._is_moving = True
        self._drop_ping()
        self._server.send_signal(signal.SIGTERM)
        self._set_timer(self._kill_server, TERMINATE_S)

    def _guard_sockets(self) -> None:
        """Lock the sockets' directory: systemd-tmpfiles does not clean a locked one."""
        if self._guard is not None:
            os.close(self._guard)
        self._guard = os.open(os.path.dirname(self._redis_socket), os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._guard, fcntl.LOCK_SH)

    def _give_up(self, reason: str) -> None:
        log(f'giving up: {reason}')
        for connection in [*self._waiting, *self._pinged]:
            self._control.answer(connection, {'error': reason})
        self._stop_listening()
        self._is_stopping = self._is_over = True

    def _stop(self, reason: str) -> None:
        if self._is_stopping:
            return
        log(f'stopping: {reason}')
        self._is_stopping = True
        self._stop_listening()
        self._server.send_signal(signal.SIGTERM)
        self._set_timer(self._kill_server, TERMINATE_S)

    def _kill_server(self) -> None:
        log(f'redis did not end within {TERMINATE_S:g} s: killing it')
        self._server.send_signal(signal.SIGKILL)

    def _stop_listening(self) -> None:
        self._drop_ping()
        self._timers.clear()
        self._control.close(keep=self._stoppers)
