"""Replay settings of a config in DI-engine's keys, and the buffers made from them: DI-engine's or ding_store's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional

from ding_store.errors import ConfigError
from ding_store.replay_config import INFINITY, QUEUES, WITHOUT_PRIORITIES, WrapperSettings

#: Leaf of every element that DI-engine's collectors set: the train iteration of its policy, which gives its age.
AGE = 'collect_train_iter'


@dataclass(frozen=True)
class ReplaySettings:
    """
    Overview:
        The replay settings of a config: ``policy.priority``, ``policy.priority_IS_weight``, and
        ``policy.other.replay_buffer`` with the keys of the config pipeline's buffer.
    Arguments:
        - buffer (:obj:`WrapperSettings`): These keys have an effect here: ``replay_buffer_size``, ``max_use``,
          ``max_staleness``, ``priority_power_factor``, ``IS_weight_power_factor``, ``IS_weight_anneal_train_iter``,
          ``sampler``, ``half_life``, ``sliced``, ``prefetch``, ``share_frames``, ``remover``, ``ragged`` and ``path``.
          An element leaves if its ``collect_train_iter`` is ``max_staleness`` behind the newest. DI-engine's buffer
          uses only size, ``max_use``, ``sliced`` and the priority settings.
        - priority (:obj:`bool`): Sample elements by priority.
        - is_weight (:obj:`bool`): Add importance weights to batches.
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
        sampler = policy.other.replay_buffer.get('sampler')
        if priority and sampler in WITHOUT_PRIORITIES:
            raise ConfigError(
                f'policy.other.replay_buffer.sampler ({sampler!r}) ignores priorities. To use it, turn policy.priority '
                'off.'
            )
        settings = WrapperSettings.from_config({**policy.other.replay_buffer, 'priority': priority})
        if settings.max_staleness != INFINITY and settings.max_staleness != int(settings.max_staleness):
            raise ConfigError(f'replay_buffer.max_staleness ({settings.max_staleness!r}) must be an integer')
        return cls(settings, settings.is_prioritized, bool(policy.get('priority_IS_weight', False)))

    @property
    def max_use(self) -> Optional[int]:
        """Maximum number of times that an element is sampled. None: no limit, which DI-engine writes as infinity."""
        return None if self.buffer.max_use == INFINITY else int(self.buffer.max_use)

    def stock(self) -> Any:
        """Create a DequeBuffer with DI-engine's middleware. It ignores ``sampler``, which only StoreBuffer supports."""
        from ding.data import DequeBuffer
        from ding.data.buffer.middleware import PriorityExperienceReplay, use_time_check

        buffer_ = DequeBuffer(size=int(self.buffer.replay_buffer_size), sliced=self.buffer.sliced)
        if self.is_weight:
            buffer_.use(_name_weights)  # the first middleware is the last to process a sample
        if self.priority:
            settings: Dict[str, Any] = dict(
                priority_power_factor=self.buffer.priority_power_factor,
                IS_weight_power_factor=self.buffer.IS_weight_power_factor,
                # DI-engine divides by this. 0 means no annealing, which infinity gives there.
                IS_weight_anneal_train_iter=self.buffer.IS_weight_anneal_train_iter or INFINITY,
            )
            buffer_.use(PriorityExperienceReplay(buffer_, IS_weight=self.is_weight, **settings))
        if self.max_use is not None:
            buffer_.use(use_time_check(buffer_, max_use=self.max_use))
        return buffer_

    def store(self, make: Callable) -> Any:
        """Create a StoreBuffer by ``make(size, sampler=...)``."""
        options: Dict[str, Any] = {'sliced': True} if self.buffer.sliced else {}
        # Pass these only if they are set, because the ``store`` block has settings for all as well.
        if self.buffer.prefetch:
            options['prefetch'] = int(self.buffer.prefetch)
        if self.buffer.share_frames is False:
            options['share_frames'] = False
        if self.buffer.remover != 'oldest':
            options['remover'] = self.buffer.remover
        if self.buffer.ragged:
            options['ragged'] = self.buffer.ragged
        if self.buffer.path is not None:
            options['path'] = self.buffer.path
        return make(int(self.buffer.replay_buffer_size), sampler=self._sampler(), **options)

    def _sampler(self) -> Any:
        from ding_store.buffer import Prioritized, RankPrioritized, Uniform, limited
        from ding_store.buffer.samplers.by_name import sampler_by_name

        max_use = self.max_use or (1 if self.buffer.sampler in QUEUES else None)
        sampler = sampler_by_name(self.buffer)
        if sampler is None and self.priority:
            settings = self.buffer.priority_settings()
            if not self.is_weight:
                # Without importance weights, the bias of priorities is not corrected.
                settings.update(beta=0.0, beta_end=0.0)
            sampler = (RankPrioritized if self.buffer.sampler == 'rank' else Prioritized)(**settings)
        max_age = None if self.buffer.max_staleness == INFINITY else int(self.buffer.max_staleness)
        if max_use is None and max_age is None:
            return sampler
        return limited(sampler or Uniform(), max_times_sampled=max_use, max_age=max_age, version=AGE)


def _name_weights(action: str, chain: Callable, *args: Any, **kwargs: Any) -> Any:
    """Copy importance weights to ``IS``: DI-engine's recurrent policies read them there, its task pipeline does not."""
    result: List[Any] = chain(*args, **kwargs)
    if action == 'sample':
        for item in result:
            if isinstance(item.data, dict):
                item.data['IS'] = item.data['priority_IS'][0]
    return result
