"""What collectors make of the steps that they collected: n-step returns, sequences, first priorities."""

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
    """The steps of ``ctx.trajectories`` in runs of one episode each, oldest first."""
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
        n-step transitions, made where they were collected; in the place of DI-engine's ``nstep_reward_enhancer``, which
        bootstraps from the next observation instead of the n-th, adds up rewards of neighbouring environments, and runs
        a second time on the learner. The last steps of a collected piece have as many rewards as there are.
    Input of ctx:
        - trajectories (:obj:`List`): Transitions, with ``reward`` (1,).
    Output of ctx:
        - trajectories (:obj:`List`): ``reward`` (n,), 0 behind the last; ``next_obs`` and ``done`` of the last of these
          steps; ``value_gamma`` (1,), the discount of what follows. (Sutton and Barto 2018, equation 7.1)
    """
    if not _collects():
        return task.void()
    nstep, gamma = cfg.policy.nstep, cfg.policy.discount_factor

    def _nstep_returns(ctx: OnlineRLContext) -> None:
        for piece in pieces(ctx):
            add_returns(piece, nstep, gamma)

    return _nstep_returns


def add_returns(steps: List[Any], nstep: int, gamma: float) -> None:
    """In place, for the steps of one episode, as trees or as dicts."""
    for step in steps:
        reward = step['reward']
        if not isinstance(reward, torch.Tensor):
            raise ConfigError(
                f'n-step returns failed: a reward is a {type(reward).__name__}. Have the environment return an array'
            )
        step['reward'] = torch.atleast_1d(reward)
    nothing = torch.zeros_like(steps[0]['reward'])
    for i, step in enumerate(steps):
        # Oldest first: what is read here has not been written yet.
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
        Cuts each episode into sequences of ``length`` steps; a sequence is one element, a dict of lists of steps, as
        the collectors of DI-engine's config pipeline make them. An episode's last sequence ends with it: it shares more
        steps with the one before, or, if the episode was shorter, goes on with steps without observation and reward.
    Arguments:
        - length (:obj:`int`): Steps of a sequence.
        - overlap (:obj:`int`): Steps that neighbouring sequences share. (R2D2, Kapturowski et al. 2019, section 2.3:
          half of them)
        - nstep (:obj:`Optional[int]`): Make n-step returns within each sequence. None: leave rewards as they are.
        - gamma (:obj:`float`): The discount for these.
    Raises:
        - ConfigError: ``overlap`` is not below ``length``.
    Input of ctx:
        - trajectories (:obj:`List`): Steps, with ``env_data_id``, which is another for each episode.
    Output of ctx:
        - trajectories (:obj:`List`): Sequences that were completed.
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
            is_whole = num_new == self._length  # the first has nothing to share
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
    """A step behind the end of an episode."""
    empty = {key: _zeros(step[key]) for key in ('obs', 'next_obs', 'reward', 'value_gamma') if key in step}
    return {**step, **empty, 'done': torch.ones_like(step['done'])}


def _zeros(value: Any) -> Any:
    return {key: _zeros(each) for key, each in value.items()} if isinstance(value, dict) else torch.zeros_like(value)


def first_priorities(cfg: Any, model: torch.nn.Module) -> Callable:
    """
    Overview:
        Give new transitions the priority that the collector's own network finds, so that the learner need not see them
        first (Ape-X, Horgan et al. 2018, section 3). Void where ``policy.priority`` is off. The priority becomes a leaf
        of the element; pushers of ding_store and DI-engine's PriorityExperienceReplay take it from there.
    Arguments:
        - model: Of Q-values: ``model(obs)['logit']`` (B, actions).
    Input of ctx:
        - trajectories (:obj:`List`): n-step transitions, as of ``nstep_returns``.
    Output of ctx:
        - trajectories (:obj:`List`): With ``priority``, the absolute n-step TD error.
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
            step.priority = float(error)  # no tensor: DI-engine's sum tree takes numbers

    return _first_priorities


def apex_epsilon(cfg: Any) -> Callable:
    """
    Overview:
        One constant epsilon per collector, ``base ** (1 + i / (N - 1) * alpha)`` for the i-th of N (Horgan et al.
        2018, section 4.1), in the place of ``eps_greedy_handler``. The settings are ``policy.other.apex``:
        ``num_collectors``, ``base``, ``alpha``. A collector that joins later takes one of these epsilons, too.
    Output of ctx:
        - collect_kwargs (:obj:`dict`): ``eps``.
    """
    if not _collects():
        return task.void()
    settings = cfg.policy.other.apex
    # Learner and evaluator are nodes 0 and 1; those who join count from 100.
    ordinal = max(task.router.node_id - 2, 0) if task.router.is_active else 0
    epsilon = collector_epsilon(ordinal, settings.num_collectors, settings.base, settings.alpha)

    def _apex_epsilon(ctx: OnlineRLContext) -> None:
        ctx.collect_kwargs['eps'] = epsilon

    return _apex_epsilon


def collector_epsilon(ordinal: int, num_collectors: int, base: float = 0.4, alpha: float = 7.0) -> float:
    """
    Raises:
        - ConfigError: A setting that makes no probability.
    """
    if num_collectors < 1 or not 0 < base <= 1 or alpha < 0:
        raise ConfigError(
            f'policy.other.apex (num_collectors {num_collectors!r}, base {base!r}, alpha {alpha!r}) needs at least one '
            'collector, a base in (0, 1] and an alpha of at least 0'
        )
    return float(base ** (1 + ordinal % num_collectors / max(num_collectors - 1, 1) * alpha))


def _collects() -> bool:
    return not task.router.is_active or task.has_role(task.role.COLLECTOR)
