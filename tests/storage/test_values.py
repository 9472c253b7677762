"""Values on the host plane: who can read which version, whoever dies, is elsewhere, or comes late."""

import gc
import itertools
import os
import pathlib
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import redis
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from inside import all_slots_of, cache_of, num_slots_of, set_patience, slot_file_of, slots_of, without_backfills
from processes import child

from ding_store.errors import (
    CorruptPayload,
    NotEnoughSpace,
    PayloadLost,
    ServerFull,
    StoreError,
    StoreUnavailable,
    VersionConflict,
)
from ding_store.storage import open_store
from ding_store.storage.encoding.framing import encode_pieces
from ding_store.storage.memory.store import MemoryStore
from ding_store.storage.options import HostOptions
from ding_store.storage.redis.scripts import Command
from ding_store.storage.redis.server_session import ServerSession
from ding_store.storage.redis.store import RedisStore
from ding_store.storage.shared_memory import shared_values, slots
from ding_store.storage.shared_memory.slots import SlotWriter
from ding_store.storage.testing import WAIT_S, eventually

_RUNS = (f'values{number}' for number in itertools.count())
NAME = 'weights/main'
LARGE = 200_000  # floats


def weights(number, size=LARGE):
    return {'a': np.full(size, number, np.float32), 'b': np.full(3, number, np.int64)}


def number_of(value):
    """Which version's bytes these are, checked to be of one only."""
    a, b = value.arrays['a'], value.arrays['b']
    assert (a == a[0]).all()
    assert (b == a[0]).all()
    return int(b[0])


def test_value_too_large_to_travel_is_refused_by_its_put(redis_server, tmp_path, monkeypatch):
    """Also where all readers so far are on this host: one elsewhere would wait for it in vain."""
    with open_store(redis_server.url, next(_RUNS), host_cache_dir=str(tmp_path)) as store:
        assert store.put(NAME, {}, weights(1)) == 1
        monkeypatch.setattr(store.client.server, 'max_payload_bytes', 4 * LARGE)
        with pytest.raises(NotEnoughSpace, match=f"value '{NAME}' has 80.* bytes, and the limit is 800000"):
            store.put(NAME, {}, weights(2))
        assert store.put(NAME, {}, weights(3, LARGE - 1000)) == 2
        assert number_of(store.get(NAME)) == 3


def test_backfill_that_fails_is_logged_once(redis_server, tmp_path, monkeypatch, caplog):
    run = next(_RUNS)
    with open_store(redis_server.url, run, host_cache_dir=str(tmp_path)) as store:
        store.put(NAME, {}, weights(1))

        def refused(*arguments):
            refused.count += 1
            raise StoreError('the server says no')

        refused.count = 0
        monkeypatch.setattr(store.client.server, 'backfill_version', refused)
        with open_store(redis_server.url, run, host_plane='off') as elsewhere:
            elsewhere.client.server.request_version(NAME)
            eventually(lambda: refused.count > 1, 'it is tried again')
            monkeypatch.undo()
            assert number_of(elsewhere.get(NAME, timeout_s=WAIT_S)) == 1
    assert caplog.text.count('readers on other hosts get no new versions') == 1
    assert 'the server says no' in caplog.text


@pytest.fixture
def opened(redis_server, tmp_path):
    """``opened()``: a store on this host; ``host='b'``: on another one; ``host=None``: without a host cache."""
    run, stores = next(_RUNS), []

    def open_one(host='a', **options):
        transport = {'host_plane': 'off'} if host is None else {'host_cache_dir': str(tmp_path / host)}
        stores.append(open_store(redis_server.url, run, **transport, **options))
        return stores[-1]

    yield open_one
    for store in stores[::-1]:
        store.close()


def in_slot(store, name=NAME):
    """Whether the newest version is in a slot, and whether its payload is in the store as well."""
    found = store.client.get(name)
    return bool(found.reference), bool(found.payload)


def files_of(tmp_path, host='a'):
    return sorted(str(path) for path in (tmp_path / host).rglob('*.slots'))


