"""Processes of workers and servers that are killed at any moment, and a Redis server that goes away."""

import multiprocessing
import os
import random
import time

import pytest
import torch
from small_models import wait_until

from ding_store.errors import StoreUnavailable
from ding_store.learners import ParameterServer, StoreOptimizer
from ding_store.learners.wire import value_of
from ding_store.storage import open_store
from ding_store.storage.testing import WAIT_S

FORK = multiprocessing.get_context('fork')
#: Factor of the number of kills.
MORE = int(os.environ.get('DING_STORE_MORE_KILLS', '1'))
NUM_ELEMENTS = 20_000  # more than a value that is part of its announcement
RUNS, STOPS = 0, 1


class Job:
    """One server and some workers in processes. Each gradient adds 1 to each parameter, if it counts once."""

    def __init__(self, url, directory, sync, **options):
        self.url, self.directory, self.sync = url, directory, sync
        self.options = {'host_cache_dir': str(directory), 'check_every_s': 0.5, **options}
        # Not an Event: a process that is killed could hold its lock.
        self.workers_stop, self.server_stops = (FORK.Value('b', RUNS, lock=False) for _ in range(2))
        self.processes = {}

    def open(self):
        return open_store(self.url, f'kills-{self.sync}', **self.options)

    def start(self, name):
        self.processes[name] = process = FORK.Process(target=self._serve if name == 'server' else self._work)
        process.start()

    def kill(self, name):
        self.processes[name].kill()
        self.processes[name].join(WAIT_S)

    def end(self, name):
        self.processes[name].join(WAIT_S)
        assert self.processes[name].exitcode == 0, name

    def _serve(self):
        own = torch.nn.Parameter(torch.zeros(NUM_ELEMENTS))
        with self.open() as store:
            options = dict(sync=self.sync, straggler_timeout_s=0.2, path=str(self.directory / 'server'))
            optimizer = torch.optim.SGD([own], lr=1.0)
            server = ParameterServer([own], optimizer, store, 'main', checkpoint_s=0.05, **options)
            server.run(lambda: self.server_stops.value == STOPS)
            while server.serve(0.2):
                pass
            server.close()

    def _work(self):
        own = torch.nn.Parameter(torch.zeros(NUM_ELEMENTS))
        with self.open() as store:
            optimizer = torch.optim.SGD([own], lr=1.0)
            options = dict(sync=self.sync, max_staleness=10**6, timeout_s=WAIT_S)
            with StoreOptimizer(optimizer, store, 'main', **options) as worker:
                while self.workers_stop.value == RUNS:
                    own.grad = torch.full((NUM_ELEMENTS,), -1.0)
                    worker.step()


@pytest.fixture(scope='module', autouse=True)
def _imports():
    """What torch imports at the first step of an optimizer takes seconds: forked processes have it already."""
    own = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([own], lr=1.0)
    own.grad = torch.ones(1)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ('sync', 'plane', 'num_kills'), [('async', 'auto', 5), ('async', 'off', 2), ('gradients', 'auto', 3)]
)
def test_kills_of_workers_and_server_count_each_gradient_once(redis_server, tmp_path, sync, plane, num_kills):
    job = Job(redis_server.url, tmp_path, sync, host_plane=plane)
    names = ['server', 'one', 'two', 'three']
    choose = random.Random(5)
    with job.open() as store:
        store.clear()

        def version():
            found = store.get(value_of('main'))
            return found.header['version'] if found is not None else 0

        try:
            for name in names:
                job.start(name)
            wait_until(lambda: version() >= 3)
            for _ in range(num_kills * MORE):
                name = choose.choice(names)
                job.kill(name)
                job.start(name)
                before = version()
                wait_until(lambda: version() > before + 2, f'nothing follows the kill of {name}')  # noqa: B023
            job.workers_stop.value = STOPS
            for name in names[1:]:
                job.end(name)
            job.server_stops.value = STOPS
            job.end('server')
            found = store.get(value_of('main'))
            parameters = next(iter(found.arrays.values()))
            assert parameters.min() == parameters.max() == found.header['version']
            if sync == 'async':
                # Each worker numbers its gradients without gaps.
                handled, dropped = found.header['handled'], found.header['dropped']
                assert found.header['version'] == sum(handled.values()) - sum(dropped.values())
        finally:
            for process in job.processes.values():
                process.kill()
                process.join()
            store.clear()


def test_worker_steps_alone_while_redis_is_away_up_to_the_bound(own_server, tmp_path):
    centre, own = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    options = dict(host_cache_dir=str(tmp_path), check_every_s=0.2)
    with open_store(own_server.url, 'away', **options) as served:
        server = ParameterServer([centre], torch.optim.SGD([centre], lr=1.0), served, 'main', sync='async')
        with server.start(), open_store(own_server.url, 'away', reconnect_timeout_s=0.5, **options) as store:
            optimizer = StoreOptimizer(
                torch.optim.SGD([own], lr=1.0), store, 'main', sync='async', max_staleness=3, timeout_s=WAIT_S
            )

            def step():
                own.grad = torch.full((4,), -1.0)
                optimizer.step()

            step()
            assert own.tolist() == [1.0] * 4
            own_server.kill()
            for local in (1, 2, 3):
                step()
                assert optimizer.figures['local'] == local
                assert own.tolist() == [1.0 + local] * 4
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match=r'after 3 steps without it \(max_staleness\)'):
                step()
            assert time.monotonic() - began >= 0.4  # It waited.
            own_server.start()
            wait_until(lambda: _succeeds(step))
            # What was computed while the server was away has arrived, once.
            assert server.figures['used'] + server.figures['dropped_stale'] == optimizer.figures['sent']
            assert own.tolist() == centre.tolist() == [float(server.version)] * 4
            assert optimizer.figures['local'] == 0


def _succeeds(step):
    try:
        step()
    except StoreUnavailable:
        return False
    return True


@pytest.mark.parametrize('sync', ['gradients', 'async'])
def test_training_goes_on_after_redis_lost_its_memory(forgetful_server, tmp_path, sync):
    centre, own = (torch.nn.Parameter(torch.zeros(NUM_ELEMENTS)) for _ in range(2))
    options = dict(host_cache_dir=str(tmp_path), check_every_s=0.2)
    with open_store(forgetful_server.url, 'lost', **options) as served:
        server = ParameterServer([centre], torch.optim.SGD([centre], lr=1.0), served, 'main', sync=sync)
        with server.start(), open_store(forgetful_server.url, 'lost', **options) as store:
            optimizer = torch.optim.SGD([own], lr=1.0)
            worker = StoreOptimizer(optimizer, store, 'main', sync=sync, max_staleness=0, timeout_s=WAIT_S)
            for number in range(9):
                if number in (3, 6):
                    forgetful_server.kill()
                    forgetful_server.start()
                own.grad = torch.full((NUM_ELEMENTS,), -1.0)
                worker.step()
            assert own.min() == own.max() == centre.max() == server.version == 9
            assert server.figures['used'] == worker.figures['sent'] == 9
