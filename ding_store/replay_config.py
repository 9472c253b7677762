"""What a config may say about a buffer of ``type='store'``: the keys of DI-engine's buffers, and some of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Dict, Mapping, Optional

from ding_store.config import unknown_key
from ding_store.errors import ConfigError

INFINITY = math.inf

#: What 'advanced' calls these keys.
ALIASES = {
    'alpha': 'priority_power_factor',
    'beta': 'IS_weight_power_factor',
    'anneal_step': 'IS_weight_anneal_train_iter',
}
#: Keys that are accepted and change nothing: where a buffer is made, copies (ours always are), how monitors average,
#: and the blocks of PPG's two buffers, which are made of each alone.
WITHOUT_EFFECT = (
    'type',
    'cfg_type',
    'import_names',
    'name',
    'deepcopy',
    'max_reuse',
    'monitor',
    'periodic_thruput_seconds',
    'multi_buffer',
    'policy',
    'value',
)
SAMPLERS = ('auto', 'uniform', 'prioritized', 'rank', 'fifo')


@dataclass(frozen=True)
class WrapperSettings:
    """
    Overview:
        The settings of one buffer. Names and meanings are those of DI-engine's 'deque' where it has them, and of
        'advanced' else.
    Arguments:
        - priority (:obj:`Optional[bool]`): None: from the first ``update``, or the first element with a priority, on.
        - thruput_controller (:obj:`Mapping`): As of 'advanced'. Its ``push_sample_rate_limit`` is what it does, not
          what its comment says: rows pushed per row sampled, above ``max`` new rows are thrown away, below ``min``
          nothing is sampled.
        - path (:obj:`Optional[str]`): Directory of a buffer that survives its process.
        - sampler (:obj:`str`): 'auto': by ``priority``. 'fifo': the oldest first, each ``max_use`` times (by default
          once). 'rank': prioritized by rank.
        - prefetch (:obj:`int`): Batches that are gathered ahead, in a thread.
        - time_major (:obj:`bool`): Elements that are sequences come as one time-major batch. Policies that stack the
          steps (R2D2, IMPALA, QMIX and others) take it uncopied, all others get the lists that it stands for.
    """

    replay_buffer_size: int = 10000
    max_use: float = INFINITY
    max_staleness: float = INFINITY
    train_iter_per_log: int = 100
    priority: Optional[bool] = None
    priority_IS_weight: bool = True
    priority_power_factor: float = 0.6
    IS_weight_power_factor: float = 0.4
    IS_weight_anneal_train_iter: float = 1e5
    priority_max_limit: float = INFINITY
    thruput_controller: Mapping[str, Any] = field(default_factory=dict)
    enable_track_used_data: bool = False
    sliced: bool = False
    path: Optional[str] = None
    sampler: str = 'auto'
    prefetch: int = 0
    time_major: bool = True

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any]) -> WrapperSettings:
        """
        Raises:
            - ConfigError: An unknown key (the message lists the valid ones and suggests the nearest), or a bad value.
        """
        known = [each.name for each in fields(cls)]
        settings: Dict[str, Any] = {}
        for key, value in cfg.items():
            name = ALIASES.get(key, key)
            if name in known:
                # A name of 'deque' wins over the same by its name in 'advanced', which may be a policy's default.
                if key == name or name not in cfg:
                    settings[name] = value
            elif key not in WITHOUT_EFFECT:
                raise ConfigError(unknown_key('replay_buffer', str(key), [*known, *ALIASES, *WITHOUT_EFFECT]))
        return cls(**settings)

    def __post_init__(self) -> None:
        for name in ('replay_buffer_size', 'train_iter_per_log'):
            _check_integer(name, getattr(self, name), 1)
        _check_integer('prefetch', self.prefetch, 0)
        if self.max_use != INFINITY:
            _check_integer('max_use', self.max_use, 1)
        for name in ('max_staleness', 'priority_max_limit'):
            if not _is_number(getattr(self, name)) or not getattr(self, name) > 0:
                raise ConfigError(f'replay_buffer.{name} ({getattr(self, name)!r}) must be a number > 0')
        if self.sampler not in SAMPLERS:
            raise ConfigError(f'replay_buffer.sampler ({self.sampler!r}) must be one of {", ".join(SAMPLERS)}')
        if self.sampler in ('fifo', 'uniform') and self.priority:
            raise ConfigError(f'replay_buffer.sampler ({self.sampler!r}) has no priorities: set priority=False')
        if self.enable_track_used_data:
            raise ConfigError(
                "replay_buffer.enable_track_used_data (True) deletes the files of used rows; type='store' keeps no "
                'file per row: set it to False'
            )

    @property
    def is_prioritized(self) -> bool:
        """Whether rows are sampled by priority from the beginning."""
        # With a path, priorities are kept with the rows, which has to begin with them.
        auto = self.priority if self.priority is not None else self.path is not None
        return self.sampler in ('prioritized', 'rank') or (self.sampler == 'auto' and bool(auto))

    @property
    def may_be_prioritized(self) -> bool:
        """Whether they may be later on."""
        return self.is_prioritized or (self.sampler == 'auto' and self.priority is None)

    def priority_settings(self) -> Dict[str, Any]:
        """Of ``Prioritized``; an annealing of 0 steps means that there is none."""
        steps, beta = self.IS_weight_anneal_train_iter, self.IS_weight_power_factor
        return dict(
            alpha=self.priority_power_factor, beta=beta, beta_end=1.0 if steps else beta, beta_anneal_steps=int(steps)
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_integer(name: str, value: Any, least: int) -> None:
    # Configs write 1e5 where they mean 100000.
    if not _is_number(value) or value < least or value != int(value):
        raise ConfigError(f'replay_buffer.{name} ({value!r}) must be an integer >= {least}')
