"""The supervisor's ear: requests on its control socket, one JSON line each, and so are the answers.

``{"do": "join" | "leave" | "info" | "stop"}``. Spaces before the answer mean: still loading, have patience. A
connection that ends without an answer means: this supervisor is going, ask the next one.
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
    Arguments:
        - on_request (:obj:`Callable`): Called with a connection and what it asks for; answers now or later.
        - on_end (:obj:`Callable`): Called when a connection has ended, answered or not.
        - max_connections (:obj:`int`): While there are so many, others wait in the socket's queue.
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
        """Listen there instead. Connections stay."""
        self._end_listening()
        self._listen(path)

    def resume(self) -> None:
        """Accept connections again, if there is room for one."""
        if self.is_paused and len(self._connections) < self._max_connections:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self.is_paused = False

    def _pause(self) -> None:
        if not self.is_paused:
            self._selector.unregister(self._listener)
            self.is_paused = True

    def answer(self, connection: socket.socket, answer: PingResult) -> None:
        with contextlib.suppress(OSError):  # it did not wait
            connection.sendall(json.dumps(answer).encode() + b'\n')
        self._drop(connection)

    def ask_for_patience(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.send(b' ')

    def close(self, keep: Collection[socket.socket]) -> None:
        """
        Overview:
            End all connections but those to ``keep``. Whoever comes from now on, or waits in the queue, finds no
            server instead of a dying one.
        """
        self._end_listening()
        self._max_connections = 0  # So that it is not resumed.
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
        except (BlockingIOError, ConnectionError):  # gone again
            return
        except OSError:  # no descriptor, or no memory: the next is asked for a moment later
            self._pause()
            return
        self._connections[connection.fileno()] = connection
        self._selector.register(connection, selectors.EVENT_READ, self._read)
        if len(self._connections) >= self._max_connections:
            self._pause()

    def _read(self, connection: socket.socket) -> None:
        try:
            action = json.loads(connection.recv(4096))['do']
        except (OSError, ValueError, KeyError, TypeError):  # its end, or none of ours
            self._drop(connection)
            return
        self._on_request(connection, action)

    def _drop(self, connection: socket.socket) -> None:
        self._on_end(connection)
        del self._connections[connection.fileno()]
        self._selector.unregister(connection)
        connection.close()
