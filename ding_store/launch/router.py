"""DI-engine's router in a process that DI-engine did not start: active, with a node id and peers."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import List, Sequence

from ding_store.run.lease import SINGLE_ROLES, START_S, Lease, Owner
from ding_store.run.members import Members
from ding_store.storage.embedded.supervisor.sockets import make_socket_directory
from ding_store.storage.store import Store

#: First node id of each role in DI-engine's examples.
FIRST_IDS = {'learner': 0, 'evaluator': 1, 'collector': 2}
ROLES = tuple(FIRST_IDS)
#: The role of a process that runs a whole pipeline, and shares the updates of its policy with the other workers.
WORKER = 'worker'
#: First node id of processes that join. ``ditask`` may still start workers with lower ids.
FIRST_JOINED_ID = 100


def activate(node_id: int, listen_to: str, attach_to: Sequence[str], num_workers: int) -> None:
    """
    Overview:
        Make ``task.router`` active in this process. It listens and dials as a worker of ``ditask`` does.
    """
    from ding.framework import Parallel

    from ding_store.middleware.task_stop import spare_mesh_at_failure

    log_failed_dials_in_one_line()
    router = Parallel()
    router.is_active = True
    spare_mesh_at_failure()  # until the exchangers decide
    router._run(
        node_id=node_id,
        local_id=0,  # a worker's start is delayed by that many seconds
        n_parallel_workers=num_workers,
        listen_to=listen_to,
        attach_to=list(attach_to),
    )


def log_failed_dials_in_one_line() -> None:
    """Keep pynng's traceback for a peer that does not listen out of the log: DI-engine dials such a peer again."""
    logging.getLogger('pynng.nng').addFilter(_FAILED_DIAL)


class _FailedDial(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if type(error).__name__ == 'ConnectionRefused':  # pynng's own class
            record.exc_info, record.levelno, record.levelname = None, logging.INFO, 'INFO'
            record.msg, record.args = (
                'a process of this run does not listen: it starts, or it has ended. DI-engine goes on without it, and '
                'connects as soon as it listens',
                (),
            )
        return True


_FAILED_DIAL = _FailedDial()


def deactivate() -> None:
    from ding.framework import Parallel

    if Parallel().is_active:
        Parallel().stop()


def new_addresses(count: int) -> List[str]:
    """Return addresses of sockets in a new directory of this user only: DI-engine unpickles all that arrives there."""
    directory = make_socket_directory()
    return [f'ipc://{directory}/{i}.ipc' for i in range(count)]


def remove_address(address: str) -> None:
    path = address.partition('://')[2]
    if address.startswith('ipc://'):
        with contextlib.suppress(FileNotFoundError):  # nng may remove it at the same moment
            os.remove(path)
        with contextlib.suppress(OSError):  # not the last one of its directory
            os.rmdir(os.path.dirname(path))


def claim_node_id(store: Store, role: str) -> int:
    """
    Overview:
        Claim a node id that no process of the run has, had or claims now, and that fits the role. DI-engine's examples
        use node 0 for the learner, 1 for the evaluator, and all others for collectors.
    """
    if role in SINGLE_ROLES:
        return FIRST_IDS[role]
    members = Members(store).refresh()
    node_id = max([FIRST_JOINED_ID - 1, *(member.node_id for member in members.by_id.values())]) + 1
    owner, title = Owner.this_process(), 'a process that joins'
    while Lease(store, f'node/{node_id}', owner, title, START_S, is_starting=True).try_acquire() is not None:
        node_id += 1
    return node_id


def peer_addresses(store: Store) -> List[str]:
    """Return the addresses of living members that this host can reach. Killed processes of this host are left out."""
    host = os.uname().nodename
    return [
        member.address
        for member in Members(store).refresh().alive()
        if member.address and not member.was_killed and (member.host == host or member.address.startswith('tcp://'))
    ]
