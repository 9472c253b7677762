"""Sequences and episodes against lists that are right by looking at them."""

from typing import Any, Dict, List

import numpy as np
import torch
from examples import MORE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ding_store.buffer import StoreBuffer
from ding_store.errors import NotEnoughData

STEPS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 1)), min_size=1, max_size=9)
KINDS = st.sampled_from([(1, None), (2, None), (3, None), (3, 1), (4, None), (2, 0)])
GROUPBY = {'column': 'env', 'meta': 'key', 'both': ('env', 'key')}


class SequenceModel(RuleBasedStateMachine):
    """The model is, for every group, a list of its episodes: lists of all rows that were ever pushed, live or not."""

    @initialize(size=st.integers(3, 40), by=st.sampled_from(sorted(GROUPBY)))
    def make(self, size: int, by: str) -> None:
        self.buffer, self.size, self.by = StoreBuffer(size, seed=3), size, by
        self.groupby = GROUPBY[by]
        self.next_row = 0
        self.forget()
        self.push_one_by_one([(0, False, 0)])
        # From its first use on the index sees every row.
        self.sequences((1, None), 1)
        self.episodes(1)

    def forget(self) -> None:
        self.episodes_of: Dict[Any, List[List[int]]] = {}
        self.done: set = set()
        self.live: List[int] = []
        #: Episodes of which nobody knows whether these rows begin them.
        self.cut: set = set()
        self.is_cut, self.first_row = False, self.next_row

    def note(self, env: int, done: bool, key: int) -> None:
        group = {'column': env, 'meta': key, 'both': (env, key)}[self.by]
        if self.is_cut and group not in self.episodes_of:
            self.cut.add(self.next_row)
        episodes = self.episodes_of.setdefault(group, [])
        if not episodes or episodes[-1][-1] in self.done:
            episodes.append([])
        episodes[-1].append(self.next_row)
        if done:
            self.done.add(self.next_row)
        self.live = [*self.live, self.next_row][-self.size :]
        self.next_row += 1

    def element(self, row: int, env: int, done: bool) -> Dict[str, torch.Tensor]:
        return {'env': torch.tensor(env), 'done': torch.tensor([done]), 'row': torch.tensor(row)}

    @rule(steps=STEPS)
    def push_one_by_one(self, steps: list) -> None:
        for env, done, key in steps:
            self.buffer.push(self.element(self.next_row, env, done), {'key': key})
            self.note(env, done, key)

    @rule(steps=STEPS)
    def push_together(self, steps: list) -> None:
        steps = steps[: self.size]
        elements = [self.element(self.next_row + i, env, done) for i, (env, done, _) in enumerate(steps)]
        self.buffer.extend_elements(elements, [{'key': key} for _, _, key in steps])
        for step in steps:
            self.note(*step)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(max(0, self.next_row - 12), self.next_row), max_size=3))
        self.buffer.delete([str(row) for row in rows])
        self.live = [row for row in self.live if row not in rows]

    @rule(size=st.integers(3, 40))
    def resize(self, size: int) -> None:
        self.buffer.resize(size)
        self.size, self.live = size, self.live[-size:]
        if self.live != list(range(self.next_row - len(self.live), self.next_row)):
            # Where rows are missing between others nobody knows whose they were: another story.
            self.clear()
            return
        # All rows are looked at anew, at the next sample or now, and nobody knows what those were that are gone.
        with self.buffer.table.index.lock:
            self.buffer._elements.sequences.index(self.groupby, 'done').refresh()
        self.is_cut = len(self.live) < self.next_row - self.first_row
        groups, self.episodes_of = self.episodes_of, {}
        for group, episodes in groups.items():
            left = [[row for row in rows if row in self.live] for rows in episodes]
            left = [rows for rows in left if rows]
            if left:
                self.episodes_of[group] = left
                self.cut.update([left[0][0]] if self.is_cut else [])

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.forget()

    @rule(kind=KINDS, size=st.integers(1, 5), replace=st.booleans())
    def sample(self, kind: tuple, size: int, replace: bool) -> None:
        self.sequences(kind, size, replace)

    @rule(size=st.integers(1, 4), max_length=st.one_of(st.none(), st.integers(1, 4)), replace=st.booleans())
    def sample_episodes(self, size: int, max_length: Any, replace: bool) -> None:
        self.episodes(size, max_length, replace)

    def windows(self, length: int, overlap: Any) -> List[List[int]]:
        step = 1 if overlap is None else length - overlap
        found = []
        for episodes in self.episodes_of.values():
            for rows in episodes:
                parts = [rows[i : i + length] for i in range(0, len(rows) - length + 1, step)]
                found += [part for part in parts if set(part) <= set(self.live)]
        return found

    def sequences(self, kind: tuple, size: int, replace: bool = False) -> None:
        length, overlap = kind
        expected = self.windows(length, overlap)
        try:
            batch = self.buffer.sample_sequences(size, length, self.groupby, overlap=overlap, replace=replace)
        except NotEnoughData:
            assert len(expected) < (1 if replace else size)
            return
        drawn = batch.rows.T.tolist()
        assert len(drawn) == size
        assert all(each in expected for each in drawn)
        assert replace or len({each[0] for each in drawn}) == size
        assert batch.data['row'].tolist() == batch.rows.tolist()
        index = self.buffer._elements.sequences.index(self.groupby, 'done')
        starts = index.starts(length, 1 if overlap is None else length - overlap).members
        slots, is_valid = index.windows(starts, length)
        assert is_valid is None or not is_valid.all()
        valid = slots.T if is_valid is None else slots.T[is_valid]
        every = self.buffer.table.index.row_of_slot[valid].tolist()
        assert sorted(every) == sorted(expected)

    def episodes(self, size: int, max_length: Any = None, replace: bool = False) -> None:
        whole = [rows for episodes in self.episodes_of.values() for rows in episodes if rows[-1] in self.done]
        whole = [rows for rows in whole if rows[0] not in self.cut]
        whole = [rows for rows in whole if set(rows) <= set(self.live) and len(rows) <= (max_length or 99)]
        try:
            sample = self.buffer.sample_episodes(size, self.groupby, max_length=max_length, replace=replace)
        except NotEnoughData:
            assert len(whole) < (1 if replace else size)
            return
        ends = np.cumsum(sample.lengths)
        drawn = [rows.tolist() for rows in np.split(sample.rows, ends[:-1])]
        assert all(rows in whole for rows in drawn)
        assert replace or len({rows[0] for rows in drawn}) == size
        assert sample.mask.sum(0).tolist() == sample.lengths.tolist()
        for place, rows in enumerate(drawn):
            column = sample.data['row'][:, place].tolist()
            assert column == rows + [0] * (len(column) - len(rows))
            assert [int(each['row']) for each in sample.elements()[place]] == rows

    @invariant()
    def same_rows(self) -> None:
        if hasattr(self, 'buffer'):
            assert self.buffer.table.rows_by_age().tolist() == self.live


TestSequenceModel = SequenceModel.TestCase
TestSequenceModel.settings = settings(max_examples=20 * MORE, stateful_step_count=25, deadline=None)
