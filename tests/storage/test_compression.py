"""Compression: the same entries in fewer bytes, over the wire only; what is no such payload is refused."""

import importlib.util
import itertools
import struct
import sys

import numpy as np
import pytest
from needs import lacking

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, CorruptPayload
from ding_store.storage import Reader, open_store
from ding_store.storage.encoding import compression
from ding_store.storage.encoding import framing as wire
from ding_store.storage.encoding.checksum import checksum
from ding_store.storage.encoding.compression import AUTO, CODECS, MIN_BYTES, Choice
from ding_store.storage.options import HostOptions
from ding_store.storage.protocol import StoredEntry
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.testing import WAIT_S, chunk, number_of

_RUNS = (f'compressed{number}' for number in itertools.count())
#: As of a game: most of a frame is that before it.
FRAMES = {'obs': np.random.default_rng(0).integers(0, 256, (84, 84), np.uint8).repeat(40, 0), 'action': np.arange(40)}
_PREFIX = struct.Struct('<4sIQQI')


@pytest.fixture(params=list(CODECS))
def codec(request):
    package = CODECS[request.param].package
    if importlib.util.find_spec(package) is None:
        lacking(f'no {package}: pip install {package}')
    return request.param


@pytest.fixture
def gone(monkeypatch):
    """Take a codec's package away."""
    return lambda codec: monkeypatch.setitem(sys.modules, CODECS[codec].module, None)


def sealed(payload, num_bytes=None, number=None):
    """A compressed payload that lies, with the right checksum."""
    magic, _, _, was_bytes, was_number = _PREFIX.unpack_from(payload)
    lies = (was_bytes if num_bytes is None else num_bytes, was_number if number is None else number)
    tail = _PREFIX.pack(magic, 0, len(payload), *lies)[8:] + payload[_PREFIX.size :]
    return magic + struct.pack('<I', checksum([tail], len(payload))) + tail


def test_compressed_payload_is_shorter_and_survives(codec):
    payload = wire.encode({'env_step': 3}, FRAMES, codec)
    assert len(payload) < len(wire.encode({'env_step': 3}, FRAMES)) / 2
    header, arrays = wire.decode(payload)
    assert header == {'env_step': 3}
    for name, array in FRAMES.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert not arrays[name].flags.writeable
    assert wire.decode(wire.seal(wire.encode({}, FRAMES), codec))[1]['obs'].sum() == FRAMES['obs'].sum()


