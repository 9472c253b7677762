"""Buffers to measure, behind one interface: ours, DI-engine's, and every installed peer."""

from __future__ import annotations

from itertools import islice
from typing import Any, Callable, Dict, Iterator, List, Optional

import numpy as np
import treetensor.torch as ttorch

from benchmarks.workloads import Workload

Columns = Dict[str, np.ndarray]


def tree_of(columns: Columns, i: int) -> Any:
    """Return row ``i`` as the treetensor that a collector pushes."""
    import torch

    return ttorch.tensor({name: torch.as_tensor(column[i]) for name, column in columns.items()})


class Ours:
    """StoreBuffer: elements one by one, whole columns, and collated batches."""

    title = 'ding_store'

    def __init__(self, workload: Workload) -> None:
        from ding_store.buffer import Prioritized, StoreBuffer

        self._batch = workload.batch
        sampler = Prioritized(alpha=0.6, beta=0.4, seed=0) if workload.kind == 'prioritized' else None
        # The same rows come again and again, so all frames would be shared. ``benchmarks.frames`` measures real ones.
        self._buffer = StoreBuffer(workload.capacity, sampler=sampler, seed=0, share_frames=False)
        self._rows = np.empty(0, np.int64)

    def fill(self, columns: Columns) -> None:
        self.push_columns(columns)

    def push_columns(self, columns: Columns) -> None:
        self._buffer.extend(columns)

    def push(self, columns: Columns, i: int, element: Any) -> None:
        self._buffer.push(element)

    def sample(self) -> Any:
        batch = self._buffer.sample_batch(self._batch)
        self._rows = batch.rows
        return batch

    def update(self, priority: np.ndarray) -> None:
        self._buffer.update_priorities(self._rows, priority)


class Deque:
    """DI-engine's DequeBuffer, with its PER middleware and its collate."""

    title = 'DequeBuffer'

    def __init__(self, workload: Workload) -> None:
        from ding.data import DequeBuffer
        from ding.data.buffer.middleware import PriorityExperienceReplay

        self._batch = workload.batch
        self._prioritized = workload.kind == 'prioritized'
        self._buffer = DequeBuffer(workload.capacity)
        if self._prioritized:
            self._buffer.use(PriorityExperienceReplay(self._buffer, IS_weight=True))
        self._last: List[Any] = []

    def fill(self, columns: Columns) -> None:
        for i in range(len(columns['reward'])):
            # Copy each row: a collector's elements have their own memory and are no views of columns.
            self._buffer.push(tree_of({name: column[i : i + 1].copy() for name, column in columns.items()}, 0))

    def push(self, columns: Columns, i: int, element: Any) -> None:
        self._buffer.push(element)

    def sample(self) -> Any:
        from ding.utils.data import default_collate

        self._last = self._buffer.sample(self._batch)
        return default_collate([item.data for item in self._last])

    def update(self, priority: np.ndarray) -> None:
        for item, value in zip(self._last, priority):
            item.meta['priority'] = float(value)
            self._buffer.update(item.index, None, item.meta)


class Cpprb:
    """cpprb's (Prioritized)ReplayBuffer."""

    title = 'cpprb'

    def __init__(self, workload: Workload) -> None:
        import cpprb

        fields = {name: {'dtype': dtype, 'shape': shape or 1} for name, (dtype, shape) in workload.leaves.items()}
        self._batch = workload.batch
        self._prioritized = workload.kind == 'prioritized'
        make: Callable = cpprb.PrioritizedReplayBuffer if self._prioritized else cpprb.ReplayBuffer
        self._buffer = make(workload.capacity, fields, **({'alpha': 0.6} if self._prioritized else {}))
        self._indexes = np.empty(0, np.int64)

    def fill(self, columns: Columns) -> None:
        self.push_columns(columns)

    def push_columns(self, columns: Columns) -> None:
        self._buffer.add(**columns)

    def push(self, columns: Columns, i: int, element: Any) -> None:
        self._buffer.add(**{name: column[i] for name, column in columns.items()})

    def sample(self) -> Any:
        batch = self._buffer.sample(self._batch, beta=0.4) if self._prioritized else self._buffer.sample(self._batch)
        self._indexes = batch.get('indexes')
        return batch

    def update(self, priority: np.ndarray) -> None:
        self._buffer.update_priorities(self._indexes, priority)


