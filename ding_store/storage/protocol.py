"""What a store and its server send to each other."""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ding_store.errors import VersionConflict
from ding_store.storage.base import Buffer, EntryId, ValueVersion

#: Statuses of the server's reply to an append.
OK = 'OK'  # accepted now or earlier: ``number`` is its place
STALE = 'STALE'  # the stream has another epoch: send again with the state of this reply
GAP = 'GAP'  # entries before this one are missing: send again from ``last + 1``
FULL = 'FULL'  # no room: wait until the stream's counter of freed entries passes ``freed``
PLANE = 'PLANE'  # the reference is for a past transport: send again for the one in this reply
FORGOTTEN = 'FORGOTTEN'  # the server dropped this writer, which was silent while many others came and went

#: The server keeps a writer while it holds an entry of it. A writer that left is dropped with its last entry. Among
#: the others, the server keeps those with the newest entries: at least this many, and at most twice as many.
MAX_SILENT_WRITERS = 512

#: The transport of a payload in bytes: the server accepts it at any time.
WIRE = -1


class AppendRequest(NamedTuple):
    """
    Overview:
        A writer's request to append one entry. ``base`` is the lowest sequence that the writer still holds: it never
        sends one below. With sequence 0, the request appends nothing and returns the stream's state.
    """

    stream: str
    epoch: str
    sequence: int
    base: int
    payload: bytes = b''
    max_pending_bytes: int = 0  # 0: no limit, for entries that were accepted once
    drop_oldest: bool = False
    size: int = 0  # bytes of the payload, also if only a reference to it is sent
    transport: int = WIRE  # number of the transport that this reference is for
    readers: str = ''  # durable readers that the server may have lost, from an earlier reply
    last_reply: str = ''  # "<last>:<number>" of the last reply of this epoch: a server that has less lost entries
    admission: int = 0  # number that the server gave this writer; 0: none
    listed: int = 0  # ``listed`` of the last reply with readers


#: Two counts of ended runs of this name. First: all data of the server was put aside. Second: the stream was
#: deleted since then. If a count grew, missing entries are not lost: they ended with their run.
Ends = Tuple[int, int]


class AppendReply(NamedTuple):
    """The server's reply to an ``AppendRequest``: a status and the stream's state."""

    status: str
    epoch: str  # '': there is no such stream
    number: int  # of the entry sent; for STALE, GAP and sequence 0 of this writer's last one
    last: int  # this writer's last accepted sequence
    floor: int  # entries up to here are trimmed: their copies can go
    freed: int
    num_dropped: int
    transport: int = 0
    host: str = ''  # all readers are on it: references to its files are accepted; '': only payloads
    wanted: int = 0  # entries up to here must be readable through Redis
    ends: Ends = (0, 0)  # valid only if ``epoch`` differs from that of the request
    readers: Optional[str] = ''  # in the format of ``lua/stream.lua``; None: unchanged
    chain: str = ''  # up to the entry sent, if it was accepted now
    admission: int = 0  # number of this writer's admission to the stream
    listed: int = 0  # grows when the readers change


class FreedCapacity(NamedTuple):
    """The server's notification to writers that wait for room."""

    counter: int  # grows with everything that makes room
    epoch: str
    floor: int  # entries of this epoch up to here are trimmed
    chain: str = ''  # up to there


class Backfill(NamedTuple):
    """The payload of an entry that a writer had sent as a reference."""

    stream: str
    epoch: str
    sequence: int
    number: int  # of the entry, or an upper bound of it
    payload: bytes


class StoredEntry(NamedTuple):
    """An entry as the server has it: ``payload`` may be a reference."""

    id: EntryId
    writer: str
    sequence: int
    payload: Buffer


class Remote(NamedTuple):
    """A payload that the server holds outside the entry's record. ``place`` is unique to its bytes."""

    id: EntryId
    place: bytes
    num_bytes: int


#: Called each time bytes arrive, so that waiting processes see the progress of a download.
Moved = Callable[[], None]
#: Downloads payloads, each into its buffer. Returns False for each payload of which a part is missing.
Download = Callable[[Sequence[Remote], Sequence[memoryview], Moved], List[bool]]
#: Returns the payloads of entries of a stream with the help of a download. None if parts are missing.
Fetch = Callable[[str, Sequence[Remote], Download], List[Optional[Buffer]]]


def unwatched() -> None:
    """Do nothing: no other process waits for these bytes."""


def fetch_own(stream: str, wanted: Sequence[Remote], download: Download) -> List[Optional[Buffer]]:
    """Download payloads into this process's own memory."""
    payloads = [np.empty(one.num_bytes, np.uint8).data for one in wanted]
    are_whole = download(wanted, payloads, unwatched)
    return [payload.toreadonly() if is_whole else None for payload, is_whole in zip(payloads, are_whole)]


class Version(NamedTuple):
    """A version of a value as the server has it: its payload, a reference to a slot on some host, or both."""

    version: ValueVersion
    payload: bytes  # or the list of its parts; b'' if the server has no payload
    reference: bytes  # b'' if it is in no slot
    is_coming: bool = False  # a reader requested the payload before


def conflict(name: str, version: int, expected: int) -> VersionConflict:
    """Return the error of a put that expected another version than the newest one."""
    why = ' as it was read: the server went back in time' if version == expected else ''
    return VersionConflict(f'value {name!r} is at version {version}, not at {expected}{why}')


#: States of an entry that holds a reference.
FILLED = 'FILLED'  # its payload is in the store
WAITING = 'WAITING'  # its writer may still backfill it
LOST = 'LOST'  # the entry exists, but its writer no longer has the payload
GONE = 'GONE'  # trimmed or dropped: the reader continues with the entry after it
OVER = 'OVER'  # its epoch is over: if it was not acked, its writer appends it again before later entries


def fate(is_over: bool, is_held: bool, is_filled: bool, sequence: int, base: int) -> str:
    """Return the state of an entry. ``base`` is the lowest sequence number that its writer still holds."""
    if is_over:
        return OVER
    if not is_held:
        return GONE
    if is_filled:
        return FILLED
    return LOST if sequence < base else WAITING
