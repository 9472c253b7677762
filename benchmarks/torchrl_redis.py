"""Benchmark of the Redis transport and torchrl's storage in Redis: one redis-server over TCP, one process, in turn."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import numpy as np

from benchmarks.compression import GAMES, frames_of, needs
from benchmarks.machine import busy_cores, others
from benchmarks.paths import Columns, Element, OursOnWire, Outputs
from benchmarks.workloads import Leaves, Workload
from ding_store.buffer.table.encodings import Column, NarrowColumn
from ding_store.buffer.table.narrowing import candidates, narrowed_columns
from ding_store.compare.tcp_server import tcp_server
from ding_store.compare.units import size_text
from ding_store.storage import open_store
from ding_store.storage.encoding.compression import AUTO, CODECS

#: Elements with as many bytes as those of the same names in other tables, but of floats, as policies take them.
_DQN: Leaves = {
    'obs': (np.float32, (2, 84, 84)),
    'next_obs': (np.float32, (2, 84, 84)),
    'action': (np.int64, ()),
    'reward': (np.float32, (1,)),
    'done': (np.bool_, ()),
    'env_data_id': (np.int64, (1,)),
}
_IMPALA: Leaves = {
    'obs': (np.float32, (26, 4, 84, 84)),
    'action': (np.int64, (26,)),
    'reward': (np.float32, (26, 1)),
    'done': (np.bool_, (26,)),
    'prev_state': (np.float32, (2, 512)),
}
ELEMENTS = (
    Element('dqn-atari', _DQN, chunk=64, batch=64, number='env_data_id'),
    Element('impala-atari', _IMPALA, chunk=4, batch=32, number='action'),
)
_FRAMES = ('obs', 'next_obs')
RANDOM = 'random floats'
_MIN_ROUNDS = 5
_TIMEOUT_S = 10.0


class Torchrl:
    """A ReplayBuffer of two batches as torchrl documents it: extend, and sample random rows."""

    title = 'torchrl'
    of_random = True  # True to measure random floats as well

    def __init__(self, element: Element, columns: Columns, port: int) -> None:
        from torchrl.data import ReplayBuffer
        from torchrl.data.replay_buffers import StoreStorage

        self.columns = columns
        self._batch = element.batch
        self._storage = StoreStorage(max_size=2 * element.batch, host='127.0.0.1', port=port)
        self._buffer = ReplayBuffer(storage=self._storage, batch_size=element.batch)

    def write(self) -> None:
        import torch
        from tensordict import TensorDict

        tensors: Dict[str, Any] = {name: torch.from_numpy(column) for name, column in self.columns.items()}
        self._buffer.extend(TensorDict(tensors, [self._batch]))

    def read(self) -> Any:
        return self._buffer.sample()

    def close(self) -> None:
        if self._storage.initialized:
            self._storage._storage.close()


class TorchrlInOrder(Torchrl):
    """Rows in order, which torchrl reads as one range of each leaf: its fastest way."""

    title = 'torchrl, in order'

    def read(self) -> Any:
        return self._buffer[: self._batch]


class TorchrlBytes(Torchrl):
    """Frames that are converted to bytes before they are pushed, and stay bytes in the batch."""

    title = 'torchrl, of bytes'
    of_random = False

    def __init__(self, element: Element, columns: Columns, port: int) -> None:
        as_bytes = {name: np.rint(columns[name] * 255).astype(np.uint8) for name in _FRAMES if name in columns}
        super().__init__(element, {**columns, **as_bytes}, port)


def _widened(target: np.ndarray, source: np.ndarray) -> None:
    column = Column(source) if source.dtype == target.dtype else NarrowColumn(source)
    column.read_into(np.arange(len(source)), target)


class Ours(OursOnWire):
    """
    Chunks that are appended, read, and copied into a warm batch as floats. Frames travel as bytes if that is exact. As
    in ``ChunkWriter``, each chunk is checked for that.
    """

    title = 'ding_store'
    of_random = True
    compression: Optional[str] = AUTO

    def __init__(self, element: Element, columns: Columns, port: int) -> None:
        super().__init__(element, f'redis://127.0.0.1:{port}')
        self.columns = columns
        self.consume()
        self._outputs = Outputs(element, _widened)
        specs = {name: (column.dtype, column.shape[1:]) for name, column in columns.items()}
        self._narrow = candidates(specs, {name: column[:1] for name, column in columns.items()})

    def write(self) -> None:
        for at in range(0, self.element.batch, self.element.chunk):
            self.send({name: column[at : at + self.element.chunk] for name, column in self.columns.items()})

    def send(self, columns: Columns) -> None:
        narrowed = narrowed_columns(columns, self._narrow).items()
        exact = {name: values.reshape(columns[name].shape) for name, values in narrowed if values is not None}
        super().send({**columns, **exact})

    def read(self) -> Any:
        batch = self.batch(_TIMEOUT_S)
        self._store.flush()  # count the acks here, and not in the next measurement
        return batch

    def _open(self) -> None:
        run = f'bench-{self.compression}'
        self._store = open_store(self.address, run, host_plane='off', compression=self.compression)


class OursPlain(Ours):
    title, compression, of_random = 'ding_store, no lz4', None, False


WAYS: Sequence[Any] = (Torchrl, TorchrlInOrder, TorchrlBytes, Ours, OursPlain)


def lacking() -> str:
    """Return how to install torchrl with its storage, or '' if it is installed."""
    try:
        from torchrl.data.replay_buffers import StoreStorage  # noqa: F401
    except ImportError as error:
        return f'not measured beside torchrl: {error}; pip install "torchrl>=0.13" "numpy<2"'
    return ''


def measure_torchrl(names: Sequence[str], seconds: float, say: Callable[[str], None]) -> Iterator[Dict[str, Any]]:
    """Yield a record per element of these names and contents, as soon as it is measured."""
    for element in ELEMENTS:
        if element.name not in names:
            continue
        for contents in (RANDOM, *(GAMES if not needs() else ())):
            say(f'torchrl: {element.name}, {contents}')
            columns = columns_of(element, contents)
            ways = [way for way in WAYS if contents != RANDOM or way.of_random]
            if not CODECS['lz4'].is_installed:
                ways = [way for way in ways if way is not OursPlain]
            yield {'contents': contents, **_measure(element, columns, ways, seconds)}


def columns_of(element: Element, contents: str) -> Dict[str, np.ndarray]:
    """Return a batch with numbered rows: all random, or with stacked frames of a game played at random."""
    rows = element.batch
    columns = Workload(element.name, element.leaves, rows, rows, 'fifo').columns(rows)
    columns[element.number].reshape(rows, -1)[:, 0] = np.arange(rows)
    if contents == RANDOM:
        return columns
    depth = columns['obs'].shape[-3]
    num_stacks = columns['obs'].size // (depth * 84 * 84)
    frames = frames_of(contents, num_stacks + depth)
    for ahead, name in enumerate(name for name in _FRAMES if name in columns):
        for at, stack in enumerate(columns[name].reshape(num_stacks, depth, 84, 84)):
            stack[:] = frames[ahead + at : ahead + at + depth]
    return columns


def _measure(element: Element, columns: Columns, chosen: Sequence[Any], seconds: float) -> Dict[str, Any]:
    rounds: List[List[List[float]]] = []
    busy = busy_cores()
    with tcp_server() as port, ExitStack() as stack:
        ways = [stack.enter_context(closing(way(element, columns, port))) for way in chosen]
        for way in ways:
            _timed(way)
            way.write()
            check(element, way.read(), way.columns)
        deadline = time.perf_counter() + seconds
        while len(rounds) < _MIN_ROUNDS or time.perf_counter() < deadline:
            rounds.append([_timed(way) for way in ways])
    result: Dict[str, Any] = {'element': element.name, 'row_bytes': element.row_bytes, 'batch': element.batch}
    result.update(rounds=len(rounds), others_cores=max(busy, busy_cores()))
    return {**result, 'ways': figures([way.title for way in ways], element.batch, np.array(rounds))}


def _timed(way: Any) -> List[float]:
    """Return the seconds of write and of read."""
    begin = time.perf_counter()
    way.write()
    middle = time.perf_counter()
    way.read()
    return [middle - begin, time.perf_counter() - middle]


def check(element: Element, batch: Any, columns: Columns) -> None:
    """Check that the batch's rows, by their numbers, equal the written ones bit by bit."""
    rows = np.asarray(batch[element.number]).reshape(element.batch, -1)[:, 0]
    for name, column in columns.items():
        if np.asarray(batch[name]).tobytes() != column[rows].tobytes():
            raise AssertionError(f'{name!r}: the rows read differ from those written')


