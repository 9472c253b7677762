"""A reader's count of entries that were in its stream and never came."""

from __future__ import annotations

import time
from typing import Any, Dict, Mapping, Optional

from ding_store.storage.base import EntryId, StreamInfo

LOOK_EVERY_S = 1.0


class Losses:
    """
    Overview:
        Two ways to know of a loss. Within an epoch numbers are dense: a hole is what a full stream dropped. When the
        server forgot everything, numbers begin anew, and only *heads* help: how far each writer was when somebody last
        looked. What a writer had appended and does not announce again in time is lost: that writer is dead.
    Arguments:
        - grace_s (:obj:`float`): How long writers are waited for in a new epoch.
        - heads (:obj:`Mapping`): What ``heads`` had been in a former life; empty where there was none.
    """

    def __init__(self, grace_s: float, heads: Mapping[str, Any]) -> None:
        self.count = 0
        self._grace_s = grace_s
        self._looked_at = -LOOK_EVERY_S
        self._epoch: str = heads.get('epoch', '')
        # writer -> its last sequence in the stream, when we looked; and the number of that entry
        self._heads: Dict[str, int] = dict(heads.get('heads', {}))
        self._numbers: Dict[str, int] = {}
        self._passed: Dict[str, int] = {}  # writer -> up to which sequence we have passed it, whatever we read of it
        # writer -> the sequence that it must reach
        self._awaited: Dict[str, int] = dict(heads.get('awaited', {}))
        self._deadline = time.monotonic() + grace_s
        self._written_off: Dict[str, int] = {}  # writer -> up to which sequence it was counted as lost
        self._excused = 0  # Entries counted by their numbers, whose sequences are still to be missed.

    def heads(self, cursor: EntryId, marks: Mapping[str, int], committed: Mapping[str, int]) -> Dict[str, Any]:
        """
        Overview:
            For the next life, in case that the server has forgotten it all by then: JSON. Of what is above the marks
            ``committed`` with it, which may be less than was read.
        """
        self._pass(cursor)
        heads = {one: head for one, head in self._heads.items() if head > self._passed.get(one, 0)}
        # What was read and is not committed, perhaps of an epoch before this one, must come once more.
        awaited = _highest(self._awaited, marks)
        heads, awaited = (
            {one: upto for one, upto in each.items() if upto > committed.get(one, 0)} for each in (heads, awaited)
        )
        return {'epoch': self._epoch, 'heads': heads, 'awaited': awaited}

    def forget(self, writer: str) -> None:
        """It appends no more, and all of it was read, or counted."""
        for known in (self._passed, self._written_off):
            known.pop(writer, None)

    def is_awaited(self, writer: str) -> bool:
        """Whether it was to announce something again, and has not."""
        return writer in self._awaited

    def is_time_to_look(self) -> bool:
        return time.monotonic() - self._looked_at >= LOOK_EVERY_S

    def look(self, stream: Optional[StreamInfo], cursor: EntryId, marks: Mapping[str, int]) -> None:
        self._looked_at = time.monotonic()
        # Perhaps nobody is left who would tell by appending to it.
        self.begin_epoch(stream.epoch if stream else '', cursor, marks)
        if stream is not None:
            self._await_again(stream.writers, marks)
            seen = cursor.number if cursor.epoch == stream.epoch else 0
            # Who has announced again, and has something yet to be read, need not be waited for.
            at = max(stream.floor, seen)
            self._awaited = {
                one: upto
                for one, upto in self._awaited.items()
                if stream.writers.get(one, 0) < upto or stream.numbers.get(one, 0) <= at
            }
            self._pass(cursor)
            self._heads, self._numbers = dict(stream.writers), dict(stream.numbers)
            for one, number in stream.numbers.items() if cursor.epoch == stream.epoch else ():
                # No more of its entries than there are numbers can be behind the cursor.
                behind = max(0, number - cursor.number)
                self._passed[one] = max(self._passed.get(one, 0), self._heads[one] - behind)

    def drop(self, num_entries: int) -> None:
        """Holes in the numbers."""
        self.count += num_entries
        self._excused += num_entries

    def excuse(self) -> None:
        """One sequence will be missing that is no loss."""
        self._excused += 1

    def begin_epoch(self, epoch: str, cursor: EntryId, marks: Mapping[str, int]) -> None:
        """If it is another than that known: what its writers must still bring is what the last one had unread."""
        if epoch == self._epoch:
            return
        self._excused = 0
        self._pass(cursor)
        self._await_again({}, marks)
        self._epoch, self._heads, self._numbers = epoch, {}, {}

    def _await_again(self, heads: Mapping[str, int], marks: Mapping[str, int]) -> None:
        """What writers had by our heads and have not by these, since the server lost it, they must still bring."""
        lost = {one: head for one, head in self._heads.items() if head > heads.get(one, 0)}
        unseen = {one: head for one, head in lost.items() if head > self._known(one, marks)}
        if unseen:
            # Who was waited for already may have brought only a part of it before that was lost again.
            self._awaited = _highest(self._awaited, unseen)
            self._deadline = time.monotonic() + self._grace_s
        for one in lost:
            self._numbers.pop(one, None)  # They are other entries' by now.

    def miss(self, writer: str, seen: Optional[int], sequence: int, is_owed: bool = True) -> None:
        """
        This entry came behind ``seen`` of its writer; None: it is the first that we see of it. ``is_owed``: whether
        what is missing between them was for us.
        """
        if seen is None:
            seen = sequence - 1
        missed = sequence - 1 - seen
        excused = min(missed, self._excused)
        self._excused -= excused
        self.count += missed - excused if is_owed else 0
        written_off = self._written_off.pop(writer, 0)
        if written_off > seen:
            # It was late, not dead: what came after all, and what was just counted again, is no loss.
            self.count -= min(sequence, written_off) - seen
            if written_off > sequence:
                self._written_off[writer] = written_off

    def count_overdue(self, marks: Mapping[str, int]) -> None:
        """Count what did not come in time."""
        if not self._awaited:
            return
        self._awaited = {writer: upto for writer, upto in self._awaited.items() if marks.get(writer, 0) < upto}
        if time.monotonic() >= self._deadline:
            for writer, upto in self._awaited.items():
                counted = self._written_off.get(writer, 0)
                self.count += max(0, upto - max(self._known(writer, marks), counted))
                self._written_off[writer] = max(upto, counted)
            self._awaited = {}

    def _known(self, writer: str, marks: Mapping[str, int]) -> int:
        """The sequence up to which nothing of it is missing, or is counted already."""
        return max(marks.get(writer, 0), self._passed.get(writer, 0))

    def _pass(self, cursor: EntryId) -> None:
        """What lies below the cursor and was not read was counted by its number."""
        if cursor.epoch == self._epoch:
            below = {one: self._heads[one] for one, number in self._numbers.items() if number <= cursor.number}
            self._passed.update(below)
            for one in below:
                del self._numbers[one]


def _highest(known: Mapping[str, int], others: Mapping[str, int]) -> Dict[str, int]:
    return {one: max(known.get(one, 0), others.get(one, 0)) for one in {**known, **others}}
