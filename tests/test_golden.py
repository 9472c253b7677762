"""Files and Redis keys that earlier versions wrote are read, and calls that earlier clients sent get the same replies.

scripts/make_golden.py made the files of tests/golden. They are read-only: every test works on a copy.
"""

import hashlib
import json
import os
import random
from contextlib import closing
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List

import numpy as np
import pytest
import torch
from golden_files import GOLDEN, MANIFEST, RawRedis, counts_of, manifest_of, open_table, plain, rows_of, unpack
from needs import lacking
from redis_cluster import RedisCluster
from redis_server import RedisServer

from ding_store.buffer import RateLimiter, StoreBuffer
from ding_store.checkpoint import EXTRA, CheckpointDir, read_state
from ding_store.checkpoint.archive import check_state
from ding_store.middleware.checkpoint import random_states, set_random_states
from ding_store.storage import open_store
from ding_store.storage.encoding.compression import installed
from ding_store.storage.encoding.framing import decode
from ding_store.storage.redis.scripts import load_scripts
from ding_store.storage.shared_memory.ring import RingReader
from ding_store.storage.shared_memory.slots import SlotReader
from ding_store.storage.shared_memory.transports import is_reference
from ding_store.storage.shared_memory.transports import unpack as reference_of
from ding_store.storage.shared_memory.value_slots import SlotReference

#: Replies whose order is no promise of Redis.
UNORDERED = ('HGETALL', 'KEYS', 'SMEMBERS')
#: Commands that read a Redis stream.
READS = ('XRANGE', 'XREAD', 'XREVRANGE')


#: Views had names once, which kept their priorities. The table opens without them.
CRITIC = 'priorities of critic'


def cases(kind: str, ending: str) -> List[str]:
    return sorted(path.name[: -len(ending)] for path in (GOLDEN / kind).glob(f'*{ending}'))


def expected_of(kind: str, case: str) -> Any:
    return json.loads((GOLDEN / kind / f'{case}.expected.json').read_text())


def test_golden_files_are_those_of_the_manifest() -> None:
    assert manifest_of(GOLDEN) == (GOLDEN / MANIFEST).read_text()


@pytest.mark.parametrize('case', cases('tables', '.tar.xz'))
def test_golden_table_opens_with_its_rows(case: str, tmp_path: Path) -> None:
    expected = expected_of('tables', case)
    expected['counts'].pop(CRITIC, None)
    path = unpack(GOLDEN / 'tables' / f'{case}.tar.xz', tmp_path / 'table')
    for _ in range(2):  # The first opening may convert files, and must leave what it found.
        with closing(open_table(case, str(path))) as buffer:
            assert buffer.check() == []
            assert rows_of(buffer) == expected['rows']
            assert buffer.table.next_row == expected['next_row']
            assert buffer.committed == expected['committed']
            assert counts_of(case, buffer) == expected['counts']


#: A buffer with a path holds no Python objects.
SAVES = [(case, has_path) for case in cases('saves', '.save') for has_path in (False, 'objects' not in case)]


@pytest.mark.parametrize(('case', 'has_path'), sorted(set(SAVES)))
def test_golden_save_loads_with_its_rows(case: str, has_path: bool, tmp_path: Path) -> None:
    expected = expected_of('saves', case)
    limiter = RateLimiter(2, 1.0, 8.0, max_insert=4, max_sample=4) if 'limiter' in expected else None
    path = str(tmp_path / 'table') if has_path else None
    with closing(StoreBuffer(4, path=path, limiter=limiter)) as buffer:
        buffer.load_data(str(GOLDEN / 'saves' / f'{case}.save'))
        assert buffer.check() == []
        assert rows_of(buffer) == expected['rows']
        assert buffer.table.next_row == expected['next_row']
        assert limiter is None or limiter.state() == expected['limiter']


@pytest.fixture
def same_random() -> Iterator[None]:
    before = random_states()
    yield
    set_random_states(before)


@pytest.mark.usefixtures('same_random')
@pytest.mark.parametrize('case', cases('checkpoints', '.tar.xz'))
def test_golden_checkpoints_have_their_state(case: str, tmp_path: Path) -> None:
    expected = expected_of('checkpoints', case)
    path = unpack(GOLDEN / 'checkpoints' / f'{case}.tar.xz', tmp_path / 'checkpoints')
    directory = CheckpointDir(str(path), keep=2)
    assert directory.run == expected['run']
    assert names(directory.paths()) == files_of(expected['iterations'])
    for each in path.rglob('*.pth.tar'):
        check_state(str(each))
    found = directory.newest()
    assert found is not None
    newest, state = found
    assert newest == directory.paths()[-1]
    extra = state.pop(EXTRA)
    assert {key: plain(value) for key, value in state.items()} == expected['newest']
    set_random_states(extra.pop('random'))
    assert draws() == expected['draws']
    run = extra.pop('run')
    assert {key: plain(value) for key, value in extra.items()} == expected['extra']
    best = read_state(directory.file('best.pth.tar'))[EXTRA]
    assert {key: best[key] for key in expected['best']} == expected['best']
    assert best['run'] == run
    assert names(path.glob('previous/*.tar')) == ['best.pth.tar', *files_of(expected['previous'])]
    is_resumed = directory.begin()
    assert is_resumed == (expected['run'] is not None)
    # The checkpoints of a run that ended make way for the next run.
    moved = expected['previous' if is_resumed else 'iterations']
    assert names(path.glob('previous/*.tar')) == ['best.pth.tar', *files_of(moved)]


