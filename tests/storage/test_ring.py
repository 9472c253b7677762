"""A ring's readers never accept bytes that were not written there: interleaved, stopped and killed at any point."""

import contextlib
import os
import random
import signal
import time

import numpy as np
import pytest
from forks import child
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from needs import IS_LONG

from ding_store.errors import ConfigError, CorruptPayload, NotEnoughSpace
from ding_store.storage.shared_memory.mapped_files import ALIGN, PAGE, is_claimed
from ding_store.storage.shared_memory.ring import COMMITTED, RESERVED, RingReader, RingWriter, read_note
from ding_store.storage.testing import eventually

WAIT_S = 60.0


class OneWord(RingWriter):
    """The mistake: one word, written when a region is complete."""

    def _announce_reserved(self, end):
        pass

    def commit(self, region):
        self._words[RESERVED] = self._words[COMMITTED] = region.end


class Interleaved(RuleBasedStateMachine):
    """Writes and reads in two halves each, in any order; what a reader accepts is what was committed there."""

    kind = RingWriter
    path = ''

    @initialize()
    def begin(self):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.writer, self.count = self.kind(self.path, PAGE), 0
        self.reader = RingReader(self.path)
        self.writing, self.held = None, []
        self.truth, self.copying = {}, []

    @precondition(lambda self: self.writing is None)
    @rule(length=st.integers(1, PAGE // 2) | st.just(PAGE))
    def reserve(self, length):
        region = self.writer.reserve(length)
        if region is None:
            assert self.held, 'an empty ring takes every region up to its size'
            return
        assert (region.start % ALIGN, len(region.buffer)) == (0, length)
        for other in self.held:
            assert region.end - other.start <= PAGE, 'what is held was given away'
        self.count += 1
        self.writing = (region, bytes([self.count % 255 + 1]) * length)

    @precondition(lambda self: self.writing is not None)
    @rule()
    def write_half(self):
        region, payload = self.writing
        region.buffer[: region.length // 2] = payload[: region.length // 2]

    @precondition(lambda self: self.writing is not None)
    @rule(is_withdrawn=st.booleans())
    def write_and_commit(self, is_withdrawn):
        (region, payload), self.writing = self.writing, None
        region.buffer[:] = payload
        self.writer.commit(region)
        self.truth[region.start] = payload
        self.held.append(region)
        if is_withdrawn:
            self.writer.release(self.held.pop())

    @precondition(lambda self: self.held)
    @rule()
    def release(self):
        self.writer.release(self.held.pop(0))

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def begin_copy(self, data):
        start = data.draw(st.sampled_from(sorted(self.truth)[-6:]))
        view = self.reader.view(start, len(self.truth[start]))
        self.copying.append((start, view, bytes(view[: len(view) // 2])))

    @precondition(lambda self: self.copying)
    @rule(data=st.data())
    def end_copy(self, data):
        start, view, first = self.copying.pop(data.draw(st.integers(0, len(self.copying) - 1)))
        copy = first + bytes(view[len(first) :])
        is_valid = self.reader.is_valid(start)
        assert not is_valid or copy == self.truth[start]
        assert is_valid or all(region.start != start for region in self.held), 'what is held is good'


def run_interleaved(path, kind, **options):
    machine = type('Machine', (Interleaved,), {'kind': kind, 'path': str(path / 'a.ring')})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40, deadline=None, **options))


def test_ring_read_in_any_interleaving_is_right_or_refused(tmp_path):
    run_interleaved(tmp_path, RingWriter, max_examples=300 if IS_LONG else 100)


def test_ring_with_one_check_word_is_found_wrong(tmp_path):
    with pytest.raises(AssertionError):
        run_interleaved(tmp_path, OneWord, max_examples=2000, database=None, phases=[Phase.generate])


LENGTH, NUM = 256 << 10, 4  # regions that fill the ring exactly: their starts and contents follow from their number


def write_on(ring, stop_at=None):
    """Overwrite without asking anyone; with ``stop_at``, stop this process in the middle of that region."""
    held = []
    for number in range(10**9):
        if len(held) == NUM:
            ring.release(held.pop(0))
        region = ring.reserve(LENGTH)
        words = np.frombuffer(region.buffer, np.int64)
        if number == stop_at:
            words[: len(words) // 2] = number
            os.kill(os.getpid(), signal.SIGSTOP)
        words[:] = number
        ring.commit(region)
        held.append(region)


def copy_of(reader, number, out):
    """What a reader accepts as region ``number``: None if it knows better; True if it is whole."""
    try:
        np.copyto(out, np.frombuffer(reader.view(number * LENGTH, LENGTH), np.int64))
    except CorruptPayload:
        return None
    return bool((out == number).all()) if reader.is_valid(number * LENGTH) else None


def stopped_in_mid_copy(path, kind):
    """How often a region is accepted {whole: times} while its successor in its place is half written."""
    number = 2 * NUM + 1
    with child(lambda: write_on(kind(path, LENGTH * NUM), stop_at=number)) as pid:
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        reader, out = RingReader(path), np.empty(LENGTH // 8, np.int64)
        return [copy_of(reader, n, out) for n in range(number - NUM, number + 1)]


def test_ring_writer_stopped_during_a_copy_is_noticed(tmp_path):
    # The region being overwritten is refused, those behind it are whole, the new one is not there yet.
    assert stopped_in_mid_copy(str(tmp_path / 'a'), RingWriter) == [None, True, True, True, None]
    assert stopped_in_mid_copy(str(tmp_path / 'b'), OneWord) == [False, True, True, True, None]


def killed_at_random(path, kind, times):
    """What readers accept while writers run, are stopped and are killed: (whole, torn)."""
    whole = torn = 0
    out = np.empty(LENGTH // 8, np.int64)
    for time_of_death in (random.uniform(0.005, 0.03) for _ in range(times)):
        ring = kind(path, LENGTH * NUM)
        with child(lambda ring=ring: write_on(ring)) as pid:
            reader = RingReader(path)
            # A fork of a large process takes longer than the writer's whole life.
            eventually(lambda reader=reader: reader.committed > 0, 'the writer begins')
            deadline = time.monotonic() + time_of_death
            while time.monotonic() < deadline:
                # The oldest there may be: the writer is at its heels.
                accepted = copy_of(reader, max(0, reader.committed // LENGTH - random.randint(1, NUM)), out)
                whole, torn = whole + (accepted is True), torn + (accepted is False)
                if random.random() < 0.05:
                    os.kill(pid, random.choice((signal.SIGSTOP, signal.SIGCONT)))
            os.kill(pid, signal.SIGKILL)
        newest = reader.committed // LENGTH
        results = [copy_of(reader, n, out) for n in range(max(0, newest - NUM), newest)]
        assert all(results[1:])  # Nothing that is committed is lost with its writer.
        whole, torn = whole + results.count(True), torn + results.count(False)
        ring.close()
    return whole, torn


def test_ring_writers_killed_at_random_tear_nothing(tmp_path):
    path, deadline = str(tmp_path / 'a'), time.monotonic() + WAIT_S
    num_kills = 40 if IS_LONG else 15
    whole, torn = killed_at_random(path, RingWriter, num_kills)
    while whole <= 5 * num_kills:  # on a busy machine some are killed before they write much
        assert time.monotonic() < deadline
        more, others = killed_at_random(path, RingWriter, 4)
        whole, torn = whole + more, torn + others
    assert torn == 0


def test_ring_kill_test_finds_a_ring_with_one_check_word(tmp_path):
    deadline = time.monotonic() + WAIT_S
    while killed_at_random(str(tmp_path / 'a'), OneWord, 4)[1] == 0:
        assert time.monotonic() < deadline


@pytest.fixture
def ring(tmp_path):
    ring = RingWriter(str(tmp_path / 'a.ring'), 2 * PAGE, {'stream': 'experience'})
    yield ring
    ring.close()


def test_ring_file_is_private_allocated_and_has_a_note(ring):
    status = os.stat(ring.path)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= 3 * PAGE  # No holes: nothing is left for a full disk to refuse later.
    assert read_note(ring.path) == {'stream': 'experience'}
    assert os.listdir(os.path.dirname(ring.path)) == ['a.ring']


def test_ring_regions_are_contiguous(ring):
    first, second = ring.reserve(PAGE), ring.reserve(100)
    assert (second.start, ring.reserve(2 * PAGE)) == (PAGE, None)
    ring.commit(second)
    ring.release(first)
    # What is left behind the second is too short: the region begins at the start of the file.
    assert ring.reserve(PAGE).start == 2 * PAGE
    assert ring.free_bytes == 0


def test_empty_ring_holds_its_full_size(ring):
    for length in (100, 2 * PAGE, 3, 2 * PAGE):
        ring.release(ring.reserve(length))
    assert ring.reserve(2 * PAGE + 1) is None


def test_full_ring_refuses_more(ring):
    regions = [ring.reserve(PAGE), ring.reserve(PAGE)]
    for region, value in zip(regions, b'ab'):
        region.buffer[:] = bytes([value]) * PAGE
        ring.commit(region)
    assert ring.reserve(1) is None
    reader = RingReader(ring.path)
    assert [bytes(reader.view(each.start, PAGE)) for each in regions] == [b'a' * PAGE, b'b' * PAGE]
    assert all(reader.is_valid(each.start) for each in regions)


def test_ring_space_is_freed_in_order(ring):
    first, second = ring.reserve(PAGE), ring.reserve(PAGE)
    ring.release(second)
    assert (ring.free_bytes, ring.num_held) == (0, 2)
    ring.release(first)
    assert (ring.free_bytes, ring.num_held) == (2 * PAGE, 0)


def test_ring_readers_get_only_committed_bytes(ring):
    region = ring.reserve(100)
    reader = RingReader(ring.path)
    with pytest.raises(CorruptPayload):
        reader.view(region.start, 100)
    ring.commit(region)
    assert reader.view(region.start, 100).readonly
    for start, length in ((0, 3 * PAGE), (0, -1), (-64, 10), (3, 10), (PAGE, 10)):
        with pytest.raises(CorruptPayload, match='holds no'):
            reader.view(start, length)


def test_ring_views_outlive_the_file(ring):
    region = ring.reserve(10)
    region.buffer[:] = b'0123456789'
    ring.commit(region)
    view = RingReader(ring.path).view(0, 10)
    ring.close()
    assert bytes(view) == b'0123456789'
    with pytest.raises(FileNotFoundError):
        RingReader(ring.path)


def test_ring_file_that_is_damaged_is_refused(tmp_path, ring):
    (tmp_path / 'b').write_bytes(b'x' * PAGE)
    with pytest.raises(CorruptPayload, match='begins with'):
        RingReader(str(tmp_path / 'b'))
    os.truncate(ring.path, 2 * PAGE)
    with pytest.raises(CorruptPayload, match='in a file of'):
        RingReader(ring.path)
    with pytest.raises(ConfigError, match='ring_bytes'):
        RingWriter(str(tmp_path / 'c'), 0)


def test_ring_on_a_full_disk_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(NotEnoughSpace, match='host_cache_bytes'):
        RingWriter(str(tmp_path / 'a.ring'), 1 << 50)
    assert os.listdir(tmp_path) == []


def test_ring_is_claimed_while_its_process_lives(tmp_path):
    path, (reading, writing), (staying, leaving) = str(tmp_path / 'a.ring'), os.pipe(), os.pipe()

    def work():
        ring = RingWriter(path, PAGE)
        if os.fork():
            time.sleep(WAIT_S)
        os.close(leaving)
        ring.close()  # A child that outlives its parent has neither the lock nor a right to the file.
        os.kill(os.getppid(), signal.SIGKILL)
        os.write(writing, b'x')
        os.read(staying, 1)

    try:
        with child(work):
            assert os.read(reading, 1) == b'x'
            eventually_free(path)
        assert os.path.exists(path)
    finally:
        for descriptor in (reading, writing, staying, leaving):
            os.close(descriptor)


def eventually_free(path):
    deadline = time.monotonic() + WAIT_S
    while is_claimed(path):
        assert time.monotonic() < deadline
        time.sleep(0.001)
