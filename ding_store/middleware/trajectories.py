"""Middleware of collectors: n-step returns, sequences, first priorities, and Ape-X's epsilons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional

import numpy as np
import torch
from ding.framework import task
from ding.utils import lists_to_dicts

from ding_store.errors import ConfigError

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext

Step = Any  # a treetensor of one transition


def pieces(ctx: OnlineRLContext) -> Iterator[List[Step]]:
    """Yield the steps of ``ctx.trajectories`` in pieces of one episode or trajectory each, oldest first."""
    ends = set(ctx.trajectory_end_idx or [])
    start = 0
    for i, step in enumerate(ctx.trajectories):
        if i in ends or step.done:
            yield ctx.trajectories[start : i + 1]
            start = i + 1
    if start < len(ctx.trajectories):
        yield ctx.trajectories[start:]


def nstep_returns(cfg: Any) -> Callable:
    """
    Overview:
        Create the middleware that makes n-step transitions in the collector. Use it in place of DI-engine's
        ``nstep_reward_enhancer``. That one bootstraps from the next observation instead of the n-th. It adds up rewards
        of neighbouring environments, and runs a second time on the learner. The last steps of a piece have fewer
        rewards. See Sutton and Barto 2018, equation 7.1.
    Input of ctx:
        - trajectories (:obj:`List`): Transitions with ``reward`` (1,).
    Output of ctx:
        - trajectories (:obj:`List`): Transitions with ``reward`` (n,), padded with 0. ``next_obs`` and ``done`` are
          those of the last of the n steps. ``value_gamma`` (1,) is the discount of the value that follows.
    """
    if not _collects():
        return task.void()
    nstep, gamma = cfg.policy.nstep, cfg.policy.discount_factor

    def _nstep_returns(ctx: OnlineRLContext) -> None:
        for piece in pieces(ctx):
            add_returns(piece, nstep, gamma)

    return _nstep_returns


def add_returns(steps: List[Any], nstep: int, gamma: float) -> None:
    """Make the steps of one episode n-step transitions, in place. Steps are treetensors or dicts."""
    for step in steps:
        reward = step['reward']
        if not isinstance(reward, torch.Tensor):
            raise ConfigError(
                f'n-step returns failed: a reward is a {type(reward).__name__}. Have the environment return an array'
            )
        step['reward'] = torch.atleast_1d(reward)
    nothing = torch.zeros_like(steps[0]['reward'])
    for i, step in enumerate(steps):
        # Oldest first, so that the later steps read here are still unchanged.
        taken = steps[i : i + nstep]
        rewards = [each['reward'] for each in taken]
        step['reward'] = torch.cat(rewards + [nothing] * (nstep - len(taken)))
        step['value_gamma'] = torch.tensor([gamma ** len(taken)])
        step['done'] = taken[-1]['done']
        if 'next_obs' in step:
            step['next_obs'] = taken[-1]['next_obs']


class Unroller:
    """
    Overview:
        Middleware that cuts each episode into sequences of ``length`` steps. A sequence is one element: a dict of lists
        of steps, as in DI-engine's config pipeline. An episode's last sequence ends with the episode, so it may share
        more steps with the one before. If the episode is shorter than a sequence, steps with zero observation and
        reward fill the rest.
    Arguments:
        - length (:obj:`int`): Number of steps in a sequence.
        - overlap (:obj:`int`): Number of steps that neighbouring sequences share. R2D2 shares half of them
          (Kapturowski et al. 2019, section 2.3).
        - nstep (:obj:`Optional[int]`): Make n-step returns within each sequence. None: leave rewards as they are.
        - gamma (:obj:`float`): The discount of n-step returns.
    Raises:
        - ConfigError: ``overlap`` is not below ``length``.
    Input of ctx:
        - trajectories (:obj:`List`): Steps with ``env_data_id``, which differs for each episode.
    Output of ctx:
        - trajectories (:obj:`List`): The sequences that were completed.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls) if _collects() else task.void()

    def __init__(self, length: int, overlap: int = 0, nstep: Optional[int] = None, gamma: float = 1.0) -> None:
        if not 0 <= overlap < length:
            raise ConfigError(f'overlap ({overlap}) must be at least 0 and below the length of a sequence ({length})')
        self._length, self._overlap = length, overlap
        self._nstep, self._gamma = nstep, gamma
        self._open: Dict[int, List[Step]] = {}
        self._num_new: Dict[int, int] = {}

    def __call__(self, ctx: OnlineRLContext) -> None:
        steps, ctx.trajectories, ctx.trajectory_end_idx = ctx.trajectories, [], []
        for step in steps:
            ctx.trajectories += self._add(int(step.env_data_id), step)

    def _add(self, episode: int, step: Step) -> List[Dict[str, List[Any]]]:
        steps = self._open.setdefault(episode, [])
        steps.append(step)
        num_new = self._num_new[episode] = self._num_new.get(episode, 0) + 1
        is_whole = len(steps) >= self._length and num_new >= self._length - self._overlap
        if len(steps) == num_new:
            is_whole = num_new == self._length  # the first sequence has no earlier steps to share
        made = [self._sequence(steps[-self._length :])] if is_whole or step.done else []
        if step.done:
            del self._open[episode], self._num_new[episode]
        else:
            del steps[: -self._length]
            if made:
                self._num_new[episode] = 0
        return made

    def _sequence(self, steps: List[Step]) -> Dict[str, List[Any]]:
        made = [step.json() for step in steps]
        if self._nstep is not None:
            add_returns(made, self._nstep, self._gamma)
        made += [_nothing(made[-1])] * (self._length - len(made))
        return lists_to_dicts(made, recursive=True)


