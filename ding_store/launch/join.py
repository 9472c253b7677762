"""``ding-store join``: add one process to a running job."""

from __future__ import annotations

import functools
import sys
import time
from dataclasses import replace
from typing import Optional, Tuple

from ding_store.config import StoreConfig
from ding_store.environment import Environment, write_environment
from ding_store.errors import ConfigError
from ding_store.hook import install
from ding_store.launch.log_dir import forget_end
from ding_store.launch.log_lines import line, log_as
from ding_store.launch.printing import print_to
from ding_store.launch.status import check_running
from ding_store.launch.user_script import UserScript, import_di_engine
from ding_store.middleware.router import activate, deactivate
from ding_store.run.claim import (
    check_script,
    claim_free_rank,
    claim_joining_worker,
    claim_role,
    has_launcher,
    starting,
)
from ding_store.run.ending import clear_ended_run, end_of, retire, silence_s
from ding_store.run.format import check_format
from ding_store.run.lease import WORKER
from ding_store.run.members import STREAM, Members, launch
from ding_store.run.node_addresses import (
    FIRST_IDS,
    FIRST_JOINED_ID,
    ROLES,
    claim_node_id,
    new_addresses,
    peer_addresses,
    remove_address,
)
from ding_store.run.session import ON_JOIN, RunSession
from ding_store.run.several_learners import (
    WORKERS,
    check_num_learners,
    decide_num_learners,
    decide_num_workers,
    first_joining_rank,
    has_num_learners,
    num_learners_of,
    num_workers_of,
)
from ding_store.run.torchrun import torchrun_worker
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
    num_learners: Optional[int] = None,
    is_owner: bool = False,
) -> int:
    """
    Overview:
        Run a script as a member of a run, in this process. Its router is active before its first line runs, so that
        its own branches on ``task.router`` give it the role. A worker runs the whole script, without a router.
    Arguments:
        - environment (:obj:`Environment`): The variables for the script, which reads its config in this process.
        - wait (:obj:`bool`): Also join a run that has no living member yet, and wait for the others.
        - num_learners (:obj:`Optional[int]`): Number of the run's learners. None: the number that the run has by now.
        - is_owner (:obj:`bool`): Begin and end the run in place of a launcher: clear an earlier run of this name that
            has ended, and delete the data of this one when it has ended in order.
    Returns:
        - code (:obj:`int`): The script's exit code.
    """
    if not wait:
        check_running(config, 'Start it with ding-store run, or wait for it with --wait')
    with RunSession(config).store as store:
        if is_owner:
            check_script(store, FIRST_IDS[role], script.identity)
            clear_ended_run(store, config)
            forget_end(config)
        end = end_of(store)
        if end is not None:
            raise ConfigError(f'run {config.run!r} has ended: {end.reason}')
        found = None if wait else living(store, config)
        check_format(store)
        num, rank = _claim(store, config, role, num_learners)
        if is_owner:
            decide_num_workers(store, 0)
        if role == WORKER:
            node_id = rank
        if node_id is None:
            node_id = claim_node_id(store, role)
        peers = peer_addresses(store)
    title = f'{role}-{rank or node_id}'
    log_as(title)
    ranked = '' if rank is None or role == WORKER else f', rank {rank} of {num}'
    print_to(sys.stderr, line(f'joining run {config.run!r} as {role}, node {node_id}{ranked}\n', title))
    # With a name for its launch, another process clears and retires the run.
    joined = None if found is None else found.epoch
    learners = str(num) if num > 1 else None
    own_rank = None if rank is None else str(rank)
    names = dict(launched=launch(config.launched), joined=joined, learners=learners, rank=own_rank)
    write_environment(replace(environment, **names))
    import_di_engine()
    from ding_store.middleware.leave_on_signal import exit_code

    install()
    ON_JOIN.append(functools.partial(_say_joined, title=title))
    if role == WORKER:
        from ding_store.middleware import worker_rank

        assert rank is not None
        worker_rank.start(rank, num, has_joined=True)
        return exit_code(script.run())
    ON_JOIN.append(RunSession.wait_for_partitions)
    if rank is not None:
        from ding_store.middleware import learner_ranks

        learner_ranks.start(rank, num)
    (address,) = new_addresses(1)
    activate(node_id, address, peers, num_workers=len(peers) + 1)
    try:
        code = exit_code(script.run())
    finally:
        deactivate()
        remove_address(address)
    if is_owner:
        _retire(config)
    return code


