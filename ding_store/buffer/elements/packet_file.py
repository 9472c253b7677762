"""The packets of a table in one file, and its free space."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Dict, Iterable, Iterator, List, Optional, Protocol, Sequence, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.extents import Extents
from ding_store.buffer.elements.growing_file import GrowingFile
from ding_store.buffer.elements.packets import Packet, Place
from ding_store.buffer.persistence.directory_files import check_size
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.table.rows import RowListener
from ding_store.buffer.table.specs import ColumnSpec
from ding_store.buffer.table.table import Table
from ding_store.power_cuts import sync_directory

#: Names of columns that no element can have: signs in an element's names are escaped.
PLACE, BYTES, CHECKSUM = '~place', '~bytes', '~checksum'
SPECS: Dict[str, ColumnSpec] = {name: (np.dtype(np.int64), ()) for name in (PLACE, BYTES, CHECKSUM)}

NAME = 'packed'
#: Packets begin at multiples of this.
_ALIGNMENT = 64
#: ``write`` holds so many packets in memory at once, and not many more than so many bytes.
_CHUNK, _CHUNK_BYTES = 64, 1 << 18


class Writable(Protocol):
    """A packet that is about to be written."""

    @property
    def parts(self) -> Sequence[Array]:
        """Its bytes, in pieces."""

    @property
    def size(self) -> int: ...

    @property
    def checksum(self) -> int: ...


class PacketFile(RowListener):
    """
    Overview:
        The packets of a table's rows in one file. Columns of the table hold each packet's position, size and checksum.
        The order of writes that protects the table also protects the packets. They are written to free bytes before
        rows that name them become live. Bytes are free when no live row names them. The free space is kept in memory,
        and found again when the table is opened. A row with an impossible position is damaged. It holds no bytes, and
        frees none when it leaves.
    Arguments:
        - table (:obj:`Table`): A table that has packets or will have. If it has no path, the file is private.
    Raises:
        - CorruptPayload: The file was truncated, so that packets of several rows are missing. The file is unchanged.
    """

    def __init__(self, table: Table) -> None:
        self._table, self._table_dir = table, table.table_dir
        #: None if the file is private.
        self.path: Optional[str] = None
        #: Rows below this one were written by an earlier process, so that they may have been damaged since.
        self.first_own_row = 0
        if self._table_dir is None:
            # Forked processes share the file.
            table.columns.has_packets = True
        else:
            self.path, self.first_own_row = self._table_dir.file(NAME), table.next_row
            self._check_file()
        self._file = GrowingFile(self.path)
        #: Whether a power cut leaves the name of the file in its directory.
        self._is_name_synced = False
        self.find_free()
        self._cut()
        self._file.reserve_all()
        table.index.listen(self)

    @property
    def view(self) -> Array:
        """The bytes of the file."""
        return self._file.view

    @property
    def where(self) -> str:
        """The table, for error messages."""
        return _where(self._table_dir)

    def write(self, packets: Iterable[Writable]) -> Dict[str, Array]:
        """
        Overview:
            Write packets to free bytes. The caller holds the table's write lock.
        Returns:
            - columns (:obj:`Dict`): The columns that hold the places of the packets.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed. The same holds for exceptions from ``packets``.
        """
        self._table.check_open()
        written: List[Tuple[int, int, int]] = []
        try:
            for chunk in _chunks(packets):
                written += self._append(chunk)
            self._sync()
        except BaseException:
            self.give_back()
            raise
        return dict(zip(SPECS, np.array(written, np.int64).reshape(-1, len(SPECS)).T))

    def write_one(self, packet: Writable) -> Tuple[int, int, int]:
        """Write one packet, like ``write``. Return its position, size and checksum."""
        try:
            size = packet.size
            if not self._file.expected_bytes:
                self._file.expected_bytes = size * self._table.capacity
            start = self._extents.allocate(-(-size // _ALIGNMENT) * _ALIGNMENT) if size else 0
            self._file.reserve(self._extents.end)
            self._write([packet], [start])
            self._sync()
        except BaseException:
            self.give_back()
            raise
        return start, size, packet.checksum

    def give_back(self) -> None:
        """
        Free the bytes of packets that did not become rows. Truncate the file behind the last live row's packet, or
        delete it if the table's rows are not packed.
        """
        self.find_free()
        if self._table_dir is not None and not self._table_dir.is_open():
            return
        if PLACE in self._table.columns:
            self._cut()
        else:
            self.remove()

    def sizes_of(self, slots: Array) -> Array:
        """Return the bytes that become free when these slots do."""
        held: Array = self._held[1, slots]
        return held

    def find_free(self) -> None:
        """Find the bytes that no live row names."""
        with self._table.index.lock:
            #: Position and size by slot. These bytes are free when the row leaves. The columns may be damaged by then.
            self._held = np.zeros((2, self._table.capacity), np.int64)
            #: The total size of the packets of all live rows.
            self.used_bytes = 0
            if PLACE in self._table.columns:
                self.published(self._sound(self._table.index.live_slots.astype(np.intp)))
            used = self._held[:, self._held[1] > 0]
        self._extents = Extents(zip(*used.tolist()))

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
        return Packet(place.row, self._file.read(place.place, place.size), place.checksum)

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
                raise self.read(place).damage(self.where)

    @property
    def num_bytes(self) -> int:
        """The total size of all packets."""
        with self._table.index.lock:
            return sum(place.size for place in self.places(self._table.index.live_slots))

    def remove(self) -> None:
        """Delete the file, when no row is left. May be called again."""
        if self.path is not None:
            self._is_name_synced = False
            with suppress(FileNotFoundError):
                os.unlink(self.path)

    def findings(self) -> List[str]:
        """Return all problems of the file."""
        index, columns = self._table.index, self._table.columns
        slots = index.slots_by_age().astype(np.intp)
        places, sizes = columns.read(PLACE, slots), columns.read(BYTES, slots)
        places, sizes = places[sizes != 0], sizes[sizes != 0]
        order = np.argsort(places)
        ends = (places + sizes)[order]
        found = ['packets overlap'] if (ends[:-1] > places[order][1:]).any() else []
        for place in self.places(slots) if self.path is not None else ():
            packet = self.read(place)
            if not packet.is_whole:
                found.append(str(packet.damage(self.where)))
        return found

    def published(self, slots: Array) -> None:
        columns = self._table.columns.current
        if PLACE not in columns:
            return
        sizes = _aligned(columns[BYTES].read(slots))
        self._held[:, slots] = columns[PLACE].read(slots), sizes
        self.used_bytes += int(sizes.sum())

    def removed(self, slots: Array) -> None:
        held = self._held[:, slots]
        held = held[:, held[1] > 0]
        for start, end in _joined(*held) if held.size else ():
            self._extents.free(start, end - start)
            self.used_bytes -= end - start
        self._held[:, slots] = 0

    def published_one(self, slot: int) -> None:
        columns = self._table.columns.current
        if PLACE in columns:
            size = -(-columns[BYTES].integer(slot) // _ALIGNMENT) * _ALIGNMENT
            self._held[0, slot], self._held[1, slot] = columns[PLACE].integer(slot), size
            self.used_bytes += size

    def removed_one(self, slot: int) -> None:
        place, size = self._held.item(0, slot), self._held.item(1, slot)
        if size:
            self._extents.free(place, size)
            self.used_bytes -= size
            self._held[0, slot] = self._held[1, slot] = 0

    def settled(self, slots: Array) -> None:
        self.find_free()

    def restored(self, slots: Array) -> None:
        self.find_free()

    def cleared(self) -> None:
        self.find_free()

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        self.find_free()

    def _check_file(self) -> None:
        """Check the size of the file. If only one row is beyond it, that row's place is damaged, not the file."""
        columns, index = self._table.columns, self._table.index
        assert self.path is not None
        if PLACE in columns and index.count:
            ends = np.sort(columns.read(PLACE, index.live_slots) + columns.read(BYTES, index.live_slots))
            check_size(self.path, max(0, int(ends[:-1].max(initial=0))))

    def _sound(self, slots: Array) -> Array:
        """Return the slots whose packets are in the file, and overlap with no others except damaged ones."""
        places, sizes = (self._table.columns.read(name, slots) for name in (PLACE, BYTES))
        end = self._file.num_reserved
        is_within = (places >= 0) & (sizes > 0) & (sizes <= end) & (places % _ALIGNMENT == 0)
        is_within &= places <= end - sizes
        by_place = np.flatnonzero(is_within)[np.argsort(places[is_within], kind='stable')]
        slots, starts, ends = slots[by_place], places[by_place], (places + _aligned(sizes))[by_place]
        overlaps = np.zeros(len(slots), bool)
        overlaps[1:] = starts[1:] < np.maximum.accumulate(ends)[:-1]
        overlaps[:-1] |= ends[:-1] > starts[1:]
        is_sound = ~overlaps
        is_sound[overlaps] = [self.read(place).is_whole for place in self.places(slots[overlaps])]
        # Packets at the same position are equal here. Only one row holds the bytes.
        slots = slots[is_sound]
        return slots[np.unique(starts[is_sound], return_index=True)[1]]

    def _cut(self) -> None:
        # A reader behind the end reads a row that left meanwhile, and repeats its read.
        self._file.cut(self._extents.end)

    def _sync(self) -> None:
        if self._table_dir is not None and self._table_dir.fsync:
            self._file.sync()
            if not self._is_name_synced:
                sync_directory(self._table_dir.path)
                self._is_name_synced = True

    def _write(self, packets: Sequence[Writable], starts: Sequence[int]) -> None:
        parts: List[Array] = []
        places: List[int] = []
        for packet, start in zip(packets, starts):
            for part in packet.parts:
                parts.append(part)
                places.append(start)
                start += len(part)
        self._file.write(parts, places)

    def _append(self, packets: Sequence[Writable]) -> List[Tuple[int, int, int]]:
        """Write packets. Return position, size and checksum of each."""
        sizes = [packet.size for packet in packets]
        if not self._file.expected_bytes:
            self._file.expected_bytes = max(sizes) * self._table.capacity
        starts = self._extents.allocate_each([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes])
        self._file.reserve(self._extents.end)
        self._write(packets, starts)
        return [(start, size, packet.checksum) for start, size, packet in zip(starts, sizes, packets)]


def _chunks(packets: Iterable[Writable]) -> Iterator[List[Writable]]:
    chunk: List[Writable] = []
    num_bytes = 0
    for packet in packets:
        chunk.append(packet)
        num_bytes += packet.size
        if len(chunk) == _CHUNK or num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _where(table_dir: Optional[TableDirectory]) -> str:
    return 'memory' if table_dir is None else table_dir.path


def _joined(starts: Array, sizes: Array) -> List[Tuple[int, int]]:
    """Return the beginning and the end of each run of extents that follow each other."""
    order = np.argsort(starts)
    starts = starts[order]
    ends = starts + sizes[order]
    has_gap = starts[1:] != ends[:-1]
    return list(zip(starts[np.append(True, has_gap)].tolist(), ends[np.append(has_gap, True)].tolist()))


def _aligned(sizes: Array) -> Array:
    made: Array = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    return made


def remove_leftover(table_dir: TableDirectory) -> None:
    """
    Remove the file of packets if no row is packed. It may be left from a failed store, or from a process killed in
    ``remove``.
    """
    if table_dir.is_open():
        with suppress(FileNotFoundError):
            os.unlink(table_dir.file(NAME))
