"""Backpressure: bounds how far collectors are ahead of the learner, to keep train iterations per env step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Optional, Tuple

from ding_store.run.foreign import fields_of, is_count, is_number
from ding_store.storage.base import EntryId, Header, Value
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.store import Store

if TYPE_CHECKING:
    from ding_store.run.session import RunSession

#: A value that the learner writes once per iteration: ``ingested``, the last entry that it read, and its counts. Its
#: version grows at least as much as the number of that entry.
PROGRESS = 'progress'
#: How often a collector that waits looks at the progress, although no version woke it. The server may have lost it.
LOOK_EVERY_S = 5.0
#: The learner puts its coarse progress once per so many entries. A collector that is farther than twice that from its
#: next chunk waits for the coarse progress first: a put costs the server time for each process that waits for it.
COARSE = 64


def coarse(name: str) -> str:
    """Return the name of the coarse progress that belongs to a progress. Those of a partition are on one server."""
    return f'coarse_{name}'


def progress_of(value: Optional[Value], *counts: str) -> Optional[Header]:
    """Return the learner's progress if the value has these counts, otherwise None."""
    return fields_of(value, {'ingested': _is_place, **dict.fromkeys(counts, is_number)})


def _is_place(field: Any) -> bool:
    return isinstance(field, list) and len(field) == 2 and isinstance(field[0], str) and is_count(field[1])


class ProgressWriter:
    """
    Overview:
        Publishes the learner's progress, and its coarse progress, both without a wait.
    """

    def __init__(self, name: str = PROGRESS) -> None:
        self._name = name
        self._place: Optional[Tuple[str, int]] = None  # of the last progress: an epoch, and a number in units of COARSE

    def publish(self, reader: Reader, ingested: EntryId, progress: Header) -> None:
        """Acknowledge up to ``ingested`` and publish the progress."""
        reader.advance(ingested, self._name, progress)
        place = ingested.epoch, ingested.number // COARSE
        if self._place is not None and place != self._place:
            reader.advance(ingested, coarse(self._name), progress)
        self._place = place


class Backpressure:
    """
    Overview:
        The distance between one collector's last entry and the last one that the learner read. Entries of all
        collectors count, because one stream numbers them.
    Arguments:
        - max_lead (:obj:`int`): This collector waits while its last entry's number is more than ``max_lead`` above that
          of the last entry that the learner read. Each collector then appends one more. So all together may be up to
          ``max_lead`` plus the number of collectors ahead.
        - is_over (:obj:`Callable`): Returns True if a wait must end.
        - name (:obj:`str`): Name of the value with the learner's progress.
    """

    def __init__(
        self, store: Store, max_lead: int, is_over: Callable[[], bool] = lambda: False, name: str = PROGRESS
    ) -> None:
        self._store, self._name = store, name
        self._max_lead = max_lead
        self._is_over = is_over
        self._appended: Optional[EntryId] = None
        self._ingested: Optional[EntryId] = None
        self._version_ingested = 0  # of the progress that said so
        self._version = 0  # of the last progress
        self._coarse: Optional[Backpressure] = None

    def appended(self, entry_id: EntryId) -> None:
        self._appended = entry_id

    def wait_for_learner(self, session: RunSession) -> None:
        """Wait until this collector may append, or the run ends."""
        session.wait_for(
            'the learner to take the last chunks', self.wait_within_lead, 'learner', 'wait_learner', LOOK_EVERY_S
        )

    def wait_within_lead(self, timeout_s: float) -> Optional[bool]:
        """
        Overview:
            Look at the learner's progress, unless the lead is within bounds. If this collector must wait, wait up to
            ``timeout_s`` for the progress that concerns it.
        Returns:
            - is_within (:obj:`Optional[bool]`): True: append the next chunk. None, never False: call this again, as
              ``RunSession.wait_for`` does.
        """
        if self._is_within_bounds() or self._look():
            return True
        if timeout_s > 0:
            self._store.wait_for_version(*self.awaited(), timeout_s, self._is_over)
        return None

    def awaited(self) -> Tuple[str, int]:
        """Return the name and the version of the value that this collector waits for next."""
        is_known = self._ingested is not None and self._is_comparable()
        if is_known and self._num_ahead() - self._max_lead > 2 * COARSE:
            if self._coarse is None:
                self._coarse = Backpressure(self._store, self._max_lead + COARSE, self._is_over, coarse(self._name))
            self._coarse._appended = self._appended
            if not self._coarse._is_within_bounds() and not self._coarse._look():
                return self._coarse._name, self._coarse.due_version
        return self._name, self.due_version

    @property
    def due_version(self) -> int:
        """
        The version of the progress that permits the next chunk, unless the server loses its memory. Any next one, if
        no progress of this epoch is known.
        """
        version = self._version + 1
        if self._appended is None or self._ingested is None or not self._is_comparable():
            return version
        return max(version, self._version_ingested + self._num_ahead() - self._max_lead)

    def _look(self) -> bool:
        """Read the progress if it is new. Return True if it permits the next chunk."""
        value = self._store.get(self._name, self._version)
        if value is None:
            return False
        self._version = value.version
        progress = progress_of(value)
        if progress is None:
            return False
        ingested = EntryId(*progress['ingested'])
        # Progress of a learner that was presumed crashed may arrive after its successor's. The later entry counts.
        is_late = self._ingested is not None and ingested.epoch == self._ingested.epoch and ingested < self._ingested
        if not is_late:
            self._ingested, self._version_ingested = ingested, int(value.version)
        return self._is_within_bounds() or not self._is_comparable()

    def _is_comparable(self) -> bool:
        # Numbers of two server generations cannot be compared, and neither epoch shows which one is later. But progress
        # shows that the learner runs, so it permits one more chunk, which gets an id of the present generation.
        return self._appended is None or self._ingested is None or self._appended.epoch == self._ingested.epoch

    def _is_within_bounds(self) -> bool:
        return self._num_ahead() <= self._max_lead

    def _num_ahead(self) -> int:
        if self._appended is None:
            return -1
        ingested = self._ingested.number if self._ingested is not None and self._is_comparable() else 0
        return self._appended.number - ingested
