"""
A pytest plugin for DI-engine's tests of its 'naive' and 'advanced' buffers: they get StoreBufferWrapper instead.

The tests read private attributes of DI-engine's classes. The classes here compute these attributes from the state of a
StoreBufferWrapper and of its StoreBuffer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional

import ding.worker.replay_buffer as package
import numpy as np
from easydict import EasyDict

from ding_store.buffer import StoreBufferWrapper
from ding_store.config import as_store


class Tree:
    """The weights of all places, as DI-engine's segment trees have them."""

    def __init__(self, buffer: ReadByTests) -> None:
        self._buffer = buffer

    def reduce(self, start: int = 0, end: Optional[int] = None) -> float:
        data, alpha = self._buffer._data[start:end], self._buffer.alpha
        return float(sum(each['priority'] ** alpha for each in data if each is not None))


class ReadByTests(StoreBufferWrapper):
    """A StoreBufferWrapper with the private attributes that DI-engine's tests read."""

    _eps = 0.0

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(EasyDict(as_store(cfg)), *args, **kwargs)
        self._sum_tree = self._min_tree = Tree(self)
        self._max_use, self.alpha = self.settings.max_use, self.settings.priority_power_factor

    @property
    def _next_unique_id(self) -> int:
        return self.buffer.table.next_row

    @property
    def _tail(self) -> int:
        return self._next_unique_id % self.replay_buffer_size

    @property
    def _head(self) -> int:
        return int(next(iter(self.buffer)).index) % self.replay_buffer_size if self.count() else self._tail

    @property
    def _valid_count(self) -> int:
        return self.count()

    @property
    def _max_priority(self) -> float:
        return 1.0 if self._priorities is None else self._priorities.priorities.max_priority

    max_priority = _max_priority

    @property
    def _data(self) -> List[Optional[Dict[str, Any]]]:
        """The elements by their places, with the keys of 'advanced'."""
        data: List[Optional[Dict[str, Any]]] = [None] * self.replay_buffer_size
        for item in self.buffer:
            row, priority = int(item.index), 1.0
            if self._priorities is not None:
                priority = float(self._priorities.priorities.of(np.array([row]))[0])
            keys = dict(replay_unique_id=row, replay_buffer_idx=row, priority=priority)
            data[row % self.replay_buffer_size] = {**item.data, **keys}
        return data

    def _sample_check(self, size: int, cur_learner_iter: int) -> tuple:
        return self.count() >= size, None


def pytest_configure(config: Any) -> None:
    for name in ('NaiveReplayBuffer', 'AdvancedReplayBuffer'):
        setattr(package, name, type(name, (ReadByTests,), {'config': getattr(package, name).config}))
    # The tests import their conftest.py from the package, which the wheel does not contain.
    package.__path__.extend(str(Path(folder).parent) for folder in config.args)
