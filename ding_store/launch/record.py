"""``ding-store data record``: one more reader of a run's experience, which writes it to a data set."""

from __future__ import annotations

import contextlib
import sys
from typing import List, Optional

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, TableLocked
from ding_store.launch.log_lines import line
from ding_store.launch.printing import print_to
from ding_store.launch.status import check_known, check_running
from ding_store.launch.termination import signals_noted
from ding_store.run.ending import End, end_of
from ding_store.run.recording import as_member, node_id, reader_name
from ding_store.run.session import RunSession
from ding_store.run.several_learners import has_partitions, num_partitions_of, stream_of
from ding_store.storage.store import Store

#: How often a recorder looks whether the learner has fixed the number of partitions.
_LOOK_S = 0.05


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
        - ConfigError: The run is not running, or it ends before its learner begins to read.
        - TableLocked: Another process writes to this data set.
        - NotEnoughSpace: The disk is full. What was committed stays, and the run goes on without this recorder.
    """
    check_running(config)
    session = RunSession(as_member(config))
    with contextlib.closing(session):
        store, name = session.store, reader_name(path)
        check_known(store, config)
        streams = _streams(store, config, name)
        if durable:
            for stream in streams:
                store.register(stream, name, durable=True)  # from here on, before the import below takes seconds
        try:
            from ding_store.middleware.recorder import Recorder

            recorder = Recorder(store, str(config.run), path, durable, len(streams))
        except TableLocked:
            raise  # the reader belongs to the recorder that runs
        except BaseException:
            for stream in streams:
                store.forget(stream, name)
            raise
        session.join('recorder', node_id(path))
        how = 'each entry' if durable else 'what it is fast enough for'
        print_to(sys.stderr, line(f'recording {how} of run {config.run!r} into {path}\n', 'recorder'))
        with signals_noted() as is_stopped:  # an interrupt between rows and their position would double these rows
            recorder.record(session, max_rows, is_stopped)
        sys.stdout.write(recorder.summary() + '\n')
    return 0


def _streams(store: Store, config: StoreConfig, reader: str) -> List[str]:
    """
    Overview:
        Return the streams of all partitions, once the learner has fixed their number.
    Raises:
        - ConfigError: The run has ended, and has nothing left for this reader.
    """
    has_said = False
    while not has_partitions(store, _LOOK_S):
        _check_goes_on(config, end_of(store))
        if not has_said:
            print_to(sys.stderr, line(f'waiting until the learner of run {config.run!r} begins to read\n', 'recorder'))
            has_said = True
    num = num_partitions_of(store) or 1
    streams = [stream_of(partition, num) for partition in range(num)]
    found = [store.stream_info(stream) for stream in streams]
    if not any(info is not None and reader in info.readers for info in found):
        _check_goes_on(config, end_of(store))
    return streams


def _check_goes_on(config: StoreConfig, end: Optional[End]) -> None:
    if end is not None:
        raise ConfigError(f'run {config.run!r} has ended: {end.reason}')
