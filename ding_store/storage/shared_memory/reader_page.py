"""Which processes of this host read a stream, and up to where each has acked: a page that they all map.

offset  size
8*k     8     of process k: the *mark* of what all its readers have acked
4088    8     how many payloads were fetched for all

Process k holds byte k of the file's lock range for as long as it lives and reads. So it is known who reads here without
a message to anybody, and nobody waits for the dead.
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
    """An entry's place in one word: of its epoch 24 bits that tell it from others, most likely, and its number."""
    return _epoch_bits(place.epoch) | place.number


@functools.lru_cache(64)
def _epoch_bits(epoch: str) -> int:
    return (zlib.crc32(epoch.encode()) & 0xFFFFFF) << NUMBER_BITS


def is_of_epoch(mark: int, other: int) -> bool:
    return mark >> NUMBER_BITS == other >> NUMBER_BITS


def is_behind(mark: int, marks: Iterable[int]) -> bool:
    """Whether all of these are of the same epoch as ``mark``, and not before it."""
    return all(is_of_epoch(mark, one) and one >= mark for one in marks)


class HostReaders:
    """
    Overview:
        One process's place among those that read a stream here. Thread-safe.
    Raises:
        - OSError: The file is gone, is none of ours, or has no place left.
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
        """Of what this process needs no more, nor anything before it in its epoch."""
        return self._words[self._place]

    @mark.setter
    def mark(self, mark: int) -> None:
        self._words[self._place] = mark

    @property
    def num_fetched(self) -> int:
        """Grows before a payload is there for all; who holds the stream's lock counts."""
        return self._words[_NUM_FETCHED]

    @num_fetched.setter
    def num_fetched(self, number: int) -> None:
        self._words[_NUM_FETCHED] = number

    @property
    def are_several(self) -> bool:
        """Whether another process reads the stream, too: one system call."""
        descriptor = self._file.descriptor  # Another thread may let go of the stream meanwhile.
        return descriptor >= 0 and range_holder(descriptor, 0, MAX_PROCESSES) is not None

    def others(self) -> List[int]:
        """The marks of the other processes."""
        found, ranges = [], [(0, MAX_PROCESSES)]
        while ranges:
            first, end = ranges.pop()
            place = range_holder(self._file.descriptor, first, end - first) if first < end else None
            if place is not None:  # Any of those in the range, not the first.
                found.append(self._words[place])
                ranges += [(first, place), (place + 1, end)]
        return found

    def close(self) -> None:
        """This process reads the stream no more."""
        self._file.close()


def create(path: str) -> None:
    """
    Overview:
        The file, nobody's own.
    Raises:
        - OSError: It cannot be made.
    """
    with created(path, PAGE) as (_, held):
        held.close()


def are_there(path: str) -> bool:
    """Whether a living process reads the stream whose file this is."""
    try:
        file = OwnerLock(private_files.opener(path))
    except FileNotFoundError:
        return False
    try:
        return range_holder(file.descriptor, 0, MAX_PROCESSES) is not None
    finally:
        file.close()
