"""DI-store's client, in DI-engine's own code with DI_STORE=on: what its collector sends, its learner reads."""

import importlib
import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from jobs import environment
from zygote import zygote

from ding_store import di_store
from ding_store.di_store import Client
from ding_store.errors import ConfigError, CorruptPayload, ObjectGone
from ding_store.storage import open_store

STEP = {'obs': torch.arange(4.0), 'action': torch.tensor([1]), 'reward': torch.tensor([0.5]), 'done': False}


def sample(number):
    """Return three steps, as a collector sends them."""
    return [{**STEP, 'obs': STEP['obs'] + number + step} for step in range(3)]


@pytest.fixture
def client(redis_server, tmp_path):
    (tmp_path / 'di_store.yaml').write_text(f'url: {redis_server.url}\nrun: di{os.getpid()}\nmax_bytes: 10000000\n')
    client = Client(str(tmp_path / 'di_store.yaml'))
    yield client
    client.close()


def test_client_returns_what_was_put(client):
    assert client.get(client.put(b'compressed')) == b'compressed'
    for number in range(2):
        ref = client.put(sample(number))
        found = client.get(ref)
        assert [list(step) for step in found] == [list(STEP)] * 3
        assert torch.equal(found[2]['obs'], STEP['obs'] + number + 2)
        assert found[0]['done'] is False
        found[0]['obs'][:] = 7  # the caller's own
        assert torch.equal(client.get(ref)[0]['obs'], STEP['obs'] + number)
    assert np.array_equal(client.get(client.put({'a': np.eye(2), 'b': None}))['a'], np.eye(2))
    client.delete([ref])
    with pytest.raises(ObjectGone, match='deleted'):
        client.get(ref)


def test_client_refuses_what_it_cannot_do(client, redis_server):
    with pytest.raises(TypeError, match='compressor'):
        client.put({'name': 'a', 'x': torch.ones(1)})
    with pytest.raises(ConfigError, match='groups of hosts'):
        client.register_group('actors')
    client.put(b'')
    with open_store(redis_server.url, f'di{os.getpid()}') as store:
        with pytest.raises(CorruptPayload, match='not put by a Client'):
            client.get(store.objects().put({'x': np.ones(3)}))


def test_wrong_config_file_is_refused(tmp_path):
    (tmp_path / 'di_store.yaml').write_text('- a\n')
    with pytest.raises(ConfigError, match='must map names'):
        Client(str(tmp_path / 'di_store.yaml'))


def use_di_engine(role, file):
    """A process of DI-engine with DI_STORE=on, as its ``ding -m parallel`` starts it."""
    sys.path.insert(0, di_store.path)
    os.environ['DI_STORE'] = 'on'
    from ding.utils import COMM_COLLECTOR_REGISTRY, COMM_LEARNER_REGISTRY, file_helper
    from ding.utils.compression_helper import get_data_compressor, get_data_decompressor

    importlib.reload(file_helper)
    if role == 'collector':
        COMM_COLLECTOR_REGISTRY.pop('flask_fs')
        comm = importlib.reload(importlib.import_module('ding.worker.collector.comm.flask_fs_collector'))
        collector = types.SimpleNamespace(_collector_close_flag=False, _path_data='.')
        refs = []
        for number, name in enumerate(['none', 'lz4', 'zlib']):
            data = get_data_compressor(name)(sample(number))
            refs.append([name, comm.FlaskFileSystemCollector.send_stepdata(collector, 'unused', data)])
        with open(file, 'w') as out:
            json.dump(refs, out)  # DI-engine sends its metadata as JSON
        sys.stdin.read()  # it lives until the learner is done
        return
    COMM_LEARNER_REGISTRY.pop('flask_fs')
    comm = importlib.reload(importlib.import_module('ding.worker.learner.comm.flask_fs_learner'))
    with open(file) as found:
        refs = json.load(found)
    for number, (name, ref) in enumerate(refs):
        meta = {'unroll_split_begin': 1, 'unroll_len': 1, 'priority': 1.0}
        step = comm.FlaskFileSystemLearner.load_data_fn(ref, meta, get_data_decompressor(name))
        assert torch.equal(step['obs'], STEP['obs'] + number + 1)
        assert step['priority'] == 1.0
        with pytest.raises(ObjectGone, match='deleted'):  # DI-engine deletes what it has read
            file_helper.read_from_di_store(ref)
    print('all read')  # noqa: T201


def test_di_engine_sends_data_through_the_store(redis_server, tmp_path):
    """Between a collector and a learner of DI-engine."""
    env = {**environment(), 'DING_STORE_URL': redis_server.url, 'DING_STORE_RUN': f'parallel{os.getpid()}'}
    with open_store(redis_server.url, env['DING_STORE_RUN']):  # the run's objects stay while it is open
        for role in ('collector', 'learner'):
            with open(tmp_path / 'out', 'w') as out:
                arguments = [role, str(tmp_path / 'refs')]
                child = zygote().call('test_di_store', 'use_di_engine', arguments, tmp_path, env, out.fileno())
                assert child.wait(120) == 0, (tmp_path / 'out').read_text()
    assert 'Enable DI-store' in (tmp_path / 'out').read_text()
    assert 'all read' in (tmp_path / 'out').read_text()


def test_command_prints_the_directory_of_the_module(tmp_path):
    command = [sys.executable, '-m', 'ding_store.di_store']
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()
    assert printed == di_store.path
    assert 'di_store.py' in os.listdir(printed)
