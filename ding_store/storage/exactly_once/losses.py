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
        # writer -> its last sequence in the stream, when we looked
        self._heads: Dict[str, int] = dict(heads.get('heads', {}))
        self._caught_up: Dict[str, int] = {}  # the same, when we had read all
        self._num_unread = len(self._heads)  # entries, when we looked; here whether there were any
        # writer -> the sequence that it must reach
        self._awaited: Dict[str, int] = dict(heads.get('awaited', {}))
        self._deadline = time.monotonic() + grace_s
        self._written_off: Dict[str, int] = {}  # writer -> up to which sequence it was counted as lost
        self._excused = 0  # Entries counted by their numbers, whose sequences are still to be missed.

    def heads(self, marks: Mapping[str, int], committed: Mapping[str, int]) -> Dict[str, Any]:
        """
        Overview:
            For the next life, in case that the server has forgotten it all by then: JSON. Of what is above the marks
            ``committed`` with it, which may be less than was read.
        """
        heads = {one: head for one, head in self._heads.items() if head > self._caught_up.get(one, 0)}
        heads.update({one: seen for one, seen in marks.items() if seen > heads.get(one, 0)})
        heads = {one: head for one, head in heads.items() if head > committed.get(one, 0)}
        return {'epoch': self._epoch, 'heads': heads, 'awaited': dict(self._awaited)}

    def is_time_to_look(self) -> bool:
        return time.monotonic() - self._looked_at >= LOOK_EVERY_S

    def look(self, stream: Optional[StreamInfo], cursor: EntryId, marks: Mapping[str, int]) -> None:
        self._looked_at = time.monotonic()
        # Perhaps nobody is left who would tell by appending to it.
        self.begin_epoch(stream.epoch if stream else '', marks)
        if stream is not None:
            seen = cursor.number if cursor.epoch == stream.epoch else 0
            # Who has announced again, and has something yet to be read, need not be waited for.
            at = max(stream.floor, seen)
            self._awaited = {
                one: upto
                for one, upto in self._awaited.items()
                if stream.writers.get(one, 0) < upto or stream.numbers.get(one, 0) <= at
            }
            self._heads, self._num_unread = dict(stream.writers), stream.last - max(stream.floor, seen)
            if self._num_unread <= 0:
                self._caught_up = self._heads

    def drop(self, num_entries: int) -> None:
        """Holes in the numbers."""
        self.count += num_entries
        self._excused += num_entries

    def excuse(self) -> None:
        """One sequence will be missing that is no loss."""
        self._excused += 1

    def begin_epoch(self, epoch: str, marks: Mapping[str, int]) -> None:
        """If it is another than that known: what its writers must still bring is what the last one had unread."""
        if epoch == self._epoch:
            return
        self._excused = 0
        if self._num_unread > 0:
            # Who was waited for already may have brought only a part of it before that was lost again.
            unseen = self._unseen(marks)
            self._awaited.update({one: max(head, self._awaited.get(one, 0)) for one, head in unseen.items()})
            self._deadline = time.monotonic() + self._grace_s
        self._epoch, self._num_unread, self._heads = epoch, 0, {}

    def miss(self, writer: str, seen: Optional[int], sequence: int) -> None:
        """This entry came behind ``seen`` of its writer; None: it is the first that we see of it."""
        if seen is None:
            seen = sequence - 1
        missed = sequence - 1 - seen
        excused = min(missed, self._excused)
        self._excused -= excused
        self.count += missed - excused
        written_off = self._written_off.pop(writer, 0)
        if written_off > seen:
            # It was late, not dead: what came after all, and what was just counted again, is no loss.
            self.count -= min(sequence, written_off) - seen
            if written_off > sequence:
                self._written_off[writer] = written_off

    def settle(self, marks: Mapping[str, int]) -> None:
        """Count what did not come in time."""
        if not self._awaited:
            return
        self._awaited = {writer: upto for writer, upto in self._awaited.items() if marks.get(writer, 0) < upto}
        if time.monotonic() >= self._deadline:
            for writer, upto in self._awaited.items():
                known = (marks.get(writer, 0), self._caught_up.get(writer, 0), self._written_off.get(writer, 0))
                self.count += max(0, upto - max(known))
                self._written_off[writer] = max(upto, known[-1])
            self._awaited = {}

    def _unseen(self, marks: Mapping[str, int]) -> Dict[str, int]:
        seen = {writer: max(marks.get(writer, 0), self._caught_up.get(writer, 0)) for writer in self._heads}
        return {writer: head for writer, head in self._heads.items() if head > seen[writer]}
