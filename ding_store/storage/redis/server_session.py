"""Connections to one server generation, and commands that bypass redis-py's client because it is slow."""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Callable, Deque, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import redis

from ding_store.storage.redis.replies import has_run
from ding_store.storage.redis.resp import pack, pieces, refusal, send
from ding_store.storage.redis.scripts import Argument, Command, LuaScript
from ding_store.storage.redis.server_checks import ServerGeneration, has_hung_up

# redis-py before 5.3 requires the name of the command here. Later versions warn if it is given.
_NAME = inspect.signature(redis.ConnectionPool.get_connection).parameters.get('command_name')
_GET_CONNECTION = ('EVALSHA',) if _NAME is not None and _NAME.default is _NAME.empty else ()

Before = Callable[[Any], Tuple[int, bytes]]


@contextmanager
def lent(client: Any) -> Iterator[Any]:
    """Lend a connection of a client's pool for commands that are read from its socket."""
    connection = client.connection_pool.get_connection(*_GET_CONNECTION)
    try:
        yield connection
    except BaseException:
        connection.disconnect()  # The next command must not read a late reply to this one.
        raise
    finally:
        client.connection_pool.release(connection)


@dataclass(frozen=True)
class ServerSession:
    """
    A client for one server generation, idle connections, and the scripts. The groups of a cluster's node share all but
    ``guard``.
    """

    client: Any  # a redis.Redis. Its annotations mix up synchronous and asynchronous results.
    scripts: Mapping[str, LuaScript]
    generation: ServerGeneration
    # Idle connections for scripts and parts. The pool counts them as in use: returning them costs a third of an append.
    spare: Deque[Any] = field(default_factory=deque)
    known: Set[str] = field(default_factory=set)  # scripts that the server has loaded
    closed: threading.Event = field(default_factory=threading.Event)
    guard: Tuple[str, ...] = ()  # further keys of each script, see ``Group.guard``

    def _borrow(self) -> Any:
        try:
            return self.spare.pop()
        except IndexError:
            return self.client.connection_pool.get_connection(*_GET_CONNECTION)

    @contextmanager
    def borrowed(self) -> Iterator[Any]:
        """Lend a connection for commands that would take much time in redis-py's client."""
        connection = self._borrow()
        try:
            yield connection
        except BaseException:
            self._give_back(connection)  # The next command must not read a late reply to this one.
            raise
        self.spare.append(connection)

    def is_hung_up(self) -> bool:
        """True if the server has closed an idle connection, as it does when it stops or crashes. Also once closed."""
        if self.closed.is_set():
            return True
        try:
            connection = self.spare.pop()
        except IndexError:
            return False
        self.spare.append(connection)
        return has_hung_up(connection)

    def close(self) -> None:
        """Close the idle connections. Each of the others is closed by the thread that uses it, after an error."""
        self.closed.set()
        with suppress(IndexError):  # Another thread may take the last one.
            while True:
                self._give_back(self.spare.pop())
        self.client.connection_pool.disconnect(inuse_connections=False)

    def _give_back(self, connection: Any) -> None:
        connection.disconnect()
        self.client.connection_pool.release(connection)

    def ask(self, *commands: Tuple[Argument, ...]) -> List[Any]:
        """Send some commands at once. Return their replies unchanged."""
        with self.borrowed() as connection:
            connection.send_packed_command([b''.join(map(pack, commands))], check_health=False)
            return [connection.read_response() for _ in commands]

    def wait(self, command: Tuple[Argument, ...], is_over: Callable[[], bool], look_s: float) -> Any:
        """
        Overview:
            Send a command that blocks, and return its reply. Call ``is_over`` every ``look_s`` meanwhile. If it returns
            True, return None and close the connection, which ends the command.
        """
        connection, reply, is_done = self._borrow(), None, False
        try:
            connection.send_packed_command([pack(command)], check_health=False)
            deadline = time.monotonic() + connection.socket_timeout
            while not connection.can_read(timeout=look_s):
                if time.monotonic() >= deadline:
                    raise redis.TimeoutError('Timeout reading from socket')
                if is_over():
                    return None
            reply = connection.read_response()
            is_done = True
        finally:
            if is_done:
                self.spare.append(connection)
            else:
                self._give_back(connection)  # The next command must not read a late reply to this one.
        return reply

    def run_replicated(
        self, script: str, keys: Sequence[str], arguments: Tuple[Argument, ...], num_replicas: int, timeout_ms: int
    ) -> Tuple[Any, int]:
        """
        Run a script, and wait until so many replicas have what it wrote. Return its reply, and how many have it.
        ``WAIT`` counts only what its own connection wrote.
        """
        if num_replicas == 0:
            return self.run(script, keys, *arguments), 0
        text, sha = self.scripts[script]
        load: Tuple[Argument, ...] = ('SCRIPT', 'LOAD', text)
        _, reply, reached = self.ask(load, self._evalsha(sha, keys, arguments), ('WAIT', num_replicas, timeout_ms))
        return reply, int(reached)

    def _evalsha(self, sha: str, keys: Sequence[str], arguments: Tuple[Argument, ...]) -> Tuple[Argument, ...]:
        return ('EVALSHA', sha, len(keys) + len(self.guard), *keys, *self.guard, *arguments)

    def run(self, script: str, keys: Sequence[str], *arguments: Argument, before: Optional[Before] = None) -> Any:
        """
        Overview:
            Run a script and return its reply.
        Arguments:
            - before (:obj:`Optional[Callable]`): Sends other commands on the same connection first. Returns how many of
              their replies are still to be read, and the bytes that are still to be sent. Arguments that are functions
              are called after it.
        Raises:
            - ResponseError: The server refused the script or a command before it. All replies were read, so nothing of
              this call can still arrive.
        """
        text, sha = self.scripts[script]
        with self.borrowed() as connection:
            num_replies, rest = 0, b''
            if before is not None:
                num_replies, rest = before(connection)
                arguments = tuple(one() if callable(one) else one for one in arguments)
            head, *payload = pieces(self._evalsha(sha, keys, arguments))
            send(connection, [rest + head, *payload])
            refused = refusal(connection, num_replies)
            try:
                reply = connection.read_response()
            except redis.exceptions.NoScriptError:
                if refused is not None:
                    raise refused from None
                connection.send_command('SCRIPT', 'LOAD', text)
                connection.read_response()
                connection.send_command(*self._evalsha(sha, keys, arguments))
                reply = connection.read_response()
            if refused is not None:
                raise has_run(refused)
            return reply

    def send(self, commands: Sequence[Command]) -> Callable[[], List[Any]]:
        """Send some scripts to run in order. Return a function that reads their replies. Call it exactly once."""
        unknown = [one.script for one in commands if one.script not in self.known]
        packed = [pack(('SCRIPT', 'LOAD', self.scripts[script].text)) for script in unknown]
        packed += [pack(self._evalsha(self.scripts[one.script].sha, one.keys, one.arguments)) for one in commands]
        connection = self._borrow()

        def replies() -> List[Any]:
            try:
                found = [connection.read_response() for _ in packed]
            except BaseException:
                self._give_back(connection)
                raise
            self.spare.append(connection)
            self.known.update(unknown)
            return found[len(unknown) :]

        try:
            connection.send_packed_command([b''.join(packed)], check_health=False)
        except BaseException:
            self._give_back(connection)
            raise
        return replies
