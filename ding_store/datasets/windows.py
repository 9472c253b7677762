"""Windows of steps for Decision Transformers: DI-engine's data set type 'store_trajectory'."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

import numpy as np
import torch
from ding.utils import DATASET_REGISTRY
from torch.utils.data import Dataset

from ding_store.buffer.array_types import Array
from ding_store.datasets.data_set import DataSet
from ding_store.datasets.episodes import DISCOUNT, REWARD, episodes_of
from ding_store.errors import ConfigError

Window = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

#: DI-engine divides by the standard deviation plus this.
_EPS = 1e-6


@DATASET_REGISTRY.register('store_trajectory')
class StoreTrajectoryDataset(Dataset):
    """
    Overview:
        A data set in the place of DI-engine's ``D4RLTrajectoryDataset``, for ``DTPolicy``. An item is a window of one
        episode: ``(timesteps, states, actions, returns_to_go, mask)``, each with ``context_len`` steps. Windows of
        longer episodes begin at a random step. Shorter episodes are padded with zeros. Episodes that the recording cut
        are left out, because their returns are not known. The returns to go of all rows are kept in memory, and
        nothing else.
    Arguments:
        - cfg (:obj:`EasyDict`): ``policy.collect.data_path`` is the directory, and ``dataset`` has ``context_len`` and
          ``rtg_scale``.
    Raises:
        - ConfigError: The data set has no whole episode, or rows of n steps.
    """

    def __init__(self, cfg: Any) -> None:
        path = cfg.policy.collect.get('data_path')
        if not path:
            raise ConfigError(
                "data_type='store_trajectory' needs policy.collect.data_path, the directory of a data set"
            )
        self.context_len = int(cfg.dataset.context_len)
        self.data_set = data_set = DataSet(path)
        if DISCOUNT in data_set.schema.columns():
            raise ConfigError(
                f'the rows of {path!r} have the rewards of several steps. Record with policy.nstep=1, or export the '
                'data set and import it again: an export has single steps.'
            )
        episodes = episodes_of(data_set)
        whole = np.flatnonzero(episodes.is_whole)
        if not len(whole):
            raise ConfigError(f'the data set in {path!r} has no whole episode. Record for longer.')
        self._order, self._starts, self._lengths = episodes.order, episodes.starts[whole], episodes.lengths[whole]
        self._returns_to_go = _returns_to_go(data_set, episodes.order, episodes.starts) / float(cfg.dataset.rtg_scale)
        self.state_mean, self.state_std = _obs_statistics(data_set)

    def get_state_stats(self) -> Tuple[Array, Array]:
        """Return mean and standard deviation of the observations, with which the states are normalized."""
        return self.state_mean.copy(), self.state_std.copy()

    def get_max_timestep(self) -> int:
        return int(self._lengths.max())

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, number: int) -> Window:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> List[Window]:
        """Return windows of these episodes. torch's DataLoader calls this. All rows are read together."""
        length = self.context_len
        lengths = self._lengths[numbers]
        firsts = [np.random.randint(0, size - length) if size > length else 0 for size in lengths.tolist()]
        sizes = np.minimum(lengths, length)
        places = [
            np.arange(start + first, start + first + size)
            for start, first, size in zip(self._starts[numbers].tolist(), firsts, sizes.tolist())
        ]
        rows = self._order[np.concatenate(places)]
        self.data_set.load_more(len(rows))
        columns = self.data_set.columns(rows)
        states = (columns['obs'] - self.state_mean) / self.state_std
        ends = np.cumsum([0, *sizes]).tolist()
        return [
            self._window(first, begin, end, states, columns['action'], self._returns_to_go[place])
            for first, begin, end, place in zip(firsts, ends, ends[1:], places)
        ]

    def _window(self, first: int, begin: int, end: int, states: Array, actions: Array, returns: Array) -> Window:
        size = end - begin
        mask = torch.zeros(self.context_len, dtype=torch.long)
        mask[:size] = 1
        return (
            torch.arange(first, first + self.context_len),
            self._padded(states[begin:end]),
            self._padded(actions[begin:end]),
            self._padded(returns),
            mask,
        )

    def _padded(self, steps: Array) -> torch.Tensor:
        made = np.zeros((self.context_len, *steps.shape[1:]), steps.dtype)
        made[: len(steps)] = steps
        return torch.from_numpy(made)


def _returns_to_go(data_set: DataSet, order: Array, starts: Array) -> Array:
    """Return the sum of the rewards from each step to the end of its episode, in the order of ``order``."""
    rewards = np.concatenate([each[REWARD].reshape(len(each[REWARD]), -1)[:, 0] for each in data_set.scan([REWARD])])
    sums = np.cumsum(rewards[order], dtype=np.float64)
    ends = np.append(starts[1:], len(order)) - 1
    totals = np.repeat(sums[ends], ends + 1 - starts)
    found: Array = (totals - sums + rewards[order]).astype(np.float32)
    return found


def _obs_statistics(data_set: DataSet) -> Tuple[Array, Array]:
    """Return mean and standard deviation of all observations. This reads the data set once."""
    count, total, squares = 0, 0.0, 0.0
    for columns in data_set.scan(['obs']):
        obs = columns['obs'].astype(np.float64)
        count, total, squares = count + len(obs), total + obs.sum(0), squares + np.square(obs).sum(0)
    mean = np.asarray(total) / count
    std = np.sqrt(np.maximum(np.asarray(squares) / count - mean**2, 0.0)) + _EPS
    return mean.astype(np.float32), std.astype(np.float32)
