"""How learners find each other: through values of the store, on one host or several, also after some were killed."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip('torch')

import torch  # noqa: E402
from netns import Network, why_not  # noqa: E402
from processes import child  # noqa: E402
from redis_server import RedisServer  # noqa: E402

from ding_store.errors import ConfigError  # noqa: E402
from ding_store.learners.data_parallel import LearnerGroup  # noqa: E402
from ding_store.learners.data_parallel_rendezvous import HERE, Place, Rendezvous, StoreKeys  # noqa: E402
from ding_store.storage import open_store  # noqa: E402

pytestmark = pytest.mark.timeout(120)

WAIT_S = 20.0


def test_learners_meet_whatever_order_they_come_in():
    with open_store('memory://', 'meet') as store, ThreadPoolExecutor(3) as pool:
        meetings = [Rendezvous(store, rank, 3) for rank in range(3)]
        assert meetings[2].look(0.0) is None
        found = list(pool.map(lambda each: each.look(WAIT_S), meetings))
        assert len({str(each) for each in found}) == 1
        assert len({each.keys for each in meetings}) == 1
        assert {each.place_among(found[0]) for each in meetings} == {HERE}
        for each in meetings:
            each.leave()
        assert store.info().values == {}


def test_value_of_a_killed_learner_is_no_meeting():
    with open_store('memory://', 'again') as store, ThreadPoolExecutor(2) as pool:
        before = [Rendezvous(store, rank, 2) for rank in range(2)]
        list(pool.map(lambda each: each.look(WAIT_S), before))  # and both are killed now
        first = Rendezvous(store, 0, 2)
        assert first.look(0.0) is None
        second = Rendezvous(store, 1, 2)
        list(pool.map(lambda each: each.look(WAIT_S), (first, second)))
        assert first.keys == second.keys != before[0].keys


def add_up_on(url, rank):
    """Return the work of one rank on its host: it meets the other one, and adds up numbers with it."""

    def work(pipe):
        with open_store(url, 'hosts') as store:
            meeting = Rendezvous(store, rank, 2)
            places = meeting.look(WAIT_S)
            place = meeting.place_among(places)
            group = LearnerGroup(rank, 2)
            group.connect_through(StoreKeys(store, meeting.keys), place=place)
            total = torch.tensor([float(rank + 1)])
            group.add_up(total)
            pipe.write(f'{place.hostname} {float(total)}\n')
            group.gather([])

    return work


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_learners_on_two_hosts_connect(redis_binary):
    hosts = 'here', 'there'
    with Network(*hosts) as network, contextlib.ExitStack() as stack:
        server = RedisServer(redis_binary, '--port', '6379', '--bind', '0.0.0.0', '--protected-mode', 'no')
        starter = threading.Thread(target=lambda: (network.enter('here'), server.start()))
        starter.start()
        starter.join()
        stack.callback(server.kill)
        url = f'redis://{network.addresses["here"]}:6379'
        pipes = [
            stack.enter_context(child(network.at(host, add_up_on(url, rank))))[1] for rank, host in enumerate(hosts)
        ]
        said = [pipe.readline().split() for pipe in pipes]
        assert said == [[network.addresses[host], '3.0'] for host in hosts]


def test_interface_in_the_environment_is_where_a_learner_listens(monkeypatch):
    with open_store('memory://', 'interface') as store:
        meeting = Rendezvous(store, 0, 1)
        places = meeting.look(WAIT_S)
        monkeypatch.setenv('GLOO_SOCKET_IFNAME', 'eth7')
        assert meeting.place_among(places) == Place('', 'eth7')


def test_learner_that_others_cannot_reach_is_refused():
    with open_store('memory://', 'unreachable') as store:
        meeting = Rendezvous(store, 0, 1)
        places = [*meeting.look(WAIT_S), {'host': 'elsewhere', 'network': 'another'}]
        with pytest.raises(ConfigError, match='no address that the learners on elsewhere reach.*GLOO_SOCKET_IFNAME'):
            meeting.place_among(places)
