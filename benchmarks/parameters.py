"""Benchmark of a synchronous step: gradients of N processes become the parameters that all of them continue with."""

from __future__ import annotations

import importlib.util
import json
import mmap
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from contextlib import ExitStack
from typing import Any, Dict, List, Optional, Sequence, Type

import numpy as np
import torch

from benchmarks import ray_cluster
from benchmarks.machine import busy_cores, others
from benchmarks.output import say, show
from ding_store.compare.scratch import memory_directory, scratch
from ding_store.compiled import load_for
from ding_store.errors import ConfigError, StoreError
from ding_store.launch.termination import interrupts_later
from ding_store.learners import ParameterServer, StoreOptimizer
from ding_store.storage import open_store
from ding_store.storage.embedded.private_server import ensure_server

NUM_TENSORS = 50
RATE = 0.5
#: Seconds that no round takes. After that a process is stuck, and the measurement ends.
LIMIT_S = 120.0
#: The same for making all ways: on a busy machine, Ray takes minutes to start.
START_LIMIT_S = 400.0
#: Rounds before those that are measured. The rings and slots of ding_store have been written once by then.
WARM_UP = 5
FORK = multiprocessing.get_context('fork')


class Case:
    """The things that the processes of one measurement share: sizes, barriers, times, memory for the bare ways."""

    def __init__(
        self, num_bytes: int, num_workers: int, directory: str, wire: bool = False, ray_directory: str = ''
    ) -> None:
        self.num_workers = num_workers
        self.directory, self.ray_directory = directory, ray_directory
        self.wire = wire
        self.shape = (max(1, num_bytes // NUM_TENSORS // 4 // 256), 256)
        self.num_elements = NUM_TENSORS * self.shape[0] * self.shape[1]
        self.begin, self.end = FORK.Barrier(num_workers + 1), FORK.Barrier(num_workers + 1)
        self.inner = FORK.Barrier(num_workers)
        self.began_at, self.done_at = (FORK.Array('d', num_workers, lock=False) for _ in range(2))
        self.sums = FORK.Array('d', num_workers, lock=False)
        self.failed, self.left_out = (FORK.Array('c', 200, lock=False) for _ in range(2))
        self.gradients = [self._shared() for _ in range(num_workers)]
        self.parameters = self._shared()
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            self.port = free.getsockname()[1]

    def _shared(self) -> np.ndarray:
        return np.frombuffer(mmap.mmap(-1, 4 * self.num_elements), np.float32)

    @property
    def max_pending_bytes(self) -> int:
        return max(256 << 20, 3 * 4 * self.num_elements * self.num_workers)

    def model(self) -> torch.nn.ParameterList:
        return torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(self.shape)) for _ in range(NUM_TENSORS)])

    def options(self) -> Dict[str, Any]:
        """Return the options of a store. Over the wire, all bytes pass the Redis server, as between two hosts."""
        plane = {'host_plane': 'off', 'compression': None} if self.wire else {}
        return {'max_pending_bytes': self.max_pending_bytes, **plane}


class Way:
    """One way of a step. Worker ``rank`` has gradients of ``rank + 1`` everywhere."""

    title = ''

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.model = case.model()
        for parameter in self.model:
            parameter.grad = torch.full(case.shape, float(rank + 1))

    def prepare(self) -> None:
        """Do work that is not part of the measured time."""

    def step(self) -> None:
        raise NotImplementedError

    def first_and_last(self) -> float:
        return float(self.model[0].detach().view(-1)[0] + self.model[-1].detach().view(-1)[-1])

    def close(self) -> None:
        pass


class Bare(Way):
    """
    Copies and sums in shared memory, with barriers: each worker copies its gradients in. The first one sums them into
    one, steps, and copies the parameters in. All copy them out.
    """

    title = 'bare copies and barriers'

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.own = np.split(case.gradients[rank], NUM_TENSORS)
        self.sources = [each.grad.numpy().reshape(-1) for each in self.model]
        self.targets = [each.detach().numpy().reshape(-1) for each in self.model]
        self.sum, self.kept = np.zeros(case.num_elements, np.float32), np.zeros(case.num_elements, np.float32)

    def step(self) -> None:
        for target, source in zip(self.own, self.sources):
            np.copyto(target, source)
        self.case.inner.wait(LIMIT_S)
        self.reduce()
        self.case.inner.wait(LIMIT_S)
        for target, source in zip(self.targets, np.split(self.case.parameters, NUM_TENSORS)):
            np.copyto(target, source)

    def reduce(self) -> None:
        if self.rank == 0:
            self._reduce(slice(0, self.case.num_elements))

    def _reduce(self, part: slice) -> None:
        gradients, total = [each[part] for each in self.case.gradients], self.sum[part]
        np.add(gradients[0], gradients[1], out=total)
        for each in gradients[2:]:
            np.add(total, each, out=total)
        np.multiply(total, RATE / self.case.num_workers, out=total)
        np.subtract(self.kept[part], total, out=self.kept[part])
        np.copyto(self.case.parameters[part], self.kept[part])


