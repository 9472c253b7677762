"""The node ids of a job's processes, and the addresses at which DI-engine's router listens."""

from __future__ import annotations

import contextlib
import os
from typing import Collection, List

from ding_store.run.lease import SINGLE_ROLES, START_S, Lease, Owner
from ding_store.run.members import Members
from ding_store.storage.embedded.local_tmp import local_tmp
from ding_store.storage.embedded.supervisor.sockets import make_socket_directory
from ding_store.storage.store import Store

#: First node id of each role in DI-engine's examples.
FIRST_IDS = {'learner': 0, 'evaluator': 1, 'collector': 2}
ROLES = tuple(FIRST_IDS)
#: First node id of processes that join, and first rank of workers that join. ``ditask`` may still start workers with
#: lower ids.
FIRST_JOINED_ID = 100


def new_addresses(count: int) -> List[str]:
    """Return addresses of sockets in a new directory of this user only: DI-engine unpickles all that arrives there."""
    directory = make_socket_directory(local_tmp())
    return [f'ipc://{directory}/{i}.ipc' for i in range(count)]


def remove_address(address: str) -> None:
    path = address.partition('://')[2]
    if address.startswith('ipc://'):
        with contextlib.suppress(FileNotFoundError):  # nng may remove it at the same moment
            os.remove(path)
        with contextlib.suppress(OSError):  # not the last one of its directory
            os.rmdir(os.path.dirname(path))


def claim_node_id(store: Store, role: str, own: Collection[int] = ()) -> int:
    """
    Overview:
        Claim a node id that no process of the run has, had or claims now, and that fits the role. DI-engine's examples
        use node 0 for the learner, 1 for the evaluator, and all others for collectors.
    Arguments:
        - own (:obj:`Collection[int]`): Node ids that this process has claimed for others, which start.
    """
    if role in SINGLE_ROLES:
        return FIRST_IDS[role]
    members = Members(store).refresh()
    node_id = max([FIRST_JOINED_ID - 1, *own, *(member.node_id for member in members.by_id.values())]) + 1
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
