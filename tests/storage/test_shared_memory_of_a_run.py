"""Memory of a host that the processes of a run write to: ``Store.shared_memory``."""

import multiprocessing
import os

import pytest

from ding_store.errors import ConfigError, NotEnoughSpace
from ding_store.storage import open_store
from ding_store.storage.testing import WAIT_S

FORK = multiprocessing.get_context('fork')


def nothing(memory):
    pass


def write(url, directory, number):
    with open_store(url, 'shared', host_cache_dir=directory) as store:
        store.shared_memory('counts', 16, nothing)[number] = number + 1


def test_processes_of_a_host_write_to_the_same_memory(redis_server, tmp_path):
    with open_store(redis_server.url, 'shared', host_cache_dir=str(tmp_path)) as store:
        memory = store.shared_memory('counts', 16, lambda new: new.__setitem__(15, 9))
        children = [FORK.Process(target=write, args=(redis_server.url, str(tmp_path), number)) for number in range(3)]
        for each in children:
            each.start()
        for each in children:
            each.join(WAIT_S)
        assert list(memory) == [1, 2, 3, *[0] * 12, 9]
        assert store.tidy() == 0
        with open_store(redis_server.url, 'shared', host_cache_dir=str(tmp_path)) as other:
            assert other.shared_memory('counts', 16, nothing)[2] == 3
            with pytest.raises(ConfigError, match='has 16 bytes, not 32'):
                other.shared_memory('counts', 32, nothing)
        assert store.shared_memory('others', 16, nothing)[0] == 0
    assert memory[1] == 2  # It stays valid.
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if name.endswith('.shared')]


def test_shared_memory_whose_fill_failed_does_not_exist(redis_server, tmp_path):
    def fail(memory):
        memory[0] = 1
        raise ValueError('no')

    with open_store(redis_server.url, 'shared-2', host_cache_dir=str(tmp_path)) as store:
        with pytest.raises(ValueError, match='no'):
            store.shared_memory('counts', 16, fail)
        assert store.shared_memory('counts', 16, nothing)[0] == 0


def test_shared_memory_without_room_or_host_cache_is_refused(redis_server, tmp_path):
    options = dict(host_cache_dir=str(tmp_path), host_cache_bytes=1 << 20)
    with open_store(redis_server.url, 'shared-3', **options) as store:
        with pytest.raises(NotEnoughSpace, match='no room'):
            store.shared_memory('counts', 2 << 20, nothing)
    with open_store(redis_server.url, 'shared-3', host_plane='off') as store:
        with pytest.raises(ConfigError, match="host_plane='auto'"):
            store.shared_memory('counts', 16, nothing)
