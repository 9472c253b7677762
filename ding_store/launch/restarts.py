"""Decides when a process that died is started again, and when no more."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Optional

#: Seconds until a process is started again: the first after a death, twice as many after each early one that follows.
FIRST_S, LONGEST_S = 1.0, 30.0
#: A process that fails by itself is not failing early if it has worked for so long.
WORKED_S = 60.0
#: The exit status of a process that has left the run in order because of SIGTERM.
LEFT = 128 + signal.SIGTERM
#: Signals that come from outside, and say nothing about the program: a person, a scheduler, or the kernel without
#: memory.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class Restarts:
    """
    Overview:
        The early deaths in a row of one place among the collectors, or of the evaluator. A death is early if the
        process had not begun to work, or failed by itself soon after that.
    Arguments:
        - limit (:obj:`int`): Early deaths in a row after which the process is given up.
    """

    limit: int
    num_early: int = 0

    def after(self, code: int, worked_s: Optional[float]) -> Optional[float]:
        """
        Overview:
            Count a death. Return the seconds until the next start, or None: it is given up.
        Arguments:
            - code (:obj:`int`): The exit status, or the negative number of the signal.
            - worked_s (:obj:`Optional[float]`): Seconds since the process began to work. None: it had not begun.
        """
        was_ended = code in (0, LEFT) or -code in FROM_OUTSIDE
        is_early = worked_s is None or (not was_ended and worked_s < WORKED_S)
        self.num_early = self.num_early + 1 if is_early else 0
        if code == os.EX_CONFIG or self.num_early > self.limit:
            return None
        return min(FIRST_S * 2 ** max(0, self.num_early - 1), LONGEST_S)
