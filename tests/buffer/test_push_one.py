"""A push of one element, whose bytes are copied in one pass where nothing speaks against it."""

from typing import Any

import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from needs import lacking

from ding_store.buffer import Prioritized, StoreBuffer
from ding_store.buffer.kernels.load import load_kernels
from ding_store.buffer.table.frame_pool import FramePool
from ding_store.environment import ENV_NO_NUMBA
from ding_store.errors import SchemaMismatch


def leaves(i: int) -> dict:
    obs = torch.arange(12.0).reshape(3, 4) + i
    return {'obs': obs, 'action': torch.tensor([i]), 'done': torch.tensor(i % 2 == 0), 'none': torch.zeros(0)}


def fill(buffer: StoreBuffer, make: Any, count: int) -> None:
    for i in range(count):
        assert buffer.push(make(leaves(i))).index == str(i)


def is_compiled(buffer: StoreBuffer, element: Any) -> bool:
    return buffer._elements.store.writing(element) is not None


@pytest.mark.parametrize('make', [dict, ttorch.tensor], ids=['dict', 'tree'])
@pytest.mark.parametrize('compiled', [True, False])
def test_push_of_one_element_keeps_its_values(compiled: bool, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_NO_NUMBA, '0' if compiled else '1')
    if (load_kernels() is None) == compiled:
        lacking('no numba, which scripts/setup.sh installs')
    buffer = StoreBuffer(7)
    fill(buffer, make, 20)
    assert is_compiled(buffer, make(leaves(0))) == compiled
    assert [item.index for item in buffer] == [str(i) for i in range(13, 20)]
    for i, item in zip(range(13, 20), buffer):
        assert type(item.data) is type(make(leaves(0)))
        for name, leaf in leaves(i).items():
            assert torch.equal(item.data[name], leaf)
            assert item.data[name].dtype == leaf.dtype
    assert buffer.check() == []


@pytest.mark.parametrize('size', [1023, 300_001])
def test_push_of_large_elements_keeps_their_bytes(size: int) -> None:
    """Past the caches, and of more than a megabyte without the interpreter's lock."""
    buffer = StoreBuffer(3)
    for i in range(5):
        buffer.push({'obs': torch.arange(size) + i, 'reward': torch.tensor([float(i)])})
    assert is_compiled(buffer, buffer[0].data) == (load_kernels() is not None)
    for i, item in zip(range(2, 5), buffer):
        assert torch.equal(item.data['obs'], torch.arange(size) + i)
        assert item.data['reward'].item() == i
    assert buffer.check() == []


@pytest.mark.parametrize('unusual', ['contiguous', 'transposed', 'gradient'])
def test_push_of_narrow_frames_keeps_their_values(unusual: str) -> None:
    if load_kernels() is None:
        lacking('no numba, which scripts/setup.sh installs')

    def frames(i: int) -> dict:
        levels = torch.from_numpy(np.random.RandomState(i).randint(0, 256, (2, 40, 40)))
        return {'obs': levels.float() / 255, 'reward': torch.tensor([float(i)])}

    buffer = StoreBuffer(7)
    for i in range(9):
        buffer.push(frames(i))
    assert 'obs' in buffer.table.columns.narrow
    assert is_compiled(buffer, frames(9))
    element = frames(9)
    if unusual == 'transposed':
        element['obs'] = element['obs'].transpose(1, 2).contiguous().transpose(1, 2)
    elif unusual == 'gradient':
        element['obs'].requires_grad_()
    buffer.push(element)
    for i, item in zip(range(3, 10), buffer):
        assert torch.equal(item.data['obs'], frames(i)['obs'])
        assert item.data['reward'].item() == i
    assert buffer.check() == []


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('obs', torch.zeros(4, 3)),
        ('obs', torch.zeros(3, 4, dtype=torch.float64)),
        ('obs', np.zeros((3, 4), np.float32)),
        ('more', torch.zeros(1)),
    ],
)
def test_push_of_an_unfit_element_is_refused(name: str, value: Any) -> None:
    buffer = StoreBuffer(7)
    fill(buffer, ttorch.tensor, 7)
    element = dict(leaves(7), **{name: value})
    with pytest.raises(SchemaMismatch):
        buffer.push(ttorch.Tensor(element) if name == 'more' else element)
    assert [item.index for item in buffer] == [str(i) for i in range(7)]
    assert buffer.check() == []


@pytest.mark.parametrize(
    'obs',
    [
        torch.arange(12.0).reshape(4, 3).t(),
        torch.ones(3, 4, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(3, 4)),
        torch.arange(24.0).reshape(3, 8)[:, ::2],
        torch.ones(1).expand(3, 4),
    ],
    ids=['transposed', 'gradient', 'parameter', 'strided', 'expanded'],
)
def test_push_of_unusual_tensors_keeps_their_values(obs: torch.Tensor) -> None:
    buffer = StoreBuffer(7)
    fill(buffer, dict, 7)
    buffer.push(dict(leaves(7), obs=obs))
    assert torch.equal(buffer.get(-1).data['obs'], obs.detach())
    assert not buffer.get(-1).data['obs'].requires_grad


