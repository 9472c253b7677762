"""Options of stores and streams, and the check of names. Values are checked when the options are created."""

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
        Return ``name`` if it can be part of a key and of a file name. Allowed are letters, digits and ``_ . -``, and
        with ``slashes`` parts separated by ``/``. Braces and colons would change the key and its cluster slot.
    Raises:
        - ConfigError: The name is too long, or has other characters.
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
        Limits of one stream's unacknowledged data, and the compression of its payloads.
    Arguments:
        - max_pending_bytes (:obj:`int`): Encoded bytes that one stream may hold.
        - overflow (:obj:`str`): Policy for an append to a full stream: 'block' or 'drop_oldest'.
        - max_block_s (:obj:`float`): Seconds that an append without ``timeout_s`` waits for room.
        - compression (:obj:`Optional[str]`): 'lz4' or 'zstd': compress payloads that go through Redis, if that makes
          them shorter. 'auto': use lz4 if the writer has it and while it pays. None: never compress. Every process that
          reads the stream needs the package of the writer's codec. Without it, a read raises an error.
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
        Options of all streams of a store: the common ones, and the changes for single streams.
    Arguments:
        - check_every_s (:obj:`float`): Seconds between two checks whether the server still has all that this store
          appended. Calls of the store run the check. Waits are cut into slices of this length.
    """

    common: StreamOptions = StreamOptions()
    streams: Mapping[str, StreamOptions] = field(default_factory=dict)
    check_every_s: float = 5.0

    def __post_init__(self) -> None:
        # A blocked command must end before its socket times out: see RedisOptions.socket_timeout_s.
        if not (_is_at_least_0(self.check_every_s) and 0 < self.check_every_s <= 5):
            raise ConfigError(f'check_every_s ({self.check_every_s!r}) must be a number above 0 and at most 5')

    def of(self, stream: str) -> StreamOptions:
        """Return the options of one stream."""
        return self.streams.get(stream, self.common)


def stream_options(options: Dict[str, Any]) -> StoreOptions:
    """Move the options of streams out of ``options``. The rest is left for the backend."""
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
                f'stream_options[{stream!r}] has unknown options {unknown}. Use any of {", ".join(STREAM_OPTIONS)}.'
            )
        streams[check_name('stream', stream)] = StreamOptions(**{**common, **changes})
    return StoreOptions(StreamOptions(**common), streams, check_every_s)


GENERATIONS = ('run_id', 'key')


@dataclass(frozen=True)
class RedisOptions:
    """
    Overview:
        Timeouts of a store with its Redis server.
    Arguments:
        - connect_timeout_s (:obj:`Optional[float]`): Seconds to try the first connection before an error is raised.
          None: 10, or 30 for an embedded server, which may have to start.
        - reconnect_timeout_s (:obj:`float`): Seconds that one call waits in all for a server that is unreachable or
          hangs. Noticing that may take ``socket_timeout_s``.
        - socket_timeout_s (:obj:`float`): Seconds that one reply, or 1 MiB of a request, may take. Then the store
          reconnects. It must be longer than ``check_every_s``, because commands block for that long on purpose.
        - grace_s (:obj:`float`): Seconds that an embedded server runs on after the last process that uses it.
        - min_replicas (:obj:`int`): Replicas of the server that a decision (``Store.decide``) waits for, half a second
          at most. 0: it does not wait. With a failover, set it to 1.
        - read_replicas (:obj:`bool`): Read large payloads from a replica, if sentinels or a cluster name one. What it
          lacks is read from the primary.
        - server_generation (:obj:`str`): What shows that the server was restarted or replaced. 'run_id': the run id in
          its INFO, or a random key of the run if INFO has none. 'key': always that key, for a proxy whose connections
          lead to several servers.
    """

    connect_timeout_s: Optional[float] = None
    reconnect_timeout_s: float = 60.0
    socket_timeout_s: float = 10.0
    grace_s: float = 30.0
    min_replicas: int = 0
    read_replicas: bool = True
    server_generation: str = 'run_id'

    def __post_init__(self) -> None:
        if self.server_generation not in GENERATIONS:
            raise ConfigError(f'server_generation ({self.server_generation!r}) must be one of {", ".join(GENERATIONS)}')
        if type(self.min_replicas) is not int or self.min_replicas < 0:
            raise ConfigError(f'min_replicas ({self.min_replicas!r}) must be an int >= 0')
        if not isinstance(self.read_replicas, bool):
            raise ConfigError(f'read_replicas ({self.read_replicas!r}) must be True or False')
        for name in ('connect_timeout_s', 'reconnect_timeout_s', 'socket_timeout_s', 'grace_s'):
            value = getattr(self, name)
            if not (_is_at_least_0(value) or (name == 'connect_timeout_s' and value is None)):
                raise ConfigError(f'{name} ({value!r}) must be a number >= 0')


@dataclass(frozen=True)
class HostOptions:
    """
    Overview:
        Use, place and size of the host cache.
    Arguments:
        - host_plane (:obj:`str`): 'auto': keep entries in memory-mapped files while all readers of a stream are on one
          host. Download values of other hosts once per host. 'off': send everything through Redis.
        - host_cache_dir (:obj:`Optional[str]`): Directory of the host cache, the same for all processes of a host.
          Default: /dev/shm if it has room, else the temporary directory with the most free space.
        - host_cache_bytes (:obj:`Optional[int]`): Bytes that its files may use together. Default: half of the free
          space there, at most 8 GiB.
        - host_checksum (:obj:`bool`): Add a checksum to entries there, which readers verify. It detects faulty memory
          and foreign writes. It costs the writer and each reader one pass over the bytes.
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


#: Other defaults for URLs of sentinels and clusters. Those have another primary soon after one hangs, so a store must
#: notice soon.
FAILOVER_DEFAULTS: Mapping[str, float] = {'socket_timeout_s': 3.0, 'check_every_s': 2.0}
REDIS_OPTIONS = tuple(f.name for f in fields(RedisOptions))
HOST_OPTIONS = tuple(f.name for f in fields(HostOptions))
ALL_OPTIONS = (*STORE_OPTIONS, *REDIS_OPTIONS, *HOST_OPTIONS)


def host_options(options: Dict[str, Any]) -> HostOptions:
    """Move the options of the host cache out of ``options``."""
    return HostOptions(**{name: options.pop(name) for name in HOST_OPTIONS if name in options})


def redis_options(options: Dict[str, Any]) -> RedisOptions:
    """Move the options of the Redis server out of ``options``."""
    return RedisOptions(**{name: options.pop(name) for name in REDIS_OPTIONS if name in options})


def refuse_rest(scheme: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError if an option is left that no part of the store accepts."""
    for name in options:
        near = difflib.get_close_matches(name, known, 1)
        hint = f'; did you mean {near[0]!r}?' if near else '.'
        raise ConfigError(f'{scheme}:// has no option {name!r}{hint} Use any of {", ".join(known)}.')
