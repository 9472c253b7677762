"""This process's part among several learners or workers. This module is light: it imports no part of the store."""

from __future__ import annotations

from typing import Any, List, Tuple

#: At most one ``LearnerRank``: ``learner_ranks.start`` sets it.
_own: List[Any] = []
#: At most one ``WorkerRank``: ``worker_rank.start`` sets it.
_worker: List[Any] = []


def own_rank() -> Any:
    """Return this process's ``LearnerRank``. None: it is the only learner, or no learner."""
    return _own[-1] if _own else None


def set_own_rank(rank: Any) -> None:
    _own[:] = [rank]


def own_worker() -> Any:
    """Return this process's ``WorkerRank``. None: it is no worker."""
    return _worker[-1] if _worker else None


def set_own_worker(worker: Any) -> None:
    _worker[:] = [worker]


def is_first() -> bool:
    """Return True if this process saves for all: it is rank 0, or no learner or worker of several."""
    return own_place()[0] == 0


def own_place() -> Tuple[int, int]:
    """Return this process's rank among the learners or workers, and their number. (0, 1): it is the only one."""
    for each in (own_rank(), own_worker()):
        if each is not None:
            return each.rank, each.num
    return 0, 1
