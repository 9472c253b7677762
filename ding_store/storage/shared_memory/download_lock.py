"""Which process of a host fetches, for all of them: a lock that ends with its process, and that shows whether it works.
The lock of the whole cache is one of these, too.

Who waits for the lock waits for as long as bytes come, also over a slow link: that is still sooner than to ask for all
of them once more. It is waited for no more when its holder is stopped, or has got nothing for a while, as from a
connection that is dead. Bytes are shown by the time of the file's last change, of which only that it moves matters;
and so is that the lock went to another, who is waited for again.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Iterator, Optional

from ding_store.storage.shared_memory.mapped_files import OwnerLock, changed_at, claim_within


class FetchLock:
    """
    Overview:
        Of one stream, or one value, as one process takes it. Thread-safe.
    Arguments:
        - path (:obj:`Callable`): The lock's file; made if it is not there.
        - patience_s (:obj:`Optional[float]`): Without a byte for so long, and up to twice as long, it is waited for no
          more.
    """

    patience_s = 1.0

    def __init__(self, path: Callable[[], str], patience_s: Optional[float] = None) -> None:
        self._path = path
        if patience_s is not None:
            self.patience_s = patience_s
        # The file's last change, when it was waited for in vain, and how long: who waits no longer need not again.
        self._hung = -1, 0.0

    @contextmanager
    def taken(self, patience_s: Optional[float] = None) -> Iterator[Optional[OwnerLock]]:
        """
        Overview:
            Within the block it is for us to fetch; None if another hangs over it.
        Arguments:
            - patience_s (:obj:`Optional[float]`): Another one for this time.
        """
        path = self._path()
        patience_s = self.patience_s if patience_s is None else patience_s
        hung_at, waited_s = self._hung
        is_known = changed_at(path) == hung_at and patience_s <= waited_s
        held = claim_within(path, 0.0 if is_known else patience_s)
        if held is not None:
            self._hung = -1, 0.0
            held.touch()
        elif not is_known:
            self._hung = changed_at(path), patience_s
        try:
            yield held
        finally:
            if held is not None:
                held.close()
