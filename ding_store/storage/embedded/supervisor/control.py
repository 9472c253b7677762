"""The supervisor's control socket. Requests and answers are one JSON line each.

A request is ``{"do": "join" | "leave" | "info" | "stop"}``. Spaces before the answer mean that redis is still loading
its data. If a connection ends without an answer, this supervisor is stopping. The client then starts another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from typing import Any, Callable, Collection, Dict

PingResult = Dict[str, Any]


class Control:
    """
    Overview:
        Accepts connections on the control socket, reads their requests and sends answers.
    Arguments:
        - on_request (:obj:`Callable`): Called with a connection and its request. May answer later.
        - on_end (:obj:`Callable`): Called when a connection has ended, answered or not.
        - max_connections (:obj:`int`): At this number of connections, new ones wait in the socket's queue.
    """

    def __init__(
        self,
        path: str,
        selector: selectors.BaseSelector,
        on_request: Callable[[socket.socket, str], None],
        on_end: Callable[[socket.socket], None],
        max_connections: int = 4096,
    ) -> None:
        self._selector, self._on_request, self._on_end = selector, on_request, on_end
        self._max_connections = max_connections
        self._connections: Dict[int, socket.socket] = {}
        self._listen(path)

    def _listen(self, path: str) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(4096)
        self._listener.setblocking(False)
        self.is_paused = True
        self.resume()

    def move(self, path: str) -> None:
        """Listen on another path. Connections stay open."""
        self._end_listening()
        self._listen(path)

    def resume(self) -> None:
        """Accept connections again, unless there are ``max_connections``."""
        if self.is_paused and len(self._connections) < self._max_connections:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self.is_paused = False

    def _pause(self) -> None:
        if not self.is_paused:
            self._selector.unregister(self._listener)
            self.is_paused = True

    def answer(self, connection: socket.socket, answer: PingResult) -> None:
        with contextlib.suppress(OSError):  # The client did not wait.
            connection.sendall(json.dumps(answer).encode() + b'\n')
        self._drop(connection)

    def ask_for_patience(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.send(b' ')

    def close(self, keep: Collection[socket.socket]) -> None:
        """
        Overview:
            Stop listening, and end all connections but those in ``keep``. New and queued connections then fail at once,
            and their clients start another server.
        """
        self._end_listening()
        self._max_connections = 0  # Never resume.
        for connection in list(self._connections.values()):
            if connection not in keep:
                self._drop(connection)

    def _end_listening(self) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._path)
        self._pause()
        self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection = listener.accept()[0]
        except (BlockingIOError, ConnectionError):  # The client is gone again.
            return
        except OSError:  # No descriptor or no memory: try again a moment later.
            self._pause()
            return
        self._connections[connection.fileno()] = connection
        self._selector.register(connection, selectors.EVENT_READ, self._read)
        if len(self._connections) >= self._max_connections:
            self._pause()

    def _read(self, connection: socket.socket) -> None:
        try:
            action = json.loads(connection.recv(4096))['do']
        except (OSError, ValueError, KeyError, TypeError):  # the connection's end, or no request
            self._drop(connection)
            return
        self._on_request(connection, action)

    def _drop(self, connection: socket.socket) -> None:
        self._on_end(connection)
        del self._connections[connection.fileno()]
        self._selector.unregister(connection)
        connection.close()
