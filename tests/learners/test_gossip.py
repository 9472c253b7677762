"""Workers without a server: averages with random peers, sparse gradients to all, and shared memory."""

import multiprocessing
import random
import socket
import statistics

import pytest
import torch
from small_models import ROWS, copies_of, gradients_of, largest_difference, make_model, sgd

from ding_store.errors import ConfigError
from ding_store.learners import StoreOptimizer
from ding_store.storage import open_store
from ding_store.storage.testing import WAIT_S

FORK = multiprocessing.get_context('fork')


def gossipers(store, values, **options):
    """Workers with one parameter each, that take no steps of their own."""
    made = []
    for number, value in enumerate(values):
        own = torch.nn.Parameter(torch.tensor([value], dtype=torch.float64))
        optimizer = torch.optim.SGD([own], lr=0.0)
        worker = StoreOptimizer(
            optimizer, store.another(), 'main', sync='gossip', seed=number, worker=f'w{number}', **options
        )
        with torch.no_grad():
            own.fill_(value)  # A worker that joins begins where a peer is.
        worker._exchange._publish()
        made.append((own, worker))
    for _, worker in made:
        worker._exchange._look()
    return made


def spread(workers):
    values = [own.item() for own, _ in workers]
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


def test_spread_of_gossip_shrinks_at_the_known_rate():
    """The factor per step is 1 - (n + 1) / (2 n (n - 1)): see ``Gossip``."""
    number, choose, ratios = 5, random.Random(7), []
    with open_store('memory://', run='gossip') as store:
        workers = gossipers(store, [0.0] * number)
        for _, worker in workers:
            worker._exchange._looked_at = float('inf')  # Nothing joins or leaves.
        for _ in range(300):
            for own, worker in workers:
                with torch.no_grad():
                    own.fill_(choose.gauss(0.0, 1.0))
                worker._exchange._publish()
            before = spread(workers)
            choose.choice(workers)[1].step()
            ratios.append(spread(workers) / before)
    expected = 1 - (number + 1) / (2 * number * (number - 1))
    assert abs(statistics.mean(ratios) - expected) < 4 * statistics.stdev(ratios) / len(ratios) ** 0.5


def test_gossip_workers_agree_after_enough_steps():
    with open_store('memory://', run='gossip') as store:
        workers = gossipers(store, [0.0, 1.0, 2.0, 5.0])
        for _ in range(40):
            for _, worker in workers:
                worker.step()
        assert spread(workers) < 1e-6
        assert workers[0][1].peers == ['w1', 'w2', 'w3']
        assert workers[0][1].figures['averaged'] == 40


def test_gossip_worker_that_left_is_no_peer():
    with open_store('memory://', run='gossip') as store:
        workers = gossipers(store, [0.0, 1.0])
        workers[1][1].close()
        workers[0][1]._exchange._look()
        workers[0][1].step()
        assert workers[0][1].peers == []
        assert workers[0][0].item() == 0.0


def test_gossip_worker_that_publishes_nothing_counts_as_dead():
    with open_store('memory://', run='gossip') as store:
        workers = gossipers(store, [0.0, 1.0], peer_timeout_s=0.0)
        workers[0][1]._exchange._look()
        assert workers[0][1].peers == []


def test_gossip_worker_that_joins_begins_with_a_peer():
    with open_store('memory://', run='gossip') as store:
        model, other = make_model(), make_model()
        with StoreOptimizer(sgd(model), store, 'main', sync='gossip') as first:
            gradients_of(model, 0, 0, ROWS, ROWS)
            first.step()
            with StoreOptimizer(sgd(other), store.another(), 'main', sync='gossip'):
                assert largest_difference(model.parameters(), other.parameters()) == 0


def test_sparse_gradients_reach_every_worker_once():
    with open_store('memory://', run='gossip') as store:
        workers = []
        for _ in range(3):
            own = torch.nn.Parameter(torch.zeros(4))
            optimizer = torch.optim.SGD([own], lr=1.0)
            options = dict(sync='gossip', threshold=0.5, period=1000)
            workers.append((own, StoreOptimizer(optimizer, store.another(), 'main', **options)))
        total, generator = torch.zeros(4), torch.Generator().manual_seed(1)
        for _ in range(30):
            for own, worker in workers:
                own.grad = torch.randint(-4, 5, (4,), generator=generator) / 8
                total += own.grad
                worker.step()
        left = sum(worker.residuals.tensors[0] for _, worker in workers)
        for own, worker in workers:  # Nothing new is sent: each reads what is left.
            own.grad = torch.zeros(4)
            worker.step()
        for own, _ in workers:
            assert torch.equal(-own.detach() + left, total)


