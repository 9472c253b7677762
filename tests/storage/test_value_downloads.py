"""Values between hosts: fetched once per host, only what changed, and never half, whoever is killed meanwhile."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
from inside import cache_of
from processes import child
from proxy import DOWN, UP
from two_hosts import Host, is_mapped, two_hosts

from ding_store.errors import CorruptPayload
from ding_store.storage.encoding import value_parts
from ding_store.storage.encoding.framing import encode_pieces
from ding_store.storage.redis import values as redis_values
from ding_store.storage.shared_memory import download_lock
from ding_store.storage.shared_memory import value_downloads as copies
from ding_store.storage.shared_memory.download_lock import FetchLock
from ding_store.storage.shared_memory.mapped_files import claim, claim_within
from ding_store.storage.testing import WAIT_S, eventually

NAME = 'weights/main'
FROZEN, TRAINED = 1_000_000, 300_000  # floats
#: Of one version: the whole, and what changes.
WHOLE_BYTES, CHANGED_BYTES = 4 * (FROZEN + TRAINED), 4 * TRAINED
#: Of announcements, questions and replies.
TALK_BYTES = 100_000


def weights(number):
    frozen = np.random.default_rng(0).random(FROZEN, np.float32)
    return {'frozen': frozen, 'small': np.arange(10), 'trained': np.full(TRAINED, number, np.float32)}


def number_of(value):
    """Which version's bytes these are, checked to be of one only."""
    arrays, number = value.arrays, int(value.arrays['trained'][0])
    for name, expected in weights(number).items():
        assert (arrays[name] == expected).all(), name
    return number


@pytest.fixture
def hosts(redis_server, tmp_path):
    with two_hosts(redis_server, tmp_path) as both:
        yield both


def follow(host, versions):
    """A process that loads these versions and says which bytes it has."""

    def work(pipe):
        with host.open() as store:
            for version in versions:
                value = store.get(NAME, version - 1, WAIT_S)
                print(value.version, number_of(value), is_in_place(value), file=pipe)

    return work


def is_in_place(value):
    """Whether these are the bytes of a file."""
    return is_mapped(value.arrays['trained'], '.copies')


def test_four_processes_of_a_host_cause_one_download_per_version(hosts):
    here, there = hosts
    versions = range(1, 5)
    with here.open() as writer, contextlib.ExitStack() as stack, there.counted() as received:
        pipes = [stack.enter_context(child(follow(there, versions)))[1] for _ in range(4)]
        for version in versions:
            assert writer.put(NAME, {'iter': version}, weights(version)) == version
            assert [pipe.readline().split() for pipe in pipes] == [[str(version), str(version), 'True']] * 4
    # The first one whole, then what changed.
    expected = WHOLE_BYTES + 3 * CHANGED_BYTES
    assert expected <= received[0] < expected + TALK_BYTES


def test_unchanged_parts_are_sent_only_to_late_readers(hosts):
    here, there = hosts
    with here.open() as writer, there.open() as reader:
        writer.put(NAME, {}, weights(1))
        assert number_of(reader.get(NAME)) == 1  # From here on it is sent with each put.
        with here.counted(UP) as sent, there.counted() as received:
            for version in (2, 3, 4):
                writer.put(NAME, {}, weights(version))
                assert number_of(reader.get(NAME, version - 1, WAIT_S)) == version
        for counted in (sent, received):
            assert 3 * CHANGED_BYTES <= counted[0] < 3 * CHANGED_BYTES + TALK_BYTES
    late = Host(there.proxy, there.run, there.directory + '-late')
    with late.counted() as received, late.open() as reader:
        assert number_of(reader.get(NAME)) == 4
    assert WHOLE_BYTES <= received[0] < WHOLE_BYTES + TALK_BYTES


@pytest.mark.parametrize('transport', ['auto', 'off'])
def test_store_without_files_sends_only_what_changed(hosts, transport):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open(host_plane=transport) as reader:
        for version in (1, 2):
            with here.counted(UP) as sent, there.counted() as received:
                writer.put(NAME, {}, weights(version))
                assert number_of(reader.get(NAME)) == version
            expected = [WHOLE_BYTES if version == 1 else CHANGED_BYTES, WHOLE_BYTES]
            if transport == 'auto':
                expected[1] = expected[0]
            for counted, num_bytes in zip((sent[0], received[0]), expected):
                assert num_bytes <= counted < num_bytes + TALK_BYTES


