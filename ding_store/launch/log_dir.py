"""The directory of a run's logs: which of its files are ours, and the lock that the run's processes hold."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import List, Optional, Tuple

from ding_store import private_files
from ding_store.config import StoreConfig
from ding_store.launch import warn_once
from ding_store.launch.plot import POINTER
from ding_store.storage.urls import directory_of

LOCK = 'lock'
#: How the run ended, in one line. Its launcher writes it.
END = 'end'


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


def note_end(directory: Path, text: str) -> None:
    """Write down how the run ended, for commands that ask for it afterwards."""
    with open(directory / END, 'w', encoding='utf-8', opener=private_files.opener) as file:
        file.write(text.splitlines()[0] + '\n')


def forget_end(config: StoreConfig) -> None:
    """Remove what is written about the end of an earlier run of an embedded store, beside its data."""
    directory = directory_of(config.url, config.run or 'default')
    if directory is not None:
        Path(directory, 'logs', END).unlink(missing_ok=True)


def end_in(directory: Path) -> Optional[Tuple[str, float]]:
    """Return how the run of these logs ended and when, in seconds since 1970. None: it has not, or it is not known."""
    try:
        path = directory / END
        text = path.read_text(encoding='utf-8', errors='replace').strip()
        return (text, path.stat().st_mtime) if text else None  # empty: the disk was full
    except OSError:
        return None


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
    return [*directory.glob('*.log'), *(directory / name for name in (POINTER, END, warn_once.FILE, LOCK))]