def files_of(iterations: List[int]) -> List[str]:
    return [f'iteration_{number}.pth.tar' for number in iterations]


def names(paths: Iterable[Any]) -> List[str]:
    return sorted(os.path.basename(path) for path in paths)


def draws() -> List[float]:
    return [random.random(), np.random.random_sample(), torch.rand(1).item()]


@pytest.mark.parametrize('case', cases('payloads', '.bin'))
def test_golden_payload_decodes_to_its_arrays(case: str) -> None:
    expected = json.loads((GOLDEN / 'payloads' / 'expected.json').read_text())[case]
    need_codec(expected['codec'])
    header, arrays = decode((GOLDEN / 'payloads' / f'{case}.bin').read_bytes())
    assert header == expected['header']
    assert plain(arrays) == expected['arrays']


def need_codec(name: Any) -> None:
    if name is not None and name not in installed():
        lacking(f'no {name}, which an extra of this name installs')


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[RawRedis]:
    """A connection to an empty server."""
    with closing(RawRedis(str(redis_server.socket))) as raw:
        raw.ask('FLUSHALL')
        yield raw
        raw.ask('FLUSHALL')


def load_keys(redis: RawRedis, case: str) -> List[List[str]]:
    commands: List[List[str]] = json.loads((GOLDEN / 'server' / f'{case}.json').read_text())
    for command in commands:
        reply = redis.ask(*command)
        assert 'error' not in (reply if isinstance(reply, dict) else {}), (command, reply)
    return commands


@pytest.mark.parametrize('stream', ['plain', 'lz4', 'zstd', 'parts'])
def test_golden_stream_of_a_server_is_read(stream: str, redis: RawRedis, redis_server: RedisServer) -> None:
    """As behind a restart of a server that kept its data: the server has another run_id."""
    need_codec(stream if stream in ('lz4', 'zstd') else None)
    load_keys(redis, 'wire')
    expected = expected_of('server', 'wire')['streams'][stream]
    with open_store(redis_server.url, 'golden', host_plane='off') as store:
        info = store.stream_info(stream)
        assert info is not None
        assert (info.last, info.floor, info.readers['learner'], info.durable['learner']) == (3, 1, 1, True)
        assert info.readers.get('watcher') == (3 if stream == 'plain' else None)
        entries = store.read(stream, store.register(stream, 'learner'))
        found = [[entry.writer, entry.sequence, entry.header, plain(dict(entry.arrays))] for entry in entries]
        assert found == expected
        assert store.append(stream, {}, {}).number == 4
        store.ack(stream, 'learner', store.read(stream, entries[-1].id)[-1].id)
        info = store.stream_info(stream)
        assert info is not None
        assert (info.last, info.floor, info.pending_bytes) == (4, 4, 0)
        assert redis.ask('KEYS', f'*{stream}/*part*') == []


def test_golden_values_and_counters_of_a_server_are_read(redis: RawRedis, redis_server: RedisServer) -> None:
    load_keys(redis, 'wire')
    expected = expected_of('server', 'wire')
    with open_store(redis_server.url, 'golden', host_plane='off') as store:
        for name, known in expected['values'].items():
            value = store.get(name)
            assert value is not None
            assert [value.version, value.header, plain(dict(value.arrays))] == known
            assert store.put(name, {}, {}) == value.version + 1
        info = store.info()
        assert info.counters == expected['counters']
        assert sorted(info.streams) == sorted(expected['streams'])


@pytest.fixture
def golden_cluster(redis_cluster: RedisCluster) -> Iterator[RedisCluster]:
    redis_cluster.flush()
    for command in json.loads((GOLDEN / 'cluster' / 'wire.json').read_text()):
        slot = int(redis_cluster.nodes[0].ask('CLUSTER', 'KEYSLOT', command[1]))
        redis_cluster.node_of(slot).raw.execute_command(*(word.encode('latin-1') for word in map(str, command)))
    yield redis_cluster
    redis_cluster.flush()


