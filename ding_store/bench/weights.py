"""``ding-store bench weights``: from publishing weights until all readers of this host have loaded them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import shutil
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

import numpy as np
import torch

from ding_store.bench.output import say, show
from ding_store.errors import ConfigError, StoreError
from ding_store.middleware.state import load_arrays, state_to_arrays
from ding_store.storage import open_store

NUM_TENSORS = 50
NUM_IN_PLACE = 8
#: No round takes as long; then a reader is stuck, and the measurement is over.
LIMIT_S = 60.0
_NAME = 'weights/main'
_fork = multiprocessing.get_context('fork')


def model_of(num_bytes: int, fill: float = 0.0) -> torch.nn.Module:
    shape = (max(1, num_bytes // NUM_TENSORS // 4 // 256), 256)
    return torch.nn.ParameterList([torch.nn.Parameter(torch.full(shape, fill)) for _ in range(NUM_TENSORS)])


def bytes_of(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


class Way:
    """
    Overview:
        How weights get from the writer into the readers' models. ``open_*`` is called in each process, ``announced``
        tells the readers of a publication where the way has no means of its own.
    """

    title = ''
    waits_itself = False

    def __init__(self, directory: str, num_bytes: int) -> None:
        self.directory, self.num_bytes = directory, num_bytes

    def open_writer(self, model: torch.nn.Module) -> None:
        self.model = model

    def open_reader(self, model: torch.nn.Module) -> None:
        self.model = model

    def prepare(self) -> None:
        """Before the time is taken: what the way is not to be charged for."""

    def publish(self) -> None:
        raise NotImplementedError

    def load(self) -> None:
        raise NotImplementedError

    def last_elements(self) -> float:
        """Of all tensors that were loaded, summed: to see which weights they are."""
        return float(sum(p.detach().reshape(-1)[-1] for p in self.model.parameters()))

    def close(self) -> None:
        pass


class Bare(Way):
    """A copy into shared memory that was mapped before, a barrier, and a copy out of it."""

    title = 'bare copy and barrier'

    def __init__(self, directory: str, num_bytes: int) -> None:
        super().__init__(directory, num_bytes)
        import mmap

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
    """The exchanger's own calls: a blocking get, and a copy into the parameters."""

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
        super().open_reader(model_of(self.num_bytes))  # The other ways write to the model that they share.
        for parameter in self.model.parameters():
            parameter.data = torch.empty(parameter.shape)  # Not touched, so not there: it would count as saved.


class TorchSave(Way):
    """torch.save into memory, a rename, a barrier, torch.load."""

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
    """What DI-engine's ModelExchanger does: a pickled state dict over its message queue, to each reader."""

    title = 'DI-engine, nng'
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
        self.model.load_state_dict(pickle.loads(data))  # noqa: S301 it is what DI-engine does, with bytes of our own

    def close(self) -> None:
        self.queue.stop()

    def _open(self, listen: bool) -> None:
        from ding.framework.message_queue.nng import NNGMQ

        address = f'ipc://{self.directory}/nng'
        self.queue = NNGMQ(address if listen else f'{address}-{os.getpid()}', [] if listen else [address])
        self.queue.listen()


WAYS: Dict[str, Any] = {'bare': Bare, 'ding_store': Ours, 'in_place': OursInPlace, 'torch': TorchSave, 'nng': Nng}


def choose(names: Optional[str]) -> List[str]:
    """Ways by name, comma-separated; the bare one is always there."""
    chosen = names.split(',') if names else list(WAYS)
    for name in chosen:
        if name not in WAYS:
            raise ConfigError(f'no way {name!r}; known are {", ".join(WAYS)}')
    return ['bare', *(name for name in WAYS if name in chosen and name != 'bare')]


class Round:
    """What the processes share: two barriers, and when each reader was done."""

    def __init__(self, num_readers: int) -> None:
        self.begin, self.announced = _fork.Barrier(num_readers + 1), _fork.Barrier(num_readers + 1)
        self.done_at = _fork.Array('d', num_readers, lock=False)
        self.sums = _fork.Array('d', num_readers, lock=False)


