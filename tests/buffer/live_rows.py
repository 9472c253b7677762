"""Rules of models that know which rows of a buffer are live. Row ``i`` has the value ``i``."""

import copy
from typing import List

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from ding_store.buffer import StoreBuffer, Uniform


def push(buffer: StoreBuffer, count: int) -> None:
    """Push rows whose values are their numbers."""
    first = int(buffer.table.next_row)
    buffer.extend({'x': np.arange(first, first + count)})


class LiveRows(RuleBasedStateMachine):
    """Pushes, deletes, resizes, clears and copies. A subclass makes ``buffer``, ``size`` and ``live``."""

    buffer: StoreBuffer
    size: int
    live: List[int]

    @rule(count=st.integers(1, 15))
    def push(self, count: int) -> None:
        first = int(self.buffer.table.next_row)
        push(self.buffer, count)
        self.live = [*self.live, *range(first, first + count)][-self.size :]

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from([-1, *self.live]), max_size=4))
        self.buffer.delete([str(row) for row in rows])
        self.live = [row for row in self.live if row not in rows]

    @rule(size=st.integers(1, 12))
    def resize(self, size: int) -> None:
        self.buffer.resize(size)
        self.size, self.live = size, self.live[-size:]

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.live = []

    @rule()
    def duplicate(self) -> None:
        self.buffer = copy.deepcopy(self.buffer)

    @rule()
    def sample_with_another(self) -> None:
        if self.live:
            self.buffer.view(Uniform(0)).sample_batch(1)