class Torchrl:
    """torchrl's TensorDict buffers over LazyTensorStorage."""

    title = 'torchrl'

    def __init__(self, workload: Workload) -> None:
        from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

        storage, batch = LazyTensorStorage(workload.capacity), workload.batch
        if workload.kind == 'prioritized':
            self._buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=batch)
        else:
            self._buffer = TensorDictReplayBuffer(storage=storage, batch_size=batch)
        self._last: Any = None

    def fill(self, columns: Columns) -> None:
        self.push_columns(columns)

    def push_columns(self, columns: Columns) -> None:
        import torch
        from tensordict import TensorDict

        tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
        self._buffer.extend(TensorDict(tensors, batch_size=[len(columns['reward'])]))

    def push(self, columns: Columns, i: int, element: Any) -> None:
        self.push_columns({name: column[i : i + 1] for name, column in columns.items()})

    def sample(self) -> Any:
        self._last = self._buffer.sample()
        return self._last

    def update(self, priority: np.ndarray) -> None:
        import torch

        # Its trees accept only the dtype that they store.
        self._last.set('td_error', torch.from_numpy(priority.astype(np.float32)))
        self._buffer.update_tensordict_priority(self._last)


class Tianshou:
    """tianshou's (Prioritized)ReplayBuffer."""

    title = 'tianshou'

    def __init__(self, workload: Workload) -> None:
        from tianshou.data import PrioritizedReplayBuffer, ReplayBuffer

        self._batch = workload.batch
        if workload.kind == 'prioritized':
            self._buffer = PrioritizedReplayBuffer(workload.capacity, alpha=0.6, beta=0.4)
        else:
            self._buffer = ReplayBuffer(workload.capacity)
        self._indices: Any = None

    def fill(self, columns: Columns) -> None:
        for i in range(len(columns['reward'])):
            self.push(columns, i, None)

    def push(self, columns: Columns, i: int, element: Any) -> None:
        from tianshou.data import Batch

        row = {name: column[i] for name, column in columns.items()}
        done = bool(np.any(row.pop('done')))
        act, rew = row.pop('action'), float(np.ravel(row.pop('reward'))[0])
        obs, next_obs = row.pop('obs'), row.pop('next_obs', None)
        batch = Batch(obs=obs, act=act, rew=rew, terminated=done, truncated=False, info=row)
        batch.obs_next = obs if next_obs is None else next_obs
        self._buffer.add(batch)

    def sample(self) -> Any:
        batch, self._indices = self._buffer.sample(self._batch)
        return batch

    def update(self, priority: np.ndarray) -> None:
        self._buffer.update_weight(self._indices, priority)


class Reverb:
    """dm-reverb's table with its server in this process. Items have one step, and are stacked after sampling."""

    title = 'reverb'

    def __init__(self, workload: Workload) -> None:
        import reverb

        chosen = reverb.selectors.Prioritized(0.6) if workload.kind == 'prioritized' else reverb.selectors.Uniform()
        limiter, oldest = reverb.rate_limiters.MinSize(1), reverb.selectors.Fifo()
        table = reverb.Table(self.title, chosen, oldest, workload.capacity, limiter)
        self._server = reverb.Server([table], port=None)
        self._client = reverb.Client(f'localhost:{self._server.port}')
        self._writer = self._client.trajectory_writer(num_keep_alive_refs=1)
        self._names, self._batch = list(workload.leaves), workload.batch
        self._keys: List[int] = []
        self._items: Optional[Iterator[Any]] = None

    def fill(self, columns: Columns) -> None:
        self.push_columns(columns)

    def push_columns(self, columns: Columns) -> None:
        for i in range(len(columns['reward'])):
            self._append(columns, i)
        self._writer.flush()

    def push(self, columns: Columns, i: int, element: Any) -> None:
        self._append(columns, i)
        self._writer.flush()

    def sample(self) -> Any:
        if self._items is None:
            # Keep one stream of samples, which Reverb reads ahead. A new one per batch takes longer.
            self._items = self._client.sample(self.title, 1 << 30, emit_timesteps=False)
        items = list(islice(self._items, self._batch))
        self._keys = [item.info.key for item in items]
        return {name: np.concatenate([item.data[k] for item in items]) for k, name in enumerate(self._names)}

    def update(self, priority: np.ndarray) -> None:
        self._client.mutate_priorities(self.title, dict(zip(self._keys, priority.tolist())))

    def _append(self, columns: Columns, i: int) -> None:
        writer = self._writer
        writer.append([columns[name][i] for name in self._names])
        writer.create_item(self.title, 1.0, [column[-1:] for column in writer.history])


#: Title -> class. Those that cannot be imported are left out, and named in the output.
BUFFERS: Dict[str, Any] = {kind.title: kind for kind in (Ours, Deque, Cpprb, Torchrl, Tianshou, Reverb)}
#: Title -> module that must be installed.
MODULES = {'cpprb': 'cpprb', 'torchrl': 'torchrl', 'tianshou': 'tianshou', 'reverb': 'reverb', 'DequeBuffer': 'ding'}
