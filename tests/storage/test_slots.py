"""Rotating slots: a reader gets a whole version or none, and a lease keeps its slot as long as its process lives."""

import contextlib
import gc
import os
import random
import select
import signal
import threading
import time

import numpy as np
import pytest
from forks import child
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from needs import IS_LONG

from ding_store.errors import ConfigError, CorruptPayload, NotEnoughSpace
from ding_store.storage.shared_memory import mapped_files
from ding_store.storage.shared_memory.mapped_files import PAGE
from ding_store.storage.shared_memory.slots import MAX_SLOTS, SlotReader, SlotWriter, value_of

WAIT_S = 60.0
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


def put(writer, version, size=BIG):
    """Write a version, and say that it was announced."""
    slot = writer.write(halves(version, size))
    if slot is not None:
        writer.confirm(slot)
    return slot


def number_in(payload):
    """Which version these bytes are; None if they are of two."""
    words = np.frombuffer(payload, np.int64)
    return int(words[0]) if (words == words[0]).all() else None


class Rotation(RuleBasedStateMachine):
    """Writes, announcements, refusals and leases in any order: leases never change, what is announced can be leased."""

    path = ''
    max_slots = 4

    @initialize()
    def begin(self):
        self.close()
        self.writer, self.reader = SlotWriter(self.path, PAGE, max_slots=self.max_slots), SlotReader(self.path)
        self.puts, self.newest, self.unsure, self.leases = 0, None, [], []

    @rule(fate=st.sampled_from(['announced', 'refused', 'not known']))
    def write(self, fate):
        self.puts += 1
        slot = self.writer.write(halves(self.puts, PAGE))
        assert (slot is None) == (self.num_taken() == self.max_slots)
        if slot is None:
            return
        if fate == 'announced':
            self.writer.confirm(slot)
            self.newest, self.unsure = (self.puts, slot), []
        elif fate == 'refused':
            self.writer.discard(slot)
        else:
            self.unsure.append((self.puts, slot))

    @precondition(lambda self: self.newest or self.unsure)
    @rule(data=st.data())
    def lease(self, data):
        version, slot = data.draw(st.sampled_from([*self.unsure, *([self.newest] if self.newest else [])]))
        self.leases.append((version, slot.number, self.reader.lease(slot.number, slot.stamp)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))

    @precondition(lambda self: self.newest)
    @rule(off=st.integers(1, 3))
    def look_for_what_is_not_there(self, off):
        _, slot = self.newest
        assert self.reader.lease(slot.number, slot.stamp + off) is None
        assert self.reader.lease(slot.number, 0) is None

    @invariant()
    def what_is_announced_or_leased_is_whole(self):
        if hasattr(self, 'reader'):
            assert all(number_in(payload) == version for version, _, payload in self.leases)
            for version, slot in [*self.unsure, *([self.newest] if self.newest else [])]:
                assert number_in(self.reader.lease(slot.number, slot.stamp)) == version

    def teardown(self):
        self.close()

    def num_taken(self):
        announced = [slot.number for _, slot in [*self.unsure, *([self.newest] if self.newest else [])]]
        return len({*announced, *(number for _, number, _ in self.leases)})

    def close(self):
        self.leases = []
        if hasattr(self, 'writer'):
            self.writer.close()


def test_slots_in_any_order_of_writes_and_leases_are_right(tmp_path):
    Rotation.path = str(tmp_path / 'v')
    Rotation.TestCase.settings = settings(max_examples=150 if IS_LONG else 60, stateful_step_count=40, deadline=None)
    Rotation.TestCase().runTest()


class Unstamped(SlotWriter):
    """The mistake: a slot keeps its old stamp while it is overwritten."""

    def _begin(self, number):
        pass


class Unlocked(SlotWriter):
    """The mistake: leases are not looked at."""

    def _take(self):
        return next(slot for slot in range(len(self._buffers)) if slot not in self._announced)


@pytest.mark.parametrize('kind', [SlotWriter, Unstamped])
def test_slot_writer_killed_during_a_copy_tears_nothing(tmp_path, kind):
    path = str(tmp_path / 'v')

    def work():
        writer = kind(path, BIG)
        for version in (1, 2):
            put(writer, version)
        writer.write(halves(3, between=lambda: os.kill(os.getpid(), signal.SIGSTOP)))

    with child(work) as pid:
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        reader = SlotReader(path)
        assert reader.lease(0, 1) is None  # It is being overwritten, so it is locked.
        assert number_in(reader.lease(1, 2)) == 2
    # Now it is dead, and its locks are gone. Version 1 was in the first slot; half of it still is.
    late = reader.lease(0, 1)
    assert late is None if kind is SlotWriter else number_in(late) is None
    assert number_in(reader.lease(1, 2)) == 2