def figures(titles: Sequence[str], batch: int, times: np.ndarray) -> Dict[str, Any]:
    """
    Return rates, and ratios to torchrl's rates.

    Arguments:
        - times (:obj:`np.ndarray`): Seconds of write and of read, ``(rounds, ways, 2)``. torchrl is the first way.
    """
    times = np.concatenate([times, times.sum(axis=2, keepdims=True)], axis=2)
    rates = batch / np.median(times, axis=0)
    ratios = np.median(times[:, :1] / times, axis=0)  # within each round
    keys = ('write', 'read', 'both')
    return {
        title: {'elements_per_s': dict(zip(keys, rate)), 'of_torchrl': dict(zip(keys, ratio))}
        for title, rate, ratio in zip(titles, rates.tolist(), ratios.tolist())
    }


def render_torchrl(result: Dict[str, Any]) -> str:
    lines = [
        '',
        'wire plane beside torchrl, through one redis-server over TCP, in turn: '
        f'{result["element"]}, {size_text(result["row_bytes"])}, batches of {result["batch"]}, {result["contents"]}, '
        f'medians of {result["rounds"]} rounds',
        f'  {"":<18} {"write el/s":>11} {"read el/s":>11} {"both el/s":>11}   times torchrl: {"write":>6} {"read":>6} '
        f'{"both":>6}',
    ]
    for title, record in result['ways'].items():
        rates = ' '.join(f'{rate:>11,.0f}' for rate in record['elements_per_s'].values())
        ratios = ' '.join(f'{ratio:>6.2f}' for ratio in record['of_torchrl'].values())
        lines.append(f'  {title:<18} {rates} {"":>17} {ratios}')
    return '\n'.join(lines + others(result['others_cores']))
