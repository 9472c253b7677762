"""Which replay a config asks for, in DI-engine's own words, as DI-engine's buffer or as the store's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, List, Optional

from ding_store.errors import ConfigError


@dataclass(frozen=True)
class ReplaySettings:
    """
    Overview:
        From a config: ``policy.priority`` and ``policy.priority_IS_weight``, and of ``policy.other.replay_buffer``:
    Arguments:
        - size (:obj:`int`): ``replay_buffer_size``.
        - priority (:obj:`bool`): Whether elements are sampled by priority; ``alpha`` and ``beta`` say how much.
        - is_weight (:obj:`bool`): Whether batches have importance weights.
        - max_use (:obj:`Optional[int]`): How often an element may be sampled.
        - sampler (:obj:`str`): 'auto', or 'fifo': each element in its turn, oldest first, ``max_use`` times (by
          default once); the store's alone.
    Raises:
        - ConfigError: ``sampler`` is something else, or contradicts ``priority``.
    """

    size: int
    priority: bool = False
    is_weight: bool = False
    alpha: float = 0.6
    beta: float = 0.4
    max_use: Optional[int] = None
    sampler: str = 'auto'

    def __post_init__(self) -> None:
        if self.sampler not in ('auto', 'fifo'):
            raise ConfigError(f"policy.other.replay_buffer.sampler ({self.sampler!r}) must be 'auto' or 'fifo'")
        if self.sampler == 'fifo' and self.priority:
            raise ConfigError("policy.other.replay_buffer.sampler='fifo' leaves no choice: turn policy.priority off")

    @classmethod
    def of(cls, cfg: Any) -> ReplaySettings:
        policy, replay = cfg.policy, cfg.policy.other.replay_buffer
        # DI-engine's defaults say "without limit" by infinity.
        max_use = replay.get('max_use')
        return cls(
            size=replay.replay_buffer_size,
            priority=bool(policy.get('priority', False)),
            is_weight=bool(policy.get('priority_IS_weight', False)),
            alpha=replay.get('alpha', 0.6),
            beta=replay.get('beta', 0.4),
            max_use=None if max_use in (None, float('inf')) else max_use,
            sampler=replay.get('sampler', 'auto'),
        )

    def stock(self) -> Any:
        """DequeBuffer with DI-engine's middleware. It knows no queues: 'fifo' is sampled at random there."""
        from ding.data import DequeBuffer
        from ding.data.buffer.middleware import PriorityExperienceReplay, use_time_check

        buffer_ = DequeBuffer(size=self.size)
        if self.is_weight:
            buffer_.use(_name_weights)  # the first that is used is the last to see a sample
        if self.priority:
            settings = dict(priority_power_factor=self.alpha, IS_weight_power_factor=self.beta)
            buffer_.use(PriorityExperienceReplay(buffer_, IS_weight=self.is_weight, **settings))
        if self.max_use is not None:
            buffer_.use(use_time_check(buffer_, max_use=self.max_use))
        return buffer_

    def store(self, make: Callable) -> Any:
        """``make(size, sampler=...)``: StoreBuffer."""
        from ding_store.buffer import Fifo, Prioritized, Sampler, Uniform, limited

        sampler: Optional[Sampler] = None
        max_use = self.max_use
        if self.sampler == 'fifo':
            max_use = max_use or 1
            sampler = Fifo(max_use)
        elif self.priority:
            # Without importance weights nothing of the bias is corrected.
            beta = self.beta if self.is_weight else 0.0
            sampler = Prioritized(alpha=self.alpha, beta=beta, beta_end=1.0 if self.is_weight else 0.0)
        if max_use is not None:
            sampler = limited(sampler or Uniform(), max_times_sampled=max_use)
        return make(self.size, sampler=sampler)


def _name_weights(action: str, chain: Callable, *args: Any, **kwargs: Any) -> Any:
    """Recurrent policies of DI-engine look for importance weights under a name that its task pipeline does not use."""
    result: List[Any] = chain(*args, **kwargs)
    if action == 'sample':
        for item in result:
            if isinstance(item.data, dict):
                item.data['IS'] = item.data['priority_IS'][0]
    return result
