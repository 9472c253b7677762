"""The real loop: pusher, learner and policy of a pipeline, in a task, on a filled replay."""

from __future__ import annotations

import importlib
import time
from typing import Any, Dict, List

import numpy as np
from ding.framework import task
from ding.framework.context import OnlineRLContext
from easydict import EasyDict

from ding_store.compare.policies import policy_of
from ding_store.compare.sides import Side, Store

#: Iterations that take this long together are enough to measure one.
LONG_S = 1.0


class Training:
    """
    Overview:
        Iterations of the learner with ready-made elements instead of a collector. One iteration pushes as many as the
        job adds per batch, and trains once. Policies of transitions run in the task middleware, DI-engine's or the
        store's. Policies of sequences run in the loop of the config pipeline: sample, train, update priorities.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._policy = policy_of(side.row)
        self._train_s: List[float] = []
        self._due = 0.0
        if side.row.steps:
            self._iterate = self._iterate_config
        else:
            self._start_task()
            self._iterate = self._iterate_task
        for _ in range(2):
            seconds = self._iterate()
            side.has_trained()
            if seconds > LONG_S:
                break

    def window(self, seconds: float) -> Dict[str, float]:
        """
        Train for about this long.

        Returns:
            - figures (:obj:`dict`): ``iters_per_s``, and ``train_s``: an iteration's time in the policy, which includes
              collating in plain DI-engine. Means, because a few iterations have the garbage collections of many.
        """
        self._train_s = []
        spent: List[float] = []
        deadline = time.perf_counter() + seconds
        while (len(spent) < 3 and sum(spent) < LONG_S) or time.perf_counter() < deadline:
            spent.append(self._iterate())
        return {'iters_per_s': len(spent) / sum(spent), 'train_s': float(np.mean(self._train_s))}

    def _start_task(self) -> None:
        cfg = EasyDict(policy=self._policy._cfg)
        is_ours = isinstance(self._side, Store)
        parts: Any = importlib.import_module('ding_store.middleware.replay' if is_ours else 'ding.framework.middleware')
        task.start(async_mode=False, ctx=OnlineRLContext())
        task.use(parts.data_pusher(cfg, self._side.buffer))
        learner = parts.OffPolicyLearner(cfg, self._policy.learn_mode, self._side.buffer, log_freq=1 << 60)
        learner._trainer = self._timed(learner._trainer)
        task.use(learner)

    def _iterate_task(self) -> float:
        task.ctx.trajectories = self._elements()
        begin = time.perf_counter()
        for middleware in task._middleware:
            task.forward(middleware)
        task.backward()
        task.renew()
        return time.perf_counter() - begin

    def _iterate_config(self) -> float:
        elements = self._elements()
        begin = time.perf_counter()
        self._side.push(elements)
        data = self._side.train_data()
        output = self._timed(self._policy.learn_mode.forward)(data)
        if self._side.row.kind == 'prioritized':
            self._side.update(output['priority'])
        return time.perf_counter() - begin

    def _elements(self) -> List[Any]:
        row = self._side.row
        self._due += row.batch * row.adds_per_s / row.samples_per_s
        count = int(self._due)
        self._due -= count
        return self._side.elements(count)

    def _timed(self, call: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = call(*arguments)
            self._train_s.append(time.perf_counter() - begin)
            return result

        return timed
