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
from typing import Any, Callable, List, Optional, Union

import torch
from ditk import logging

from ding_store.config import StoreConfig, holds_password
from ding_store.datasets.writer import DataSetWriter
from ding_store.errors import CorruptPayload
from ding_store.gc_freeze import leave_out_for_good
from ding_store.middleware.chunks import ChunkDecoder, meta_of, narrowed_in
from ding_store.middleware.consumer_offset import ConsumerOffset
from ding_store.middleware.ragged_chunks import items_in
from ding_store.middleware.read_ahead import ReadAhead
from ding_store.parent_death import end_with
from ding_store.run.members import Members
from ding_store.run.recording import STREAM, as_member, node_id, reader_name
from ding_store.run.session import RunSession
from ding_store.run.waiting import SLICE_S
from ding_store.storage.base import Entry, EntryId
from ding_store.storage.store import Store

#: A recorder holds at most this many bytes that it has read and not written yet.
MAX_BYTES = 256 << 20
#: How long a recorder waits at the run's end for collectors that still append their last chunk.
LAST_CHUNKS_S = 3.0
#: How long a learner waits at the run's end for its recorder.
_LEAVE_S = 30.0


class Recorder:
    """
    Overview:
        Writes each entry of a run's experience to a data set. The rows and the position in the stream are committed
        together, so a recorder that was killed goes on where it was.
    Arguments:
        - run (:obj:`str`): The run's name. A position that another run committed does not count.
        - path (:obj:`str`): Directory of the data set.
        - durable (:obj:`bool`): The run keeps entries until they are recorded.
    Raises:
        - TableLocked: Another process writes to this data set.
    """

    def __init__(self, store: Store, run: str, path: str, durable: bool) -> None:
        self._store, self._run, self._path, self._durable = store, run, path, durable
        self._decoder, self._offset = ChunkDecoder(), ConsumerOffset()
        self._writer = DataSetWriter(path)
        state = self._writer.state
        if state is not None and state.get('run') == run:
            self._offset.restore(state)
            self._writer.resume()
        self._first_row = self._writer.num_rows
        # Retention does not wait for a reader that is not durable, so its entries are copied at once.
        options: Any = dict(durable=durable, on_corrupt='skip', copied=not durable)
        self._reader = self._offset.reader(store, STREAM, reader_name(path), **options)
        self._ahead = ReadAhead(self._reader, max_bytes=MAX_BYTES)
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
            self._write(self._ahead.take(64, SLICE_S))
            session.figures(rows=self.num_rows, lost=self._reader.num_lost, corrupt=self._reader.num_corrupt)
            if is_stopped() or (max_rows is not None and self.num_rows >= max_rows):
                return
        Members(self._store).wait_until_left('collector', LAST_CHUNKS_S)
        self._ahead.wake()
        self._write(self._ahead.rest())

    @property
    def num_rows(self) -> int:
        """Rows that this process has committed."""
        return self._writer.num_rows - self._first_row

    def _write(self, entries: List[Entry]) -> None:
        for entry in entries:
            try:
                self._decoder.check(entry)
            except CorruptPayload as error:
                self._reader.pass_over(error)
                self._offset.skip(entry)
                continue
            taken = self._offset.take(entry)
            state = {**self._offset.state(), 'run': self._run}
            if taken.header['rows']:
                columns, schema = self._decoder.columns(taken), self._decoder.schema(taken)
                items = items_in(taken, schema)
                self._writer.append(columns, schema, narrowed_in(taken), meta_of([taken]), state, items)
            else:
                self._writer.note(state)
            self._ack()
        if not entries:
            self._writer.note(None)
            self._ack()

    def _ack(self) -> None:
        """Acknowledge the entries of the last commit: the run need not keep them any longer."""
        state = self._writer.state
        if self._durable and state is not None and self._writer.num_commits != self._num_acked:
            self._num_acked = self._writer.num_commits
            self._reader.ack(EntryId(*state['cursor']).chained(state['chain']))

    def close(self) -> None:
        """Commit what was read, and let the run go on without this reader."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ahead.wake()
        try:
            self._writer.close()
        finally:
            # A process that is killed does not come here: a durable reader then stays, and the run keeps its entries.
            self._reader.forget()

    def summary(self) -> str:
        """Return a line about what was recorded and what was skipped."""
        skipped = [
            f'{count} entries {why}'
            for count, why in (
                (self._reader.num_lost, 'that it was too slow for'),
                (self._reader.num_corrupt, 'that are damaged or hold Python objects'),
            )
            if count
        ]
        rows = f'recorded {self.num_rows} rows of {self._offset.num_chunks} entries into {self._path}'
        return f'{rows}; skipped {" and ".join(skipped)}' if skipped else f'{rows}; skipped nothing'


class RecorderProcess:
    """
    Overview:
        The recorder of a run with ``store.record``, in a process of its own. The learner starts it, starts it again if
        it is killed, and waits for it at the run's end.
    Arguments:
        - session (:obj:`RunSession`): The learner's. It has read nothing of the stream yet.
        - path (:obj:`str`): Directory of the data set.
    """

    def __init__(self, session: RunSession, path: str) -> None:
        self._config, self._path = session.config, os.path.abspath(path)
        # The run keeps entries from now on, before the recorder registers itself.
        session.store.register(STREAM, reader_name(self._path), durable=True)
        # A fork has all modules: a new interpreter imports DI-engine for seconds, and a short run would be over.
        self._process: Union[_Fork, subprocess.Popen] = _Fork(partial(_record_in_fork, self._config, self._path))
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


def _record_in_fork(config: StoreConfig, path: str) -> None:
    session = RunSession(as_member(config))
    with contextlib.closing(session):
        recorder = Recorder(session.store, str(config.run), path, durable=True)
        session.join('recorder', node_id(path))
        recorder.record(session)
    logging.info(f'ding_store: {recorder.summary()}')
