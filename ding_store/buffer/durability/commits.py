"""The commit record of a table: which row numbers are live, and what its owner wants to be live together with them."""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional

from ding_store.errors import CorruptPayload, SchemaMismatch

#: sequence, next row, bytes and checksum of the note; then the checksum of these.
_RECORD = struct.Struct('<QqQI')
_CHECKSUM = struct.Struct('<I')

#: One record per page, so that a torn page costs one of them.
_PAGE = 4096
NOTE_BYTES = 256 << 10
#: A note that is no larger is in the second half of its record's page, too, so that no power cut parts them.
_BESIDE, _BESIDE_BYTES = 2112, _PAGE - 2112
FILE_BYTES = 2 * (_PAGE + NOTE_BYTES)


class Committed(NamedTuple):
    """Rows below ``next_row`` count; ``note`` is what the owner committed last, as JSON."""

    sequence: int
    next_row: int
    note: bytes


class CommitFile:
    """
    Overview:
        Two records with checksums, written in turn: the valid one of the larger sequence counts. A note is in the
        half that is not in use until the record that names it is whole.
    Arguments:
        - region (:obj:`mmap.mmap`): ``FILE_BYTES`` of a file.
        - path (:obj:`str`): For errors.
    Raises:
        - CorruptPayload: Neither record is whole.
    """

    def __init__(self, region: mmap.mmap, path: str) -> None:
        self._region = region
        found = [each for each in (_read(region, half) for half in (0, 1)) if each is not None]
        if not found:
            raise CorruptPayload(f'{path!r} has no whole commit record; restore the directory from a copy')
        self._last = max(found)

    @staticmethod
    def begin(region: mmap.mmap) -> None:
        """Write the first record of a new file."""
        _write(region, Committed(0, 0, b''))

    @property
    def next_row(self) -> int:
        return self._last.next_row

    @property
    def note(self) -> Optional[Dict[str, Any]]:
        """None until there was one."""
        return _decode_note(self._last.note) if self._last.note else None

    def commit(self, next_row: int, note: Optional[bytes] = None) -> None:
        """Rows below ``next_row`` are live from here on, with this note or the last one."""
        last = self._last
        self._last = Committed(last.sequence + 1, next_row, last.note if note is None else note)
        _write(self._region, self._last)

    def flush(self) -> None:
        self._region.flush()


class Record:
    """
    Overview:
        One dict that is replaced as a whole, such as a queue's place; kept as a note of commits without rows.
    Arguments:
        - region (:obj:`mmap.mmap`): ``FILE_BYTES`` of a file; one that holds nothing whole yet is begun.
        - path (:obj:`str`): For errors.
        - is_ours (:obj:`Callable`): Whether the directory is still this process's: otherwise nothing is written.
        - generation (:obj:`Callable`): That of the rows: what was put for another one counts for nothing.
        - fsync (:obj:`bool`): Whether a power cut must leave what ``sync`` had on the disk, or what was put since.
    """

    def __init__(
        self,
        region: mmap.mmap,
        path: str,
        is_ours: Callable[[], bool],
        generation: Callable[[], int] = lambda: 0,
        fsync: bool = False,
    ) -> None:
        if _read(region, 0) is None and _read(region, 1) is None:
            CommitFile.begin(region)
        self._commits, self._is_ours, self._generation = CommitFile(region, path), is_ours, generation
        self._fsync = fsync

    @property
    def value(self) -> Optional[Dict[str, Any]]:
        """None until there was one."""
        note = self._commits.note
        return None if note is None or note.pop('generation', 0) != self._generation() else note

    def put(self, value: Mapping[str, Any]) -> None:
        if self._is_ours():
            note = encode_note({**value, 'generation': self._generation()})
            self._commits.commit(0, note)
            if self._fsync and len(note) > _BESIDE_BYTES:
                # Another put would leave both records without a note that is sure to be on the disk.
                self._commits.flush()

    def sync(self) -> None:
        self._commits.flush()


def encode_note(note: Mapping[str, Any]) -> bytes:
    """
    Raises:
        - SchemaMismatch: It is no JSON, or too large.
    """
    try:
        encoded = json.dumps(note).encode()
    except (TypeError, ValueError) as e:
        raise SchemaMismatch(f'commit ({note!r:.80}) must be a dict that JSON can hold: {e}') from e
    if not isinstance(note, Mapping):
        raise SchemaMismatch(f'commit ({note!r:.80}) must be a dict that JSON can hold')
    if len(encoded) <= NOTE_BYTES:
        return encoded
    compressed = zlib.compress(encoded, 1)
    if len(compressed) > NOTE_BYTES:
        raise SchemaMismatch(
            f'commit must be a dict of at most {NOTE_BYTES} bytes as compressed JSON, not {len(compressed)} '
            f'({len(encoded)} as JSON): {note!r:.80}. Commit less, such as fewer writers of a stream.'
        )
    return compressed


def _decode_note(note: bytes) -> Dict[str, Any]:
    decoded: Dict[str, Any] = json.loads(note if note.startswith(b'{') else zlib.decompress(note))
    return decoded


def _read(region: mmap.mmap, half: int) -> Optional[Committed]:
    start = half * (_PAGE + NOTE_BYTES)
    packed = region[start : start + _RECORD.size]
    (checksum,) = _CHECKSUM.unpack_from(region, start + _RECORD.size)
    sequence, next_row, note_bytes, note_checksum = _RECORD.unpack(packed)
    if zlib.crc32(packed) != checksum or sequence % 2 != half or note_bytes > NOTE_BYTES:
        return None
    for place in (start + _BESIDE, start + _PAGE):
        note = region[place : place + note_bytes]
        if zlib.crc32(note) == note_checksum:
            return Committed(sequence, next_row, note)
    return None


def _write(region: mmap.mmap, committed: Committed) -> None:
    start = committed.sequence % 2 * (_PAGE + NOTE_BYTES)
    note = committed.note
    if note:
        # Whether it is whole is in the record: until that is written, the other half counts.
        region[start + _PAGE : start + _PAGE + len(note)] = note
        if len(note) <= _BESIDE_BYTES:
            region[start + _BESIDE : start + _BESIDE + len(note)] = note
    packed = _RECORD.pack(committed.sequence, committed.next_row, len(note), zlib.crc32(note))
    region[start : start + _RECORD.size + _CHECKSUM.size] = packed + _CHECKSUM.pack(zlib.crc32(packed))
