"""Elements of varying size, such as whole episodes, in a file of a table directory."""

from __future__ import annotations

import json
import os
import weakref
from contextlib import suppress
from functools import lru_cache
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ding_store import private_files
from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.extents import Extents
from ding_store.buffer.interrupts import finish
from ding_store.buffer.persistence.directory_files import check_size
from ding_store.buffer.persistence.journal import reserve, write_at
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.table.rows import RowListener
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema
from ding_store.errors import CorruptPayload, FormatMismatch, NotEnoughSpace, SchemaMismatch
from ding_store.power_cuts import sync_directory
from ding_store.storage.encoding.checksum import checksum

#: Names of columns that no element can have: signs in an element's names are escaped.
PLACE, BYTES, CHECKSUM = '~place', '~bytes', '~checksum'
SPECS = {name: (np.dtype(np.int64), ()) for name in (PLACE, BYTES, CHECKSUM)}
#: The header's information of a table of packed elements, instead of a schema. Version 1 had no checksums.
INFO = {'packed': 2}

_FILE = 'packed'
_ALIGNMENT = 64
#: The file grows by this much, or by a quarter.
_STEP_BYTES = 1 << 20


class Place(NamedTuple):
    """The position and size of a row's packet, and its checksum."""

    row: int
    place: int
    size: int
    checksum: int


class Packet(NamedTuple):
    """The bytes of a row's packet as read, and the checksum with which it was written."""

    row: int
    data: Array
    checksum: int

    @property
    def is_whole(self) -> bool:
        """True if the bytes are those that were written."""
        return _checksum(self.data) == self.checksum

    def damage(self, where: str) -> CorruptPayload:
        """Return the error to raise if the packet is not whole."""
        return CorruptPayload(
            f'the element of row {self.row} in {where!r} is damaged: the checksum of its packet is wrong'
        )

    def element(self) -> Any:
        """
        Overview:
            Decode the element of a whole packet. Its arrays are views of the packet.
        Raises:
            - CorruptPayload: The packet was not written by this package.
        """
        try:
            return _unpack(self.data)
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise CorruptPayload(f'the packet of row {self.row} holds no element: {e}') from e


