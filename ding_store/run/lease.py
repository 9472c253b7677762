"""A lease: something of a run that one owner has at a time, as long as others see that it lives. It is a value."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional

from ditk import logging

from ding_store.errors import VersionConflict
from ding_store.run.foreign import fields_of, is_count, is_number, is_text
from ding_store.run.members import pid_space
from ding_store.storage.base import Header, Value, ValueVersion, put_id_of
from ding_store.storage.embedded.supervisor.clients import birth_of, is_gone
from ding_store.storage.store import Store

#: How often a process that waits for a lease looks at it. Of a longer pause, in which the server may have been away and
#: no owner could renew its lease, only this much counts.
LOOK_S = 0.5
#: The longest time that an owner may leave a lease without a renewal.
MAX_TTL_S = 60.0
#: A wait for an owner that may take this long is announced.
NOTICE_S = 10.0
#: The time until the first renewal of an owner that is starting.
START_S = 30.0


#: Role of a process that runs a whole pipeline, and shares the updates of its policy with the other workers.
WORKER = 'worker'
#: A run has at most one process of each of these roles, or one for each rank. Each has a lease.
SINGLE_ROLES = ('learner', 'evaluator', WORKER)


def role_lease(role: str, rank: int = 0) -> str:
    """Return the name of a role's lease. Each of several learners or workers has its own."""
    return f'role/{role}-{rank}' if rank else f'role/{role}'


def _is_bool(field: Any) -> bool:
    return isinstance(field, bool)


#: The fields of a lease. It may have further ones, its notes.
FIELDS: Mapping[str, Callable[[Any], bool]] = {
    'owner': is_text,
    'pid_space': is_text,
    'pid': is_count,
    'birth': is_text,
    'host': is_text,
    'title': is_text,
    'token': is_count,
    'beat': is_count,
    'ttl_s': is_number,
    'is_starting': _is_bool,
    'is_released': _is_bool,
}


class Owner(NamedTuple):
    """
    Overview:
        The owner of leases: one process, or all processes of one launch. It is gone when its process is gone.
    Attributes:
        - id (:obj:`str`): Two processes with the same id are one owner.
    """

    id: str
    pid_space: str
    pid: int
    birth: str
    host: str

    @classmethod
    def this_process(cls, name: str = '') -> Owner:
        """Return this process as an owner, whose id may be another name, such as that of its launch."""
        space, pid = pid_space(), os.getpid()
        birth = birth_of(pid)
        return cls(name or f'{space} {pid} {birth}', space, pid, birth, socket.gethostname())

    @classmethod
    def first_process(cls, launch: str) -> Owner:
        """Return the first process of a launch as its owner. It must run. A launch has its name: ``pid_space pid``."""
        space, _, pid = launch.rpartition(' ')
        return cls(launch, space, int(pid), birth_of(int(pid)), socket.gethostname())

    def has_exited(self) -> bool:
        """Return True if its process has exited. Only a process of the same pid space can see that."""
        return self.is_here and is_gone(self.pid, self.birth)

    @property
    def is_here(self) -> bool:
        return self.pid_space == pid_space()

    @property
    def place(self) -> str:
        return f'pid {self.pid} on {self.host}'


def owner_in(fields: Header) -> Owner:
    """Return the owner that a lease's fields name."""
    return Owner(fields['owner'], *(fields[name] for name in Owner._fields[1:]))


class Holder(NamedTuple):
    """Another owner that has a lease."""

    title: str
    owner: Owner
    ttl_s: float
    is_certain: bool  # it lives: a further wait would change nothing


