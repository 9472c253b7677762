"""Equivalents of DI-engine's buffer middleware that follow every change of a StoreBuffer."""

from __future__ import annotations

import copy
import logging
import math
from types import FunctionType
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import numpy as np
import torch
from ding.data.buffer import BufferedData
from ding.data.buffer.middleware import PriorityExperienceReplay

from ding_store.buffer.array_types import Array
from ding_store.buffer.ding.lists import Items
from ding_store.buffer.samplers.prioritized import Prioritized
from ding_store.buffer.sequences.group_choice import GroupRuns
from ding_store.buffer.table.row_choices import check_sample_arguments, split
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import ConfigError, NotEnoughData

logger = logging.getLogger(__name__)

#: DI-engine's middleware adds this to updated priorities.
_EPSILON = 1e-5
#: The number of stale counts, of rows that are gone, that may stay before they are removed.
_FEW = 64
#: staleness_check requires this key in every meta.
_COLLECTED = 'train_iter_data_collected'
#: The arguments of ``sample`` after its size, in order.
_OPTIONS = ('indices', 'replace', 'sample_range', 'ignore_insufficient', 'groupby', 'unroll_len')
#: These middleware always go outside of a PriorityAdapter, whatever the order of ``use``. The first two limit which
#: rows may be drawn. Inside, they would see elements that are drawn already.
_LIMITS = ('staleness_check', 'sample_range_view')
#: The others work on the groups that were drawn.
_OUTSIDE = (*_LIMITS, 'group_sample', 'padding')
#: DI-engine's middleware that have an equivalent here.
_REPLACED = ('use_time_check', *_LIMITS)


class Equivalent:
    """
    Overview:
        The base of middleware that do what one of DI-engine does, and follow every change of a StoreBuffer: rows that
        leave by another way, that come twice in a batch, and other middleware around them.
    """

    #: The name of DI-engine's middleware.
    name = ''

    def loaded(self) -> None:
        """Read all state from the metas. Called if the buffer has other rows or another table."""

    def take_over(self, other: Any) -> None:
        """Continue where another middleware is, whose buffer this one's buffer was copied from."""


def use(chain: List[Callable], middleware: Callable, buffer_: Any) -> None:
    """
    Overview:
        Add a middleware to the chain, at a place where it works. A PriorityExperienceReplay of DI-engine gets replaced
        by its equivalent.
    Raises:
        - ConfigError: The middleware must be outside of the PriorityExperienceReplay that the chain already has.
    """
    name = _name_of(middleware)
    if name in _REPLACED and not isinstance(middleware, Equivalent):
        logger.warning(
            "%s is DI-engine's own: it does not follow rows that leave without it. Import it from "
            'ding_store.buffer.ding instead.',
            name,
        )
    if type(middleware) is PriorityExperienceReplay and _is_possible(middleware):
        middleware = PriorityAdapter(middleware, buffer_)
    drawn_at = [place for place, each in enumerate(chain) if isinstance(each, PriorityExperienceReplay)]
    follows_rows = bool(drawn_at) and isinstance(chain[drawn_at[0]], PriorityAdapter)
    if follows_rows and name in _OUTSIDE:
        chain.insert(drawn_at[0], middleware)
    elif follows_rows or not drawn_at or name not in _LIMITS:
        chain.append(middleware)
    else:
        raise ConfigError(
            f'{name} cannot be used inside PriorityExperienceReplay, which draws rows before it. '
            f'Call use({name}(...)) before use(PriorityExperienceReplay(...)).'
        )


def tell_loaded(chain: Iterable[Callable]) -> None:
    """Tell equivalents in the chain that the buffer has other rows or another table."""
    for middleware in chain:
        if isinstance(middleware, Equivalent):
            middleware.loaded()


def copied(chain: Iterable[Callable], memo: Dict[int, Any]) -> List[Callable]:
    """Return a deep copy of the chain for a copied buffer, which is in ``memo`` already."""
    copies: List[Callable] = []
    for own in chain:
        middleware = copy.deepcopy(own, memo)
        copies.append(middleware)
        if isinstance(middleware, Equivalent):
            middleware.take_over(own)
    return copies


