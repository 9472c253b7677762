"""The file of packets in a table directory, and its free space."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Dict, Iterable, List, Tuple

import numpy as np

from ding_store import private_files
from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.extents import Extents
from ding_store.buffer.elements.packets import Packet, Place
from ding_store.buffer.persistence.directory_files import check_size
from ding_store.buffer.persistence.journal import reserve, write_at
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.table.rows import RowListener
from ding_store.buffer.table.specs import ColumnSpec
from ding_store.buffer.table.table import Table
from ding_store.errors import NotEnoughSpace
from ding_store.power_cuts import sync_directory

#: Names of columns that no element can have: signs in an element's names are escaped.
PLACE, BYTES, CHECKSUM = '~place', '~bytes', '~checksum'
SPECS: Dict[str, ColumnSpec] = {name: (np.dtype(np.int64), ()) for name in (PLACE, BYTES, CHECKSUM)}

_NAME = 'packed'
#: The file grows by this much, or by a quarter.
_STEP_BYTES = 1 << 20


class PacketFile(RowListener):
    """
    Overview:
        The packets of a table's rows in one file. Columns of the table hold each packet's position, size and checksum.
        The order of writes that protects the table also protects the packets. They are written to free bytes before
        rows that name them become live. Bytes are free when no live row names them. The free space is kept in memory,
        and found again when the table is opened. A row with an impossible position is damaged. It holds no bytes, and
        frees none when it leaves.
    Arguments:
        - table (:obj:`Table`): A table with a path, which has packed elements or will have.
    Raises:
        - CorruptPayload: The file was truncated, so that packets of several rows are missing. The file is unchanged.
    """

    def __init__(self, table: Table) -> None:
        assert table.table_dir is not None
        self._table, self._table_dir = table, table.table_dir
        self.path = table.table_dir.file(_NAME)
        self._check_file()
        self._descriptor = private_files.opener(self.path, os.O_RDWR | os.O_CREAT)
        # Do not close it before the last reader has finished.
        weakref.finalize(self, os.close, self._descriptor)
        self._num_reserved = os.fstat(self._descriptor).st_size
        self.find_free()
        self._cut()
        if self._num_reserved:
            # A copy of the file may have holes.
            reserve(self._descriptor, self.path, 0, self._num_reserved)
        table.index.listen(self)

    def write(self, packets: Iterable[Packet]) -> Dict[str, Array]:
        """
        Overview:
            Write packets to free bytes. The caller holds the table's write lock.
        Returns:
            - columns (:obj:`Dict`): The columns that hold the places of the packets.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed. The same holds for exceptions from ``packets``.
        """
        self._table_dir.check_open()
        try:
            written = [self._append(packet) for packet in packets]
            self._sync()
        except BaseException:
            self.give_back()
            raise
        return dict(zip(SPECS, np.array(written, np.int64).reshape(-1, len(SPECS)).T))

    def give_back(self) -> None:
        """
        Free the bytes of packets that did not become rows. Truncate the file behind the last live row's packet, or
        delete it if the table's rows are not packed.
        """
        self.find_free()
        if not self._table_dir.is_open():
            return
        if PLACE in self._table.columns:
            self._cut()
        else:
            self.remove()

    def find_free(self) -> None:
        """Find the bytes that no live row names."""
        with self._table.index.lock:
            #: Position and size by slot. These bytes are free when the row leaves. The columns may be damaged by then.
            self._held = np.zeros((2, self._table.capacity), np.int64)
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

    def remove(self) -> None:
        """Delete the file, when no row is left. May be called again."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)

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
        if PLACE in columns and index.count:
            ends = np.sort(columns.read(PLACE, index.live_slots) + columns.read(BYTES, index.live_slots))
            check_size(self.path, max(0, int(ends[:-1].max(initial=0))))

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
            reserve(self._descriptor, self.path, start, ahead - start)
        except NotEnoughSpace:
            ahead = end
            reserve(self._descriptor, self.path, start, ahead - start)
        self._num_reserved = ahead

    def _cut(self) -> None:
        # A reader behind the end reads a row that left meanwhile, and repeats its read.
        self._num_reserved = self._extents.end
        os.ftruncate(self._descriptor, self._num_reserved)

    def _sync(self) -> None:
        if self._table_dir.fsync:
            os.fdatasync(self._descriptor)
            sync_directory(self._table_dir.path)

    def _write(self, place: int, data: Array) -> None:
        write_at(self._descriptor, data.data, place)

    def _append(self, packet: Packet) -> Tuple[int, int, int]:
        """Write a packet. Return its position, size and checksum."""
        place = self._extents.allocate(len(packet.data))
        self._reserve(self._extents.end)
        self._write(place, packet.data)
        return place, len(packet.data), packet.checksum

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


def remove_leftover(table_dir: TableDirectory) -> None:
    """
    Remove the file of packets if no row is packed. It may be left from a failed store, or from a process killed in
    ``remove``.
    """
    if table_dir.is_open():
        with suppress(FileNotFoundError):
            os.unlink(table_dir.file(_NAME))
