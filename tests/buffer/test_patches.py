"""update_if_present: new values of some leaves of many elements at once."""

import copy
import tempfile
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from examples import MORE
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ding_store.buffer import Prioritized, StoreBuffer, limited
from ding_store.errors import SchemaMismatch, StoreClosed


def columns(count: int, first: int = 0) -> Dict[str, np.ndarray]:
    return {
        'obs/image': np.repeat(np.arange(first, first + count, dtype=np.float32)[:, None], 3, 1),
        'target': np.zeros((count, 2), np.float32),
        'version': np.zeros(count, np.int64),
    }


def filled(count: int, size: int = 10, **options: Any) -> StoreBuffer:
    buffer = StoreBuffer(size, **options)
    buffer.extend(columns(count))
    return buffer


def targets(buffer: StoreBuffer) -> Dict[int, float]:
    return {int(item.index): float(item.data.target[0]) for item in buffer}


def patch(values: List[float], versions: Any = None) -> Dict[str, Any]:
    made = {'target': np.repeat(np.array(values, np.float32)[:, None], 2, 1)}
    return made if versions is None else {**made, 'version': np.array(versions)}


def test_patch_skips_rows_that_are_gone() -> None:
    buffer = filled(12)
    assert buffer.update_if_present([3, 1, 99, 11], patch([3.0, 1.0, 9.0, 11.0])).tolist() == [True, False, False, True]
    assert targets(buffer) == {**dict.fromkeys(range(2, 12), 0.0), 3: 3.0, 11: 11.0}
    assert buffer.get_by_index('3').data.obs.image.tolist() == [3.0] * 3


def test_patch_takes_trees_tensors_and_indices() -> None:
    buffer = filled(6)
    items = buffer.sample(indices=['4', '2'])
    tree = ttorch.as_tensor({'obs': {'image': torch.full((2, 3), 7.0)}, 'target': torch.ones(2, 2, requires_grad=True)})
    assert buffer.update_if_present([item.index for item in items], tree).all()
    nested = {'obs': {'image': torch.full((1, 3), 8.0)}}
    assert buffer.update_if_present(torch.tensor([5]), nested).tolist() == [True]
    assert buffer.gather_batch([4, 2, 5]).data.obs.image[:, 0].tolist() == [7.0, 7.0, 8.0]
    assert buffer.gather_batch([4, 2, 5]).data.target[:, 1].tolist() == [1.0, 1.0, 0.0]


def test_repeated_row_gets_its_last_patch() -> None:
    buffer = filled(4)
    assert buffer.update_if_present([2, 0, 2, 2], patch([1.0, 2.0, 3.0, 4.0])).all()
    assert targets(buffer) == {0: 2.0, 1: 0.0, 2: 4.0, 3: 0.0}


def test_older_patch_does_not_undo_a_newer_one() -> None:
    buffer = filled(4)
    assert buffer.update_if_present([0, 1], patch([5.0, 5.0], [5, 5]), newer_than='version').all()
    written = buffer.update_if_present([0, 1, 2, 9], patch([4.0, 6.0, 4.0, 4.0], [4, 6, 5, 5]), newer_than='version')
    assert written.tolist() == [False, True, True, False]
    assert targets(buffer) == {0: 5.0, 1: 6.0, 2: 4.0, 3: 0.0}
    assert buffer.gather_batch([0, 1, 2, 3]).data.version.tolist() == [5, 6, 5, 0]
    assert not buffer.update_if_present([1], patch([9.0], [6]), newer_than='version').any()
    # One after the other: 7 and 8 are newer than what is there, 7 and 8 again are not.
    repeated = buffer.update_if_present([3] * 4, patch([7.0, 8.0, 1.0, 2.0], [7, 8, 7, 8]), newer_than='version')
    assert repeated.tolist() == [True, True, False, False]
    assert targets(buffer)[3] == 8.0