def _read(ways: Sequence[Way], shared: Round, number: int, num_rounds: int, num_bytes: int) -> None:
    torch.set_num_threads(1)
    model = model_of(num_bytes)
    shared.begin.wait(LIMIT_S)  # until the writer listens
    for way in ways:
        way.open_reader(model)
    for _ in range(num_rounds):
        for way in ways:
            shared.begin.wait(LIMIT_S)
            if not way.waits_itself:
                shared.announced.wait(LIMIT_S)
            way.load()
            shared.done_at[number] = time.monotonic()
            shared.sums[number] = way.last_elements()
            shared.begin.wait(LIMIT_S)
    for way in ways:
        way.close()


@contextlib.contextmanager
def _readers(work: Callable[..., None], arguments: List[tuple]) -> Iterator[List[Any]]:
    processes = [_fork.Process(target=work, args=one, daemon=True) for one in arguments]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(LIMIT_S)
    finally:
        for process in processes:
            process.kill()


def measure(
    names: Sequence[str],
    num_bytes: int,
    num_readers: int,
    num_rounds: int,
    say: Callable,
    ways_by_name: Mapping[str, Any] = WAYS,
) -> Dict[str, Any]:
    """
    Overview:
        Seconds from the beginning of ``publish`` until the last reader has loaded, and of ``publish`` itself; of all
        ways in turn, round by round, with the same readers. The first two rounds are not counted.
    """
    with _scratch() as directory:
        ways = [ways_by_name[name](directory, num_bytes) for name in names]
        shared, total = Round(num_readers), num_rounds + 2
        arguments = [(ways, shared, number, total, num_bytes) for number in range(num_readers)]
        with _readers(_read, arguments):
            model = model_of(num_bytes)
            for way in ways:
                way.open_writer(model)
            shared.begin.wait(LIMIT_S)
            times: Dict[str, List[List[float]]] = {name: [] for name in names}
            for i in range(total):
                say(f'{num_bytes / 1e6:.0f} MB: round {i + 1} of {total}')
                for name, way in zip(names, ways):
                    times[name].append(_round(way, shared, model, float(i + 1)))
            alone = _publish_alone(ways, names)
            for way in ways:
                way.close()
    found = {name: _figures(np.array(times[name][2:])) for name in names}
    for name, seconds in alone.items():
        found[name]['publish_without_readers_s'] = seconds
    return found


def _round(way: Way, shared: Round, model: torch.nn.Module, fill: float) -> List[float]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    way.prepare()
    shared.begin.wait(LIMIT_S)
    began = time.monotonic()
    way.publish()
    published = time.monotonic()
    if not way.waits_itself:
        shared.announced.wait(LIMIT_S)
    shared.begin.wait(LIMIT_S)
    if any(one != fill * NUM_TENSORS for one in shared.sums):
        raise StoreError(f'{way.title}: a reader loaded other weights than were published')
    return [max(shared.done_at) - began, published - began]


def _publish_alone(ways: Sequence[Way], names: Sequence[str]) -> Dict[str, float]:
    """The same call when nobody loads what it publishes."""
    found = {}
    for name, way in zip(names, ways):
        if isinstance(way, Ours):
            times = []
            for _ in range(5):
                began = time.monotonic()
                way.publish()
                times.append(time.monotonic() - began)
            found[name] = float(np.median(times))
    return found


def _figures(times: np.ndarray) -> Dict[str, float]:
    loaded, publish = times[:, 0], times[:, 1]
    figures = {f'{name}_s': float(np.percentile(loaded, q)) for name, q in (('loaded', 50), ('p90', 90), ('max', 100))}
    return {**figures, 'publish_s': float(np.median(publish))}


def copies_in_place(num_bytes: int, num_readers: int = NUM_IN_PLACE) -> float:
    """How many copies of the weights ``num_readers`` processes have together that read in place: their PSS, summed."""
    with _scratch() as directory:
        barrier, pss = _fork.Barrier(num_readers + 1), _fork.Array('d', 2 * num_readers, lock=False)
        way = OursInPlace(directory, num_bytes)
        with _readers(_read_in_place, [(way, barrier, pss, number) for number in range(num_readers)]):
            model = model_of(num_bytes, 1.0)
            way.open_writer(model)
            barrier.wait(LIMIT_S)
            for _ in range(3):  # so that every slot was used
                way.publish()
                for _ in range(2):
                    barrier.wait(LIMIT_S)
            barrier.wait(LIMIT_S)
            way.close()
    before, after = np.array(pss[:]).reshape(num_readers, 2).sum(axis=0)
    return float((after - before) / bytes_of(model))