def leases_under_load(path, kind, seconds):
    """(whole, torn) leases taken while a process writes as fast as it can, is stopped, and in the end killed."""
    counts = [0, 0]

    def work():
        writer, version = kind(path, BIG, max_slots=3), 0
        os.write(writing, b'x')
        while True:
            version += 1
            put(writer, version)

    reading, writing = os.pipe()
    with child(work) as pid:
        os.read(reading, 1)
        reader, deadline = SlotReader(path), time.monotonic() + seconds
        while time.monotonic() < deadline:
            slot = random.randint(0, 2)
            stamp = reader._words[256 + 2 * slot]
            payload = reader.lease(slot, stamp) if stamp else None
            if payload is not None:
                words = np.frombuffer(payload, np.int64)
                counts[0 if (words == words[0]).all() and (words[::-1] == words[0]).all() else 1] += 1
            if random.random() < 0.02:
                os.kill(pid, random.choice((signal.SIGSTOP, signal.SIGCONT)))
    os.unlink(path)
    os.close(reading)
    os.close(writing)
    return counts


def test_leases_under_load_are_whole(tmp_path):
    deadline, num_rounds = time.monotonic() + WAIT_S, 0
    while num_rounds < 8:  # in which this process came to lease anything, which others may keep it from
        whole, torn = leases_under_load(str(tmp_path / 'v'), SlotWriter, 0.1)
        assert torn == 0
        num_rounds += whole > 0
        assert time.monotonic() < deadline


def test_lease_load_test_finds_ignored_leases(tmp_path):
    deadline = time.monotonic() + WAIT_S
    while leases_under_load(str(tmp_path / 'v'), Unlocked, 0.1)[1] == 0:
        assert time.monotonic() < deadline


def test_leases_die_with_their_process(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE, max_slots=2)
    reading, writing = os.pipe()

    def work():
        lease = SlotReader(writer.path).lease(first.number, first.stamp)
        os.write(writing, b'x')
        time.sleep(WAIT_S)
        del lease

    first = put(writer, 1, PAGE)
    with child(work) as pid:
        assert os.read(reading, 1) == b'x'
        assert put(writer, 2, PAGE) is not None
        # Of the two slots one is leased, the other the newest.
        assert put(writer, 3, PAGE) is None
        os.kill(pid, signal.SIGKILL)
    newest = put(writer, 4, PAGE)
    assert number_in(SlotReader(writer.path).lease(newest.number, newest.stamp)) == 4


def test_lease_ends_at_interpreter_exit(tmp_path, monkeypatch):
    """At the interpreter's end: weights that a model has in place go after all modules."""
    held = mapped_files.OwnerLock(os.open(tmp_path, os.O_RDONLY))
    descriptor = held.descriptor
    with monkeypatch.context() as patch:
        patch.setattr(mapped_files, 'os', None)
        held.close()
    with pytest.raises(OSError, match='Bad file descriptor'):
        os.fstat(descriptor)


def test_lease_is_not_held_by_a_forked_child(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE, max_slots=2)
    first = put(writer, 1, PAGE)
    lease = SlotReader(writer.path).lease(first.number, first.stamp)
    reading, writing = os.pipe()

    def work():
        os.write(writing, b'x')
        time.sleep(WAIT_S)

    with child(work):
        assert os.read(reading, 1) == b'x'
        put(writer, 2, PAGE)
        assert put(writer, 3, PAGE) is None
        del lease
        gc.collect()
        assert put(writer, 3, PAGE) is not None


def test_lease_ends_in_a_child_forked_during_another_lease(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE)
    slot = put(writer, 1, PAGE)
    reader = SlotReader(writer.path)
    held = [reader.lease(slot.number, slot.stamp)]
    reading, writing = os.pipe()
    is_locked, is_over = threading.Event(), threading.Event()

    def lease():
        with reader._lock:
            is_locked.set()
            is_over.wait(WAIT_S)

    def work():
        held.clear()
        gc.collect()
        os.write(writing, b'x')

    other = threading.Thread(target=lease)
    other.start()
    assert is_locked.wait(WAIT_S)
    with child(work):
        is_over.set()
        os.close(writing)
        assert select.select([reading], [], [], 5.0)[0], 'it waits for a thread that it does not have'
    other.join(WAIT_S)
    os.close(reading)


def test_lease_is_held_by_any_view(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE, max_slots=2)
    slot = put(writer, 1, PAGE)
    first = SlotReader(writer.path).lease(slot.number, slot.stamp)
    second = np.ndarray(4, np.int64, buffer=memoryview(first).cast('B'), offset=64)[1:]
    put(writer, 2, PAGE)
    SlotReader(writer.path).close()
    del first
    gc.collect()
    assert put(writer, 3, PAGE) is None
    assert (second == 1).all()
    assert not second.flags.writeable
    del second
    gc.collect()
    assert put(writer, 3, PAGE) is not None


