"""``ding-store join``: add one process to a running job."""

from __future__ import annotations

import functools
import sys
import time
from dataclasses import replace
from typing import Optional

from ding_store.config import StoreConfig
from ding_store.environment import Environment, write_environment
from ding_store.errors import ConfigError
from ding_store.hook import install
from ding_store.launch.log_lines import line, log_as
from ding_store.launch.printing import print_to
from ding_store.launch.router import (
    ROLES,
    activate,
    claim_node_id,
    deactivate,
    new_addresses,
    peer_addresses,
    remove_address,
)
from ding_store.launch.status import check_running
from ding_store.launch.user_script import UserScript, import_di_engine
from ding_store.run.claim import claim_role, starting
from ding_store.run.ending import end_of, silence_s
from ding_store.run.format import check_format
from ding_store.run.members import STREAM, Members, launch
from ding_store.run.session import ON_JOIN, RunSession
from ding_store.run.several_learners import num_learners_of
from ding_store.run.waiting import SLICE_S
from ding_store.storage.base import StreamInfo
from ding_store.storage.store import Store


def join(
    config: StoreConfig,
    environment: Environment,
    role: str,
    node_id: Optional[int],
    script: UserScript,
    wait: bool = False,
) -> int:
    """
    Overview:
        Run a script as a member of a run, in this process. Its router is active before its first line runs, so that
        its own branches on ``task.router`` give it the role.
    Arguments:
        - environment (:obj:`Environment`): The variables for the script, which reads its config in this process.
        - wait (:obj:`bool`): Also join a run that has no living member yet, and wait for the others.
    Returns:
        - code (:obj:`int`): The script's exit code.
    """
    if not wait:
        check_running(config, 'Start it with ding-store run, or wait for it with --wait')
    with RunSession(config).store as store:
        end = end_of(store)
        if end is not None:
            raise ConfigError(f'run {config.run!r} has ended: {end.reason}')
        found = None if wait else living(store, config)
        check_format(store)
        claim_role(store, role, silence_s(config.heartbeat_s), config.launched)
        if node_id is None:
            node_id = claim_node_id(store, role)
        peers, num = peer_addresses(store), num_learners_of(store)
    title = f'{role}-{node_id}'
    log_as(title)
    print_to(sys.stderr, line(f'joining run {config.run!r} as {role}, node {node_id}\n', title))
    # With a name for its launch, another process clears and retires the run.
    joined = None if found is None else found.epoch
    learners = str(num) if num > 1 else None
    write_environment(replace(environment, launched=launch(config.launched), joined=joined, learners=learners))
    import_di_engine()
    install()
    ON_JOIN.append(functools.partial(_say_joined, title=title))
    (address,) = new_addresses(1)
    activate(node_id, address, peers, num_workers=len(peers) + 1)
    try:
        return script.run()
    finally:
        deactivate()
        remove_address(address)


def _say_joined(session: RunSession, title: str) -> None:
    members = Members(session.store).refresh()
    counts = {role: members.num_running(role) for role in ROLES}
    running = ', '.join(f'{role}={count}' for role, count in counts.items() if count)
    print_to(sys.stderr, line(f'joined run {session.config.run!r}, which now has {running}\n', title))


def living(store: Store, config: StoreConfig) -> StreamInfo:
    """
    Overview:
        Return the members' stream of a run that has a living process. Wait if a launcher is starting it on this host.
    Raises:
        - ConfigError: The run has no living process.
    """
    deadline, members, has_reported = time.monotonic() + config.peer_timeout_s, Members(store), False
    while True:
        # Read before the members are checked, because the run may end meanwhile.
        found = store.stream_info(STREAM)
        if found is not None and members.reporting(None, silence_s(config.heartbeat_s)) is not None:
            return found
        launcher = starting(store)
        if launcher is None or time.monotonic() >= deadline:
            raise ConfigError(
                f'run {config.run!r} has no living process at {store.info().address}. Check --run and --store, or '
                'wait for the run with --wait'
            )
        if not has_reported:
            has_reported = True
            print_to(sys.stderr, line(f'run {config.run!r} has {launcher}: waiting for its first process\n'))
        members.wait(SLICE_S)
