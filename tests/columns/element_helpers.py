"""Elements as algorithms make them, and an equality that is strict about types."""

from typing import Any

import numpy as np
import torch
import treetensor.numpy as tnp
import treetensor.torch as ttorch
from treevalue import TreeValue
from treevalue.tree.common import TreeStorage, create_storage


def tree(**items: Any) -> ttorch.Tensor:
    return ttorch.Tensor(create_storage(items))


def same(one: Any, other: Any) -> bool:
    """Whether two elements are equal in containers, keys, dtypes, shapes and values; nan equals nan, -0 is not 0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, TreeValue):
        return same(one._detach(), other._detach())
    if isinstance(one, TreeStorage):
        return same(_items(one), _items(other))
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        # bytes, so that bfloat16 and nan need no special care
        return one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return repr(one) == repr(other)


def _items(storage: TreeStorage) -> dict:
    # A part of a tree reads the same whether it is kept as storage or as a tree.
    parts = dict(storage.iter_items())
    return {key: part._detach() if isinstance(part, TreeValue) else part for key, part in parts.items()}


def _bits(tensor: torch.Tensor) -> bytes:
    # A clone: the stride of an axis of size 1 may be anything, and keeps a view as bytes from being made.
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b''


def dqn(i: int) -> ttorch.Tensor:
    return tree(
        obs=torch.randn(4),
        next_obs=torch.randn(4),
        action=torch.tensor([i % 2]),
        reward=torch.tensor([float(i)]),
        done=torch.tensor([i % 5 == 4]),
        collect_train_iter=torch.tensor([i]),
        env_data_id=torch.tensor([i % 8]),
    )


def sac(i: int) -> ttorch.Tensor:
    """A continuous action, which makes DI-engine collate without joining leaves of shape (1,)."""
    action = torch.randn(1) if i >= 0 else None
    return tree(
        obs=torch.randn(3), next_obs=torch.randn(3), action=action, reward=torch.randn(1), done=torch.tensor([False])
    )


def ppo(i: int) -> ttorch.Tensor:
    return tree(
        obs=torch.randn(4),
        action=torch.tensor(i % 2),
        logit=torch.randn(2),
        value=torch.randn(1),
        adv=torch.randn(1),
        reward=torch.randn(1),
        done=torch.tensor([False]),
        traj_flag=torch.tensor(False),
    )


def qmix(i: int) -> dict:
    obs = {'agent_state': np.random.randn(8, 150).astype(np.float32), 'global_state': np.random.randn(216)}
    obs['action_mask'] = np.random.randint(0, 2, (8, 14)).astype(np.float32)
    return {
        'obs': obs,
        'action': torch.randint(0, 14, (8,)),
        'reward': torch.randn(1),
        'done': i % 3 == 0,
        'weight': 0.5 * i,
    }


def r2d2(i: int, length: int = 6) -> list:
    """An unrolled sequence, whose first step has no hidden state."""
    states = [None] + [(torch.randn(1, 4), torch.randn(1, 4)) for _ in range(length - 1)]
    return [
        tree(obs=torch.randn(4), action=torch.tensor([step % 2]), reward=torch.randn(1), prev_state=state)
        for step, state in enumerate(states)
    ]


def impala(i: int) -> dict:
    """A sequence as the config pipeline makes it: a dict of lists."""
    steps = range(5)
    images = torch.randint(0, 255, (5, 2, 8, 8), dtype=torch.uint8)
    return {
        'obs': [{'image': images[step], 'aux': (torch.randn(3), 7)} for step in steps],
        'action': [torch.tensor(step % 2) for step in steps],
        'logit': [torch.randn(2) for _ in steps],
        'prev_state': [[None, (torch.randn(4), torch.randn(4))] for _ in steps],
        'reward': [torch.randn(1) for _ in steps],
    }


def numpy_tree(i: int) -> tnp.ndarray:
    return tnp.ndarray(create_storage({'obs': np.random.randn(3), 'deep': {'x': np.arange(i, i + 2)}}))


ALL = {kind.__name__: kind for kind in (dqn, sac, ppo, qmix, r2d2, impala, numpy_tree)}
