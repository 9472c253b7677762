"""A TCP proxy between a store and its server that delays, throttles, cuts in mid-message, and lets nothing through."""

import asyncio
import socket
import ssl
import struct
import threading
from typing import Any, Callable, Coroutine, Optional, Set, Tuple, TypeVar

T = TypeVar('T')
Address = Tuple[str, int]

#: Directions of a byte, seen from the store.
UP, DOWN = 'up', 'down'
_READ_BYTES = 1 << 16
_MAX_CHUNKS_ON_THE_WAY = 256


class Proxy:
    """
    Overview:
        Listens on a free port of ``host``; runs in a thread of its own within its ``with`` block. Its attributes may be
        changed at any time by any thread.
    Arguments:
        - target: Where connections go: the path of a unix socket, or (host, port).
        - tls (:obj:`Optional[ssl.SSLContext]`): Of the proxy's own side, where it is the server.
    Attributes:
        - latency_s (:obj:`float`): By how much each byte comes later, one way.
        - bytes_per_s (:obj:`Optional[float]`): Of each direction of each connection.
        - num_round_trips (:obj:`int`): How often an answer came to what was sent since the last one.
        - reply (:obj:`bytes`): An error of Redis that scripts get from now on, which the server does not see.
    """

    def __init__(self, target: Any, host: str = '127.0.0.1', tls: Optional[ssl.SSLContext] = None) -> None:
        self.latency_s = 0.0
        self.bytes_per_s: Optional[float] = None
        self.num_connections = 0
        self.num_cuts = 0  # by ``cut_after``
        self.num_bytes = {UP: 0, DOWN: 0}
        self.num_round_trips = 0
        self.reply = b''
        self.num_replies = 0
        self._is_asked = False
        self._target = target
        self._tls = tls
        self._cut_at: dict = {}  # direction -> bytes still to pass before the cut
        self._host = host
        self._writers: Set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name='proxy', daemon=True)

    def __enter__(self) -> 'Proxy':
        self._thread.start()
        self.port = self._run(self._listen())
        self.address: Address = (self._host, self.port)
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def url(self, scheme: str = 'redis', user: str = '') -> str:
        return f'{scheme}://{user}{self._host}:{self.port}'

    def cut_after(self, num_bytes: int, direction: str = UP) -> None:
        """Reset the connection that carries the byte with this number, counted from now, right behind that byte."""
        self._call(lambda: self._cut_at.update({direction: num_bytes}))

    def cut(self) -> None:
        """Reset all connections now."""
        self._call(self._reset_all)

    def black_hole(self) -> None:
        """Swallow time: nothing passes, nobody is told. What was on the way arrives after ``heal``, as TCP does it."""
        self._call(self._open.clear)

    def heal(self) -> None:
        self._call(self._open.set)

    # What follows runs in the proxy's thread.

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def _call(self, work: Callable[[], object]) -> None:
        async def called() -> None:
            work()

        self._run(called())

    async def _listen(self) -> int:
        self._open = asyncio.Event()
        self._open.set()
        self._server = await asyncio.start_server(self._accept, self._host, 0, ssl=self._tls)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _close(self) -> None:
        self._server.close()
        self._open.set()
        self._reset_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _reset_all(self) -> None:
        for writer in list(self._writers):
            _reset(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            if isinstance(self._target, tuple):
                up_reader, up_writer = await asyncio.open_connection(*self._target)
            else:
                up_reader, up_writer = await asyncio.open_unix_connection(str(self._target))
        except OSError:
            _reset(writer)  # The server is away.
            return
        both = {writer, up_writer}
        self._writers |= both
        try:
            await asyncio.gather(self._pump(reader, up_writer, both, UP), self._pump(up_reader, writer, both, DOWN))
        except asyncio.CancelledError:
            pass  # The proxy closes; asyncio would report a cancelled connection as an error.
        finally:
            self._writers -= both
            for one in both:
                one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: Any, both: Set[Any], direction: str) -> None:
        """Two halves, so that a byte on its way does not delay the next: latency is no throttle."""
        way: asyncio.Queue = asyncio.Queue(_MAX_CHUNKS_ON_THE_WAY)
        reading = asyncio.ensure_future(self._read(reader, way))
        try:
            await self._send(way, writer, both, direction)
        except OSError:
            pass
        finally:
            reading.cancel()
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, way: asyncio.Queue) -> None:
        try:
            while data := await reader.read(_READ_BYTES):
                await way.put((self._loop.time() + self.latency_s, data))
        except OSError:
            pass
        await way.put((0.0, b''))

    async def _send(self, way: asyncio.Queue, writer: Any, both: Set[Any], direction: str) -> None:
        while (item := await way.get())[1]:
            due, data = item
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if self.bytes_per_s:
                await asyncio.sleep(len(data) / self.bytes_per_s)
            await self._open.wait()
            await self._pass(data, writer, both, direction)
        await self._open.wait()  # In a black hole nobody hears that the other side hung up.

    async def _pass(self, data: bytes, writer: Any, both: Set[Any], direction: str) -> None:
        if self.reply and direction == UP and b'EVALSHA' in data:
            self.num_replies += 1
            (asking,) = both - {writer}
            asking.write(b'-%b\r\n' % self.reply)
            await asking.drain()
            return
        left = self._cut_at.get(direction)
        if left is not None:
            self._cut_at[direction] = left - len(data)
            if left <= len(data):
                del self._cut_at[direction]
                self.num_cuts += 1
                writer.write(data[:left])
                await writer.drain()
                for one in both:
                    _reset(one)
                return
        self.num_bytes[direction] += len(data)
        self.num_round_trips += self._is_asked and direction == DOWN
        self._is_asked = direction == UP
        writer.write(data)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close without a farewell, as a connection does whose other end is gone."""
    try:
        sock = writer.get_extra_info('socket')
    except AttributeError:
        return  # A TLS transport that is closed has lost all of its insides.
    if sock is not None and sock.family != socket.AF_UNIX and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    writer.transport.abort()
