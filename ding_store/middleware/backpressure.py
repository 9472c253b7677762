"""Backpressure: bounds how far collectors are ahead of the learner, to keep train iterations per env step."""

from __future__ import annotations

from typing import Any, Optional

from ding_store.run.foreign import fields_of, is_count, is_number
from ding_store.storage.base import EntryId, Header, Value
from ding_store.storage.store import Store

#: A value that the learner writes once per iteration: ``ingested``, the last entry that it read, and its counts.
PROGRESS = 'progress'


def progress_of(value: Optional[Value], *counts: str) -> Optional[Header]:
    """Return the learner's progress if the value has these counts, otherwise None."""
    return fields_of(value, {'ingested': _is_place, **dict.fromkeys(counts, is_number)})


def _is_place(field: Any) -> bool:
    return isinstance(field, list) and len(field) == 2 and isinstance(field[0], str) and is_count(field[1])


class Backpressure:
    """
    Overview:
        The distance between one collector's last entry and the last one that the learner read. Entries of all
        collectors count, because one stream numbers them.
    Arguments:
        - max_lead (:obj:`int`): This collector waits while its last entry's number is more than ``max_lead`` above that
          of the last entry that the learner read. Each collector then appends one more. So all together may be up to
          ``max_lead`` plus the number of collectors ahead.
        - name (:obj:`str`): Name of the value with the learner's progress.
    """

    def __init__(self, store: Store, max_lead: int, name: str = PROGRESS) -> None:
        self._store, self._name = store, name
        self._max_lead = max_lead
        self._appended: Optional[EntryId] = None
        self._ingested: Optional[EntryId] = None
        self._version = 0

    def appended(self, entry_id: EntryId) -> None:
        self._appended = entry_id

    def wait_within_lead(self, timeout_s: float) -> Optional[bool]:
        """
        Overview:
            Wait up to ``timeout_s`` for one more report of the learner's progress, unless the lead is within bounds.
        Returns:
            - is_within (:obj:`Optional[bool]`): True: append the next chunk. None, never False: call this again, as
              ``RunSession.wait_for`` does.
        """
        if self._is_within_bounds():
            return True
        value = self._store.get(self._name, self._version, timeout_s)
        if value is None:
            return None
        self._version = value.version
        progress = progress_of(value)
        if progress is None:
            return None
        ingested = EntryId(*progress['ingested'])
        # Progress of a learner that was presumed crashed may arrive after its successor's. The later entry counts.
        is_late = self._ingested is not None and ingested.epoch == self._ingested.epoch and ingested < self._ingested
        if not is_late:
            self._ingested = ingested
        return True if self._is_within_bounds() or not self._is_comparable() else None

    def _is_comparable(self) -> bool:
        # Numbers of two server generations cannot be compared, and neither epoch shows which one is later. But progress
        # shows that the learner runs, so it permits one more chunk, which gets an id of the present generation.
        return self._appended is None or self._ingested is None or self._appended.epoch == self._ingested.epoch

    def _is_within_bounds(self) -> bool:
        if self._appended is None:
            return True
        ingested = self._ingested.number if self._ingested is not None and self._is_comparable() else 0
        return self._appended.number - ingested <= self._max_lead