def test_payload_that_does_not_shrink_is_not_compressed(codec):
    noise = {'x': np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)}
    small = {'x': np.zeros(MIN_BYTES // 2, np.uint8)}
    for arrays in (noise, small):
        assert wire.encode({}, arrays, codec) == wire.encode({}, arrays)


def test_compressed_payload_changed_or_truncated_is_refused(codec):
    payload = wire.encode({}, chunk(7, 1000), codec)
    for position in range(len(payload)):
        changed = bytearray(payload)
        changed[position] ^= 1 + position % 255
        for damaged in (bytes(changed), payload[:position]):
            with pytest.raises(CorruptPayload):
                wire.decode(damaged)


@pytest.mark.parametrize(
    'lie', [{'num_bytes': 10}, {'num_bytes': 1 << 62}, {'num_bytes': 1_999_999_999}, {'number': 9}]
)
def test_compressed_payload_with_false_sizes_is_refused(codec, lie):
    payload = wire.encode({}, chunk(7, 1000), codec)
    assert number_of_array(wire.decode(sealed(payload))[1]) == 7
    with pytest.raises(CorruptPayload):
        wire.decode(sealed(payload, **lie))


def number_of_array(arrays):
    return int(arrays['x'][0])


def test_payload_compressed_twice_is_refused(codec):
    inner = wire.encode({}, FRAMES, codec)
    twice = wire.seal(inner + bytes(100_000), codec)
    with pytest.raises(CorruptPayload):
        wire.decode(twice)


def test_missing_package_is_refused_when_the_store_is_opened(codec, gone):
    gone(codec)
    for options in ({'compression': codec}, {'stream_options': {'s': {'compression': codec}}}):
        with pytest.raises(ConfigError, match=f'pip install {CODECS[codec].package}'):
            open_store('memory://', **options)


def test_unknown_codec_is_refused():
    with pytest.raises(ConfigError, match="'gzip'.*auto.*lz4, zstd"):
        open_store('memory://', compression='gzip')


def test_reader_without_the_package_stops_and_skips_nothing(codec, monkeypatch):
    with open_store('memory://', compression=codec) as store:
        reader = Reader(store, 's', 'learner', on_corrupt='skip')
        store.append('s', {}, chunk(1, 1000))
        with monkeypatch.context() as without:
            without.setitem(sys.modules, CODECS[codec].module, None)
            for _ in range(2):
                with pytest.raises(ConfigError, match=f'pip install {CODECS[codec].package}'):
                    reader.read()
        assert [number_of(entry) for entry in reader.read()] == [1]
        assert (reader.num_corrupt, reader.num_lost) == (0, 0)


def test_stream_of_a_server_holds_fewer_bytes(codec, redis_server):
    special = {'raw': {'compression': None}}
    with RedisStore(redis_server.url, next(_RUNS), compression=codec, stream_options=special) as store:
        for stream in ('s', 'raw'):
            store.append(stream, {}, FRAMES)  # Its payload is in parts, also when compressed.
            (entry,) = store.read(stream)
            np.testing.assert_array_equal(entry.arrays['obs'], FRAMES['obs'])
        streams = store.info().streams
        assert streams['s'].pending_bytes < streams['raw'].pending_bytes / 2
        store.clear()


def test_host_plane_compresses_only_backfilled_payloads(codec, redis_server, tmp_path):
    run, server = next(_RUNS), redis_server.url

    def opened(directory):
        host = HostOptions(host_cache_dir=str(tmp_path / directory))
        return RedisStore(server, run, host=host, compression=codec, check_every_s=0.1)

    with opened('here') as writer, opened('here') as near, opened('there') as far:
        reader = Reader(near, 's', 'near')
        writer.append('s', {}, FRAMES)
        writer.append('s', {}, FRAMES)
        assert writer.info().streams['s'].host == near.host
        (_, second) = reader.read()
        assert second.guard is not None
        np.testing.assert_array_equal(second.arrays['obs'], FRAMES['obs'])
        late = Reader(far, 's', 'late')
        entries = []
        while len(entries) < 2:
            found = late.read(timeout_s=WAIT_S)
            assert found
            entries += found
        np.testing.assert_array_equal(entries[1].arrays['obs'], FRAMES['obs'])
        filled = far.client.wait_for_backfill('s', StoredEntry(second.id, second.writer, second.sequence, b''), WAIT_S)
        assert len(filled) < FRAMES['obs'].nbytes / 2
        writer.clear()


def test_entry_above_the_ring_size_is_compressed_on_one_host(codec, redis_server, tmp_path):
    """Rings have room for a quarter more than the stream may hold; what is larger than that went over the wire."""
    limit = int(FRAMES['obs'].nbytes / 1.1)
    options = dict(host=HostOptions(host_cache_dir=str(tmp_path)), compression=codec, max_pending_bytes=limit)
    with RedisStore(redis_server.url, next(_RUNS), **options) as store:
        reader = Reader(store, 's', 'near')
        store.append('s', {}, {})
        store.append('s', {}, {})
        assert store.info().streams['s'].host == store.host
        store.append('s', {}, FRAMES)
        np.testing.assert_array_equal(reader.read()[-1].arrays['obs'], FRAMES['obs'])
        store.clear()


@pytest.fixture
def lz4():
    if not CODECS['lz4'].is_installed:
        lacking('no lz4: pip install lz4')


class TestByItself:
    """``compression='auto'``, which is the default of a config."""

    def sent(self, store):
        """Bytes of one entry more."""
        before = store.stream_info('s')
        store.append('s', {}, FRAMES)
        return store.stream_info('s').pending_bytes - (before.pending_bytes if before else 0)

    def test_compression_starts_with_the_first_entry(self, lz4, redis_server):
        with RedisStore(redis_server.url, next(_RUNS), compression=AUTO) as store:
            assert self.sent(store) < FRAMES['obs'].nbytes / 2
            np.testing.assert_array_equal(store.read('s')[0].arrays['obs'], FRAMES['obs'])
            store.clear()

    def test_memory_store_compresses_nothing(self, lz4):
        with open_store('memory://', compression=AUTO) as store:
            assert self.sent(store) > FRAMES['obs'].nbytes

    def test_reader_without_the_codec_leaves_its_entries(self, lz4, redis_server, monkeypatch):
        with RedisStore(redis_server.url, next(_RUNS), compression=AUTO) as store:
            store.append('s', {}, chunk(1))
            store.append('s', {}, FRAMES)
            with monkeypatch.context() as without:
                without.setitem(sys.modules, 'lz4', None)
                with RedisStore(redis_server.url, store.run) as lacking_one:
                    reader = Reader(lacking_one, 's', 'learner', on_corrupt='skip')
                    for _ in range(2):
                        with pytest.raises(ConfigError, match="'lz4'.*pip install lz4"):
                            reader.read()
                    reader.ack()
                    assert (reader.num_corrupt, reader.num_lost) == (0, 0)
            reader = Reader(store, 's', 'learner')
            (first, second) = reader.read()
            assert number_of(first) == 1
            np.testing.assert_array_equal(second.arrays['obs'], FRAMES['obs'])
            store.clear()

    def test_compression_package_that_is_broken_is_not_installed(self, lz4, monkeypatch):
        def compress(payload):
            raise ImportError('lz4.block')

        monkeypatch.setattr(CODECS['lz4'], 'compress', compress)
        assert 'lz4' not in compression.installed.__wrapped__()
        payload = wire.encode({}, FRAMES)
        monkeypatch.undo()
        data = wire.seal(payload, 'lz4')
        monkeypatch.setattr(CODECS['lz4'], 'decompress', lambda *arguments: compress(arguments))
        with pytest.raises(ConfigError, match='does not load'):
            wire.decode(data)

    def test_compression_without_the_package_is_not_chosen(self, redis_server, monkeypatch):
        monkeypatch.setattr(compression, 'installed', lambda: ())
        with RedisStore(redis_server.url, next(_RUNS), compression=AUTO) as store:
            Reader(store, 's', 'learner')
            store.append('s', {}, chunk(1))
            assert self.sent(store) > FRAMES['obs'].nbytes
            store.clear()

    def test_compression_that_does_not_shrink_is_rarely_tried(self, lz4, redis_server, monkeypatch):
        tried = []
        compress = CODECS['lz4'].compress
        monkeypatch.setattr(CODECS['lz4'], 'compress', lambda payload: tried.append(1) or compress(payload))
        noise = {'x': np.random.default_rng(0).integers(0, 256, 50_000, np.uint8)}
        with RedisStore(redis_server.url, next(_RUNS), compression=AUTO) as store:
            Reader(store, 's', 'learner')
            store.append('s', {}, chunk(1))
            for _ in range(100):
                store.append('s', {}, noise)
            assert len(tried) == 4
            store.clear()

    def test_compression_choice_follows_measured_ratios(self, monkeypatch):
        monkeypatch.setattr(compression, 'installed', lambda: ('lz4', 'zstd'))
        choice = Choice()
        assert [choice.codec(size) for size in (1000, 100_000)] == [None, 'lz4']
        choice.note(100_000, 70_000)
        assert choice.codec(100_000) == 'lz4'
        choice.note(100_000, 90_000)
        assert [choice.codec(100_000) for _ in range(33)] == [None] * 32 + ['lz4']


def test_compression_key_of_a_config_reaches_the_stream(codec, redis_server):
    config = StoreConfig.from_block({'compression': codec, 'url': redis_server.url, 'run': next(_RUNS)})
    with open_store(config.url, config.run, host_plane='off', **config.open_options()) as store:
        store.append('experience', {}, FRAMES)
        assert store.info().streams['experience'].pending_bytes < FRAMES['obs'].nbytes / 2
        store.clear()
