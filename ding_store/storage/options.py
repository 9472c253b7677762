"""What a user may set on a store, and which names it accepts: checked once, at the door."""

from __future__ import annotations

import difflib
import functools
import numbers
import os
import re
from dataclasses import dataclass, field, fields
from typing import Any, Dict, Mapping, Optional, Sequence

from ding_store.errors import ConfigError
from ding_store.storage.base import OVERFLOW
from ding_store.storage.encoding.compression import check_compression

MAX_NAME = 200
_PART = re.compile(r'[A-Za-z0-9_.-]+')


def check_name(kind: str, name: str, slashes: bool = True) -> str:
    """
    Overview:
        Return ``name`` if it can be part of a key and of a file name: letters, digits, ``_ . -``, and for all but runs
        parts separated by ``/``. Braces and colons would change which key, and which cluster slot, is meant.
    """
    if not isinstance(name, str) or not _is_good(name, slashes):
        allowed = 'letters, digits, "_", "-", "."' + (' and parts separated by "/"' if slashes else '')
        raise ConfigError(f'{kind} name {name!r} must be 1 to {MAX_NAME} characters of {allowed}')
    return name


@functools.lru_cache(maxsize=4096)
def _is_good(name: str, slashes: bool) -> bool:
    parts = name.split('/')
    good = all(_PART.fullmatch(part) and part.strip('.') for part in parts) and len(name) <= MAX_NAME
    return good and (len(parts) == 1 or slashes)


def _is_at_least_0(value: object) -> bool:
    return isinstance(value, numbers.Real) and float(value) >= 0


@dataclass(frozen=True)
class StreamOptions:
    """
    Overview:
        How much one stream may hold that its durable readers have not acked, and what happens beyond.
    Arguments:
        - max_pending_bytes (:obj:`int`): Encoded bytes held for one stream.
        - overflow (:obj:`str`): 'block' or 'drop_oldest'.
        - max_block_s (:obj:`float`): How long an append waits for room when it names no ``timeout_s`` itself.
        - compression (:obj:`Optional[str]`): 'lz4' or 'zstd': what a payload is compressed with where it goes over the
          wire, if that makes it shorter. Every process that writes or reads the stream needs the codec's package.
          'auto': lz4 for as long as it pays, where writer and readers have it; none else. None: never.
    """

    max_pending_bytes: int = 256 << 20
    overflow: str = 'block'
    max_block_s: float = 600.0
    compression: Optional[str] = None

    def __post_init__(self) -> None:
        if self.overflow not in OVERFLOW:
            raise ConfigError(f'overflow ({self.overflow!r}) must be one of {", ".join(OVERFLOW)}')
        if not isinstance(self.max_pending_bytes, int) or self.max_pending_bytes < 1:
            raise ConfigError(f'max_pending_bytes ({self.max_pending_bytes!r}) must be an int >= 1')
        if not _is_at_least_0(self.max_block_s):
            raise ConfigError(f'max_block_s ({self.max_block_s!r}) must be a number >= 0')
        check_compression(self.compression)


STREAM_OPTIONS = tuple(f.name for f in fields(StreamOptions))
STORE_OPTIONS = (*STREAM_OPTIONS, 'stream_options', 'check_every_s')


@dataclass(frozen=True)
class StoreOptions:
    """
    Overview:
        The options of every stream of a store: the common ones, and what ``stream_options`` changes for some.
    Arguments:
        - check_every_s (:obj:`float`): How often a store, while it is used for anything, looks whether the server still
          knows all that this store wrote. Waits are cut into slices of this length.
    """

    common: StreamOptions = StreamOptions()
    streams: Mapping[str, StreamOptions] = field(default_factory=dict)
    check_every_s: float = 5.0

    def __post_init__(self) -> None:
        # A blocked command must end before its socket times out: see RedisOptions.socket_timeout_s.
        if not (_is_at_least_0(self.check_every_s) and 0 < self.check_every_s <= 5):
            raise ConfigError(f'check_every_s ({self.check_every_s!r}) must be a number above 0 and at most 5')

    def of(self, stream: str) -> StreamOptions:
        return self.streams.get(stream, self.common)