def _name_of(middleware: Callable) -> str:
    """Return the name under which DI-engine has a middleware or its equivalent, or '' for any other."""
    if isinstance(middleware, Equivalent):
        return middleware.name
    if not isinstance(middleware, FunctionType):
        return ''
    module, name = middleware.__module__ or '', middleware.__qualname__.partition('.')[0]
    return name if module == f'ding.data.buffer.middleware.{name}' else ''


class PriorityAdapter(Equivalent, PriorityExperienceReplay):
    """PriorityExperienceReplay with the same settings and calls, on the sum tree of ``Prioritized``."""

    def __init__(self, settings: PriorityExperienceReplay, buffer_: Any) -> None:
        self.buffer, self.IS_weight, self.max_priority = buffer_, settings.IS_weight, settings.max_priority
        self.priority_power_factor = settings.priority_power_factor
        self.IS_weight_anneal_train_iter = settings.IS_weight_anneal_train_iter
        self.sampler = Prioritized(
            alpha=settings.priority_power_factor,
            beta=settings.IS_weight_power_factor,
            beta_anneal_steps=settings.IS_weight_anneal_train_iter,
            epsilon=0.0,
        )
        # The user holds ``settings``. Its own tables stay unused.
        settings.state_dict, settings.load_state_dict = self.state_dict, self.load_state_dict
        self.loaded()

    def push(self, chain: Callable, data: Any, meta: Optional[dict] = None, *args: Any, **kwargs: Any) -> BufferedData:
        if meta is None:
            meta = {'priority': data.pop('priority')} if 'priority' in data else {}
        meta.setdefault('priority', self.max_priority)
        values = self.sampler.priorities.check([float(meta['priority'])], 1)
        buffered = chain(data, *args, meta=meta, **kwargs)
        self.sampler.priorities.insert(np.array([int(buffered.index)]), values)
        return buffered

    @property
    def IS_weight_power_factor(self) -> float:  # noqa: N802  DI-engine's name
        """The exponent of the importance weights now."""
        return self.sampler.beta

    def sample(self, chain: Callable, size: Optional[int] = None, *args: Any, **kwargs: Any) -> Items:
        options = {**dict(zip(_OPTIONS, args)), **kwargs}
        if options.get('indices'):
            read: Items = chain(size, **options)
            return read  # Reads by index draw nothing.
        groupby, unroll_len, limits = (options.pop(name, None) for name in ('groupby', 'unroll_len', 'sample_range'))
        replace, ignore = (options.pop(name, False) for name in ('replace', 'ignore_insufficient'))
        num_drawn, _ = check_sample_arguments(size, options.pop('indices', None), groupby, unroll_len, limits)
        try:
            with self.buffer._samples.sampling(num_drawn):
                index = self.buffer.table.index
                if groupby is None:
                    rows, weights = self._draw(index, num_drawn, limits)
                    lengths = None
                else:
                    rows, weights, lengths = self._draw_groups(index, num_drawn, groupby, unroll_len, replace, limits)
                items: List[BufferedData] = chain(indices=[str(row) for row in rows.tolist()], **options)
        except NotEnoughData:
            if ignore:
                return []
            raise
        for item, weight in zip(items, weights.tolist()):
            # This bypasses the row's own meta, which would keep the key for later samples.
            dict.__setitem__(item.meta, 'priority_idx', int(item.index))
            if self.IS_weight:
                dict.__setitem__(item.meta, 'priority_IS', weight)
                item.data['priority_IS'] = torch.tensor([weight], dtype=torch.float32)
        return items if lengths is None else split(items, lengths)

    @property
    def buffer_idx(self) -> Dict[int, str]:
        """The index of every element, by its ``priority_idx``."""
        return {row: str(row) for row in self.buffer.table.rows_by_age().tolist()}

    def _draw(self, index: RowIndex, size: int, limits: Optional[slice]) -> Tuple[Array, Array]:
        """Draw rows ``(size,)`` and their weights."""
        with index.lock:
            slots = self.sampler.choose(index, size, True, limits)
            # Without weights, beta does not advance.
            return index.row_of_slot[slots], self.sampler.weights(slots) if self.IS_weight else np.ones(len(slots))

    def _draw_groups(
        self,
        index: RowIndex,
        size: int,
        groupby: str,
        unroll_len: Optional[int],
        replace: bool,
        limits: Optional[slice],
    ) -> Tuple[Array, Array, List[int]]:
        """
        Draw ``size`` groups, in proportion to the summed masses of their rows. With ``unroll_len``, draw runs of so
        many rows, in proportion to the mass of each run's first row. Return the rows, a weight per row, and each
        length.
        """
        elements = self.buffer._elements
        with elements.table.write_lock, index.lock:
            slots = index.slots_by_age()[limits or slice(None)].astype(np.intp)
            runs = GroupRuns(elements.metas.groups(groupby), slots, unroll_len or None, self.buffer.sliced)
            step = self.sampler.step
            chosen, weights = self.sampler.draws.choose_sets(runs.slots, runs.run_of_slot, size, replace)
            if not self.IS_weight:
                self.sampler.step = step
            rows = [index.row_of_slot[runs.slots_of(run)] for run in chosen.tolist()]
        lengths = [len(each) for each in rows]
        return np.concatenate(rows), np.repeat(weights, lengths), lengths

    def update(
        self, chain: Callable, index: str, data: Any = None, meta: Any = None, *args: Any, **kwargs: Any
    ) -> bool:
        values = None
        if meta is not None and 'priority' in meta:
            values = self.sampler.priorities.check([float(meta['priority'])], 1) + _EPSILON
        if data is not None and self.IS_weight and self.buffer.schema is not None and 'priority_IS' in data:
            # The key comes from a sample. The buffer's elements do not have it.
            data = type(data)({key: value for key, value in data.items() if key != 'priority_IS'})
        found: bool = chain(index, data, meta, *args, **kwargs)
        if values is not None:
            self.sampler.priorities.update(np.array([int(index)]), values)
            self.max_priority = max(self.max_priority, float(values[0])) if found else self.max_priority
        return found

    def delete(self, chain: Callable, index: str, *args: Any, **kwargs: Any) -> None:
        chain(index, *args, **kwargs)

    def clear(self, chain: Callable) -> None:
        self.max_priority = 1.0
        chain()

    def state_dict(self) -> Dict[str, Any]:
        """Return all state that draws depend on."""
        return {'max_priority': self.max_priority, 'sampler': self.sampler.state()}

    def load_state_dict(self, _state_dict: Dict[str, Any], deepcopy: bool = False) -> None:
        """Restore a ``state_dict`` of a buffer with the same elements."""
        self.sampler.load_state(_state_dict['sampler'])
        self.max_priority = _state_dict['max_priority']

    def loaded(self) -> None:
        """Read all priorities from the metas. Call it if the buffer has other rows or another table."""
        # A sampler stays with its first table. Its copy has none, keeps its progress, and can be attached.
        self.sampler = copy.deepcopy(self.sampler)
        self.sampler.attach(self.buffer.table.index)
        rows, found = self.buffer._elements.metas.values_of('priority')
        values = np.array([float(value) for value in found])
        self.sampler.priorities.insert(rows, values)
        self.max_priority = max(self.max_priority, float(values.max(initial=0.0)))

    def take_over(self, other: PriorityAdapter) -> None:
        self.loaded()
        self.load_state_dict(other.state_dict())


