"""DI-engine's buffer middleware that keeps tables of its own, served by what sees every change of the buffer."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch
from ding.data.buffer import BufferedData
from ding.data.buffer.middleware import PriorityExperienceReplay

from ding_store.buffer.sampling.prioritized import Prioritized
from ding_store.errors import ConfigError, NotEnoughData

#: What DI-engine's middleware adds to updated priorities.
_EPSILON = 1e-5
#: Counts of rows that are gone, which nobody minds.
_FEW = 64
#: What DI-engine's PriorityExperienceReplay must not be around, and why.
_NOT_INSIDE = {
    'staleness_check': 'would take rows out that are drawn already',
    'sample_range_view': 'would come after the draw, which it is to restrict',
}


def served(middleware: Callable, buffer_: Any) -> Callable:
    """
    Overview:
        What does the same as this middleware, also where rows leave without it, or come twice, or others are around it;
        else itself.
    Raises:
        - ConfigError: It cannot be inside of a PriorityExperienceReplay that is used already.
    """
    name = _name_of(middleware)
    if name in _NOT_INSIDE and any(isinstance(each, PriorityExperienceReplay) for each in buffer_._middleware):
        raise ConfigError(
            f'{name} is used inside of PriorityExperienceReplay, but {_NOT_INSIDE[name]}: '
            f'use({name}(...)) before use(PriorityExperienceReplay(...))'
        )
    if type(middleware) is PriorityExperienceReplay and _is_possible(middleware):
        return ServedPriorities(middleware, buffer_)
    if name == 'use_time_check':
        need_delete = _inside(middleware, 'sample', '_check_use_count', '_need_delete')
        return ServedUses(_inside(need_delete, 'max_use'), buffer_)
    if name == 'sample_range_view':
        return ServedRange(_inside(middleware, 'sample_range'))
    return middleware


class ServedPriorities(PriorityExperienceReplay):
    """PriorityExperienceReplay: its settings and calls, the masses of ``Prioritized``."""

    def __init__(self, settings: PriorityExperienceReplay, buffer_: Any) -> None:
        self.buffer, self.IS_weight, self.max_priority = buffer_, settings.IS_weight, settings.max_priority
        self.sampler = Prioritized(
            alpha=settings.priority_power_factor,
            beta=settings.IS_weight_power_factor,
            beta_anneal_steps=settings.IS_weight_anneal_train_iter,
            epsilon=0.0,
        )
        self.loaded()

    def push(self, chain: Callable, data: Any, meta: Optional[dict] = None, *args: Any, **kwargs: Any) -> BufferedData:
        if meta is None:
            meta = {'priority': data.pop('priority')} if 'priority' in data else {}
        meta.setdefault('priority', self.max_priority)
        values = self.sampler.check([float(meta['priority'])], 1)
        buffered = chain(data, *args, meta=meta, **kwargs)
        self.sampler.insert(np.array([int(buffered.index)]), values)
        return buffered

    def sample(self, chain: Callable, size: int, *args: Any, **kwargs: Any) -> List[BufferedData]:
        if args or kwargs.get('groupby') or kwargs.get('indices') or kwargs.get('unroll_len'):
            raise TypeError(
                'PriorityExperienceReplay draws elements by their priorities: no groupby, indices or unroll_len with '
                'it; sample_sequences() of a view without middleware draws groups'
            )
        kwargs.pop('replace', None)
        index, ignore = self.buffer.table.index, kwargs.pop('ignore_insufficient', False)
        try:
            with self.buffer._sampling(size):
                with index.lock:
                    slots = self.sampler.choose(index, size, True, kwargs.pop('sample_range', None))
                    weights = self.sampler.weigh(slots) if self.IS_weight else None
                    rows = index.row_of_slot[slots]
                items: List[BufferedData] = chain(indices=[str(row) for row in rows.tolist()], **kwargs)
        except NotEnoughData:
            if ignore:
                return []
            raise
        for item, weight in zip(items, [] if weights is None else weights.tolist()):
            # Of this sample alone: written past the row's own meta, which would keep it.
            dict.__setitem__(item.meta, 'priority_IS', weight)
            item.data['priority_IS'] = torch.tensor([weight], dtype=torch.float32)
        return items

    def update(
        self, chain: Callable, index: str, data: Any = None, meta: Any = None, *args: Any, **kwargs: Any
    ) -> bool:
        values = None
        if meta is not None and 'priority' in meta:
            values = self.sampler.check([float(meta['priority'])], 1) + _EPSILON
        found: bool = chain(index, data, meta, *args, **kwargs)
        if values is not None:
            self.sampler.update(np.array([int(index)]), values)
            self.max_priority = max(self.max_priority, float(values[0])) if found else self.max_priority
        return found

    def delete(self, chain: Callable, index: str, *args: Any, **kwargs: Any) -> None:
        chain(index, *args, **kwargs)

    def clear(self, chain: Callable) -> None:
        self.max_priority = 1.0
        chain()

    def loaded(self) -> None:
        """The buffer has other rows, or another table, or has some already: their metas say their priorities."""
        # A sampler has one table for good, but its copy, which has none, goes on where it is.
        self.sampler = copy.deepcopy(self.sampler)
        self.sampler.attach(self.buffer.table.index)
        rows, found = self.buffer._elements.metas.values_of('priority')
        values = np.array([float(value) for value in found])
        self.sampler.insert(rows, values)
        self.max_priority = max(self.max_priority, float(values.max(initial=0.0)))


class ServedUses:
    """use_time_check: rows leave that were sampled so often; twice in one batch counts twice."""

    def __init__(self, max_use: float, buffer_: Any) -> None:
        self._max_use, self._buffer = max_use, buffer_
        self._counts: Dict[str, int] = {}
        self.loaded()

    def __call__(self, action: str, chain: Callable, *args: Any, **kwargs: Any) -> Any:
        result = chain(*args, **kwargs)
        if action == 'sample':
            self._count([item for each in result for item in (each if isinstance(each, list) else [each])])
        return result

    def _count(self, items: List[BufferedData]) -> None:
        for item in items:
            self._counts[item.index] = self._counts.get(item.index, 0) + 1
        for item in items:
            # Of several of one row only the first has the row's own meta.
            item.meta['use_count'] = self._counts[item.index]
        used_up = {item.index for item in items if self._counts[item.index] >= self._max_use}
        self._buffer.delete(sorted(used_up, key=int))
        for index in used_up:
            self._counts.pop(index, None)
        if len(self._counts) > 2 * self._buffer.count() + _FEW:
            self._forget_gone()

    def _forget_gone(self) -> None:
        """Rows left that were not used up. O(rows), so not before they are as many as those that are there."""
        there = self._buffer.table.contains(np.array([int(index) for index in self._counts], np.int64))
        self._counts = {index: uses for (index, uses), is_there in zip(self._counts.items(), there) if is_there}

    def loaded(self) -> None:
        """The buffer has other rows, or another table: their metas say their uses."""
        rows, uses = self._buffer._elements.metas.values_of('use_count')
        self._counts = {str(row): count for row, count in zip(rows.tolist(), uses)}


class ServedRange:
    """sample_range_view: with all other arguments of the sample."""

    def __init__(self, sample_range: slice) -> None:
        self._range = sample_range

    def __call__(self, action: str, chain: Callable, *args: Any, **kwargs: Any) -> Any:
        if action == 'sample':
            kwargs['sample_range'] = self._range
        return chain(*args, **kwargs)


def _name_of(middleware: Callable) -> str:
    """The function of DI-engine that made it; '' for anything else."""
    module, name = middleware.__module__ or '', getattr(middleware, '__qualname__', '').partition('.')[0]
    return name if module == f'ding.data.buffer.middleware.{name}' else ''


def _is_possible(settings: PriorityExperienceReplay) -> bool:
    """Whether ``Prioritized`` takes these settings."""
    return all(0 <= power <= 1 for power in (settings.priority_power_factor, settings.IS_weight_power_factor))


def _inside(function: Callable, *names: str) -> Any:
    """What a function's closure has under this name, and that one's under the next."""
    found: Any = function
    for name in names:
        cells = zip(found.__code__.co_freevars, found.__closure__)
        found = {key: cell.cell_contents for key, cell in cells}[name]
    return found