def mapped_kb(path):
    """How much of a file this process has in its page tables."""
    total, is_ours = 0, False
    with open('/proc/self/smaps') as maps:
        for line in maps:
            words = line.split()
            if len(words) >= 5 and not words[0].endswith(':'):
                is_ours = words[-1] == path
            elif is_ours and words[0] == 'Rss:':
                total += int(words[1])
    return total


def test_reader_in_place_has_one_version_in_memory(tmp_path):
    def work():
        reader, held, puts = SlotReader(path), None, range(1, 7)
        for version in puts:
            os.read(told, 1)
            slot = {1: 0, 0: 1}[version % 2]
            new = reader.lease(slot, version)
            assert number_in(new) == version
            held = new  # The old one goes when the new one is there.
            os.write(say, b'%8d' % mapped_kb(path))
        del new
        del held

    path = str(tmp_path / 'v')
    hear, say = os.pipe()
    told, tell = os.pipe()
    writer = SlotWriter(path, BIG, max_slots=2)
    with child(work):
        os.close(say)
        for version in range(1, 7):
            assert put(writer, version) is not None
            os.write(tell, b'x')
            used_kb = int(os.read(hear, 8))
    assert BIG >> 10 <= used_kb <= (BIG >> 10) + 64


def test_slots_are_added_up_to_the_limit(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE, max_slots=5)
    reader = SlotReader(writer.path)
    leases = []
    for version in range(1, 6):
        slot = put(writer, version, PAGE)
        leases.append(reader.lease(slot.number, slot.stamp))
    assert put(writer, 6, PAGE) is None
    assert os.stat(writer.path).st_size == PAGE + 5 * PAGE
    assert [number_in(lease) for lease in leases] == [1, 2, 3, 4, 5]


def test_slot_beyond_the_capacity_is_refused(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE, has_capacity=lambda num_bytes: num_bytes < PAGE)
    reader, leases = SlotReader(writer.path), []
    for version in (1, 2):
        slot = put(writer, version, PAGE)
        leases.append(reader.lease(slot.number, slot.stamp))
    assert put(writer, 3, PAGE) is None


def test_versions_outlive_the_file(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), PAGE, 'weights/main')
    assert value_of(writer.path) == 'weights/main'
    reader = SlotReader(writer.path)
    slot = put(writer, 1, PAGE)
    writer.close()
    lease = reader.lease(slot.number, slot.stamp)  # The name is gone, the file is not.
    reader.close()
    assert number_in(lease) == 1
    with pytest.raises(FileNotFoundError):
        SlotReader(writer.path)


def test_slot_files_and_settings_that_are_wrong_are_refused(tmp_path):
    (tmp_path / 'b').write_bytes(b'x' * PAGE)
    (tmp_path / 'c').write_bytes(b'x')
    for name in 'bc':
        assert value_of(str(tmp_path / name)) == ''
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
        writer.write([b'x' * (PAGE + 1)])
    assert sorted(os.listdir(tmp_path)) == ['b', 'c', 'd']


def test_slots_read_in_threads_are_never_torn(tmp_path):
    writer = SlotWriter(str(tmp_path / 'v'), BIG, max_slots=5)
    reader, torn, done, announced = SlotReader(writer.path), [], threading.Event(), [put(writer, 1)]

    def read():
        while not done.is_set():
            slot = announced[0]
            payload = reader.lease(slot.number, slot.stamp)
            torn.extend([slot] if payload is not None and number_in(payload) is None else [])

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 300):
        announced[0] = put(writer, version) or announced[0]
    done.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert torn == []


class Interrupted(dict):
    """Slots, with the garbage collector at work wherever it may be: from Python 3.12 on, between any two steps."""

    def __contains__(self, slot):
        found = super().__contains__(slot)
        gc.collect()
        return found

    def get(self, slot, default=None):
        found = super().get(slot, default)
        gc.collect()
        return found


def test_lease_ended_by_gc_during_another_is_released(tmp_path):
    with contextlib.closing(SlotWriter(str(tmp_path / 'v'), PAGE, max_slots=4)) as writer:
        reader, slots = SlotReader(writer.path), []
        reader._slots = Interrupted()
        for version in (1, 2):
            slots.append(put(writer, version, PAGE))
        newer = reader.lease(slots[1].number, slots[1].stamp)
        for _ in range(3):
            cycle = [reader.lease(slots[0].number, slots[0].stamp)]
            cycle.append(cycle)
            del cycle  # It is garbage now, and will be met when the next one is made.
            assert number_in(reader.lease(slots[0].number, slots[0].stamp)) == 1
        gc.collect()
        assert reader._slots.keys() == {slots[1].number}
        assert number_in(newer) == 2
        del newer
        gc.collect()
        assert reader._slots.keys() == {slots[1].number}
        assert (writer.write([b'x']).number, writer.write([b'x']).number) == (0, 2)
