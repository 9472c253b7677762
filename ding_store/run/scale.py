"""The number of a run's collectors: a value that any host may change, and the hosts that start their share of them."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ding_store.errors import StoreError, VersionConflict
from ding_store.run.foreign import fields_of, is_count
from ding_store.run.lease import FIELDS, Lease, Owner
from ding_store.storage.base import Header
from ding_store.storage.store import Store

#: A value with the number of collectors that the run should have.
SCALE = 'scale/collector'
#: Prefix of the leases of hosts that start collectors. The rest is a number from 0 on.
_HOST = 'host/'
#: Seconds within which a host renews its lease. Other hosts start its collectors once they have looked at the lease for
#: that long. They look once per second, of which ``Lease`` counts half.
HOST_S = 10.0
#: Most collectors of a run whose ``--roles`` has no upper bound.
NO_BOUND = 10_000

_TARGET: Mapping[str, Callable[[Any], bool]] = {
    'number': is_count,
    'least': is_count,
    'most': is_count,
    'is_by_hand': lambda field: isinstance(field, bool),
}
_SEAT: Mapping[str, Callable[[Any], bool]] = {**FIELDS, 'keep': is_count, 'capacity': is_count}


class Target(NamedTuple):
    """The wanted number of collectors. ``is_by_hand``: a person set it, so the run does not change it by itself."""

    number: int
    least: int
    most: int
    is_by_hand: bool = False


class Host(NamedTuple):
    """A host that starts collectors: it keeps ``keep`` of them if it can, and has room for ``capacity``."""

    keep: int
    capacity: int


def target_of(store: Store) -> Optional[Target]:
    """Return the wanted number of collectors. None: no process starts collectors, or the server lost its memory."""
    found = fields_of(store.get(SCALE), _TARGET)
    return None if found is None else Target(*(found[name] for name in Target._fields))


def put_target(store: Store, target: Target, version: Optional[int] = None) -> None:
    """
    Overview:
        Put the wanted number.
    Arguments:
        - version (:obj:`Optional[int]`): Put it only over this version. Otherwise VersionConflict is raised.
    """
    store.put(SCALE, target._asdict(), {}, version)


def change_target(store: Store, change: Callable[[Target], Target]) -> Optional[Target]:
    """Replace the wanted number by what ``change`` makes of it. Return None if there is none."""
    while True:
        value = store.get(SCALE)
        found = fields_of(value, _TARGET)
        if value is None or found is None:
            return None
        target = change(Target(*(found[name] for name in Target._fields)))
        try:
            put_target(store, target, value.version)
            return target
        except VersionConflict:
            continue  # another process changed it: look again


def shares_of(number: int, hosts: Sequence[Host]) -> List[int]:
    """
    Overview:
        Return how many collectors each host starts. Each gets what it keeps, in the order of the hosts. The rest goes
        to hosts that keep none, which have joined for that, and then to the others.
    """
    shares = [0] * len(hosts)

    def give(to: Sequence[int], limits: Sequence[int]) -> None:
        for i, limit in zip(to, limits):
            more = max(0, min(limit - shares[i], number - sum(shares)))
            shares[i] += more

    everyone = range(len(hosts))
    give(everyone, [min(host.keep, host.capacity) for host in hosts])
    for joined in (True, False):
        some = [i for i in everyone if (hosts[i].keep == 0) == joined]
        give(some, [hosts[i].capacity for i in some])
    return shares


class Seat:
    """
    Overview:
        This process's place among the hosts that start collectors.
    Arguments:
        - host (:obj:`Host`): What it keeps, and what it has room for.
    """

    def __init__(self, store: Store, host: Host) -> None:
        self._store, self._host = store, host
        self._owner = Owner.this_process()
        self._others: Dict[int, Lease] = {}
        self._seen_alive: Set[Tuple[int, str]] = set()  # numbers and owners of seats that were renewed before our eyes
        taken = [name[len(_HOST) :] for name in store.info().values if name.startswith(_HOST)]
        self._highest = max((int(number) for number in taken if number.isascii() and number.isdigit()), default=0)
        self._sit_down()

    def _sit_down(self) -> None:
        """Take the first place that is free."""
        self._number = 0
        while True:
            self._lease = self._lease_of(self._number)
            if self._lease.try_acquire() is None:
                return
            self._number += 1

    def renew(self) -> None:
        """Show other hosts that this one lives. If one of them took its place meanwhile, take another."""
        try:
            self._lease.renew()
        except VersionConflict:
            self._sit_down()

    def release(self) -> None:
        """Let other hosts start this one's collectors. If the store is away, they learn it after ``HOST_S``."""
        with contextlib.suppress(StoreError), self._store.nonblocking():
            self._lease.release()

    def share(self, number: int, started: int = 0) -> int:
        """
        Overview:
            Return how many of ``number`` collectors this host starts, by the hosts that live now.
        Arguments:
            - started (:obj:`int`): Those that it has. It retires none of them for a host that was not seen to renew its
              lease yet: that one may have been killed, and this is its successor.
        """
        own = self._share(number, is_certain=False)
        return own if own >= started else max(own, min(started, self._share(number, is_certain=True)))

    def _share(self, number: int, is_certain: bool) -> int:
        hosts: List[Host] = []
        own = i = 0
        # A failover may have lost one between two others. A host that died does not put it again.
        while i <= max(self._number, self._highest) or self._look(i) is not None:
            found = self._host if i == self._number else self._living(i, is_certain)
            if found is not None:
                own = len(hosts) if i == self._number else own
                hosts.append(found)
            i += 1
        self._highest = i - 1
        return shares_of(number, hosts)[own]

    def _lease_of(self, number: int) -> Lease:
        title = f'a process that starts collectors ({self._owner.place})'
        notes = self._host._asdict()
        return Lease(self._store, f'{_HOST}{number}', self._owner, title, HOST_S, notes=lambda earlier: notes)

    def _look(self, number: int) -> Optional[Header]:
        return fields_of(self._store.get(f'{_HOST}{number}'), _SEAT)

    def _living(self, number: int, is_certain: bool) -> Optional[Host]:
        lease = self._others.setdefault(number, self._lease_of(number))
        holder = lease.holder()
        if holder is None:
            return None
        seat = (number, holder.owner.id)
        if holder.is_certain:
            self._seen_alive.add(seat)
        found = self._look(number) if not is_certain or seat in self._seen_alive else None
        return None if found is None else Host(found['keep'], found['capacity'])