def test_golden_streams_of_a_cluster_are_read(golden_cluster: RedisCluster) -> None:
    expected = expected_of('cluster', 'wire')['streams']
    with open_store(golden_cluster.url(), 'golden', host_plane='off') as store:
        for stream in ('plain', 'parts'):
            entries = store.read(stream, store.register(stream, 'learner'))
            found = [[entry.writer, entry.sequence, entry.header, plain(dict(entry.arrays))] for entry in entries]
            assert found == expected[stream]
            assert store.append(stream, {}, {}).number == 4
            store.ack(stream, 'learner', store.read(stream, entries[-1].id)[-1].id)
            assert golden_cluster.keys(f'*{stream}/*part*') == []
        assert sorted(store.info().streams) == sorted(expected)


def test_golden_values_and_counters_of_a_cluster_are_read(golden_cluster: RedisCluster) -> None:
    expected = expected_of('cluster', 'wire')
    with open_store(golden_cluster.url(), 'golden', host_plane='off') as store:
        for name, known in expected['values'].items():
            value = store.get(name)
            assert value is not None
            assert [value.version, value.header, plain(dict(value.arrays))] == known
            assert store.put(name, {}, {}) == value.version + 1
        assert store.info().counters == expected['counters']


def test_golden_host_plane_references_lead_to_their_bytes(tmp_path: Path) -> None:
    commands = json.loads((GOLDEN / 'server' / 'host.json').read_text())
    files = unpack(GOLDEN / 'server' / 'host.tar.xz', tmp_path / 'files')
    expected = expected_of('server', 'host')
    (weights,) = fields_of(commands, 'weights', 'value')
    place = SlotReference.unpack(weights['r'])
    payload = SlotReader(file_of(files, place.file)).lease(place.slot, place.stamp)
    assert payload is not None
    header, arrays = decode(payload, verify=False)  # slots have stamps instead of checksums
    assert [1, header, plain(arrays)] == expected['value']
    num_references = 0
    for stream in ('references', 'filled'):
        found = []
        for fields in fields_of(commands, stream, 'log'):
            data: Any = fields['p']
            if is_reference(data):
                num_references += 1
                reference = reference_of(data)
                ring = RingReader(file_of(files, reference.file))
                data = ring.view(reference.start, reference.length)
                reference.check_head(data)
                assert ring.is_valid(reference.start)
            header, arrays = decode(data, verify=data is fields['p'])
            found.append([int(fields['s']), header, plain(arrays)])
        assert found == expected[stream]
    assert num_references == 2


def test_golden_backfilled_entries_are_read_on_other_hosts(redis: RawRedis, redis_server: RedisServer) -> None:
    load_keys(redis, 'host')
    with open_store(redis_server.url, 'golden', host_plane='off') as store:
        entries = store.read('filled', store.register('filled', 'elsewhere'))
        found = [[entry.sequence, entry.header, plain(dict(entry.arrays))] for entry in entries]
        assert found == expected_of('server', 'host')['filled']


def fields_of(commands: List[List[str]], name: str, part: str) -> List[Dict[str, bytes]]:
    """Of each entry of a Redis stream."""
    key = f'ding:{{golden/{name}/0}}:{part}'
    found = [command[3:] for command in commands if command[:2] == ['XADD', key]]
    return [dict(zip(words[::2], (word.encode('latin-1') for word in words[1::2]))) for words in found]


def file_of(directory: Path, name: str) -> str:
    (path,) = directory.rglob(f'*{name}*')
    return str(path)


def test_golden_script_calls_get_their_recorded_replies(redis: RawRedis) -> None:
    """
    Clients sent these commands to one server, in this order. Reads of ``wants`` are left out, since its ids are times
    of the server. Replies without an order are compared as sets.
    """
    scripts = {name: script.text for name, script in load_scripts().items()}
    shas = {}
    for name, text in scripts.items():
        shas[name] = redis.ask('SCRIPT', 'LOAD', text)
        assert shas[name] == hashlib.sha1(text, usedforsecurity=False).hexdigest()
    part, num_replayed = '', 0
    for number, call in enumerate(json.loads((GOLDEN / 'scripts' / 'calls.json').read_text()), 1):
        if 'part' in call:
            part = call['part']
            continue
        if 'script' in call:
            name, keys, arguments = call['script'], call['keys'], call['arguments']
            words = ['EVALSHA', shas[name], len(keys), *keys, *arguments]
            num_replayed += 1
        else:
            words = call['command']
            name = words[0]
            if name in READS and any(word.endswith(':wants') for word in words):
                continue
        reply = redis.ask(*words)
        found, known = comparable(words, reply), comparable(words, call['reply'])
        assert found == known, f'call {number}, in "{part}": {name} {[str(word)[:60] for word in words[1:]]}'
    assert num_replayed >= 100


def comparable(words: List[Any], reply: Any) -> Any:
    command = words[0].upper()
    if command not in UNORDERED or not isinstance(reply, list):
        return reply
    width = 2 if command == 'HGETALL' else 1
    return sorted(reply[at : at + width] for at in range(0, len(reply), width))