def test_push_of_a_lazily_negated_tensor_keeps_its_values() -> None:
    buffer = StoreBuffer(7)
    buffer.push({'x': torch.zeros(1)})
    negative = torch.tensor([3 + 4j]).conj().imag
    assert negative.is_neg()
    buffer.push({'x': negative})
    assert buffer.get(-1).data['x'].item() == -4


def test_push_of_a_missing_leaf_widens_the_schema() -> None:
    buffer = StoreBuffer(7)
    fill(buffer, dict, 2)
    buffer.push(dict(leaves(2), obs=None))
    fill_more = buffer.push(dict(leaves(3)))
    assert fill_more.index == '3'
    assert [item.data['obs'] is None for item in buffer] == [False, False, True, False]


def test_push_into_a_used_slot_has_no_old_meta() -> None:
    buffer = StoreBuffer(2)
    buffer.push(leaves(0), {'env': 1})
    buffer.push(leaves(1), {'env': 2})
    assert buffer.push(leaves(2)).meta == {}
    assert [item.meta for item in buffer] == [{'env': 2}, {}]


def test_push_after_deletes_keeps_the_order_of_age() -> None:
    buffer = StoreBuffer(5)
    fill(buffer, dict, 5)
    buffer.delete(['0', '1', '3'])
    for i in range(5, 12):
        buffer.push(leaves(i))
        assert buffer.check() == []
    assert [item.index for item in buffer] == ['7', '8', '9', '10', '11']


def test_push_updates_samplers_and_other_columns() -> None:
    sampler = Prioritized(seed=0)
    buffer = StoreBuffer(8, sampler=sampler)
    fill(buffer, dict, 12)
    buffer.resize(16)
    for i in range(12, 20):
        buffer.push(leaves(i))
    batch = buffer.sample_batch(16)
    assert set(batch.rows.tolist()) == set(range(4, 20))
    assert torch.equal(batch.data.action, torch.as_tensor(batch.rows))


def test_push_into_a_path_uses_the_crash_safe_code(tmp_path: Any) -> None:
    buffer = StoreBuffer(4, path=str(tmp_path / 'table'))
    fill(buffer, dict, 6)
    assert not is_compiled(buffer, leaves(0))
    buffer.close()
    assert [item.index for item in StoreBuffer(4, path=str(tmp_path / 'table'))] == ['2', '3', '4', '5']


@pytest.mark.parametrize('hash_bits', [64, 0])
@pytest.mark.parametrize('dtype', [torch.uint8, torch.float32])
@pytest.mark.parametrize('size', [1, 40])
def test_pushes_of_stacks_share_frames_as_a_model(
    size: int, dtype: torch.dtype, hash_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two environments take turns, frames recur later, episodes end, and rows are deleted and added as columns."""
    monkeypatch.setattr(FramePool, 'hash_bits', hash_bits)
    rng, (length, steps) = np.random.default_rng(size), (3, 2)
    frames = rng.integers(0, 256, (15, 32, 33), np.uint8)
    frames[1] = frames[0]
    frames[1, -1, -1] ^= 1  # They differ in the last byte.
    buffer, rows = StoreBuffer(size), {}
    played = [rng.integers(0, 15, length + steps - 1).tolist() for _ in range(2)]

    def values(kinds: list) -> torch.Tensor:
        levels = torch.from_numpy(frames[kinds])
        return levels.float() / 255 if dtype == torch.float32 else levels

    for i in range(100):
        env = played[i % 2]
        env.append(int(rng.integers(15)))
        if rng.random() < 0.1:
            env[-length - steps :] = [0] * (length + steps)
        kinds = env[-length - steps : -steps], env[-length:]
        element = {'obs': values(kinds[0]), 'next_obs': values(kinds[1]), 'number': torch.tensor([i])}
        if i % 7 == 5:
            buffer.extend({name: value.numpy()[None] for name, value in element.items()})
        else:
            assert i == 0 or is_compiled(buffer, element) == (load_kernels() is not None)
            buffer.push(element)
        rows[str(i)] = kinds
        while len(rows) > size:
            del rows[min(rows, key=int)]
        # After some deletes, the frames that the next row probably has are free.
        leaving = list(rows) if i % 31 == 30 else rng.choice(list(rows), int(i % 9 == 4 and size > 1)).tolist()
        buffer.delete(leaving)
        rows = {row: kinds for row, kinds in rows.items() if row not in leaving}
        assert buffer.check() == []
        assert [item.index for item in buffer] == list(rows)
        assert all(torch.equal(item.data['obs'], values(rows[item.index][0])) for item in buffer)
        assert all(torch.equal(item.data['next_obs'], values(rows[item.index][1])) for item in buffer)
        num_frames = len({kind for pair in rows.values() for kinds in pair for kind in kinds})
        assert buffer.num_bytes == num_frames * frames[0].size + len(rows) * (2 * length * 4 + 8)
