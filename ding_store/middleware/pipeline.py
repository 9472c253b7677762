"""The parts of a task pipeline: ding_store's if the config's ``store`` block enables it, else DI-engine's own."""

from __future__ import annotations

import functools
import os
from typing import Any, Callable, Mapping, Optional

from ding_store.config import StoreConfig
from ding_store.middleware.own_rank import own_worker
from ding_store.middleware.replay_settings import ReplaySettings

#: Names of DI-engine's middleware that ding_store replaces.
MIDDLEWARE = (
    'ContextExchanger',
    'ModelExchanger',
    'PeriodicalModelExchanger',
    'data_pusher',
    'gae_estimator',
    'OffPolicyLearner',
    'offpolicy_data_fetcher',
    'offline_data_fetcher',
    'CkptSaver',
)


class Pipeline:
    """
    Overview:
        The parts of a task pipeline under one config flag. With the flag off, every attribute is DI-engine's own class,
        and redis is not imported.
    Members:
        - DequeBuffer, and the names in ``MIDDLEWARE``: Called like DI-engine's classes of the same names.
        - replay (:obj:`Callable`): ``replay(cfg)`` creates the buffer of a config, see ``ReplaySettings``.
        - Checkpointer (:obj:`Callable`): ``Checkpointer(policy)``, used in addition to CkptSaver. Void with the flag
          off.
        - CkptSaver (:obj:`Callable`): DI-engine's CkptSaver followed by Checkpointer.
        - session (:obj:`Optional[RunSession]`): This process's session in the run. None with the flag off.
    Examples:
        >>> parts = pipeline(cfg)
        >>> buffer_ = parts.DequeBuffer(size=cfg.policy.other.replay_buffer.replay_buffer_size)
        >>> task.use(parts.ContextExchanger(skip_n_iter=1))
    """

    DequeBuffer: Callable
    ContextExchanger: Callable
    ModelExchanger: Callable
    PeriodicalModelExchanger: Callable
    data_pusher: Callable
    gae_estimator: Callable
    OffPolicyLearner: Callable
    offpolicy_data_fetcher: Callable
    offline_data_fetcher: Callable
    Checkpointer: Callable
    CkptSaver: Callable
    replay: Callable
    session: Any = None

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        if config.enable:
            self._use_store()
        else:
            self._use_stock()

    def _use_stock(self) -> None:
        from ding.data import DequeBuffer
        from ding.framework import middleware as stock
        from ding.framework import task

        self.DequeBuffer = DequeBuffer
        for name in MIDDLEWARE:
            setattr(self, name, getattr(stock, name))
        self.Checkpointer = lambda policy: task.void()
        self.replay = lambda cfg: ReplaySettings.of(cfg).stock()

    def _use_store(self) -> None:
        from ding.framework import task

        from ding_store.middleware.advantages import gae_estimator
        from ding_store.middleware.checkpoint import checkpointer, ckpt_saver
        from ding_store.middleware.context_exchanger import context_exchanger
        from ding_store.middleware.offline import offline_data_fetcher
        from ding_store.middleware.replay import OffPolicyLearner, data_fetcher, data_pusher, replay_buffer
        from ding_store.middleware.weights import model_exchanger, periodical_model_exchanger
        from ding_store.run.session import RunSession

        config, worker = self.config, own_worker()
        self.session = RunSession(
            config,
            finished=lambda: task.finish,
            num_workers=lambda: getattr(task.router, 'n_parallel_workers', 1) if task.router.is_active else 1,
        )
        if worker is not None:
            worker.use(self.session)
        self.DequeBuffer = functools.partial(replay_buffer, self.session)
        self.replay = lambda cfg: ReplaySettings.of(cfg).store(self.DequeBuffer)
        self.Checkpointer = functools.partial(checkpointer, self.session)
        self.CkptSaver = functools.partial(ckpt_saver, self.session)
        self.ContextExchanger = functools.partial(context_exchanger, self.session)
        self.ModelExchanger = functools.partial(model_exchanger, self.session)
        self.PeriodicalModelExchanger = functools.partial(periodical_model_exchanger, self.session)
        self.data_pusher = functools.partial(data_pusher, config=config, session=self.session)
        self.gae_estimator = gae_estimator
        self.OffPolicyLearner = functools.partial(OffPolicyLearner, collate=config.collate, session=self.session)
        self.offline_data_fetcher = offline_data_fetcher
        self.offpolicy_data_fetcher = functools.partial(data_fetcher, collate=config.collate)


def pipeline(cfg: Mapping[str, Any], store: Optional[Mapping[str, Any]] = None) -> Pipeline:
    """
    Overview:
        Return the pipeline parts for a config. Its ``store`` block enables and configures the store. If torchrun
        started this process, it becomes one of several learners.
    Arguments:
        - cfg (:obj:`Mapping`): main_config, or the compiled config.
        - store (:obj:`Optional[Mapping]`): The block, if it is not in ``cfg``.
    Raises:
        - ConfigError: An unknown key or a bad value in the block.
    """
    block = store if store is not None else cfg.get('store')
    exp_name = str(cfg.get('exp_name', 'default'))
    config = StoreConfig.from_block(block, default_run=exp_name or 'default')
    if config.enable and config.checkpoint is not None:
        config.checkpoint.check_apart(os.path.join(exp_name, 'ckpt'))  # a CkptSaver of the script may write there
    if config.enable:  # without the store, no part of it is imported
        from ding_store.middleware.torchrun_rank import as_torchrun_rank

        config = as_torchrun_rank(config, cfg)
    return Pipeline(config)
