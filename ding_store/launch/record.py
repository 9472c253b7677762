"""``ding-store data record``: one more reader of a run's experience, which writes it to a data set."""

from __future__ import annotations

import contextlib
import sys
from typing import Optional

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, TableLocked
from ding_store.launch.log_lines import line
from ding_store.launch.printing import print_to
from ding_store.launch.status import check_known, check_running
from ding_store.launch.termination import signals_noted
from ding_store.run.ending import end_of
from ding_store.run.recording import STREAM, as_member, check_one_partition, node_id, reader_name
from ding_store.run.session import RunSession
from ding_store.run.several_learners import num_learners_of, num_partitions_of


def record(config: StoreConfig, path: str, durable: bool = False, max_rows: Optional[int] = None) -> int:
    """
    Overview:
        Record a run until it ends, until an interrupt, or until ``max_rows`` rows are recorded.
    Arguments:
        - path (:obj:`str`): Directory of the data set. If it has one, the rows are added to it.
        - durable (:obj:`bool`): The run keeps entries until they are recorded, also while no recorder runs. If False,
          entries that the recorder is too slow for are skipped and counted.
        - max_rows (:obj:`Optional[int]`): Stop after at least this many rows of this recording.
    Returns:
        - code (:obj:`int`): 0.
    Raises:
        - ConfigError: The run is not running.
        - TableLocked: Another process writes to this data set.
        - NotEnoughSpace: The disk is full. What was committed stays, and the run goes on without this recorder.
    """
    check_running(config)
    session = RunSession(as_member(config))
    with contextlib.closing(session):
        store, name = session.store, reader_name(path)
        check_known(store, config)
        end = end_of(store)
        check_one_partition(num_learners_of(store), num_partitions_of(store) or 1)
        stream = store.stream_info(STREAM) if end is not None else None
        if end is not None and (stream is None or name not in stream.readers):
            raise ConfigError(f'run {config.run!r} has ended: {end.reason}')
        if durable:
            store.register(STREAM, name, durable=True)  # from here on, before the import below takes seconds
        try:
            from ding_store.middleware.recorder import Recorder

            recorder = Recorder(store, str(config.run), path, durable)
        except TableLocked:
            raise  # the reader belongs to the recorder that runs
        except BaseException:
            store.forget(STREAM, name)
            raise
        session.join('recorder', node_id(path))
        how = 'each entry' if durable else 'what it is fast enough for'
        print_to(sys.stderr, line(f'recording {how} of run {config.run!r} into {path}\n', 'recorder'))
        with signals_noted() as is_stopped:  # an interrupt between rows and their position would double these rows
            recorder.record(session, max_rows, is_stopped)
        sys.stdout.write(recorder.summary() + '\n')
    return 0
