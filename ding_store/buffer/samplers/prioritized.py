"""Proportional prioritized experience replay (Schaul et al. 2015, arXiv 1511.05952)."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np
import torch

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.samplers.base import Record, Sampler, StoredRows, is_within, not_enough, private
from ding_store.buffer.samplers.pending_slots import PendingSlots
from ding_store.buffer.samplers.persisted_priorities import PersistedPriorities
from ding_store.buffer.samplers.sum_tree import SumTree, spread
from ding_store.buffer.table.row_choices import as_rows
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import ConfigError, NotEnoughData, PriorityError

#: Sums of masses below this stay finite.
_MAX_TOTAL = 1e300


class Prioritized(Sampler):
    """
    Overview:
        Samples rows in proportion to ``(priority + epsilon) ** alpha`` (equation 1 and section 3.3). It draws one row
        from each of B equal shares of the mass. A row may therefore come more than once for any ``replace``. O(B
        log(capacity)).

        New rows get the largest priority seen, at first 1, unless the push gives one (Ape-X, Horgan et al. 2018).
        Updates of rows that are gone are skipped and counted.
    Arguments:
        - alpha (:obj:`float`): The influence of priorities. 0 is uniform.
        - beta (:obj:`float`): The initial exponent of the importance weights, which correct the bias.
        - beta_end (:obj:`float`): The exponent after ``beta_anneal_steps`` batches. It changes linearly until then.
        - epsilon (:obj:`float`): Added to every priority, so that none is zero. With 0, rows of priority 0 never come.
        - seed (:obj:`Optional[int]`): None draws from numpy's global generator, as Uniform does.
    Raises:
        - ConfigError: An argument is out of range.
    """

    #: True if a row has its priority from its push on.
    has_new_rows = True

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_end: float = 1.0,
        beta_anneal_steps: int = 100_000,
        epsilon: float = 1e-5,
        seed: Optional[int] = None,
    ) -> None:
        for name, value in (('alpha', alpha), ('beta', beta), ('beta_end', beta_end)):
            if not is_within(value, 0, 1):
                raise ConfigError(f'{name} ({value!r}) must be in [0, 1]')
        if not is_within(epsilon, 0) or epsilon >= 1:
            raise ConfigError(f'epsilon ({epsilon!r}) must be in [0, 1)')
        if not is_within(beta_anneal_steps, 0):
            raise ConfigError(f'beta_anneal_steps ({beta_anneal_steps!r}) must be >= 0')
        self._alpha, self._epsilon = float(alpha), float(epsilon)
        self._beta_start, self._beta_end, self._anneal_steps = float(beta), float(beta_end), beta_anneal_steps
        self._seed = seed
        self._random = np.random.mtrand._rand if seed is None else np.random.RandomState(seed)
        self._index: Optional[RowIndex] = None
        self._tree = SumTree(1)
        self._pending = PendingSlots(self._refresh)
        #: The number of weighed batches. Assign it to let beta follow another count, such as training iterations.
        self.step = 0
        #: The largest priority seen. New rows get it.
        self.max_priority = 1.0
        self._num_stale_updates = 0
        #: Records the priorities, for a table with a path.
        self._persisted: Optional[PersistedPriorities] = None

    @property
    def beta(self) -> float:
        """The exponent of the importance weights, linear from ``beta`` to ``beta_end`` (section 3.4)."""
        progress = min(1.0, self.step / self._anneal_steps) if self._anneal_steps else 1.0
        return self._beta_start + (self._beta_end - self._beta_start) * progress

    @property
    def is_compiled(self) -> bool:
        """True if numba runs the tree."""
        return self._tree.is_compiled

    @property
    def has_priorities(self) -> bool:
        return True

    @property
    def num_stale_updates(self) -> int:
        return self._num_stale_updates

    def generators(self) -> List[np.random.RandomState]:
        return private(self._random)

    def attach(self, index: RowIndex, rows: Optional[StoredRows] = None) -> None:
        """
        Overview:
            Sample this table from now on. Rows that it already holds count as new.
        Raises:
            - ConfigError: The sampler has a table already.
        """
        if index is self._index:
            return
        if self._index is not None:
            raise ConfigError('a sampler holds the priorities of one table. Create another sampler for another table.')
        with index.lock:
            try:
                self._index = index
                self._start(index.capacity)
                index.listen(self)
                self._pending.add(index.live_slots)
            except BaseException:
                self._index = None  # The next call attaches it.
                raise

    def persist_to(self, files: TableDirectory) -> None:
        """Restore the recorded priorities, and record each from now on. Rows without one count as new."""
        self._persisted = None
        self._persisted = PersistedPriorities(self, self._attached(), files.values('priority'))

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Raises:
            - NotEnoughData: There are fewer than ``size`` rows, or no rows with ``replace``, or none with a priority.
        """
        if index is not self._index:
            self.attach(index)
        self._pending.flush()
        if sample_range is not None:
            return self._choose_within(index.slots_by_age()[sample_range], size, replace)
        check_count(size, index.count, replace, self._tree.total)
        # One draw from each of ``size`` equal shares (section 3.3, appendix B.2.1).
        return self._tree.draw(self._random.random_sample(size))

    def weights(self, slots: Array) -> Array:
        """
        Overview:
            Return importance weights ``(N P(i)) ** -beta``, divided by the largest of any row (section 3.4). ``N`` and
            the sum of all masses cancel, which leaves ``(mass / smallest mass) ** -beta``. Each call advances beta.
        Returns:
            - weights (:obj:`np.ndarray`): ``(B,)``, float32, in (0, 1].
        """
        tree, exponent = self._tree, -self.beta
        self.step += 1
        if tree.kernels is None:
            return ((tree.masses.take(slots) / tree.smallest) ** exponent).astype(np.float32)
        weights = np.empty(len(slots), np.float32)
        tree.kernels.weigh(tree.masses, np.ascontiguousarray(slots, np.int64), tree.smallest, exponent, weights)
        return weights

    def choose_sets(self, slots: Array, set_of_slot: Array, size: int, replace: bool) -> Tuple[Array, Array]:
        """
        Overview:
            Choose sets of rows, each in proportion to the sum of its rows' masses. O(len(slots)).
        Arguments:
            - slots (:obj:`np.ndarray`): Rows ``(n,)``. The caller holds the index's lock.
            - set_of_slot (:obj:`np.ndarray`): The set of each of them ``(n,)``. Sets are numbered from 0 without gaps.
        Returns:
            - chosen (:obj:`np.ndarray`): Sets ``(size,)``.
            - weights (:obj:`np.ndarray`): Importance weights of the sets, computed as in ``weights``.
        Raises:
            - NotEnoughData: There are fewer than ``size`` sets, or no sets with ``replace``, or none with a priority.
        """
        self._pending.flush()
        masses = np.bincount(set_of_slot, self._tree.masses[slots])
        check_count(size, len(masses), replace, masses.sum(), 'records/groups')
        chosen, exponent = self._pick(masses, size), -self.beta
        self.step += 1
        return chosen, ((masses[chosen] / masses[masses > 0].min()) ** exponent).astype(np.float32)

    def update(self, rows: Array, priority: Any) -> None:
        """
        Overview:
            Set new priorities. If a row is repeated, its last one counts. Rows that are gone are skipped and counted.
        Arguments:
            - rows (:obj:`np.ndarray`): Row numbers ``(B,)``.
            - priority: ``(B,)``, numbers >= 0.
        Raises:
            - PriorityError: A priority is NaN, negative, infinite or not a number, or their number differs from the
              rows'. Nothing changed.
        """
        self._num_stale_updates += self._put(as_rows(rows), priority)

    def insert(self, rows: Array, priority: Any) -> None:
        """Set the priorities of rows just pushed. Unlike ``update``, do not count rows that left at once."""
        self._put(as_rows(rows), priority)

    def recording(self, priority: Array) -> Optional[Record]:
        return None if self._persisted is None else self._persisted.recording(priority)

    def check(self, priority: Any, num_rows: int) -> Array:
        """
        Overview:
            Return the priorities as float64 ``(num_rows,)``.
        Raises:
            - PriorityError: See ``update``.
        """
        values = _as_floats(priority, num_rows)
        # Any comparison with NaN is False, and the minimum of numbers with a NaN is NaN.
        if num_rows and not (np.minimum.reduce(values) >= 0 and np.maximum.reduce(values) <= self._limit()):
            bad = values[~((values >= 0) & (values <= self._limit()))][0]
            raise PriorityError(f'priorities must be numbers >= 0 and at most {self._limit():g}, got {bad}')
        return values

    def priorities_of(self, rows: Array) -> Array:
        """Return the priorities of rows ``(B,)``, computed from the masses. NaN for rows that are gone."""
        index = self._attached()
        with index.lock:
            self._pending.flush()
            slots, found = index.find(as_rows(rows))
            return np.where(found, self._priorities_at(slots), np.nan)

    def state(self) -> Dict[str, Array]:
        """Return all state that draws depend on, as arrays. Arrays with one value per row are ordered by age."""
        index = self._attached()
        with index.lock:
            self._pending.flush()
            slots = index.slots_by_age()
            state = {'mass': self._tree.masses[slots], 'alpha': np.array(self._alpha)}
        state.update(
            max_priority=np.array(self.max_priority),
            step=np.array(self.step),
            num_stale_updates=np.array(self._num_stale_updates),
        )
        if self._seed is not None:
            _, keys, position, _, _ = self._random.get_state()
            state.update(random_keys=np.array(keys), random_position=np.array(position))
        return state

    def load_state(self, state: Mapping[str, Array]) -> None:
        """
        Overview:
            Restore a ``state`` of a table with the same rows.
        Raises:
            - PriorityError: It has other keys or rows, or was made with another alpha. Nothing changed.
        """
        index = self._attached()
        with index.lock:
            self._check_state(state, index.count)
            self._pending.clear()
            self._load_rows(index, state)
            self.max_priority = float(state['max_priority'])
            self.step, self._num_stale_updates = int(state['step']), int(state['num_stale_updates'])
            if self._seed is not None and 'random_keys' in state:
                self._random.set_state(('MT19937', state['random_keys'], int(state['random_position']), 0, 0.0))
            if self._persisted is not None:
                self._persisted.record_all()

    def returned(self, num_batches: int) -> None:
        """Undo the beta steps of batches that were drawn ahead and will not be delivered."""
        self.step -= num_batches

    def published(self, slots: Array) -> None:
        """Handle new rows in the table. This and the next callbacks run with the table's index locked."""
        self._pending.add(slots)

    def removed(self, slots: Array) -> None:
        """Handle rows that left the table."""
        self._pending.add(slots)

    def restored(self, slots: Array) -> None:
        """Handle the return of the rows that left last."""
        self._pending.take_back(slots)

    def cleared(self) -> None:
        """Start anew: all rows left, and the next ones may be of another kind."""
        self._pending.clear()
        self.max_priority = 1.0
        self._tree.clear()

    def settled(self, slots: Array) -> None:
        """Handle slots whose rows were leaving or coming when an exception came."""
        self._pending.add(slots)

    def resizing(self) -> None:
        """Apply pending slots while their numbers are still valid."""
        self._pending.flush()

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        """Move the masses to the new number of slots. Rows moved from ``source`` to ``target`` slots."""
        if self._tree.capacity != capacity:
            masses, tree = (
                moved(self._tree.masses[: self._tree.capacity], capacity, source, target, 0.0),
                SumTree(capacity),
            )
            tree.rebuild(masses)
            self._tree = tree

    def __deepcopy__(self, memo: Dict[int, Any]) -> Prioritized:
        """Return a sampler with the same settings and progress, without a table."""
        twin = type(self)(**self._settings())
        memo[id(self)] = twin
        twin.step = self.step
        if self._seed is not None:
            twin._random.set_state(self._random.get_state())
        return twin

    def _settings(self) -> Dict[str, Any]:
        return dict(
            alpha=self._alpha,
            beta=self._beta_start,
            beta_end=self._beta_end,
            beta_anneal_steps=self._anneal_steps,
            epsilon=self._epsilon,
            seed=self._seed,
        )

    def _attached(self) -> RowIndex:
        if self._index is None:
            raise PriorityError('the sampler has no table yet. Pass it to a StoreBuffer first.')
        return self._index

    def _limit(self) -> float:
        """Return the largest priority for which the sum of all masses stays finite."""
        return _MAX_TOTAL / self._tree.capacity

    def _start(self, capacity: int) -> None:
        self._tree = SumTree(capacity)

    def _choose_within(self, slots: Array, size: int, replace: bool) -> Array:
        """Choose among these slots only. O(len(slots))."""
        masses = self._tree.masses[slots]
        check_count(size, len(slots), replace, masses.sum())
        return slots[self._pick(masses, size)].astype(np.intp)

    def _pick(self, masses: Array, size: int) -> Array:
        """Draw places in this array, in proportion to its masses."""
        running = np.cumsum(masses)
        total = float(running[-1])
        targets = np.minimum(spread(self._random.random_sample(size), total), np.nextafter(total, 0.0))
        picked: Array = np.searchsorted(running, targets, side='right')
        return picked

    def _put(self, rows: Array, priority: Any) -> int:
        """Set priorities. Return how many of the rows are gone."""
        index, kernels = self._attached(), self._tree.kernels
        values = _as_floats(priority, len(rows))
        with index.lock:
            self._pending.flush()
            if kernels is not None:
                rows, slots = np.array(rows, order='C'), np.empty(len(rows), np.int64)
                largest = kernels.locate(np.asarray(index.row_of_slot), rows, values, self._limit(), slots)
                if largest >= 0:
                    self.max_priority = max(self.max_priority, largest)
                    self._set(slots, values)
                    if self._persisted is not None:
                        self._persisted.record(slots, rows, values)
                    return 0
            return self._put_some(index, rows, self.check(values, len(rows)))

    def _put_some(self, index: RowIndex, rows: Array, values: Array) -> int:
        """Set priorities if some rows are deleted or relocated, or without numba. Return how many rows are gone."""
        slots, found = index.find(rows)
        num_found = int(np.count_nonzero(found))
        if num_found < len(rows):
            slots, values = slots[found], values[found]
        if num_found:
            self.max_priority = max(self.max_priority, float(np.maximum.reduce(values)))
            self._set(slots, values)
            if self._persisted is not None:
                self._persisted.record(slots, rows[found], values)
        return len(rows) - num_found

    def _refresh(self, slots: Array) -> None:
        """Set the masses of slots whose rows are new or gone."""
        is_live = self._attached().row_of_slot[slots] != EMPTY
        self._tree.set(slots, np.where(is_live, self._mass_of(np.array([self.max_priority])), 0.0))

    def _set(self, slots: Array, priorities: Array) -> None:
        self._tree.set(slots, self._mass_of(priorities))

    def _mass_of(self, priorities: Array) -> Array:
        if self._tree.kernels is None:
            powers: Array = (priorities + self._epsilon) ** self._alpha
            return powers
        masses = np.empty(len(priorities))
        self._tree.kernels.mass(priorities, self._epsilon, self._alpha, masses)
        return masses

    def _priorities_at(self, slots: Array) -> Array:
        masses = self._tree.masses[slots]
        if not self._alpha:
            return np.full(len(slots), self.max_priority)
        return np.maximum(masses ** (1 / self._alpha) - self._epsilon, 0.0)

    def _check_state(self, state: Mapping[str, Array], num_rows: int) -> None:
        missing = {'mass', 'alpha', 'max_priority', 'step', 'num_stale_updates'} - set(state)
        if missing:
            raise PriorityError(f'the saved priorities lack {sorted(missing)}')
        if state['mass'].shape != (num_rows,):
            raise PriorityError(
                f'the saved priorities have shape {state["mass"].shape}, but the table has {num_rows} rows'
            )
        if float(state['alpha']) != self._alpha:
            raise PriorityError(f'the saved priorities were made with alpha={state["alpha"]}, not {self._alpha}')

    def _load_rows(self, index: RowIndex, state: Mapping[str, Array]) -> None:
        masses = np.zeros(index.capacity)
        masses[index.slots_by_age()] = state['mass']
        self._tree.rebuild(masses)


