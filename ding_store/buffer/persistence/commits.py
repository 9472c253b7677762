"""The commit record of a table: which row numbers are live, and the caller's note that becomes valid with them."""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ding_store.buffer.interrupts import finish
from ding_store.errors import CorruptPayload, SchemaMismatch

#: sequence, next row, size and checksum of the note. The checksum of these follows.
_RECORD = struct.Struct('<QqQI')
_CHECKSUM = struct.Struct('<I')

#: Each record has its own page, so that a torn page damages only one record. The copy of a record is in the same page.
_PAGE, _COPY = 4096, 2048
NOTE_BYTES = 256 << 10
#: A note up to this size is also stored in its record's page. No power cut can then separate them.
_BESIDE, _BESIDE_BYTES = 2112, _PAGE - 2112
FILE_BYTES = 2 * (_PAGE + NOTE_BYTES)


class Committed(NamedTuple):
    """A commit: rows below ``next_row`` are live, and ``note`` is the last note as JSON."""

    sequence: int
    next_row: int
    note: bytes


class CommitFile:
    """
    Overview:
        A file with two records with checksums, written in turn. The valid record with the larger sequence counts. A new
        note is written to the unused half before the record that names it. When a record is safe, a copy is written
        behind it. With ``fsync`` it is safe when it is on the disk. The copies separate damage from an interrupted
        write: a record without a copy is the last one and may be torn. A record with a copy must be whole, with its
        note.
    Arguments:
        - region (:obj:`mmap.mmap`): ``FILE_BYTES`` of a file.
        - path (:obj:`str`): The path, for error messages.
        - fsync (:obj:`bool`): Whether a record is safe only after ``flush``.
    Raises:
        - CorruptPayload: The file was damaged, in both copies of a record.
    """

    def __init__(self, region: mmap.mmap, path: str, fsync: bool = False) -> None:
        self._region, self._path, self._fsync = region, path, fsync
        self._last = self._newest()

    @staticmethod
    def begin(region: mmap.mmap) -> None:
        """Write the first record of a new file."""
        _write(region, Committed(0, 0, b''))

    def repair(self) -> None:
        """Rewrite the newest record with its copy. One of the two may be damaged or missing."""
        packed = _write(self._region, self._last)
        if self._fsync:
            self._region.flush()
        self._confirm(packed)

    @property
    def next_row(self) -> int:
        return self._last.next_row

    @property
    def note(self) -> Optional[Dict[str, Any]]:
        """The note that was committed last, or None."""
        if not self._last.note:
            return None
        try:
            note = _decode_note(self._last.note)
        except (ValueError, RecursionError, zlib.error) as e:
            raise CorruptPayload(f'{self._path!r} holds a note that is not JSON: {e}') from e
        if not isinstance(note, dict):
            raise CorruptPayload(f'{self._path!r} holds a note that is not a dict: {note!r:.80}')
        return note

    def commit(self, next_row: int, note: Optional[bytes] = None) -> None:
        """Make all rows below ``next_row`` live. The note is replaced if one is given."""
        last = self._last
        made = Committed(last.sequence + 1, next_row, last.note if note is None else note)

        def write() -> None:
            packed = _write(self._region, made)
            self._last = made
            if not self._fsync:
                self._confirm(packed)

        finish(write)

    def flush(self) -> None:
        self._region.flush()
        self._confirm(_packed(self._last))

    def findings(self) -> List[str]:
        """Return the differences between the file and what was written."""
        try:
            same = self._newest() == self._last
        except CorruptPayload as e:
            return [str(e)]
        start = _start(self._last)
        is_whole = _record_at(self._region, start) == _record_at(self._region, start + _COPY) is not None
        return [] if same and (is_whole or self._fsync) else [f'{self._path!r} is damaged']

    def _newest(self) -> Committed:
        halves = [_Half(self._region, start) for start in _STARTS]
        found = [half for half in halves if half.is_whole or half.is_safe]
        if not found:
            raise CorruptPayload(f'{self._path!r} has no whole commit record. Restore the directory from a copy.')
        newest = max(found, key=lambda half: half.sequence)
        if not newest.is_whole:
            raise CorruptPayload(
                f'the note of the newest commit record in {self._path!r} is damaged. Restore the directory from a copy.'
            )
        return newest.committed

    def _confirm(self, packed: bytes) -> None:
        start = _start(self._last) + _COPY
        self._region[start : start + len(packed)] = packed


class _Half:
    """One of the two halves of the file, as read."""

    def __init__(self, region: mmap.mmap, start: int) -> None:
        of_copies = [_record_at(region, start), _record_at(region, start + _COPY)]
        # A copy of an earlier record proves nothing about the record that was written later, which may be torn.
        self.is_safe = of_copies[1] is not None and of_copies[0] in (None, of_copies[1])
        record = of_copies[0] or of_copies[1]
        self.sequence = -1 if record is None else record[0]
        self.is_whole = False
        self.committed = Committed(-1, 0, b'')
        if record is not None:
            sequence, next_row, note_bytes, note_checksum = record
            for place in (start + _BESIDE, start + _PAGE):
                note = region[place : place + note_bytes]
                if not self.is_whole and zlib.crc32(note) == note_checksum:
                    self.is_whole = True
                    self.committed = Committed(sequence, next_row, note)


