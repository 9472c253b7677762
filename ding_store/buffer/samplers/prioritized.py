"""Proportional prioritized experience replay (Schaul et al. 2015, arXiv 1511.05952)."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.samplers.base import Sampler, StoredRows, is_within
from ding_store.buffer.samplers.masses import Masses
from ding_store.buffer.samplers.priorities import Priorities, on_cpu
from ding_store.buffer.samplers.weighted_draws import WeightedDraws
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import ConfigError, PriorityError


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