class BareShares(Bare):
    """The same, but each worker sums its share of the parameters: no process does the work of all."""

    title = 'bare, each sums a share'

    def reduce(self) -> None:
        edges = np.linspace(0, self.case.num_elements, self.case.num_workers + 1).astype(int)
        self._reduce(slice(int(edges[self.rank]), int(edges[self.rank + 1])))


class Ours(Way):
    title = 'ding_store'

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.store = open_store(f'embedded://{case.directory}', run='parameters', **case.options())
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.optimizer = StoreOptimizer(optimizer, self.store, 'main', sync='gradients', timeout_s=LIMIT_S)

    def step(self) -> None:
        self.optimizer.step()

    def close(self) -> None:
        self.optimizer.close()
        self.store.close()


class SetGet(Bare):
    """
    The same bytes through redis-py and the same server: each worker SETs its gradients. The first one GETs all, sums,
    steps, and SETs the parameters. All GET them. Barriers replace waits for messages.
    """

    title = 'redis-py SET and GET'

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        import redis

        self.client = redis.Redis(unix_socket_path=ensure_server(f'{case.directory}/parameters', grace_s=30.0))

    def step(self) -> None:
        for target, source in zip(self.own, self.sources):
            np.copyto(target, source)
        self.client.set(f'bench/{self.rank}', memoryview(self.case.gradients[self.rank]).cast('B'))
        self.case.inner.wait(LIMIT_S)
        if self.rank == 0:
            for rank, gradients in enumerate(self.case.gradients):
                np.copyto(gradients, np.frombuffer(self.client.get(f'bench/{rank}'), np.float32))  # type: ignore[arg-type]
            self.reduce()
            self.client.set('bench/parameters', memoryview(self.case.parameters).cast('B'))
        self.case.inner.wait(LIMIT_S)
        found = np.frombuffer(self.client.get('bench/parameters'), np.float32)  # type: ignore[arg-type]
        for target, source in zip(self.targets, np.split(found, NUM_TENSORS)):
            np.copyto(target, source)

    def close(self) -> None:
        self.client.delete(f'bench/{self.rank}', 'bench/parameters')
        self.client.close()


