"""Time that a process spends in the parts of its work, for its reports."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import Dict, Iterator, Optional, Tuple


class TimeSpent:
    """
    Overview:
        Seconds that the loop of this process has spent in each part of its work. Only the loop's thread calls
        ``measure``, and parts do not contain each other. Any thread may call ``figures``.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._seconds: Dict[str, float] = {}
        self._present: Optional[Tuple[str, float]] = None  # the part that runs now, and its beginning

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the time of a block for ``part``."""
        began = time.monotonic()
        self._present = part, began
        try:
            yield
        finally:
            with self._lock:
                self._present = None
                self._seconds[part] = self._seconds.get(part, 0.0) + time.monotonic() - began

    def figures(self) -> Dict[str, float]:
        """Return the seconds of each part as ``<part>_s``, with the part that runs now, and all seconds as ``up_s``."""
        with self._lock:
            now, seconds, present = time.monotonic(), dict(self._seconds), self._present
        if present is not None:
            part, began = present
            seconds[part] = seconds.get(part, 0.0) + now - began
        return {f'{part}_s': round(value, 4) for part, value in [*seconds.items(), ('up', now - self._began)]}
