"""The number of collectors that a run needs, from what its learner and its collectors wait for."""

from __future__ import annotations

import math
from typing import Mapping, Optional

from ding_store.metrics.figures import Figures
from ding_store.metrics.record import shares as shares_between

#: Seconds of one measurement. It begins when the wanted number of collectors reports, or after ``START_S``.
MEASURE_S, START_S = 8.0, 45.0
#: Share of its time that a learner waits for experience from which it gets more collectors, and below which collectors
#: may go.
STARVED, FED = 0.08, 0.02
#: Share of their time that collectors wait for the learner from which some go, and what is kept above the need.
IDLE, HEADROOM = 0.35, 1.15
#: Waits of collectors for other things from which more of them would not help.
BLOCKED = 0.3
#: Largest factor of one step up.
LEAP = 3.0
#: A larger number must bring this part of the env steps/s that it promises. Otherwise the one before is restored, and
#: kept for ``HOLD_S``.
WORTH, HOLD_S = 0.2, 300.0


def collectors_needed(shares: Mapping[str, float], number: int) -> Optional[float]:
    """
    Overview:
        Return how many collectors would let the learner and the collectors wait least, or None if that is not known.
    Arguments:
        - shares (:obj:`Mapping`): See ``ding_store.metrics.record.shares``.
        - number (:obj:`int`): The collectors that run.
    """
    if 'learner_wait_experience' not in shares or not number:
        return None
    starved, idle = shares['learner_wait_experience'], shares.get('collector_wait_learner', 0.0)
    return number * (1.0 - idle) / max(1.0 - starved, 1.0 / LEAP)


class Sizing:
    """
    Overview:
        Finds the number of collectors with which the learner hardly waits. A learner that waits for a share ``w`` of
        its time needs ``1 / (1 - w)`` times as many. Collectors that wait for it for a share ``c`` are ``1 / (1 - c)``
        times too many. Seconds are by any clock that does not stop.
    Arguments:
        - least, most (:obj:`int`): Bounds of the number.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.reason = ''  # why the last change was made
        self._number = 0  # that is being measured
        self._changed_s = 0.0
        self._before: Optional[Figures] = None
        self._began_s = 0.0
        self._held_until_s = -math.inf
        self._raised_from: Optional[int] = None
        self._rate_before = self._rate = 0.0

    def step(self, now_s: float, figures: Figures, number: int) -> int:
        """
        Overview:
            Return the number of collectors that the run should have from now on.
        Arguments:
            - figures (:obj:`Figures`): The run's figures now.
            - number (:obj:`int`): The number that it should have so far.
        """
        if number != self._number:
            self._number, self._changed_s, self._before = number, now_s, None
        is_complete = figures.num_collectors >= number or now_s - self._changed_s > START_S
        if self._before is None or figures.learner != self._before.learner:
            if is_complete and figures.rows_ingested:
                self._before, self._began_s = figures, now_s
            return number
        if now_s - self._began_s < MEASURE_S:
            return number
        before, self._before, seconds = self._before, figures, now_s - self._began_s
        self._began_s = now_s
        self._rate = (figures.learner_step - before.learner_step) / seconds
        found = shares_between(before, figures)
        if 'learner_wait_experience' not in found:
            return number
        if self._is_worthless(number):
            self._held_until_s = now_s + HOLD_S
            back, self._raised_from = self._raised_from or number, None
            self.reason = f'{number} collectors made hardly more env steps/s: the hosts are busy'
            return back
        self._raised_from = None
        return self._number_for(now_s, found, number)

    def _is_worthless(self, number: int) -> bool:
        """Return True if the last step up has brought hardly any env steps."""
        before = self._raised_from
        if before is None or before >= number or self._rate_before <= 0:
            return False
        promised = number / before - 1.0
        return self._rate / self._rate_before - 1.0 < WORTH * promised

    def _number_for(self, now_s: float, found: dict, number: int) -> int:
        starved, idle = found['learner_wait_experience'], found.get('collector_wait_learner', 0.0)
        blocked = found.get('collector_append', 0.0) + found.get('collector_wait_weights', 0.0)
        if starved > STARVED and number < self.most and blocked < BLOCKED and now_s >= self._held_until_s:
            needed = min(number / max(1.0 - starved, 1e-3), LEAP * number)
            self._raised_from, self._rate_before = number, self._rate
            self.reason = f'the learner waits for experience {starved:.0%} of its time'
            return min(self.most, max(number + 1, math.ceil(needed)))
        if starved < FED and idle > IDLE and number > self.least:
            needed = math.ceil(number * (1.0 - idle) * HEADROOM)
            self.reason = f'collectors wait for the learner {idle:.0%} of their time'
            return max(self.least, min(number, needed))
        return number
