"""The page on which this host's readers of a stream see each other, and how far each has acked. All of them map it.

offset  size
8*k     8     of process k: the *mark* up to which all its readers have acked
4088    8     number of payloads that were downloaded for all

Process k holds byte k of the file's lock range while it runs and reads. The locks show which processes read here,
without any message. No process waits for one that has exited.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
import zlib
from typing import Iterable, List

from ding_store import private_files
from ding_store.storage.base import NUMBER_BITS, EntryId
from ding_store.storage.shared_memory.mapped_files import (
    PAGE,
    OwnerLock,
    Words,
    check_length,
    created,
    range_holder,
    range_lock,
)

MAX_PROCESSES = PAGE // 8 - 1
_NUM_FETCHED = PAGE // 8 - 1  # a word


def mark_of(place: EntryId) -> int:
    """Return an entry's place as one word: its number, and 24 bits that very likely identify its epoch."""
    return _epoch_bits(place.epoch) | place.number


@functools.lru_cache(64)
def _epoch_bits(epoch: str) -> int:
    return (zlib.crc32(epoch.encode()) & 0xFFFFFF) << NUMBER_BITS


def is_of_epoch(mark: int, other: int) -> bool:
    return mark >> NUMBER_BITS == other >> NUMBER_BITS


def is_behind(mark: int, marks: Iterable[int]) -> bool:
    """Return whether all of these marks are of the same epoch as ``mark``, and none is before it."""
    return all(is_of_epoch(mark, one) and one >= mark for one in marks)


class HostReaders:
    """
    Overview:
        One process's place among the readers of a stream on this host. Thread-safe.
    Raises:
        - OSError: The file is gone, is not a reader page, or has no free place.
    """

    def __init__(self, path: str) -> None:
        with open(path, 'r+b', opener=private_files.opener) as page:
            check_length(page.fileno(), PAGE)
            self._words = Words(mmap.mmap(page.fileno(), PAGE), path)
        # Opened anew: the descriptor inside a mapping would carry the lock into forked children.
        self._file = OwnerLock(private_files.opener(path, os.O_RDWR))
        for place in range(MAX_PROCESSES):
            if range_lock(self._file.descriptor, fcntl.F_WRLCK, place):
                self._place = place
                self.mark = 0
                return
        raise OSError(errno.EUSERS, f'{MAX_PROCESSES} processes read this stream already', path)

    @property
    def mark(self) -> int:
        """The mark up to which this process needs no more entries of the epoch."""
        return self._words[self._place]

    @mark.setter
    def mark(self, mark: int) -> None:
        self._words[self._place] = mark

    @property
    def num_fetched(self) -> int:
        """Number of payloads downloaded for all. It grows before a payload is published, under the stream's lock."""
        return self._words[_NUM_FETCHED]

    @num_fetched.setter
    def num_fetched(self, number: int) -> None:
        self._words[_NUM_FETCHED] = number

    @property
    def are_several(self) -> bool:
        """True if another process reads the stream as well. Costs one system call."""
        descriptor = self._file.descriptor  # Another thread may leave the stream meanwhile.
        return descriptor >= 0 and range_holder(descriptor, 0, MAX_PROCESSES) is not None

    def others(self) -> List[int]:
        """Return the marks of the other processes."""
        found, ranges = [], [(0, MAX_PROCESSES)]
        while ranges:
            first, end = ranges.pop()
            place = range_holder(self._file.descriptor, first, end - first) if first < end else None
            if place is not None:  # Any holder in the range, not necessarily the first.
                found.append(self._words[place])
                ranges += [(first, place), (place + 1, end)]
        return found

    def close(self) -> None:
        """Leave the stream: this process no longer reads it."""
        self._file.close()


def create(path: str) -> None:
    """
    Overview:
        Create a reader page without an owner.
    Raises:
        - OSError: The file cannot be created.
    """
    with created(path, PAGE) as (_, held):
        held.close()


def are_there(path: str) -> bool:
    """Return whether a running process reads the stream of this page."""
    try:
        file = OwnerLock(private_files.opener(path))
    except FileNotFoundError:
        return False
    try:
        return range_holder(file.descriptor, 0, MAX_PROCESSES) is not None
    finally:
        file.close()
