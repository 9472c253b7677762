"""DI-engine's data set of type 'store': ``data_type='store'`` in a config reads a data set of ding_store."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import torch
from ding.utils import DATASET_REGISTRY
from ding.utils.data.dataset import DatasetStatistics
from torch.utils.data import Dataset

from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import TrainBatch
from ding_store.datasets.data_set import DataSet
from ding_store.errors import ConfigError

#: DI-engine divides by the standard deviation plus this.
_EPS = 1e-3


@DATASET_REGISTRY.register('store')
class StoreDataset(Dataset):
    """
    Overview:
        A data set in the place of DI-engine's ``HDF5Dataset``, for ``ding -m serial_offline`` and task pipelines.
        torch's DataLoader gets each batch whole, as one collated tree that is also the list of its elements.
    Arguments:
        - cfg (:obj:`EasyDict`): ``policy.collect.data_path`` is the directory. With ``env.norm_obs.use_norm`` and
          ``offline_stats.use_offline_stats``, observations are normalized, as in DI-engine.
    Attributes:
        - data_set (:obj:`DataSet`): The data set.
    Raises:
        - ConfigError: There is no ``data_path``, or the config asks for windows of steps (``dataset.context_len``).
    """

    def __init__(self, cfg: Any) -> None:
        path = cfg.policy.collect.get('data_path')
        if not path:
            raise ConfigError("data_type='store' needs policy.collect.data_path, the directory of a data set")
        if cfg.get('dataset', {}).get('context_len', 0):
            raise ConfigError(
                f"data_type='store' has no windows of steps (dataset.context_len={cfg.dataset.context_len}). "
                "Use data_type='store_trajectory'."
            )
        self.data_set = DataSet(path)
        self._statistics: Optional[DatasetStatistics] = None
        norm = cfg.get('env', {}).get('norm_obs', {})
        self.is_normalized = bool(
            norm.get('use_norm', False) and norm.get('offline_stats', {}).get('use_offline_stats', False)
        )

    def __len__(self) -> int:
        return len(self.data_set)

    def __getitem__(self, row: int) -> Dict[str, Any]:
        element: Dict[str, Any] = self.__getitems__([row])[0].plain()
        return element

    def __getitems__(self, rows: Sequence[int]) -> TrainBatch:
        """Return a batch of these rows. torch's DataLoader calls this."""
        self.data_set.load_more(len(rows))
        batch = self.data_set.train_batch(rows)
        if self.is_normalized:
            normalize(batch, self.statistics)
        return batch

    @property
    def statistics(self) -> DatasetStatistics:
        """Mean and standard deviation of ``obs``, and bounds of ``action``. The first use reads the data set once."""
        if self._statistics is None:
            self._statistics = _statistics_of(self.data_set)
        return self._statistics

    @property
    def mean(self) -> Array:
        return self.statistics.mean

    @property
    def std(self) -> Array:
        return self.statistics.std

    @property
    def action_bounds(self) -> Array:
        return self.statistics.action_bounds


def normalize(batch: Any, statistics: DatasetStatistics) -> None:
    """Normalize the observations of a batch in place. Its memory belongs to the batch alone."""
    mean, std = (torch.as_tensor(each, dtype=torch.float32) for each in (statistics.mean, statistics.std))
    for name in ('obs', 'next_obs'):
        if name in batch:
            getattr(batch, name).sub_(mean).div_(std)


def _statistics_of(data_set: DataSet) -> DatasetStatistics:
    count = 0
    sums: List[Array] = []
    least: Optional[Array] = None
    most: Optional[Array] = None
    for columns in data_set.scan(['obs', 'action']):
        if len(columns) < 2:
            raise ConfigError(f'the elements of {data_set.path!r} need the leaves obs and action for statistics')
        obs, action = columns['obs'].astype(np.float64), columns['action']
        parts = [obs.sum(0), np.square(obs).sum(0)]
        sums = parts if not sums else [one + other for one, other in zip(sums, parts)]
        count += len(obs)
        low, high = action.min(0).astype(np.float64), action.max(0).astype(np.float64)
        least = low if least is None else np.minimum(least, low)
        most = high if most is None else np.maximum(most, high)
    if least is None or most is None:
        raise ConfigError(f'the data set in {data_set.path!r} has no rows')
    mean = sums[0] / count
    std = np.sqrt(np.maximum(sums[1] / count - mean**2, 0.0)) + _EPS
    margin = 0.05 * (most - least)
    return DatasetStatistics(
        mean=mean.astype(np.float32),
        std=std.astype(np.float32),
        action_bounds=np.stack([least - margin, most + margin]),
    )