class CommitRecord:
    """
    Overview:
        A dict on disk that is replaced as a whole, such as a queue's place. It is stored as the note of commits without
        rows.
    Arguments:
        - region (:obj:`mmap.mmap`): ``FILE_BYTES`` of a file. A new file is initialised.
        - path (:obj:`str`): The path, for error messages.
        - is_ours (:obj:`Callable`): Returns whether this process still owns the directory. If not, nothing is written.
        - generation (:obj:`Callable`): Returns the generation of the rows. A value of another generation is ignored.
        - fsync (:obj:`bool`): As in ``CommitFile``.
    Raises:
        - CorruptPayload: As in ``CommitFile``.
    """

    def __init__(
        self,
        region: mmap.mmap,
        path: str,
        is_ours: Callable[[], bool],
        generation: Callable[[], int] = lambda: 0,
        fsync: bool = False,
    ) -> None:
        # A kill may have interrupted the first record. It then has no copy, and the other half is empty.
        others = (_COPY, _STARTS[1], _STARTS[1] + _COPY)
        is_new = not any(region[start : start + _COPY].strip(b'\0') for start in others)
        if is_new and _record_at(region, 0) is None:
            CommitFile.begin(region)
        self._commits, self._is_ours, self._generation = CommitFile(region, path, fsync), is_ours, generation
        self._path, self._fsync = path, fsync
        if is_ours():
            self._commits.repair()

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        """Return None: a copied sampler has no files."""

    @property
    def value(self) -> Optional[Dict[str, Any]]:
        """The value that was put last in this generation, or None."""
        note = self._commits.note
        return None if note is None or note.pop('generation', 0) != self._generation() else note

    def put(self, value: Mapping[str, Any]) -> None:
        if self._is_ours():
            note = encode_note({**value, 'generation': self._generation()})
            self._commits.commit(0, note)
            if self._fsync and len(note) > _BESIDE_BYTES:
                # Without the flush, another put would leave both records without a note that is certainly on the disk.
                self._commits.flush()

    def damaged(self, error: Exception) -> CorruptPayload:
        """Return the error to raise if ``value`` is not in the form in which the owner puts it."""
        return CorruptPayload(f'{self._path!r} holds a record of another form: {error!r}. Restore it from a copy.')

    def findings(self) -> List[str]:
        """Return the differences between the file and what was written."""
        return self._commits.findings()

    def sync(self) -> None:
        self._commits.flush()


def encode_note(note: Mapping[str, Any]) -> bytes:
    """
    Overview:
        Encode a note as JSON, compressed if it is large.
    Raises:
        - SchemaMismatch: The note cannot be encoded as JSON, or is too large.
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


def next_row_in(region: mmap.mmap) -> int:
    """Return the next row of the newest record, while another process writes records."""
    records = [record for record in (_record_at(region, start) for start in _STARTS) if record is not None]
    return max(records)[1] if records else 0


_STARTS = (0, _PAGE + NOTE_BYTES)


def _start(committed: Committed) -> int:
    return _STARTS[committed.sequence % 2]


def _record_at(region: mmap.mmap, start: int) -> Optional[Tuple[int, int, int, int]]:
    """Return sequence, next row, size and checksum of the note. Return None if there is no whole record."""
    packed = region[start : start + _RECORD.size]
    (checksum,) = _CHECKSUM.unpack_from(region, start + _RECORD.size)
    sequence, next_row, note_bytes, note_checksum = _RECORD.unpack(packed)
    half = _STARTS.index(start if start in _STARTS else start - _COPY)
    if zlib.crc32(packed) != checksum or sequence % 2 != half or note_bytes > NOTE_BYTES or next_row < 0:
        return None
    return sequence, next_row, note_bytes, note_checksum


def _packed(committed: Committed) -> bytes:
    sequence, next_row, note = committed
    packed = _RECORD.pack(sequence, next_row, len(note), zlib.crc32(note))
    return packed + zlib.crc32(packed).to_bytes(4, 'little')


def _write(region: mmap.mmap, committed: Committed) -> bytes:
    start, note, packed = _start(committed), committed.note, _packed(committed)
    if note:
        # The record holds the note's checksum. Until the record is written, the other half counts.
        region[start + _PAGE : start + _PAGE + len(note)] = note
        if len(note) <= _BESIDE_BYTES:
            region[start + _BESIDE : start + _BESIDE + len(note)] = note
    region[start : start + len(packed)] = packed
    return packed