def _nothing(step: Dict[str, Any]) -> Dict[str, Any]:
    """Return a copy of a step with zero observation and reward, to fill a sequence after the end of its episode."""
    empty = {key: _zeros(step[key]) for key in ('obs', 'next_obs', 'reward', 'value_gamma') if key in step}
    return {**step, **empty, 'done': torch.ones_like(step['done'])}


def _zeros(value: Any) -> Any:
    return {key: _zeros(each) for key, each in value.items()} if isinstance(value, dict) else torch.zeros_like(value)


def first_priorities(cfg: Any, model: torch.nn.Module) -> Callable:
    """
    Overview:
        Create the middleware that computes first priorities of transitions with the collector's network, before the
        learner samples them (Ape-X, Horgan et al. 2018, section 3). It does nothing if ``policy.priority`` is off. The
        priority is a leaf of the element, which ding_store's pushers and DI-engine's PriorityExperienceReplay read.
    Arguments:
        - model: A model of Q-values: ``model(obs)['logit']`` (B, actions).
    Input of ctx:
        - trajectories (:obj:`List`): n-step transitions, as ``nstep_returns`` makes them.
    Output of ctx:
        - trajectories (:obj:`List`): The same with ``priority``, the absolute n-step TD error.
    """
    if not _collects() or not cfg.policy.get('priority', False):
        return task.void()
    gamma = cfg.policy.discount_factor

    def _first_priorities(ctx: OnlineRLContext) -> None:
        steps = ctx.trajectories
        if not steps:
            return
        device = next(model.parameters()).device
        obs = torch.stack([step.obs for step in steps] + [step.next_obs for step in steps]).to(device)
        with torch.no_grad():
            values = model(obs.float())['logit'].cpu()
        taken = values[range(len(steps)), [int(step.action) for step in steps]]
        done = torch.tensor([float(step.done) for step in steps])
        rewards = torch.stack([step.reward for step in steps])
        returns = rewards @ gamma ** torch.arange(rewards.shape[1], dtype=torch.float32)
        discount = torch.cat([step.value_gamma for step in steps])
        errors = returns + (1 - done) * discount * values[len(steps) :].max(1).values - taken
        for step, error in zip(steps, np.abs(errors.numpy())):
            step.priority = float(error)  # not a tensor, because DI-engine's sum tree needs numbers

    return _first_priorities


def apex_epsilon(cfg: Any) -> Callable:
    """
    Overview:
        Create the middleware that gives each collector a constant epsilon, in place of ``eps_greedy_handler``. For the
        i-th of N collectors it is ``base ** (1 + i / (N - 1) * alpha)`` (Horgan et al. 2018, section 4.1). The settings
        are ``policy.other.apex``: ``num_collectors``, ``base``, ``alpha``. A collector that joins later gets one of the
        same epsilons.
    Output of ctx:
        - collect_kwargs (:obj:`dict`): ``eps``.
    """
    if not _collects():
        return task.void()
    settings = cfg.policy.other.apex
    # Learner and evaluator are nodes 0 and 1. Collectors that join later have node ids from 100 on.
    ordinal = max(task.router.node_id - 2, 0) if task.router.is_active else 0
    epsilon = collector_epsilon(ordinal, settings.num_collectors, settings.base, settings.alpha)

    def _apex_epsilon(ctx: OnlineRLContext) -> None:
        ctx.collect_kwargs['eps'] = epsilon

    return _apex_epsilon


def collector_epsilon(ordinal: int, num_collectors: int, base: float = 0.4, alpha: float = 7.0) -> float:
    """
    Overview:
        Return the constant epsilon of one collector, see ``apex_epsilon``.
    Raises:
        - ConfigError: The settings give no probability.
    """
    if num_collectors < 1 or not 0 < base <= 1 or alpha < 0:
        raise ConfigError(
            f'policy.other.apex (num_collectors {num_collectors!r}, base {base!r}, alpha {alpha!r}) is wrong. Set at '
            'least one collector, a base in (0, 1] and an alpha of at least 0.'
        )
    return float(base ** (1 + ordinal % num_collectors / max(num_collectors - 1, 1) * alpha))


def _collects() -> bool:
    return not task.router.is_active or task.has_role(task.role.COLLECTOR)
