"""Golden keys of a Redis server and of a Redis Cluster."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Callable, Dict
from unittest import mock

import numpy as np
from golden_files import RawRedis, keys_of, pack, plain
from redis_cluster import RedisCluster
from redis_server import RedisServer

from ding_store.storage import open_store
from ding_store.storage.redis.store import RedisStore
from golden_makers.common import arrays_of, binary, fixed_names, small_parts, write_json


def make_server(golden: Path, work: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(small_parts())
        stack.enter_context(fixed_names())
        server = stack.enter_context(RedisServer(binary()))
        redis = stack.enter_context(closing(RawRedis(str(server.socket))))
        expected = fill_wire(server.url)
        write_json(golden / 'wire.json', keys_of(redis))
        write_json(golden / 'wire.expected.json', expected)
        redis.ask('FLUSHALL')
        stack.enter_context(
            mock.patch('ding_store.storage.shared_memory.cache_root.identity', return_value='this-host')
        )
        stack.enter_context(mock.patch('ding_store.storage.shared_memory.rings.FIRST_BYTES', 16 << 10))
        stack.enter_context(mock.patch('ding_store.storage.shared_memory.shared_values.SLOTS_FROM_BYTES', 1 << 10))
        expected = fill_host(server.url, work, lambda: write_json(golden / 'host.json', keys_of(redis)))
        write_json(golden / 'host.expected.json', expected)
        pack(work / 'files', golden / 'host.tar.xz')


def make_cluster(golden: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(small_parts())
        stack.enter_context(fixed_names())
        cluster = stack.enter_context(RedisCluster(binary()))
        expected = fill_wire(cluster.url())
        nodes = [stack.enter_context(closing(RawRedis(('127.0.0.1', node.port)))) for node in cluster.nodes]
        write_json(golden / 'wire.json', sorted(command for node in nodes for command in keys_of(node)))
        write_json(golden / 'wire.expected.json', expected)


def fill_wire(url: str) -> Dict[str, Any]:
    """Streams, values and counters of writers and readers that were killed: nothing is taken back, no writer leaves."""
    expected: Dict[str, Any] = {'streams': {}, 'values': {}, 'counters': {'started': 3}}

    def note(stream: str, sequence: int, header: Any, arrays: Any) -> None:
        entries = expected['streams'].setdefault(stream, [])
        entries.append([writer.writer, sequence, header, plain(arrays)])

    def put(name: str, version: int, arrays: Any) -> None:
        assert writer.put(name, {'version': version}, arrays) == version
        expected['values'][name] = [version, {'version': version}, plain(arrays)]

    options = {codec: {'compression': codec} for codec in ('lz4', 'zstd')}
    writer = RedisStore(url, 'golden', stream_options=options)
    reader = RedisStore(url, 'golden')
    for stream, count in (('plain', 4), ('lz4', 40), ('zstd', 40), ('parts', 80)):
        reader.register(stream, 'learner')
        for sequence in (1, 2, 3):
            header, arrays = {'number': sequence}, arrays_of(count + sequence)
            writer.append(stream, header, arrays)
            if sequence > 1:
                note(stream, sequence, header, arrays)
        first, *_ = reader.read(stream, max_entries=1)
        reader.ack(stream, 'learner', first.id)
    reader.register('plain', 'watcher', durable=False, start='now')
    put('small', 1, arrays_of(2))
    put('large', 1, arrays_of(80))
    put('large', 2, arrays_of(80))  # its parts are those of the version before
    put('large', 3, {**arrays_of(80), 'more': np.arange(150)})
    writer.add('started', 3)
    return expected


def fill_host(url: str, work: Path, dump: Callable[[], None]) -> Dict[str, Any]:
    """Entries and a value whose bytes are in files of this host, and some that were filled for another host."""
    cache = work / 'cache'
    cache.mkdir()
    expected: Dict[str, Any] = {'references': [], 'filled': []}
    with ExitStack() as stack:
        here = stack.enter_context(open_store(url, 'golden', host_cache_dir=str(cache)))
        there = stack.enter_context(open_store(url, 'golden', host_plane='off'))
        for stream in ('references', 'filled'):
            here.register(stream, 'learner')
            for sequence in (1, 2):
                here.append(stream, {'number': sequence}, arrays_of(20 * sequence))
                expected[stream].append([sequence, {'number': sequence}, plain(arrays_of(20 * sequence))])
        # The first entry of a writer goes over the wire, since the writer does not know the readers yet.
        there.register('filled', 'elsewhere')
        here.client.own_writer.check_stream('filled', wait_s=10.0)
        here.put('weights', {'version': 1}, arrays_of(500))
        expected['value'] = [1, {'version': 1}, plain(arrays_of(500))]
        dump()
        files = work / 'files'
        files.mkdir()
        for path in cache.rglob('*'):
            if path.is_file() and path.read_bytes()[:6] in (b'DSRING', b'DSSLOT'):
                shutil.copy(path, files)
    return expected