def test_process_killed_during_a_download_wastes_only_its_bytes(hosts):
    """Again and again, at another byte each time: nobody sees a half, and the next one takes over at once."""
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as survivor:
        for version, moment in enumerate((20_000, 1_500_000, 2_500_000, 100_000), 1):
            writer.put(NAME, {}, {**weights(version), 'frozen': weights(0)['frozen'] + version})
            before, there.proxy.bytes_per_s = there.proxy.num_bytes[DOWN], 20e6
            with child(lambda pipe: there.open().get(NAME)) as (pid, pipe), ThreadPoolExecutor() as pool:
                eventually(lambda: there.proxy.num_bytes[DOWN] - before > moment, 'it is in mid-download')  # noqa: B023
                waiting = pool.submit(survivor.get, NAME, version - 1, WAIT_S)
                os.kill(pid, signal.SIGKILL)
                assert pipe.readline() == ''
                there.proxy.bytes_per_s = None
                value = waiting.result(WAIT_S)
            assert (value.version, value.arrays['trained'][-1]) == (version, version)
            assert (value.arrays['frozen'] == weights(0)['frozen'] + version).all()
            assert is_in_place(value)


def test_process_hung_in_a_download_delays_others_briefly(hosts):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as reader:
        writer.put(NAME, {}, weights(1))
        reader._values._copies._lock_of(NAME).patience_s = 0.1
        held = claim(cache_of(reader).fetch_path_of(NAME))
        value = reader.get(NAME)
        assert (number_of(value), is_in_place(value)) == (1, False)
        held.close()
        assert is_in_place(reader.get(NAME))


def test_process_stopped_in_a_download_delays_others_briefly(hosts, impatient):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as reader, ThreadPoolExecutor() as pool:
        writer.put(NAME, {}, weights(1))
        before, there.proxy.bytes_per_s = there.proxy.num_bytes[DOWN], 2e6
        with child(lambda pipe: there.open().get(NAME)) as (pid, _):
            eventually(lambda: there.proxy.num_bytes[DOWN] - before > 100_000, 'it is in mid-download')
            os.kill(pid, signal.SIGSTOP)
            there.proxy.bytes_per_s = None
            value = pool.submit(reader.get, NAME).result(WAIT_S)
            assert (number_of(value), is_in_place(value)) == (1, False)
        # It is over with the one that was stopped.
        eventually(lambda: is_in_place(reader.get(NAME)), 'it is shared again')


def test_fetch_lock_wait_lasts_while_its_holder_progresses(tmp_path):
    path, patience_s = str(tmp_path / 'lock'), 1.0
    open(path, 'w').close()
    first, until = claim(path), time.monotonic() + 1.5 * patience_s
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(claim_within, path, patience_s)
        while time.monotonic() < until:
            first.touch()
            assert not waiting.done()
        assert waiting.result(WAIT_S) is None
        first.close()


def test_fetch_lock_wait_ends_at_its_timeout(tmp_path):
    path = str(tmp_path / 'lock')
    open(path, 'w').close()
    first = claim(path)
    assert claim_within(path, 0.0) is claim_within(path, 0.05) is None
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(claim_within, path, WAIT_S)
        first.close()
        second = waiting.result(WAIT_S)
    assert claim(path) is None
    second.close()
    # The thread that waited in vain gives it back, too.
    eventually(lambda: claim(path) is not None, 'it is free')


def test_wait_for_a_hung_download_ends_and_later_ones_succeed(tmp_path, monkeypatch):
    patience = []

    def claim_patiently(path, patience_s, deadline):
        patience.append(patience_s)
        return claim_within(path, patience_s, deadline)

    monkeypatch.setattr(download_lock, 'claim_within', claim_patiently)
    path = tmp_path / 'lock'
    path.touch()
    ours, other = FetchLock(lambda: str(path)), FetchLock(lambda: str(path))

    def is_taken():
        with ours.taken() as held:
            return held is not None

    hung = claim(str(path))
    ours.patience_s = 0.05
    assert not is_taken()
    assert not is_taken()
    assert patience == [0.05, 0.0], 'it is known to hang'
    ours.patience_s = WAIT_S
    hung.close()
    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            with other.taken() as held:
                assert held is not None
                waiting = pool.submit(is_taken)
                assert not wait([waiting], 0.1).done
            assert waiting.result(WAIT_S)