def test_value_on_one_host_sends_no_payload_to_the_server(opened):
    writer, reader = opened(), opened()
    for number in range(1, 6):
        assert writer.put(NAME, {'iter': number}, weights(number)) == number
        value = reader.get(NAME, newer_than=number - 1)
        assert (value.version, value.header, number_of(value)) == (number, {'iter': number}, number)
        assert in_slot(writer) == (True, False)
    assert reader.get(NAME, newer_than=5) is None
    assert number_of(opened().get(NAME)) == 5  # a late joiner


def test_small_values_travel_in_their_announcement(opened):
    writer = opened()
    writer.put(NAME, {}, weights(1, 100))
    assert in_slot(writer) == (False, True)
    assert number_of(opened(None).get(NAME)) == 1


def test_waiting_reader_is_woken(opened):
    writer, reader = opened(), opened()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(reader.get, NAME, 0, WAIT_S)
        writer.put(NAME, {}, weights(1))
        assert number_of(waiting.result(WAIT_S)) == 1


def test_put_is_one_command_for_any_number_of_readers(opened, redis_server):
    client = redis.Redis.from_url(redis_server.url)
    writer, readers, sent = opened(), [opened() for _ in range(6)], []
    writer.put(NAME, {}, weights(1))
    assert {number_of(reader.get(NAME)) for reader in readers} == {1}

    def figure(section, *names):
        found = client.info(section)
        for name in names:
            found = found[name]
        return found

    alone = figure('clients', 'blocked_clients')
    with ThreadPoolExecutor() as pool:
        for number, those in ((2, readers[:1]), (3, readers)):
            found = [pool.submit(reader.get, NAME, number - 1, WAIT_S) for reader in those]
            eventually(lambda those=those: figure('clients', 'blocked_clients') >= alone + len(those), 'readers wait')
            before = figure('commandstats', 'cmdstat_evalsha', 'calls')
            writer.put(NAME, {}, weights(number))
            assert {number_of(each.result(WAIT_S)) for each in found} == {number}
            sent.append(figure('commandstats', 'cmdstat_evalsha', 'calls') - before)
    assert sent == [1, 1]


def test_held_versions_do_not_change(opened, tmp_path):
    writer, reader = opened(), opened()
    held = []
    for number in range(1, 12):
        writer.put(NAME, {}, weights(number))
        held.append(reader.get(NAME))
    assert [number_of(value) for value in held] == list(range(1, 12))
    assert [in_slot(writer), number_of(opened().get(NAME))] == [(False, True), 11]  # More versions than slots.
    held.clear()
    gc.collect()
    writer.put(NAME, {}, weights(12))
    assert in_slot(writer) == (True, False)
    assert len(files_of(tmp_path)) == 1


