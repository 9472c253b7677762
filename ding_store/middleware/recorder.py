"""Recording of a run: a reader that writes each entry to a data set, and the process that a learner starts for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from ditk import logging

from ding_store.config import StoreConfig, holds_password
from ding_store.datasets.segment_log import PIECE
from ding_store.datasets.writer import DataSetWriter
from ding_store.errors import CorruptPayload
from ding_store.gc_freeze import leave_out_for_good
from ding_store.middleware.chunks import ChunkDecoder, meta_of, narrowed_in
from ding_store.middleware.consumer_offset import OTHERS, ConsumerOffset, offsets_in
from ding_store.middleware.partitions import PIECES
from ding_store.middleware.ragged_chunks import items_in
from ding_store.middleware.read_ahead import ReadAhead
from ding_store.parent_death import end_with
from ding_store.run.members import Members
from ding_store.run.recording import as_member, node_id, reader_name
from ding_store.run.session import RunSession
from ding_store.run.several_learners import stream_of
from ding_store.run.waiting import SLICE_S
from ding_store.storage.base import Entry, EntryId
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.store import Store

#: A durable recorder reads about so often. Each read costs the CPU more than each entry of it.
REST_S = 0.1
#: A recorder holds at most this many bytes that it has read and not written yet.
MAX_BYTES = 256 << 20
#: How long a recorder waits at the run's end for collectors that still append their last chunk.
LAST_CHUNKS_S = 3.0
#: How long a learner waits at the run's end for its recorder.
_LEAVE_S = 30.0


class Recorder:
    """
    Overview:
        Writes each entry of a run's experience to a data set. The rows and the positions in all partitions are
        committed together, so a recorder that was killed goes on where it was. Rows of several partitions follow each
        other as they come. Those of one episode stay in order, or have metas that say it: see ``PIECES``.
    Arguments:
        - run (:obj:`str`): The run's name. A position that another run committed does not count.
        - path (:obj:`str`): Directory of the data set.
        - durable (:obj:`bool`): The run keeps entries until they are recorded.
        - num_partitions (:obj:`int`): Number of partitions of the run's experience.
    Raises:
        - TableLocked: Another process writes to this data set.
    """

    def __init__(self, store: Store, run: str, path: str, durable: bool, num_partitions: int = 1) -> None:
        self._store, self._run, self._path, self._durable = store, run, path, durable
        self._decoder = ChunkDecoder()
        parts = [_Part(stream_of(i, num_partitions)) for i in range(num_partitions)]
        self._parts = {part.stream: part for part in parts}
        self._writer = DataSetWriter(path)
        state = self._writer.state
        found = offsets_in(state) if state is not None and state.get('run') == run else []
        if len(found) == num_partitions:  # otherwise the run was distributed anew, and its streams are others
            for part, offset in zip(parts, found):
                part.offset.restore(offset)
            self._writer.resume()
        self._first_row = self._writer.num_rows
        # Retention does not wait for a reader that is not durable, so its entries are copied at once.
        options: Any = dict(durable=durable, on_corrupt='skip', copied=not durable)
        for part in parts:
            part.reader = part.offset.reader(store, part.stream, reader_name(path), **options)
        self._states = {part.stream: part.offset.state() for part in parts}
        news = threading.Condition()
        limits: Any = dict(max_bytes=MAX_BYTES // num_partitions, rest_s=REST_S if durable else 0.0)
        self._aheads = [ReadAhead(part.reader, news=news, **limits) for part in parts]
        self._num_acked = 0
        self._is_closed = False

    def record(
        self, session: RunSession, max_rows: Optional[int] = None, is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Record until the run ends, until there are ``max_rows`` rows, or until ``is_stopped``. Then close."""
        try:
            self._record(session, max_rows, is_stopped)
        finally:
            self.close()

    def _record(self, session: RunSession, max_rows: Optional[int], is_stopped: Callable[[], bool]) -> None:
        while not session.finished:
            self._write(self._take(64, SLICE_S))
            session.figures(rows=self.num_rows, lost=self._num_lost, corrupt=self._num_corrupt)
            if is_stopped() or (max_rows is not None and self.num_rows >= max_rows):
                return
        Members(self._store).wait_until_left('collector', LAST_CHUNKS_S)
        self._write(self._rest())

    def _take(self, max_entries: int, timeout_s: float) -> List[Entry]:
        """Return the next entries of each partition. Wait for the first one of any."""
        ReadAhead.wait_for_any(self._aheads, timeout_s)
        return [entry for ahead in self._aheads for entry in ahead.take(max_entries, 0.0)]

    def _rest(self) -> List[Entry]:
        """Stop the threads, and return what is in the streams now."""
        self._wake()
        return [entry for ahead in self._aheads for entry in ahead.rest()]

    def _wake(self) -> None:
        for ahead in self._aheads:
            ahead.wake()

    @property
    def num_rows(self) -> int:
        """Rows that this process has committed."""
        return self._writer.num_rows - self._first_row

    @property
    def num_entries(self) -> int:
        """Entries that this process has read, and those of the recorder that it continues."""
        return sum(part.offset.num_chunks for part in self._parts.values())

    @property
    def _num_lost(self) -> int:
        return sum(part.reader.num_lost for part in self._parts.values())

    @property
    def _num_corrupt(self) -> int:
        return sum(part.reader.num_corrupt for part in self._parts.values())

    def _write(self, entries: List[Entry]) -> None:
        for entry in entries:
            part = self._parts[entry.stream]
            try:
                self._decoder.check(entry)
            except CorruptPayload as error:
                part.reader.pass_over(error)
                part.offset.skip(entry)
                continue
            taken = part.take(entry)
            state = self._state_after(part)
            if taken.header['rows']:
                columns, schema = self._decoder.columns(taken), self._decoder.schema(taken)
                narrowed, metas, items = narrowed_in(taken), _metas_of(taken), items_in(taken, schema)
                self._writer.append(columns, schema, narrowed, state=state, metas=metas, items=items)
            else:
                self._writer.note(state)
            self._ack()
        if not entries:
            self._writer.note(None)
            self._ack()

    def _state_after(self, part: _Part) -> Dict[str, Any]:
        """Return the state to commit with an entry of a partition: the positions in all of them."""
        self._states[part.stream] = part.offset.state()
        (_, first), *others = self._states.items()
        return {**first, 'run': self._run, **({OTHERS: dict(others)} if others else {})}

    def _ack(self) -> None:
        """Acknowledge the entries of the last commit: the run need not keep them any longer."""
        state = self._writer.state
        if self._durable and state is not None and self._writer.num_commits != self._num_acked:
            self._num_acked = self._writer.num_commits
            for part, offset in zip(self._parts.values(), offsets_in(state)):
                if offset['cursor'] not in (None, part.acked):
                    part.acked = offset['cursor']
                    part.reader.ack(EntryId(*offset['cursor']).chained(offset['chain']))

    def close(self) -> None:
        """Commit what was read, and let the run go on without this reader."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        # A process that is killed does not come here: a durable reader then stays, and the run keeps its entries.
        with contextlib.ExitStack() as stack:
            for part in self._parts.values():
                stack.callback(part.reader.forget)
            self._writer.close()

    def summary(self) -> str:
        """Return a line about what was recorded and what was skipped."""
        skipped = [
            f'{count} entries {why}'
            for count, why in (
                (self._num_lost, 'that it was too slow for'),
                (self._num_corrupt, 'that are damaged or hold Python objects'),
            )
            if count
        ]
        rows = f'recorded {self.num_rows} rows of {self.num_entries} entries into {self._path}'
        return f'{rows}; skipped {" and ".join(skipped)}' if skipped else f'{rows}; skipped nothing'


def _metas_of(entry: Entry) -> List[Tuple[int, Dict[str, int]]]:
    """Return the metas of an entry's rows, as runs of rows. Each piece of an episode has its own."""
    meta = meta_of([entry]) or {}
    if PIECES not in entry.header:
        return [(entry.header['rows'], meta)]
    return [(num_rows, {**meta, PIECE: first}) for num_rows, first in entry.header[PIECES]]