class Lease:
    """
    Overview:
        One process's side of a lease. The owner calls ``renew`` within each ``ttl_s``. Others take the lease over when
        the owner's process has exited, or when they saw no renewal for ``ttl_s`` of their own time. An owner that is
        starting renews nothing yet. Where its process can be seen, it has the lease while the process lives.

        A compare-and-set decides, so two owners never acquire one lease from the same version of it. The token grows
        with each new owner, while the server has its memory. If the server loses the lease or goes back in time, the
        first process that acts has it. The owner before learns that from its next ``renew``.
    Arguments:
        - name (:obj:`str`): Name of the value.
        - title (:obj:`str`): What has the lease, for errors of other processes.
        - ttl_s (:obj:`float`): Time within which the owner renews the lease.
        - is_starting (:obj:`bool`): True until the first ``renew``.
        - notes (:obj:`Callable`): Returns further fields, given the fields of the owner before. May raise an error.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        owner: Owner,
        title: str,
        ttl_s: float,
        is_starting: bool = False,
        notes: Callable[[Header], Mapping[str, Any]] = lambda earlier: {},
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.owner, self.title, self.ttl_s = name, owner, title, ttl_s
        self.token = 0  # 0: this process has not acquired the lease
        self._store, self._is_starting, self._notes_after, self._clock = store, is_starting, notes, clock
        self._notes: Mapping[str, Any] = {}
        self._beat = 0
        self._version: int = ValueVersion(0)  # of our last put
        self._taken_from = ''  # id of the put that the lease was taken over from
        self._seen: Optional[Value] = None  # in the last look
        self._fields: Optional[Header] = None  # of that
        self._looked_at, self._silent_s = 0.0, 0.0  # and for how long it has been the same

    def holder(self) -> Optional[Holder]:
        """Look at the lease once. Return its holder, or None if this owner may take it."""
        has_moved = self._look()
        fields = self._fields
        if fields is None or fields['owner'] == self.owner.id or fields['is_released']:
            return None
        owner, ttl_s = owner_in(fields), min(float(fields['ttl_s']), MAX_TTL_S)
        is_starting = fields['is_starting'] and owner.is_here
        if owner.has_exited() or (self._silent_s >= ttl_s and not is_starting):
            return None
        return Holder(fields['title'], owner, ttl_s, is_starting or has_moved)

    def _look(self) -> bool:
        """Read the lease. Return True if it is another version than in the look before."""
        before, now = self._version_seen, self._clock()
        self._seen = self._store.get(self.name)
        self._fields = fields_of(self._seen, FIELDS)
        is_same = (self._version_seen, put_id_of(self._version_seen)) == (before, put_id_of(before))
        self._silent_s = self._silent_s + min(now - self._looked_at, LOOK_S) if is_same else 0.0
        self._looked_at = now
        return before != 0 and not is_same

    @property
    def _version_seen(self) -> int:
        return self._seen.version if self._seen is not None else ValueVersion(0)

    def living(self) -> Optional[Holder]:
        """Return the holder once it is certain that it lives, or None once this owner may take the lease."""
        found = self.holder()
        if found is not None and not found.is_certain and found.ttl_s >= NOTICE_S:
            logging.warning(
                f'ding_store: waiting up to {found.ttl_s:.0f} s to see whether {found.title} of run '
                f'{self._store.run!r} runs: it has {self.name!r}'
            )
        while found is not None and not found.is_certain:
            self.wait(min(found.ttl_s, LOOK_S))
            found = self.holder()
        return found

    def wait(self, timeout_s: float) -> None:
        """Wait until the lease is another one than in the last look, or for ``timeout_s``."""
        self._store.get(self.name, newer_than=self._version_seen, timeout_s=timeout_s)

    def try_acquire(self) -> Optional[Holder]:
        """Acquire the lease if this owner may take it now. Return None if so, and otherwise the holder."""
        return self._acquire(self.holder)

    def acquire(self) -> Optional[Holder]:
        """Acquire the lease once this owner may take it. Return None if so, and otherwise a holder that lives."""
        return self._acquire(self.living)

    def _acquire(self, find: Callable[[], Optional[Holder]]) -> Optional[Holder]:
        while True:
            found = find()
            if found is not None:
                return found
            try:
                self._take()
                return None
            except VersionConflict:
                continue  # another process was first: look at its lease

    def _take(self) -> None:
        """Put this owner's lease over the version of the last look."""
        earlier = self._fields or {}
        is_own = earlier.get('owner') == self.owner.id
        token = earlier.get('token', 0) + (not is_own)
        self._notes = self._notes_after(earlier)
        self._beat = earlier['beat'] if is_own else 0
        self._version = self._store.decide(self.name, self._header(token), self._version_seen)
        self.token = token
        if not is_own:
            self._taken_from = put_id_of(self._version_seen)

    def renew(self) -> None:
        """
        Overview:
            Show others that the owner lives. Put the lease again if the server lost it.
        Raises:
            - VersionConflict: Another owner has the lease. This one has lost it, and must stop.
        """
        self._is_starting = False
        self._beat += 1
        while True:
            try:
                self._version = self._store.put(self.name, self._header(self.token), {}, self._version)
                return
            except VersionConflict:
                self._look()
            fields = self._fields
            # A renewal by another process of this owner, an older version of this lease, or the lease that was taken
            # over: in the last two cases the server went back in time.
            is_ours = fields is not None and fields['owner'] == self.owner.id
            is_before = self._taken_from != '' and put_id_of(self._version_seen) == self._taken_from
            if fields is not None and not is_ours and not is_before:
                raise VersionConflict(f'{fields["title"]} has taken {self.name!r} of run {self._store.run!r} over')
            self._version = self._version_seen
            self._beat = max(self._beat, fields['beat'] + 1) if fields is not None and is_ours else self._beat

    def release(self) -> None:
        """Give the lease up. Do nothing if this process has not acquired it, or another process has it by now."""
        if self.token:
            with contextlib.suppress(VersionConflict):
                self._store.put(self.name, self._header(self.token, is_released=True), {}, self._version)
            self.token = 0

    def _header(self, token: int, is_released: bool = False) -> Dict[str, Any]:
        owner = self.owner._asdict()
        return {
            **self._notes,
            'owner': owner.pop('id'),
            **owner,
            'title': self.title,
            'token': token,
            'beat': self._beat,
            'ttl_s': max(START_S, self.ttl_s) if self._is_starting else self.ttl_s,
            'is_starting': self._is_starting,
            'is_released': is_released,
        }