def test_growing_values_get_new_files(opened, tmp_path):
    writer, reader = opened(), opened()
    for number, size in ((1, LARGE), (2, 2 * LARGE), (3, LARGE // 2), (4, 8 * LARGE)):
        writer.put(NAME, {}, weights(number, size))
        value = reader.get(NAME, number - 1)
        assert (number_of(value), len(value.arrays['a'])) == (number, size)
    assert len(files_of(tmp_path)) == 1


@pytest.mark.parametrize('where', ['b', None])
def test_reader_on_another_host_gets_the_newest_and_later(opened, where):
    writer, near, far = opened(), opened(), opened(where)
    writer.put(NAME, {}, weights(1))
    assert in_slot(writer) == (True, False)
    assert number_of(far.get(NAME)) == 1
    for number in range(2, 5):
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(store.get, NAME, number - 1, WAIT_S) for store in (near, far)]
            writer.put(NAME, {}, weights(number))
            assert [number_of(one.result(WAIT_S)) for one in waiting] == [number] * 2
    eventually(lambda: in_slot(writer) == (True, True), 'the payload is there beside the slot')
    assert number_of(opened(where).get(NAME)) == 4


def test_reader_on_another_host_follows_a_fast_writer(opened):
    writer, far, done = opened(), opened('b'), threading.Event()

    def put():
        number = 0
        while not done.is_set():
            number += 1
            writer.put(NAME, {}, weights(number))
        return number

    with ThreadPoolExecutor() as pool:
        last, seen = pool.submit(put), []
        try:
            while len(seen) < 20:
                value = far.get(NAME, seen[-1] if seen else 0, WAIT_S)
                assert number_of(value) == value.version
                seen.append(value.version)
        finally:
            done.set()
        last = last.result(WAIT_S)
    assert seen == sorted(set(seen))
    assert number_of(far.get(NAME)) == last


def test_removed_slot_file_is_replaced_by_its_writer(opened, tmp_path):
    writer = opened()
    writer.put(NAME, {}, weights(1))
    for path in files_of(tmp_path):
        os.unlink(path)
    assert number_of(opened().get(NAME)) == 1  # over the wire
    writer.put(NAME, {}, weights(2))
    assert len(files_of(tmp_path)) == 1
    assert number_of(opened().get(NAME)) == 2


def test_removed_directory_sends_values_over_the_wire(opened, tmp_path):
    writer, reader = opened(), opened()
    writer.put(NAME, {}, weights(1))
    shutil.rmtree(tmp_path / 'a')
    assert number_of(reader.get(NAME)) == 1
    for number in (2, 3):
        writer.put(NAME, {}, weights(number))
        assert in_slot(writer) == (False, True)
        assert number_of(reader.get(NAME)) == number


def test_full_cache_sends_values_over_the_wire(opened, caplog):
    writer = opened(host_cache_bytes=1 << 20)
    for number in (1, 2):
        writer.put(NAME, {}, weights(number))
        assert in_slot(writer) == (False, True)
    assert number_of(opened().get(NAME)) == 2
    assert len([record for record in caplog.records if 'host_cache_bytes' in record.message]) == 1


def test_closed_writer_leaves_its_newest_version_to_all(opened, tmp_path):
    writer, held = opened(), None
    for number in (1, 2):
        writer.put(NAME, {}, weights(number))
    held = opened().get(NAME)
    writer.close()
    assert files_of(tmp_path) == []
    assert [number_of(opened(host).get(NAME)) for host in ('a', 'b', None)] == [2, 2, 2]
    assert number_of(held) == 2


def test_closed_writer_of_a_replaced_version_sends_nothing(opened):
    first, second = opened(), opened()
    first.put(NAME, {}, weights(1))
    second.put(NAME, {}, weights(2))
    first.close()
    assert in_slot(second) == (True, False)
    assert number_of(opened().get(NAME)) == 2


def put_and_wait(open_one, *numbers):
    def work(pipe):
        store = open_one()
        for number in numbers:
            store.put(NAME, {}, weights(number))
        print('put', file=pipe)
        signal.pause()

    return work


def test_killed_writer_leaves_its_newest_version_to_its_host(opened, tmp_path, monkeypatch):
    with child(put_and_wait(opened, 1, 2, 3)) as (pid, pipe):
        assert pipe.readline() == 'put\n'
        os.kill(pid, signal.SIGKILL)
    assert number_of(opened().get(NAME)) == 3
    far = opened('b')
    set_patience(far, 0.2)
    for timeout_s in (0.0, 0.0, 0.3):
        with pytest.raises(PayloadLost, match=f"version 3 of value '{NAME}'"):
            far.get(NAME, timeout_s=timeout_s)
    # Started again, it counts on, and its old file is removed once that is known.
    writer = opened()
    assert writer.tidy() == 0
    assert writer.put(NAME, {}, weights(4)) == 4
    assert number_of(far.get(NAME)) == 4
    assert writer.tidy() == 1
    assert len(files_of(tmp_path)) == 1


@pytest.mark.parametrize('moment', ['in mid-copy', 'before the announcement', 'after the announcement'])
def test_writer_killed_during_a_put_leaves_a_whole_version(opened, monkeypatch, moment):
    """Whatever it was doing: the newest version that was announced is readable and whole, and its half is not seen."""
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731

    def work(pipe):
        store = opened()
        for number in (1, 2, 3):
            store.put(NAME, {}, weights(number))
        if moment == 'in mid-copy':
            copyto, passes = np.copyto, itertools.count()

            def copy_half(target, source):
                if next(passes) == 3:
                    copyto(target[: len(target) // 2], source[: len(source) // 2])
                    die()
                copyto(target, source)

            slots.np.copyto = copy_half
        else:
            put_version = store.client.server.put

            def put_or_die(*arguments):
                if moment == 'after the announcement':
                    put_version(*arguments)
                die()

            store.client.server.put = put_or_die
        print('ready', file=pipe)
        store.put(NAME, {}, weights(4))

    with child(work) as (pid, pipe):
        assert pipe.readline() == 'ready\n'
        assert pipe.readline() == ''  # It is dead.
    newest = 4 if moment == 'after the announcement' else 3
    reader = opened()
    value = reader.get(NAME)
    assert (value.version, number_of(value)) == (newest, newest)
    assert reader.get(NAME, newer_than=newest, timeout_s=0.05) is None
    assert opened().put(NAME, {}, weights(newest + 1)) == newest + 1
    assert number_of(reader.get(NAME)) == newest + 1


def test_random_kills_of_writers_and_readers_tear_no_value(opened):
    """Readers in place of a value whose writers are killed again and again: what they hold stays whole."""
    reader, last = opened(), 0
    for _ in range(6):

        def work(pipe):
            store = opened()
            known = store.get(NAME)
            for number in itertools.count(known.version + 1 if known else 1):
                store.put(NAME, {}, weights(number))
                print(number, file=pipe)

        with child(work) as (pid, pipe):
            held = []
            for _ in range(20):
                pipe.readline()
                held = [*held[-2:], reader.get(NAME)]
                for value in held:
                    assert number_of(value) == value.version >= last
            os.kill(pid, signal.SIGKILL)
        value = reader.get(NAME)
        assert number_of(value) == value.version >= held[-1].version
        last = value.version


def test_leases_die_with_their_process(opened):
    writer = opened()

    def hold(pipe):
        store = opened()
        held = []
        for number in range(1, 8):
            held.append(store.get(NAME, number - 1, WAIT_S))
            print(number, file=pipe)
        signal.pause()

    with child(hold) as (pid, pipe):
        for number in range(1, 8):
            writer.put(NAME, {}, weights(number))
            assert pipe.readline() == f'{number}\n'
        size = os.stat(slot_file_of(writer, NAME).path).st_size
        os.kill(pid, signal.SIGKILL)
    for number in range(8, 30):
        writer.put(NAME, {}, weights(number))
        assert in_slot(writer) == (True, False)
    assert os.stat(slot_file_of(writer, NAME).path).st_size <= size + size // 7


def test_refused_put_is_not_seen_and_uses_no_slot(opened):
    writer, reader = opened(), opened()
    writer.put(NAME, {}, weights(1))
    for _ in range(20):
        with pytest.raises(VersionConflict):
            writer.put(NAME, {}, weights(9), expected_version=5)
        assert number_of(reader.get(NAME)) == 1
    assert writer.put(NAME, {}, weights(2), expected_version=1) == 2
    assert num_slots_of(writer, NAME) == 2


def test_put_refused_at_maxmemory_uses_no_slot(opened, monkeypatch):
    writer = opened()
    writer.put(NAME, {}, weights(1))
    with monkeypatch.context() as patch:

        def no_memory(*arguments):
            raise ServerFull('on purpose')

        patch.setattr(writer.client.server, 'put', no_memory)
        for _ in range(20):
            with pytest.raises(ServerFull):
                writer.put(NAME, {}, weights(9))
    assert writer.put(NAME, {}, weights(2)) == 2
    assert num_slots_of(writer, NAME) == 2


def test_values_after_a_memory_loss_arrive(forgetful_server, tmp_path):
    with (
        open_store(forgetful_server.url, host_cache_dir=str(tmp_path / 'a')) as writer,
        open_store(forgetful_server.url, host_cache_dir=str(tmp_path / 'a')) as near,
        open_store(forgetful_server.url, host_cache_dir=str(tmp_path / 'b')) as far,
    ):
        for number in (1, 2):
            writer.put(NAME, {}, weights(number))
            assert [number_of(one.get(NAME)) for one in (near, far)] == [number] * 2
        forgetful_server.restart()
        assert [one.get(NAME) for one in (near, far)] == [None, None]
        assert writer.put(NAME, {}, weights(3)) == 3
        assert [number_of(one.get(NAME, 2)) for one in (near, far)] == [3, 3]


def test_values_after_losing_the_newest_versions_arrive(opened):
    """An append-only file that lacks its end: the slot of the version that it names has other bytes by now."""
    writer, near = opened(), opened()
    writer.put(NAME, {}, weights(1))
    with writer.client.server.connection._session.borrowed() as connection:
        key = writer.client.server.keys.of(NAME, 'value')
        connection.send_command('XRANGE', key, '-', '+')
        ((redis_id, fields),) = connection.read_response()
        for number in (2, 3):
            writer.put(NAME, {}, weights(number))
        for command in (('DEL', key), ('HSET', writer.client.server.keys.of(NAME, 'version'), 'version', 1)):
            connection.send_command(*command)
            connection.read_response()
        connection.send_command('XADD', key, redis_id, *fields)
        connection.read_response()
    set_patience(near, 0.2)
    with pytest.raises(PayloadLost, match='version 1'):
        near.get(NAME)
    assert writer.put(NAME, {}, weights(4)) == 4
    assert number_of(near.get(NAME)) == 4


def test_deleted_values_leave_no_file(opened, tmp_path):
    writer = opened()
    writer.put(NAME, {}, weights(1))
    held = opened().get(NAME)
    assert writer.delete(NAME)
    assert (files_of(tmp_path), opened().get(NAME)) == ([], None)
    assert writer.put(NAME, {}, weights(2)) == 2
    assert [number_of(held), number_of(opened().get(NAME))] == [1, 2]


def test_value_put_after_all_were_deleted_reaches_other_hosts(redis_server, opened, caplog):
    """Between the two there is no value whose requests the writer could wait for."""
    writer, far = opened(check_every_s=0.2), opened('b')
    writer.put(NAME, {}, weights(1))
    assert number_of(far.get(NAME)) == 1
    assert writer.delete(NAME)
    with redis_server.client() as client:
        waiting = (client.info('clients')['blocked_clients'] for _ in itertools.count())
        eventually(lambda: not any(itertools.islice(waiting, 100)), 'the writer waits for no request')
    assert writer.put(NAME, {}, weights(2)) == 2
    assert number_of(far.get(NAME, timeout_s=WAIT_S)) == 2
    assert 'get no new versions' not in caplog.text


def test_value_with_a_damaged_head_is_refused_by_name(opened):
    writer = opened()
    writer.put(NAME, {}, weights(1))
    _, slot, _ = slots_of(writer, NAME)._newest
    slot.payload[30:31] = b'~'
    with pytest.raises(CorruptPayload, match=f"version 1 of value '{NAME}'"):
        opened().get(NAME)


def test_forked_process_puts_and_gets_by_itself(opened):
    writer = opened()
    writer.put(NAME, {}, weights(1))

    def work(pipe):
        print(number_of(writer.get(NAME)), writer.put(NAME, {}, weights(2)), file=pipe)
        writer.close()

    with child(work) as (_, pipe):
        assert pipe.readline() == '1 2\n'
        assert pipe.readline() == ''
    assert number_of(writer.get(NAME)) == 2
    assert writer.put(NAME, {}, weights(3)) == 3
    assert number_of(opened().get(NAME)) == 3


class TwoHosts(RuleBasedStateMachine):
    """
    Any order of puts, gets, closings, deaths and lost files, by processes of two hosts on one server. A version is
    whole, or PayloadLost where its file is not, and that only as long as its writer has not filled it.
    """

    directory = ''

    @initialize()
    def begin(self):
        self.end()
        self.memory = MemoryStore()
        self.stores, self.held = {}, []
        self.newest, self.author, self.is_safe = 0, None, True
        for host in 'ab':
            for number in (1, 2):
                self.open(f'{host}{number}')

    def open(self, who):
        host = HostOptions(host_cache_dir=os.path.join(self.directory, who[0]), host_cache_bytes=1 << 20)
        store = self.memory.another(check_every_s=0.01, host=host)
        without_backfills(store)  # What is filled when is up to the machine.
        self.stores[who] = store

    @rule(who=st.sampled_from(['a1', 'a2', 'b1', 'b2']), times=st.integers(1, 4))
    def put(self, who, times):
        for _ in range(times):
            self.newest = self.stores[who].put(NAME, {'n': self.newest + 1}, weights(self.newest + 1, 50))
        self.author, self.is_safe = who, False

    @rule(who=st.sampled_from(['a1', 'a2', 'b1', 'b2']))
    def put_in_vain(self, who):
        with pytest.raises(VersionConflict):
            self.stores[who].put(NAME, {}, weights(99, 50), expected_version=99)

    @rule(who=st.sampled_from(['a1', 'a2', 'b1', 'b2']))
    def fill(self, who):
        for slots_ in all_slots_of(self.stores[who]):
            slots_.backfill()
        self.is_safe |= who == self.author

    @rule()
    def hold(self):
        if self.newest:
            self.held += filter(None, [self.read('a1'), self.read('b1')])

    @invariant()
    def everybody_reads_the_newest(self):
        for who in self.stores if getattr(self, 'newest', 0) else ():
            self.read(who)

    def read(self, who):
        store = self.stores[who]
        set_patience(store, 0.0)
        try:
            value = store.get(NAME)
        except PayloadLost:
            assert not self.is_safe
            assert who[0] != self.home
            return None
        assert (value.version, value.header['n'], number_of(value)) == (self.newest,) * 3
        return value

    @rule(who=st.sampled_from(['a1', 'a2', 'b1', 'b2']), is_orderly=st.booleans())
    def leave(self, who, is_orderly):
        store = self.stores[who]
        if is_orderly:
            store.close()
            self.is_safe |= who == self.author
        else:
            for slots_ in all_slots_of(store):
                slots_.close(unlink=False)  # As death leaves them: locks are gone, files are there.
            cache_of(store)._claim.close()
        self.author = None if who == self.author else self.author
        self.open(who)

    @rule(host=st.sampled_from('ab'))
    def lose_files(self, host):
        for path in pathlib.Path(self.directory, host).rglob('*.slots'):
            path.unlink()

    @rule(who=st.sampled_from(['a1', 'a2', 'b1', 'b2']))
    def tidy(self, who):
        self.stores[who].tidy()

    @rule()
    def drop(self):
        self.held.clear()

    @invariant()
    def what_is_held_is_whole(self):
        for value in getattr(self, 'held', ()):
            assert number_of(value) == value.version

    @property
    def home(self):
        """The host that has the file of the newest version; None if it was removed, or there is none."""
        found = self.memory.client.get(NAME)
        name = f'{shared_values.SlotReference.unpack(found.reference).file}.slots' if found.reference else ''
        hosts = [host for host in 'ab' if list(pathlib.Path(self.directory, host).rglob(name or 'none'))]
        return hosts[0] if hosts else None

    def end(self):
        for store in getattr(self, 'stores', {}).values():
            store.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        os.makedirs(self.directory)

    def teardown(self):
        self.end()


def run_machine(tmp_path, examples, steps=20):
    TwoHosts.directory = str(tmp_path / 'machine')
    phases = [Phase.generate]  # What fails is found; making it small takes long.
    TwoHosts.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        phases=phases,
        database=None,
        report_multiple_bugs=False,
    )
    TwoHosts.TestCase().runTest()


def test_values_in_any_order_of_events_equal_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_values, 'SLOTS_FROM_BYTES', 0)
    run_machine(tmp_path, 30)


@pytest.mark.parametrize('mutant', ['the announced slot is written again', 'leases are not looked at', 'stamps repeat'])
def test_values_model_finds_mutants(tmp_path, monkeypatch, mutant):
    monkeypatch.setattr(shared_values, 'SLOTS_FROM_BYTES', 0)
    if mutant == 'the announced slot is written again':
        monkeypatch.setattr(SlotWriter, 'confirm', lambda self, slot: self._announced.clear())
    elif mutant == 'leases are not looked at':
        monkeypatch.setattr(slots, 'range_lock', lambda *arguments: True)
    else:
        monkeypatch.setattr(slots.SlotReader, 'lease', lenient(slots.SlotReader.lease))
        monkeypatch.setattr(SlotWriter, 'confirm', lambda self, slot: self._announced.clear())
    with pytest.raises(BaseException):  # noqa: B017, PT011 hypothesis groups what it finds
        run_machine(tmp_path, 200, steps=100)  # what takes several steps is rare in short runs


def lenient(lease):
    def any_stamp(self, slot, stamp):
        return lease(self, slot, self._words[256 + 2 * slot])

    return any_stamp


@pytest.mark.parametrize('is_done', [False, True])
def test_announcements_without_a_reply_keep_no_slots(redis_server, tmp_path, monkeypatch, is_done):
    """Whether the server has had them is asked; else, with all slots in doubt, everything would go over the wire."""
    with open_store(redis_server.url, f'doubt-{is_done}', host_cache_dir=str(tmp_path)) as store:
        put = store.client.server.put

        def lost(*arguments):
            if is_done:
                put(*arguments)
            raise StoreUnavailable('its reply is lost')

        store.put('w', {'number': -1}, {'x': np.full(1 << 16, -1)})
        for number in range(12):
            monkeypatch.setattr(store.client.server, 'put', lost)
            with pytest.raises(StoreUnavailable):
                store.put('w', {'number': number}, {'x': np.full(1 << 16, number)})
            found = store.get('w')
            assert found.header['number'] == (number if is_done else -1)
            assert (found.arrays['x'] == found.header['number']).all()
        monkeypatch.setattr(store.client.server, 'put', put)
        store.put('w', {'number': 12}, {'x': np.full(1 << 16, 12)})
        assert store.get('w').header == {'number': 12}
        assert store.client.get('w').reference


def test_remote_reader_gets_a_first_version_whose_reply_was_lost(opened, monkeypatch):
    writer = opened()
    put = writer.client.server.put

    def lost(*arguments):
        put(*arguments)
        raise StoreUnavailable('its reply is lost')

    monkeypatch.setattr(writer.client.server, 'put', lost)
    with pytest.raises(StoreUnavailable):
        writer.put(NAME, {}, weights(1))
    assert number_of(opened('b').get(NAME, timeout_s=WAIT_S)) == 1


@pytest.mark.parametrize('error', [StoreUnavailable('its reply is lost'), KeyboardInterrupt()])
def test_closed_writer_leaves_a_version_without_a_reply_to_all(opened, tmp_path, monkeypatch, error):
    writer = opened()
    put = writer.client.server.put
    writer.put(NAME, {}, weights(1))

    def lost(*arguments):
        put(*arguments)
        raise error

    monkeypatch.setattr(writer.client.server, 'put', lost)
    with pytest.raises(type(error)):
        writer.put(NAME, {}, weights(2))
    assert in_slot(writer) == (True, False)
    writer.close()
    assert files_of(tmp_path) == []
    assert [number_of(opened(host).get(NAME)) for host in ('a', 'b', None)] == [2, 2, 2]


def test_older_put_that_expects_another_version_is_refused(redis_server):
    with RedisStore(redis_server.url, f'order-{os.getpid()}') as store:
        older = store.client.server._values.put_command('v', b'')
        assert [store.put('v', {}, {}), store.put('v', {}, {})] == [1, 2]
        session = store.client.server.connection.call('look', lambda session: session)
        token, newest, _, payload, *rest = older.arguments
        assert session.run('put', older.keys, token, newest, 1, payload, *rest)[:3] == [0, 2, 2]
        store.clear()


@pytest.mark.parametrize(('way', 'size'), [('advance', 1), ('put', 10), ('put', 300_000)])
def test_late_put_replaces_no_newer_version_of_its_writer(redis_server, monkeypatch, way, size):
    """Its connection was lost, it was sent again on another, and then the first one came through, too."""
    sent, run = [], ServerSession.run

    def noting(session, script, keys, *arguments, before=None):
        reply = run(session, script, keys, *arguments, before=before)
        if script == 'put':
            sent.append(Command(script, keys, tuple(one() if callable(one) else one for one in arguments)))
        return reply

    with RedisStore(redis_server.url, f'late-{os.getpid()}') as store:

        def put(number):
            return store.put('v', {'number': number}, {'x': np.full(size, number)})

        with monkeypatch.context() as noted:
            noted.setattr(ServerSession, 'run', noting)
            put(0)
        late = (
            sent[0]
            if way == 'put'
            else store.client.server._values.put_command('v', encode_pieces({'number': 0}, {}).sealed())
        )
        for number in (1, 2):
            version = put(number)
        session = store.client.server.connection.call('look', lambda session: session)
        assert session.run(late.script, late.keys, *late.arguments)[:3] == [1, version, version - 1]
        assert (store.get('v').version, store.get('v').header) == (version, {'number': 2})
        assert put(3) == version + 1
        store.clear()
