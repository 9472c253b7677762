"""Recording of a run: a reader that writes each entry to a data set, and the process that a learner starts for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from typing import Any, List, Optional

from ditk import logging

from ding_store.config import StoreConfig
from ding_store.datasets.writer import DataSetWriter
from ding_store.environment import ENV_URL
from ding_store.errors import CorruptPayload
from ding_store.middleware.chunks import ChunkDecoder, meta_of, narrowed_in
from ding_store.middleware.consumer_offset import ConsumerOffset
from ding_store.middleware.read_ahead import ReadAhead
from ding_store.parent_death import end_with
from ding_store.run.members import Members
from ding_store.run.recording import STREAM, reader_name
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
        - name (:obj:`str`): Name of the reader.
    """

    def __init__(self, store: Store, run: str, path: str, name: str, durable: bool) -> None:
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
        self._reader = self._offset.reader(store, STREAM, name, **options)
        self._ahead = ReadAhead(self._reader, max_bytes=MAX_BYTES)
        self._num_acked = 0
        self._is_closed = False

    def run(self, session: RunSession, max_rows: Optional[int]) -> None:
        """Record until the run ends, or until there are ``max_rows`` rows."""
        while not session.finished:
            self._write(self._ahead.take(64, SLICE_S))
            session.figures(rows=self.num_rows, lost=self._reader.num_lost, corrupt=self._reader.num_corrupt)
            if max_rows is not None and self.num_rows >= max_rows:
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
                self._writer.append(columns, schema, narrowed_in(taken), meta_of([taken]), state)
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
    """

    def __init__(self, session: RunSession, path: str) -> None:
        self._config, self._path = session.config, os.path.abspath(path)
        # The recorder needs seconds to start. The run keeps entries for it from now on.
        session.store.register(STREAM, reader_name(self._path), durable=True)
        self._process = self._start()
        self._has_warned = False

    def _start(self) -> subprocess.Popen:
        config: StoreConfig = self._config
        words = ['data', 'record', '--durable', '--to', self._path, '--run', str(config.run)]
        # The URL may hold a password, which other users must not see.
        return subprocess.Popen(
            [sys.executable, '-m', 'ding_store.cli', *words],
            env={**os.environ, ENV_URL: config.url},
            stdin=subprocess.DEVNULL,
            # Killed, and not asked to end: the next learner's recorder goes on where this one was.
            preexec_fn=partial(end_with, os.getpid(), signal.SIGKILL),
        )

    def look(self) -> None:
        """Start the recorder again if it was killed. It goes on where it was."""
        code = self._process.poll()
        if code is None or self._has_warned:
            return
        if code < 0:
            logging.warning(f'ding_store: the recorder was killed by signal {-code}, and starts again')
            self._process = self._start()
            return
        self._has_warned = True
        logging.warning(
            f'ding_store: the recorder ended with exit code {code}, and {self._path} gets no more rows. The run goes '
            'on. Start it again with ding-store data record'
        )

    def wait(self) -> None:
        """Wait until the recorder has written the last rows of an ended run."""
        self.look()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            logging.warning(
                f'ding_store: the recorder is not done after {_LEAVE_S:.0f} s. Its last rows may be missing'
            )
            self._process.terminate()
