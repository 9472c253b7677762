"""Leases that keep a run to one job: a second job of its name is refused before it reads or appends experience."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence

from ding_store.errors import ConfigError
from ding_store.run.ending import end_of
from ding_store.run.foreign import fields_of
from ding_store.run.lease import FIELDS, SINGLE_ROLES, WORKER, Holder, Lease, Owner, owner_in, role_lease
from ding_store.run.members import STREAM as REPORTS
from ding_store.run.members import launch
from ding_store.storage.base import Header
from ding_store.storage.store import Store

#: What a launch runs: ``script`` is its name, ``config`` the value of its option ``--config``. Empty: unknown.
Identity = Mapping[str, Optional[str]]

#: Prefixes of the leases. The rest of the name is the launch's first node, or the part.
_LAUNCH, _PART = 'launch/', 'part/'
_OR_ANOTHER_RUN = (
    'Name this one with --run NAME (in a config, store.run), start it in another directory, or join that one with '
    '`ding-store join`. `ding-store status` shows it.'
)


def claim_run(
    store: Store,
    first_node: int,
    silent_s: float,
    script: Identity,
    launched: Optional[str] = None,
    is_first: bool = True,
) -> Optional[Lease]:
    """
    Overview:
        Claim the nodes from ``first_node`` on for this process's launch. Parts of one job that are started separately
        have different first nodes. Two jobs of the same script have the same one.
    Arguments:
        - first_node (:obj:`int`): The lowest node id of this launch.
        - silent_s (:obj:`float`): Time within which this process will renew the lease.
        - script (:obj:`Mapping`): What the launch runs. If it is empty, the script in the earlier claim stays.
        - launched (:obj:`Optional[str]`): See ``members.launch``.
        - is_first (:obj:`bool`): This process is the launcher, or has the lowest node id of its launch.
    Returns:
        - lease (:obj:`Optional[Lease]`): This process must renew it. None: the process with the lowest node id will.
    Raises:
        - ConfigError: A running job has these nodes, or the killed job before ran another script.
    """
    mine, name = launch(launched), f'{_LAUNCH}{first_node}'
    held = None if is_first else fields_of(store.get(name), FIELDS)
    if held is not None and held['owner'] == mine and not held['is_released']:
        return None
    owner = Owner.this_process(mine) if is_first else Owner.first_process(mine)
    title = f'a job that starts there ({owner.place})'

    def notes(earlier: Header) -> Mapping[str, Any]:
        _check_script(store, earlier, script)
        known = {key: earlier.get(key) for key in ('script', 'config')} if earlier else {}
        described = known if script.get('script') in (None, known.get('script')) else {}
        return {**described, **{key: value for key, value in script.items() if value}}

    lease = Lease(store, name, owner, title, silent_s, is_starting=True, notes=notes)
    holder = lease.acquire()
    if holder is not None:
        raise ConfigError(f'run {store.run!r} is running already, with {holder.title}. {_OR_ANOTHER_RUN}')
    return lease if is_first else None


def check_roles(store: Store, launched: Optional[str] = None, roles: Sequence[str] = SINGLE_ROLES) -> None:
    """Raise ConfigError if a running process of another launch has one of the ``SINGLE_ROLES``. For launchers."""
    for role in roles:
        _refuse(store, role, _role_lease(store, role, 0.0, launched).living())


def claim_role(
    store: Store, role: str, silent_s: float, launched: Optional[str] = None, rank: int = 0
) -> Optional[Lease]:
    """
    Overview:
        Claim a role for this process's launch, so that no process of another launch gets it. Roles outside
        ``SINGLE_ROLES`` need no claim.
    Arguments:
        - rank (:obj:`int`): Number of this process among several learners or workers.
    Returns:
        - lease (:obj:`Optional[Lease]`): This process must renew it, if it keeps running.
    Raises:
        - ConfigError: A running process of another launch has the role.
    """
    if role not in SINGLE_ROLES:
        return None
    lease = _role_lease(store, role, silent_s, launched, rank)
    _refuse(store, f'{role} of rank {rank}' if rank else role, lease.acquire())
    return lease


def claim_free_rank(store: Store, ranks: Sequence[int], silent_s: float, launched: Optional[str] = None) -> int:
    """
    Overview:
        Claim the lowest rank that no running learner has.
    Raises:
        - ConfigError: All of them are taken.
    """
    for rank in ranks:
        if _role_lease(store, 'learner', silent_s, launched, rank).acquire() is None:
            return rank
    raise ConfigError(
        f'run {store.run!r} has all of its learners that join: {len(ranks)}. Join with another role, or start the run '
        'with more: --learners N. `ding-store status` shows them.'
    )


def claim_joining_worker(store: Store, first: int, silent_s: float, launched: Optional[str] = None) -> int:
    """Claim the lowest rank from ``first`` on that no worker has. One whose worker may still live counts as taken."""
    rank = first
    while _role_lease(store, WORKER, silent_s, launched, rank).try_acquire() is not None:
        rank += 1
    return rank


def has_launcher(store: Store, first_node: int) -> bool:
    """Return whether a running launcher, or the first process of another launch, has these nodes."""
    lease = Lease(store, f'{_LAUNCH}{first_node}', Owner.this_process(), '', 0.0, is_starting=True)
    return lease.living() is not None


def _role_lease(store: Store, role: str, silent_s: float, launched: Optional[str], rank: int = 0) -> Lease:
    owner = Owner.this_process(launch(launched))
    title = f'a {role} that starts ({owner.place})'
    return Lease(store, role_lease(role, rank), owner, title, silent_s, is_starting=True)


def _refuse(store: Store, role: str, holder: Optional[Holder]) -> None:
    if holder is not None:
        raise ConfigError(
            f'run {store.run!r} has a {role} already: {holder.title}. Stop that one first, or join with another role. '
            f'For another job: {_OR_ANOTHER_RUN}'
        )


def claim_part(store: Store, part: str, silent_s: float, what: str, advice: str) -> Lease:
    """
    Overview:
        Claim a part that only one process of a run may have: reading experience as the learner, or publishing a policy.
        ``claim_run`` and ``claim_role`` compare launches. This compares processes.
    Arguments:
        - part (:obj:`str`): The name of the part.
        - silent_s (:obj:`float`): Time within which this process will renew the lease.
        - what (:obj:`str`), advice (:obj:`str`): For the error: what two processes do, and what to change.
    Raises:
        - ConfigError: Another running process has the part.
    """
    owner = Owner.this_process()
    # A process that never joins the run, and so renews nothing, has its part while it lives.
    lease = Lease(store, f'{_PART}{part}', owner, owner.place, silent_s, is_starting=True)
    holder = lease.acquire()
    if holder is not None:
        raise ConfigError(f'two processes {what} of run {store.run!r}: {holder.title}, and {owner.place}. {advice}')
    return lease


def starting(store: Store) -> Optional[str]:
    """Return a text for a running launch of this host that claimed nodes of the run, or None. It may lack members."""
    for name in store.info().values:
        held = fields_of(store.get(name), FIELDS) if name.startswith(_LAUNCH) else None
        owner = None if held is None or held['is_released'] else owner_in(held)
        if owner is not None and owner.is_here and not owner.has_exited():
            return f'a job that starts there ({owner.place})'
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
    end, held = end_of(store), fields_of(store.get(f'{_LAUNCH}{first_node}'), FIELDS)
    if end is not None and end.failed and held is not None:
        _check_script(store, held, script)


def _check_script(store: Store, earlier: Header, script: Identity) -> None:
    """
    Raise ConfigError if the fields of a lease name another script. Fields that one side lacks do not count. A run
    without experience and weights passes as well.
    """
    others: Dict[str, Any] = {key: earlier.get(key) for key in script}
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
