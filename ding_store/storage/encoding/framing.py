"""Conversion between arrays and bytes: a JSON head and aligned raw buffers, with one checksum. No pickle.

offset  size
0       4     magic 'DGW' and the format's version, 2
4       4     checksum of everything that follows: see ``checksum``
8       8     total bytes
16      4     bytes of the head
20            head: JSON {"header": {...}, "arrays": [[name, dtype, shape], ...]}
...           the arrays in that order, each at the next multiple of 64, zeros in between
"""

from __future__ import annotations

import functools
import json
import struct
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple, TypeVar

import numpy as np

from ding_store.errors import CorruptPayload
from ding_store.storage.base import Array, Arrays, Buffer, Entry, EntryId, Header, Value
from ding_store.storage.encoding.checksum import checksum
from ding_store.storage.encoding.compression import check_compressed, compressed, decompressed, is_compressed

#: A part's key, and its bytes or the memory for them.
Part = Tuple[bytes, memoryview]
T = TypeVar('T')

#: Larger payloads go in parts. Redis keeps an argument of SET where it was received, but an argument that goes through
#: a script into a stream is copied four times. Below this size the copies are faster than a check of the parts.
INLINE_BYTES = 128 << 10
#: Size of a part. Larger ones are slower, because no two steps of their way overlap.
PART_BYTES = 1 << 20
#: Maximum size of an entry or value. This limit is not Redis's.
MAX_BYTES = 2_000_000_000

MAGIC = b'DGW\x02'
ALIGN = 64
_PREFIX = struct.Struct('<4sIQI')
_CHECKED_FROM = 8  # The checksum covers everything after itself. The magic bytes are compared.
_MAX_NDIM = 32
_DTYPES = [np.dtype(order + code) for code in '?bBhHiIlLqQefdgFDG' for order in '<>']
DTYPES: Dict[str, np.dtype[Any]] = {dtype.str: dtype for dtype in _DTYPES}
_NAMES = {dtype: dtype.str for dtype in _DTYPES}
_PADDINGS = [bytes(size) for size in range(ALIGN)]
_ENCODER = json.JSONEncoder(separators=(',', ':'))
_HEADER, _ARRAYS = b'{"header":', b',"arrays":'
#: Cache of parsed array lists. The entries of a stream mostly have the same list. Longer texts are not kept.
_NUM_KNOWN, _MAX_KNOWN_BYTES = 64, 16 << 10
_COPIED_BYTES = 4 << 10


def encode(header: Header, arrays: Arrays, compression: Optional[str] = None) -> bytes:
    """
    Overview:
        Encode one entry or value with a single copy. With ``compression``, a codec's name, the result is compressed if
        that makes it smaller.
    Raises:
        - TypeError: The header is not a JSON object, or an array's dtype is not boolean or numeric.
    """
    if compression is None:
        return b''.join(encode_parts(header, arrays))
    return seal(b''.join(encode_parts(header, arrays, checked=False)), compression)


def encode_parts(header: Header, arrays: Arrays, checked: bool = True) -> List[Buffer]:
    """
    Overview:
        Encode as ``encode`` does, but return pieces, so that the caller can write them to its own memory. The first is
        the prefix, the second the rest of the head, then the arrays follow. The pieces of large contiguous arrays share
        their memory.
    Arguments:
        - checked (:obj:`bool`): False: the checksum stays 0 until ``seal``.
    """
    columns = {name: _column(name, array) for name, array in arrays.items()}
    head = _head(header, columns)
    total = _PREFIX.size + len(head)
    body: List[Buffer] = [head, _PADDINGS[-total % ALIGN]]
    total += -total % ALIGN
    for column in columns.values():
        missing = -column.nbytes % ALIGN
        body.append(_bytes_of(column))
        if missing:
            body.append(_PADDINGS[missing])
        total += column.nbytes + missing
    prefix = _PREFIX.pack(MAGIC, 0, total, len(head))
    crc = checksum([prefix[_CHECKED_FROM:], *body], total) if checked else 0
    return [_PREFIX.pack(MAGIC, crc, total, len(head)), *body]


