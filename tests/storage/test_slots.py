"""Rotating slots: a reader gets a whole version or none, and a lease keeps its slot as long as its process lives."""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from forks import child
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ding_store.errors import ConfigError, CorruptPayload, NotEnoughSpace
from ding_store.storage.mapped import PAGE
from ding_store.storage.slots import MAX_SLOTS, SlotReader, SlotWriter

WAIT_S = 20.0
BIG = 1 << 20


def halves(version, size=BIG, between=lambda: None):
    """A version's payload in two parts, with something done after the first one is written."""
    passes = iter((lambda: None, between))  # The writer first adds their lengths up.

    class Parts(list):
        def __iter__(self):
            action = next(passes)
            yield self[0]
            action()
            yield self[1]

    half = np.full(size // 16, version, np.int64).view(np.uint8).data
    return Parts([half, half])


def is_whole(found):
    words = np.frombuffer(found.payload, np.int64)
    return bool((words == found.version).all()) and found.stamp == found.version


class Rotation(RuleBasedStateMachine):
    """Puts and leases in any order: leases never change, the newest version put is the one that is found."""

    path = ''
    max_slots = 4

    @initialize()
    def begin(self):
        self.close()
        self.writer, self.leases, self.newest, self.puts = SlotWriter(self.path, PAGE, self.max_slots), [], 0, 0
        self.reader = SlotReader(self.path)

    @rule()
    def put(self):
        self.puts += 1
        slot = self.writer.put(halves(self.puts, PAGE), self.puts, self.puts)
        assert (slot is None) == (self.num_leased(without_newest=True) == self.max_slots - 1)
        self.newest = self.puts if slot is not None else self.newest

    @rule()
    def lease(self):
        found = self.reader.lease()
        assert (found.version if found else 0) == self.newest
        self.leases += [found] if found else []

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))).release()

    @invariant()
    def what_is_there_is_whole(self):
        if hasattr(self, 'reader'):
            found = self.reader.copy()
            assert (found.version if found else 0) == self.newest
            assert all(is_whole(one) for one in [*self.leases, *([found] if found else [])])

    def teardown(self):
        self.close()

    def num_leased(self, without_newest):
        return len({lease.version for lease in self.leases} - ({self.newest} if without_newest else set()))

    def close(self):
        for lease in getattr(self, 'leases', ()):
            lease.release()
        if hasattr(self, 'writer'):
            self.writer.close()


def test_any_order_of_puts_and_leases(tmp_path):
    Rotation.path = str(tmp_path / 'v')
    Rotation.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
    Rotation.TestCase().runTest()


class EvenOnly(SlotWriter):
    """The mistake: a slot's turn changes only once it is written."""

    def _begin(self, slot):
        pass

    def _end(self, slot):
        self._words[24 + 8 * slot] += 2


@pytest.mark.parametrize('kind', [SlotWriter, EvenOnly])
def test_a_writer_stopped_in_mid_copy(tmp_path, kind):
    path = str(tmp_path / 'v')

    def work():
        writer = kind(path, BIG)
        for version in (1, 2):
            writer.put(halves(version), version, version)
        writer.put(halves(3, between=lambda: os.kill(os.getpid(), signal.SIGSTOP)), 3, 3)

    with child(work) as pid:
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        reader = SlotReader(path)
        # A reader that had just decided for the slot that is being overwritten: version 1 was in the first one.
        late = reader._copy(0)
        assert late is None if kind is SlotWriter else not is_whole(late)
        for found in (reader.copy(), reader.lease()):
            assert found.version == 2
            assert is_whole(found)


def copies_under_load(path, kind, seconds):
    """(whole, torn) copies taken while a process writes as fast as it can, is stopped, and in the end killed."""
    writer_path, counts = path, [0, 0]

    def work():
        writer, version = kind(writer_path, BIG, 2), 0
        os.write(writing, b'x')
        while True:
            version += 1
            writer.put(halves(version), version, version)

    reading, writing = os.pipe()
    with child(work) as pid:
        os.read(reading, 1)
        reader, deadline = SlotReader(path), time.monotonic() + seconds
        while time.monotonic() < deadline:
            slot = random.randint(0, 1)
            for found in (reader._copy(slot), reader.copy() if random.random() < 0.1 else None):
                if found is not None and found.version:
                    counts[0 if is_whole(found) else 1] += 1
            if random.random() < 0.02:
                os.kill(pid, random.choice((signal.SIGSTOP, signal.SIGCONT)))
        os.kill(pid, signal.SIGKILL)
    assert is_whole(reader.copy())  # Whatever its writer was doing when it died.
    os.unlink(path)
    os.close(reading)
    os.close(writing)
    return counts


