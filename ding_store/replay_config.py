"""Settings of a buffer of ``type='store'``: the keys of DI-engine's buffers, and some more."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Dict, Mapping, Optional, Sequence, Union

from ding_store.config import unknown_key
from ding_store.errors import ConfigError

INFINITY = math.inf

#: Names of DI-engine's 'advanced' buffer for these keys.
ALIASES = {
    'alpha': 'priority_power_factor',
    'beta': 'IS_weight_power_factor',
    'anneal_step': 'IS_weight_anneal_train_iter',
}
#: Keys that are accepted and change nothing. They set where a buffer is made, if it copies (here always), and how
#: monitors average. 'policy' and 'value' are the blocks of PPG's two buffers, each made from its own block.
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
SAMPLERS = ('auto', 'uniform', 'prioritized', 'rank', 'fifo', 'lifo', 'shuffled', 'fresh')
#: Those that ignore priorities.
WITHOUT_PRIORITIES = ('uniform', 'fifo', 'lifo', 'shuffled', 'fresh')
#: Those that give each element a set number of times, once by default.
QUEUES = ('fifo', 'lifo')
#: Rules for the elements that leave a full buffer.
REMOVERS = ('oldest', 'lowest_priority', 'reservoir')


@dataclass(frozen=True)
class WrapperSettings:
    """
    Overview:
        The settings of one buffer. Names and meanings are those of DI-engine's 'deque' buffer, or of 'advanced' for
        keys that 'deque' lacks.
    Arguments:
        - priority (:obj:`Optional[bool]`): None: on after the first ``update`` or the first element with a priority.
        - thruput_controller (:obj:`Mapping`): As in 'advanced'. Its ``push_sample_rate_limit`` bounds the rows pushed
          per row sampled, as DI-engine's code does, not its comment. Above ``max`` new rows are thrown away. Below
          ``min`` nothing is sampled.
        - path (:obj:`Optional[str]`): Directory of a buffer that survives its process.
        - sampler (:obj:`str`): 'auto': chosen by ``priority``. 'fifo': the oldest rows first, each ``max_use`` times,
          once by default. 'lifo': the newest first, each once. 'shuffled': each once per epoch. 'fresh': by age, see
          ``half_life``. 'rank': prioritized by rank.
        - half_life (:obj:`Optional[float]`): With the sampler 'fresh', an element is half as likely after so many newer
          ones.
        - prefetch (:obj:`int`): Number of batches that a thread gathers ahead.
        - share_frames (:obj:`Union[str, bool]`): 'auto': the buffer keeps frames that recur once. False: not.
        - remover (:obj:`str`): Decides which elements leave a full buffer: 'oldest', 'lowest_priority' or 'reservoir'.
        - ragged (:obj:`Union[str, Sequence[str]]`): Paths of leaves whose first dimension varies, or 'all'.
        - time_major (:obj:`bool`): True: elements that are sequences come as one time-major batch. Policies that stack
          the steps (R2D2, IMPALA, QMIX and others) use it without a copy. All others get lists of its contents.
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
    half_life: Optional[float] = None
    prefetch: int = 0
    share_frames: Union[str, bool] = 'auto'
    remover: str = 'oldest'
    ragged: Union[str, Sequence[str]] = ()
    time_major: bool = True

    @classmethod
    def from_config(cls, cfg: Mapping[str, Any]) -> WrapperSettings:
        """
        Overview:
            Read and check a buffer's config.
        Raises:
            - ConfigError: An unknown key or a bad value. For a key, the message lists the valid ones and the nearest.
        """
        known = [each.name for each in fields(cls)]
        settings: Dict[str, Any] = {}
        for key, value in cfg.items():
            name = ALIASES.get(key, key)
            if name in known:
                # The key of 'deque' overrides the same key of 'advanced', which may be a policy's default.
                if key == name or name not in cfg:
                    settings[name] = value
            elif key not in WITHOUT_EFFECT:
                raise ConfigError(unknown_key('replay_buffer', str(key), [*known, *ALIASES, *WITHOUT_EFFECT]))
        return cls(**settings)

    def __post_init__(self) -> None:
        for name in ('replay_buffer_size', 'train_iter_per_log'):
            _check_integer(name, getattr(self, name), 1)
        _check_integer('prefetch', self.prefetch, 0)
        if self.share_frames is not False and self.share_frames != 'auto':
            raise ConfigError(f"replay_buffer.share_frames ({self.share_frames!r}) must be 'auto' or False")
        if self.remover not in REMOVERS:
            raise ConfigError(f'replay_buffer.remover ({self.remover!r}) must be one of {", ".join(REMOVERS)}')
        _check_ragged(self.ragged)
        if self.max_use != INFINITY:
            _check_integer('max_use', self.max_use, 1)
        for name in ('max_staleness', 'priority_max_limit'):
            if not _is_number(getattr(self, name)) or not getattr(self, name) > 0:
                raise ConfigError(f'replay_buffer.{name} ({getattr(self, name)!r}) must be a number > 0')
        if self.sampler not in SAMPLERS:
            raise ConfigError(f'replay_buffer.sampler ({self.sampler!r}) must be one of {", ".join(SAMPLERS)}')
        if self.sampler == 'lifo' and self.max_use not in (1, INFINITY):
            raise ConfigError(
                f"replay_buffer.max_use ({self.max_use!r}) must be 1 with sampler='lifo', which gives each element once"
            )
        self._check_half_life()
        if self.sampler in WITHOUT_PRIORITIES and self.priority:
            raise ConfigError(f'replay_buffer.sampler ({self.sampler!r}) has no priorities. Set priority=False.')
        if self.enable_track_used_data:
            raise ConfigError(
                "replay_buffer.enable_track_used_data (True) deletes the files of used rows, and type='store' has no "
                'file per row. Set it to False.'
            )

    def _check_half_life(self) -> None:
        if self.sampler != 'fresh':
            if self.half_life is not None:
                raise ConfigError(
                    f"replay_buffer.half_life ({self.half_life!r}) is for sampler='fresh'. Set sampler, or leave out "
                    'half_life.'
                )
        elif not _is_number(self.half_life) or not 0 < float(self.half_life or 0) < INFINITY:
            raise ConfigError(
                f"replay_buffer.half_life ({self.half_life!r}) must be a number > 0 with sampler='fresh': after so "
                'many newer elements, an element is half as likely'
            )

    @property
    def is_prioritized(self) -> bool:
        """True if rows are sampled by priority from the beginning."""
        # With a path, priorities are stored with the rows from the first row on.
        auto = self.priority if self.priority is not None else self.path is not None
        return self.sampler in ('prioritized', 'rank') or (self.sampler == 'auto' and bool(auto))

    @property
    def may_be_prioritized(self) -> bool:
        """True if rows may be sampled by priority now or later."""
        return self.is_prioritized or (self.sampler == 'auto' and self.priority is None)

    def priority_settings(self) -> Dict[str, Any]:
        """Return the arguments of ``Prioritized``. If the annealing has 0 steps, beta stays constant."""
        steps, beta = self.IS_weight_anneal_train_iter, self.IS_weight_power_factor
        return dict(
            alpha=self.priority_power_factor, beta=beta, beta_end=1.0 if steps else beta, beta_anneal_steps=int(steps)
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_ragged(names: Any) -> None:
    is_text = isinstance(names, str)
    if (is_text and names != 'all') or not (is_text or all(isinstance(name, str) for name in names)):
        raise ConfigError(
            f"replay_buffer.ragged ({names!r}) must be a list of paths of leaves, such as ['obs/units'], or 'all'"
        )


def _check_integer(name: str, value: Any, least: int) -> None:
    # Configs have 1e5 for 100000.
    if not _is_number(value) or value < least or value != int(value):
        raise ConfigError(f'replay_buffer.{name} ({value!r}) must be an integer >= {least}')
