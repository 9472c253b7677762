"""Writes a data set: rows go to the end of its last segment, and count when the segment's log has their commit."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from types import TracebackType
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import numpy as np

from ding_store import private_files
from ding_store.buffer.array_types import Array
from ding_store.columns import Schema
from ding_store.columns.ragged import Names, check_items, joined_items
from ding_store.datasets.layout import Layout
from ding_store.datasets.segment_log import PIECE, Commit, SegmentLog, create_log, line, read_log
from ding_store.errors import ConfigError, CorruptPayload, NotEnoughSpace, TableLocked
from ding_store.free_space import format_bytes, free_space
from ding_store.power_cuts import sync_directory
from ding_store.storage.encoding.checksum import checksum
from ding_store.storage.shared_memory.mapped_files import claim

#: Names of a segment's files: its log, its rows, and the items of their ragged leaves if they have some.
LOG, ROWS, ITEMS = '.log', '.rows', '.items'
#: A segment ends at this size, so that damage to a file costs a part of the data set.
SEGMENT_BYTES = 1 << 30
#: Rows are committed when they take this many bytes, or after this time.
COMMIT_BYTES, COMMIT_S = 16 << 20, 1.0
_LOCK = 'lock'


def segment_names(path: str) -> List[str]:
    """Return the names of a data set's segments, in order."""
    names = [name[: -len(LOG)] for name in os.listdir(path) if name.endswith(LOG)]
    return sorted(name for name in names if name.isascii() and name.isdigit())