class UseTimeCheck(Equivalent):
    """
    Overview:
        Delete rows after ``max_use`` samples, as DI-engine's ``use_time_check``. A row that comes twice in a batch
        counts twice.
    """

    name = 'use_time_check'

    def __init__(self, buffer_: Any, max_use: float = math.inf) -> None:
        self._max_use, self._buffer = max_use, buffer_
        self._counts: Dict[str, int] = {}
        self.loaded()

    def __call__(self, action: str, chain: Callable, *args: Any, **kwargs: Any) -> Any:
        result = chain(*args, **kwargs)
        if action == 'sample':
            self._count(_items_of(result))
        return result

    def _count(self, items: List[BufferedData]) -> None:
        for item in items:
            self._counts[item.index] = self._counts.get(item.index, 0) + 1
        for item in items:
            # If a row comes several times, only its first item has the row's own meta.
            item.meta['use_count'] = self._counts[item.index]
        used_up = {item.index for item in items if self._counts[item.index] >= self._max_use}
        self._buffer.delete(sorted(used_up, key=int))
        for index in used_up:
            self._counts.pop(index, None)
        if len(self._counts) > 2 * self._buffer.count() + _FEW:
            self._forget_gone()

    def _forget_gone(self) -> None:
        """Drop counts of rows that left unused. O(rows), so it runs only once they outnumber the live rows."""
        there = self._buffer.table.contains(np.array([int(index) for index in self._counts], np.int64))
        self._counts = {index: uses for (index, uses), is_there in zip(self._counts.items(), there) if is_there}

    def loaded(self) -> None:
        """Read all counts from the metas. Call it if the buffer has other rows or another table."""
        rows, uses = self._buffer._elements.metas.values_of('use_count')
        self._counts = {str(row): count for row, count in zip(rows.tolist(), uses)}


