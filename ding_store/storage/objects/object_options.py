"""Options of the objects of a run on one host: the first process that gives them writes them down for the others."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Dict, Mapping, Optional

from ding_store import private_files
from ding_store.errors import ConfigError
from ding_store.file_systems import shared_at
from ding_store.storage.objects.eviction import ORDERS
from ding_store.storage.shared_memory.cache_files import OPTIONS
from ding_store.storage.shared_memory.cache_root import free_bytes
from ding_store.storage.shared_memory.mapped_files import NEW

#: By default, objects take a quarter of the free space of the host cache's directory, up to this size.
_MAX_BYTES = 4 << 30


@dataclass(frozen=True)
class ObjectOptions:
    """
    Overview:
        The places of objects on a host, and the order in which they leave.
    Arguments:
        - max_bytes (:obj:`Optional[int]`): Bytes of the objects in the host cache, beside ``host_cache_bytes``. None: a
          quarter of the free space there, at most 4 GiB.
        - spill_dir (:obj:`Optional[str]`): Directory on a disk. Objects move there when the cache is full. None:
          objects are dropped instead.
        - spill_max_bytes (:obj:`Optional[int]`): Bytes of the objects there. None: half of the free space.
        - spill_bytes_per_s (:obj:`Optional[float]`): Bytes that may be written there per second, over a while. What is
          above this rate is dropped instead of spilled. None: no limit.
        - eviction (:obj:`str`): Order in which objects leave the cache: 'fifo', 'lru' or 's3fifo'.
    """

    max_bytes: Optional[int] = None
    spill_dir: Optional[str] = None
    spill_max_bytes: Optional[int] = None
    spill_bytes_per_s: Optional[float] = None
    eviction: str = 's3fifo'

    def __post_init__(self) -> None:
        for name in ('max_bytes', 'spill_max_bytes'):
            size = getattr(self, name)
            if size is not None and (type(size) is not int or size < 1):
                raise ConfigError(f'{name} ({size!r}) must be an int >= 1')
        rate = self.spill_bytes_per_s
        if rate is not None and not (isinstance(rate, (int, float)) and rate > 0):
            raise ConfigError(f'spill_bytes_per_s ({rate!r}) must be a number above 0')
        if self.spill_dir is not None and not isinstance(self.spill_dir, (str, os.PathLike)):
            raise ConfigError(f'spill_dir ({self.spill_dir!r}) must be a path')
        if self.eviction not in ORDERS:
            raise ConfigError(f'eviction ({self.eviction!r}) must be one of {", ".join(ORDERS)}')


NAMES = tuple(field.name for field in fields(ObjectOptions))


def checked(options: Mapping[str, Any]) -> Dict[str, Any]:
    """Return these options with an absolute path. Raise ConfigError if a name or a value is wrong."""
    for name in options:
        if name not in NAMES:
            raise ConfigError(f'objects have no option {name!r}. Use any of {", ".join(NAMES)}.')
    spill_dir = ObjectOptions(**options).spill_dir
    if spill_dir is None:
        return dict(options)
    shared = shared_at(spill_dir)
    if shared is not None:
        raise ConfigError(
            f'spill_dir ({os.fspath(spill_dir)!r}) is on {shared.kind}, which other hosts may share: they would remove '
            "each other's objects. Name a directory on a disk of this host."
        )
    return {**options, 'spill_dir': os.path.abspath(spill_dir)}


def agreed(directory: str, given: Mapping[str, Any]) -> ObjectOptions:
    """
    Overview:
        Return the options of a run's objects on this host: those of the first process, which are ``given`` if this is
        the first one. The caller holds their lock.
    Arguments:
        - directory (:obj:`str`): The objects' directory.
        - given (:obj:`Mapping`): What this process was given, from ``checked``.
    Raises:
        - ConfigError: An option differs from that of the first process.
    """
    try:
        with open(os.path.join(directory, OPTIONS), opener=private_files.opener) as file:
            found = ObjectOptions(**json.load(file))
    except (FileNotFoundError, ValueError, TypeError):  # None, or of another version.
        return _with_sizes(ObjectOptions(**given), directory)
    check_same(found, given)
    return found


def check_same(found: ObjectOptions, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option of this process differs from that of the first one."""
    for name, value in given.items():
        if value is not None and value != getattr(found, name):
            raise ConfigError(
                f'the objects of this run have {name}={getattr(found, name)!r} on this host, not {value!r}. Give the '
                'same options in all its processes, or give them in the first one only.'
            )


def note(directory: str, options: ObjectOptions) -> None:
    """Write the options down for later processes, whole or not at all. The caller holds their lock."""
    path = os.path.join(directory, OPTIONS)
    with open(f'{path}{NEW}', 'w', opener=private_files.create_opener) as file:
        json.dump(asdict(options), file)
    os.rename(f'{path}{NEW}', path)


def _with_sizes(options: ObjectOptions, directory: str) -> ObjectOptions:
    max_bytes, spill_max_bytes = options.max_bytes, options.spill_max_bytes
    if max_bytes is None:
        max_bytes = max(1, min(free_bytes(directory) // 4, _MAX_BYTES))
    if options.spill_dir is not None and spill_max_bytes is None:
        private_files.make_directories(options.spill_dir)
        spill_max_bytes = max(1, free_bytes(options.spill_dir) // 2)
    return replace(options, max_bytes=max_bytes, spill_max_bytes=spill_max_bytes)
