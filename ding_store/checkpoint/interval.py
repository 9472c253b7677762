"""How often: as often as the bound on the overhead allows, by what each checkpoint was seen to cost."""

from __future__ import annotations

import time
from typing import Callable, Optional

#: Weight of one more iteration in the usual duration of an iteration.
_RECENT = 1 / 32


class Interval:
    """
    Overview:
        After CheckFreq (Mohan et al., FAST '21): a checkpoint costs what it makes training wait, and by how much
        iterations are slower while it is written than they usually are; the next one begins when the time since is so
        long that the cost is at most ``max_overhead`` of it. So each one is paid for before the next is due, and the
        interval follows what disk, model and machine do.
    Arguments:
        - max_overhead (:obj:`float`): Bound on the cost, as a fraction of the time.
        - fixed_s (:obj:`Optional[float]`): Begin one so many seconds after the other, whatever it costs.
        - min_s (:obj:`float`): Not more often than this.
    Attributes:
        - cost_s (:obj:`float`): Of the last checkpoint.
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
        """All checkpoints so far, as a fraction of the time since the first one began."""
        return self._total_s / max(self._clock() - self._first, 1e-9)

    @property
    def next_s(self) -> float:
        """From the beginning of the last one to the next."""
        return self._due - self._began

    def iterated(self, duration_s: float, is_saving: bool) -> None:
        """One iteration of training took so long, a checkpoint being written beside it or not."""
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
        Arguments:
            - copying_s (:obj:`float`): What was copied before training went on.
            - waiting_s (:obj:`float`): What optimizer steps waited for; slower iterations may have that in them.
        """
        self.cost_s = copying_s + max(self._slower_s, waiting_s)
        self._total_s += self.cost_s
        if self._fixed_s:
            self._due = self._began + self._fixed_s
            return
        # One that came before its time, as that of the best evaluation does, is paid for behind those before it.
        paid = max(self._began, self._due) + self.cost_s / self._max_overhead
        self._due = max(self._began + self._min_s, paid)
