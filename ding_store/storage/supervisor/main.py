"""The supervisor's loop: one thread that sleeps until something happens to a member, to redis, or to itself.

Requests are one JSON line each, ``{"do": "join" | "leave" | "info" | "stop"}``, and so are the answers; a connection
that ends without an answer means: this supervisor is going, ask the next one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any, Callable, Deque, Dict, List, Optional, Set

from .files import (
    CONTROL,
    REDIS,
    RunFiles,
    deadline,
    held_by,
    is_served,
    make_socket_directory,
    peer,
    remove_socket_directory,
    take_lock,
)
from .members import Members
from .server import Server, is_pong

PING_EVERY_S = 0.005  # only while redis starts or loads its data
FIRST_MEMBER_S = 5.0  # the least grace at the start: who started us has yet to join
TERMINATE_S = 60.0  # then redis is killed; what it acknowledged is in its append-only file all the same
MAX_RESTARTS, RESTARTS_WITHIN_S = 5, 60.0


def log(text: str) -> None:
    with contextlib.suppress(OSError):  # the log's disk may be full: that must not end the supervisor
        sys.stderr.write(f'{os.getpid()}:supervisor {time.strftime("%d %b %Y %H:%M:%S")} {text}\n')
        sys.stderr.flush()


class Supervisor:
    """
    Overview:
        Runs redis for the members of one run, and ends with it when there were none for ``grace_s``.
        Make it with the run's lock held; then ``serve()``.
    """

    def __init__(self, files: RunFiles, binary: str, grace_s: float, lock: int) -> None:
        self._files, self._binary, self._grace_s, self._lock = files, binary, grace_s, lock
        self._selector = selectors.DefaultSelector()
        self._members = Members(self._selector, self._member_died)
        self._waiting: Set[socket.socket] = set()  # joined; told once a PING sent *after* they came is answered
        self._pinged: Set[socket.socket] = set()  # those whom the PING under way is for
        self._held: Set[socket.socket] = set()  # of the next run: this one finished, but has members yet
        self._stoppers: Set[socket.socket] = set()
        self._ping: Optional[socket.socket] = None
        self._restarts: Deque[float] = collections.deque(maxlen=MAX_RESTARTS)
        self._is_stopping = False
        self._is_over = False
        self._timers: Dict[Callable[[], None], float] = {}
        self._watch_signals()
        self._redis_socket = os.path.join(make_socket_directory(), REDIS)
        self._listener = self._listen()
        self._server = self._start_server()
        self._set_timer(self._no_member_came, max(grace_s, FIRST_MEMBER_S))

    def serve(self) -> None:
        """Until nobody needs the server any more; then nothing is left of it but its data."""
        while not self._is_over:
            for key, _ in self._selector.select(self._timeout()):
                if self._selector.get_map().get(key.fd) is key:  # not dropped by an event before it
                    key.data(key.fileobj)
            self._run_timers()
        remove_socket_directory(self._redis_socket)
        os.unlink(self._files.pointer)
        os.close(self._lock)
        for connection in list(self._stoppers):
            self._answer(connection, {'ok': True})
        log('over')

    # Time

    def _set_timer(self, action: Callable[[], None], after_s: float) -> None:
        self._timers[action] = time.monotonic() + after_s

    def _timeout(self) -> Optional[float]:
        waits = [max(at - time.monotonic(), 0) for at in self._timers.values()]
        if self._members.look_every_s is not None:
            waits.append(self._members.look_every_s)
        return min(waits, default=None)

    def _run_timers(self) -> None:
        self._members.look()
        for action, at in list(self._timers.items()):
            if time.monotonic() >= at and self._timers.pop(action, None) is not None:
                action()

    # Signals

    def _watch_signals(self) -> None:
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        self._wakeup = writer  # kept open
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

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.path.join(os.path.dirname(self._redis_socket), CONTROL))
        listener.listen(4096)
        listener.setblocking(False)
        self._files.write(self._files.pointer, self._redis_socket + '\n')
        self._selector.register(listener, selectors.EVENT_READ, self._on_connection)
        return listener

    def _on_connection(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # gone again
            connection = listener.accept()[0]
            self._selector.register(connection, selectors.EVENT_READ, self._on_request)

    def _on_request(self, connection: socket.socket) -> None:
        try:
            request = json.loads(connection.recv(4096))
            action = request['do']
        except (OSError, ValueError, KeyError, TypeError):  # its end, or not one of ours
            self._drop(connection)
            return
        pid = peer(connection)[0]
        if action == 'join':
            self._join(connection, pid)
        elif action == 'leave':
            self._leave(connection, pid)
        elif action == 'info':
            self._answer(connection, self._info())
        elif action == 'stop':
            self._stoppers.add(connection)
            self._stop(f'process {pid} asked for it')
        else:
            self._answer(connection, {'error': f'unknown request {action!r}'})

    def _join(self, connection: socket.socket, pid: int) -> None:
        if self._files.is_finished() and pid not in self._members:
            self._hold(connection)
            return
        try:
            self._members.join(pid)
        except ProcessLookupError as e:
            self._answer(connection, {'error': f'the supervisor cannot see this process ({e}): another container?'})
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
        self._answer(connection, {'ok': True})
        if was_member or self._files.is_finished():
            self._member_died(pid)

    def _member_died(self, pid: int) -> None:
        if self._members or self._is_stopping:
            return
        if self._files.is_finished():
            self._stop('the run finished, and its last member left')
        else:
            self._set_timer(self._no_member_came, self._grace_s)

    def _no_member_came(self) -> None:
        self._stop(f'no member for {self._grace_s:g} s')

    def _info(self) -> Dict[str, Any]:
        return {
            'socket': self._redis_socket,
            'supervisor_pid': os.getpid(),
            'server_pid': self._server.pid,
            'members': self._members.pids(),
            'finished': self._files.is_finished(),
            'grace_s': self._grace_s,
        }

    def _answer(self, connection: socket.socket, answer: Dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it did not wait
            connection.sendall(json.dumps(answer).encode() + b'\n')
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        for group in (self._waiting, self._pinged, self._held, self._stoppers):
            group.discard(connection)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        connection.close()

    # Redis

    def _start_server(self) -> Server:
        server = Server(self._binary, self._files.directory, self._redis_socket, self._lock)
        self._files.say_who(self._lock, server.pid)
        log(f'started {self._binary} as process {server.pid} in {self._files.directory}')
        return server

    def _start_ping(self) -> None:
        if self._ping is not None or self._is_stopping:
            return
        self._ping = self._server.ping()
        if self._ping is None:
            self._set_timer(self._start_ping, PING_EVERY_S)
            return
        self._pinged, self._waiting = self._waiting, set()
        self._selector.register(self._ping, selectors.EVENT_READ, self._on_pong)

    def _on_pong(self, ping: socket.socket) -> None:
        is_ready = is_pong(ping)
        self._drop_ping()
        if is_ready:
            self._server.was_ready = True
            for connection in list(self._pinged):
                self._answer(connection, {'ok': True, 'socket': self._redis_socket})
        self._waiting |= self._pinged
        self._pinged = set()
        if self._waiting:
            self._set_timer(self._start_ping, 0.0 if is_ready else PING_EVERY_S)

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
        now = time.monotonic()
        too_often = len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < RESTARTS_WITHIN_S
        if too_often or not self._server.was_ready:
            self._give_up(f'redis-server ended with status {status} ' + ('again' if too_often else 'at once'))
            return
        self._restarts.append(now)
        self._drop_ping()
        self._waiting |= self._pinged
        self._server = self._start_server()
        self._start_ping()

    def _give_up(self, reason: str) -> None:
        log(f'giving up: {reason}')
        for connection in [*self._waiting, *self._pinged]:
            self._answer(connection, {'error': reason})
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
        """First of all: whoever comes from now on, or is in the queue, finds no server rather than a dying one."""
        self._drop_ping()
        self._timers.clear()
        os.unlink(self._listener.getsockname())
        for key in list(self._selector.get_map().values()):
            if key.data == self._on_request and key.fileobj not in self._stoppers:
                self._drop(key.fileobj)  # type: ignore[arg-type]
        self._selector.unregister(self._listener)
        self._listener.close()


def become_supervisor(files: RunFiles, binary: str, grace_s: float, timeout_s: float) -> Optional[Supervisor]:
    """
    Overview:
        Wait for whoever is starting, then for whoever is stopping, and listen; None when another one already serves.
    Raises:
        - TimeoutError: The lock stays with someone who does not listen here.
    """
    with deadline(timeout_s):
        start_lock = take_lock(files.start_lock)
        if is_served(files):
            return None
        lock = take_lock(files.lock)
    stale = files.socket_path()  # of one that was killed: we have its lock, so that it and its redis are gone
    if stale is not None:
        remove_socket_directory(stale)
    if files.is_finished():
        files.archive()
    supervisor = Supervisor(files, binary, grace_s, lock)
    os.close(start_lock)
    return supervisor


def main(arguments: List[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--dir', required=True)
    parser.add_argument('--binary', required=True)
    parser.add_argument('--grace-s', type=float, required=True)
    parser.add_argument('--timeout-s', type=float, required=True)
    parser.add_argument('--report', type=int, required=True)
    asked = parser.parse_args(arguments)
    if os.fork():  # init is the supervisor's parent: no starter has to reap it, or kills it with its own children
        os._exit(0)
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the starter's survives exec
    files = RunFiles(asked.dir)
    supervisor, answer = None, {'ok': True}  # type: Optional[Supervisor], Dict[str, Any]
    try:
        supervisor = become_supervisor(files, asked.binary, asked.grace_s, asked.timeout_s)
    except TimeoutError:
        answer = {'error': held_by(files)}
    except OSError as e:
        answer = {'error': str(e)}
    with contextlib.suppress(BrokenPipeError):  # the starter did not wait for us
        os.write(asked.report, json.dumps(answer).encode() + b'\n')
    os.close(asked.report)
    if supervisor is not None:
        supervisor.serve()
