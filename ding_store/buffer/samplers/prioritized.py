"""Proportional prioritized experience replay (Schaul et al. 2015, arXiv 1511.05952)."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.samplers.base import Sampler, StoredRows, is_within, not_enough, private
from ding_store.buffer.samplers.masses import Masses
from ding_store.buffer.samplers.priorities import Priorities, on_cpu
from ding_store.buffer.samplers.sum_tree import spread
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import ConfigError, NotEnoughData, PriorityError


class WeightedDraws:
    """
    Overview:
        Draws one row from each of B equal shares of the mass (Schaul et al. 2015, section 3.3, appendix B.2.1). A row
        may therefore come more than once. Callers hold the index's lock.
    Arguments:
        - priorities (:obj:`Priorities`): The rows' priorities and masses.
        - beta (:obj:`float`): The initial exponent of the importance weights.
        - beta_end (:obj:`float`): The exponent after ``beta_anneal_steps`` batches. It changes linearly until then.
        - seed (:obj:`Optional[int]`): None draws from numpy's global generator.
    Raises:
        - ConfigError: An argument is out of range.
    """

    def __init__(
        self, priorities: Priorities, beta: float, beta_end: float, beta_anneal_steps: int, seed: Optional[int]
    ) -> None:
        for name, value in (('beta', beta), ('beta_end', beta_end)):
            if not is_within(value, 0, 1):
                raise ConfigError(f'{name} ({value!r}) must be in [0, 1]')
        if not is_within(beta_anneal_steps, 0):
            raise ConfigError(f'beta_anneal_steps ({beta_anneal_steps!r}) must be >= 0')
        self.priorities, self._masses = priorities, priorities.masses
        self._beta_start, self._beta_end, self._anneal_steps = float(beta), float(beta_end), beta_anneal_steps
        self._seed = seed
        self._random = np.random.mtrand._rand if seed is None else np.random.RandomState(seed)
        #: The number of weighed batches.
        self.step = 0

    @property
    def beta(self) -> float:
        """The exponent of the importance weights, linear from ``beta`` to ``beta_end`` (section 3.4)."""
        progress = min(1.0, self.step / self._anneal_steps) if self._anneal_steps else 1.0
        return self._beta_start + (self._beta_end - self._beta_start) * progress

    @property
    def smallest_share(self) -> float:
        """The smallest probability with which a row is drawn, of those above 0. It is 0 if there is no such row."""
        tree = self._masses.tree
        return tree.smallest / tree.total if tree.total > 0 else 0.0

    def generators(self) -> List[np.random.RandomState]:
        """Return the private random generator, if there is one."""
        return private(self._random)

    def choose(self, index: RowIndex, size: int, replace: bool, sample_range: Optional[slice]) -> Array:
        """Choose the slots of rows, see ``Sampler.choose``."""
        priorities = self.priorities
        if priorities.index is not index:
            priorities.attach(index)
        priorities.flush()
        tree = self._masses.tree
        if sample_range is None:
            total = tree.total
            check_count(size, index.count, replace, total)
            return tree.draw(self._random.random_sample(size), total)
        slots = index.slots_by_age()[sample_range]
        masses = tree.masses[slots]
        check_count(size, len(slots), replace, masses.sum())
        return slots[self._pick(masses, size)].astype(np.intp)

    def draw(self, size: int) -> Array:
        """Draw slots ``(size,)``. The sum of all masses must be above zero."""
        tree = self._masses.tree
        return tree.draw(self._random.random_sample(size), tree.total)

    def weights(self, slots: Array) -> Array:
        """
        Overview:
            Return importance weights ``(N P(i)) ** -beta``, divided by the largest of any row (section 3.4). ``N`` and
            the sum of all masses cancel, which leaves ``(mass / smallest mass) ** -beta``. Each call advances beta.
        Returns:
            - weights (:obj:`np.ndarray`): ``(B,)``, float32, in (0, 1].
        """
        exponent = -self.beta
        self.step += 1
        return self._masses.tree.weigh(slots, exponent)

    def choose_sets(self, slots: Array, set_of_slot: Array, size: int, replace: bool) -> Tuple[Array, Array]:
        """
        Overview:
            Choose sets of rows, each in proportion to the sum of its rows' masses. O(len(slots)).
        Arguments:
            - slots (:obj:`np.ndarray`): Rows ``(n,)``.
            - set_of_slot (:obj:`np.ndarray`): The set of each of them ``(n,)``. Sets are numbered from 0 without gaps.
        Returns:
            - chosen (:obj:`np.ndarray`): Sets ``(size,)``.
            - weights (:obj:`np.ndarray`): Importance weights of the sets, computed as in ``weights``.
        Raises:
            - NotEnoughData: There are fewer than ``size`` sets, or no sets with ``replace``, or none with a priority.
        """
        self.priorities.flush()
        masses = np.bincount(set_of_slot, self._masses.tree.masses[slots])
        check_count(size, len(masses), replace, masses.sum(), 'records/groups')
        chosen, exponent = self._pick(masses, size), -self.beta
        self.step += 1
        return chosen, ((masses[chosen] / masses[masses > 0].min()) ** exponent).astype(np.float32)

    def returned(self, num_batches: int) -> None:
        """Undo the beta steps of batches that were drawn ahead and will not be delivered."""
        self.step -= num_batches

    def state(self) -> Dict[str, Array]:
        """Return all state that draws depend on, see ``Priorities.state``."""
        state = {**self.priorities.state(), 'step': np.array(self.step)}
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
        with self._masses.index.lock:
            self.priorities.check_state(state)
            self.step = int(state['step'])
            if self._seed is not None and 'random_keys' in state:
                self._random.set_state(('MT19937', state['random_keys'], int(state['random_position']), 0, 0.0))
            self.priorities.load_state(state)

    def settings(self) -> Dict[str, Any]:
        """Return the arguments of the constructor, besides the priorities."""
        return dict(
            beta=self._beta_start, beta_end=self._beta_end, beta_anneal_steps=self._anneal_steps, seed=self._seed
        )

    def continue_from(self, other: WeightedDraws) -> None:
        """Continue with the step and the generator's state of draws with the same settings."""
        self.step = other.step
        if self._seed is not None:
            self._random.set_state(other._random.get_state())

    def _pick(self, masses: Array, size: int) -> Array:
        """Draw places in this array, in proportion to its masses."""
        running = np.cumsum(masses)
        total = float(running[-1])
        targets = np.minimum(spread(self._random.random_sample(size), total), np.nextafter(total, 0.0))
        picked: Array = np.searchsorted(running, targets, side='right')
        return picked


