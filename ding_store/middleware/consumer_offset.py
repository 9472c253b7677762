"""How far a learner is in its run's experience: committed with the rows that it made of it, so that both survive."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Dict, Optional

import numpy as np
from ditk import logging

from ding_store.buffer.store_buffer import StoreBuffer
from ding_store.middleware.pickled_chunks import OFFSETS, is_pickled
from ding_store.storage.base import Entry, EntryId, Store
from ding_store.storage.exactly_once.reader import Reader

if TYPE_CHECKING:
    from ding_store.middleware.ingest_plan import Replay

#: The leaf that says whose steps belong together: DI-engine's, another one for each episode of a collector.
ENV_ID = 'env_data_id'
#: Where it has which run of its collector it is, above the collector's own number.
_RUN_BITS, _MAX_RUNS = 48, 1 << 15


#: So many writers at a time fill half of the note that is committed with rows.
MANY_WRITERS = 8000


class ConsumerOffset:
    """
    Overview:
        Counts what was taken of the stream. With ``keep_in`` the replay becomes a table with a path, and the counts and
        the writers' marks are its note: a learner that is started again goes on behind the last row that is in it.
    Attributes:
        - marks (:obj:`Dict[str, int]`): writer -> highest sequence that was taken.
        - runs (:obj:`Dict[str, int]`): writer -> the sequence behind its last loss; see ``take``.
        - num_epochs (:obj:`int`): Of the stream, that entries were taken of.
        - policy_versions (:obj:`Dict[str, int]`): The newest that entries were collected with, by name.
        - cursor (:obj:`Optional[EntryId]`): The last entry that was taken.
        - num_rows, num_chunks, env_step, env_episode (:obj:`int`): In all lives of the learner.
        - is_resumed (:obj:`bool`): Whether there were lives before this one.
    """

    def __init__(self) -> None:
        self.marks: Dict[str, int] = {}
        self.runs: Dict[str, int] = {}
        self.policy_versions: Dict[str, int] = {}
        self.num_epochs = 0
        self.cursor: Optional[EntryId] = None
        self.num_rows = self.num_chunks = self.env_step = self.env_episode = 0
        self.is_resumed = False
        self._replay: Optional[Replay] = None
        self._run = ''
        self._heads: Dict[str, Any] = {}  # of the reader of the life before this one
        self._reader: Optional[Reader] = None
        self._has_warned = False

    def keep_in(self, replay: Replay, path: str, run: Optional[str]) -> None:
        """
        Arguments:
            - path (:obj:`str`): Of the table, unless the buffer has one.
            - run (:obj:`Optional[str]`): Rows of another run, which has ended, are deleted. None: without checkpoints
              rows survive, but no position, since the model does not either.
        """
        buffer_ = replay.buffer
        if not isinstance(buffer_, StoreBuffer):
            logging.warning(
                f'ding_store: the replay is a {type(buffer_).__name__} and goes with its process: a learner that '
                'is started again has its model, but no experience'
            )
            return
        if buffer_._middleware:
            logging.warning(
                'ding_store: the buffer has middleware, so elements are pushed one by one: a learner that is killed in '
                'the middle of a chunk has a part of it twice when it is started again'
            )
        if buffer_.table.table_dir is None:
            buffer_.keep_in(path)
        if run is None:
            return
        self._replay, self._run = replay, run
        if not is_of_run(buffer_, run):
            logging.info(f'ding_store: deleting {buffer_.count()} rows of the run before')
            buffer_.clear()
        elif 'marks' in (buffer_.committed or {}):
            self._restore(buffer_.committed or {})

    def reader(self, store: Store, stream: str, name: str, **options: Any) -> Reader:
        """Of the stream, behind what was taken; what it has heard of is kept with the marks."""
        self._reader = Reader(store, stream, name, marks=self.marks, heads=self._heads, **options)
        return self._reader

    def take(self, entry: Entry) -> Entry:
        """
        Overview:
            This entry is about to become rows: returns it as they are to be. Behind entries of its writer that never
            came, ``env_data_id`` is another one: steps before and after them are no neighbours, in whatever groups. So
            it is with a writer that is new in a later epoch: a server that lost its memory numbers collectors from 0.
        """
        self._pass(entry)
        if entry.writer not in self.marks and self.num_epochs > 1:
            self.runs[entry.writer] = 1 - self.num_epochs  # from the top, where losses do not come to
        if entry.sequence > self.marks.get(entry.writer, 0) + 1:
            self.runs[entry.writer] = entry.sequence
        self.marks[entry.writer] = entry.sequence
        self.num_chunks += 1
        for name, key in (('num_rows', 'rows'), ('env_step', 'env_step'), ('env_episode', 'env_episode')):
            setattr(self, name, getattr(self, name) + entry.header[key])
        for name, version in entry.header.get('policy_versions', {}).items():
            self.policy_versions[name] = max(version, self.policy_versions.get(name, 0))
        return _of_run(entry, self.runs.get(entry.writer, 0))

    def skip(self, entry: Entry) -> None:
        """This entry will never become rows."""
        self._pass(entry)

    def note(self) -> Optional[Dict[str, Any]]:
        """What is to be committed with the rows of what was taken; None where nothing is kept."""
        if self._replay is None:
            return None
        self._drop_departed()
        counts = dict(rows=self.num_rows, chunks=self.num_chunks, env_step=self.env_step, env_episode=self.env_episode)
        cursor, chain = (None, '') if self.cursor is None else (list(self.cursor), self.cursor.chain)
        states = dict(marks=dict(self.marks), runs=dict(self.runs), policy_versions=dict(self.policy_versions))
        heads = self._heads if self._reader is None else self._reader.heads(self.marks)
        return dict(run=self._run, cursor=cursor, chain=chain, epochs=self.num_epochs, heads=heads, **states, **counts)

    def leave_note(self, is_open: bool) -> None:
        """Let the next push commit it, or ``commit``; ``is_open`` is False when the last push has."""
        if self._replay is not None:
            self._replay.note = self.note() if is_open else None

    def commit(self) -> None:
        """Commit the note where there was nothing to push, or the pusher left it to us."""
        note = None if self._replay is None else self._replay.take_note()
        if note is not None and self._replay is not None:
            self._replay.buffer.commit(note)

    def _drop_departed(self) -> None:
        """Writers of which nothing can come any more."""
        if self._reader is not None:
            known = self._reader.marks
            self.marks = {writer: mark for writer, mark in self.marks.items() if writer in known}
            self.runs = {writer: run for writer, run in self.runs.items() if writer in known}
        if len(self.marks) > MANY_WRITERS and not self._has_warned:
            self._has_warned = True
            logging.warning(
                f'ding_store: {len(self.marks)} processes append to this run at a time; what the learner commits with '
                'its rows has room for about twice as many: let each of them have more environments'
            )

    def _pass(self, entry: Entry) -> None:
        self.num_epochs += self.cursor is None or self.cursor.epoch != entry.id.epoch
        self.cursor = entry.id

    def _restore(self, note: Dict[str, Any]) -> None:
        self.marks, self.runs = dict(note['marks']), dict(note.get('runs', {}))
        self._heads = note.get('heads', {})
        # Notes of versions before this one name no chain: then the place is known by its number alone.
        self.cursor = None if note['cursor'] is None else EntryId(*note['cursor']).chained(note.get('chain', ''))
        self.policy_versions, self.num_epochs = dict(note.get('policy_versions', {})), note.get('epochs', 1)
        self.num_rows, self.num_chunks = note['rows'], note['chunks']
        self.env_step, self.env_episode = note['env_step'], note['env_episode']
        self.is_resumed = True


def _of_run(entry: Entry, run: int) -> Entry:
    ids, offset = entry.arrays.get(ENV_ID), run % _MAX_RUNS << _RUN_BITS
    if run and is_pickled(entry):
        offsets = entry.header[OFFSETS]
        offsets = {**offsets, ENV_ID: offsets.get(ENV_ID, 0) + offset}
        return replace(entry, header={**entry.header, OFFSETS: offsets})
    if not run or ids is None or ids.dtype != np.int64:
        return entry
    return replace(entry, arrays={**entry.arrays, ENV_ID: ids + np.int64(offset)})


def is_of_run(buffer_: StoreBuffer, run: Optional[str]) -> bool:
    """Whether rows in a buffer with a path are this run's, or nobody's: put there by its user to begin with."""
    note = buffer_.committed or {}
    return note.get('run', run) == run