class DataSetWriter:
    """
    Overview:
        Appends rows to a data set on the disk, and creates it if there is none. Rows are durable from their commit on,
        together with the state that their ``append`` gave. After a crash, the data set ends with the last commit, and
        ``state`` is the state of that commit. One process at a time writes. Others may read meanwhile.
    Arguments:
        - path (:obj:`str`): The directory.
        - segment_bytes (:obj:`int`): Size at which a new segment begins.
        - commit_bytes (:obj:`int`): Rows are committed when they take this many bytes.
        - commit_s (:obj:`float`): Rows are committed when the last commit is this many seconds ago.
    Attributes:
        - state (:obj:`Optional[dict]`): The state of the last commit.
        - num_rows (:obj:`int`): Rows that are committed.
        - num_commits (:obj:`int`): Commits of this writer.
    Raises:
        - ConfigError: The directory holds other files.
        - TableLocked: Another writer has it open.
        - CorruptPayload: Its last segment is damaged.
        - NotEnoughSpace: The disk is full. Rows of earlier commits stay.
    """

    def __init__(
        self,
        path: str,
        segment_bytes: int = SEGMENT_BYTES,
        commit_bytes: int = COMMIT_BYTES,
        commit_s: float = COMMIT_S,
    ) -> None:
        if segment_bytes < 1 or commit_bytes < 1:
            raise ConfigError(f'segment_bytes ({segment_bytes}) and commit_bytes ({commit_bytes}) must be at least 1')
        self.path = private_files.directory(os.fspath(path))
        self._segment_bytes, self._commit_bytes, self._commit_s = segment_bytes, commit_bytes, commit_s
        _check_is_data_set(self.path)
        lock = os.path.join(self.path, _LOCK)
        private_files.touch(lock)
        self._lock = claim(lock)
        if self._lock is None:
            raise TableLocked(f'the data set in {self.path!r} is being written already. Stop that writer first.')
        self.num_rows = self.num_commits = 0
        self.state: Optional[Dict[str, Any]] = None
        self._layout: Optional[Layout] = None
        self._rows_file = self._log_file = self._items_file = -1
        # Of the open segment, up to its last commit.
        self._segment_rows = self._log_bytes = self._item_bytes = 0
        self._number = 0  # of the open segment
        self._pending: List[Array] = []
        self._pending_items: List[Array] = []
        self._pending_bytes = self._pending_item_bytes = 0
        self._metas: List[Tuple[int, Dict[str, int]]] = []
        self._next_state: Optional[Dict[str, Any]] = None
        self._begins = True
        self._committed_at = time.monotonic()
        try:
            self._recover()
        except BaseException:
            self._lock.close()
            raise

    def resume(self) -> None:
        """Continue the recording of the last commit: episodes that are open there go on with the next rows."""
        self._begins = self.num_rows == 0

    def append(
        self,
        columns: Mapping[str, Any],
        schema: Schema,
        narrowed: Collection[str] = (),
        meta: Optional[Mapping[str, int]] = None,
        state: Optional[Dict[str, Any]] = None,
        metas: Optional[Sequence[Tuple[int, Mapping[str, int]]]] = None,
        items: Optional[Mapping[str, Array]] = None,
    ) -> None:
        """
        Overview:
            Append rows. They are copied before this returns. Commit them now if many rows or much time have passed.
        Arguments:
            - columns (:obj:`Mapping`): Name -> values ``(n, *shape)``, as the schema encodes them. For ragged leaves,
              the lengths.
            - narrowed (:obj:`Collection[str]`): Columns of float32 values k/255 that are passed as the bytes k.
            - meta (:obj:`Optional[Mapping]`): The meta of these rows, such as ``{'policy_version': 3}``.
            - state (:obj:`Optional[dict]`): JSON-able, committed with the rows. A later writer finds it in ``state``.
            - metas (:obj:`Optional[Sequence]`): In place of ``meta``: (number of rows, their meta) of each run.
            - items (:obj:`Optional[Mapping]`): Ragged leaf -> the items of all these rows, one row after another.
        Raises:
            - SchemaMismatch: The columns or items are not those of the schema.
        """
        num_rows = len(next(iter(columns.values())))
        schema.check(columns, num_rows, narrowed)
        items = items or {}
        check_items(schema.ragged, columns, items)
        if self._layout is None or not self._layout.fits(schema, narrowed) or self._is_full():
            self.flush()
            self._begin_segment(Layout(schema, narrowed))
        assert self._layout is not None
        items_at = self._item_bytes + self._pending_item_bytes
        self._pending.append(self._layout.encode(columns, num_rows, narrowed, items_at))
        self._pending_bytes += self._pending[-1].nbytes
        for name in self._layout.schema.ragged:
            self._pending_items.append(np.array(items[name]).reshape(-1).view(np.uint8))
            self._pending_item_bytes += self._pending_items[-1].nbytes
        for count, each in [(num_rows, meta or {})] if metas is None else metas:
            self._note_meta(count, dict(each))
        self.note(state)

    def append_elements(
        self, elements: List[Any], meta: Optional[Mapping[str, int]] = None, ragged: Names = ()
    ) -> None:
        """
        Overview:
            Append elements, whose schema is inferred from all of them together. See ``append``.
        Arguments:
            - ragged (:obj:`Union[str, Collection]`): Names of leaves whose first dimension varies, or 'all'.
        """
        if elements:
            schema = Schema.infer(elements, ragged=ragged)
            columns, rows = schema.encode_ragged(elements)
            self.append(columns, schema, meta=meta, items=joined_items(schema.ragged, rows))

    def note(self, state: Optional[Dict[str, Any]]) -> None:
        """Set the state of the next commit without any rows. Commit if it is time for that."""
        self._next_state = self._next_state if state is None else state
        num_bytes = self._pending_bytes + self._pending_item_bytes
        if num_bytes >= self._commit_bytes or time.monotonic() - self._committed_at >= self._commit_s:
            self.flush()

    def flush(self) -> None:
        """Commit what was appended and noted. When this returns, it survives a crash and a power cut."""
        self._committed_at = time.monotonic()
        num_rows = sum(map(len, self._pending))
        is_new = self._next_state is not None and self._next_state != self.state
        if self._layout is None or not (num_rows or is_new):
            return
        parts = [records.view(np.uint8).data for records in self._pending]
        items = [each.data for each in self._pending_items]
        state = self.state if self._next_state is None else self._next_state
        commit = Commit(
            num_rows,
            checksum(parts, self._pending_bytes),
            self._metas,
            state,
            self._begins and num_rows > 0,
            self._pending_item_bytes,
            checksum(items, self._pending_item_bytes),
        )
        try:
            if self._pending_item_bytes:
                self._write(self._items_file, items, self._item_bytes)
                os.fdatasync(self._items_file)
            if num_rows:
                self._write(self._rows_file, parts, self._segment_rows * self._layout.row_bytes)
                os.fdatasync(self._rows_file)
            text = line(commit.to_json())
            # At the end of the last commit: an interrupt may have come behind this write before.
            self._write(self._log_file, [text], self._log_bytes)
            os.ftruncate(self._log_file, self._log_bytes + len(text))
            os.fdatasync(self._log_file)
        except OSError as error:
            self._cut_back()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = format_bytes(free_space(self.path))
                raise NotEnoughSpace(
                    errno.ENOSPC,
                    f'no room for {num_rows} rows of the data set in {self.path!r}, which has {free} free. Free some '
                    'space and record again: the data set ends with its last commit.',
                ) from error
            raise
        self._log_bytes += len(text)
        self._segment_rows += num_rows
        self._item_bytes += self._pending_item_bytes
        self.num_rows += num_rows
        self.num_commits += 1
        self.state, self._next_state = state, None
        self._begins = self._begins and num_rows == 0
        self._drop_pending()

    def _drop_pending(self) -> None:
        self._pending, self._pending_items, self._metas = [], [], []
        self._pending_bytes = self._pending_item_bytes = 0

    def discard(self) -> None:
        """Remove all segments, and what was not committed. The writer is closed."""
        self._drop_pending()
        self._next_state = None
        self._close_segment()
        for name in segment_names(self.path):
            # The log goes first: rows without a log do not count.
            os.unlink(self._file(name, LOG))
            os.unlink(self._file(name, ROWS))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._file(name, ITEMS))
        self.close()

    def close(self) -> None:
        """Commit, and let other processes write. May be called twice."""
        if self._lock is None:
            return
        try:
            self.flush()
        finally:
            self._close_segment()
            lock, self._lock = self._lock, None
            lock.close()

    def __enter__(self) -> DataSetWriter:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def _is_full(self) -> bool:
        assert self._layout is not None
        row_bytes = self._segment_rows * self._layout.row_bytes + self._pending_bytes
        return row_bytes + self._item_bytes + self._pending_item_bytes >= self._segment_bytes

    def _note_meta(self, num_rows: int, meta: Dict[str, int]) -> None:
        if self._metas and self._metas[-1][1] == meta and PIECE not in meta:
            self._metas[-1] = (self._metas[-1][0] + num_rows, meta)
        else:
            self._metas.append((num_rows, meta))

    def _recover(self) -> None:
        """Open the last segment, cut off what a crash left after its last commit, and take its state."""
        names = segment_names(self.path)
        for name in os.listdir(self.path):
            # A crash may leave a log that is not whole, or rows whose log was not created.
            stem, ending = os.path.splitext(name)
            if name.endswith(f'{LOG}.new') or (ending in (ROWS, ITEMS) and stem not in names):
                os.unlink(os.path.join(self.path, name))
        logs: Dict[str, SegmentLog] = {}
        for name in names:
            try:
                logs[name] = read_log(self._file(name, LOG))
            except CorruptPayload:
                if name == names[-1]:
                    raise
        self.num_rows = sum(log.num_rows for log in logs.values())
        self._number = int(names[-1]) + 1 if names else 0
        states = [commit.state for log in logs.values() for commit in log.commits if commit.state is not None]
        self.state = states[-1] if states else None
        if not names:
            return
        last = logs[names[-1]]
        self._number = int(names[-1])
        self._open_segment(names[-1], last.layout)
        self._segment_rows, self._log_bytes, self._item_bytes = last.num_rows, last.num_bytes, last.item_bytes
        kinds = {ROWS: (self._rows_file, self._segment_rows * last.layout.row_bytes)}
        if last.layout.schema.ragged:
            kinds[ITEMS] = self._items_file, self._item_bytes
        for kind, (descriptor, num_bytes) in kinds.items():
            size = os.fstat(descriptor).st_size
            if size < num_bytes:
                self._close_segment()
                raise CorruptPayload(
                    f'{self._file(names[-1], kind)!r} has {size} bytes, and its log says {num_bytes}. Record into '
                    'another directory.'
                )
        self._cut_back()

    def _begin_segment(self, layout: Layout) -> None:
        if self._layout is not None and self._segment_rows:
            self._number += 1
        self._close_segment()
        name = f'{self._number:06d}'
        for kind in (ROWS, ITEMS) if layout.schema.ragged else (ROWS,):
            os.close(private_files.create(self._file(name, kind)))
        create_log(self._file(name, LOG), layout)
        sync_directory(self.path)
        self._open_segment(name, layout)
        self._segment_rows, self._log_bytes, self._item_bytes = 0, os.fstat(self._log_file).st_size, 0

    def _open_segment(self, name: str, layout: Layout) -> None:
        self._layout = layout
        self._rows_file = private_files.opener(self._file(name, ROWS), os.O_RDWR)
        self._log_file = private_files.opener(self._file(name, LOG), os.O_RDWR)
        if layout.schema.ragged:
            self._items_file = private_files.opener(self._file(name, ITEMS), os.O_RDWR)

    def _close_segment(self) -> None:
        for descriptor in (self._rows_file, self._log_file, self._items_file):
            if descriptor >= 0:
                os.close(descriptor)
        self._rows_file = self._log_file = self._items_file = -1
        self._layout = None

    def _cut_back(self) -> None:
        """Remove what is after the last commit: a write that failed, or that a crash cut short."""
        assert self._layout is not None
        os.ftruncate(self._log_file, self._log_bytes)
        os.ftruncate(self._rows_file, self._segment_rows * self._layout.row_bytes)
        if self._items_file >= 0:
            os.ftruncate(self._items_file, self._item_bytes)

    def _write(self, descriptor: int, parts: List[Any], offset: int) -> None:
        for part in parts:
            view = memoryview(part).cast('B')
            while len(view):
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written

    def _file(self, name: str, kind: str) -> str:
        return os.path.join(self.path, name + kind)


def _check_is_data_set(path: str) -> None:
    """Refuse a directory with files that no data set has, before anything in it is changed."""
    names = os.listdir(path)
    foreign = sorted(
        name for name in names if name != _LOCK and not name.split('.')[0].isdigit() or name.startswith('.')
    )
    if foreign:
        raise ConfigError(
            f'{path!r} is not the directory of a data set: it has {", ".join(map(repr, foreign[:3]))}. Name another '
            'one.'
        )
