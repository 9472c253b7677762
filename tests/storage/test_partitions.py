"""Redis, learner and collectors on hosts of their own, and their cables pulled out: real partitions, real processes."""

import subprocess
import time

import pytest
import redis
from needs import IS_LONG
from netns import Network, why_not
from processes import child

from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, number_of

# Where `ip` is missing nothing can be tried, in CI neither; where it is there, a failure to use it is a failure.
pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

STREAM = 'experience'
COLLECTORS = ('collector0', 'collector1')
NUM_EACH = 300
QUICK = {'socket_timeout_s': 0.5, 'check_every_s': 0.25}


@pytest.fixture
def network():
    with Network('redis', 'learner', *COLLECTORS) as network:
        yield network


@pytest.fixture
def url(network, redis_binary, tmp_path):
    words = [redis_binary, '--port', '6379', '--bind', network.addresses['redis'], '--protected-mode', 'no']
    words += ['--save', '', '--dir', str(tmp_path), '--logfile', str(tmp_path / 'redis.log')]
    server = subprocess.Popen(network.command('redis', *words))
    try:
        url = f'redis://{network.addresses["redis"]}:6379'
        with child(network.at('learner', lambda pipe: print(wait_for(url), file=pipe))) as (_, pipe):
            assert pipe.readline().strip() == 'True', (tmp_path / 'redis.log').read_text()
        yield url
    finally:
        server.kill()
        server.wait(WAIT_S)


def wait_for(url):
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            with redis.Redis.from_url(url, socket_connect_timeout=1) as client:
                return client.ping()
        except redis.ConnectionError:
            time.sleep(0.02)
    return False


def collect(url, number):
    def work(pipe):
        with RedisStore(url, 'run', **QUICK) as store:
            for i in range(NUM_EACH):
                store.append(STREAM, {'collector': number}, chunk(i, 500))
                time.sleep(0.005)  # The pace of an environment: the run must outlast the partitions.
                if i % 50 == 0:
                    print(i, file=pipe)
            print('done', file=pipe)
            # Its copies are needed until the learner has all.
            while store.get('finished', timeout_s=1.0) is None:
                pass

    return work


def learn(url):
    def work(pipe):
        with RedisStore(url, 'run', **QUICK) as store:
            reader = Reader(store, STREAM, 'learner')
            count = 0
            while count < NUM_EACH * len(COLLECTORS):
                for entry in reader.read(16, timeout_s=1.0):
                    print(entry.header['collector'], number_of(entry), file=pipe)
                    count += 1
                reader.ack()
            print('lost', reader.num_lost, file=pipe)
            store.put('finished', {}, {})

    return work


@pytest.mark.parametrize('unplugged', ['redis', 'learner', pytest.param('collector0', marks=pytest.mark.long)])
def test_partition_of_any_host_twice_loses_nothing(network, url, unplugged):
    """Silent partitions of any host while all work: each row of each collector arrives once and in order."""
    with (
        child(network.at('learner', learn(url))) as (_, learned),
        child(network.at('collector0', collect(url, 0))) as (_, first),
        child(network.at('collector1', collect(url, 1))) as (_, second),
    ):
        for progress in ('0', '50'):
            assert first.readline().strip() == progress
            network.unplug(unplugged)
            time.sleep(0.8)  # longer than the socket timeout
            network.plug(unplugged)
        lines = [line.split() for line in learned]
        assert [*first][-1].strip() == [*second][-1].strip() == 'done'
    assert lines.pop() == ['lost', '0']
    for number in range(len(COLLECTORS)):
        assert [int(i) for collector, i in lines if collector == str(number)] == list(range(NUM_EACH))


def test_learner_joining_late_from_another_host_gets_all(network, url):
    """And host names do not clash: writers of two hosts with equal process ids are two writers."""
    with child(network.at('collector0', collect(url, 0))) as (_, first):
        assert first.readline().strip() == '0'
        with child(network.at('collector1', collect(url, 1))) as (_, second):
            assert second.readline().strip() == '0'
            with child(network.at('learner', learn(url))) as (_, learned):
                assert list(learned)[-1].split() == ['lost', '0']


@pytest.mark.skipif(not IS_LONG, reason='takes 25 s: set DING_STORE_SLOW_TESTS=1')
def test_partition_of_20_s_at_default_timeouts_loses_nothing(network, url):
    total = 60

    def slow(pipe):
        with RedisStore(url, 'run') as store:
            for i in range(total):
                store.append(STREAM, {}, chunk(i))
                print(time.monotonic(), file=pipe)
                time.sleep(0.05)

    def read(pipe):
        with RedisStore(url, 'run') as store:
            reader = Reader(store, STREAM, 'learner')
            numbers = [number_of(entry) for entry in reader.read(2 * total)]
            print(reader.num_lost, *numbers, file=pipe)

    with child(network.at('collector0', slow)) as (_, pipe):
        times = [float(pipe.readline())]
        network.unplug('collector0')
        time.sleep(20)
        network.plug('collector0')
        times += map(float, pipe)
    assert 18 < max(after - before for before, after in zip(times, times[1:])) < 60
    with child(network.at('learner', read)) as (_, pipe):
        assert [int(word) for word in pipe.readline().split()] == [0, *range(total)]
