"""Payloads of the wire plane, compressed by packages that are optional; on the host plane nothing is compressed.

offset  size
0       4     magic 'DGC' and the format's version, 1
4       4     checksum of everything that follows: see ``checksum``
8       8     total bytes
16      8     bytes of the payload that comes out
24      4     number of the codec
28      ...   what the codec made of the payload: see ``wire``, without its checksum
"""

from __future__ import annotations

import functools
import importlib.util
import struct
import threading
from abc import ABC, abstractmethod
from typing import Collection, Dict, Optional, Tuple

from ding_store.errors import ConfigError, CorruptPayload
from ding_store.storage.base import Buffer
from ding_store.storage.encoding.checksum import checksum

_MAGIC = b'DGC\x01'
_PREFIX = struct.Struct('<4sIQQI')
_CHECKED_FROM = 8  # The checksum covers all behind itself; magic is compared.
#: Smaller payloads are not worth the time.
MIN_BYTES = 1 << 10
#: What a payload may have, as in ``parts``.
_MAX_BYTES = 2_000_000_000


class Codec(ABC):
    """One way; its package is imported when it is first used."""

    name: str
    number: int  # in payloads
    module: str
    package: str

    @abstractmethod
    def compress(self, payload: Buffer) -> bytes:
        """Thread-safe, and other threads run meanwhile; so with ``decompress``."""

    @abstractmethod
    def decompress(self, data: Buffer, num_bytes: int) -> bytes:
        """
        Overview:
            At most ``num_bytes``.
        Raises:
            - Exception: Of the package's own kind, or CorruptPayload: ``data`` is nothing that ``compress`` made.
        """

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def check_installed(self) -> None:
        """
        Raises:
            - ConfigError: The package is missing; says how it is installed.
        """
        if not self.is_installed:
            raise ConfigError(
                f'compression {self.name!r} needs the package {self.package!r} wherever entries are written or read: '
                f'pip install {self.package}'
            )


class Lz4(Codec):
    """Fast: it costs less than a gigabit's network gains."""

    name, number, module, package = 'lz4', 1, 'lz4', 'lz4'
    _MAX_RATIO = 255  # of the format itself

    def compress(self, payload: Buffer) -> bytes:
        import lz4.block

        return bytes(lz4.block.compress(payload, store_size=False))

    def decompress(self, data: Buffer, num_bytes: int) -> bytes:
        import lz4.block

        if num_bytes > self._MAX_RATIO * len(data):
            raise CorruptPayload(f'{len(data)} bytes cannot be {num_bytes}')
        return bytes(lz4.block.decompress(data, uncompressed_size=num_bytes))


class Zstd(Codec):
    """Smaller, and slower."""

    name, number, module, package = 'zstd', 2, 'zstandard', 'zstandard'
    _LEVEL = 1

    def __init__(self) -> None:
        self._contexts = threading.local()  # They are large, and for one thread each.

    def compress(self, payload: Buffer) -> bytes:
        import zstandard

        if not hasattr(self._contexts, 'compressor'):
            self._contexts.compressor = zstandard.ZstdCompressor(level=self._LEVEL)
        return bytes(self._contexts.compressor.compress(payload))

    def decompress(self, data: Buffer, num_bytes: int) -> bytes:
        import zstandard

        # It takes as much memory as the data itself says.
        if zstandard.frame_content_size(data) != num_bytes:
            raise CorruptPayload(f'these are not {num_bytes} bytes, compressed')
        if not hasattr(self._contexts, 'decompressor'):
            self._contexts.decompressor = zstandard.ZstdDecompressor()
        return bytes(self._contexts.decompressor.decompress(data))


CODECS: Dict[str, Codec] = {codec.name: codec for codec in (Lz4(), Zstd())}
#: Fast enough to be used unasked.
AUTO, _AUTO_CODEC = 'auto', 'lz4'
#: Payloads that are smaller are sent in less time than they take to compress.
_AUTO_BYTES = 16 << 10
#: One that keeps more of its bytes than this share was not worth it, and so many after it are not tried.
_WORTH, _NUM_UNTRIED = 0.8, 32
_BY_NUMBER = {codec.number: codec for codec in CODECS.values()}


