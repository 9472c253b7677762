"""Table against a plain list that is right by looking at it."""

import shutil
import tempfile
from typing import Dict, List, Tuple

import numpy as np
from examples import MORE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ding_store.buffer.samplers.uniform import Uniform
from ding_store.buffer.table.table import Table

SPECS = {'value': (np.dtype(np.int64), (2,))}


class TableModel(RuleBasedStateMachine):
    """The model is a list of (row number, value), oldest first."""

    def new_table(self, capacity: int) -> Table:
        return Table(SPECS, capacity)

    @initialize(capacity=st.integers(1, 9))
    def make(self, capacity: int) -> None:
        self.table = self.new_table(capacity)
        self.model: List[Tuple[int, int]] = []
        self.next_row = 0

    @rule(count=st.integers(0, 14))
    def extend(self, count: int) -> None:
        values = np.arange(self.next_row, self.next_row + count) * 7
        rows = self.table.extend({'value': np.stack([values, -values], axis=1)})
        assert rows.tolist() == list(range(self.next_row, self.next_row + count))
        self.model = (self.model + list(zip(rows.tolist(), values.tolist())))[-self.table.capacity :]
        self.next_row += count

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(-2, self.next_row + 2), max_size=6))
        self.table.delete(np.array(rows, np.int64))
        self.model = [(row, value) for row, value in self.model if row not in rows]

    @rule(data=st.data(), value=st.integers(0, 1000))
    def update(self, data: st.DataObject, value: int) -> None:
        row = data.draw(st.integers(-2, self.next_row + 2))
        live = row in dict(self.model)
        found = self.table.update(np.array([row]), {'value': np.array([[value, -value]])})
        assert found.tolist() == [live]
        self.model = [(r, value if r == row else v) for r, v in self.model]

    @rule(capacity=st.integers(1, 14))
    def resize(self, capacity: int) -> None:
        self.table.shape.resize(capacity)
        self.model = self.model[-capacity:]

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.model = []

    @precondition(lambda self: self.model)
    @rule(data=st.data(), replace=st.booleans())
    def sample(self, data: st.DataObject, replace: bool) -> None:
        size = data.draw(st.integers(1, 20 if replace else len(self.model)))
        rows, columns = self.table.read(lambda index: Uniform(0).choose(index, size, replace), self.table.columns.take)
        values: Dict[int, int] = dict(self.model)
        assert columns['value'].tolist() == [[values[row], -values[row]] for row in rows.tolist()]
        assert replace or len(set(rows.tolist())) == size

    @invariant()
    def same(self) -> None:
        if not hasattr(self, 'table'):
            return
        # Not rows_by_age: it puts the index in order, and deletes that nobody looked at would go untested.
        index = self.table.index
        rows = np.sort(index.row_of_slot[index.live_slots])
        assert rows.tolist() == [row for row, _ in self.model]
        assert len(self.table) == len(self.model)
        assert self.table.check() == []
        assert self.table.gather(rows)['value'].tolist() == [[value, -value] for _, value in self.model]
        everything = np.arange(-1, self.next_row + 2)
        assert everything[self.table.contains(everything)].tolist() == rows.tolist()

    @rule()
    def in_the_order_of_age(self) -> None:
        assert self.table.rows_by_age().tolist() == [row for row, _ in self.model]


class DurableTableModel(TableModel):
    """The same for a table with a path, which is closed and opened again at any time."""

    def new_table(self, capacity: int) -> Table:
        self.directory = tempfile.mkdtemp()
        return Table(SPECS, capacity, self.directory)

    @rule()
    def reopen(self) -> None:
        capacity = self.table.capacity
        self.table.close()
        self.table = Table({}, capacity, self.directory)

    def teardown(self) -> None:
        if hasattr(self, 'table'):
            self.table.close()
            shutil.rmtree(self.directory)


TestDurableTableModel = DurableTableModel.TestCase
TestDurableTableModel.settings = settings(max_examples=10 * MORE, stateful_step_count=25, deadline=None)
TestTableModel = TableModel.TestCase
TestTableModel.settings = settings(max_examples=30 * MORE, stateful_step_count=30, deadline=None)
