"""Fetcher of task pipelines that train on a data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from ding.framework.middleware.functional import data_processor
from ding.utils import get_rank, get_world_size

from ding_store.datasets import DataSet, StoreTrajectoryDataset
from ding_store.datasets.ding_dataset import StoreDataset, normalize
from ding_store.middleware.batch_policies import takes_batch
from ding_store.middleware.plain_parts import stock

if TYPE_CHECKING:
    from ding.framework import OfflineRLContext

stock_fetcher = stock(data_processor.offline_data_fetcher)


def offline_data_fetcher(
    cfg: Any, dataset: Any, *args: Any, policy: Any = None, prefetch: int = 4, **kwargs: Any
) -> Callable:
    """
    Overview:
        Create the middleware that fetches a batch of a data set for each iteration, in place of DI-engine's
        ``offline_data_fetcher``. Batches come in the known order of ``DataSet.epochs``, which a thread reads ahead.
        With several ranks, each gets its part of every epoch. Windows of a ``StoreTrajectoryDataset``
        are collated for ``DTPolicy``. Data sets of other types use DI-engine's own.
    Arguments:
        - cfg (:obj:`EasyDict`): ``policy.learn.batch_size`` is that of all ranks together, as in DI-engine's serial
          pipeline. ``seed`` sets the order.
        - dataset: A ``StoreDataset`` or a ``DataSet``.
        - policy: The policy's learn mode. If it is known to accept a plain batch, it gets one, which is faster.
        - prefetch (:obj:`int`): See ``DataSet.epochs``.
    Output of ctx:
        - train_data: A collated batch. Without ``policy``, it is also the list of its elements.
        - train_epoch (:obj:`int`): The number of the epoch, from 0.
        - trained_env_step (:obj:`int`): Rows fetched so far.
    """
    if isinstance(dataset, StoreTrajectoryDataset):
        kwargs.setdefault('collate_fn', None)  # DTPolicy takes a collated batch. DI-engine's default makes a list.
    if not isinstance(dataset, (DataSet, StoreDataset)):
        return stock_fetcher(cfg, dataset, *args, **kwargs)
    data_set = dataset if isinstance(dataset, DataSet) else dataset.data_set
    world_size = get_world_size()
    size = max(1, cfg.policy.learn.batch_size // world_size)
    epochs = data_set.epochs(size, int(cfg.get('seed', 0)), get_rank(), world_size, prefetch)
    is_plain = policy is not None and takes_batch(policy)
    statistics = dataset.statistics if isinstance(dataset, StoreDataset) and dataset.is_normalized else None

    def _fetch(ctx: OfflineRLContext) -> None:
        batch = next(epochs)
        if statistics is not None:
            normalize(batch, statistics)
        ctx.train_data = batch if is_plain else epochs.as_list()
        ctx.train_epoch = epochs.epoch
        assert epochs.rows is not None
        ctx.trained_env_step += len(epochs.rows)

    return _fetch