def test_writer_given_up_early_is_awaited_by_patient_readers(tmp_path):
    path = tmp_path / 'lock'
    path.touch()
    ours = FetchLock(lambda: str(path), patience_s=WAIT_S)

    def is_taken(patience_s=None):
        with ours.taken(patience_s) as held:
            return held is not None

    slow = claim(str(path))
    assert not is_taken(0.05)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(is_taken)
        assert not wait([waiting], 0.1).done
        assert not is_taken(0.05)  # that nobody with less patience need wait is known meanwhile
        slow.close()
        assert waiting.result(WAIT_S)


def test_versions_that_are_held_do_not_change(hosts):
    here, there = hosts
    with here.open() as writer, there.open() as reader:
        held = []
        for version in range(1, 12):  # More than slots: the last ones are this process's own.
            writer.put(NAME, {}, weights(version))
            held.append(reader.get(NAME, version - 1, WAIT_S))
        assert [number_of(value) for value in held] == list(range(1, 12))
        assert [is_in_place(value) for value in held] == [True] * 8 + [False] * 3


def test_part_that_is_missing_or_damaged_is_never_read(hosts, redis_server):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as reader, redis_server.client() as client:
        writer.put(NAME, {}, weights(1))
        assert number_of(reader.get(NAME)) == 1
        writer.put(NAME, {}, weights(2))
        part = f'{writer.client.server._values._part_key(NAME, newest(writer)[-1].token)}{newest(writer)[-1].number}'
        content = bytearray(client.get(part))
        content[1000] ^= 1
        client.set(part, bytes(content))
        with pytest.raises(CorruptPayload, match=f"version 2 of value '{NAME}'"):
            reader.get(NAME, 1)
        client.delete(part)
        with pytest.raises(CorruptPayload, match=f"version 2 of value '{NAME}'.*missing"):
            reader.get(NAME, 1)
        # What its server lost, the writer sends again.
        assert writer.put(NAME, {}, weights(2)) == 3
        assert number_of(reader.get(NAME, 1)) == 2


def test_versions_replaced_during_their_fetch_are_skipped(hosts, monkeypatch, caplog):
    here, there = hosts
    transport = {'host_plane': 'off'}
    with here.open(**transport) as writer, there.open(**transport) as reader, there.open(**transport) as second:
        writer.put(NAME, {}, weights(0))
        resolver = reader._values._resolver
        fetch, calls = resolver._fetch, []

        def overtaken(name, listed):
            """Slow: the first part is there when the last one is gone."""
            assert len(calls) < 50, 'it never ends'
            calls.append(time.monotonic())
            for _ in range(2):
                assert writer.put(NAME, {}, weights(len(calls)))
            return fetch(name, listed)

        monkeypatch.setattr(resolver, '_fetch', overtaken)
        assert reader.get(NAME) is None
        assert len(calls) == 6
        assert reader.get(NAME, timeout_s=0.01) is None
        assert len([record for record in caplog.records if 'faster than' in record.message]) == 1
        assert second.get(NAME).version == writer.put(NAME, {}, weights(0)) - 1
        monkeypatch.setattr(resolver, '_fetch', fetch)
        assert number_of(reader.get(NAME)) == 0


def newest(store):
    return value_parts.unpack(store.client.get(NAME).payload).parts


def test_random_changes_of_values_all_arrive(hosts, redis_server, monkeypatch):
    """Any arrays change, in any order, in any size, by writers that take turns; no part outlives its use."""
    monkeypatch.setattr(value_parts, 'SHARED_BYTES', 1000)
    monkeypatch.setattr(value_parts, 'PART_BYTES', 4000)
    monkeypatch.setattr(redis_values, 'INLINE_BYTES', 1000)
    here, there = hosts
    random = np.random.default_rng(1)
    arrays = {str(i): random.random(int(size)) for i, size in enumerate(random.integers(0, 1500, 12))}
    with here.open(host_plane='off') as first, here.open() as second, there.open() as reader:
        for version in range(1, 60):
            for name in random.choice(list(arrays), 2):
                size = arrays[name].size if random.random() < 0.8 else int(random.integers(0, 1500))
                arrays[name] = random.random(size)
            if random.random() < 0.1:
                arrays = dict(sorted(arrays.items(), key=lambda item: random.random()))
            writer = second if version % 20 > 14 else first
            assert writer.put(NAME, {'n': 10**version}, arrays) == version
            value = reader.get(NAME, version - 1, WAIT_S)
            assert (value.version, value.header, list(value.arrays)) == (version, {'n': 10**version}, list(arrays))
            assert all(np.array_equal(value.arrays[name], arrays[name]) for name in arrays)
        with redis_server.client() as client:
            left = len(client.keys(f'ding:{{{here.run}/{NAME}/*:part:*'))
        assert left <= 2 * len(value_parts.unpack(second.client.get(NAME).payload).parts)
        assert second.delete(NAME)
    with redis_server.client() as client:
        assert client.keys(f'ding:{{{here.run}/{NAME}/*:part:*') == []


