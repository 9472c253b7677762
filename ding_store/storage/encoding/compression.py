"""Compression of payloads that go through Redis, by optional packages. Payloads in shared memory are not compressed.

offset  size
0       4     magic 'DGC' and the format's version, 1
4       4     checksum of everything that follows: see ``checksum``
8       8     total bytes
16      8     bytes of the decompressed payload
24      4     number of the codec
28      ...   the compressed payload: see ``framing``, without its checksum
"""

from __future__ import annotations

import functools
import importlib.util
import struct
import threading
from abc import ABC, abstractmethod
from typing import Dict, Optional, Tuple

from ding_store.errors import ConfigError, CorruptPayload
from ding_store.storage.base import Buffer
from ding_store.storage.encoding.checksum import checksum

_MAGIC = b'DGC\x01'
_PREFIX = struct.Struct('<4sIQQI')
_CHECKED_FROM = 8  # The checksum covers everything after itself. The magic bytes are compared.
#: Smaller payloads are not worth the time.
MIN_BYTES = 1 << 10
#: Maximum size of a payload, as in ``framing``.
_MAX_BYTES = 2_000_000_000


class Codec(ABC):
    """A compression method. Its package is imported at the first use."""

    name: str
    number: int  # stands for the codec in payloads
    module: str
    package: str

    @abstractmethod
    def compress(self, payload: Buffer) -> bytes:
        """Return the compressed payload. Thread-safe as ``decompress`` is, and both let other threads run."""

    @abstractmethod
    def decompress(self, data: Buffer, num_bytes: int) -> bytes:
        """
        Overview:
            Return the decompressed data, ``num_bytes`` at most.
        Raises:
            - Exception: ``data`` was not made by ``compress``. The type is the package's own, or CorruptPayload.
        """

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def check_installed(self) -> None:
        """
        Overview:
            Check that the package is installed.
        Raises:
            - ConfigError: It is missing. The message says how to install it.
        """
        if not self.is_installed:
            raise ConfigError(
                f'compression {self.name!r} needs the package {self.package!r} in each process that writes or reads '
                f'entries. Run pip install {self.package}, or set compression=None where entries are written.'
            )


class Lz4(Codec):
    """The fast codec. It costs less time than it saves on a network of 1 Gbit/s."""

    name, number, module, package = 'lz4', 1, 'lz4', 'lz4'
    _MAX_RATIO = 255  # of the format itself

    def compress(self, payload: Buffer) -> bytes:
        import lz4.block

        return bytes(lz4.block.compress(payload, store_size=False))

    def decompress(self, data: Buffer, num_bytes: int) -> bytes:
        import lz4.block

        if num_bytes > self._MAX_RATIO * len(data):
            raise CorruptPayload(f'{len(data)} bytes cannot decompress to {num_bytes}')
        return bytes(lz4.block.decompress(data, uncompressed_size=num_bytes))


class Zstd(Codec):
    """The codec with smaller results, at a lower speed."""

    name, number, module, package = 'zstd', 2, 'zstandard', 'zstandard'
    _LEVEL = 1

    def __init__(self) -> None:
        self._contexts = threading.local()  # They are large. Each thread needs its own.

    def compress(self, payload: Buffer) -> bytes:
        import zstandard

        if not hasattr(self._contexts, 'compressor'):
            self._contexts.compressor = zstandard.ZstdCompressor(level=self._LEVEL)
        return bytes(self._contexts.compressor.compress(payload))

    def decompress(self, data: Buffer, num_bytes: int) -> bytes:
        import zstandard

        # Decompression takes as much memory as the data states, so check that first.
        if zstandard.frame_content_size(data) != num_bytes:
            raise CorruptPayload(f'the data does not decompress to {num_bytes} bytes')
        if not hasattr(self._contexts, 'decompressor'):
            self._contexts.decompressor = zstandard.ZstdDecompressor()
        return bytes(self._contexts.decompressor.decompress(data))


CODECS: Dict[str, Codec] = {codec.name: codec for codec in (Lz4(), Zstd())}
#: The codec of 'auto'. It is fast enough for use without a setting.
AUTO, _AUTO_CODEC = 'auto', 'lz4'
#: Smaller payloads are sent in less time than their compression takes.
_AUTO_BYTES = 16 << 10
#: If a payload keeps more than this share of its bytes, the next ``_NUM_UNTRIED`` payloads are not compressed.
_WORTH, _NUM_UNTRIED = 0.8, 32
_BY_NUMBER = {codec.number: codec for codec in CODECS.values()}


def check_compression(name: Optional[str]) -> None:
    """
    Overview:
        Check the option ``compression``.
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
    """Return the names of the codecs that work in this process. Each was tried: a module may be an empty directory."""
    return tuple(name for name, codec in CODECS.items() if codec.is_installed and _works(codec))


def _works(codec: Codec) -> bool:
    try:
        return codec.decompress(codec.compress(b'DGC'), 3) == b'DGC'
    except Exception:  # noqa: BLE001 - a package may be broken in any way
        return False


class Choice:
    """
    Overview:
        Chooses the codec for 'auto' in one stream: the fast one, if this process has it and while it saves bytes.
    """

    def __init__(self) -> None:
        self._num_untried = 0

    def codec(self, num_bytes: int) -> Optional[str]:
        """Return the codec for a payload of ``num_bytes``. None: send it as it is."""
        if num_bytes < _AUTO_BYTES or _AUTO_CODEC not in installed():
            return None
        if self._num_untried > 0:
            self._num_untried -= 1
            return None
        return _AUTO_CODEC

    def note(self, num_bytes: int, num_sent: int) -> None:
        """Note that a payload of ``num_bytes`` was sent as ``num_sent`` bytes."""
        if num_sent > _WORTH * num_bytes:
            self._num_untried = _NUM_UNTRIED


def compressed(payload: Buffer, name: str) -> Optional[bytes]:
    """Return the compressed payload. None if it is below ``MIN_BYTES``, or would not become smaller."""
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
    Overview:
        Check the size and the checksum of a compressed payload.
    Raises:
        - CorruptPayload: ``compressed`` did not make these bytes, or they were changed or cut.
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
    Overview:
        Return the decompressed payload.
    Raises:
        - CorruptPayload: As in ``check_compressed``, or the codec cannot decompress it.
        - ConfigError: This process lacks the codec's package.
    """
    check_compressed(payload)
    *_, num_bytes, number = _PREFIX.unpack_from(payload)
    if number not in _BY_NUMBER or num_bytes > _MAX_BYTES:
        raise CorruptPayload(f'no codec has the number {number}, or {num_bytes} bytes are too many')
    codec = _BY_NUMBER[number]
    codec.check_installed()
    try:
        data = codec.decompress(payload[_PREFIX.size :], num_bytes)
    except ImportError as e:
        raise ConfigError(
            f'{codec.package}, which entries are compressed with, does not load: {e}. Run pip install {codec.package}.'
        ) from e
    except Exception as e:  # Each package has its own errors.
        raise CorruptPayload(f'{codec.name} cannot decompress a payload: {type(e).__name__}') from e
    if len(data) != num_bytes:
        raise CorruptPayload(f'{len(data)} bytes came out of a payload that had {num_bytes}')
    return data
