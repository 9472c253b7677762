"""What the suite leaves in directories that all programs share: removed at its end, and listed if it cannot be."""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import List, Set

from ding_store.storage.shared_memory.cache_files import remove_if_abandoned, runs_of

SHARED = ('/dev/shm', '/tmp', '/var/tmp')


class Leftovers:
    """
    The temporary directory of one session, and the names in shared directories before it began.

    DI-engine, wandb and multiprocessing leave files behind in processes that are killed, and tests kill processes.
    """

    def __init__(self) -> None:
        self._began_s = time.time()
        self._before = _names()
        self.directory = tempfile.mkdtemp(prefix='ds-')
        self._tmpdir = os.environ.get('TMPDIR')
        os.environ['TMPDIR'] = self.directory
        tempfile.tempdir = None  # so that it is looked up again

    def remove(self, keep_directory: bool) -> List[str]:
        """Remove what this session left; returns the paths that are still there, without the kept directory."""
        if self._tmpdir is None:
            del os.environ['TMPDIR']
        else:
            os.environ['TMPDIR'] = self._tmpdir
        tempfile.tempdir = None
        if not keep_directory:
            shutil.rmtree(self.directory, ignore_errors=True)
        semaphores = [path for path in self._new() if os.path.basename(path).startswith('sem.')]
        mapped = _mapped_inodes() if semaphores else set()
        for path in semaphores:
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino not in mapped:
                    os.unlink(path)
        self._remove_caches()
        return sorted(self._new() - {self.directory})

    def _remove_caches(self) -> None:
        for directory in SHARED:
            root = os.path.join(directory, f'ding-store-cache-{os.geteuid()}')
            for run in runs_of(root):
                # Jobs that tests kill leave there what they would go on with: gigabytes after a while.
                with contextlib.suppress(OSError):
                    if os.path.basename(run).startswith('r-') and os.stat(run).st_mtime >= self._began_s:
                        remove_if_abandoned(run)
            if root not in self._before and not runs_of(root):
                shutil.rmtree(root, ignore_errors=True)

    def _new(self) -> Set[str]:
        """Paths that were not there before, and that this user made."""
        found = set()
        for path in _names() - self._before:
            with contextlib.suppress(OSError):
                if os.lstat(path).st_uid == os.geteuid():
                    found.add(path)
        return found


def _names() -> Set[str]:
    return {os.path.join(directory, name) for directory in SHARED for name in os.listdir(directory)}


def _mapped_inodes() -> Set[int]:
    """
    Inodes in shared memory that a living process has mapped.

    By inode, since sem_open maps a file of another name, which it removes once the semaphore's name leads there, too.
    """
    inodes = set()
    for maps in Path('/proc').glob('[0-9]*/maps'):
        with contextlib.suppress(OSError):
            inodes.update(int(line.split()[4]) for line in maps.read_text().splitlines() if '/dev/shm/' in line)
    return inodes