def stream_options(options: Dict[str, Any]) -> StoreOptions:
    """Take what concerns streams out of ``options``, and leave the rest to the backend."""
    common = {name: options.pop(name) for name in STREAM_OPTIONS if name in options}
    special = options.pop('stream_options', None) or {}
    check_every_s = options.pop('check_every_s', StoreOptions.check_every_s)
    streams = {}
    if not isinstance(special, Mapping) or not all(isinstance(changes, Mapping) for changes in special.values()):
        raise ConfigError(f'stream_options ({special!r}) must map names of streams to their options')
    for stream, changes in special.items():
        unknown = sorted(set(changes) - set(STREAM_OPTIONS))
        if unknown:
            raise ConfigError(
                f'stream_options[{stream!r}] has unknown {unknown}; known are {", ".join(STREAM_OPTIONS)}'
            )
        streams[check_name('stream', stream)] = StreamOptions(**{**common, **changes})
    return StoreOptions(StreamOptions(**common), streams, check_every_s)


@dataclass(frozen=True)
class RedisOptions:
    """
    Overview:
        How a store treats its server.
    Arguments:
        - connect_timeout_s (:obj:`Optional[float]`): How long the first connection is tried before saying what is
          wrong. None: 10 s, or 30 s for an embedded server, which may have to be started.
        - reconnect_timeout_s (:obj:`float`): How long a call waits in all for a server that went away or hangs,
          whatever it waits for in it. It may take ``socket_timeout_s`` to notice that.
        - socket_timeout_s (:obj:`float`): How long one reply, or 1 MiB of a request, may take on its way: then the
          connection is made anew. It must be longer than ``check_every_s``, for which commands wait on purpose.
        - grace_s (:obj:`float`): How long an embedded server outlives the last process that uses it.
    """

    connect_timeout_s: Optional[float] = None
    reconnect_timeout_s: float = 60.0
    socket_timeout_s: float = 10.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (_is_at_least_0(value) or (name == 'connect_timeout_s' and value is None)):
                raise ConfigError(f'{name} ({value!r}) must be a number >= 0')


@dataclass(frozen=True)
class HostOptions:
    """
    Overview:
        Whether and where payloads of one host stay in its memory.
    Arguments:
        - host_plane (:obj:`str`): 'auto': in mmap files while all readers of a stream are on one host, and values of
          other hosts once for all processes of this one; 'off': never.
        - host_cache_dir (:obj:`Optional[str]`): Where those files are, the same for all processes of a host; by default
          /dev/shm if there is room, else the temporary directory with the most free space.
        - host_cache_bytes (:obj:`Optional[int]`): What they may take together; by default half of what is free there,
          8 GiB at most.
        - host_checksum (:obj:`bool`): Whether a writer's entries carry a checksum there, too, which readers verify:
          a pass over the bytes on either side, against memory that others write to or that fails.
    """

    host_plane: str = 'auto'
    host_cache_dir: Optional[str] = None
    host_cache_bytes: Optional[int] = None
    host_checksum: bool = False

    def __post_init__(self) -> None:
        if self.host_plane not in ('auto', 'off'):
            raise ConfigError(f'host_plane ({self.host_plane!r}) must be one of auto, off')
        if self.host_cache_dir is not None and not isinstance(self.host_cache_dir, (str, os.PathLike)):
            raise ConfigError(f'host_cache_dir ({self.host_cache_dir!r}) must be a path')
        size = self.host_cache_bytes
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ConfigError(f'host_cache_bytes ({size!r}) must be an int >= 1')
        if not isinstance(self.host_checksum, bool):
            raise ConfigError(f'host_checksum ({self.host_checksum!r}) must be True or False')


REDIS_OPTIONS = tuple(f.name for f in fields(RedisOptions))
HOST_OPTIONS = tuple(f.name for f in fields(HostOptions))
ALL_OPTIONS = (*STORE_OPTIONS, *REDIS_OPTIONS, *HOST_OPTIONS)


def host_options(options: Dict[str, Any]) -> HostOptions:
    """Take what concerns the host plane out of ``options``."""
    return HostOptions(**{name: options.pop(name) for name in HOST_OPTIONS if name in options})


def redis_options(options: Dict[str, Any]) -> RedisOptions:
    """Take what concerns the server out of ``options``."""
    return RedisOptions(**{name: options.pop(name) for name in REDIS_OPTIONS if name in options})


def refuse_rest(scheme: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Complain about what nobody took."""
    for name in options:
        near = difflib.get_close_matches(name, known, 1)
        hint = f'; did you mean {near[0]!r}?' if near else ';'
        raise ConfigError(f'{scheme}:// does not know the option {name!r}{hint} it knows {", ".join(known)}')
