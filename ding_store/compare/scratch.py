"""Temporary directories of benchmarks. Each run removes those that killed ones have left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from typing import Iterator, Optional

from ding_store.storage.shared_memory.mapped_files import OwnerLock

_PREFIX = 'ding-store-bench-'
#: Free bytes that make /dev/shm worth using: the store has the same limit.
_ENOUGH = 1 << 30


@contextmanager
def scratch(parent: Optional[str] = None) -> Iterator[str]:
    """
    Overview:
        Make a directory in ``parent`` for as long as the block runs, by default in the temporary directory. First
        remove those of ended processes there.
    """
    parent = parent or tempfile.gettempdir()
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        if name.startswith(_PREFIX) and _is_ours(path) and not _is_claimed(path):
            shutil.rmtree(path, ignore_errors=True)
    # Claim it before it gets its name, so that no other process removes it as abandoned.
    unnamed = tempfile.mkdtemp(prefix='new-', dir=parent)
    held = _claim(unnamed)
    path = os.path.join(parent, _PREFIX + os.path.basename(unnamed)[len('new-') :])
    os.rename(unnamed, path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if held is not None:
            held.close()


def _claim(path: str) -> Optional[OwnerLock]:
    """Lock a directory until this process ends. Return None while another process holds the lock."""
    held = OwnerLock(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
    try:
        fcntl.flock(held.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        return None
    return held


def _is_claimed(path: str) -> bool:
    try:
        held = _claim(path)
    except FileNotFoundError:  # another process removed it meanwhile
        return True
    if held is not None:
        held.close()
    return held is None


def memory_directory() -> Optional[str]:
    """Return /dev/shm if it has enough room, otherwise None. Containers often have 64 MB there."""
    if not os.access('/dev/shm', os.W_OK):
        return None
    status = os.statvfs('/dev/shm')
    return '/dev/shm' if status.f_bavail * status.f_frsize >= _ENOUGH else None


def _is_ours(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.getuid()
    except FileNotFoundError:  # another process removed it meanwhile
        return False
