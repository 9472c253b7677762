"""Measures free space, in memory with its cgroup limits and in directories on disks, and reports a lack of it."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from contextlib import suppress
from typing import Iterator, List, Optional, Tuple

from ding_store.errors import NotEnoughSpace

logger = logging.getLogger(__name__)

#: File systems whose files are in memory: if memory is short, moving a table there does not help.
_MEMORY_FILE_SYSTEMS = frozenset({'tmpfs', 'ramfs', 'devtmpfs', 'overlay-tmpfs'})

#: Share of the available memory that a new table may use. Models and environments need memory as well.
MEMORY_SHARE = 0.5
#: Share for a table that grows: by then, models and environments have their memory.
GROWN_SHARE = 2 / 3

_UNITS = ('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')


def format_bytes(num_bytes: float) -> str:
    """Return a readable size, such as ``'1.5 GiB'``."""
    for unit in _UNITS[:-1]:
        if abs(num_bytes) < 1024:
            return f'{num_bytes:.4g} {unit}'
        num_bytes /= 1024
    return f'{num_bytes:.4g} {_UNITS[-1]}'


def available_memory() -> int:
    """Return the bytes that this process may still use: the least of the kernel's free memory and cgroup limits."""
    limits = [_kernel_available(), *_cgroup_available()]
    return max(0, min(limits))


def free_space(directory: str) -> int:
    """Return the bytes that this user may still write in a directory's file system."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def roomiest_directory() -> str:
    """
    Overview:
        Return the directory for temporary files with the most free space, on a disk if possible. Candidates are
        ``TMPDIR``, ``/tmp``, ``/var/tmp`` and the working directory.
    """
    directories = [tempfile.gettempdir(), '/var/tmp']
    with suppress(FileNotFoundError):  # The working directory was deleted.
        directories.append(os.getcwd())
    candidates = [d for d in directories if os.access(d, os.W_OK)]
    on_disk = [d for d in candidates if not is_in_memory(d)]
    return max(on_disk or candidates, key=free_space)


def is_in_memory(directory: str) -> bool:
    """Return whether the files of a directory are in memory, such as those of a tmpfs."""
    return _file_system(directory) in _MEMORY_FILE_SYSTEMS


def private_directory(num_bytes: int) -> Optional[str]:
    """Return a directory for private files of this size, or None if they fit into memory."""
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
    """Return the error for a full disk. Its text has the sizes and the possible fixes."""
    return NotEnoughSpace(
        errno.ENOSPC,
        f'no room for {purpose}: {format_bytes(num_bytes)} more are needed in {directory!r}, which has '
        f'{format_bytes(free_space(directory))} free. Use a smaller size, or another directory (path=..., TMPDIR).',
    )


def _kernel_available() -> int:
    with open('/proc/meminfo') as file:
        for line in file:
            if line.startswith('MemAvailable:'):
                return int(line.split()[1]) * 1024
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_AVPHYS_PAGES')


def _cgroup_available(proc: str = '/proc/self/cgroup', root: str = '/sys/fs/cgroup') -> Iterator[int]:
    """Yield the free memory of each cgroup above this process, since any ancestor may have a limit."""
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
        # In a container the path may belong to the host's tree, which is not mounted. Then our limit is at the mount's
        # root.
        for directory in _with_parents(base, path):
            yield (directory, *names)


def _with_parents(base: str, path: str) -> List[str]:
    parts = [part for part in path.split('/') if part]
    return [os.path.join(base, *parts[:depth]) for depth in range(len(parts), -1, -1)]


def _reclaimable(directory: str) -> int:
    """Return the size of the page cache, which counts as usage but can be reclaimed."""
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
    """Return the type of the file system that holds a directory, from the longest mount point above it."""
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
