"""The learner's consumer offset in the experience stream, committed with the rows so that both survive together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional

import numpy as np
from ditk import logging

from ding_store.buffer.store_buffer import StoreBuffer
from ding_store.errors import ConfigError
from ding_store.middleware.pickled_chunks import OFFSETS, is_pickled
from ding_store.storage.base import Entry, EntryId
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.store import Store

if TYPE_CHECKING:
    from ding_store.middleware.ingest_plan import Replay

#: A leaf that DI-engine sets: steps of one episode have the same value, and other episodes of a collector differ.
ENV_ID = 'env_data_id'
#: Bits of ``env_data_id`` above the collector's ordinal. They change after each loss, see ``take``.
_RUN_BITS, _MAX_RUNS = 48, 1 << 15


#: Key of a note with the offsets in a learner's other partitions, in order: stream -> ``ConsumerOffset.state``.
OTHERS = 'others'
#: The marks of this many writers fill half of the note that is committed with rows.
MANY_WRITERS = 8000


class ConsumerOffset:
    """
    Overview:
        Counts the entries that the learner took from one partition. With ``keep_in`` the replay becomes a table with a
        path, and the counts and the writers' marks are its note. A restarted learner then continues after the last
        entry with rows in the table. A learner with several partitions has an offset for each of them, and the note of
        the first one has them all.
    Arguments:
        - others (:obj:`Mapping[str, ConsumerOffset]`): Stream -> offset of this learner's other partitions. Only the
          first partition's offset has some.
    Attributes:
        - marks (:obj:`Dict[str, int]`): writer -> highest sequence number taken.
        - runs (:obj:`Dict[str, int]`): writer -> the first sequence number after its last loss, see ``take``.
        - num_epochs (:obj:`int`): Number of epochs of the stream that entries were taken from.
        - policy_versions (:obj:`Dict[str, int]`): policy -> the newest version that collected an entry.
        - cursor (:obj:`Optional[EntryId]`): The last entry taken.
        - num_passed (:obj:`int`): Chunks that were taken, or lost between two that were taken. Partitions that are
            equally far have the same number, because a collector numbers the parts of a chunk alike in all of them.
        - num_rows, num_chunks, env_step, env_episode (:obj:`int`): Totals, earlier learner processes included.
        - is_resumed (:obj:`bool`): True if the counts continue those of an earlier learner process.
    """

    def __init__(self, others: Optional[Mapping[str, ConsumerOffset]] = None) -> None:
        self.others: Mapping[str, ConsumerOffset] = others or {}
        self.marks: Dict[str, int] = {}
        self.runs: Dict[str, int] = {}
        self.policy_versions: Dict[str, int] = {}
        self.num_epochs = 0
        self.cursor: Optional[EntryId] = None
        self.num_rows = self.num_chunks = self.num_passed = self.env_step = self.env_episode = 0
        self.is_resumed = False
        self._replay: Optional[Replay] = None
        self._run = ''
        self._heads: Dict[str, Any] = {}  # how far each writer was, from the reader of the earlier learner process
        self._reader: Optional[Reader] = None
        self._has_warned = False

    def keep_in(self, replay: Replay, path: str, run: Optional[str], num_learners: int = 1) -> None:
        """
        Overview:
            Keep the replay's rows in a table with a path, and continue at the offset that was committed there.
        Arguments:
            - path (:obj:`str`): The table's directory, unless the buffer has one.
            - run (:obj:`Optional[str]`): The name of this run in the checkpoint directory. Rows of another run are
              deleted. None: there are no checkpoints, so rows survive but the offset does not, like the model.
            - num_learners (:obj:`int`): Number of the run's learners.
        Raises:
            - ConfigError: The rows are those of another number of partitions.
        """
        buffer_ = replay.buffer
        if not isinstance(buffer_, StoreBuffer):
            logging.warning(
                f'ding_store: the replay is a {type(buffer_).__name__} and is lost with its process. A restarted '
                'learner has its model, but no experience. Use a StoreBuffer (parts.DequeBuffer) to keep both'
            )
            return
        if buffer_._middleware:
            logging.warning(
                'ding_store: the buffer has middleware, so elements are pushed one by one. If the learner is killed '
                'in the middle of a chunk, it has a part of the chunk twice after its restart'
            )
        if buffer_.table.table_dir is None:
            buffer_.keep_in(path)
        if run is None:
            return
        self._replay, self._run = replay, run
        if not is_of_run(buffer_, run):
            logging.info(f'ding_store: deleting {buffer_.count()} rows of the previous run')
            buffer_.clear()
        elif 'marks' in (buffer_.committed or {}):
            self._restore_all(buffer_.committed or {}, path, num_learners)

    def _restore_all(self, note: Dict[str, Any], path: str, num_learners: int) -> None:
        found = offsets_in(note)
        num = 1 + len(self.others)
        if len(found) != num:
            before, now = len(found) * num_learners, num * num_learners
            anew = f'ding-store reshard CHECKPOINT --run RUN --learners {num_learners} --partitions'
            raise ConfigError(
                f'the replay in {path!r} has the rows of {len(found)} partitions, and its learner reads {num} now. To '
                f'go on with {before} in all, set store.learners.partitions to {before} and run {anew} {before}. For '
                f'{now}, run {anew} {now}.'
            )
        for each, state in zip(self.all(), found):
            each.restore(state)

    def all(self) -> List[ConsumerOffset]:
        """Return the offsets of all partitions of this learner, in the order of the partitions."""
        return [self, *self.others.values()]

    def reader(self, store: Store, stream: str, name: str, **options: Any) -> Reader:
        """Return a reader of the stream that starts after the entries taken. ``note`` contains its writers' heads."""
        self._reader = Reader(store, stream, name, marks=self.marks, heads=self._heads, **options)
        return self._reader

    def take(self, entry: Entry) -> Entry:
        """
        Overview:
            Count an entry that will become rows, and return it with the ``env_data_id`` that the rows must have. After
            a loss of the writer's entries the id changes, because steps before and after the loss are no neighbours.
            The id also changes for a writer that first appears in a later epoch. A server that lost its memory numbers
            collectors from 0 again.
        """
        self._pass(entry)
        if entry.writer not in self.marks and self.num_epochs > 1:
            # ``_of_run`` takes this modulo _MAX_RUNS: -1 becomes the highest number, and later epochs count down from
            # it. Runs after a loss are sequences, which count up from 1, so they meet only after thousands of chunks.
            self.runs[entry.writer] = 1 - self.num_epochs
        if entry.sequence > self.marks.get(entry.writer, 0) + 1:
            self.runs[entry.writer] = entry.sequence
        # What an unknown writer sent before may have been there for only some of the partitions.
        self.num_passed += entry.sequence - self.marks.get(entry.writer, entry.sequence - 1)
        self.marks[entry.writer] = entry.sequence
        self.num_chunks += 1
        for name, key in (('num_rows', 'rows'), ('env_step', 'env_step'), ('env_episode', 'env_episode')):
            setattr(self, name, getattr(self, name) + entry.header[key])
        for name, version in entry.header.get('policy_versions', {}).items():
            self.policy_versions[name] = max(version, self.policy_versions.get(name, 0))
        return _of_run(entry, self.runs.get(entry.writer, 0))

    def skip(self, entry: Entry) -> None:
        """Move the offset past an entry that will never become rows."""
        self._pass(entry)

    def note(self) -> Optional[Dict[str, Any]]:
        """Return the note to commit with the rows of the entries taken, or None if the offset is not kept."""
        if self._replay is None:
            return None
        others = {stream: each.state() for stream, each in self.others.items()}
        return {**self.state(), OTHERS: others} if others else self.state()

    def state(self) -> Dict[str, Any]:
        """Return the offset as a JSON-able dict, from which ``restore`` continues."""
        self._drop_departed()
        counts = dict(rows=self.num_rows, chunks=self.num_chunks, env_step=self.env_step, env_episode=self.env_episode)
        cursor, chain = (None, '') if self.cursor is None else (list(self.cursor), self.cursor.chain)
        counts['passed'] = self.num_passed
        states = dict(marks=dict(self.marks), runs=dict(self.runs), policy_versions=dict(self.policy_versions))
        heads = self._heads if self._reader is None else self._reader.heads(self.marks)
        return dict(run=self._run, cursor=cursor, chain=chain, epochs=self.num_epochs, heads=heads, **states, **counts)

    def leave_note(self, is_open: bool) -> None:
        """Leave the note for the next push or for ``commit``. ``is_open`` is False if the last push committed it."""
        if self._replay is not None:
            self._replay.note = self.note() if is_open else None

    def commit(self) -> None:
        """Commit the note if no push has committed it."""
        note = None if self._replay is None else self._replay.take_note()
        if note is not None and self._replay is not None:
            self._replay.buffer.commit(note)

    def _drop_departed(self) -> None:
        """Delete the marks of writers that can send no more entries."""
        if self._reader is not None:
            known = self._reader.marks
            self.marks = {writer: mark for writer, mark in self.marks.items() if writer in known}
            self.runs = {writer: run for writer, run in self.runs.items() if writer in known}
        if len(self.marks) > MANY_WRITERS and not self._has_warned:
            self._has_warned = True
            logging.warning(
                f"ding_store: {len(self.marks)} processes append to this run at a time. The learner's commits have "
                'room for about twice as many. Use fewer processes with more environments each'
            )

    def _pass(self, entry: Entry) -> None:
        self.num_epochs += self.cursor is None or self.cursor.epoch != entry.id.epoch
        self.cursor = entry.id

    def restore(self, note: Dict[str, Any]) -> None:
        """Continue at the offset that ``state`` returned in another process."""
        self.marks, self.runs = dict(note['marks']), dict(note.get('runs', {}))
        self._heads = note.get('heads', {})
        # Notes of versions before this one name no chain: then the place is known by its number alone.
        self.cursor = None if note['cursor'] is None else EntryId(*note['cursor']).chained(note.get('chain', ''))
        self.policy_versions, self.num_epochs = dict(note.get('policy_versions', {})), note.get('epochs', 1)
        self.num_rows, self.num_chunks = note['rows'], note['chunks']
        self.env_step, self.env_episode = note['env_step'], note['env_episode']
        self.num_passed = note.get('passed', note['chunks'])
        self.is_resumed = True


def offsets_in(note: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """Return the state of each partition in the note of a learner's table, in the order of the partitions."""
    return [dict(note), *note.get(OTHERS, {}).values()]


def _of_run(entry: Entry, run: int) -> Entry:
    """Return the entry with ``run`` in the upper bits of its ``env_data_id``."""
    ids, offset = entry.arrays.get(ENV_ID), run % _MAX_RUNS << _RUN_BITS
    if run and is_pickled(entry):
        offsets = entry.header[OFFSETS]
        offsets = {**offsets, ENV_ID: offsets.get(ENV_ID, 0) + offset}
        return replace(entry, header={**entry.header, OFFSETS: offsets})
    if not run or ids is None or ids.dtype != np.int64:
        return entry
    return replace(entry, arrays={**entry.arrays, ENV_ID: ids + np.int64(offset)})


def is_of_run(buffer_: StoreBuffer, run: Optional[str]) -> bool:
    """Return True if the buffer's rows belong to this run, or to none because the user put them there."""
    note = buffer_.committed or {}
    return note.get('run', run) == run