class Gloo(Way):
    """One all-reduce of all gradients, which lie in one buffer, and a step in each process."""

    title = 'gloo all-reduce'

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        import torch.distributed as distributed

        self.distributed = distributed
        address = f'tcp://127.0.0.1:{case.port}'
        distributed.init_process_group('gloo', init_method=address, rank=rank, world_size=case.num_workers)
        self.buffer = torch.full((case.num_elements,), float(rank + 1))
        for parameter, part in zip(self.model, self.buffer.split(case.num_elements // NUM_TENSORS)):
            parameter.grad = part.view(case.shape)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def prepare(self) -> None:
        self.buffer.fill_(float(self.rank + 1))  # The sum took the place of the gradients.

    def step(self) -> None:
        self.distributed.all_reduce(self.buffer)
        self.buffer.div_(self.case.num_workers)
        self.optimizer.step()

    def close(self) -> None:
        self.distributed.destroy_process_group()


class RayActor(Way):
    """
    Ray's own example of a parameter server: an actor sums the gradients of all workers, steps, and returns the
    parameters. Gradients and parameters are objects in Ray's shared memory. If Ray does not start, this is left out.
    """

    title = 'Ray actor'

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        if rank == 0:
            try:
                self.actor = self._start()
            except Exception as e:  # noqa: BLE001 - the other ways are measured without it
                case.left_out.value = f'{type(e).__name__}: {e}'.encode()[:199]
        case.inner.wait(START_LIMIT_S)
        if rank and not case.left_out.value:
            import ray

            ray_cluster.join(case.ray_directory)
            self.actor = ray.get_actor('parameters')

    def _start(self) -> Any:
        import ray

        case, num_workers = self.case, self.case.num_workers
        ray_cluster.start(case.ray_directory, max(1 << 29, 16 * num_workers * 4 * case.num_elements), num_cpus=1)
        shape, num_tensors, rate = case.shape, NUM_TENSORS, RATE

        class Server:  # in here, so that Ray sends its code to the actor's process
            def __init__(self) -> None:
                import torch

                torch.set_num_threads(1)
                self.model = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(num_tensors)]
                self.optimizer = torch.optim.SGD(self.model, lr=rate)
                self.came: List[Any] = []
                self.next: Any = None

            async def step(self, gradients: List[np.ndarray]) -> List[Any]:
                import asyncio

                if self.next is None:
                    self.next = asyncio.get_running_loop().create_future()
                followed, came = self.next, self.came
                came.append(gradients)
                if len(came) == num_workers:
                    self.came, self.next = [], None
                    for parameter, *several in zip(self.model, *came):
                        total = several[0] + several[1]
                        for each in several[2:]:
                            total += each
                        parameter.grad = torch.from_numpy(total).div_(num_workers)
                    self.optimizer.step()
                    followed.set_result(ray.put([each.detach().numpy() for each in self.model]))
                return [await followed]

        actor = ray.remote(Server).options(name='parameters').remote()
        ray.get(actor.__ray_ready__.remote(), timeout=START_LIMIT_S)
        return actor

    def step(self) -> None:
        import ray

        (found,) = ray.get(self.actor.step.remote([each.grad.numpy() for each in self.model]))
        for parameter, array in zip(self.model, ray.get(found)):
            np.copyto(parameter.detach().numpy(), array)

    def close(self) -> None:
        if not self.case.left_out.value:
            if self.rank == 0:
                self.case.inner.wait(LIMIT_S)  # The cluster ends with this process, last.
                ray_cluster.leave()
            else:
                ray_cluster.leave()
                self.case.inner.wait(LIMIT_S)


WAYS: Dict[str, Type[Way]] = {
    'bare': Bare,
    'shares': BareShares,
    'ding_store': Ours,
    'gloo': Gloo,
    'ray': RayActor,
    'redis': SetGet,
}
#: Names of the ways that are measured on one host, and over the wire.
LOCAL, WIRE = ('bare', 'shares', 'ding_store', 'gloo', 'ray'), ('ding_store', 'redis')


def main(sizes: str, workers: str, rounds: int, json_file: Optional[str], wire: bool = False) -> int:
    """Measure, and print a table per size and number of workers. Write all to ``json_file``, if given."""
    if rounds < 1:
        raise ConfigError(f'--rounds ({rounds}) must be at least 1')
    results: List[Dict[str, Any]] = []
    show(f'{os.cpu_count()} cores; each worker and the parameter server are processes of their own, one thread each')
    for megabytes in _numbers('--sizes', sizes, 0.001):
        for num_workers in _numbers('--workers', workers, 2):
            results.append(measure(int(megabytes * 1e6), int(num_workers), rounds, wire))
            show(render(results[-1]))
    if json_file:
        with open(json_file, 'w') as out:
            json.dump({'cores': os.cpu_count(), 'results': results}, out, indent=1)
        show(f'all figures are in {json_file}')
    return 0


def _numbers(option: str, text: str, least: float) -> List[float]:
    try:
        numbers = [float(each) for each in text.split(',')]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ConfigError(f'{option} ({text!r}) must be numbers of at least {least:g}, separated by commas')
    return numbers


def measure(num_bytes: int, num_workers: int, rounds: int, wire: bool = False) -> Dict[str, Any]:
    """Return the seconds of each round of each way. The ways take turns, so a busy moment hits all of them."""
    busy, names, left_out = busy_cores(), WIRE if wire else LOCAL, ''
    if 'ray' in names and importlib.util.find_spec('ray') is None:
        names, left_out = _without_ray(names), 'it is not installed'
    with scratch(memory_directory()) as directory, ExitStack() as stack:
        load_for(1 << 30)  # before the fork, so that no round waits for the compiler
        ray_directory = tempfile.mkdtemp(prefix='ray', dir='/tmp')  # Names of sockets are short.
        stack.callback(shutil.rmtree, ray_directory, ignore_errors=True)
        case = Case(num_bytes, num_workers, directory, wire, ray_directory)
        for target, arguments in [
            (_serve, (case,)),
            *((_work, (case, names, rank, rounds)) for rank in range(num_workers)),
        ]:
            process = FORK.Process(target=target, args=arguments, daemon=True)
            with interrupts_later():
                process.start()
            stack.callback(_end, process)
        _wait(case, case.end, START_LIMIT_S)  # All ways are made.
        if case.left_out.value:
            names, left_out = _without_ray(names), case.left_out.value.decode(errors='replace')
        seconds: Dict[str, List[float]] = {name: [] for name in names}
        for number in range(rounds + WARM_UP):
            for name in names:
                say(f'{num_bytes / 1e6:g} MB, {num_workers} workers: round {number + 1} of {name}')
                _wait(case, case.begin)
                _wait(case, case.end)
                expected = -2 * RATE * (num_workers + 1) / 2 * (number + 1)
                if any(abs(each - expected) > 1e-3 * abs(expected) for each in case.sums):
                    raise StoreError(f'{name}: parameters are {list(case.sums)} in place of {expected}')
                if number >= WARM_UP:
                    seconds[name].append(max(case.done_at) - min(case.began_at))
        _wait(case, case.end)
    busy = max(busy, busy_cores())
    result = {'bytes': num_bytes, 'workers': num_workers, 'seconds': seconds, 'others_cores': busy}
    return {**result, 'ray_left_out': left_out} if left_out else result


def _without_ray(names: Sequence[str]) -> Sequence[str]:
    return tuple(name for name in names if name != 'ray')


def _wait(case: Case, barrier: Any, limit_s: float = LIMIT_S) -> None:
    try:
        barrier.wait(limit_s)
    except threading.BrokenBarrierError as e:
        raise StoreError(f'a worker failed: {case.failed.value.decode() or "it was stuck"}') from e


def _end(process: Any) -> None:
    process.terminate()
    process.join()


def _begin_process() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _serve(case: Case) -> None:
    _begin_process()
    model = case.model()
    with open_store(f'embedded://{case.directory}', run='parameters', **case.options()) as store:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        ParameterServer(model, optimizer, store, 'main', num_workers=case.num_workers, straggler_timeout_s=1e6).run()


def _work(case: Case, names: Sequence[str], rank: int, rounds: int) -> None:
    _begin_process()
    try:
        ways = [WAYS[name](case, rank) for name in names]
        case.end.wait(START_LIMIT_S)
        if case.left_out.value:
            ways = [each for each in ways if not isinstance(each, RayActor)]
        for _ in range(rounds + WARM_UP):
            for way in ways:
                way.prepare()
                case.begin.wait(LIMIT_S)
                case.began_at[rank] = time.monotonic()
                way.step()
                case.done_at[rank], case.sums[rank] = time.monotonic(), way.first_and_last()
                case.end.wait(LIMIT_S)
        for way in ways:
            way.close()
        case.end.wait(LIMIT_S)
    except threading.BrokenBarrierError:
        raise
    except BaseException as e:
        case.failed.value = f'{type(e).__name__}: {e}'.encode()[:199]
        for barrier in (case.begin, case.end, case.inner):
            barrier.abort()
        raise


def ratios_of(result: Dict[str, Any], name: str, to: str) -> np.ndarray:
    """Return the quartiles of a way's seconds over those of another way in the same round."""
    seconds = result['seconds']
    return np.percentile(np.divide(seconds[name], seconds[to]), [25, 50, 75])


def render(result: Dict[str, Any]) -> str:
    """Return a table: median seconds, and ratios to other ways, with quartiles over the rounds."""
    seconds = result['seconds']
    against = [name for name in ('bare', 'shares', 'gloo', 'ray', 'redis') if name in seconds]
    title = f'{result["bytes"] / 1e6:g} MB, {result["workers"]} workers, {len(next(iter(seconds.values())))} rounds'
    lines = ['', title, f'  {"way":<26} {"ms":>8}' + ''.join(f'{"/ " + name:>22}' for name in against)]
    for name, durations in seconds.items():
        line = f'  {WAYS[name].title:<26} {np.median(durations) * 1e3:>8.1f}'
        for other in against:
            low, middle, high = ratios_of(result, name, other)
            line += f'{f"{middle:.2f} ({low:.2f}-{high:.2f})":>22}'
        lines.append(line)
    if 'ray_left_out' in result:
        lines.append(f'  {RayActor.title} is left out: {result["ray_left_out"]}')
    return '\n'.join(lines + others(result['others_cores']))
