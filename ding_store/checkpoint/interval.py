"""Decides when the next checkpoint begins: as often as the bound on the measured overhead allows."""

from __future__ import annotations

import time
from typing import Callable, Optional

#: Weight of the latest iteration in the moving average of an iteration's duration.
_RECENT = 1 / 32


class Interval:
    """
    Overview:
        The time between checkpoints, after CheckFreq (Mohan et al., FAST '21). A checkpoint's cost is the time that
        training waits for it, plus the slowdown of iterations while it is written. The next one begins when the cost is
        at most ``max_overhead`` of the time since. Each checkpoint is therefore paid for before the next is due, and
        the interval adapts to disk, model and machine.
    Arguments:
        - max_overhead (:obj:`float`): Bound on the cost, as a fraction of the time.
        - fixed_s (:obj:`Optional[float]`): Fixed time between the beginnings of two checkpoints, whatever they cost.
        - min_s (:obj:`float`): Minimum time between two checkpoints.
    Attributes:
        - cost_s (:obj:`float`): Cost of the last checkpoint.
    """

    def __init__(
        self,
        max_overhead: float = 0.035,
        fixed_s: Optional[float] = None,
        min_s: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._max_overhead, self._fixed_s, self._min_s, self._clock = max_overhead, fixed_s, min_s, clock
        self._usual_s: Optional[float] = None
        self._slower_s = self._total_s = self.cost_s = 0.0
        self._first = self._began = self._due = clock()

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._due

    @property
    def overhead(self) -> float:
        """Cost of all checkpoints so far, as a fraction of the time since the first one began."""
        return self._total_s / max(self._clock() - self._first, 1e-9)

    @property
    def next_s(self) -> float:
        """Time from the beginning of the last checkpoint to the next."""
        return self._due - self._began

    def iterated(self, duration_s: float, is_saving: bool) -> None:
        """Record the duration of a training iteration, and whether a checkpoint was being written meanwhile."""
        if is_saving:
            self._slower_s += duration_s - (self._usual_s if self._usual_s is not None else duration_s)
        elif self._usual_s is None:
            self._usual_s = duration_s
        else:
            self._usual_s += _RECENT * (duration_s - self._usual_s)

    def begin(self) -> None:
        if self._total_s == 0:
            self._first = self._clock()
        self._began, self._slower_s = self._clock(), 0.0

    def end(self, copying_s: float, waiting_s: float) -> None:
        """
        Overview:
            Record the cost of a checkpoint and compute when the next is due.
        Arguments:
            - copying_s (:obj:`float`): Time of copying before training went on.
            - waiting_s (:obj:`float`): Time that optimizer steps waited, which slower iterations may include.
        """
        self.cost_s = copying_s + max(self._slower_s, waiting_s)
        self._total_s += self.cost_s
        if self._fixed_s:
            self._due = self._began + self._fixed_s
            return
        # A checkpoint before its time, such as that of the best evaluation, is paid for after those before it.
        paid = max(self._began, self._due) + self.cost_s / self._max_overhead
        self._due = max(self._began + self._min_s, paid)
