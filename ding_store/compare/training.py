"""
The real loop: pusher, learner and policy of a pipeline, in a task, on a filled replay.

The policies are DI-engine's own with small models, so that the replay's share of an iteration shows.
"""

from __future__ import annotations

import functools
import importlib
import operator
import time
from typing import Any, Callable, Dict, List

import numpy as np
import torch
from ding.framework import task
from ding.framework.context import OnlineRLContext
from ding.model import DiscreteMAQAC
from ding.policy import DiscreteSACPolicy, DQNPolicy, IMPALAPolicy, PPOOffPolicy, QMIXPolicy, R2D2Policy, SACPolicy
from easydict import EasyDict
from torch import nn

from ding_store.compare.rows import Row
from ding_store.compare.sides import Side, Store

#: Iterations that take this long together are enough to measure one.
LONG_S = 1.0
#: Channels of three convolutions, and the width of the layer behind them.
_CONV = [8, 8, 8, 64]
_NUM_ACTIONS = 6


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


class TeamModel(nn.Module):
    """Q-values of a GoBigger team, from the first numbers of each leaf of its players' observations."""

    def __init__(self, leaves: Dict[str, tuple], num_actions: int = 16, num_inputs: int = 64) -> None:
        super().__init__()
        self._num_inputs = num_inputs
        self._paths = sorted(path.split('/')[1:] for path in leaves if path.startswith('obs/'))
        shapes = [leaves['/'.join(['obs', *path])][1][1:] for path in self._paths]
        width = sum(min(num_inputs, torch.Size(shape).numel()) for shape in shapes)
        self._net = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, num_actions))

    def forward(self, obs: Dict[str, Any]) -> Dict[str, torch.Tensor]:
        leaves: List[Any] = [functools.reduce(operator.getitem, path, obs) for path in self._paths]
        seen = [leaf.reshape(*leaf.shape[:2], -1)[..., : self._num_inputs] for leaf in leaves]
        return {'logit': self._net(torch.cat(seen, -1)).mean(1)}


class AgentsModel(DiscreteMAQAC):
    """
    MASAC model that takes the bare observation. DI-engine's policy passes that, but its model reads inputs['obs'].
    """

    def forward(self, inputs: Dict[str, Any], mode: str) -> Dict[str, Any]:
        return super().forward({'obs': inputs}, mode)


def policy_of(row: Row) -> Any:
    """
    Overview:
        Return the row's policy, made for learning. Its config holds ``policy`` and the settings that middleware reads.
    Returns:
        - policy (:obj:`Policy`): MASAC has a model that it can call, on both sides. DI-engine 0.5.3's own model fails
          at its first forward (``KeyError: 'obs'``).
    """
    torch.manual_seed(0)
    return POLICIES[row.name](row)


def _config(kind: Any, row: Row, **changes: Any) -> EasyDict:
    cfg = EasyDict(kind.default_config())
    cfg.update(cuda=False, multi_gpu=False, **changes)
    cfg.learn.update(batch_size=row.batch, update_per_collect=1)
    cfg.collect.unroll_len = 1
    return cfg


def _shape(row: Row, path: str) -> List[int]:
    return list(row.leaves[path][1])


def _prioritized(row: Row) -> Dict[str, bool]:
    on = row.kind == 'prioritized'
    return dict(priority=on, priority_IS_weight=on)


def _dqn(row: Row) -> Any:
    model = dict(obs_shape=_shape(row, 'obs'), action_shape=_NUM_ACTIONS, encoder_hidden_size_list=_CONV)
    return DQNPolicy(_config(DQNPolicy, row, model=model, nstep=1, **_prioritized(row)), enable_field=['learn'])


def _gobigger(row: Row) -> Any:
    cfg = _config(DQNPolicy, row, nstep=1, **_prioritized(row))
    return DQNPolicy(cfg, model=TeamModel(row.leaves), enable_field=['learn'])


def _ppo(row: Row) -> Any:
    model = dict(
        obs_shape=_shape(row, 'obs'),
        action_shape=_NUM_ACTIONS,
        encoder_hidden_size_list=_CONV,
        actor_head_hidden_size=64,
        critic_head_hidden_size=64,
    )
    cfg = _config(PPOOffPolicy, row, model=model, action_space='discrete', **_prioritized(row))
    return PPOOffPolicy(cfg, enable_field=['learn'])


def _sac(row: Row) -> Any:
    obs, action = _shape(row, 'obs')[0], _shape(row, 'action')[0]
    model = dict(obs_shape=obs, action_shape=action, action_space='reparameterization', twin_critic=True)
    model.update(actor_head_hidden_size=64, critic_head_hidden_size=64)
    return SACPolicy(_config(SACPolicy, row, model=model, **_prioritized(row)), enable_field=['learn'])


def _r2d2(row: Row) -> Any:
    model = dict(obs_shape=_shape(row, 'obs'), action_shape=_NUM_ACTIONS, encoder_hidden_size_list=_CONV)
    burnin = min(8, row.steps // 2)
    changes = dict(model=model, nstep=2, burnin_step=burnin, learn_unroll_len=row.steps - burnin)
    cfg = _config(R2D2Policy, row, **changes)
    cfg.update(priority=True, priority_IS_weight=False)
    cfg.collect.env_num = 1
    # The policy reads the length of a sequence in collect mode.
    return R2D2Policy(cfg, enable_field=['learn', 'collect'])


def _impala(row: Row) -> Any:
    model = dict(
        obs_shape=_shape(row, 'obs'),
        action_shape=_NUM_ACTIONS,
        encoder_hidden_size_list=_CONV,
        actor_head_hidden_size=64,
        critic_head_hidden_size=64,
    )
    cfg = _config(IMPALAPolicy, row, model=model, unroll_len=row.steps, priority=False, priority_IS_weight=False)
    return IMPALAPolicy(cfg, enable_field=['learn'])


def _qmix(row: Row) -> Any:
    agents, actions = _shape(row, 'obs/action_mask')
    model = dict(
        agent_num=agents,
        obs_shape=_shape(row, 'obs/agent_state')[1],
        global_obs_shape=_shape(row, 'obs/global_state')[0],
        action_shape=actions,
        hidden_size_list=[64],
        mixer=True,
    )
    return QMIXPolicy(_config(QMIXPolicy, row, model=model), enable_field=['learn'])


def _masac(row: Row) -> Any:
    agents, actions = _shape(row, 'obs/action_mask')
    model = dict(
        agent_obs_shape=_shape(row, 'obs/agent_state')[1],
        global_obs_shape=_shape(row, 'obs/global_state')[1],
        action_shape=actions,
        twin_critic=True,
        actor_head_hidden_size=64,
        critic_head_hidden_size=64,
    )
    cfg = _config(DiscreteSACPolicy, row, model=model, multi_agent=True, **_prioritized(row))
    return DiscreteSACPolicy(cfg, model=AgentsModel(**model), enable_field=['learn'])


POLICIES: Dict[str, Callable[[Row], Any]] = {
    'dqn': _dqn,
    'ppo': _ppo,
    'r2d2': _r2d2,
    'impala': _impala,
    'sac': _sac,
    'qmix': _qmix,
    'masac': _masac,
    'gobigger': _gobigger,
}