def test_small_unchanged_arrays_are_not_sent_again(hosts):
    """Every other one of many that are small enough to share parts; then others."""
    here, there = hosts
    count, size = 40, 25_000  # floats: 100 KB
    versions = [np.zeros(count, int)]
    with here.open(host_plane='off') as writer, there.open() as reader:
        for moving in [slice(0, None, 2)] * 8 + [slice(1, None, 2)] * 8:
            numbers = versions[-1].copy()
            numbers[moving] += 1
            versions.append(numbers)
            with here.counted(UP) as sent, there.counted() as received:
                writer.put(NAME, {}, {str(i): np.full(size, number, np.float32) for i, number in enumerate(numbers)})
                value = reader.get(NAME, len(versions) - 2)
            assert [set(array) for array in value.arrays.values()] == [{number} for number in numbers]
            assert max(sent[0], received[0]) < 4 * count * size + TALK_BYTES
            if len(versions) - 1 in (7, 8, 15, 16):
                assert 2 * count * size < min(sent[0], received[0])
                assert max(sent[0], received[0]) < 2 * count * size + TALK_BYTES


def test_lists_of_parts_survive_packing():
    pieces = encode_pieces({}, {'a': np.zeros(500_000), 'b': np.zeros(3), 'c': np.zeros(5), 'd': np.zeros(80_000)})
    sent = value_parts.SentParts(lambda token: f'{token}:')
    first, second = (number * 32 for number in 'ab')
    assert len(dict(sent.changed(pieces, first))) == 7  # the head, four of a, b with c, d
    contents = [one for _, contents in sent.changed(pieces, first) for one in contents]
    assert b''.join(contents) == b''.join(pieces.buffers)
    listed = sent.parts
    assert value_parts.unpack(listed.pack()) == listed
    assert listed.num_bytes == pieces.num_bytes
    sent.flush(True)
    assert dict(sent.changed(pieces, second)) == {}
    assert sent.parts == listed
    sent.flush(False)
    assert len(dict(sent.changed(pieces, second))) == 7
    assert sent.parts.stamp != listed.stamp
    packed = listed.pack()
    assert value_parts.unpack(b'DGW\x02whatever') is None
    for bad in (packed[:5], packed[:-1], packed + b'x', packed[:8] + bytes(8) + packed[16:], packed[:-1] + b'\xff'):
        with pytest.raises(CorruptPayload):
            value_parts.unpack(bad)


def test_finished_run_leaves_no_copies(hosts, tmp_path):
    here, there = hosts
    with here.open() as writer, there.open() as reader:
        writer.put(NAME, {}, weights(1))
        assert number_of(reader.get(NAME)) == 1
        assert len(list(tmp_path.rglob('*.copies'))) == 1
        reader.delete(NAME)
        assert list(tmp_path.rglob('*.copies')) == []
        writer.put(NAME, {}, weights(2))
        assert number_of(reader.get(NAME)) == 2
    assert list(tmp_path.rglob('*.copies')) == []


def test_threads_of_a_process_share_a_download(hosts):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open() as reader, ThreadPoolExecutor(4) as pool:
        writer.put(NAME, {}, weights(1))
        barrier = threading.Barrier(4)

        def get(_):
            barrier.wait(WAIT_S)
            return number_of(reader.get(NAME))

        with there.counted() as received:
            assert list(pool.map(get, range(4))) == [1] * 4
        assert received[0] < WHOLE_BYTES + TALK_BYTES


def test_reader_without_room_for_copies_uses_its_own_memory(hosts, caplog):
    here, there = hosts
    with here.open(host_plane='off') as writer, there.open(host_cache_bytes=1 << 20) as reader:
        for version in (1, 2):
            writer.put(NAME, {}, weights(version))
            assert number_of(reader.get(NAME, version - 1)) == version
    assert len([record for record in caplog.records if 'host_cache_bytes' in record.message]) == 1
    assert copies.logger.name in {record.name for record in caplog.records}
