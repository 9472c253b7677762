"""Warm outputs: memory is used again when nobody holds the batch, and never before."""

import gc
from typing import Any, Callable, Dict, Iterator

import numpy as np
import pytest
import torch

from ding_store.buffer import StoreBuffer
from ding_store.buffer.kernels.load import load_kernels
from ding_store.buffer.table.encodings import Column
from ding_store.buffer.table.outputs import MAX_WARM, WarmOutputs


@pytest.fixture(autouse=True, scope='module')
def _small_heap() -> Iterator[None]:
    """What was there before is not looked at again by each ``gc.collect``."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


SPECS = {'x': (np.dtype(np.float32), (5,)), 'y': (np.dtype(np.int64), ())}


def address(arrays: dict) -> int:
    return arrays['x'].__array_interface__['data'][0]


def saved_by_autograd(arrays: dict) -> Any:
    weight = torch.ones(5, requires_grad=True)
    return (torch.from_numpy(arrays['x']) * weight).sum()


HOLDERS = {
    'the dict': lambda arrays: arrays,
    'an array': lambda arrays: arrays['y'],
    'a view': lambda arrays: arrays['x'][2:, ::2],
    'a tensor': lambda arrays: torch.from_numpy(arrays['x']),
    'a view of a tensor': lambda arrays: torch.from_numpy(arrays['x'])[1:].t(),
    'a detached tensor': lambda arrays: torch.from_numpy(arrays['x']).detach(),
    'an array of a tensor': lambda arrays: torch.from_numpy(arrays['x'])[0].numpy(),
    'a memoryview': lambda arrays: memoryview(arrays['x']),
    'autograd': saved_by_autograd,
}


@pytest.mark.parametrize('hold', HOLDERS.values(), ids=HOLDERS)
def test_output_is_reused_only_when_released(hold: Callable[[dict], Any]) -> None:
    outputs = WarmOutputs(SPECS)
    arrays = outputs.take(3)
    first = address(arrays)
    held = hold(arrays)
    del arrays
    assert address(outputs.take(3)) != first
    del held
    gc.collect()
    assert first in {address(taken) for taken in [outputs.take(3), outputs.take(3)]}


def test_output_arrays_are_aligned_to_cache_lines() -> None:
    outputs = WarmOutputs({**SPECS, 'frames': (np.dtype(np.float32), (4, 84, 84)), 'name': (np.dtype('U3'), ())})
    for count in (1, 3, 64):
        arrays = outputs.take(count)
        assert arrays['name'].shape == (count,), 'torch has none of this kind'
        assert {arrays[name].ctypes.data % 64 for name in ('x', 'y', 'frames')} == {0}
        assert {(array.dtype, array.shape[1:]) for array in arrays.values()} == set(outputs._columns.values())


BATCH_HOLDERS = {
    'a row': lambda obs: obs[2],
    'rows': lambda obs: list(obs)[1:3],
    'a view': lambda obs: obs.view(-1)[3:].detach(),
    'transposed': lambda obs: obs.t(),
    'an array': lambda obs: obs.numpy()[::2],
    'the storage': lambda obs: obs.untyped_storage(),
    'another library': torch.utils.dlpack.to_dlpack,
    'autograd': lambda obs: (obs * torch.ones(5, requires_grad=True)).sum(),
}


SAMPLES: Dict[str, Callable[[StoreBuffer], Any]] = {
    'rows': lambda buffer: buffer.sample_batch(8),
    'sequences': lambda buffer: buffer.sample_sequences(4, 2, None, done=None),
}


@pytest.mark.parametrize('sample', SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize('hold', BATCH_HOLDERS.values(), ids=BATCH_HOLDERS)
def test_output_is_held_by_any_part_of_its_batch(
    hold: Callable[[Any], Any], sample: Callable[[StoreBuffer], Any]
) -> None:
    # Tensors are of arrays, some of them views, that were made before: whatever holds one must show there.
    buffer = StoreBuffer(100, seed=0)
    buffer.extend({'obs': np.repeat(np.arange(100, dtype=np.float32), 5).reshape(100, 5), 'action': np.arange(100)})
    sample(buffer)
    batch = sample(buffer)
    first = batch.data.obs.data_ptr()
    held = hold(batch.data.obs.reshape(8, 5))
    del batch
    kept = [sample(buffer) for _ in range(2 * MAX_WARM)]
    assert first not in {each.data.obs.data_ptr() for each in kept}
    del held, kept
    gc.collect()
    assert first in {each.data.obs.data_ptr() for each in [sample(buffer) for _ in range(MAX_WARM)]}


def test_output_is_shared_by_rows_and_sequences_of_one_size() -> None:
    buffer = StoreBuffer(100, seed=0)
    buffer.extend({'obs': np.arange(100, dtype=np.float32)})
    addresses = set()
    for length in (2, 4, 2, 8):
        addresses |= {
            buffer.sample_sequences(8 // length, length, None, done=None).data.obs.data_ptr() for _ in range(3)
        }
        addresses |= {buffer.sample_batch(8).data.obs.data_ptr() for _ in range(3)}
    assert len(addresses) == 1


def test_output_of_wide_columns_is_gathered_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = []

    read_into = Column.read_into

    def noted(column: Column, slots: Any, out: Any, *cold: Any) -> None:
        one_by_one.append(column.dtype)
        read_into(column, slots, out, *cold)

    monkeypatch.setattr(Column, 'read_into', noted)
    frames = torch.arange(60 * 1024).remainder(256).float().div(255).view(60, 1024)
    elements = [
        {'obs': [frames[i], frames[i + 1]], 'place': [torch.tensor([i]), torch.tensor([i + 1])]} for i in range(50)
    ]
    steps, sequences = (StoreBuffer(50, seed=0, share_frames=False) for _ in range(2))
    steps.extend_elements([{key: values[0] for key, values in element.items()} for element in elements])
    sequences.extend_elements(elements)
    for batch, shape in ((steps.sample_batch(8), (8,)), (sequences.sample_time_major(8), (2, 8))):
        assert batch.data.place.shape == shape
        assert torch.equal(batch.data.obs, frames[batch.data.place])
    expected = [np.float32] * 2 if load_kernels() else [np.float32, np.int64] * 2
    assert one_by_one == expected


def test_output_released_in_a_loop_is_one_set() -> None:
    outputs = WarmOutputs(SPECS)
    addresses = set()
    for _ in range(20):
        arrays = outputs.take(3)
        addresses.add(address(arrays))
        del arrays
    assert len(addresses) == 1


def test_output_of_held_batches_all_differ() -> None:
    outputs = WarmOutputs(SPECS)
    held = [outputs.take(3) for _ in range(MAX_WARM + 5)]
    for i, arrays in enumerate(held):
        arrays['x'][:] = i
    assert [int(arrays['x'][0, 0]) for arrays in held] == list(range(MAX_WARM + 5))


def test_output_is_held_until_the_backward_pass() -> None:
    outputs = WarmOutputs(SPECS)
    weight = torch.ones(5, requires_grad=True)
    arrays = outputs.take(2)
    arrays['x'][:] = 3.0
    loss = (torch.from_numpy(arrays['x']) * weight).sum()
    del arrays
    outputs.take(2)['x'][:] = 100.0
    loss.backward()
    assert weight.grad.tolist() == [6.0] * 5


def test_output_has_the_requested_size() -> None:
    outputs = WarmOutputs(SPECS)
    for size in (1, 7, 2, 9, 4, 1):
        arrays = outputs.take(size)
        assert arrays['x'].shape == (size, 5)
        assert arrays['y'].dtype == np.int64
