"""Turns a version into a value: a reader follows its reference, downloads its parts, or waits for its writer."""

from __future__ import annotations

import logging
import time
from typing import Callable, Dict, Optional, Set, Tuple

from ding_store.errors import CorruptPayload, PayloadLost
from ding_store.storage.base import Buffer, Value, ValueVersion
from ding_store.storage.client import Client
from ding_store.storage.encoding.framing import decode_value
from ding_store.storage.encoding.value_parts import PartList, unpack
from ding_store.storage.protocol import Version
from ding_store.storage.shared_memory.value_downloads import fetch_payload

logger = logging.getLogger(__name__)

#: Minimum number of tries when versions are replaced during their download, even if the time is over.
_MIN_TRIES = 5


class ValueResolver:
    """
    Overview:
        Turns versions into values: follows references on this host, or waits for a backfill.
    Arguments:
        - follow (:obj:`Optional[Callable]`): Returns the value of a version in a slot, if this process can map it.
        - fetch (:obj:`Optional[Callable]`): Returns the payload of a version in parts, or None if one is missing. By
          default it downloads into this process's own memory.
        - patience_s (:obj:`float`): Seconds that a writer may take to backfill a version before the version counts as
          lost.
    """

    def __init__(
        self,
        client: Client,
        follow: Optional[Callable[[str, Version], Optional[Value]]] = None,
        patience_s: float = 30.0,
        fetch: Optional[Callable[[str, PartList], Optional[Buffer]]] = None,
    ) -> None:
        self._client = client
        self._follow = follow
        self._fetch = fetch or (lambda name, listed: fetch_payload(client, name, listed))
        self._patience_s = patience_s
        # value -> requested version, and until when it may come
        self._wanted: Dict[str, Tuple[ValueVersion, float]] = {}
        self._too_fast: Set[str] = set()  # values whose versions were replaced during their download

    def get(self, name: str, newer_than: int, timeout_s: float) -> Optional[Value]:
        """
        Overview:
            Return the newest version that is newer than ``newer_than``. Return None if there is none until the time is
            over. Return None with one warning if versions are replaced faster than they can be downloaded.
        Raises:
            - PayloadLost: There is a newer version, but its payload did not become readable here in time.
            - CorruptPayload: Parts of the newest version are missing.
        """
        end = deadline = time.monotonic() + timeout_s
        known, missed, num_tries = newer_than, (0, '', False), 0
        while True:
            left = max(0.0, deadline - time.monotonic())
            found = self._client.get(name, known, left, or_filled=known != newer_than)
            if found is None and known != newer_than:
                raise PayloadLost(_lost(name, known))
            if found is None or not found.version.is_of_another_put(newer_than):
                return None
            value = self._value(name, found)
            if value is not None:
                self._too_fast.discard(name)
                return value
            seen = found.version, found.version.put_id, bool(found.payload)
            is_on_its_way = found.is_coming and not found.payload
            is_over = num_tries >= _MIN_TRIES and time.monotonic() >= end
            if seen != missed and not is_on_its_way and not is_over:
                missed, num_tries = seen, num_tries + 1  # Replaced during its download: look again.
                continue
            if seen == missed and found.payload:
                raise CorruptPayload(f'version {found.version} of value {name!r}: parts of it are missing')
            if found.payload:
                self._warn_too_fast(name)
                return None
            known = found.version
            deadline = max(deadline, self._ask(name, known, found.is_coming))

    def forget(self, name: str) -> None:
        """Drop the state of a value that was deleted."""
        self._wanted.pop(name, None)
        self._too_fast.discard(name)

    def _value(self, name: str, found: Version) -> Optional[Value]:
        value = self._follow(name, found) if self._follow is not None and found.reference else None
        return self._over_the_wire(name, found) if value is None and found.payload else value

    def _over_the_wire(self, name: str, found: Version) -> Optional[Value]:
        try:
            listed = unpack(found.payload)
            payload = found.payload if listed is None else self._fetch(name, listed)
        except CorruptPayload as e:
            raise CorruptPayload(f'version {found.version} of value {name!r}: {e}') from e
        # The checksums of parts were verified by the download.
        return None if payload is None else decode_value(name, found.version, payload, verify=listed is None)

    def _warn_too_fast(self, name: str) -> None:
        if name not in self._too_fast:
            self._too_fast.add(name)
            logger.warning('value %r: versions are replaced faster than we can download them. Put it less often.', name)

    def _ask(self, name: str, version: ValueVersion, is_coming: bool) -> float:
        asked, until = self._wanted.get(name, (0, 0.0))
        if version.is_of_another_put(asked):
            until = time.monotonic() + self._patience_s
            self._wanted[name] = version, until
            if not is_coming:
                self._client.enter().request_version(name)
        return until


def _lost(name: str, version: int) -> str:
    return (
        f'version {version} of value {name!r} cannot be read: it is in a file of another host, or a removed one, and '
        'its writer does not send it. The writer was killed, or cannot reach the store. Put a new version.'
    )
