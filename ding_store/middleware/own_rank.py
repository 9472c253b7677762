"""This process's part among several learners. Modules that run without the store import this one, which is light."""

from __future__ import annotations

from typing import Any, List

#: At most one ``LearnerRank``: ``learner_ranks.start`` sets it.
_own: List[Any] = []


def own_rank() -> Any:
    """Return this process's ``LearnerRank``. None: it is the only learner, or no learner."""
    return _own[-1] if _own else None


def set_own_rank(rank: Any) -> None:
    _own[:] = [rank]
