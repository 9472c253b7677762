"""Ways that ``python -m benchmarks weights`` measures: from one process into others of its host."""

from __future__ import annotations

import importlib.util
import mmap
import multiprocessing
import os
import pickle
import time
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np
import torch

from benchmarks import ray_cluster
from ding_store.errors import StoreError
from ding_store.middleware.state_arrays import load_arrays, state_to_arrays
from ding_store.storage import open_store

NUM_TENSORS = 50
#: Seconds that no round takes. After that a reader is stuck, and the measurement ends.
LIMIT_S = 60.0
_NAME = 'weights/main'
#: Fork, so that readers have the writer's imports.
FORK = multiprocessing.get_context('fork')


def model_of(num_bytes: int, fill: float = 0.0) -> torch.nn.Module:
    shape = (max(1, num_bytes // NUM_TENSORS // 4 // 256), 256)
    return torch.nn.ParameterList([torch.nn.Parameter(torch.full(shape, fill)) for _ in range(NUM_TENSORS)])


def bytes_of(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def last_elements(model: torch.nn.Module) -> float:
    return float(sum(p.detach().reshape(-1)[-1] for p in model.parameters()))


class Times(NamedTuple):
    """Seconds from the beginning of ``publish`` to the last reader's load, of ``publish``, and of its thread's CPU."""

    loaded_s: float
    publish_s: float
    cpu_s: float


class Round:
    """Shared state of the processes: two barriers, and each reader's finish time and loaded weights."""

    def __init__(self, num_readers: int) -> None:
        self.begin, self.announced = FORK.Barrier(num_readers + 1), FORK.Barrier(num_readers + 1)
        self.done_at = FORK.Array('d', num_readers, lock=False)
        self.sums = FORK.Array('d', num_readers, lock=False)
        self.failed = FORK.Array('i', [-1], lock=False)  # the way that a reader failed in, of those that share readers

    def fail(self, way: int) -> None:
        self.failed[0] = way
        for barrier in (self.begin, self.announced):
            barrier.abort()


class Way:
    """
    Overview:
        One way for weights from the writer into the readers' models. ``open_*`` is called in each process. If the way
        does not announce a publication itself, a barrier does.
    """

    title = ''
    needs = ''  # a package that may not be installed
    waits_itself = False
    starts_readers = False  # True if it does not use the readers that the other ways share

    def __init__(self, directory: str, num_bytes: int, num_readers: int) -> None:
        self.directory, self.num_bytes, self.num_readers = directory, num_bytes, num_readers

    def open_writer(self, model: torch.nn.Module) -> None:
        self.model = model

    def open_reader(self, model: torch.nn.Module) -> None:
        self.model = model

    def prepare(self) -> None:
        """Do work that is not part of the measured time."""

    def publish(self) -> None:
        raise NotImplementedError

    def load(self) -> None:
        raise NotImplementedError

    def last_elements(self) -> float:
        """Return the sum of the last elements of all loaded tensors, to identify the weights."""
        return last_elements(self.model)

    def write_round(self, shared: Round, fill: float) -> Times:
        """Publish a model filled with a number, and wait until all readers have loaded it."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(fill)
        self.prepare()
        if not self.starts_readers:
            shared.begin.wait(LIMIT_S)
        began = time.monotonic()
        publish_s, cpu_s = self.timed_publish()
        self.finish_round(shared)
        if any(one != fill * NUM_TENSORS for one in shared.sums):
            raise StoreError(f'{self.title}: a reader loaded other weights than were published')
        return Times(max(shared.done_at) - began, publish_s, cpu_s)

    def timed_publish(self) -> Tuple[float, float]:
        """Return the seconds of ``publish``, and the CPU seconds of its thread."""
        began, began_cpu = time.monotonic(), time.thread_time()
        self.publish()
        return time.monotonic() - began, time.thread_time() - began_cpu

    def finish_round(self, shared: Round) -> None:
        if not self.waits_itself:
            shared.announced.wait(LIMIT_S)
        shared.begin.wait(LIMIT_S)

    def read_round(self, shared: Round, number: int) -> None:
        shared.begin.wait(LIMIT_S)
        if not self.waits_itself:
            shared.announced.wait(LIMIT_S)
        self.load()
        shared.done_at[number], shared.sums[number] = time.monotonic(), self.last_elements()
        shared.begin.wait(LIMIT_S)

    def close(self) -> None:
        pass


class Bare(Way):
    """A copy into shared memory that is already mapped, a barrier, and a copy out of it."""

    title = 'bare copy and barrier'

    def __init__(self, directory: str, num_bytes: int, num_readers: int) -> None:
        super().__init__(directory, num_bytes, num_readers)
        model = model_of(num_bytes)
        shared = np.frombuffer(mmap.mmap(-1, bytes_of(model)), np.float32)
        self.views = np.split(shared, NUM_TENSORS)

    def publish(self) -> None:
        for view, parameter in zip(self.views, self.model.parameters()):
            np.copyto(view, parameter.detach().numpy().reshape(-1))

    def load(self) -> None:
        for view, parameter in zip(self.views, self.model.parameters()):
            np.copyto(parameter.detach().numpy().reshape(-1), view)


class Ours(Way):
    """The exchanger's calls: a blocking get, and a copy into the parameters."""

    title = 'ding_store'
    waits_itself = True
    in_place = False

    def open_writer(self, model: torch.nn.Module) -> None:
        super().open_writer(model)
        self.store = self._opened()

    def open_reader(self, model: torch.nn.Module) -> None:
        super().open_reader(model)
        self.store, self.version = self._opened(), 0

    def publish(self) -> None:
        header, arrays = state_to_arrays(self.model.state_dict())
        self.store.put(_NAME, header, arrays)

    def load(self) -> None:
        value = self.store.get(_NAME, self.version, LIMIT_S)
        if value is None:
            raise StoreError(f'no weights newer than version {self.version} within {LIMIT_S:.0f} s')
        load_arrays(self.model, value, self.in_place)
        self.version = value.version

    def close(self) -> None:
        self.store.close()

    def _opened(self) -> Any:
        return open_store(f'embedded://{self.directory}', run=type(self).__name__)


class OursInPlace(Ours):
    title = 'ding_store, in place'
    in_place = True

    def open_reader(self, model: torch.nn.Module) -> None:
        super().open_reader(model_of(self.num_bytes))  # the other ways write to the shared model
        for parameter in self.model.parameters():
            parameter.data = torch.empty(parameter.shape)  # untouched pages use no memory


class TorchSave(Way):
    """torch.save into memory, a rename, a barrier, and torch.load."""

    title = 'torch.save in /dev/shm'

    def publish(self) -> None:
        torch.save(self.model.state_dict(), f'{self._path}.new')
        os.replace(f'{self._path}.new', self._path)

    def load(self) -> None:
        self.model.load_state_dict(torch.load(self._path))

    @property
    def _path(self) -> str:
        return os.path.join(self.directory, 'weights.pth')


class Nng(Way):
    """DI-engine's ModelExchanger: a pickled state dict over its message queue to each reader."""

    title = 'DI-engine, nng'
    needs = 'pynng'
    waits_itself = True

    def open_writer(self, model: torch.nn.Module) -> None:
        super().open_writer(model)
        self._open(listen=True)

    def open_reader(self, model: torch.nn.Module) -> None:
        super().open_reader(model)
        self._open(listen=False)

    def publish(self) -> None:
        self.queue.publish('model', pickle.dumps(self.model.state_dict(), protocol=-1))

    def load(self) -> None:
        _, data = self.queue.recv()
        self.model.load_state_dict(pickle.loads(data))  # noqa: S301 DI-engine does the same, and the bytes are our own

    def close(self) -> None:
        self.queue.stop()

    def _open(self, listen: bool) -> None:
        from ding.framework.message_queue.nng import NNGMQ

        address = f'ipc://{self.directory}/nng'
        self.queue = NNGMQ(address if listen else f'{address}-{os.getpid()}', [] if listen else [address])
        self.queue.listen()


class Ray(Way):
    """
    Weights as RLlib sends them: numpy arrays in Ray's object store, and a call with their reference to each reader, an
    actor. The reader maps them and copies them into its parameters, as ours.
    """

    title = 'Ray, numpy'
    needs = 'ray'
    starts_readers = True

    def open_writer(self, model: torch.nn.Module) -> None:
        super().open_writer(model)
        import ray

        # Ray is slower with memory that it has not touched before: limit the store, so that it uses the same again.
        ray_cluster.start(self.directory, 3 * self.num_bytes + (256 << 20), num_cpus=1)
        actor = ray.remote(RayReader).options(num_cpus=0)
        self.actors = [actor.remote(self.num_bytes) for _ in range(self.num_readers)]
        ray.get([one.__ray_ready__.remote() for one in self.actors], timeout=LIMIT_S)

    def publish(self) -> None:
        import ray

        reference = ray.put([parameter.detach().numpy() for parameter in self.model.parameters()])
        self.loading = [one.load.remote(reference) for one in self.actors]

    def finish_round(self, shared: Round) -> None:
        import ray

        shared.done_at[:], shared.sums[:] = zip(*ray.get(self.loading, timeout=LIMIT_S))

    def close(self) -> None:
        ray_cluster.leave()


class RayReader:
    """Reader in a process of Ray's."""

    def __init__(self, num_bytes: int) -> None:
        self.model = model_of(num_bytes)

    def load(self, arrays: List[np.ndarray]) -> Tuple[float, float]:
        """Load the weights. Return the finish time and ``last_elements``."""
        for array, parameter in zip(arrays, self.model.parameters()):
            np.copyto(parameter.detach().numpy(), array)
        return time.monotonic(), last_elements(self.model)


WAYS: Dict[str, Any] = {
    'bare': Bare,
    'ding_store': Ours,
    'in_place': OursInPlace,
    'torch': TorchSave,
    'nng': Nng,
    'ray': Ray,
}


def is_installed(way: Any) -> bool:
    return not way.needs or importlib.util.find_spec(way.needs) is not None
