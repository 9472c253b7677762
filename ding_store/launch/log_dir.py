"""The directory of a run's logs: which of its files are ours, and the lock that the run's processes hold."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import List

from ding_store import private_files
from ding_store.launch import warn_once
from ding_store.launch.plot import POINTER

LOCK = 'lock'


def hold(directory: Path) -> int:
    """
    Overview:
        Lock the directory until this process and all that it forks have ended, so that ``ding-store clean`` keeps it.
    Returns:
        - descriptor (:obj:`int`): To close at the end.
    """
    descriptor = private_files.opener(str(directory / LOCK), os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_held(directory: Path) -> bool:
    """Return True if a process of the run lives, or if that cannot be found out."""
    try:
        descriptor = private_files.opener(str(directory / LOCK))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def remove(directory: Path) -> None:
    """Remove the logs and what lies beside them. Files of others stay, and the directory with them."""
    for path in files(directory):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty, or not there
        directory.rmdir()


def files(directory: Path) -> List[Path]:
    return [*directory.glob('*.log'), *(directory / name for name in (POINTER, warn_once.FILE, LOCK))]
