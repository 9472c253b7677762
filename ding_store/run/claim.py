"""Claims that keep a run to one job: a second job of its name is refused before it reads or appends experience."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence

from ding_store.errors import ConfigError, VersionConflict
from ding_store.run.ending import end_of
from ding_store.run.foreign import fields_of, is_count, is_text
from ding_store.run.members import STREAM as REPORTS
from ding_store.run.members import Member, Members, launch, pid_space
from ding_store.storage.embedded.supervisor.clients import birth_of, is_gone
from ding_store.storage.store import Store

#: What a launch runs: ``script`` is its name, ``config`` the value of its option ``--config``. Empty: unknown.
Identity = Mapping[str, Optional[str]]

#: A run has at most one process of each of these roles.
SINGLE_ROLES = ('learner', 'evaluator')
#: Prefix of the values that hold the claims of launches. The rest of the name is the launch's first node.
_LAUNCH = 'launch/'
#: The fields of a claim.
_CLAIM = {'launch': is_text, 'pid_space': is_text, 'pid': is_count, 'birth': is_text, 'host': is_text}


def claim_run(
    store: Store,
    role: Optional[str],
    first_node: int,
    silent_s: float,
    script: Identity,
    launched: Optional[str] = None,
) -> None:
    """
    Overview:
        Claim the nodes from ``first_node`` on for this process's launch. Parts of one job that are started separately
        have different first nodes. Two jobs of the same script have the same one. A compare-and-set decides, so if two
        jobs start together, one is refused.
    Arguments:
        - role (:obj:`Optional[str]`): The role that this process will have. None: a launcher, for all roles.
        - first_node (:obj:`int`): The lowest node id of this launch.
        - silent_s (:obj:`float`): A member that reports nothing for so long counts as killed, and frees its place.
        - script (:obj:`Mapping`): What the launch runs. If it is empty, the script in the earlier claim stays.
        - launched (:obj:`Optional[str]`): See ``members.launch``.
    Raises:
        - ConfigError: A running job has these nodes or this role, or the killed job before ran another script.
    """
    mine, members = launch(launched), Members(store)
    # Collectors of other launches are no second job: they joined before its learner started, or since it crashed.
    single = SINGLE_ROLES if role is None else tuple(each for each in SINGLE_ROLES if each == role)
    if single:
        _refuse(store, members.reporting(None, silent_s, lambda m: m.launch != mine and m.role in single))
    while True:
        held = store.get(f'{_LAUNCH}{first_node}')
        known = fields_of(held, _CLAIM) or {}
        if known and known['launch'] == mine:
            return
        if known:
            _refuse(store, _living(known, first_node, members, silent_s))
            _check_script(store, known, script)
        known = {key: known.get(key) for key in ('script', 'config')} if known else {}
        described = known if script.get('script') in (None, known.get('script')) else {}
        try:
            claim = {**_claim(mine), **described, **{key: value for key, value in script.items() if value}}
            store.put(f'{_LAUNCH}{first_node}', claim, {}, held.version if held is not None else 0)
            return
        except VersionConflict:
            continue  # another launch was first: check its claim next


def starting(store: Store) -> Optional[str]:
    """Return a text for a running launch of this host that claimed nodes of the run, or None. It may lack members."""
    for name in store.info().values:
        held = fields_of(store.get(name), _CLAIM) if name.startswith(_LAUNCH) else None
        if held is not None and _is_here(held):
            return _title(held)
    return None


def identity(name: str, words: Sequence[str]) -> Identity:
    """Return a script's identity: its name and ``--config``. Its directory and other options do not count."""
    config = None
    for word, following in zip(words, [*words[1:], None]):
        option, equals, value = word.partition('=')
        if option == '--config':
            config = value if equals else following
    return {'script': name, 'config': config}


def own_identity() -> Identity:
    """Return the identity of this process's script. Empty for an interactive session, a test or ``ditask``."""
    path = Path(sys.argv[0])
    return {} if path.suffix != '.py' or path.stem == '__main__' else identity(path.stem, sys.argv[1:])


def check_script(store: Store, first_node: int, script: Identity) -> None:
    """
    Overview:
        Check that a failed run may be continued by this script. Call it before the run's end is deleted.
    Raises:
        - ConfigError: Another script ran it, so its experience and weights are useless to this one.
    """
    end, held = end_of(store), fields_of(store.get(f'{_LAUNCH}{first_node}'), _CLAIM)
    if end is not None and end.failed and held is not None:
        _check_script(store, held, script)


