"""The end of a run: the values that announce it, the deletion of its data, and the start of a run of the same name."""

from __future__ import annotations

import contextlib
import logging
import uuid
from typing import Any, NamedTuple, Optional

from ding_store.config import StoreConfig
from ding_store.errors import CorruptPayload
from ding_store.run.foreign import fields_of, is_count, is_text
from ding_store.run.lease import Lease, Owner
from ding_store.run.members import Members
from ding_store.run.scale import SCALE
from ding_store.run.waiting import SLICE_S
from ding_store.storage.base import Header
from ding_store.storage.store import Store

logger = logging.getLogger(__name__)

FINISH, RETIRE = 'finish', 'retire'
#: A process that clears a run waits a few seconds for its members. After this time it counts as killed.
CLEAR_S = 30.0
#: A value that exists while the learner makes checkpoints. Crashed processes may then be restarted.
CHECKPOINTS = 'checkpoints'


class End(NamedTuple):
    """The end of a run, as its value says it."""

    reason: str
    failed: bool
    parent: Any = None  # ``members.parent_process`` of the process that ended it


def end_of(store: Store, timeout_s: float = 0.0) -> Optional[End]:
    """
    Overview:
        The end of a run; None while it goes on. One that another program put, without the fields of ours, counts as
        that of a failed run: so its data is kept.
    """
    value = store.get(FINISH, timeout_s=timeout_s)
    if value is None:
        return None
    reason, failed = value.header.get('reason'), value.header.get('failed')
    if isinstance(reason, str) and isinstance(failed, bool):
        return End(reason, failed, value.header.get('parent'))
    text = reason if isinstance(reason, str) and reason else 'no reason'
    return End(f'another program put the value {FINISH!r} ({text})', True)


def checkpoints_of(store: Store) -> Optional[Header]:
    """Return what the learner published about its checkpoints, or None."""
    return fields_of(store.get(CHECKPOINTS), {'path': is_text, 'max_restarts': is_count})


def retire(store: Store, heartbeat_s: float) -> None:
    """
    Overview:
        Delete all data of a run that ended in order, once its members have left. Its name is then free for a new run.
    """
    wait_until_left(store, heartbeat_s)
    store.retire(last=(FINISH, RETIRE))


def wait_until_left(store: Store, heartbeat_s: float) -> None:
    Members(store).wait_until_left(silent_s=silence_s(heartbeat_s))


def silence_s(heartbeat_s: float) -> float:
    """Return how many seconds a running member may take between two reports."""
    return max(3 * heartbeat_s, 2.0)


def clear_ended_run(store: Store, config: StoreConfig) -> None:
    """
    Overview:
        Prepare the store for a new run if an earlier one of this name has ended. If that one ended in order, delete all
        its data. If it failed, delete only its end and its wanted number of collectors, so that the new run continues
        with its experience, and hosts that wait for its launcher do so until that has decided the number.
    """
    owner = Owner.this_process(uuid.uuid4().hex)  # Another thread of this process is another owner.
    lease = Lease(store, RETIRE, owner, f'a process that clears it ({owner.place})', CLEAR_S)
    while end_of(store) is not None:
        if lease.try_acquire() is not None:  # another process clears the run: wait until FINISH is deleted
            lease.wait(SLICE_S)
            continue
        end = end_of(store)
        if lease.token > 1 and end is not None:
            logger.warning(f'ding_store: the process that was clearing run {store.run!r} is gone; clearing it again')
        if end is None:  # another process cleared the run, and gave the lease up, between the two looks
            store.delete(RETIRE)
        elif end.failed:
            logger.warning(f'ding_store: run {store.run!r} had failed ({end.reason}); going on with it')
            store.delete(SCALE)
            store.delete(FINISH)
            store.delete(RETIRE)
        else:
            wait_until_left(store, config.heartbeat_s)
            _finish_checkpoints(store, end.reason)
            store.clear(last=(FINISH, RETIRE))


def _finish_checkpoints(store: Store, reason: str) -> None:
    """Mark the run's checkpoint directory as finished, in case its learner was killed before it could do that."""
    found = checkpoints_of(store)
    if found is None:
        return
    from ding_store.checkpoint import CheckpointDir  # imports torch, which some callers do not need

    directory = CheckpointDir(found['path'])
    with contextlib.suppress(CorruptPayload):  # The next learner reports it.
        if directory.run == found.get('run'):  # else it belongs to another run, or is on another host
            directory.finish(reason)
