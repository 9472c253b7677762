"""Values in parts that know each other again: what did not change from one version to the next is not sent again.

A payload is cut where its arrays begin. Each part is a key of its own, named by the version that sent it first, and a
version is the list of its parts. The writer compares bytes with those that it sent last, which is cheaper than a hash
(an array that changed is found out at its first bytes) and never wrong; readers compare names.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import zlib
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ding_store.errors import CorruptPayload

from .base import Buffer
from .checksum import checksum
from .wire import MAX_BYTES, PART_BYTES, Part, Pieces

#: Arrays up to this size share parts with their neighbours: each part costs a command and its keys, so that 5 MB in
#: parts of 100 KB take a fifth longer than in these.
SHARED_BYTES = 512 << 10

_HEAD = struct.Struct('<4sIIQ')
_MAGIC = b'DGL\x01'
_TOKEN_BYTES = 16
#: Number of the token, number of the part in the version that sent it, bytes, checksum.
_ROW = np.dtype([('token', '<u4'), ('number', '<u4'), ('num_bytes', '<u4'), ('crc', '<u4')])


class ValuePart(NamedTuple):
    """``token`` (32 hexadecimal digits) and ``number`` are its name: never the name of other bytes."""

    token: str
    number: int
    num_bytes: int
    crc: int


class PartList(NamedTuple):
    """What a version over the wire is: the parts of its payload, in their order."""

    parts: Tuple[ValuePart, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def offsets(self) -> List[int]:
        """Where in the payload each part begins."""
        return [0, *np.cumsum([part.num_bytes for part in self.parts]).tolist()][:-1]

    @property
    def stamp(self) -> int:
        """63 bits that say which payload this is."""
        return int.from_bytes(hashlib.blake2b(self.pack(), digest_size=8).digest(), 'little') >> 1 or 1

    def pack(self) -> bytes:
        tokens = {token: number for number, token in enumerate(dict.fromkeys(part.token for part in self.parts))}
        rows = np.array([(tokens[part.token], *part[1:]) for part in self.parts], _ROW).tobytes()
        body = b''.join(map(bytes.fromhex, tokens)) + rows
        return _HEAD.pack(_MAGIC, zlib.crc32(body), len(tokens), len(self.parts)) + body


def unpack(payload: bytes) -> Optional[PartList]:
    """
    Returns:
        - parts (:obj:`Optional[PartList]`): None if this is the payload itself.
    Raises:
        - CorruptPayload: It looks like a list of parts, and is none.
    """
    if payload[:4] != _MAGIC:
        return None
    try:
        _, crc, num_tokens, num_parts = _HEAD.unpack_from(payload)
    except struct.error as e:
        raise CorruptPayload('the list of its parts is malformed') from e
    body = payload[_HEAD.size :]
    is_good = zlib.crc32(body) == crc and len(body) == num_tokens * _TOKEN_BYTES + num_parts * _ROW.itemsize
    if not is_good or not num_parts:
        raise CorruptPayload('the list of its parts is malformed')
    tokens = [body[at : at + _TOKEN_BYTES].hex() for at in range(0, num_tokens * _TOKEN_BYTES, _TOKEN_BYTES)]
    rows = np.frombuffer(body, _ROW, num_parts, num_tokens * _TOKEN_BYTES)
    if rows['token'].max() >= num_tokens or not 0 < int(rows['num_bytes'].sum(dtype=np.uint64)) <= MAX_BYTES:
        raise CorruptPayload('the list of its parts is malformed')
    return PartList(tuple(ValuePart(tokens[row[0]], *row[1:]) for row in rows.tolist()))


def is_good(part: ValuePart, content: memoryview) -> bool:
    return checksum([content], len(content)) == part.crc


class SentParts:
    """
    Overview:
        What a writer sent of a value last: its bytes, and the names of their parts. Takes as much memory as the value.
        ``lock`` is to be held from the first ``changed`` to ``settle``.
    Arguments:
        - key (:obj:`Callable`): Of the parts of a token, but for their number.
    """

    def __init__(self, key: Callable[[str], str]) -> None:
        self.lock = threading.Lock()
        self._key = key
        self._contents: List[bytearray] = []
        self._parts: List[Optional[ValuePart]] = []  # None: not known to be in the server
        self._sent: List[ValuePart] = []

    def changed(self, pieces: Pieces, token: str) -> Iterator[Part]:
        """
        Overview:
            The parts that are to be sent, with their keys; when all were taken, ``parts`` lists what the version is of.
            As often as needed, then ``settle`` says what became of it.
        """
        self._sent = []
        contents = _cut(pieces)
        for number, content in enumerate(contents):
            known = self._remember(number, content)
            if known is None:
                held = self._contents[number]
                known = ValuePart(token, number, len(held), checksum([held], len(held)))
                yield f'{self._key(token)}{number}'.encode(), memoryview(held)
            self._sent.append(known)
        del self._contents[len(self._sent) :], self._parts[len(self._sent) :]

    @property
    def parts(self) -> PartList:
        return PartList(tuple(self._sent))

    @property
    def keys(self) -> str:
        return ''.join(f'{self._key(part.token)}{part.number} ' for part in self._sent)

    def settle(self, is_published: bool) -> None:
        """Whether the server has all of these parts and keeps them; else it is not known which it has."""
        self._parts = list(self._sent) if is_published else [None] * len(self._parts)

    def _remember(self, number: int, content: memoryview) -> Optional[ValuePart]:
        """The part with these bytes, if the server has it; else they are the ones to send."""
        if number == len(self._parts):
            self._contents.append(bytearray(content))
            self._parts.append(None)
        elif self._contents[number] != content:  # compared by memcmp, with bytearrays alone
            self._parts[number] = None
            if len(self._contents[number]) == len(content):
                np.copyto(np.frombuffer(self._contents[number], np.uint8), np.frombuffer(content, np.uint8))
            else:
                self._contents[number] = bytearray(content)
        return self._parts[number]


def _cut(pieces: Pieces) -> Iterator[memoryview]:
    """A payload's bytes, part by part; those that lie in one piece are not copied."""
    ends = iter(_ends(pieces.lengths))
    begin, end = 0, next(ends)
    held: List[Buffer] = []
    for buffer in pieces.buffers:
        view, at = memoryview(buffer).cast('B'), 0
        while at < len(view):
            taken = view[at : at + end - begin]
            at += len(taken)
            begin += len(taken)
            held.append(taken)
            if begin == end:
                yield taken if len(held) == 1 else memoryview(b''.join(held))
                held = []
                end = next(ends, end)


def _ends(lengths: Sequence[int]) -> List[int]:
    """
    Where parts end: behind the head; where a large array begins, every ``PART_BYTES`` of it, and where it ends; small
    neighbours share parts.
    """
    ends, begin, at = [lengths[0]], lengths[0], lengths[0]
    for length in lengths[1:]:
        if length > SHARED_BYTES and at > begin:
            ends.append(at)
            begin = at
        at += length
        while at - begin > PART_BYTES:
            begin += PART_BYTES
            ends.append(begin)
        if at - begin > SHARED_BYTES or (length > SHARED_BYTES and at > begin):
            ends.append(at)
            begin = at
    return ends if begin == at else [*ends, at]


def where_known(lists: Dict[int, PartList]) -> Dict[Tuple[str, int], List[Tuple[int, int]]]:
    """Where the parts of the payloads in some slots are: name -> slots, and offsets in them."""
    found: Dict[Tuple[str, int], List[Tuple[int, int]]] = {}
    for slot, listed in lists.items():
        for part, offset in zip(listed.parts, listed.offsets):
            found.setdefault(part[:2], []).append((slot, offset))
    return found
