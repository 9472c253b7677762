"""Peers of ``python -m benchmarks learners``: a row says why it has no figure."""

import pytest

pytest.importorskip('ding')

from benchmarks.learners import main, peer_rates  # noqa: E402
from benchmarks.shared_replays import PEERS, SharedReplay  # noqa: E402
from ding_store.errors import ConfigError  # noqa: E402


class NotInstalled(SharedReplay):
    title, needs = 'peer', ('os', 'no_such_module')


class Failing(SharedReplay):
    title = 'peer'

    @classmethod
    def fill(cls, columns, directory):
        raise ValueError('no room\nfor it')


def test_peer_that_is_not_installed_is_named():
    found = peer_rates(NotInstalled, num=2, batch_size=64, updates=1, rounds=1)
    assert found == {'missing': 'not measured, no_such_module is not installed'}


def test_peer_that_fails_to_start_says_why():
    found = peer_rates(Failing, num=2, batch_size=64, updates=1, rounds=1)
    assert found == {'missing': 'did not start: ValueError: no room'}


@pytest.mark.parametrize('updates', [0, 25])
def test_updates_that_are_no_multiple_of_ten_are_refused(updates):
    with pytest.raises(ConfigError, match=rf'--updates \({updates}\) must be a multiple of 10'):
        main('2', batch_size=64, updates=updates, rounds=1, json_file=None)


def test_names_of_peers_are_unique():
    assert list(PEERS) == ['Ray actor', 'torchrl RayReplayBuffer', 'torchrl memmap storage']