def test_patch_that_does_not_fit_changes_nothing() -> None:
    buffer = filled(4)
    wrong = {
        'unknown': {'other': np.zeros(2)},
        'expected float32': {'target': np.zeros((2, 2))},
        r'shape \(2, \*\(2,\)\)': {'target': np.zeros((2, 3), np.float32)},
        'is no array': {'target': [[1.0], [1.0, 2.0]]},
    }
    for message, columns_ in wrong.items():
        with pytest.raises(SchemaMismatch, match=message):
            buffer.update_if_present([0, 1], {**patch([1.0, 1.0]), **columns_})
    for name, message in (('version', 'leaf of the patch'), ('target', 'one integer per row')):
        with pytest.raises(SchemaMismatch, match=message):
            buffer.update_if_present([0, 1], patch([1.0, 1.0]), newer_than=name)
    with pytest.raises(TypeError, match='rows must be integers'):
        buffer.update_if_present([0.5, 1.0], patch([1.0, 1.0]))
    assert set(targets(buffer).values()) == {0.0}
    assert buffer.update_if_present([], patch([]), newer_than=None).tolist() == []


def test_patch_of_a_leaf_that_may_be_none_is_refused() -> None:
    buffer = StoreBuffer(4)
    for state in (None, torch.zeros(2)):
        buffer.push({'x': torch.zeros(1), 'state': state})
    with pytest.raises(SchemaMismatch, match=r"'state' is None in some rows\. Replace whole elements"):
        buffer.update_if_present([1], {'state': torch.ones(1, 2)})
    assert buffer.update_if_present([0, 1], {'x': torch.ones(2, 1)}).all()
    assert [float(item.data['x']) for item in buffer] == [1.0, 1.0]


def test_patch_of_python_objects_is_refused() -> None:
    buffer = StoreBuffer(4)
    assert buffer.update_if_present([0], {'x': np.zeros(1)}).tolist() == [False]
    buffer.push({'name': 'x'})
    with pytest.raises(SchemaMismatch, match='Use update'):
        buffer.update_if_present([0], {'name': np.zeros(1)})


def test_patch_leaves_priorities_and_uses_alone() -> None:
    buffer = filled(6, sampler=limited(Prioritized(epsilon=0.0, seed=0), max_times_sampled=50))
    rows = np.arange(6)
    buffer.update_priorities(rows, rows + 1.0)
    buffer.sample_batch(4)
    uses = buffer.sampler.uses_of(rows).tolist()
    buffer.update_if_present(rows, patch([1.0] * 6))
    assert buffer.sampler.priorities.of(rows) == pytest.approx(rows + 1.0)
    assert buffer.sampler.uses_of(rows).tolist() == uses
    assert buffer.sample_batch(4).data.target.eq(1.0).all()


def test_batch_drawn_ahead_has_the_patch() -> None:
    buffer = filled(10, prefetch=2, seed=0)
    buffer.sample_batch(5)
    buffer.update_if_present(np.arange(10), patch([2.0] * 10))
    for _ in range(3):
        assert buffer.sample_batch(5).data.target.eq(2.0).all()
    buffer.close()


def test_patch_survives_the_process(tmp_path: Path) -> None:
    buffer = filled(12, path=str(tmp_path / 'kept'))
    written = buffer.update_if_present([1, 5, 6], patch([1.0, 5.0, 6.0], [1, 1, 1]), newer_than='version')
    assert written.tolist() == [False, True, True]
    buffer.close()
    with pytest.raises(StoreClosed):
        buffer.update_if_present([5], patch([9.0]))
    buffer = StoreBuffer(10, path=str(tmp_path / 'kept'))
    assert targets(buffer) == {**dict.fromkeys(range(2, 12), 0.0), 5: 5.0, 6: 6.0}
    assert not buffer.update_if_present([5], patch([9.0], [1]), newer_than='version').any()
    assert buffer.check() == []
    buffer.close()


