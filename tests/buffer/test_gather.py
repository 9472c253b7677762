"""One compiled pass over all columns gives what numpy's calls give, and batches what default_collate makes."""

from typing import Any

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from ding.utils.data import default_collate

from ding_store.buffer import StoreBuffer
from ding_store.buffer.kernels.load import load_kernels
from ding_store.buffer.samplers.uniform import Uniform
from ding_store.buffer.table import outputs as outputs_module
from ding_store.buffer.table.encodings import Column
from ding_store.buffer.table.outputs import Output, WarmOutputs
from ding_store.environment import ENV_NO_NUMBA

#: All sizes that are copied in a way of their own, and some that are not.
SHAPES = [(), (2,), (3,), (4,), (8,), (0,), (5, 7), (40, 40)]
DTYPES = [np.bool_, np.uint8, np.float16, np.float32, np.int64, np.complex128]


def columns_of(count: int) -> dict:
    rng = np.random.default_rng(0)
    made = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            values = rng.integers(0, 2 if dtype is np.bool_ else 200, (count, *shape))
            made[f'{np.dtype(dtype).name}{shape}'] = values.astype(dtype)
    return made


@pytest.mark.parametrize('compiled', [True, False])
def test_gather_equals_numpy_take(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NO_NUMBA, '0' if compiled else '1')
    if (load_kernels() is None) == compiled:
        pytest.skip('there is no numba')
    columns = columns_of(50)
    stored = {name: Column(values) for name, values in columns.items()}
    outputs = WarmOutputs({name: (column.dtype, column.shape) for name, column in stored.items()})
    few = [np.array([3, 49, 0, 3]), np.arange(50)[::-7], np.array([7], np.int32), np.array([], np.int64)]
    # The last are so many bytes that other threads may run meanwhile.
    for slots in [*few, np.arange(100) * 7 % 50]:
        arrays, _ = outputs.gather(stored, slots)
        for name, column in columns.items():
            assert arrays[name].tobytes() == column[slots].tobytes(), name


@pytest.mark.parametrize('compiled', [True, False])
def test_gather_of_batches_larger_than_caches_is_right(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NO_NUMBA, '0' if compiled else '1')
    monkeypatch.setattr(outputs_module, 'FAR_BYTES', 1 << 19)
    rng = np.random.default_rng(0)
    shapes = [(), (3,), (1024,), (1023,), (1087,), (5, 4321)]
    columns = {str(shape): rng.integers(0, 256, (40, *shape), np.uint8) for shape in shapes}
    stored = {name: Column(values) for name, values in columns.items()}
    outputs = WarmOutputs({name: (column.dtype, column.shape) for name, column in stored.items()})
    for slots in (np.arange(80) * 7 % 40, np.arange(39, -1, -1)):
        assert sum(column[slots].nbytes for column in columns.values()) >= 1 << 19
        arrays, _ = outputs.gather(stored, slots)
        for name, column in columns.items():
            assert arrays[name].tobytes() == column[slots].tobytes(), name