def _read_in_place(way: OursInPlace, barrier: Any, pss: Any, number: int) -> None:
    torch.set_num_threads(1)
    way.open_reader(torch.nn.Module())
    pss[2 * number] = _pss()
    barrier.wait(LIMIT_S)
    for _ in range(3):
        barrier.wait(LIMIT_S)
        way.load()
        for parameter in way.model.parameters():
            parameter.detach().sum()
        barrier.wait(LIMIT_S)
    pss[2 * number + 1] = _pss()
    barrier.wait(LIMIT_S)
    way.close()


def _pss() -> float:
    """Of this process's own memory and of memory that is shared by mapping; not of programs and libraries."""
    with open('/proc/self/smaps_rollup') as file:
        sizes = {line.partition(':')[0]: line.split()[1] for line in file if line.startswith('Pss')}
    return 1024.0 * sum(int(sizes[name]) for name in ('Pss_Anon', 'Pss_Shmem'))


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix='ding', dir='/dev/shm' if os.path.isdir('/dev/shm') else None)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main(sizes_mb: str, names: Optional[str], num_readers: int, num_rounds: int, json_file: Optional[str]) -> int:
    """Measure, and print a table per size; ``json_file`` also gets everything."""
    chosen = choose(names)
    if 'nng' in chosen and importlib.util.find_spec('pynng') is None:
        chosen.remove('nng')
    if num_readers < 1 or num_rounds < 1:
        raise ConfigError(f'--readers ({num_readers}) and --rounds ({num_rounds}) must be >= 1')
    torch.set_num_threads(1)
    results = []
    for size in sizes_of(sizes_mb):
        # In a process of its own: nng does not let the one that has used it fork again.
        with ProcessPoolExecutor(1, _fork) as pool:
            result = pool.submit(_of_size, size, chosen, num_readers, num_rounds).result()
        show(render(result))
        results.append(result)
    write_json(results, json_file)
    return 0


def _of_size(size: int, chosen: Sequence[str], num_readers: int, num_rounds: int) -> Dict[str, Any]:
    result: Dict[str, Any] = {'mb': size, 'readers': num_readers, 'rounds': num_rounds}
    try:
        if 'in_place' in chosen:  # First, for the same reason.
            result['copies_of_8_readers_in_place'] = copies_in_place(size * 1_000_000)
        result['ways'] = found = measure(chosen, size * 1_000_000, num_readers, num_rounds, say)
    except threading.BrokenBarrierError as error:
        raise StoreError(f'a reader failed, or was not done within {LIMIT_S:.0f} s: see above') from error
    for figures in found.values():
        figures['ratio_to_bare'] = figures['loaded_s'] / found['bare']['loaded_s']
    return result


def sizes_of(sizes_mb: str) -> List[int]:
    sizes = sizes_mb.split(',')
    if not all(size.strip().isdigit() and int(size) >= 1 for size in sizes):
        raise ConfigError(f'--sizes ({sizes_mb!r}) must be whole numbers of MB, comma-separated')
    return [int(size) for size in sizes]


def write_json(results: List[Dict[str, Any]], json_file: Optional[str]) -> None:
    if json_file:
        with open(json_file, 'w') as out:
            json.dump(results, out, indent=1)


def render(result: Dict[str, Any]) -> str:
    lines = [
        f'\n{result["mb"]} MB in {NUM_TENSORS} tensors, published -> loaded by {result["readers"]} processes, ms; '
        f'{os.cpu_count()} cores, medians of {result["rounds"]} rounds',
        f'  {"":<24} {"loaded":>8} {"P90":>8} {"max":>8} {"/bare":>6} {"publish":>8} {"alone":>8}',
    ]
    for name, found in result['ways'].items():
        numbers = [f'{found[key] * 1e3:>8.1f}' for key in ('loaded_s', 'p90_s', 'max_s')]
        alone = found.get('publish_without_readers_s')
        numbers += [f'{found["ratio_to_bare"]:>6.2f}', f'{found["publish_s"] * 1e3:>8.1f}']
        lines.append(f'  {WAYS[name].title:<24} {" ".join(numbers)} {"" if alone is None else f"{alone * 1e3:>8.1f}"}')
    if 'copies_of_8_readers_in_place' in result:
        copies = result['copies_of_8_readers_in_place']
        lines.append(
            f'  {NUM_IN_PLACE} readers in place have {copies:.2f} copies of the weights in memory (sum of PSS)'
        )
    return '\n'.join(lines)
