"""A reader's count of entries that were in its stream and never came."""

from __future__ import annotations

import time
from typing import Any, Dict, Mapping, Optional

from ding_store.storage.base import EntryId, StreamInfo

LOOK_EVERY_S = 1.0


class Losses:
    """
    Overview:
        A count of lost entries, from two sources. Within an epoch, numbers are dense: a gap shows what a full stream
        dropped. After the server lost everything, numbers begin anew, and only the *heads* help. A head is a writer's
        last sequence at the reader's last look. If a writer does not send its entries up to its head again in time, it
        has exited, and they are lost.
    Arguments:
        - grace_s (:obj:`float`): Seconds that writers have in a new epoch to send entries again.
        - heads (:obj:`Mapping`): ``heads`` of the previous reader of this name, or empty.
    Attributes:
        - looked_at (:obj:`float`): Time of the last look, by the monotonic clock.
        - deadline (:obj:`float`): Until then, writers may send entries again that a server lost.
    """

    def __init__(self, grace_s: float, heads: Mapping[str, Any]) -> None:
        self.count = 0
        self._grace_s = grace_s
        self.looked_at = -LOOK_EVERY_S
        self._epoch: str = heads.get('epoch', '')
        # writer -> its last sequence in the stream at the last look, and the number of that entry
        self._heads: Dict[str, int] = dict(heads.get('heads', {}))
        self._numbers: Dict[str, int] = {}
        self._passed: Dict[str, int] = {}  # writer -> sequence that the cursor has passed, read or not
        # writer -> the sequence that it must send again, at least
        self._awaited: Dict[str, int] = dict(heads.get('awaited', {}))
        self.deadline = time.monotonic() + grace_s
        self._written_off: Dict[str, int] = {}  # writer -> sequence up to which entries were counted as lost
        # Entries whose sequences will be missing later and must not count again: a missing number showed them already.
        self._excused = 0

    def heads(self, cursor: EntryId, marks: Mapping[str, int], committed: Mapping[str, int]) -> Dict[str, Any]:
        """
        Overview:
            Return the state for the next reader of this name, JSON-able, in case that the server loses its memory
            before. It holds sequences above the marks ``committed`` with it, which may be fewer than were read.
        """
        self._pass(cursor)
        heads = {one: head for one, head in self._heads.items() if head > self._passed.get(one, 0)}
        # Entries that were read and are not committed must come again, even those of an earlier epoch.
        awaited = _highest(self._awaited, marks)
        heads, awaited = (
            {one: upto for one, upto in each.items() if upto > committed.get(one, 0)} for each in (heads, awaited)
        )
        return {'epoch': self._epoch, 'heads': heads, 'awaited': awaited}

    def forget(self, writer: str) -> None:
        """Drop the state of a writer that appends no more, and whose entries were all read or counted."""
        for known in (self._passed, self._written_off):
            known.pop(writer, None)

    def is_awaited(self, writer: str) -> bool:
        """Return whether a writer must still send lost entries again."""
        return writer in self._awaited

    def is_time_to_look(self) -> bool:
        return time.monotonic() - self.looked_at >= LOOK_EVERY_S

    def look(self, stream: Optional[StreamInfo], cursor: EntryId, marks: Mapping[str, int]) -> None:
        """Note the heads of ``stream``, and which entries its writers must send again."""
        self.looked_at = time.monotonic()
        # There may be no writer left whose entries would show the new epoch.
        self.begin_epoch(stream.epoch if stream else '', cursor, marks)
        if stream is not None:
            self._await_again(stream.writers, marks)
            seen = cursor.number if cursor.epoch == stream.epoch else 0
            # A writer that has sent its entries again, and has unread ones, is not awaited: the reader will read them.
            at = max(stream.floor, seen)
            self._awaited = {
                one: upto
                for one, upto in self._awaited.items()
                if stream.writers.get(one, 0) < upto or stream.numbers.get(one, 0) <= at
            }
            self._pass(cursor)
            self._heads, self._numbers = dict(stream.writers), dict(stream.numbers)
            for one, number in stream.numbers.items() if cursor.epoch == stream.epoch else ():
                # A writer has at most as many entries behind the cursor as there are numbers.
                behind = max(0, number - cursor.number)
                self._passed[one] = max(self._passed.get(one, 0), self._heads[one] - behind)

    def drop(self, num_entries: int) -> None:
        """Count entries that are missing in the numbers."""
        self.count += num_entries
        self._excused += num_entries

    def excuse(self) -> None:
        """Do not count the next missing sequence as a loss."""
        self._excused += 1

    def begin_epoch(self, epoch: str, cursor: EntryId, marks: Mapping[str, int]) -> None:
        """Begin an epoch if it is new. Writers must send again what the reader had not read in the last one."""
        if epoch == self._epoch:
            return
        self._excused = 0
        self._pass(cursor)
        self._await_again({}, marks)
        self._epoch, self._heads, self._numbers = epoch, {}, {}

    def _await_again(self, heads: Mapping[str, int], marks: Mapping[str, int]) -> None:
        """Wait again for entries that the server lost: those above ``heads`` and up to the heads of the last look."""
        lost = {one: head for one, head in self._heads.items() if head > heads.get(one, 0)}
        unseen = {one: head for one, head in lost.items() if head > self._known(one, marks)}
        if unseen:
            # A writer that was awaited already may have sent a part of its entries again before the server lost it.
            self._awaited = _highest(self._awaited, unseen)
            self.deadline = time.monotonic() + self._grace_s
        for one in lost:
            self._numbers.pop(one, None)  # By now, other entries have these numbers.

    def miss(self, writer: str, seen: Optional[int], sequence: int, is_owed: bool = True) -> None:
        """
        Count the entries that a writer's ``sequence`` skips after ``seen``, its previous one. None: it is the writer's
        first. ``is_owed``: whether the missing entries were for this reader.
        """
        if seen is None:
            seen = sequence - 1
        missed = sequence - 1 - seen
        excused = min(missed, self._excused)
        self._excused -= excused
        self.count += missed - excused if is_owed else 0
        written_off = self._written_off.pop(writer, 0)
        if written_off > seen:
            # The writer was late. Entries that came after all, or were counted twice by now, are no losses.
            self.count -= min(sequence, written_off) - seen
            if written_off > sequence:
                self._written_off[writer] = written_off

    def count_overdue(self, marks: Mapping[str, int]) -> None:
        """Count entries that did not come in time."""
        if not self._awaited:
            return
        self._awaited = {writer: upto for writer, upto in self._awaited.items() if marks.get(writer, 0) < upto}
        if time.monotonic() >= self.deadline:
            for writer, upto in self._awaited.items():
                counted = self._written_off.get(writer, 0)
                self.count += max(0, upto - max(self._known(writer, marks), counted))
                self._written_off[writer] = max(upto, counted)
            self._awaited = {}

    def _known(self, writer: str, marks: Mapping[str, int]) -> int:
        """Return the sequence up to which a writer's entries were read or counted."""
        return max(marks.get(writer, 0), self._passed.get(writer, 0))

    def _pass(self, cursor: EntryId) -> None:
        """Note writers whose head is below the cursor: their entries were read, or counted by their numbers."""
        if cursor.epoch == self._epoch:
            below = {one: self._heads[one] for one, number in self._numbers.items() if number <= cursor.number}
            self._passed.update(below)
            for one in below:
                del self._numbers[one]


def _highest(known: Mapping[str, int], others: Mapping[str, int]) -> Dict[str, int]:
    return {one: max(known.get(one, 0), others.get(one, 0)) for one in {**known, **others}}