@pytest.mark.parametrize('compiled', [True, False])
def test_gather_of_slots_out_of_range_reads_the_nearest(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A reader may have chosen them before the table shrank; it finds out, and reads again.
    monkeypatch.setenv(ENV_NO_NUMBA, '0' if compiled else '1')
    outputs = WarmOutputs({'a': (np.dtype(np.int64), ())})
    slots = np.array([-5, 0, 2, 3, 1 << 60])
    arrays, _ = outputs.gather({'a': Column(np.array([10, 11, 12]))}, slots)
    assert arrays['a'].tolist() == [10, 10, 12, 12, 12]
    assert slots.tolist() == [-5, 0, 2, 3, 1 << 60]


def test_gather_from_other_columns_reads_those() -> None:
    outputs = WarmOutputs({'a': (np.dtype(np.int64), ())})
    for columns in ({'a': np.array([1, 2])}, {'a': np.array([3, 4, 5]), 'b': np.zeros(3)}, {'a': np.arange(9)[::2]}):
        stored = {name: Column(values) for name, values in columns.items()}
        arrays, _ = outputs.gather(stored, np.array([1]))
        assert arrays['a'].tolist() == [columns['a'][1]]


def test_uniform_draws_do_not_depend_on_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for without in '01':
        monkeypatch.setenv(ENV_NO_NUMBA, without)
        buffer = StoreBuffer(300, seed=3)
        buffer.extend({'x': np.arange(300)})
        # 64 of 300: some of these draws meet a row twice.
        drawn.append([buffer.sample_batch(64, replace=i % 3 == 0).rows.tolist() for i in range(40)])
    assert drawn[0] == drawn[1]
    assert all(len(set(rows)) == 64 for i, rows in enumerate(drawn[0]) if i % 3)


def test_uniform_draws_are_equally_likely() -> None:
    buffer = StoreBuffer(400)
    buffer.extend({'x': np.arange(400)})
    counts = np.zeros(400)
    sampler, num_draws = Uniform(0), 3000
    for _ in range(num_draws):
        counts[sampler.choose(buffer.table.index, 64)] += 1
    expected = num_draws * 64 / 400
    # Chi-squared of 399 degrees of freedom is below 490 in 99.9 % of all cases.
    assert ((counts - expected) ** 2 / expected).sum() < 490


def element(i: int, action: Any) -> ttorch.Tensor:
    leaves = {'obs': torch.full((2, 3), float(i)), 'action': action, 'reward': torch.tensor([i * 0.5])}
    return ttorch.tensor({**leaves, 'done': torch.tensor(i % 3 == 0)})


@pytest.mark.parametrize('action', [torch.tensor([1]), torch.tensor([0.5]), torch.tensor(2)])
def test_batches_equal_those_of_default_collate(action: torch.Tensor) -> None:
    buffer = StoreBuffer(40, seed=0)
    for i in range(40):
        buffer.push(element(i, action))
    assert buffer.schema is not None
    assert buffer.schema.plain_batch is not None
    batch = buffer.sample_batch(8)
    cat_1dim = action.dtype == torch.int64
    expected = default_collate([element(row, action) for row in batch.rows.tolist()], cat_1dim=cat_1dim)
    assert set(batch.data.keys()) == set(expected)
    for name, leaf in expected.items():
        assert torch.equal(batch.data[name], leaf), name
    assert [int(each.obs[0, 0]) for each in batch.elements()] == batch.rows.tolist()


@pytest.mark.parametrize(
    'other',
    [{'n': torch.zeros(2).bfloat16()}, {'n': {'m': torch.zeros(1)}}, {'n': 3.0}, {'collate_ignore': torch.ones(1)}],
)
def test_elements_of_mixed_leaves_use_the_general_path(other: dict) -> None:
    buffer = StoreBuffer(8)
    buffer.push({'obs': torch.zeros(2), **other})
    assert buffer.schema is not None
    assert buffer.schema.plain_batch is None
    assert buffer.sample_batch(1).data.obs.shape == (1, 2)


def test_output_with_a_held_view_is_not_reused() -> None:
    buffer = StoreBuffer(8)
    buffer.extend({'x': np.zeros((8, 1), np.float32), 'y': np.zeros((8, 2), np.float32)})
    keeps = [lambda batch: batch.data.x, lambda batch: batch.data.x[1:], lambda batch: batch.data.y.numpy()[0]]
    keeps += [lambda batch: batch.elements, lambda batch: (batch.data.y * torch.ones(1, requires_grad=True)).sum()]
    for keep in keeps:
        warm = buffer.sample_batch(4).data.y.data_ptr()
        assert buffer.sample_batch(4).data.y.data_ptr() == warm
        kept = keep(buffer.sample_batch(4))
        assert buffer.sample_batch(4).data.y.data_ptr() != warm, kept
        del kept
        assert buffer.sample_batch(4).data.y.data_ptr() == warm


def test_output_released_by_its_holder_is_free() -> None:
    output = Output({'x': np.zeros(3)}, None)
    assert output.is_free()
    held = output.arrays['x']
    assert not output.is_free()
    del held
    assert output.is_free()
