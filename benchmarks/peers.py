"""Peers of ``python -m benchmarks transport``: DI-engine's own way, and others if they are installed."""

from __future__ import annotations

import importlib.util
import os
import pickle
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from typing import Any, Dict, List, Optional, Type

from benchmarks import ray_cluster
from benchmarks.paths import (
    BareRing,
    Columns,
    Element,
    Ours,
    OursOnWire,
    OursThroughTable,
    Outputs,
    Path,
    Timeout,
)


class InChunks(Path):
    """A way that receives whole chunks and copies batches from them."""

    def __init__(self, element: Element, address: str) -> None:
        super().__init__(element, address)
        self._outputs = Outputs(element)
        self._columns: Optional[Columns] = None
        self._start = 0

    @abstractmethod
    def chunk(self, timeout_s: float) -> Columns: ...

    def batch(self, timeout_s: float) -> Columns:
        while not self._outputs.is_full:
            if self._columns is None:
                self._columns, self._start = self.chunk(timeout_s), 0
            self._start += self._outputs.add(self._columns, self._start)
            if self._start == self.element.chunk:
                self._columns = None
        return self._outputs.take()


class Nng(Path):
    """DI-engine's way: a pickled list of elements goes through its message queue, is unpickled and collated."""

    title = 'DI-engine nng'
    needs = 'ding'

    def consume(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._queue = self._open('a', 'b')
        self._elements: List[Any] = []

    def produce(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._queue = self._open('b', 'a')

    def send(self, columns: Columns) -> None:
        import torch

        tensors = {name: torch.as_tensor(column) for name, column in columns.items()}
        # A collector's elements are also views of one array. Pickling a view would send the whole array.
        elements = [{name: leaf[i].clone() for name, leaf in tensors.items()} for i in range(self.element.chunk)]
        self._queue.publish('e', pickle.dumps(elements, protocol=pickle.HIGHEST_PROTOCOL))

    def batch(self, timeout_s: float) -> Columns:
        from ding.utils.data import default_collate

        while len(self._elements) < self.element.batch:
            self._elements += self._received(timeout_s)
        chosen, self._elements = self._elements[: self.element.batch], self._elements[self.element.batch :]
        return {name: leaf.numpy() for name, leaf in default_collate(chosen).items()}

    def close(self) -> None:
        self._queue.stop()

    def _open(self, ours: str, theirs: str) -> Any:
        from ding.framework.message_queue.nng import NNGMQ

        queue = NNGMQ(f'ipc://{self.address}/{ours}', [f'ipc://{self.address}/{theirs}'] if ours == 'b' else [])
        queue.listen()
        return queue

    def _received(self, timeout_s: float) -> List[Any]:
        import pynng

        # NNGMQ.recv has no timeout. Receive on its socket with a deadline instead.
        self._queue._sock.recv_timeout = int(timeout_s * 1000)
        try:
            message = self._queue._sock.recv()
        except pynng.Timeout:
            raise Timeout from None
        return list(pickle.loads(message.split(b'::', maxsplit=1)[1]))  # noqa: S301 our own process sent it


class Ray(InChunks):
    """Chunks in Ray's object store, with references in its queue. The receiver maps and copies them once, as ours."""

    title = 'Ray'
    needs = 'ray'
    is_queue = False  # a queue without a limit would spill to the disk
    store_bytes, queued = 1 << 30, 8

    def consume(self) -> None:
        import ray
        from ray.util.queue import Queue

        ray_cluster.start(self.address, self.store_bytes, num_cpus=2)
        self._queue = Queue(self.queued, actor_options={'name': 'bench'}).actor
        ray.get(self._queue.qsize.remote())

    def produce(self) -> None:
        import ray

        ray_cluster.join(self.address)
        self._queue = ray.get_actor('bench')

    def send(self, columns: Columns) -> None:
        import ray

        ray.get(self._queue.put.remote([ray.put(dict(columns))]))

    def chunk(self, timeout_s: float) -> Columns:
        import ray
        from ray.util.queue import Empty

        try:
            (reference,) = ray.get(self._queue.get.remote(timeout_s))
        except Empty:
            raise Timeout from None
        return dict(ray.get(reference))

    def close(self) -> None:
        ray_cluster.leave()


class Reverb(InChunks):
    """Chunks as items of Reverb's queue. Its server is in the consumer's process. Each item is sampled once."""

    title = 'Reverb'
    needs = 'reverb'
    is_queue = False  # a sender waits for the receiver when the queue is full
    queued = 8

    def consume(self) -> None:
        import reverb

        self._server = reverb.Server([reverb.Table.queue(self.title, self.queued)], port=None)
        client = reverb.Client(f'localhost:{self._server.port}')
        with open(os.path.join(self.address, 'port'), 'w') as file:
            file.write(str(self._server.port))
        self._items = client.sample(self.title, 1 << 30, emit_timesteps=False)
        self._waiting = ThreadPoolExecutor(1)  # Reverb has no deadlines here

    def produce(self) -> None:
        import reverb

        with open(os.path.join(self.address, 'port')) as file:
            client = reverb.Client(f'localhost:{file.read()}')
        self._writer = client.trajectory_writer(num_keep_alive_refs=1)

    def send(self, columns: Columns) -> None:
        self._writer.append([columns[name] for name in self.element.leaves])
        self._writer.create_item(self.title, 1.0, [column[-1:] for column in self._writer.history])
        self._writer.flush()

    def chunk(self, timeout_s: float) -> Columns:
        try:
            item = self._waiting.submit(next, self._items).result(timeout_s)
        except TimeoutError:
            raise Timeout from None
        return {name: column[0] for name, column in zip(self.element.leaves, item.data)}

    def close(self) -> None:
        self._server.stop()  # this ends the wait for items
        self._waiting.shutdown()


PATHS: Dict[str, Type[Path]] = {
    path.title: path for path in (Ours, OursThroughTable, OursOnWire, BareRing, Nng, Ray, Reverb)
}


def is_installed(path: Type[Path]) -> bool:
    return not path.needs or importlib.util.find_spec(path.needs) is not None