class PackedColumn(RowListener):
    """
    Overview:
        Stores each element as a *packet* in one file: its schema and columns. Columns of the table hold the packet's
        position, size and checksum. The order of writes that protects the table also protects the packets. They are
        written to free bytes before rows that name them become live. Bytes are free when no live row names them. The
        free space is kept in memory, and found again when the table is opened. A row with an impossible position is
        damaged. It holds no bytes, and frees none when it leaves.
    Arguments:
        - table (:obj:`Table`): A table with a path, which has packed elements or will have.
    Raises:
        - CorruptPayload: The file was truncated, so that packets of several rows are missing. The file is unchanged.
    """

    def __init__(self, table: Table) -> None:
        assert table.table_dir is not None
        self._table, self._table_dir = table, table.table_dir
        self._path = table.table_dir.file(_FILE)
        self._check_file()
        self._descriptor = private_files.opener(self._path, os.O_RDWR | os.O_CREAT)
        # Do not close it before the last reader has finished.
        weakref.finalize(self, os.close, self._descriptor)
        self._layouts: Dict[Any, PacketLayout] = {}
        self._num_reserved = os.fstat(self._descriptor).st_size
        self._find_free()
        self._cut()
        if self._num_reserved:
            # A copy of the file may have holes.
            reserve(self._descriptor, self._path, 0, self._num_reserved)
        table.index.listen(self)

    def store(self, elements: Iterable[Any]) -> Dict[str, Array]:
        """
        Overview:
            Write elements, or packets of them, to free bytes. The caller holds the table's write lock.
        Returns:
            - columns (:obj:`Dict`): The columns that hold the places of the elements.
        Raises:
            - SchemaMismatch: An element holds a value that is not an array or a number. Nothing changed.
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        self._table_dir.check_open()
        try:
            stored = [self._store(element) for element in elements]
            self._sync()
        except BaseException:
            self.give_back()
            raise
        return dict(zip(SPECS, np.array(stored, np.int64).reshape(-1, len(SPECS)).T))

    def give_back(self) -> None:
        """Free the bytes of elements that did not become rows. Truncate the file behind the last live row's packet."""
        self._find_free()
        if self._table_dir.is_open():
            self._cut()

    def take(self, slots: Array) -> List[Packet]:
        """
        Read the packets of these slots, whatever they hold. Decode them only when no writer changed the slots
        meanwhile.
        """
        return [self.read(place) for place in self.places(slots)]

    def decode(self, packets: Sequence[Packet]) -> List[Any]:
        """
        Overview:
            Decode the elements of packets. The elements are views of the packets.
        Raises:
            - CorruptPayload: A packet is damaged.
        """
        for packet in packets:
            if not packet.is_whole:
                raise packet.damage(self._table_dir.path)
        return [packet.element() for packet in packets]

    def places(self, slots: Array) -> List[Place]:
        """
        Return the places of the packets of these slots. They are valid if the index is locked or checked afterwards.
        """
        columns, numbers = self._table.columns.current, self._table.index.row_of_slot
        if PLACE not in columns:
            return []  # The columns are being replaced: a reader repeats its read.
        of_slots = [numbers.take(slots, mode='clip'), *(columns[name].read(slots) for name in SPECS)]
        return [Place(*each) for each in zip(*(values.tolist() for values in of_slots))]

    def read(self, place: Place) -> Packet:
        return Packet(place.row, self._read(place.place, place.size), place.checksum)

    def check_left(self, place: Place) -> None:
        """
        Overview:
            Check that a row whose packet was not whole has left this place meanwhile.
        Raises:
            - CorruptPayload: The row is still there, so its packet is damaged.
        """
        index = self._table.index
        with index.lock:
            slots, found = index.find(np.array([place.row], np.int64))
            if found[0] and self.places(slots) == [place]:
                raise self.read(place).damage(self._table_dir.path)

    @property
    def num_bytes(self) -> int:
        """The total size of all packets."""
        with self._table.index.lock:
            return sum(place.size for place in self.places(self._table.index.live_slots))

    def update(self, rows: Array, slots: Array, element: Any) -> None:
        """Replace the element of one row."""
        try:
            self._table.update(rows, self.store([element]))
            self.removed(slots)
            self.published(slots)
        except BaseException:
            finish(self.give_back)
            raise

    def drop(self, slots: Array) -> None:
        """Do nothing: ``removed`` frees the bytes."""

    def moving(self, source: Array, target: Array, capacity: int) -> Callable[[], None]:
        """Return a function that does nothing: the table moves its columns."""
        return lambda: None

    def remove(self) -> None:
        """Delete the file, when no row is left. May be called again."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def findings(self) -> List[str]:
        """Return all problems of the file."""
        index, columns = self._table.index, self._table.columns
        slots = index.slots_by_age().astype(np.intp)
        places, sizes = columns.read(PLACE, slots), columns.read(BYTES, slots)
        order = np.argsort(places)
        ends = (places + sizes)[order]
        found = ['packets overlap'] if (ends[:-1] > places[order][1:]).any() else []
        for place in self.places(slots):
            packet = self.read(place)
            if not packet.is_whole:
                found.append(str(packet.damage(self._table_dir.path)))
        return found

    def published(self, slots: Array) -> None:
        columns = self._table.columns
        if PLACE in columns:
            self._held[:, slots] = columns.read(PLACE, slots), columns.read(BYTES, slots)

    def removed(self, slots: Array) -> None:
        for place, size in self._held[:, slots].T.tolist():
            if size:
                self._extents.free(place, size)
        self._held[:, slots] = 0

    def settled(self, slots: Array) -> None:
        self._find_free()

    def restored(self, slots: Array) -> None:
        self._find_free()

    def cleared(self) -> None:
        self._find_free()

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        self._find_free()

    def _check_file(self) -> None:
        """Check the size of the file. If only one row is beyond it, that row's place is damaged, not the file."""
        columns, index = self._table.columns, self._table.index
        if PLACE in columns and index.count:
            ends = np.sort(columns.read(PLACE, index.live_slots) + columns.read(BYTES, index.live_slots))
            check_size(self._path, max(0, int(ends[:-1].max(initial=0))))

    def _find_free(self) -> None:
        """Find the bytes that no live row names."""
        with self._table.index.lock:
            #: Position and size by slot. These bytes are free when the row leaves. The columns may be damaged by then.
            self._held = np.zeros((2, self._table.capacity), np.int64)
            if PLACE in self._table.columns:
                self.published(self._sound(self._table.index.live_slots.astype(np.intp)))
            used = self._held[:, self._held[1] > 0]
        self._extents = Extents(zip(*used.tolist()))

    def _sound(self, slots: Array) -> Array:
        """Return the slots whose packets are in the file, and overlap with no others except damaged ones."""
        places, sizes = (self._table.columns.read(name, slots) for name in (PLACE, BYTES))
        is_within = (places >= 0) & (sizes > 0) & (sizes <= self._num_reserved)
        is_within &= places <= self._num_reserved - sizes
        by_place = np.flatnonzero(is_within)[np.argsort(places[is_within], kind='stable')]
        slots, starts, ends = slots[by_place], places[by_place], (places + sizes)[by_place]
        overlaps = np.zeros(len(slots), bool)
        overlaps[1:] = starts[1:] < np.maximum.accumulate(ends)[:-1]
        overlaps[:-1] |= ends[:-1] > starts[1:]
        is_sound = ~overlaps
        is_sound[overlaps] = [self.read(place).is_whole for place in self.places(slots[overlaps])]
        # Packets at the same position are equal here. Only one row holds the bytes.
        slots = slots[is_sound]
        return slots[np.unique(starts[is_sound], return_index=True)[1]]

    def _reserve(self, end: int) -> None:
        start = self._num_reserved
        if end <= start:
            return
        ahead = max(end, start + max(_STEP_BYTES, start // 4))
        try:
            reserve(self._descriptor, self._path, start, ahead - start)
        except NotEnoughSpace:
            ahead = end
            reserve(self._descriptor, self._path, start, ahead - start)
        self._num_reserved = ahead

    def _cut(self) -> None:
        # A reader behind the end reads a row that left meanwhile, and repeats its read.
        self._num_reserved = self._extents.end
        os.ftruncate(self._descriptor, self._num_reserved)

    def _sync(self) -> None:
        if self._table_dir.fsync:
            os.fdatasync(self._descriptor)
            sync_directory(self._table_dir.path)

    def _write(self, place: int, packet: Array) -> None:
        write_at(self._descriptor, packet.data, place)

    def _store(self, element: Any) -> Tuple[int, int, int]:
        """Write a packet. Return its position, size and checksum."""
        packet = element if isinstance(element, Packet) else self._pack(element)
        data = packet.data
        place = self._extents.allocate(len(data))
        self._reserve(self._extents.end)
        self._write(place, data)
        return place, len(data), packet.checksum

    def _read(self, place: int, size: int) -> Array:
        if not 0 <= place <= place + size <= self._num_reserved:
            return np.empty(0, np.uint8)  # The place is damaged, and the checksum of the empty packet reveals it.
        packet = np.empty(size, np.uint8)
        done = 0
        while done < size:
            # One read returns less than 2 GiB, and nothing if a writer truncated the file meanwhile.
            num_bytes = os.preadv(self._descriptor, [packet[done:].data], place + done)
            if num_bytes == 0:
                break
            done += num_bytes
        return packet

    def _pack(self, element: Any) -> Packet:
        data = self._packed(element)
        return Packet(-1, data, _checksum(data))

    def _packed(self, element: Any) -> Array:
        # Most elements have the layout of the last element of the same length.
        key = len(element) if isinstance(element, list) else None
        layout = self._layouts.get(key)
        if layout is not None:
            try:
                return layout.pack(element)
            except SchemaMismatch:
                pass
        try:
            layout = self._layouts[key] = PacketLayout(Schema.infer([element]))
        except SchemaMismatch as e:
            raise refusal(self._table_dir.path, e) from e
        return layout.pack(element)


def is_packed(table_dir: TableDirectory) -> bool:
    """
    Overview:
        Return whether the elements in a directory are packed.
    Raises:
        - FormatMismatch: They were packed by another version.
    """
    info = table_dir.header.info
    if isinstance(info, dict) and info.keys() == INFO.keys() and info != INFO:
        raise FormatMismatch(
            f'{table_dir.path!r} holds packed elements of version {info["packed"]}, but this ding_store reads only '
            f'version {INFO["packed"]}. Use the version of ding_store that wrote them.'
        )
    if info != INFO:
        return False
    specs = {column.name: (np.dtype(column.dtype), tuple(column.shape)) for column in table_dir.header.columns}
    if specs != SPECS:
        raise CorruptPayload(f'the header in {table_dir.path!r} names other columns than packed elements have')
    return True


def remove_leftover(table_dir: TableDirectory) -> None:
    """
    Remove the file of packets if no row is packed. It may be left from a failed store, or from a process killed in
    ``remove``.
    """
    if table_dir.is_open():
        with suppress(FileNotFoundError):
            os.unlink(table_dir.file(_FILE))


def unpacked(elements: Iterable[Any]) -> List[Any]:
    """Return the elements of whole packets, and other elements unchanged."""
    return [element.element() if isinstance(element, Packet) else element for element in elements]


def refusal(path: str, reason: SchemaMismatch) -> SchemaMismatch:
    return SchemaMismatch(
        f'elements with Python objects cannot be stored in {path!r}: {reason}. Use path=None, or elements of arrays, '
        'tensors and numbers, which may be lists of varying length.'
    )


class PacketLayout:
    """
    Overview:
        The layout of the packets of one schema: the length of the schema (4 bytes, little endian), the schema as JSON,
        and its columns. Each column has one row and begins at a multiple of 64 bytes.
    """

    def __init__(self, schema: Schema, text: Optional[bytes] = None) -> None:
        text = json.dumps(schema.to_json()).encode() if text is None else text
        self._schema, self._head = schema, np.frombuffer(len(text).to_bytes(4, 'little') + text, np.uint8)
        self._columns = []
        end = _aligned(len(self._head))
        for name, (dtype, shape) in schema.columns().items():
            num_bytes = dtype.itemsize * int(np.prod(shape))
            self._columns.append((name, dtype, shape, end, end + num_bytes))
            end = _aligned(end + num_bytes)
        self._num_bytes = end

    def pack(self, element: Any) -> Array:
        """
        Overview:
            Encode an element as a packet.
        Raises:
            - SchemaMismatch: The element has another schema.
        """
        packet = np.zeros(self._num_bytes, np.uint8)
        packet[: len(self._head)] = self._head
        self._schema.encode_into(self._views(packet), 0, [element])
        return packet

    def unpack(self, packet: Array) -> Any:
        return self._schema.decode(self._views(packet))[0]

    def _views(self, packet: Array) -> Dict[str, Array]:
        return {
            name: packet[start:end].view(dtype).reshape((1, *shape)) for name, dtype, shape, start, end in self._columns
        }


def _checksum(packet: Array) -> int:
    return checksum([packet.data], len(packet))


def _unpack(packet: Array) -> Any:
    end = 4 + int.from_bytes(packet[:4].tobytes(), 'little')
    return _layout(packet[4:end].tobytes()).unpack(packet)


@lru_cache(maxsize=4096)
def _layout(text: bytes) -> PacketLayout:
    return PacketLayout(Schema.from_json(json.loads(text)), text)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