def test_reader_of_a_dead_worker_is_removed():
    with open_store('memory://', run='gossip') as store:
        options = dict(sync='gossip', threshold=0.5, period=1000, peer_timeout_s=0.0)
        own, dead = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        StoreOptimizer(torch.optim.SGD([dead], lr=1.0), store.another(), 'main', worker='dead', **options)
        worker = StoreOptimizer(torch.optim.SGD([own], lr=1.0), store.another(), 'main', worker='lives', **options)
        for _ in range(3):
            own.grad = torch.ones(1)
            worker._exchange._sparse._looked_at = float('-inf')
            worker.step()
        assert list(store.stream_info('gossip/main').readers) == ['lives']


# --- Hogwild

FEATURES, PER_ROW = 200, 4


def sparse_rows(seed, count):
    """Rows with few features each, and their targets, from one linear model."""
    weights = torch.linspace(-1, 1, FEATURES)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        features = torch.randperm(FEATURES, generator=generator)[:PER_ROW]
        yield features, weights[features].sum()


def train(own, optimizer, seed, count):
    for features, target in sparse_rows(seed, count):
        loss = (own[features].sum() - target) ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def loss_of(own):
    rows = list(sparse_rows(99, 200))
    with torch.no_grad():
        return float(sum((own[features].sum() - target) ** 2 for features, target in rows) / len(rows))


def hogwild(url, directory, run, seed, count):
    own = torch.nn.Parameter(torch.zeros(FEATURES))
    with open_store(url, run, host_cache_dir=directory) as store:
        train(own, StoreOptimizer(torch.optim.SGD([own], lr=0.1), store, 'main', sync='hogwild'), seed, count)


def test_hogwild_reaches_the_loss_of_one_process(redis_server, tmp_path):
    alone = torch.nn.Parameter(torch.zeros(FEATURES))
    first = loss_of(alone)
    for seed in (1, 2):
        train(alone, torch.optim.SGD([alone], lr=0.1), seed, 500)
    own = torch.nn.Parameter(torch.zeros(FEATURES))
    with open_store(redis_server.url, 'hogwild', host_cache_dir=str(tmp_path)) as store:
        with StoreOptimizer(torch.optim.SGD([own], lr=0.1), store, 'main', sync='hogwild'):
            arguments = redis_server.url, str(tmp_path), 'hogwild'
            workers = [FORK.Process(target=hogwild, args=(*arguments, seed, 500)) for seed in (1, 2)]
            for each in workers:
                each.start()
            for each in workers:
                each.join(WAIT_S)
                assert each.exitcode == 0
        after = copies_of(torch.nn.ParameterList([own]))
    assert loss_of(own) < max(2 * loss_of(alone), 0.01 * first)
    assert torch.equal(own.detach(), after[0])  # It is the worker's own by now.
    assert not list(tmp_path.rglob('*.shared'))


def test_hogwild_refuses_another_model(redis_server, tmp_path):
    with open_store(redis_server.url, 'hogwild-2', host_cache_dir=str(tmp_path)) as store:
        one = torch.nn.Parameter(torch.zeros(8))
        StoreOptimizer(torch.optim.SGD([one], lr=0.1), store, 'main', sync='hogwild')
        for other, message in ((torch.zeros(2, 4), 'other parameters'), (torch.zeros(900), 'not')):
            parameter = torch.nn.Parameter(other)
            with pytest.raises(ConfigError, match=message):
                StoreOptimizer(torch.optim.SGD([parameter], lr=0.1), store, 'main', sync='hogwild')


@pytest.mark.parametrize(
    ('hostname', 'place'), [('b', "the memory of '.*'"), (socket.gethostname(), 'another host cache of this host')]
)
def test_hogwild_refuses_a_worker_on_another_host(redis_server, tmp_path, monkeypatch, hostname, place):
    # Two containers with a /dev/shm each are two hosts.
    stores = [
        open_store(redis_server.url, f'hogwild-3{place[0]}', host_cache_dir=str(tmp_path / host)) for host in ('a', 'b')
    ]
    with stores[0], stores[1]:
        own = torch.nn.Parameter(torch.zeros(8))
        for _ in range(2):
            StoreOptimizer(torch.optim.SGD([own], lr=0.1), stores[0], 'main', sync='hogwild')
        monkeypatch.setattr(socket, 'gethostname', lambda: hostname)
        with pytest.raises(ConfigError, match=rf"'hogwild'\) works on one host, and model 'main' is in {place}"):
            StoreOptimizer(torch.optim.SGD([own], lr=0.1), stores[1], 'main', sync='hogwild')
