"""The part of StoreBuffer that attaches its sampler, updates priorities and persists them."""

from __future__ import annotations

from typing import Any, Optional, Union

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.elements import Elements
from ding_store.buffer.persistence.persisted import PersistedState
from ding_store.buffer.samplers.base import PrioritySampler, Sampler, check_is_sampler
from ding_store.buffer.samplers.fifo import Fifo
from ding_store.buffer.samplers.limited import Limited
from ding_store.buffer.samplers.persisted_priorities import PersistedPriorities
from ding_store.buffer.samplers.rate_limiter import RateLimiter
from ding_store.buffer.table.table import Keep
from ding_store.errors import PriorityError


class Priorities:
    """
    Overview:
        The buffer's sampler, attached to the table. If the table has a directory, the sampler's state is persisted
        there.
    """

    limiter: Optional[RateLimiter]
    _elements: Elements
    _sampler: Sampler
    #: Receives priorities. None if the sampler has no priorities.
    _priorities: Optional[Union[PrioritySampler, PersistedPriorities]] = None

    def update_priorities(self, rows: Array, priority: Any) -> None:
        """
        Overview:
            Set new priorities, after a training step on these rows. If a row is repeated, its last priority counts.
            Rows that are gone are skipped, and the sampler counts them. O(B log(size)).
        Arguments:
            - rows (:obj:`np.ndarray`): ``Batch.rows``, shape ``(B,)``.
            - priority: ``(B,)``, finite numbers >= 0.
        Raises:
            - PriorityError: A priority is not such a number, or the sampler has no priorities. Nothing changed.
        """
        self._with_priorities().update(rows, priority)

    def _sample_with(self, sampler: Sampler) -> None:
        self._attach(sampler)
        self._sampler, self._priorities = sampler, self._kept(sampler, '')

    def _kept(self, sampler: Sampler, view: Optional[str]) -> Optional[Union[PrioritySampler, PersistedPriorities]]:
        """Persist an attached sampler's state under this name. Return the object that receives its priorities."""
        table_dir = self._elements.table.table_dir
        if table_dir is None or view is None:
            return sampler if isinstance(sampler, PrioritySampler) else None
        kept = PersistedState(table_dir, view)
        if isinstance(sampler, (Limited, Fifo)):
            sampler.keep(kept)
        if isinstance(sampler, PrioritySampler):
            return PersistedPriorities(sampler, self._elements.table.index, kept.values('priority'))
        return None

    def _keep_counts(self) -> None:
        table_dir, table = self._elements.table.table_dir, self._elements.table
        if table_dir is not None and self.limiter is not None:
            record = table_dir.record('limiter', of_rows=False)
            self.limiter.keep(record, lambda: table.next_row - table_dir.num_skipped)

    def _attach(self, sampler: Sampler) -> None:
        check_is_sampler(sampler)
        sampler.attach(self._elements.table.index)
        if isinstance(sampler, Limited):
            sampler.bind(self._elements)

    def _with_priorities(self) -> Union[PrioritySampler, PersistedPriorities]:
        if self._priorities is None:
            raise PriorityError(
                f'the sampler {type(self._sampler).__name__} has no priorities. Create the buffer with '
                'StoreBuffer(size, sampler=Prioritized()).'
            )
        return self._priorities


def keeping(sampler: Union[PrioritySampler, PersistedPriorities], priority: Array) -> Optional[Keep]:
    """Return the callable that persists new rows' priorities before the rows are live. None without a path."""
    return sampler.keeping(priority) if isinstance(sampler, PersistedPriorities) else None
