"""Arrays <-> bytes: a JSON head and aligned raw buffers under one checksum. No pickle.

offset  size
0       4     magic 'DGW' and the format's version, 2
4       4     checksum of everything that follows: see ``checksum``
8       8     total bytes
16      4     bytes of the head
20            head: JSON {"header": {...}, "arrays": [[name, dtype, shape], ...]}
...           the arrays in that order, each at the next multiple of 64, zeros in between
"""

from __future__ import annotations

import json
import struct
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple, TypeVar

import numpy as np

from ding_store.errors import CorruptPayload

from .base import Array, Arrays, Buffer, Entry, EntryId, Header, Value
from .checksum import checksum
from .compression import compressed, decompressed, is_compressed

#: A key, and the bytes that are there, or where they belong.
Part = Tuple[bytes, memoryview]
T = TypeVar('T')

#: Larger payloads go in parts: Redis takes an argument of SET from the socket to where it stays, but only if it has
#: 32 KiB or more; one that goes through a script into a stream is copied four times.
INLINE_BYTES = 32 << 10
#: Huge ones are slow again: no two steps of their way overlap.
PART_BYTES = 1 << 20
#: A limit of ours, not of Redis: what one entry or value may have.
MAX_BYTES = 2_000_000_000

MAGIC = b'DGW\x02'
ALIGN = 64
_PREFIX = struct.Struct('<4sIQI')
_CHECKED_FROM = 8  # The checksum covers all behind itself; magic is compared.
_MAX_NDIM = 32
_DTYPES = [np.dtype(order + code) for code in '?bBhHiIlLqQefdgFDG' for order in '<>']
DTYPES: Dict[str, np.dtype[Any]] = {dtype.str: dtype for dtype in _DTYPES}
_NAMES = {dtype: dtype.str for dtype in _DTYPES}
_PADDINGS = [bytes(size) for size in range(ALIGN)]
_ENCODER = json.JSONEncoder(separators=(',', ':'))


def encode(header: Header, arrays: Arrays, compression: Optional[str] = None) -> bytes:
    """
    Overview:
        One entry or value as bytes, copied once; with ``compression``, a codec's name, compressed if that is shorter.
    Raises:
        - TypeError: The header is no JSON object, or an array's dtype is not boolean or numeric; names which.
    """
    if compression is None:
        return b''.join(encode_parts(header, arrays))
    return seal(b''.join(encode_parts(header, arrays, checked=False)), compression)


def encode_parts(header: Header, arrays: Arrays, checked: bool = True) -> List[Buffer]:
    """
    Overview:
        The same bytes in pieces that share memory with contiguous ``arrays``, for writers with a place of their own:
        first the prefix, second the rest of the head. Not ``checked``, they carry no checksum until ``seal``.
    """
    columns = {name: _column(name, array) for name, array in arrays.items()}
    head = _head(header, columns)
    total = _PREFIX.size + len(head)
    body: List[Buffer] = [head, _PADDINGS[-total % ALIGN]]
    total += -total % ALIGN
    for column in columns.values():
        missing = -column.nbytes % ALIGN
        body.append(column.reshape(-1).view(np.uint8).data)
        if missing:
            body.append(_PADDINGS[missing])
        total += column.nbytes + missing
    prefix = _PREFIX.pack(MAGIC, 0, total, len(head))
    crc = checksum([prefix[_CHECKED_FROM:], *body], total) if checked else 0
    return [_PREFIX.pack(MAGIC, crc, total, len(head)), *body]


def length_of(parts: List[Buffer]) -> int:
    """Bytes of all ``encode_parts`` together."""
    return int(_PREFIX.unpack(parts[0])[2])


class Pieces(NamedTuple):
    """
    An encoded payload without a checksum, in pieces that share memory with its arrays; ``lengths`` are those of the
    head and of each array with the zeros behind it.
    """

    buffers: List[Buffer]
    lengths: List[int]

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths)

    def sealed(self) -> bytes:
        return seal(b''.join(self.buffers))


def encode_pieces(header: Header, arrays: Arrays) -> Pieces:
    """As ``encode_parts``, for what may travel array by array."""
    buffers = encode_parts(header, arrays, checked=False)
    return Pieces(buffers, [sum(map(len, buffers[:3])), *(_aligned(array.nbytes) for array in arrays.values())])


def seal(payload: Buffer, compression: Optional[str] = None) -> bytes:
    """A copy of encoded bytes with the checksum that they lack, or compressed, which has one of its own."""
    shorter = compressed(payload, compression) if compression is not None else None
    if shorter is not None:
        return shorter
    copy = bytearray(payload)
    struct.pack_into('<I', copy, len(MAGIC), checksum([memoryview(copy)[_CHECKED_FROM:]], len(copy)))
    return bytes(copy)


def payload_bytes(buffer: Buffer) -> int:
    """How many bytes the payload at the beginning of these says that it has."""
    if len(buffer) < _PREFIX.size:
        raise CorruptPayload(f'{len(buffer)} bytes are too few for a payload')
    return int(_PREFIX.unpack_from(buffer)[2])