def length_of(parts: List[Buffer]) -> int:
    """Return the total bytes of the pieces from ``encode_parts``."""
    return int(_PREFIX.unpack(parts[0])[2])


class Pieces(NamedTuple):
    """
    An encoded payload in pieces that share memory with its arrays, without a checksum. ``lengths`` has the bytes of the
    head, and those of each array with its padding.
    """

    buffers: List[Buffer]
    lengths: List[int]

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths)

    def sealed(self, compression: Optional[str] = None) -> bytes:
        return seal(b''.join(self.buffers), compression)


def encode_pieces(header: Header, arrays: Arrays) -> Pieces:
    """Encode as ``encode_parts`` does, with the lengths needed to send array by array."""
    buffers = encode_parts(header, arrays, checked=False)
    return Pieces(buffers, [sum(map(len, buffers[:3])), *(_aligned(array.nbytes) for array in arrays.values())])


def seal(payload: Buffer, compression: Optional[str] = None) -> bytes:
    """Return a copy of encoded bytes with their checksum added, or compressed with a checksum there."""
    shorter = compressed(payload, compression) if compression is not None else None
    if shorter is not None:
        return shorter
    copy = bytearray(payload)
    struct.pack_into('<I', copy, len(MAGIC), checksum([memoryview(copy)[_CHECKED_FROM:]], len(copy)))
    return bytes(copy)


def payload_bytes(buffer: Buffer) -> int:
    """Return the size that the prefix of a payload states."""
    if len(buffer) < _PREFIX.size:
        raise CorruptPayload(f'{len(buffer)} bytes are too few for a payload')
    return int(_PREFIX.unpack_from(buffer)[2])


def is_whole(payload: memoryview) -> bool:
    """True if these are all bytes of a payload, unchanged."""
    try:
        check_compressed(payload) if is_compressed(payload) else _check_prefix(payload, verify=True)
    except CorruptPayload:
        return False
    return True


def decode(buffer: Buffer, verify: bool = True) -> Tuple[Dict[str, Any], Dict[str, Array]]:
    """
    Overview:
        Return header and arrays of encoded bytes. The arrays are read-only views of ``buffer``, or of the decompressed
        bytes, and keep those alive.
    Arguments:
        - verify (:obj:`bool`): True: check the checksum. Sizes and types are always checked.
    Raises:
        - CorruptPayload: ``encode`` did not make these bytes, or they were changed or cut.
        - ConfigError: They are compressed, and this process lacks the codec's package.
    """
    view = memoryview(buffer).toreadonly().cast('B')
    if is_compressed(view):
        view, verify = memoryview(decompressed(view)), False
    try:
        head_bytes = _check_prefix(view, verify)
        header, layout = _parsed(bytes(view[_PREFIX.size : _PREFIX.size + head_bytes]))
        if not isinstance(header, dict):
            raise CorruptPayload('the header is no JSON object')
        return header, _views(view, layout, _aligned(_PREFIX.size + head_bytes))
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
    """Decode an entry. With a ``guard`` its payload is in shared memory, and may have no checksum."""
    try:
        header, arrays = decode(payload, verify=guard is None or _has_checksum(payload))
    except CorruptPayload as e:
        raise corrupt_entry(stream, entry_id, str(e), writer, sequence) from e
    return Entry(stream, entry_id, writer, sequence, header, arrays, guard)


def _has_checksum(payload: Buffer) -> bool:
    return len(payload) >= _PREFIX.size and _PREFIX.unpack_from(payload)[1] != 0


def corrupt_entry(stream: str, entry_id: EntryId, reason: str, writer: str = '', sequence: int = 0) -> CorruptPayload:
    whose = f', {sequence} of {writer}' if writer else ''
    error = CorruptPayload(f'entry {entry_id.number} of {stream!r}{whose}: {reason}')
    error.entry_id, error.writer, error.sequence = entry_id, writer, sequence
    return error