def moved(values: Array, capacity: int, source: Array, target: Array, nothing: float) -> Array:
    """Return values by slot for another capacity. Values of ``source`` slots move to ``target`` slots."""
    kept = min(capacity, len(values))
    result = np.full(capacity, nothing)
    result[:kept] = values[:kept]
    result[target] = values[source]
    result[source[source < capacity]] = nothing
    return result


def _as_floats(priority: Any, num_rows: int) -> Array:
    try:
        # A copy: the compiled functions accept no array that is read-only or has gaps.
        values = np.array(_on_cpu(priority), np.float64, order='C', ndmin=1)
    except (TypeError, ValueError, RuntimeError) as e:  # RuntimeError: tensors of different shapes or devices.
        raise PriorityError(f'priority must be numbers of shape ({num_rows},), got {priority!r}') from e
    if values.shape != (num_rows,):
        raise PriorityError(f'priority must have shape ({num_rows},), one per row, got {np.shape(priority)}')
    return values


def _on_cpu(numbers: Any) -> Any:
    """Copy a tensor, or a list of tensors, from any device to one array. Return anything else unchanged."""
    if isinstance(numbers, (list, tuple)) and numbers and all(isinstance(each, torch.Tensor) for each in numbers):
        numbers = torch.stack([each.detach() for each in numbers])
    return numbers.detach().to('cpu', torch.float64).numpy() if isinstance(numbers, torch.Tensor) else numbers


def check_count(size: int, count: int, replace: bool, total: float, what: str = 'records') -> None:
    if count < (1 if replace else size):
        raise not_enough(size, count, what)
    if not total > 0:
        raise NotEnoughData(f'There are less than {size} {what} with a priority above 0 in buffer({count})')


def mixed_priority(td_errors: Any, eta: float = 0.9) -> Array:
    """
    Overview:
        Return priorities of sequences: ``eta * max + (1 - eta) * mean`` of the absolute n-step TD errors over time. See
        R2D2, Kapturowski et al. 2019, section 2.3.
    Arguments:
        - td_errors: ``(T, B)``.
    Returns:
        - priority (:obj:`np.ndarray`): ``(B,)``, float64.
    """
    if not is_within(eta, 0, 1):
        raise ConfigError(f'eta ({eta!r}) must be in [0, 1]')
    errors = np.abs(np.asarray(_on_cpu(td_errors), np.float64))
    if errors.ndim != 2 or not len(errors):
        raise PriorityError(f'td_errors must have shape (T, B) with T >= 1, got {errors.shape}')
    priority: Array = eta * errors.max(0) + (1 - eta) * errors.mean(0)
    return priority
