"""Values in parts, of which an unchanged one is not sent again with the next version.

A payload is cut at the beginnings of its arrays. Each part has its own key, named by the version that sent it first. A
version is the list of its parts. The writer compares the bytes with those that it sent last: that is cheaper than a
hash, because a change is mostly found in an array's first bytes, and never wrong. Readers compare names. Small arrays
share parts, but unchanged arrays share none with changing ones.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import zlib
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ding_store.errors import CorruptPayload
from ding_store.storage.base import Buffer
from ding_store.storage.encoding.checksum import checksum
from ding_store.storage.encoding.framing import MAX_BYTES, PART_BYTES, Pieces

#: Arrays up to this size share parts with their neighbours. Each part costs a command and its keys: 5 MB in parts of
#: 100 KB take a fifth longer than in parts of this size.
SHARED_BYTES = 512 << 10
#: After this many versions without a change, an array shares parts only with other unchanged ones.
STILL_AFTER = 3

_HEAD = struct.Struct('<4sIIQ')
_MAGIC = b'DGL\x01'
_TOKEN_BYTES = 16
#: Fields: number of the token, number of the part in the version that sent it, bytes, checksum.
_ROW = np.dtype([('token', '<u4'), ('number', '<u4'), ('num_bytes', '<u4'), ('crc', '<u4')])


class ValuePart(NamedTuple):
    """A part. ``token`` (32 hexadecimal digits) and ``number`` are its name, which no other bytes ever get."""

    token: str
    number: int
    num_bytes: int
    crc: int


class PartList(NamedTuple):
    """The parts of a version's payload, in order."""

    parts: Tuple[ValuePart, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def offsets(self) -> List[int]:
        """Offset of each part in the payload."""
        return [0, *np.cumsum([part.num_bytes for part in self.parts]).tolist()][:-1]

    @property
    def stamp(self) -> int:
        """63 bits that identify this payload."""
        return int.from_bytes(hashlib.blake2b(self.pack(), digest_size=8).digest(), 'little') >> 1 or 1

    def pack(self) -> bytes:
        tokens = {token: number for number, token in enumerate(dict.fromkeys(part.token for part in self.parts))}
        rows = np.array([(tokens[part.token], *part[1:]) for part in self.parts], _ROW).tobytes()
        body = b''.join(map(bytes.fromhex, tokens)) + rows
        return _HEAD.pack(_MAGIC, zlib.crc32(body), len(tokens), len(self.parts)) + body


def unpack(payload: bytes) -> Optional[PartList]:
    """
    Overview:
        Read a list of parts.
    Returns:
        - parts (:obj:`Optional[PartList]`): None if ``payload`` is the payload itself.
    Raises:
        - CorruptPayload: It begins like a list of parts, but is malformed.
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


class _Unit:
    """An array, a piece of a large one, or the head: the bytes sent last, and the versions since they changed."""

    def __init__(self, num_bytes: int, shares: bool) -> None:
        self.num_bytes = num_bytes
        self.shares = shares  # may share a part with its neighbours
        self.content = bytearray()
        self.has_changed = False
        self.age = 0  # -1 from a change until ``flush``

    @property
    def is_still(self) -> bool:
        return self.age >= STILL_AFTER

    def take(self, content: memoryview) -> None:
        if self.content == content:  # memcmp, which Python uses for bytearrays only
            return
        self.has_changed, self.age = True, -1
        if self.content:
            np.copyto(np.frombuffer(self.content, np.uint8), np.frombuffer(content, np.uint8))
        else:
            self.content = bytearray(content)

    def flush(self) -> None:
        self.age += 1
        self.has_changed = False


_Group = Tuple[int, int]  # units in one part: the first, and the one after the last


class SentParts:
    """
    Overview:
        The parts of a value that a writer sent last: their bytes and names. Takes as much memory as the value. Hold
        ``lock`` from the first ``changed`` to ``flush``.
    Arguments:
        - key (:obj:`Callable`): Returns the key of a token's parts without their number.
    """

    def __init__(self, key: Callable[[str], str]) -> None:
        self.lock = threading.Lock()
        self._key = key
        self._lengths: List[int] = []
        self._units: List[_Unit] = []
        self._groups: List[_Group] = []
        self._known: Dict[_Group, ValuePart] = {}  # parts that the server has
        self._sent: List[ValuePart] = []

    def changed(self, pieces: Pieces, token: str) -> Iterator[Tuple[bytes, Sequence[Buffer]]]:
        """
        Overview:
            Yield the key of each part to send, and its bytes in pieces. After the last one, ``parts`` lists the parts
            of the version. Call it for each attempt, then ``flush`` or ``keep`` with the outcome.
        """
        if pieces.lengths != self._lengths:
            self._lengths, self._units, self._known = pieces.lengths, _units_of(pieces.lengths), {}
            self._groups = _grouped(self._units)
        self._sent = []
        contents = _cut(pieces, [unit.num_bytes for unit in self._units])
        for number, group in enumerate(self._groups):
            units = self._units[slice(*group)]
            for unit in units:
                unit.take(next(contents))
            known = None if any(unit.has_changed for unit in units) else self._known.get(group)
            if known is None:
                held = [unit.content for unit in units]
                num_bytes = sum(map(len, held))
                known = ValuePart(token, number, num_bytes, checksum(held, num_bytes))
                yield f'{self._key(token)}{number}'.encode(), held
            self._sent.append(known)

    @property
    def parts(self) -> PartList:
        return PartList(tuple(self._sent))

    @property
    def keys(self) -> str:
        return ''.join(f'{self._key(part.token)}{part.number} ' for part in self._sent)

    def keys_of(self, token: str) -> str:
        """Return the keys of all parts that may have been sent under this token since the last ``flush``."""
        return ''.join(f'{self._key(token)}{number} ' for number in range(len(self._groups)))

    def keep(self) -> None:
        """Note that the server has all parts, but did not publish. The next attempt sends none of them again."""
        self._known = dict(zip(self._groups, self._sent))
        for unit in self._units:
            unit.has_changed = False

    def flush(self, is_published: bool) -> None:
        """End the attempts. If not ``is_published``, it is unknown which parts the server has."""
        if not is_published:
            self._known = {}
            return
        sent = dict(zip(self._groups, self._sent))
        for unit in self._units:
            unit.flush()
        self._groups = _grouped(self._units)
        self._known = {group: sent[group] for group in self._groups if group in sent}


def _units_of(lengths: Sequence[int]) -> List[_Unit]:
    """Cut each large array into several units. A piece of a large array and the head share no part."""
    found = [_Unit(lengths[0], shares=False)]
    for length in lengths[1:]:
        for at in range(0, length, PART_BYTES):
            found.append(_Unit(min(PART_BYTES, length - at), shares=length <= SHARED_BYTES))
    return found


def _grouped(units: Sequence[_Unit]) -> List[_Group]:
    """Group neighbours into parts: small arrays that all change or all stay unchanged."""
    groups: List[_Group] = []
    begin, num_bytes = 0, 0
    for number, unit in enumerate(units):
        first = units[begin]
        if number > begin and not (unit.shares and first.shares and unit.is_still == first.is_still):
            groups.append((begin, number))
            begin, num_bytes = number, 0
        num_bytes += unit.num_bytes
        if num_bytes > SHARED_BYTES:
            groups.append((begin, number + 1))
            begin, num_bytes = number + 1, 0
    return groups if begin == len(units) else [*groups, (begin, len(units))]


def _cut(pieces: Pieces, sizes: Sequence[int]) -> Iterator[memoryview]:
    """Yield a payload's bytes in the given sizes. Bytes from one buffer are not copied."""
    left = iter(sizes)
    missing, held = next(left), []
    for buffer in pieces.buffers:
        view, at = memoryview(buffer).cast('B'), 0
        while at < len(view):
            taken = view[at : at + missing]
            at += len(taken)
            missing -= len(taken)
            held.append(taken)
            if not missing:
                yield taken if len(held) == 1 else memoryview(b''.join(held))
                missing, held = next(left, 0), []


def where_known(lists: Dict[int, PartList]) -> Dict[Tuple[str, int], List[Tuple[int, int]]]:
    """Map the name of each part to its places: slots, and the offsets in them."""
    found: Dict[Tuple[str, int], List[Tuple[int, int]]] = {}
    for slot, listed in lists.items():
        for part, offset in zip(listed.parts, listed.offsets):
            found.setdefault(part[:2], []).append((slot, offset))
    return found
