"""Directories of benchmarks: one that was killed leaves its own to the next, which removes it."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from typing import Iterator, Optional

from ding_store.storage.host.mapped import claim, is_claimed

_PREFIX = 'ding-store-bench-'
#: Of memory, as the store itself asks for it.
_ENOUGH = 1 << 30


@contextmanager
def scratch(parent: Optional[str] = None) -> Iterator[str]:
    """
    Overview:
        A directory in ``parent`` for as long as the block runs, by default in the temporary one. First those of dead
        processes are removed there.
    """
    parent = parent or tempfile.gettempdir()
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        if name.startswith(_PREFIX) and _is_ours(path) and not is_claimed(path):
            shutil.rmtree(path, ignore_errors=True)
    # It has its name when it is claimed: nobody takes it for a dead one's.
    unnamed = tempfile.mkdtemp(prefix='new-', dir=parent)
    held = claim(unnamed)
    path = os.path.join(parent, _PREFIX + os.path.basename(unnamed)[len('new-') :])
    os.rename(unnamed, path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if held is not None:
            held.close()


def memory_directory() -> Optional[str]:
    """/dev/shm, if there is one with room: containers often have 64 MB."""
    if not os.access('/dev/shm', os.W_OK):
        return None
    status = os.statvfs('/dev/shm')
    return '/dev/shm' if status.f_bavail * status.f_frsize >= _ENOUGH else None


def _is_ours(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.getuid()
    except FileNotFoundError:  # Another removed it meanwhile.
        return False