class StalenessCheck(Equivalent):
    """
    Overview:
        Before each sample, delete rows that were collected more than ``max_staleness`` iterations ago, as DI-engine's
        ``staleness_check``. It looks at metas, without reading elements.
    """

    name = 'staleness_check'

    def __init__(self, buffer_: Any, max_staleness: float = math.inf) -> None:
        self._max_staleness, self._buffer = max_staleness, buffer_

    def __call__(self, action: str, chain: Callable, *args: Any, **kwargs: Any) -> Any:
        if action == 'push' and _COLLECTED not in (kwargs.get('meta') or {}):
            raise AssertionError(f'an element has no meta {_COLLECTED!r}. Push every element with it.')
        if action != 'sample':
            return chain(*args, **kwargs)
        if 'train_iter_sample_data' not in kwargs:
            # The keyword may come with any other arguments. A positional iteration must be the first argument.
            if not args:
                raise TypeError('staleness_check has no iteration. Pass train_iter_sample_data=<iteration> to sample.')
            kwargs['train_iter_sample_data'], args = args[0], args[1:]
        return self._sample(chain, kwargs.pop('train_iter_sample_data'), args, kwargs)

    def _sample(self, chain: Callable, now: int, args: Tuple[Any, ...], options: Dict[str, Any]) -> Items:
        before = self._buffer.table.rows_by_age()
        rows, collected = self._buffer._elements.metas.values_of(_COLLECTED)
        if len(rows) < len(before):  # Some lack the key or left meanwhile. Only this case needs the search below.
            without = np.setdiff1d(before, rows)
            for row in without[self._buffer.table.contains(without)].tolist():
                raise KeyError(f'row {row} has no meta {_COLLECTED!r}. Push every row with it to use staleness_check.')
        self._buffer.delete([str(row) for row, at in zip(rows.tolist(), collected) if now - at > self._max_staleness])
        result: Items = chain(*args, **options)
        for item in _items_of(result):
            # This bypasses the row's own meta, which would keep the key for later samples.
            dict.__setitem__(item.meta, 'staleness', now - item.meta[_COLLECTED])
        return result


class SampleRangeView(Equivalent):
    """
    Overview:
        Sample only elements at these places by age, as DI-engine's ``sample_range_view``. All other arguments of a
        sample are passed on. Negative places count back from the buffer's size.
    """

    name = 'sample_range_view'

    def __init__(self, buffer_: Any, start: Optional[int] = None, end: Optional[int] = None) -> None:
        if start is None and end is None:
            raise ConfigError('sample_range_view needs start, end or both')
        start, end = (buffer_.size + place if place and place < 0 else place for place in (start, end))
        self._range = slice(start, end)

    def __call__(self, action: str, chain: Callable, *args: Any, **kwargs: Any) -> Any:
        if action == 'sample':
            kwargs['sample_range'] = self._range
        return chain(*args, **kwargs)


def _items_of(result: Items) -> List[BufferedData]:
    """Return the items of a sample or of groups, without padding."""
    items = [item for each in result for item in (each if isinstance(each, list) else [each])]
    return [item for item in items if item.index is not None]


def _is_possible(settings: PriorityExperienceReplay) -> bool:
    """Return whether ``Prioritized`` accepts these settings."""
    return all(0 <= power <= 1 for power in (settings.priority_power_factor, settings.IS_weight_power_factor))


#: DI-engine's names.
use_time_check, staleness_check, sample_range_view = UseTimeCheck, StalenessCheck, SampleRangeView