def _check_script(store: Store, claim: Mapping[str, Any], script: Identity) -> None:
    """
    Raise ConfigError if a claim names another script. Fields that one side lacks do not count. A run without experience
    and weights passes as well.
    """
    others = {key: claim.get(key) for key in script}
    if not any(value and others[key] and value != others[key] for key, value in script.items()):
        return
    info = store.info()
    has_rows = any(stream.last for name, stream in info.streams.items() if name != REPORTS)
    if has_rows or any(name.startswith('weights/') for name in info.values):
        raise ConfigError(
            f'run {store.run!r} was of {_text(others)}, did not end in order, and still has its experience or weights; '
            f'this is {_text(script)}. Name this run with --run NAME, or start it in another directory.'
        )


def _text(script: Identity) -> str:
    return f'{script["script"]} --config {script["config"]}' if script.get('config') else str(script['script'])


def claim_role(store: Store, role: str, silent_s: float, launched: Optional[str] = None) -> None:
    """
    Overview:
        Claim a role for this process, which joins the run alone. If two processes claim a role together, one is
        refused. Roles outside ``SINGLE_ROLES`` need no claim.
    Raises:
        - ConfigError: A running process has the role.
    """
    if role not in SINGLE_ROLES:
        return
    alive = Members(store).reporting(role, silent_s)
    if alive is not None:
        raise ConfigError(
            f'run {store.run!r} has a {role} already: {alive.title}. Stop that one first, or join with another role.'
        )
    while True:
        held = store.get(f'joined/{role}')
        claim = fields_of(held, _CLAIM)
        if claim and _is_here(claim):
            raise ConfigError(
                f'run {store.run!r} has a {role} already, which is starting: pid {claim["pid"]} on {claim["host"]}. '
                'Stop that one first, or join with another role.'
            )
        try:
            store.put(f'joined/{role}', _claim(launch(launched)), {}, held.version if held is not None else 0)
            return
        except VersionConflict:
            continue  # another process was first: check its claim next


def claim_part(store: Store, part: str, what: str, advice: str, launched: Optional[str] = None) -> None:
    """
    Overview:
        Claim a part that only one process of a run may have: reading experience as the learner, or publishing a policy.
        This check compares processes of one launch. ``claim_run`` and ``claim_role`` compare launches.
    Arguments:
        - part (:obj:`str`): The claim's name.
        - what (:obj:`str`), advice (:obj:`str`): For the error: what two processes do, and what to change.
        - launched (:obj:`Optional[str]`): See ``members.launch``.
    Raises:
        - ConfigError: Another running process of this launch has it.
    """
    own = _claim(launch(launched), f'{pid_space()} {os.getpid()}')
    while True:
        held = store.get(f'part/{part}')
        claim = fields_of(held, _CLAIM)
        if claim and claim['pid'] == own['pid'] and claim['pid_space'] == own['pid_space']:
            return
        if claim and claim['launch'] == own['launch'] and _is_here(claim):
            raise ConfigError(
                f'two processes {what} of run {store.run!r}: pid {claim["pid"]} and pid {own["pid"]} on '
                f'{own["host"]}. {advice}'
            )
        try:
            store.put(f'part/{part}', own, {}, held.version if held is not None else 0)
            return
        except VersionConflict:
            continue  # another process was first: check its claim next


def _claim(mine: str, process: Optional[str] = None) -> Dict[str, Any]:
    """Return the header of a claim, for a process given as ``pid_space pid``. Default: the launch's first process."""
    space, _, pid = (process or mine).rpartition(' ')
    began = birth_of(int(pid))
    return {'launch': mine, 'pid_space': space, 'pid': int(pid), 'birth': began, 'host': socket.gethostname()}


def _is_here(claim: Mapping[str, Any]) -> bool:
    """True if the process that made the claim runs. Only processes of the same pid space can see that."""
    return bool(claim['pid_space'] == pid_space() and not is_gone(claim['pid'], claim['birth']))


def _title(claim: Mapping[str, Any]) -> str:
    return f'a job that starts there (pid {claim["pid"]} on {claim["host"]})'


def _living(claim: Mapping[str, Any], first_node: int, members: Members, silent_s: float) -> Optional[str]:
    """
    Return a text for a running process of the launch that made this claim, or None. Only the member with the first node
    counts. Before it has joined, every member of the launch counts, and so does the process in the claim.
    """
    ours = [member for member in members.refresh().by_id.values() if member.launch == claim['launch']]
    firsts = {member.id for member in ours if member.node_id == first_node}
    awaited = firsts or {member.id for member in ours}
    alive = members.reporting(None, silent_s, lambda member: member.id in awaited)
    if alive is not None:
        return alive.title
    return _title(claim) if not firsts and _is_here(claim) else None


def _refuse(store: Store, other: Any) -> None:
    if other is not None:
        title = other.title if isinstance(other, Member) else other
        raise ConfigError(
            f'run {store.run!r} is running already, with {title}. Name this one with --run NAME (in a config, '
            'store.run), start it in another directory, or join that one with `ding-store join`. '
            '`ding-store status` shows it.'
        )