def test_copies_under_load_are_whole(tmp_path):
    for _ in range(8):
        whole, torn = copies_under_load(str(tmp_path / 'v'), SlotWriter, 0.1)
        assert whole > 0
        assert torn == 0


def test_the_load_test_notices_missing_odd_turns(tmp_path):
    deadline = time.monotonic() + WAIT_S
    while copies_under_load(str(tmp_path / 'v'), EvenOnly, 0.1)[1] == 0:
        assert time.monotonic() < deadline


def test_leases_die_with_their_process(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE, max_slots=2)
    reading, writing = os.pipe()

    def work():
        lease = SlotReader(writer.path).lease()
        os.write(writing, b'x')
        time.sleep(WAIT_S)
        lease.release()

    writer.put(halves(1, PAGE), 1, 1)
    with child(work) as pid:
        assert os.read(reading, 1) == b'x'
        assert writer.put(halves(2, PAGE), 2, 2) is not None
        # Of the two slots one is leased, the other the newest.
        assert writer.put(halves(3, PAGE), 3, 3) is None
        assert writer.num_skipped == 1
        os.kill(pid, signal.SIGKILL)
    assert writer.put(halves(4, PAGE), 4, 4) is not None
    assert SlotReader(writer.path).copy().version == 4


def test_a_forked_child_keeps_no_lease_up(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE, max_slots=2)
    writer.put(halves(1, PAGE), 1, 1)
    lease = SlotReader(writer.path).lease()
    reading, writing = os.pipe()

    def work():
        os.write(writing, b'x')
        time.sleep(WAIT_S)

    with child(work):
        assert os.read(reading, 1) == b'x'
        writer.put(halves(2, PAGE), 2, 2)
        assert writer.put(halves(3, PAGE), 3, 3) is None
        lease.release()
        assert writer.put(halves(3, PAGE), 3, 3) is not None


def test_leases_of_one_process_are_its_own_each(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE, max_slots=2)
    writer.put(halves(1, PAGE), 1, 1)
    first, second = SlotReader(writer.path).lease(), SlotReader(writer.path).lease()
    writer.put(halves(2, PAGE), 2, 2)
    first.release()
    SlotReader(writer.path).close()
    assert writer.put(halves(3, PAGE), 3, 3) is None
    second.release()
    assert writer.put(halves(3, PAGE), 3, 3) is not None


def test_slots_are_added_up_to_the_limit(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE, max_slots=5)
    reader = SlotReader(writer.path)
    leases = []
    for version in range(1, 6):
        assert writer.put(halves(version, PAGE), version, version) is not None
        leases.append(reader.lease())
    assert writer.put(halves(6, PAGE), 6, 6) is None
    assert os.stat(writer.path).st_size == PAGE + 5 * PAGE
    assert [lease.version for lease in leases if is_whole(lease)] == [1, 2, 3, 4, 5]


def test_versions_outlive_the_file(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE)
    reader = SlotReader(writer.path)
    assert (reader.copy(), reader.lease()) == (None, None)
    writer.put(halves(1, PAGE), 1, 1)
    writer.close()
    lease = reader.lease()  # The name is gone, the file is not.
    reader.close()
    assert is_whole(lease)
    with pytest.raises(FileNotFoundError):
        SlotReader(writer.path)


def test_bad_files_and_settings(tmp_path):
    (tmp_path / 'b').write_bytes(b'x' * PAGE)
    (tmp_path / 'c').write_bytes(b'x')
    for name in 'bc':
        with pytest.raises(CorruptPayload):
            SlotReader(str(tmp_path / name))
    for settings_ in (
        {'slot_bytes': 0},
        {'slot_bytes': 1, 'max_slots': 1},
        {'slot_bytes': 1, 'max_slots': MAX_SLOTS + 1},
    ):
        with pytest.raises(ConfigError, match=list(settings_)[-1]):
            SlotWriter(str(tmp_path / 'd'), **settings_)
    with pytest.raises(NotEnoughSpace):
        SlotWriter(str(tmp_path / 'd'), 1 << 50)
    writer = SlotWriter(str(tmp_path / 'd'), 1)
    with pytest.raises(ConfigError, match='does not fit'):
        writer.put([b'x' * (PAGE + 1)], 1)
    assert sorted(os.listdir(tmp_path)) == ['b', 'c', 'd']


def test_readers_in_threads(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), BIG, 3)
    writer.put(halves(1), 1, 1)
    reader, torn, done = SlotReader(writer.path), [], threading.Event()

    def read():
        while not done.is_set():
            lease = reader.lease()
            torn.extend([lease.version] if not is_whole(lease) else [])
            lease.release()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 300):
        writer.put(halves(version), version, version)
    done.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert torn == []
