"""Health of one process for the probes of a platform: a file that its main loop touches. It needs no server."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import List, NamedTuple, Optional

#: Seconds between two touches.
BEAT_S = 1.0


class Health:
    """
    Overview:
        This process's file in the directory that DING_STORE_HEALTH names.
    Arguments:
        - directory (:obj:`Optional[str]`): Where the file is. None: there is none.
        - role (:obj:`str`), node_id (:obj:`int`): The process.
    """

    def __init__(self, directory: Optional[str], role: str, node_id: int) -> None:
        self._path: Optional[Path] = None
        self._at = 0.0
        if directory:
            self._path = Path(directory, f'{role}-{node_id}')
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)

    def beat(self) -> None:
        """Touch the file, at most once per ``BEAT_S``. A full disk is no reason to stop."""
        if self._path is None or time.monotonic() < self._at:
            return
        self._at = time.monotonic() + BEAT_S
        with contextlib.suppress(OSError):
            self._path.write_text(f'{os.getpid()}\n')
            os.utime(self._path, (time.monotonic(),) * 2)  # the time of day may jump

    def end(self) -> None:
        """Remove the file: the process has left."""
        if self._path is not None:
            self._at = float('inf')
            with contextlib.suppress(OSError):
                self._path.unlink()


class Seen(NamedTuple):
    """A process that has a file. ``age_s``: seconds since its main loop last touched it."""

    name: str
    age_s: float


def seen_in(directory: str, role: str = '') -> List[Seen]:
    """Return the processes that have a file in a directory, or those of one role."""
    found = []
    for path in sorted(Path(directory).glob(f'{role or "*"}-*')):
        with contextlib.suppress(OSError):
            found.append(Seen(path.name, max(0.0, time.monotonic() - path.stat().st_mtime)))
    return found
