"""Time that a process spends in the parts of its work, for its reports."""

from __future__ import annotations

import functools
import threading
import time
from types import TracebackType
from typing import Any, Callable, Dict, List, Optional, Tuple, Type


class _Part:
    """The context manager of one part. It is made once: a loop of short iterations enters it often."""

    __slots__ = ('_name', '_spent')

    def __init__(self, spent: TimeSpent, name: str) -> None:
        self._spent, self._name = spent, name

    def __enter__(self) -> None:
        self._spent._begin(self._name)

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._spent._end()


class TimeSpent:
    """
    Overview:
        Seconds that the loop of this process has spent in each part of its work. Only the loop's thread calls
        ``measure``. The time of a part within another one does not count for that one. Any thread may call
        ``figures``.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._seconds: Dict[str, float] = {}
        self._present: Optional[Tuple[str, float]] = None  # the part that runs now, and since when
        self._outer: List[str] = []  # parts that contain it
        self._parts: Dict[str, _Part] = {}

    def measure(self, part: str) -> _Part:
        """Return a context manager that counts the time of its block for ``part``."""
        found = self._parts.get(part)
        if found is None:
            found = self._parts[part] = _Part(self, part)
        return found

    def measured(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``call`` and counts its time for ``part``."""

        @functools.wraps(call)
        def counted(*arguments: Any, **options: Any) -> Any:
            with self.measure(part):
                return call(*arguments, **options)

        return counted

    def _begin(self, part: str) -> None:
        now = time.monotonic()
        if self._present is not None:
            with self._lock:
                self._outer.append(self._count_until(now))
        self._present = part, now

    def _end(self) -> None:
        with self._lock:
            if self._present is not None:
                now = time.monotonic()
                self._count_until(now)
                self._present = (self._outer.pop(), now) if self._outer else None

    def _count_until(self, now: float) -> str:
        """Count the time of the present part, and return its name."""
        assert self._present is not None
        part, began = self._present
        self._seconds[part] = self._seconds.get(part, 0.0) + now - began
        return part

    def figures(self) -> Dict[str, float]:
        """Return the seconds of each part as ``<part>_s``, with the part that runs now, and all seconds as ``up_s``."""
        with self._lock:
            now, seconds, present = time.monotonic(), dict(self._seconds), self._present
        if present is not None:
            part, began = present
            seconds[part] = seconds.get(part, 0.0) + now - began
        return {f'{part}_s': round(value, 4) for part, value in [*seconds.items(), ('up', now - self._began)]}
