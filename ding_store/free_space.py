"""How much room there is: memory (cgroup limits included) and directories of real disks, and what to say without it."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from contextlib import suppress
from typing import Iterator, List, Optional, Tuple

from ding_store.errors import NotEnoughSpace

logger = logging.getLogger(__name__)

#: File systems whose files are memory: moving a table there when memory is short helps nobody.
_MEMORY_FILE_SYSTEMS = frozenset({'tmpfs', 'ramfs', 'devtmpfs', 'overlay-tmpfs'})

#: A table may take this share of the memory that is available when it is made; models and environments need some, too.
MEMORY_SHARE = 0.5

_UNITS = ('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')


def format_bytes(num_bytes: float) -> str:
    """A size for people: ``'1.5 GiB'``."""
    for unit in _UNITS[:-1]:
        if abs(num_bytes) < 1024:
            return f'{num_bytes:.4g} {unit}'
        num_bytes /= 1024
    return f'{num_bytes:.4g} {_UNITS[-1]}'


def available_memory() -> int:
    """
    Overview:
        Bytes that this process may still use: what the kernel has, or what its cgroups (v1 or v2) leave, whichever is
        less.
    """
    limits = [_kernel_available(), *_cgroup_available()]
    return max(0, min(limits))


def free_space(directory: str) -> int:
    """Bytes that this user may still write in a directory's file system."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def roomiest_directory() -> str:
    """
    Overview:
        The directory for temporary files with the most free space, on a disk if there is one: ``TMPDIR``, ``/tmp``,
        ``/var/tmp`` and the working directory are looked at.
    """
    directories = [tempfile.gettempdir(), '/var/tmp']
    with suppress(FileNotFoundError):  # The working directory was deleted.
        directories.append(os.getcwd())
    candidates = [d for d in directories if os.access(d, os.W_OK)]
    on_disk = [d for d in candidates if _file_system(d) not in _MEMORY_FILE_SYSTEMS]
    return max(on_disk or candidates, key=free_space)


def private_directory(num_bytes: int) -> Optional[str]:
    """None for memory, else a directory for files that nobody else will see."""
    memory = available_memory()
    if num_bytes <= memory * MEMORY_SHARE:
        return None
    directory = roomiest_directory()
    free = free_space(directory)
    if num_bytes > free:
        logger.warning(
            'a full table takes %s, but memory has %s and %s has %s free: it can never be full. Use a smaller size.',
            *(format_bytes(num_bytes), format_bytes(memory), directory, format_bytes(free)),
        )
    return directory


def not_enough_space(purpose: str, num_bytes: int, directory: str) -> NotEnoughSpace:
    """The error for a disk that is full, with the sizes and the ways out in its text."""
    return NotEnoughSpace(
        errno.ENOSPC,
        f'no room for {purpose}: {format_bytes(num_bytes)} more are needed in {directory!r}, which has '
        f'{format_bytes(free_space(directory))} free; use a smaller size, or another directory (path=..., TMPDIR)',
    )


def _kernel_available() -> int:
    with open('/proc/meminfo') as file:
        for line in file:
            if line.startswith('MemAvailable:'):
                return int(line.split()[1]) * 1024
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_AVPHYS_PAGES')


def _cgroup_available(proc: str = '/proc/self/cgroup', root: str = '/sys/fs/cgroup') -> Iterator[int]:
    """What each cgroup above this process leaves: a limit may sit on any ancestor."""
    for directory, limit_name, usage_name in _cgroup_directories(proc, root):
        limit = _read_int(os.path.join(directory, limit_name))
        usage = _read_int(os.path.join(directory, usage_name))
        if limit is not None and usage is not None:
            yield limit - usage + _reclaimable(directory)


def _cgroup_directories(proc: str, root: str) -> Iterator[Tuple[str, str, str]]:
    try:
        with open(proc) as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(':', 2)
        if controllers == '':
            base, names = root, ('memory.max', 'memory.current')
        elif 'memory' in controllers.split(','):
            base, names = os.path.join(root, 'memory'), ('memory.limit_in_bytes', 'memory.usage_in_bytes')
        else:
            continue
        # In a container the path may name the host's tree, which is not mounted: the root of the mount is ours then.
        for directory in _with_parents(base, path):
            yield (directory, *names)


def _with_parents(base: str, path: str) -> List[str]:
    parts = [part for part in path.split('/') if part]
    return [os.path.join(base, *parts[:depth]) for depth in range(len(parts), -1, -1)]


def _reclaimable(directory: str) -> int:
    """Page cache counts as usage but gives way."""
    try:
        with open(os.path.join(directory, 'memory.stat')) as file:
            fields = dict(line.split() for line in file)
    except (OSError, ValueError):
        return 0
    return int(fields.get('total_inactive_file', fields.get('inactive_file', 0)))


def _read_int(path: str) -> Optional[int]:
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_system(directory: str) -> str:
    """Type of the file system that holds a directory: that of the longest mount point above it."""
    directory = os.path.realpath(directory)
    best, kind = '', ''
    try:
        with open('/proc/mounts') as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return ''
    for point, file_system in mounts:
        point = point.encode().decode('unicode_escape')
        inside = directory == point or directory.startswith(point.rstrip('/') + '/')
        # Later mounts cover earlier ones.
        if inside and len(point) >= len(best):
            best, kind = point, file_system
    return kind