class PatchModel(RuleBasedStateMachine):
    """The model is a stack of levels and a version per live row."""

    #: The largest value of a frame is 1, so that float32 frames are stored as bytes, or 0.3.
    largest = 1.0
    has_path = False

    @initialize(size=st.integers(1, 8))
    def make(self, size: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        path = f'{self.directory.name}/kept' if self.has_path else None
        self.buffer, self.size = StoreBuffer(size, path=path), size
        self.model: Dict[int, List[Any]] = {}

    def teardown(self) -> None:
        if hasattr(self, 'buffer'):
            self.buffer.close()
            self.directory.cleanup()

    def stacks(self, levels: List[List[int]]) -> np.ndarray:
        """Frames that are shared, because few levels recur."""
        values = np.array(levels, np.float32).reshape(len(levels), 2, 1, 1) / 255 * self.largest
        return np.broadcast_to(values, (len(levels), 2, 32, 32)).astype(np.float32)

    @rule(levels=st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=1, max_size=10))
    def push(self, levels: List[List[int]]) -> None:
        made = {'obs': self.stacks(levels), 'next_obs': self.stacks([each[::-1] for each in levels])}
        rows = self.buffer.extend({**made, 'version': np.zeros((len(levels), 1), np.int64)}).tolist()
        self.model.update({row: [each, each[::-1], 0] for row, each in zip(rows, levels)})
        self.model = dict(sorted(self.model.items())[-self.size :])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), with_both=st.booleans(), with_versions=st.booleans())
    def patch(self, data: st.DataObject, with_both: bool, with_versions: bool) -> None:
        rows = data.draw(st.lists(st.sampled_from([-1, 10**6, *self.model]), max_size=6))
        levels = [data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=2)) for _ in rows]
        versions = [data.draw(st.integers(0, 4)) for _ in rows]
        made = {'obs': self.stacks(levels)}
        if with_both:
            made['next_obs'] = self.stacks([each[::-1] for each in levels])
        if with_versions:
            made['version'] = np.array(versions, np.int64).reshape(-1, 1)
        written = self.buffer.update_if_present(rows, made, newer_than='version' if with_versions else None)
        for row, level, version, is_written in zip(rows, levels, versions, written.tolist()):
            expected = row in self.model and (not with_versions or version > self.model[row][2])
            assert is_written == expected
            if expected:
                self.model[row][0] = level
                self.model[row][1] = level[::-1] if with_both else self.model[row][1]
                self.model[row][2] = version if with_versions else self.model[row][2]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(list(self.model)))
        self.buffer.delete(str(row))
        del self.model[row]

    @rule()
    def duplicate_or_reopen(self) -> None:
        if not self.has_path:
            self.buffer = copy.deepcopy(self.buffer)
            return
        self.buffer.close()
        self.buffer = StoreBuffer(self.size, path=f'{self.directory.name}/kept')

    @invariant()
    def same(self) -> None:
        if not hasattr(self, 'buffer') or not self.model:
            return
        rows = list(self.model)
        batch = self.buffer.gather_batch(rows)
        assert np.array_equal(batch.data.obs.numpy(), self.stacks([self.model[row][0] for row in rows]))
        assert np.array_equal(batch.data.next_obs.numpy(), self.stacks([self.model[row][1] for row in rows]))
        assert batch.data.version.reshape(-1).tolist() == [self.model[row][2] for row in rows]
        assert self.buffer.check() == []


class WidePatchModel(PatchModel):
    largest = 0.3


class DurablePatchModel(PatchModel):
    has_path = True


TestPatchModel = PatchModel.TestCase
TestPatchModel.settings = settings(max_examples=8 * MORE, stateful_step_count=15, deadline=None)
TestWidePatchModel = WidePatchModel.TestCase
TestWidePatchModel.settings = settings(max_examples=4 * MORE, stateful_step_count=15, deadline=None)
TestDurablePatchModel = DurablePatchModel.TestCase
TestDurablePatchModel.settings = settings(max_examples=4 * MORE, stateful_step_count=15, deadline=None)