def check_count(size: int, count: int, replace: bool, total: float, what: str = 'records') -> None:
    """
    Raises:
        - NotEnoughData: There are fewer than ``size`` of them, or none with ``replace``, or none has a mass.
    """
    if count < (1 if replace else size):
        raise not_enough(size, count, what)
    if not total > 0:
        raise NotEnoughData(f'There are less than {size} {what} with a priority above 0 in buffer({count})')


class PrioritySampler(Sampler):
    """
    Overview:
        The base of samplers that draw by priority. A subclass draws rows or sequences with ``draws``.
    Arguments:
        - masses (:obj:`Masses`): Computes the rows' masses from their priorities.
        - draws: The other arguments are those of WeightedDraws.
    """

    def __init__(
        self, masses: Masses, beta: float, beta_end: float, beta_anneal_steps: int, seed: Optional[int]
    ) -> None:
        self._priorities = Priorities(masses)
        #: Draws rows, and weighs them.
        self.draws = WeightedDraws(self._priorities, beta, beta_end, beta_anneal_steps, seed)

    @property
    def priorities(self) -> Priorities:
        return self._priorities

    @property
    def step(self) -> int:
        """The number of weighed batches. Assign it to let beta follow another count, such as training iterations."""
        return self.draws.step

    @step.setter
    def step(self, step: int) -> None:
        self.draws.step = step

    @property
    def beta(self) -> float:
        """The exponent of the importance weights now."""
        return self.draws.beta

    def generators(self) -> List[np.random.RandomState]:
        return self.draws.generators()

    def attach(self, index: RowIndex, rows: Optional[StoredRows] = None) -> None:
        self._priorities.attach(index)

    def persist_to(self, files: TableDirectory) -> None:
        """Restore the recorded priorities, and record each from now on. Rows without one count as new."""
        self._priorities.persist(files.values('priority'), self.draws)

    def weights(self, slots: Array) -> Array:
        return self.draws.weights(slots)

    def returned(self, num_batches: int) -> None:
        self.draws.returned(num_batches)

    def state(self) -> Dict[str, Array]:
        return self.draws.state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        """
        Raises:
            - PriorityError: It has other keys or rows, or was made with another alpha. Nothing changed.
        """
        self.draws.load_state(state)

    def settings(self) -> Dict[str, Any]:
        """Return the arguments of the constructor."""
        return {'alpha': self._priorities.masses.alpha, **self.draws.settings()}

    def __deepcopy__(self, memo: Dict[int, Any]) -> PrioritySampler:
        """Return a sampler with the same settings and progress, without a table."""
        twin = memo[id(self)] = type(self)(**self.settings())
        twin.draws.continue_from(self.draws)
        return twin


class Prioritized(PrioritySampler):
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

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_end: float = 1.0,
        beta_anneal_steps: int = 100_000,
        epsilon: float = 1e-5,
        seed: Optional[int] = None,
    ) -> None:
        super().__init__(Masses(alpha, epsilon), beta, beta_end, beta_anneal_steps, seed)

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Raises:
            - NotEnoughData: There are fewer than ``size`` rows, or no rows with ``replace``, or none with a priority.
        """
        return self.draws.choose(index, size, replace, sample_range)

    def settings(self) -> Dict[str, Any]:
        return {**super().settings(), 'epsilon': self._priorities.masses.epsilon}


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
    errors = np.abs(np.asarray(on_cpu(td_errors), np.float64))
    if errors.ndim != 2 or not len(errors):
        raise PriorityError(f'td_errors must have shape (T, B) with T >= 1, got {errors.shape}')
    priority: Array = eta * errors.max(0) + (1 - eta) * errors.mean(0)
    return priority
