"""``ding-store join``: one more process for a running job."""

from __future__ import annotations

import os
import sys
from typing import Optional

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError
from ding_store.hook import install
from ding_store.launch.router import activate, claim_node_id, deactivate, new_addresses, peer_addresses, remove_address
from ding_store.launch.script import Script
from ding_store.launch.status import check_running
from ding_store.middleware.claim import claim_role
from ding_store.middleware.ending import FINISH, silence_s
from ding_store.middleware.members import ENV_JOINED, ENV_LAUNCHED, STREAM, Members, launch
from ding_store.middleware.session import Session


def join(config: StoreConfig, role: str, node_id: Optional[int], script: Script, wait: bool = False) -> int:
    """
    Overview:
        Run a script as a member of a run, in this process. Its router is active before its first line runs, so that
        its own branches on ``task.router`` give it the role.
    Arguments:
        - wait (:obj:`bool`): Also join a run that has no living member, and wait for others.
    Returns:
        - code (:obj:`int`): The script's exit code.
    """
    if not wait:
        check_running(config)
    with Session(config).store as store:
        end = store.get(FINISH)
        if end is not None:
            raise ConfigError(f'run {config.run!r} has ended: {end.header["reason"]}')
        # Before it looks around: the run may end meanwhile.
        found = None if wait else store.stream_info(STREAM)
        if not wait and (found is None or Members(store).reporting(None, silence_s(config.heartbeat_s)) is None):
            raise ConfigError(
                f'run {config.run!r} has no living process at {store.info().address}: is it --run or --store that is '
                'another? To be there before the others, say --wait'
            )
        claim_role(store, role, silence_s(config.heartbeat_s))
        if node_id is None:
            node_id = claim_node_id(store, role)
        peers = peer_addresses(store)
    sys.stderr.write(f'joining run {config.run!r} as {role}, node {node_id}\n')
    os.environ[ENV_LAUNCHED] = launch()  # the run is somebody else's to clear and to retire
    os.environ.pop(ENV_JOINED, None)  # of a joined script that starts another
    if found is not None:
        os.environ[ENV_JOINED] = found.epoch
    install()
    (address,) = new_addresses(1)
    activate(node_id, address, peers, num_workers=len(peers) + 1)
    try:
        return script.run()
    finally:
        deactivate()
        remove_address(address)
