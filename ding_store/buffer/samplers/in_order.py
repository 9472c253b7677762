"""The base of samplers that give out rows in an order of their own, so that their samples take turns."""

from __future__ import annotations

import threading
from typing import Optional

from ding_store.buffer.forks import hold_over_forks
from ding_store.buffer.samplers.base import DrawsAhead, Sampler


class InOrder(Sampler):
    """
    Overview:
        Samples take turns, and one Prefetch at a time draws ahead, so that rows come in order and no two samples get
        the same turn. A subclass overrides ``choose``, ``delivered``, ``drawn`` and ``returned``.
    """

    def __init__(self) -> None:
        #: Serializes samples through this sampler, so that no two of them get the same rows.
        self.lock = hold_over_forks(threading.RLock())
        # A strong reference, so that batches that a view drew ahead can go back after the view is gone.
        self._drawer: Optional[DrawsAhead] = None

    def sampled_by(self, ahead: Optional[DrawsAhead]) -> None:
        """
        Overview:
            Prepare a sample. Batches that another Prefetch drew ahead go back, so that rows come in order and once.
        Arguments:
            - ahead: The Prefetch that draws ahead for this sample, or None.
        """
        if self._drawer is not None and self._drawer is not ahead:
            self._drawer.give_back()
        self._drawer = ahead

    def refuse_options(self, replace: bool, sample_range: Optional[slice]) -> None:
        """
        Raises:
            - TypeError: An argument of ``choose`` is given that contradicts the order.
        """
        if replace or sample_range is not None:
            raise TypeError(
                f'a {type(self).__name__} samples rows once. Leave out replace ({replace}) and sample_range '
                f'({sample_range}).'
            )
