"""A replay that grows with the env steps, see ``store.replay_growth``."""

from __future__ import annotations

import os
from typing import Any, Optional

from ditk import logging

from ding_store.buffer.persistence.table_header import read_header
from ding_store.buffer.store_buffer import StoreBuffer
from ding_store.config import GrowthConfig
from ding_store.errors import ConfigError
from ding_store.run.session import RunSession

#: Number of equal parts by which a replay grows. Each of them copies a replay that is in memory.
PARTS = 20


class ReplayGrowth:
    """
    Overview:
        Gives a replay the size that the config has for an env step. A replay with elements never shrinks.
    Arguments:
        - config (:obj:`GrowthConfig`): The size at env step 0, and the env step of the full size.
        - full_size (:obj:`int`): The full size.
    Attributes:
        - buffer (:obj:`Optional[StoreBuffer]`): The replay, once it was made.
        - has_pusher (:obj:`bool`): A pusher calls ``grow``.
    Raises:
        - ConfigError: The replay would not grow.
    """

    def __init__(self, config: GrowthConfig, full_size: int) -> None:
        if config.start >= full_size:
            raise ConfigError(
                f'store.replay_growth.start ({config.start}) must be below replay_buffer_size ({full_size}): the '
                'replay would not grow. Lower start, or remove store.replay_growth.'
            )
        self._config, self._full_size = config, full_size
        self.buffer: Optional[StoreBuffer] = None
        self.has_pusher = False

    def size_at(self, env_step: int) -> int:
        """Return the size at an env step."""
        num_parts = min(PARTS, PARTS * env_step // self._config.env_steps)
        return self._config.start + (self._full_size - self._config.start) * num_parts // PARTS

    def size_in(self, path: Optional[str]) -> int:
        """Return the size with which the replay in a path must be opened. No path, or no replay there: any will do."""
        header = None if path is None else read_header(os.path.join(path, 'header'))
        # If it is larger than the full size, opening it fails and names both sizes.
        return self._full_size if header is None else min(header.capacity, self._full_size)

    def fit(self, path: str) -> None:
        """Give the empty replay the size with which it can move to a path."""
        if self.buffer is not None and self.buffer.table.table_dir is None:
            self.buffer.resize(self.size_in(path))

    def begin(self) -> None:
        """Give a replay without elements its first size."""
        if self.buffer is not None and not self.buffer.count():
            self.buffer.resize(self.size_at(0))

    def grow(self, env_step: int) -> None:
        """Enlarge the replay to its size at an env step."""
        size = self.size_at(env_step)
        if self.buffer is not None and size > self.buffer.size:
            self.buffer.resize(size)
            logging.info(f'ding_store: the replay has room for {size:,} elements from env step {env_step:,} on')


def growth_of(session: RunSession, cfg: Any, buffer_: Any) -> Optional[ReplayGrowth]:
    """
    Overview:
        Begin the growth of a pusher's replay, and return it. None: replays do not grow.
    Raises:
        - ConfigError: This replay cannot grow, or would be too small for a batch.
    """
    config = session.config.replay_growth
    if config is None:
        return None
    found = [growth for growth in session.replay_growths if growth.buffer is buffer_]
    if not found:
        raise ConfigError(
            f'store.replay_growth needs a replay of parts.DequeBuffer or parts.replay, and this is another '
            f'{type(buffer_).__name__}. Make it by one of these, or remove store.replay_growth.'
        )
    if config.start < cfg.policy.learn.batch_size:
        raise ConfigError(
            f'store.replay_growth.start ({config.start}) must be at least policy.learn.batch_size '
            f'({cfg.policy.learn.batch_size}): a batch would never be complete. Raise start.'
        )
    found[0].has_pusher = True
    found[0].begin()
    return found[0]


def check_grows(session: RunSession, buffer_: Any) -> None:
    """
    Raises:
        - ConfigError: The replay should grow, but no ``data_pusher`` of ding_store pushes into it.
    """
    if any(growth.buffer is buffer_ and not growth.has_pusher for growth in session.replay_growths):
        raise ConfigError(
            'store.replay_growth needs a data_pusher that was made before the learner, because it makes the replay '
            'grow. Add task.use(parts.data_pusher(cfg, buffer_)), or remove store.replay_growth.'
        )