def up_to_corrupt(entries: Iterable[T]) -> List[T]:
    """Return the entries before the first corrupt one. If that is the first of all, raise its error."""
    good: List[T] = []
    try:
        for entry in entries:
            good.append(entry)  # noqa: PERF402 entries before an error are kept
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
        raise TypeError(f'array {name!r} is a {type(array).__name__}. Pass a numpy array.')
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f'array {name!r} is masked. Pass its filled() and its mask as two arrays.')
    if array.dtype.str not in DTYPES or array.dtype.fields:
        raise TypeError(f'array {name!r} has dtype {array.dtype}. Pass a boolean or numeric one.')
    return np.asarray(array, order='C')


def _bytes_of(column: Array) -> Buffer:
    # A copy of a few bytes is faster than a view.
    return column.tobytes() if column.nbytes <= _COPIED_BYTES else column.reshape(-1).view(np.uint8).data


def _head(header: Header, columns: Dict[str, Array]) -> bytes:
    if not all(isinstance(key, str) for key in header):
        raise TypeError(f'keys of a header must be strings, not {sorted(map(repr, header))}')
    try:
        text = _ENCODER.encode(dict(header)).encode() if header else b'{}'
    except (TypeError, ValueError, RecursionError) as e:
        raise TypeError(f'header {_shortened(header)} must be JSON-able: {e}') from e
    shapes = _shapes_text(tuple((name, column.dtype, column.shape) for name, column in columns.items()))
    return b'%b%b%b%b}' % (_HEADER, text, _ARRAYS, shapes)


@functools.lru_cache(_NUM_KNOWN)
def _shapes_text(columns: Tuple[Tuple[str, np.dtype[Any], Tuple[int, ...]], ...]) -> bytes:
    return _ENCODER.encode([[name, _NAMES[dtype], shape] for name, dtype, shape in columns]).encode()


def _shortened(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits in it, or deeply nested lists
        return f'of type {type(value).__name__}'
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


class _Layout(NamedTuple):
    """Name, dtype, shape and offset of each array, counted from the first array."""

    columns: List[Tuple[str, np.dtype[Any], Tuple[int, ...], int]]
    num_bytes: int


def _parsed(head: bytes) -> Tuple[Any, _Layout]:
    # Strings in JSON contain no bare quotes, and the list of arrays has no keys. So the last match is before that list.
    at = head.rfind(_ARRAYS)
    is_ours = at >= 0 and head.startswith(_HEADER) and head.endswith(b'}')
    if not is_ours or len(head) - at > _MAX_KNOWN_BYTES:
        parsed = json.loads(head)
        return parsed['header'], _layout(parsed['arrays'])
    header = head[len(_HEADER) : at]
    # Most objects have no header, and the parser takes longer than the rest of this function.
    return {} if header == b'{}' else json.loads(header), _known_layout(head[at + len(_ARRAYS) : -1])


@functools.lru_cache(_NUM_KNOWN)
def _known_layout(text: bytes) -> _Layout:
    return _layout(json.loads(text))


def _layout(columns: List[Any]) -> _Layout:
    placed: Dict[str, Tuple[str, np.dtype[Any], Tuple[int, ...], int]] = {}
    offset = 0
    for name, dtype, shape in columns:
        if not isinstance(name, str) or name in placed:
            raise CorruptPayload('an array has no name, or that of another one')
        placed[name] = (name, DTYPES[dtype], tuple(shape), offset)
        offset = _aligned(offset + _size_of(dtype, shape))
    return _Layout(list(placed.values()), offset)


def _size_of(dtype: str, shape: List[int]) -> int:
    size = DTYPES[dtype].itemsize
    if not isinstance(shape, list) or len(shape) > _MAX_NDIM:
        raise CorruptPayload('an array has no shape')
    for length in shape:
        if type(length) is not int or length < 0:
            raise CorruptPayload('an array has an impossible shape')
        size *= length
    return size


def _views(view: memoryview, layout: _Layout, offset: int) -> Dict[str, Array]:
    if offset + layout.num_bytes != len(view):
        raise CorruptPayload(f'{len(view) - offset} bytes where arrays have {layout.num_bytes}')
    return {name: np.ndarray(shape, dtype, view, offset + at) for name, dtype, shape, at in layout.columns}
