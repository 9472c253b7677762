"""Places for the host cache: candidate directories, access rights, the lock, and the identity of the host."""

from __future__ import annotations

import os
import tempfile
import uuid
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional

from ding_store import private_files
from ding_store.errors import StoreTimeout
from ding_store.storage.shared_memory.download_lock import FetchLock

#: /dev/shm is preferred if it has this much free. In containers it often has only 64 MB.
_ENOUGH = 1 << 30
#: A process that holds the root's lock for this long, or up to twice as long, counts as stopped. Making room takes much
#: less time.
PATIENCE_S = 10.0


def root_in(directory: str) -> str:
    return os.path.join(directory, f'ding-store-cache-{os.geteuid()}')


def directories() -> List[str]:
    return [d for d in dict.fromkeys(('/dev/shm', tempfile.gettempdir(), '/var/tmp')) if os.path.isdir(d)]


def candidates(run: str) -> List[str]:
    """Return directories, best first: one that has the run, then /dev/shm if it has room, then by free space."""

    def rank(directory: str) -> Any:
        is_there = os.path.isdir(os.path.join(root_in(directory), 'runs', run))
        is_memory = directory == '/dev/shm' and free_bytes(directory) >= _ENOUGH
        return not is_there, not is_memory, -free_bytes(directory)

    return sorted((d for d in directories() if os.access(d, os.W_OK)), key=rank)


def free_bytes(directory: str) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def lock_path(root: str) -> str:
    path = os.path.join(root, 'lock')
    private_files.touch(path)
    return path


def root_lock(root: str) -> FetchLock:
    return FetchLock(lambda: lock_path(root), PATIENCE_S)


@contextmanager
def locked(lock: FetchLock, root: str, patience_s: Optional[float] = None) -> Iterator[None]:
    with lock.taken(patience_s) as held:
        if held is None:
            raise StoreTimeout(
                f'another process holds the lock of the host cache in {root!r} and makes no progress. '
                "Continue or end this user's stopped processes."
            )
        yield


def boot_id() -> str:
    """Return a word that changes when this host is started again."""
    with open('/proc/sys/kernel/random/boot_id') as file:
        return file.read().strip()


def identity(marker: str) -> str:
    try:
        descriptor = private_files.opener(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        pass
    else:
        with os.fdopen(descriptor, 'w') as file:
            file.write(uuid.uuid4().hex)
    with open(marker, opener=private_files.opener) as file:
        word, status = file.read(), os.fstat(file.fileno())
    return f'{boot_id()}-{status.st_dev}-{status.st_ino}-{word}'
