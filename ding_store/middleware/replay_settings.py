"""Which replay a config asks for, in DI-engine's own words, as DI-engine's buffer or as the store's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional

from ding_store.errors import ConfigError
from ding_store.replay_config import INFINITY, WrapperSettings

#: The number in every element that says how old it is; DI-engine's collectors put it there.
AGE = 'collect_train_iter'


@dataclass(frozen=True)
class ReplaySettings:
    """
    Overview:
        From a config: ``policy.priority`` and ``policy.priority_IS_weight``, and ``policy.other.replay_buffer`` with
        the keys of the config pipeline's buffer.
    Arguments:
        - buffer (:obj:`WrapperSettings`): What means something here: ``replay_buffer_size``, ``max_use``,
          ``max_staleness`` (elements leave whose ``collect_train_iter`` is so far behind the newest),
          ``priority_power_factor``, ``IS_weight_power_factor``, ``IS_weight_anneal_train_iter``, ``sampler``,
          ``sliced``, ``prefetch`` and ``path``. The store's alone are all but size, uses and priorities.
        - priority (:obj:`bool`): Whether elements are sampled by priority.
        - is_weight (:obj:`bool`): Whether batches have importance weights.
    Raises:
        - ConfigError: A key is unknown, a value out of range, or ``sampler`` contradicts ``policy.priority``.
    """

    buffer: WrapperSettings
    priority: bool = False
    is_weight: bool = False

    @classmethod
    def of(cls, cfg: Any) -> ReplaySettings:
        policy = cfg.policy
        priority = bool(policy.get('priority', False))
        if priority and policy.other.replay_buffer.get('sampler') in ('fifo', 'uniform'):
            raise ConfigError('policy.other.replay_buffer.sampler leaves no choice: turn policy.priority off')
        settings = WrapperSettings.from_config({**policy.other.replay_buffer, 'priority': priority})
        if settings.max_staleness != INFINITY and settings.max_staleness != int(settings.max_staleness):
            raise ConfigError(f'replay_buffer.max_staleness ({settings.max_staleness!r}) must be an integer')
        return cls(settings, settings.is_prioritized, bool(policy.get('priority_IS_weight', False)))

    @property
    def max_use(self) -> Optional[int]:
        """None: any number of times. DI-engine's defaults say that by infinity."""
        return None if self.buffer.max_use == INFINITY else int(self.buffer.max_use)

    def stock(self) -> Any:
        """DequeBuffer with DI-engine's middleware. It knows no queues and ranks: it samples as if not asked for."""
        from ding.data import DequeBuffer
        from ding.data.buffer.middleware import PriorityExperienceReplay, use_time_check

        buffer_ = DequeBuffer(size=int(self.buffer.replay_buffer_size), sliced=self.buffer.sliced)
        if self.is_weight:
            buffer_.use(_name_weights)  # the first that is used is the last to see a sample
        if self.priority:
            settings: Dict[str, Any] = dict(
                priority_power_factor=self.buffer.priority_power_factor,
                IS_weight_power_factor=self.buffer.IS_weight_power_factor,
                # Its steps are divided by: 0, which is no annealing, by infinity.
                IS_weight_anneal_train_iter=self.buffer.IS_weight_anneal_train_iter or INFINITY,
            )
            buffer_.use(PriorityExperienceReplay(buffer_, IS_weight=self.is_weight, **settings))
        if self.max_use is not None:
            buffer_.use(use_time_check(buffer_, max_use=self.max_use))
        return buffer_

    def store(self, make: Callable) -> Any:
        """``make(size, sampler=...)``: StoreBuffer."""
        options: Dict[str, Any] = {'sliced': True} if self.buffer.sliced else {}
        # Only what was said: the flag's block has a prefetch and a path of its own.
        if self.buffer.prefetch:
            options['prefetch'] = int(self.buffer.prefetch)
        if self.buffer.path is not None:
            options['path'] = self.buffer.path
        return make(int(self.buffer.replay_buffer_size), sampler=self._sampler(), **options)

    def _sampler(self) -> Any:
        from ding_store.buffer import Fifo, Prioritized, RankPrioritized, Sampler, Uniform, limited

        max_use = self.max_use
        sampler: Optional[Sampler] = None
        if self.buffer.sampler == 'fifo':
            max_use = max_use or 1
            sampler = Fifo(max_use)
        elif self.priority:
            settings = self.buffer.priority_settings()
            if not self.is_weight:
                # Without importance weights nothing of the bias is corrected.
                settings.update(beta=0.0, beta_end=0.0)
            sampler = (RankPrioritized if self.buffer.sampler == 'rank' else Prioritized)(**settings)
        max_age = None if self.buffer.max_staleness == INFINITY else int(self.buffer.max_staleness)
        if max_use is None and max_age is None:
            return sampler
        return limited(sampler or Uniform(), max_times_sampled=max_use, max_age=max_age, version=AGE)


def _name_weights(action: str, chain: Callable, *args: Any, **kwargs: Any) -> Any:
    """Recurrent policies of DI-engine look for importance weights under a name that its task pipeline does not use."""
    result: List[Any] = chain(*args, **kwargs)
    if action == 'sample':
        for item in result:
            if isinstance(item.data, dict):
                item.data['IS'] = item.data['priority_IS'][0]
    return result
