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

Answer = Dict[str, Any]


class Control:
    """
    Arguments:
        - on_request (:obj:`Callable`): Called with a connection and what it asks for; answers now or later.
        - on_end (:obj:`Callable`): Called when a connection has ended, answered or not.
    """

    def __init__(
        self,
        path: str,
        selector: selectors.BaseSelector,
        on_request: Callable[[socket.socket, str], None],
        on_end: Callable[[socket.socket], None],
    ) -> None:
        self._selector, self._on_request, self._on_end = selector, on_request, on_end
        self._connections: Dict[int, socket.socket] = {}
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(4096)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def answer(self, connection: socket.socket, answer: Answer) -> None:
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
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._selector.unregister(self._listener)
        self._listener.close()
        for connection in list(self._connections.values()):
            if connection not in keep:
                self._drop(connection)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # gone again
            connection = listener.accept()[0]
            self._connections[connection.fileno()] = connection
            self._selector.register(connection, selectors.EVENT_READ, self._read)

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