def check_compression(name: Optional[str]) -> None:
    """
    Raises:
        - ConfigError: There is no such codec, or its package is not installed.
    """
    if name is None or name == AUTO:
        return
    if name not in CODECS:
        raise ConfigError(f'compression ({name!r}) must be None, {AUTO} or one of {", ".join(CODECS)}')
    CODECS[name].check_installed()


@functools.cache
def installed() -> Tuple[str, ...]:
    """Names of the codecs that work in this process: a directory of the package's name is none."""
    return tuple(name for name, codec in CODECS.items() if codec.is_installed and _works(codec))


def _works(codec: Codec) -> bool:
    try:
        return codec.decompress(codec.compress(b'DGC'), 3) == b'DGC'
    except Exception:  # noqa: BLE001 - a package may be broken in any way
        return False


class Choice:
    """
    Overview:
        What 'auto' compresses the payloads of one stream with: the fast codec, where all readers have it, too, and for
        as long as it pays.
    """

    def __init__(self) -> None:
        self._num_untried = 0

    def codec(self, num_bytes: int, everywhere: Collection[str]) -> Optional[str]:
        """For a payload of so many bytes, whose readers all have these codecs."""
        if num_bytes < _AUTO_BYTES or _AUTO_CODEC not in everywhere or _AUTO_CODEC not in installed():
            return None
        if self._num_untried > 0:
            self._num_untried -= 1
            return None
        return _AUTO_CODEC

    def note(self, num_bytes: int, num_sent: int) -> None:
        """A payload of so many bytes became so many."""
        if num_sent > _WORTH * num_bytes:
            self._num_untried = _NUM_UNTRIED


def compressed(payload: Buffer, name: str) -> Optional[bytes]:
    """A payload in fewer bytes; None if it is too small for that, or would not become shorter."""
    if len(payload) < MIN_BYTES:
        return None
    codec = CODECS[name]
    data = codec.compress(payload)
    total = _PREFIX.size + len(data)
    if total >= len(payload):
        return None
    prefix = _PREFIX.pack(_MAGIC, 0, total, len(payload), codec.number)
    crc = checksum([prefix[_CHECKED_FROM:], data], total)
    return _PREFIX.pack(_MAGIC, crc, total, len(payload), codec.number) + data


def is_compressed(payload: Buffer) -> bool:
    return bytes(payload[:4]) == _MAGIC


def check_compressed(payload: memoryview) -> None:
    """
    Raises:
        - CorruptPayload: These are not bytes that ``compressed`` made, whole and unchanged.
    """
    if len(payload) < _PREFIX.size:
        raise CorruptPayload(f'{len(payload)} bytes are too few for a compressed payload')
    _, crc, total, *_ = _PREFIX.unpack_from(payload)
    if total != len(payload):
        raise CorruptPayload(f'{len(payload)} bytes of a compressed payload that had {total}')
    if checksum([payload[_CHECKED_FROM:]], total) != crc:
        raise CorruptPayload('the checksum does not match')


def decompressed(payload: memoryview) -> bytes:
    """
    Raises:
        - CorruptPayload: As ``check_compressed``.
        - ConfigError: This process lacks the package.
    """
    check_compressed(payload)
    *_, num_bytes, number = _PREFIX.unpack_from(payload)
    if number not in _BY_NUMBER or num_bytes > _MAX_BYTES:
        raise CorruptPayload(f'no payload of {num_bytes} bytes is compressed in the way {number}')
    codec = _BY_NUMBER[number]
    codec.check_installed()
    try:
        data = codec.decompress(payload[_PREFIX.size :], num_bytes)
    except ImportError as e:
        raise ConfigError(f'{codec.package} does not load, which entries are compressed with: {e}') from e
    except Exception as e:  # Each package has errors of its own.
        raise CorruptPayload(f'{codec.name} cannot decompress a payload: {type(e).__name__}') from e
    if len(data) != num_bytes:
        raise CorruptPayload(f'{len(data)} bytes came out of a payload that had {num_bytes}')
    return data
