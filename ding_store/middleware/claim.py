"""One job per run: a second one of its name is refused before it takes, or adds, any experience."""

from __future__ import annotations

import socket
from typing import Any, Dict, Mapping, Optional

from ding_store.errors import ConfigError, VersionConflict
from ding_store.middleware.members import Member, Members, launch, pid_space
from ding_store.storage.base import Store
from ding_store.storage.embedded.supervisor.members import birth_of, is_gone

#: There is one of these in a run.
SINGLE_ROLES = ('learner', 'evaluator')


def claim_run(store: Store, role: Optional[str], first_node: int, silent_s: float) -> None:
    """
    Overview:
        Take the nodes from ``first_node`` on for what was started together with this process. Jobs that were started
        in parts (workers of further nodes, on this host or others) have different first nodes; two of the same script
        have the same one. Decided by compare-and-set, so that of two that start together one is refused.
    Arguments:
        - role (:obj:`Optional[str]`): What this process will be; None: a launcher, for all roles.
        - first_node (:obj:`int`): The lowest node id of this launch.
        - silent_s (:obj:`float`): Who does not report for so long was killed, and its place is free.
    Raises:
        - ConfigError: A job that lives has them, or has a member of this role.
    """
    mine, members = launch(), Members(store)
    # Collectors of others are no second job: they joined, before its learner came or since that died.
    single = SINGLE_ROLES if role is None else tuple(each for each in SINGLE_ROLES if each == role)
    if single:
        _refuse(store, members.reporting(None, silent_s, lambda m: m.launch != mine and m.role in single))
    while True:
        held = store.get(f'launch/{first_node}')
        if held is not None and held.header['launch'] == mine:
            return
        if held is not None:
            _refuse(store, _living(held.header, first_node, members, silent_s))
        try:
            store.put(f'launch/{first_node}', _claim(mine), {}, held.version if held is not None else 0)
            return
        except VersionConflict:
            continue  # another launch was quicker: its claim is judged next


def claim_role(store: Store, role: str, silent_s: float) -> None:
    """
    Overview:
        Take a role that a run has once for this process, which joins it alone; of two that come together one is
        refused. Other roles are anybody's.
    Raises:
        - ConfigError: A process that lives has it.
    """
    if role not in SINGLE_ROLES:
        return
    alive = Members(store).reporting(role, silent_s)
    if alive is not None:
        raise ConfigError(f'run {store.run!r} has a {role} already: {alive.title}')
    while True:
        held = store.get(f'joined/{role}')
        claim = held.header if held is not None else None
        if claim and claim['pid_space'] == pid_space() and not is_gone(claim['pid'], claim['birth']):
            raise ConfigError(
                f'run {store.run!r} has a {role} already: one that starts (pid {claim["pid"]} on {claim["host"]})'
            )
        try:
            store.put(f'joined/{role}', _claim(launch()), {}, held.version if held is not None else 0)
            return
        except VersionConflict:
            continue  # another one was quicker


def _claim(mine: str) -> Dict[str, Any]:
    space, _, pid = mine.rpartition(' ')
    began = birth_of(int(pid))
    return {'launch': mine, 'pid_space': space, 'pid': int(pid), 'birth': began, 'host': socket.gethostname()}


def _living(claim: Mapping[str, Any], first_node: int, members: Members, silent_s: float) -> Optional[str]:
    """Who lives of the launch that made this claim: its first member; until that has come, anything of it."""
    ours = [member for member in members.refresh().by_id.values() if member.launch == claim['launch']]
    firsts = {member.id for member in ours if member.node_id == first_node}
    awaited = firsts or {member.id for member in ours}
    alive = members.reporting(None, silent_s, lambda member: member.id in awaited)
    if alive is not None:
        return alive.title
    is_here = claim['pid_space'] == pid_space()
    if not firsts and is_here and not is_gone(claim['pid'], claim['birth']):
        return f'a job that starts there (pid {claim["pid"]} on {claim["host"]})'
    return None


def _refuse(store: Store, other: Any) -> None:
    if other is not None:
        title = other.title if isinstance(other, Member) else other
        raise ConfigError(
            f'run {store.run!r} is running already, with {title}: name this one with --run NAME (in a config, '
            'store.run), start it in another directory, or add to that one with `ding-store join`; '
            '`ding-store status` shows it'
        )
