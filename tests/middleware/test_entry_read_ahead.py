"""Reading ahead in a thread: whatever ends it is heard of where entries are taken."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip('ding')

from ding_store.errors import CorruptPayload  # noqa: E402
from ding_store.middleware.chunks import num_bytes  # noqa: E402
from ding_store.middleware.read_ahead import ReadAhead  # noqa: E402
from ding_store.storage.testing import eventually  # noqa: E402

WAIT_S = 60.0
ENTRY = SimpleNamespace(arrays={})


class Broken:
    """A reader that gives one entry, and then fails."""

    cursor = None

    def __init__(self, error):
        self._error = error
        self._entries = [ENTRY]

    def read(self, max_entries=64, timeout_s=0.0):
        if self._entries:
            return [self._entries.pop()]
        raise self._error


@pytest.mark.parametrize('error', [CorruptPayload('entry 7'), PermissionError('file'), KeyError('schema')])
def test_read_ahead_error_is_raised_at_each_take(error):
    read_ahead = ReadAhead(Broken(error))
    assert read_ahead.take(4, WAIT_S) == [ENTRY]
    for _ in range(2):
        with pytest.raises(type(error)):
            read_ahead.take(4, WAIT_S)


class Endless:
    """A reader of a stream without end, that says what was asked of it when it is asked for nothing for a while."""

    cursor = None

    def __init__(self, sizes):
        self._sizes = iter(sizes)
        self.asked = []
        self.news = threading.Condition()

    def read(self, max_entries=64, timeout_s=0.0):
        with self.news:
            self.asked.append(max_entries)
            self.news.notify_all()
        return [SimpleNamespace(arrays={'x': np.zeros(next(self._sizes), np.uint8)}) for _ in range(max_entries)]


def test_read_ahead_is_bounded_in_bytes():
    reader = Endless([100] * 3 + [400] * 100)
    read_ahead = ReadAhead(reader, max_entries=64, max_bytes=1000)

    def wait_for(asked):
        with reader.news:
            assert reader.news.wait_for(lambda: reader.asked == asked, WAIT_S), reader.asked

    # One tells how large they are; then as many as fit, of the largest that was seen.
    wait_for([1, 9])
    eventually(lambda: len(read_ahead) == 10, 'they are there')
    assert [entry.arrays['x'].nbytes for entry in read_ahead.take(2, WAIT_S)] == [100, 100]
    assert len(read_ahead) == 8
    read_ahead.take(7, WAIT_S)
    wait_for([1, 9, 1])
    read_ahead.wake()


def test_read_ahead_counts_narrow_frames_at_their_full_size():
    entry = SimpleNamespace(arrays={'x': np.zeros(100, np.uint8)}, header={})
    for narrowed, factor in ((['x'], 4), ([], 1), (5, 1), ({'x': 1}, 1), (None, 1)):
        entry.header['narrowed'] = narrowed
        assert num_bytes(entry, as_elements=True) == 100 * factor
        assert num_bytes(entry, as_elements=False) == 100


def test_read_ahead_is_bounded_in_entries():
    reader = Endless([0] * 1000)
    read_ahead = ReadAhead(reader, max_entries=4, max_bytes=1000)
    with reader.news:
        assert reader.news.wait_for(lambda: sum(reader.asked) >= 4, WAIT_S)
    assert len(read_ahead.take(100, WAIT_S)) < 8
    read_ahead.wake()


def test_read_ahead_that_rests_reads_once_and_ends_at_once():
    class Slow:
        cursor = None
        reads = 0

        def read(self, max_entries=64, timeout_s=0.0):
            self.reads += 1
            return [SimpleNamespace(arrays={'x': np.zeros(4)})]

    reader = Slow()
    read_ahead = ReadAhead(reader, rest_s=1e6)
    # The first read shows how large entries are. After the second one, which took less than it might, the thread rests.
    eventually(lambda: reader.reads == 2, 'the second read')
    read_ahead.wake()
    assert len(read_ahead.rest()) == 3
    assert reader.reads == 3
