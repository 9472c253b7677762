"""A lock whose holder downloads for all processes of a host and shows its progress.

The kernel releases the lock when its process exits. The host cache uses such a lock for its directory as well.

A waiting process waits while bytes arrive, even over a slow link: downloading them a second time would take longer. It
stops waiting if the holder is stopped, or received nothing for a while, as with a dead connection. The holder shows
progress by changing the modification time of the lock file. Waiting processes only check whether that time changed. It
also changes when another process gets the lock: the wait then starts anew.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import Callable, Iterator, Optional

from ding_store.storage.shared_memory.mapped_files import OwnerLock, changed_at, claim_within


class FetchLock:
    """
    Overview:
        The download lock of a stream or a value, as one process uses it. Thread-safe.
    Arguments:
        - path (:obj:`Callable`): Returns the path of the lock file and creates it if it does not exist.
        - patience_s (:obj:`Optional[float]`): Stop waiting after this time without progress of the holder, or up to
          twice as long.
    """

    patience_s = 1.0

    def __init__(self, path: Callable[[], str], patience_s: Optional[float] = None) -> None:
        self._path = path
        if patience_s is not None:
            self.patience_s = patience_s
        # The file's modification time at the last failed wait, and the length of that wait, which is not repeated.
        self._hung = -1, 0.0

    @contextmanager
    def taken(self, patience_s: Optional[float] = None, deadline: float = math.inf) -> Iterator[Optional[OwnerLock]]:
        """
        Overview:
            Hold the lock within the block. Yield None if another process holds it and makes no progress.
        Arguments:
            - patience_s (:obj:`Optional[float]`): Overrides the lock's ``patience_s`` for this call.
            - deadline (:obj:`float`): Stop waiting at this time of ``time.monotonic`` in any case.
        """
        path = self._path()
        patience_s = self.patience_s if patience_s is None else patience_s
        hung_at, waited_s = self._hung
        is_known = changed_at(path) == hung_at and patience_s <= waited_s
        held = claim_within(path, 0.0 if is_known else patience_s, deadline)
        if held is not None:
            self._hung = -1, 0.0
            held.touch()
        elif not is_known and time.monotonic() < deadline:
            self._hung = changed_at(path), patience_s
        try:
            yield held
        finally:
            if held is not None:
                held.close()