def _retire(config: StoreConfig) -> None:
    """Delete the data of the run if it has ended in order, once all other members have left."""
    with RunSession(config).store as store:
        end = end_of(store)
        if end is not None and not end.failed:
            retire(store, config.heartbeat_s)


def _claim(store: Store, config: StoreConfig, role: str, num_learners: Optional[int]) -> Tuple[int, Optional[int]]:
    """
    Claim a role for this process. Return the number of the run's learners, and this process's rank if it is one of
    several. Under torchrun it has torchrun's rank, and else a free one. The number of a run of workers is that of the
    workers that its launcher starts.
    """
    if role == WORKER:
        num_started, silent_s = _wait_for_workers(store, config), silence_s(config.heartbeat_s)
        return num_started, claim_joining_worker(store, FIRST_JOINED_ID, silent_s, config.launched)
    if num_workers_of(store):
        _check_no_workers(store, config, role)
    worker, silent_s = torchrun_worker(), silence_s(config.heartbeat_s)
    ranked = worker if role == 'learner' else None
    num = ranked.num if ranked is not None else num_learners
    if num is not None:
        deadline = time.monotonic() + config.peer_timeout_s
        while not has_num_learners(store) and has_launcher(store, FIRST_IDS['learner']):
            if time.monotonic() >= deadline:
                break  # it has one learner, so the check below refuses this one
            time.sleep(SLICE_S)
        check_num_learners(store, num)
        decide_num_learners(store, num)
    num = num_learners_of(store) if num is None else num
    if role != 'learner' or num == 1:
        claim_role(store, role, silent_s, config.launched)
        return num, None
    if ranked is None:
        return num, claim_free_rank(store, range(first_joining_rank(store), num), silent_s, config.launched)
    claim_role(store, role, silent_s, config.launched, ranked.rank)
    return num, ranked.rank


def _check_no_workers(store: Store, config: StoreConfig, role: str) -> None:
    """
    Raises:
        - ConfigError: The run's workers, or their launcher, run. A launcher that was killed has only left their number.
    """
    members, silent_s = Members(store).refresh(), silence_s(config.heartbeat_s)
    if has_launcher(store, FIRST_IDS['learner']) or members.reporting(WORKER, silent_s) is not None:
        raise ConfigError(f'run {store.run!r} has workers, so no {role} can join it. Join with --role worker.')


def _wait_for_workers(store: Store, config: StoreConfig) -> int:
    """
    Wait until a launcher has begun the run, and return how many workers it starts. Without --wait, the run has a living
    process, whose launcher says it within moments.
    """
    members, begin, warned = Members(store), time.monotonic(), 0
    while True:
        num = _num_workers(store, members.refresh())
        if num:
            return num
        other = members.reporting(None, silence_s(config.heartbeat_s), lambda member: member.role != WORKER)
        if other is not None:
            raise ConfigError(
                f'run {store.run!r} has a {other.role}, so no worker can join it. Start it with ding-store run --roles '
                'worker=N, or join with another role.'
            )
        if time.monotonic() - begin >= config.wait_warn_s * (warned + 1):
            warned += 1
            print_to(sys.stderr, line(f'waiting for ding-store run --roles worker=N --run {config.run}\n'))
        store.wait_for_version(WORKERS, 1, SLICE_S)


def _num_workers(store: Store, members: Members) -> int:
    """Return how many workers the launcher starts, also if the server has lost what it noted. 0: none, or unknown."""
    reported = [each.figures.get('num_learners', 0) for each in members.alive() if each.role == WORKER]
    return num_workers_of(store) or max(reported, default=0)


def _say_joined(session: RunSession, title: str) -> None:
    members = Members(session.store).refresh()
    counts = {role: members.num_running(role) for role in (*ROLES, WORKER)}
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
