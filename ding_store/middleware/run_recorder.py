"""Records of a run, which its learner writes to TensorBoard, to the run's history, and to W&B if the script uses it."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from types import ModuleType
from typing import Any, Callable, Deque, Dict, List, Optional

from ding.framework import task
from ding.utils import DistributedWriter
from ditk import logging

from ding_store.buffer.store_buffer import StoreBuffer
from ding_store.errors import StoreError
from ding_store.metrics.figures import Figures
from ding_store.metrics.history import HistoryWriter
from ding_store.metrics.record import AXES, Record, record_of
from ding_store.middleware.ingest_plan import replay_figures
from ding_store.run.history import put_history
from ding_store.run.members import Members
from ding_store.run.session import RunSession
from ding_store.run.several_learners import stream_of
from ding_store.run.waiting import best_effort

#: Shortest time between two records. It grows to a thousandth of the run's time, so that histories stay small.
EVERY_S = 2.0
SHARE_OF_RUN = 1e-3
#: DI-engine's own tag of the return.
RETURN_TAG = 'basic/eval_episode_return_mean'


class Recorder:
    """
    Overview:
        Makes records of the figures of a run, and writes them. The history and TensorBoard's files lie in the directory
        of DI-engine's writer, the ``exp_name``. Without a writer (``ding_init``) there are no records.
    Arguments:
        - read (:obj:`Callable`): Returns the figures, and the bytes in each partition of the experience stream.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._writer: Any = DistributedWriter.get_instance()
        self.history = None if self._writer is None else _open_history(self._writer.logdir)
        self._began = self._recorded = time.monotonic()
        self._before = Figures()
        self._records: Deque[Record] = deque(maxlen=100)  # not written to TensorBoard yet

    @property
    def every_s(self) -> float:
        return max(EVERY_S, SHARE_OF_RUN * (time.monotonic() - self._began))

    def record(self) -> None:
        """Make a record, append it to the history, and keep it for ``write``."""
        if self._writer is None:
            return
        self._recorded = time.monotonic()
        figures, pending_bytes = self._read()
        record, self._before = record_of(self._before, figures, pending_bytes), figures
        if self.history is not None:
            try:
                self.history.append(record)
            except OSError as error:
                logging.warning(f'ding_store: the history ends here, {self.history.path} cannot be written: {error}')
                self.history = None
        self._records.append(record)

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._recorded >= self.every_s

    def write(self) -> None:
        """Write records to TensorBoard. Only the loop's thread calls it, because DI-engine's writer has no lock."""
        while self._records:
            record = self._records.popleft()
            step = record['env_step']
            for name, value in record.items():
                if name not in AXES:
                    self._writer.add_scalar(f'store/{name}', value, step)
            if 'eval_return' in record and task.router.is_active:  # else DI-engine's logger writes it
                self._writer.add_scalar(RETURN_TAG, record['eval_return'], record.get('eval_step', step))
            _write_to_wandb(record)

    def close(self) -> None:
        """Make the last record, and write all to the files."""
        try:
            self.record()
        except StoreError as error:
            logging.info(f'ding_store: no last record of the run: {error}')
        self.write()
        if self._writer is not None:
            self._writer.close()  # its ``flush`` leaves out what is queued. A later scalar opens another file
        if self.history is not None:
            self.history.close()
            self.history = None


def _open_history(directory: str) -> Optional[HistoryWriter]:
    """Open the history in a directory. If it cannot be written, log a warning and return None: the run goes on."""
    try:
        return HistoryWriter(directory)
    except OSError as error:
        logging.warning(f'ding_store: this run keeps no history, {directory} cannot be written: {error}')
        return None


def _write_to_wandb(record: Record) -> None:
    """Log a record to the run that the script's ``wandb_online_logger`` has started, under the logger's own names."""
    wandb = sys.modules.get('wandb')
    if type(wandb) is not ModuleType or getattr(wandb, 'run', None) is None:  # a deferred import has another type
        return
    logged: Dict[str, Any] = {f'store/{name}': value for name, value in record.items() if name not in AXES}
    if 'eval_return' in record and task.router.is_active:
        logged['episode return mean'] = record['eval_return']
    wandb.log({**logged, 'env step': record['env_step'], 'train iter': record['train_iter']}, commit=True)


class RunRecorder(Recorder):
    """
    Overview:
        The recorder of a learner or worker in a run with roles: a thread reads the reports of all members.
    Arguments:
        - has_experience (:obj:`bool`): The run has a stream of experience. A run of workers has none.
    """

    def __init__(self, session: RunSession, has_experience: bool = True) -> None:
        super().__init__(self._read_run)
        self._has_experience = has_experience
        self._session, self._members = session, Members(session.store)
        self._pending_bytes: List[int] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name='ding_store-records', daemon=True)
        if self.history is not None:
            put_history(session.store, self.history.path)
        if self._writer is not None:
            session.while_waiting.append(self.write)
            self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self.every_s):
            try:
                self.record()
            except StoreError as error:  # the session's own thread handles it
                logging.info(f'ding_store: no records of the run: {error}')
                return

    def _read_run(self) -> Any:
        with best_effort(self._session.store):
            self._members.refresh()
            if self._has_experience:
                num = self._session.num_partitions
                found = [self._session.store.stream_info(stream_of(i, num)) for i in range(num)]
                self._pending_bytes = [info.pending_bytes for info in found if info is not None]
        return Figures.of(self._members), self._pending_bytes

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if self._writer is not None:
            self._session.report_now()  # so that the last record has this process's figures of now
        super().close()


class LoopRecorder(Recorder):
    """The recorder of a process that trains alone: it makes records in its loop."""

    def __init__(self, session: RunSession, buffer_: Any) -> None:
        super().__init__(self._read_loop)
        self._session, self._buffer = session, buffer_
        self._ctx: Any = None
        self._began_step = self._began_iter = self._began_rows = 0

    def close(self) -> None:
        if self._ctx is not None:
            super().close()

    def iterated(self, ctx: Any) -> None:
        """Make a record of this iteration if one is due."""
        if self._ctx is None:
            self._began_step, self._began_iter = ctx.env_step, ctx.train_iter
            self._began_rows = self._num_inserted()
        self._ctx = ctx
        if self.is_due:
            self.record()
            self.write()

    def _num_inserted(self) -> int:
        return int(self._buffer.table.index.next_row) if isinstance(self._buffer, StoreBuffer) else 0

    def _read_loop(self) -> Any:
        ctx, session = self._ctx, self._session
        replay: Dict[str, Any] = replay_figures(self._buffer)
        seconds = {name[:-2]: value for name, value in session.time_spent.figures().items()}
        steps = ctx.env_step - self._began_step
        figures = Figures(
            env_step=ctx.env_step,
            train_iter=ctx.train_iter,
            learner='this process',
            learner_step=steps,
            learner_iter=ctx.train_iter - self._began_iter,
            rows_sampled=session.num_sampled,
            rows_inserted=self._num_inserted() - self._began_rows,
            learner_s=seconds,
            **replay,
        )
        return figures, []
