"""The pace of reports: the more members a run has, the less often each collector reports. The server's load stays."""

from __future__ import annotations

import math
import time

from ding_store.config import StoreConfig
from ding_store.run.foreign import fields_of, is_count
from ding_store.run.members import Members
from ding_store.storage.store import Store

#: A value with the number of members that report. The learner puts it.
PACE = 'pace'
#: So many members report every ``heartbeat_s``. With twice as many, a collector reports half as often.
FULL_PACE = 50
#: How often a member between two reports looks at the pace, which may have changed, and at the run's end.
LOOK_EVERY_S = 5.0
#: How often the learner puts the same number again, because the server may have lost it.
PUT_EVERY_S = 30.0
#: A change by less is not put.
SHARE = 0.2


def interval_s(config: StoreConfig, num_members: int) -> float:
    """
    Return the seconds between two reports of a collector. They stay below ``peer_timeout_s``, after which a process
    that waits for silent collectors gives up.
    """
    longest_s = max(config.heartbeat_s, config.peer_timeout_s / 3)
    return min(config.heartbeat_s * max(1.0, num_members / FULL_PACE), longest_s)


class Pace:
    """
    Overview:
        One member's view of the pace.
    Arguments:
        - is_counted_here (:obj:`bool`): This member is the learner: it counts the members.
    """

    def __init__(self, store: Store, config: StoreConfig, is_counted_here: bool) -> None:
        self._store, self._config = store, config
        self._members = Members(store) if is_counted_here else None
        self._num_members, self._version = 0, 0
        self._looked_at = self._put_at = -math.inf

    def interval_s(self) -> float:
        """Return the seconds between two reports of a collector, after a look at the server if it is time for one."""
        now = time.monotonic()
        if self._members is not None:
            self._count(self._members.refresh().num_reporting())
        elif now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._read()
        return interval_s(self._config, self._num_members)

    def _read(self) -> None:
        value = self._store.get(PACE, self._version)
        if value is not None:
            self._version = value.version
            fields = fields_of(value, {'members': is_count})
            self._num_members = 0 if fields is None else fields['members']

    def _count(self, num_members: int) -> None:
        now, known = time.monotonic(), max(self._num_members, FULL_PACE)
        counted = max(num_members, FULL_PACE)
        is_other = abs(counted - known) > SHARE * known or (counted == FULL_PACE != known)
        is_old = known > FULL_PACE and now - self._put_at >= PUT_EVERY_S
        if is_other or is_old:
            self._store.put(PACE, {'members': num_members}, {})
            self._num_members, self._put_at = num_members, now
