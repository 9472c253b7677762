"""Peers of ``python -m benchmarks learners``: replays of other libraries that several learner processes share."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import pickle
from abc import abstractmethod
from typing import Any, Callable, Dict, Iterator, Type

import numpy as np

from benchmarks import ray_cluster
from ding_store.errors import StoreError

Columns = Dict[str, np.ndarray]
FORK = multiprocessing.get_context('fork')
#: Time that a replay may take until it is filled.
START_S = 120.0


class SharedReplay:
    """
    Overview:
        A replay that learner processes draw batches from. ``directory`` is an empty one that the processes share.
    """

    title = ''
    needs: tuple = ()

    @classmethod
    def missing(cls) -> str:
        """Return the modules that are not installed, as text. '': none is missing."""
        return ', '.join(each for each in cls.needs if importlib.util.find_spec(each) is None)

    @classmethod
    @contextlib.contextmanager
    def served(cls, columns: Callable[[], Columns], directory: str) -> Iterator[None]:
        """Have the filled replay in a process of its own within the block."""
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=cls._serve, args=(columns, directory, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            try:
                error = ours.recv() if ours.poll(START_S) else f'nothing for {START_S:.0f} s'
            except EOFError:
                error = 'its process has died'
            if error:
                raise StoreError(error)
            yield
        finally:
            ours.close()
            process.join(20.0)
            process.kill()
            process.join()

    @classmethod
    def _serve(cls, columns: Callable[[], Columns], directory: str, pipe: Any) -> None:
        try:
            replay = cls.fill(columns(), directory)  # noqa: F841 - it lives until the end of this function
            pipe.send('')
        except BaseException as error:  # noqa: BLE001 - the parent shows it
            pipe.send(f'{type(error).__name__}: {error}'.splitlines()[0])
            return
        with contextlib.suppress(EOFError):
            pipe.recv()  # until the parent closes its end
        cls.leave()

    @classmethod
    @abstractmethod
    def fill(cls, columns: Columns, directory: str) -> Any:
        """Make the replay in this process, and fill it."""

    @classmethod
    def leave(cls) -> None:
        """Stop what ``fill`` has started."""

    @classmethod
    @abstractmethod
    def draws(cls, directory: str, size: int) -> Callable[[], Any]:
        """Return a function that draws a batch, in a learner's process: column -> array or tensor."""


class RayActor(SharedReplay):
    """A Ray actor with all rows in numpy arrays. Each learner asks for its next batch while it trains on one."""

    title = 'Ray actor'
    needs = ('ray',)

    @classmethod
    def fill(cls, columns: Columns, directory: str) -> Any:
        import ray

        ray_cluster.start(directory, 1 << 30, num_cpus=2)
        actor = ray.remote(_Rows).options(name='replay', num_cpus=0).remote(columns)
        ray.get(actor.sample.remote(1))
        return actor

    @classmethod
    def leave(cls) -> None:
        ray_cluster.leave()

    @classmethod
    def draws(cls, directory: str, size: int) -> Callable[[], Any]:
        import ray

        ray_cluster.join(directory)
        sample = ray.get_actor('replay').sample
        asked = [sample.remote(size)]

        def draw() -> Any:
            batch = ray.get(asked.pop())
            asked.append(sample.remote(size))
            return batch

        return draw


class _Rows:
    """The actor."""

    def __init__(self, columns: Columns) -> None:
        self._columns, self._chance = columns, np.random.default_rng(0)
        self._num = len(next(iter(columns.values())))

    def sample(self, size: int) -> Columns:
        rows = self._chance.integers(self._num, size=size)
        return {name: column[rows] for name, column in self._columns.items()}


class TorchrlRay(SharedReplay):
    """torchrl's ``RayReplayBuffer``: its own buffer in a Ray actor."""

    title = 'torchrl RayReplayBuffer'
    needs = ('ray', 'torchrl')

    @classmethod
    def fill(cls, columns: Columns, directory: str) -> Any:
        import ray
        from torchrl.data import LazyTensorStorage, RayReplayBuffer

        ray_cluster.start(directory, 1 << 30, num_cpus=2)
        buffer = RayReplayBuffer(
            storage=lambda: LazyTensorStorage(len(columns['done'])), remote_config=dict(num_cpus=0), ray_init_config={}
        )
        buffer.extend(_as_tensordict(columns))
        with open(os.path.join(directory, 'buffer'), 'wb') as file:
            file.write(ray.cloudpickle.dumps(buffer.client()))
        return buffer

    @classmethod
    def leave(cls) -> None:
        ray_cluster.leave()

    @classmethod
    def draws(cls, directory: str, size: int) -> Callable[[], Any]:
        ray_cluster.join(directory)
        with open(os.path.join(directory, 'buffer'), 'rb') as file:
            buffer = pickle.load(file)  # noqa: S301 - our own process wrote it
        return lambda: buffer.sample(size).to_dict()


class TorchrlShared(SharedReplay):
    """torchrl's buffer over a storage in files that all processes map. Each learner draws by itself."""

    title = 'torchrl memmap storage'
    needs = ('torchrl',)

    @classmethod
    def fill(cls, columns: Columns, directory: str) -> Any:
        _as_tensordict(columns).memmap_(os.path.join(directory, 'rows'))
        return None

    @classmethod
    def draws(cls, directory: str, size: int) -> Callable[[], Any]:
        from tensordict import TensorDict
        from torchrl.data import TensorDictReplayBuffer, TensorStorage

        rows = TensorDict.load_memmap(os.path.join(directory, 'rows'))
        buffer = TensorDictReplayBuffer(storage=TensorStorage(rows), batch_size=size)
        return lambda: {name: value for name, value in buffer.sample().items() if name != 'index'}


def _as_tensordict(columns: Columns) -> Any:
    import torch
    from tensordict import TensorDict

    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return TensorDict(tensors, batch_size=[len(columns['done'])])


PEERS: Dict[str, Type[SharedReplay]] = {peer.title: peer for peer in (RayActor, TorchrlRay, TorchrlShared)}
