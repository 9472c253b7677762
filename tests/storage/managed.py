"""A proxy in front of a real redis-server that plays what managed services do differently."""

import itertools
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, List

Facts = Dict[str, str]


class ManagedProxy:
    """
    Overview:
        Passes connections on. It changes the first reply to INFO of each, and refuses CONFIG until then: the store
        sends nothing else that services refuse.
    Arguments:
        - target (:obj:`Path`): The unix socket of the real server.
        - change (:obj:`Callable`): Changes the facts of INFO, given the number of the connection.
    """

    def __init__(self, target: Path, change: Callable[[Facts, int], None]) -> None:
        self._target, self._change = target, change
        self._listener = socket.create_server(('127.0.0.1', 0))
        self._numbers = itertools.count()
        self._sockets: List[socket.socket] = []
        self._threads: List[threading.Thread] = []
        self.url = f'redis://127.0.0.1:{self._listener.getsockname()[1]}'

    def __enter__(self) -> 'ManagedProxy':
        self._start(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        for one in [self._listener, *self._sockets]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive()

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                self._sockets += [near, far]
                far.connect(str(self._target))
                self._start(self._serve, near, far, next(self._numbers))

    def _serve(self, near: socket.socket, far: socket.socket, number: int) -> None:
        with suppress(OSError, EOFError):
            if self._greeted(near, far, number):
                self._start(self._pump, far, near)
                self._pump(near, far)

    def _greeted(self, near: socket.socket, far: socket.socket, number: int) -> bool:
        """Pass commands on one by one, up to the first INFO. Both ends are unbuffered: nothing is read ahead."""
        asked, replies = near.makefile('rb', 0), far.makefile('rb', 0)
        while True:
            command = _read_reply(asked)
            far.sendall(command)
            reply = _read_reply(replies)
            name = command.split(b'\r\n')[2].upper()
            if name == b'INFO':
                facts: Facts = {}
                for line in reply.split(b'\r\n', 1)[1].decode().splitlines():
                    fact, colon, value = line.partition(':')
                    if colon:
                        facts[fact] = value
                self._change(facts, number)
                text = ''.join(f'{fact}:{value}\r\n' for fact, value in facts.items()).encode()
                near.sendall(b'$%d\r\n%b\r\n' % (len(text), text))
                return True
            near.sendall(b"-ERR unknown command 'CONFIG'\r\n" if name == b'CONFIG' else reply)

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _read_exactly(file: Any, length: int) -> bytes:
    data = b''
    while len(data) < length:
        more = file.read(length - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _read_reply(file: Any) -> bytes:
    """Return the bytes of one reply or command."""
    line = file.readline()
    if not line:
        raise EOFError
    kind, length = line[:1], int(line[1:]) if line[:1] in b'$*' else 0
    if kind == b'$' and length >= 0:
        return line + _read_exactly(file, length + 2)
    if kind == b'*':
        return line + b''.join(_read_reply(file) for _ in range(length))
    return line