def decode(buffer: Buffer, verify: bool = True) -> Tuple[Dict[str, Any], Dict[str, Array]]:
    """
    Overview:
        Header and arrays of encoded bytes; the arrays are read-only views of ``buffer``, or of what it decompresses
        to, and keep that alive.
    Arguments:
        - verify (:obj:`bool`): Whether to compute the checksum; sizes and types are checked in any case.
    Raises:
        - CorruptPayload: These are not bytes that ``encode`` made, whole and unchanged.
        - ConfigError: They are compressed, and this process lacks the package for that.
    """
    view = memoryview(buffer).toreadonly().cast('B')
    if is_compressed(view):
        view, verify = memoryview(decompressed(view)), False
    try:
        head_bytes = _check_prefix(view, verify)
        head = json.loads(bytes(view[_PREFIX.size : _PREFIX.size + head_bytes]))
        header, columns = head['header'], head['arrays']
        if not isinstance(header, dict):
            raise CorruptPayload('the header is no JSON object')
        return header, _views(view, columns, _aligned(_PREFIX.size + head_bytes))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError) as e:
        raise CorruptPayload(f'the head of a payload is malformed: {type(e).__name__}') from e


def decode_entry(
    stream: str,
    entry_id: EntryId,
    writer: str,
    sequence: int,
    payload: Buffer,
    guard: Optional[Callable[[], bool]] = None,
) -> Entry:
    """With a ``guard`` the payload is in memory that it watches over: no checksum."""
    try:
        header, arrays = decode(payload, verify=guard is None)
    except CorruptPayload as e:
        raise corrupt_entry(stream, entry_id, str(e), writer, sequence) from e
    return Entry(stream, entry_id, writer, sequence, header, arrays, guard)


def corrupt_entry(stream: str, entry_id: EntryId, reason: str, writer: str = '', sequence: int = 0) -> CorruptPayload:
    whose = f', {sequence} of {writer}' if writer else ''
    error = CorruptPayload(f'entry {entry_id.number} of {stream!r}{whose}: {reason}')
    error.entry_id, error.writer, error.sequence = entry_id, writer, sequence
    return error


def up_to_corrupt(entries: Iterable[T]) -> List[T]:
    """What was decoded before the first corrupt entry; that one is the next read's, which raises."""
    good: List[T] = []
    try:
        for entry in entries:
            good.append(entry)  # noqa: PERF402 what came before an error is kept
    except CorruptPayload:
        if not good:
            raise
    return good


def decode_value(name: str, version: int, payload: Buffer, verify: bool = True) -> Value:
    try:
        header, arrays = decode(payload, verify)
    except CorruptPayload as e:
        raise CorruptPayload(f'version {version} of value {name!r}: {e}') from e
    return Value(name, version, header, arrays)


def _column(name: str, array: Array) -> Array:
    if type(array) is np.ndarray and array.dtype in _NAMES and array.flags.c_contiguous and type(name) is str:
        return array
    if not isinstance(name, str):
        raise TypeError(f'array name {name!r} must be a string')
    if not isinstance(array, (np.ndarray, np.generic)):
        raise TypeError(f'array {name!r} is a {type(array).__name__}; pass a numpy array')
    if array.dtype.str not in DTYPES or array.dtype.fields:
        raise TypeError(f'array {name!r} has dtype {array.dtype}; only boolean and numeric dtypes are stored')
    return np.asarray(array, order='C')


def _head(header: Header, columns: Dict[str, Array]) -> bytes:
    if not all(isinstance(key, str) for key in header):
        raise TypeError(f'keys of a header must be strings, not {sorted(map(repr, header))}')
    shapes = [[name, _NAMES[column.dtype], column.shape] for name, column in columns.items()]
    try:
        return _ENCODER.encode({'header': dict(header), 'arrays': shapes}).encode()
    except (TypeError, ValueError) as e:
        raise TypeError(f'header {_shortened(header)} must be JSON-able: {e}') from e


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + '...'


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def _check_prefix(view: memoryview, verify: bool) -> int:
    if len(view) < _PREFIX.size:
        raise CorruptPayload(f'{len(view)} bytes are too few for a payload')
    magic, crc, total, head_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise CorruptPayload(f'bytes begin with {magic!r} where {MAGIC!r} is expected')
    if total != len(view) or _aligned(_PREFIX.size + head_bytes) > total:
        raise CorruptPayload(f'{len(view)} bytes of a payload that had {total}')
    if verify and checksum([view[_CHECKED_FROM:]], total) != crc:
        raise CorruptPayload('the checksum does not match')
    return int(head_bytes)


def _views(view: memoryview, columns: List[Any], offset: int) -> Dict[str, Array]:
    arrays: Dict[str, Array] = {}
    for name, dtype, shape in columns:
        array = _view(view, dtype, shape, offset)
        offset = _aligned(offset + array.nbytes)
        if not isinstance(name, str) or name in arrays:
            raise CorruptPayload('an array has no name of its own')
        arrays[name] = array
    if offset != len(view):
        raise CorruptPayload(f'{len(view) - offset} bytes belong to no array')
    return arrays


def _view(view: memoryview, dtype: str, shape: List[int], offset: int) -> Array:
    size = DTYPES[dtype].itemsize
    if not isinstance(shape, list):
        raise CorruptPayload('an array has no shape')
    for length in shape:
        if type(length) is not int or length < 0:
            raise CorruptPayload('an array has an impossible shape')
        size *= length
    if len(shape) > _MAX_NDIM or offset + size > len(view):
        raise CorruptPayload('an array is larger than its payload')
    return np.ndarray(tuple(shape), DTYPES[dtype], buffer=view, offset=offset)