class _Part:
    """
    Overview:
        One partition, as a recorder reads it.
    Attributes:
        - acked (:obj:`Optional[list]`): The last place that was acknowledged.
    """

    reader: Reader

    def __init__(self, stream: str) -> None:
        self.stream, self.offset = stream, ConsumerOffset()
        self.acked: Optional[List[Any]] = None

    def take(self, entry: Entry) -> Entry:
        """Count an entry, and return it with the ``env_data_id`` that the rows must have."""
        taken = self.offset.take(entry)
        # After a loss, the numbers of pieces show which steps are no neighbours. Another ``env_data_id`` in this
        # partition would part these pieces from those in the others for good.
        return entry if PIECES in entry.header and self.offset.runs.get(entry.writer, 0) > 0 else taken


class RecorderProcess:
    """
    Overview:
        The recorder of a run with ``store.record``, in a process of its own. The learner starts it, starts it again if
        it is killed, and waits for it at the run's end. Rank 0 of several learners does that.
    Arguments:
        - session (:obj:`RunSession`): The learner's. No learner has read anything of the experience yet.
        - path (:obj:`str`): Directory of the data set.
    """

    def __init__(self, session: RunSession, path: str) -> None:
        self._config, self._path = session.config, os.path.abspath(path)
        num = session.num_partitions
        for partition in range(num):  # The run keeps entries from now on, before the recorder registers itself.
            session.store.register(stream_of(partition, num), reader_name(self._path), durable=True)
        # A fork has all modules: a new interpreter imports DI-engine for seconds, and a short run would be over.
        self._process: Union[_Fork, subprocess.Popen] = _Fork(partial(_record_in_fork, self._config, self._path, num))
        self._has_warned = False

    def look(self) -> None:
        """Start the recorder again if it was killed. It goes on where it was."""
        code = self._process.poll()
        if not code or self._has_warned:
            return
        if code < 0:
            logging.warning(f'ding_store: the recorder was killed by signal {-code}, and starts again')
            self._process = self._start_again()
            return
        self._has_warned = True
        logging.warning(
            f'ding_store: the recorder ended with exit code {code}, and {self._path} gets no more rows. The run goes '
            'on. Start it again with ding-store data record'
        )

    def _start_again(self) -> subprocess.Popen:
        """Start a new interpreter. By now, a fork would copy each page of the replay that this process changes."""
        words = ['data', 'record', '--durable', '--to', self._path, '--run', str(self._config.run)]
        # A URL with a password is only ever in the environment, which the new process inherits.
        words += [] if holds_password(self._config.url) else ['--store', self._config.url]
        return subprocess.Popen(
            [sys.executable, '-m', 'ding_store.cli', *words],
            stdin=subprocess.DEVNULL,
            # Killed, and not asked to end: the next learner's recorder goes on where this one was.
            preexec_fn=partial(end_with, os.getpid(), signal.SIGKILL),
        )

    def wait(self) -> None:
        """Wait until the recorder has written the last rows of an ended run."""
        self.look()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            logging.warning(
                f'ding_store: the recorder is not done after {_LEAVE_S:.0f} s: its last rows may be missing'
            )
            self._process.terminate()


class _Fork:
    """A forked process that runs a function, with the methods of ``Popen`` that are needed here."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._code: Optional[int] = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                end_with(parent, signal.SIGKILL)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's end also ends the recorder
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                leave_out_for_good()  # nng aborts a process that closes its parent's sockets
                torch.set_num_threads(1)  # the parent's threads are not here
                call()
                code = 0
            except BaseException as error:  # noqa: BLE001 - the process ends here
                logging.error(f'ding_store: the recorder failed: {error}')
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> Optional[int]:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> None:
        deadline, pause = time.monotonic() + timeout, threading.Event()
        while self.poll() is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired('recorder', timeout)
            pause.wait(0.02)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def _record_in_fork(config: StoreConfig, path: str, num_partitions: int) -> None:
    session = RunSession(as_member(config))
    with contextlib.closing(session):
        recorder = Recorder(session.store, str(config.run), path, True, num_partitions)
        session.join('recorder', node_id(path))
        recorder.record(session)
    logging.info(f'ding_store: {recorder.summary()}')
