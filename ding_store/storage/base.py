"""The types of a store's entries, values and states.

A store moves named numpy arrays and JSON-able headers. It handles no trees and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Union

import numpy as np

Header = Mapping[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, Array]
Buffer = Union[bytes, bytearray, memoryview]

#: Policies for an append to a full stream: wait, or drop the oldest entries to make room.
OVERFLOW = ('block', 'drop_oldest')

#: Start positions of a new reader: at the oldest entry still held, or behind the newest.
START = ('oldest', 'now')


#: Entry numbers fit into this many bits. Ids that Redis makes from its clock, in milliseconds, do not.
NUMBER_BITS = 40


class _Place(NamedTuple):
    epoch: str
    number: int


class EntryId(_Place):
    """
    Overview:
        Place of an entry in its stream. Numbers are dense (1, 2, 3, ...) within one epoch, whatever the server's clock
        does. A new epoch begins at each restart of the server, at any other loss of entries, and when the stream is
        deleted. Its numbers continue behind the last entry that is left. After a total loss they begin at 1.
    Attributes:
        - chain (:obj:`str`): A hash of all entries up to this one. It shows whether a server still has them. '' if it
          is unknown, as in an id built from another id. Comparisons ignore it.
    """

    chain: str = ''

    def chained(self, chain: str) -> EntryId:
        """Return the same place with this chain."""
        place = EntryId(*self)
        place.chain = chain
        return place


class ValueVersion(int):
    """
    Overview:
        Number of a value's version, with the id of the put that made it. A server that goes back in time gives a number
        twice. The id tells the two versions apart, if a caller passes on the version that ``get`` or ``put`` returned.
        Comparisons ignore the id.
    Attributes:
        - put_id (:obj:`str`): Random id of the put. '' if it is unknown.
    """

    put_id: str = ''

    def __new__(cls, number: int, put_id: str = '') -> ValueVersion:
        version = super().__new__(cls, number)
        version.put_id = put_id
        return version

    def is_of_another_put(self, known: int) -> bool:
        """Return whether ``known`` is another number, or the number of another put."""
        known_id = put_id_of(known)
        return self != known or (known_id != '' and known_id != self.put_id)


def put_id_of(version: Optional[int]) -> str:
    """Return the id of the put that made a version. '' for a plain number, or None."""
    return version.put_id if isinstance(version, ValueVersion) else ''


#: Before the oldest entry of any epoch.
OLDEST = EntryId('', 0)


@dataclass(frozen=True)
class Entry:
    """
    Overview:
        One append, as a reader receives it. ``arrays`` are read-only views. They are valid until the entry is acked or
        dropped by retention. If no durable reader holds the entry, copy the arrays, then call ``validate``.
    """

    stream: str
    id: EntryId
    writer: str
    sequence: int  # 1, 2, 3, ... per writer: readers skip duplicates by it
    header: Header
    arrays: Arrays
    guard: Optional[Callable[[], bool]] = field(default=None, repr=False, compare=False)
    is_lost: bool = False  # header and arrays cannot be recovered, and are empty

    def validate(self) -> bool:
        """Return whether ``arrays`` were intact until now. If not, discard what was read from them."""
        return self.guard is None or self.guard()


@dataclass(frozen=True)
class Value:
    """One version of a named value. ``arrays`` are read-only."""

    name: str
    version: int  # a ValueVersion if a store returned it; pass it to ``get`` unchanged
    header: Header
    arrays: Arrays


@dataclass
class StreamInfo:
    """
    Overview:
        State of a stream. ``last`` is the number of the newest entry of this epoch. ``floor`` is the number of the
        newest entry that was trimmed or dropped. The stream holds ``last - floor`` entries.
    """

    epoch: str = ''
    last: int = 0
    floor: int = 0
    pending_bytes: int = 0
    num_dropped: int = 0
    readers: Dict[str, int] = field(default_factory=dict)  # name -> number of the last acked entry
    durable: Dict[str, bool] = field(default_factory=dict)
    writers: Dict[str, int] = field(default_factory=dict)  # writer -> last sequence accepted in this epoch
    numbers: Dict[str, int] = field(default_factory=dict)  # writer -> number of that entry
    host: str = ''  # all readers are on it: payloads go through its shared memory; '': through Redis


class ServerMemory(NamedTuple):
    """Memory of one server: what it uses, and its ``maxmemory``, or None if it has none."""

    used_bytes: int
    limit_bytes: Optional[int] = None


@dataclass
class StoreInfo:
    """State of a store, for people and for ``ding-store status``."""

    address: str
    run: str
    server: str
    streams: Dict[str, StreamInfo] = field(default_factory=dict)
    values: Dict[str, int] = field(default_factory=dict)  # name -> newest version
    counters: Dict[str, int] = field(default_factory=dict)
    memory: Dict[str, ServerMemory] = field(default_factory=dict)  # address of each server that says it -> its memory
