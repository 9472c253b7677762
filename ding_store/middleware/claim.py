"""One job per run: a second one of its name is refused before it takes, or adds, any experience."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence

from ding_store.errors import ConfigError, VersionConflict
from ding_store.middleware.ending import end_of
from ding_store.middleware.foreign import fields_of, is_count, is_text
from ding_store.middleware.members import STREAM as REPORTS
from ding_store.middleware.members import Member, Members, launch, pid_space
from ding_store.storage.base import Store
from ding_store.storage.embedded.supervisor.clients import birth_of, is_gone

#: ``script``, its name, and ``config``, if it is given one; empty: nobody knows.
Identity = Mapping[str, Optional[str]]

#: There is one of these in a run.
SINGLE_ROLES = ('learner', 'evaluator')
#: A value per launch: its claim, under its first node.
_LAUNCH = 'launch/'
#: What each claim says.
_CLAIM = {'launch': is_text, 'pid_space': is_text, 'pid': is_count, 'birth': is_text, 'host': is_text}


def claim_run(store: Store, role: Optional[str], first_node: int, silent_s: float, script: Identity) -> None:
    """
    Overview:
        Take the nodes from ``first_node`` on for what was started together with this process. Jobs that were started
        in parts (workers of further nodes, on this host or others) have different first nodes; two of the same script
        have the same one. Decided by compare-and-set, so that of two that start together one is refused.
    Arguments:
        - role (:obj:`Optional[str]`): What this process will be; None: a launcher, for all roles.
        - first_node (:obj:`int`): The lowest node id of this launch.
        - silent_s (:obj:`float`): Who does not report for so long was killed, and its place is free.
        - script (:obj:`Mapping`): What the launch runs; where nobody knows, what was known before stays.
    Raises:
        - ConfigError: A job that lives has them, or a member of this role; or one that was killed ran another script.
    """
    mine, members = launch(), Members(store)
    # Collectors of others are no second job: they joined, before its learner came or since that died.
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
        said = known if script.get('script') in (None, known.get('script')) else {}
        try:
            claim = {**_claim(mine), **said, **{key: value for key, value in script.items() if value}}
            store.put(f'{_LAUNCH}{first_node}', claim, {}, held.version if held is not None else 0)
            return
        except VersionConflict:
            continue  # another launch was quicker: its claim is judged next


def starting(store: Store) -> Optional[str]:
    """A launch of this host that lives, if one has claimed nodes of this run: its first member may be still to come."""
    for name in store.info().values:
        held = fields_of(store.get(name), _CLAIM) if name.startswith(_LAUNCH) else None
        if held is not None and _is_here(held):
            return _title(held)
    return None


def identity(name: str, words: Sequence[str]) -> Identity:
    """What a script trains, wherever it lies and whatever its other options are."""
    config = None
    for word, following in zip(words, [*words[1:], None]):
        option, equals, value = word.partition('=')
        if option == '--config':
            config = value if equals else following
    return {'script': name, 'config': config}


def own_identity() -> Identity:
    """Of the script that this process runs; empty where that is unknown: an interactive one, a test, ``ditask``."""
    path = Path(sys.argv[0])
    return {} if path.suffix != '.py' or path.stem == '__main__' else identity(path.stem, sys.argv[1:])


def check_script(store: Store, first_node: int, script: Identity) -> None:
    """
    Overview:
        For a run that had failed, before its end is forgotten: whether this script may go on with it.
    Raises:
        - ConfigError: It was another one's, whose experience and weights are of no use to this one.
    """
    end, held = end_of(store), fields_of(store.get(f'{_LAUNCH}{first_node}'), _CLAIM)
    if end is not None and end.failed and held is not None:
        _check_script(store, held, script)


def _check_script(store: Store, claim: Mapping[str, Any], script: Identity) -> None:
    """What either does not say is no difference; nor is anything while there is nothing to go on with."""
    others = {key: claim.get(key) for key in script}
    if not any(value and others[key] and value != others[key] for key, value in script.items()):
        return
    info = store.info()
    has_rows = any(stream.last for name, stream in info.streams.items() if name != REPORTS)
    if has_rows or any(name.startswith('weights/') for name in info.values):
        raise ConfigError(
            f'run {store.run!r} was of {_text(others)}, did not end in order, and would go on with what that has '
            f'collected; this is {_text(script)}: name it with --run NAME, or start it in another directory'
        )


def _text(script: Identity) -> str:
    return f'{script["script"]} --config {script["config"]}' if script.get('config') else str(script['script'])


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
        claim = fields_of(held, _CLAIM)
        if claim and _is_here(claim):
            raise ConfigError(
                f'run {store.run!r} has a {role} already: one that starts (pid {claim["pid"]} on {claim["host"]})'
            )
        try:
            store.put(f'joined/{role}', _claim(launch()), {}, held.version if held is not None else 0)
            return
        except VersionConflict:
            continue  # another one was quicker


def claim_part(store: Store, part: str, what: str, advice: str) -> None:
    """
    Overview:
        Take what one process of a run has alone: reading its experience as the learner, publishing a policy. Processes
        that were started together are told apart by this; of other launches ``claim_run`` and ``claim_role`` judge.
    Arguments:
        - part (:obj:`str`): The claim's name.
        - what (:obj:`str`), advice (:obj:`str`): For the error: what two processes do, and what to change.
    Raises:
        - ConfigError: Another process of this launch has it, and lives.
    """
    own = _claim(launch(), f'{pid_space()} {os.getpid()}')
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
            continue  # another one was quicker


def _claim(mine: str, process: Optional[str] = None) -> Dict[str, Any]:
    """Of a launch, as its first process or the one that is given."""
    space, _, pid = (process or mine).rpartition(' ')
    began = birth_of(int(pid))
    return {'launch': mine, 'pid_space': space, 'pid': int(pid), 'birth': began, 'host': socket.gethostname()}


def _is_here(claim: Mapping[str, Any]) -> bool:
    """Whether the process that made it lives, as far as that can be seen from here: only beside it."""
    return bool(claim['pid_space'] == pid_space() and not is_gone(claim['pid'], claim['birth']))


def _title(claim: Mapping[str, Any]) -> str:
    return f'a job that starts there (pid {claim["pid"]} on {claim["host"]})'


def _living(claim: Mapping[str, Any], first_node: int, members: Members, silent_s: float) -> Optional[str]:
    """Who lives of the launch that made this claim: its first member; until that has come, anything of it."""
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
            f'run {store.run!r} is running already, with {title}: name this one with --run NAME (in a config, '
            'store.run), start it in another directory, or add to that one with `ding-store join`; '
            '`ding-store status` shows it'
        )
