"""The blocks of a save: rows as columns, or as packets, one packet at a time."""

from __future__ import annotations

import zlib
from typing import IO, Callable, Dict, Iterable, List, Mapping, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.packet_file import PacketFile
from ding_store.buffer.elements.packets import Place
from ding_store.buffer.table.encodings import Column, columns_by_pool
from ding_store.buffer.table.table import Table
from ding_store.storage.encoding.checksum import checksum

#: Payload bytes of a block of columns.
BLOCK_BYTES = 16 << 20


class Blocks:
    """
    Overview:
        Writes rows in blocks, and lists the blocks written so far. This base writes none.
    """

    #: Whether rows are written as packets.
    is_packed = False

    def __init__(self) -> None:
        #: Number of rows per block, number of bytes per block, and checksum per block or of its head.
        self.lengths: List[int] = []
        self.sizes: List[int] = []
        self.checksums: List[int] = []
        #: For each block, the number of frames of each pool. Empty if no columns share frames.
        self.num_frames: List[List[int]] = []

    def num_bytes(self, rows: Array) -> int:
        """Return the approximate number of bytes of these rows."""
        return 0

    def write(self, rows: Array) -> Array:
        """Write rows. Return those that are whole in the file. Rows that left or changed meanwhile are not."""
        return np.empty(0, np.int64)


class ColumnBlocks(Blocks):
    """
    Blocks of row numbers (int64), followed by the columns of these rows. Columns that share frames have references
    (int32) to the frames of the block. These follow the columns, pool by pool, each frame once.
    """

    def __init__(self, file: IO[bytes], table: Table) -> None:
        super().__init__()
        self._file, self._table = file, table
        self._scratch = np.empty(0, np.uint8)

    def num_bytes(self, rows: Array) -> int:
        return len(rows) * self._table.columns.row_bytes

    def write(self, rows: Array) -> Array:
        step = max(1, BLOCK_BYTES // max(1, self._table.columns.row_bytes))
        written = [self._write_block(rows[first : first + step]) for first in range(0, len(rows), step)]
        return np.concatenate([*written, np.empty(0, np.int64)])

    def _write_block(self, rows: Array) -> Array:
        with self._table.index.lock:
            slots, found = self._table.index.find(rows)
            numbers, columns = self._table.index.row_of_slot, self._table.columns.current
        slots, rows = slots[found].astype(np.intp), rows[found]
        references, frames = _shared(columns, slots)
        copies = {**self._copies({n: each for n, each in columns.items() if n not in references}, slots), **references}
        parts = [rows.view(np.uint8), *(copies[name] for name in columns), *(_bytes_of(each) for each in frames)]
        if frames:
            self.num_frames.append(list(map(len, frames)))
        for part in parts:
            self._file.write(part.data)
        self.lengths.append(len(rows))
        self.sizes.append(sum(map(len, parts)))
        self.checksums.append(checksum([part.data for part in parts], self.sizes[-1]))
        # Without the rows whose slots were reused meanwhile.
        whole: Array = rows[numbers[slots] == rows]
        return whole

    def _copies(self, columns: Mapping[str, Column], slots: Array) -> Dict[str, Array]:
        """Copy the bytes of these slots, so that no writer changes them between their checksum and the write."""
        sizes = [len(slots) * column.row_bytes for column in columns.values()]
        if len(self._scratch) < sum(sizes):
            self._scratch = np.empty(sum(sizes), np.uint8)
        ends = np.cumsum(sizes).tolist()
        copies = {name: self._scratch[end - size : end] for name, end, size in zip(columns, ends, sizes)}
        for name, copy in copies.items():
            # A race with a writer is detected later.
            columns[name].take_bytes(slots, copy)
        return copies


def _shared(columns: Mapping[str, Column], slots: Array) -> Tuple[Dict[str, Array], List[Array]]:
    """
    Return the bytes of references to the frames of a block, by column, and these frames, by pool. Like ``_copies``.
    """
    references: Dict[str, Array] = {}
    frames: List[Array] = []
    for group in columns_by_pool(columns):
        found = {name: column.references(slots).reshape(-1) for name, column in group.items()}
        numbers, places = np.unique(np.concatenate(list(found.values())), return_inverse=True)
        ends = np.cumsum([len(each) for each in found.values()]).tolist()
        for (name, each), end in zip(found.items(), ends):
            references[name] = _bytes_of(places.reshape(-1)[end - len(each) : end].astype(np.int32))
        frames.append(next(iter(group.values())).frames(numbers))
    return references, frames


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


class PacketBlocks(Blocks):
    """
    Overview:
        Blocks of a head and packets. The head has row numbers, sizes and checksums of the packets (int64 each).
    Arguments:
        - is_current (:obj:`Callable`): Tells whether the table's rows are still in this file of packets.
    """

    is_packed = True

    def __init__(self, file: IO[bytes], packets: PacketFile, table: Table, is_current: Callable[[], bool]) -> None:
        super().__init__()
        self._file, self._packets, self._table, self._is_current = file, packets, table, is_current
        self._index = table.index

    def num_bytes(self, rows: Array) -> int:
        with self._index.lock:
            slots, found = self._index.find(rows)
            return sum(place.size for place in self._packets.places(slots[found]))

    def write(self, rows: Array) -> Array:
        """
        Overview:
            Write one block with the packets of these rows. Return the rows that are whole.
        Raises:
            - CorruptPayload: A packet is damaged, and still is after a second look.
        """
        with self._index.lock:
            slots, found = self._index.find(rows)
            places = self._packets.places(slots[found])
        write_packets(self, self._file, [(place.row, place.size, place.checksum) for place in places], ())
        whole = []
        for place in places:
            packet = self._packets.read(place)
            if packet.is_whole:
                whole.append(place.row)
            else:
                self._check_left(place)
            self._file.write(packet.data.data)
            # A packet that left meanwhile may be shorter now. Fill up its size, because the head gives the next
            # position.
            self._file.write(bytes(place.size - len(packet.data)))
        return np.array(whole, np.int64)

    def _check_left(self, place: Place) -> None:
        """Check a packet that is not whole. It is damaged unless it was overwritten, or is in another file now."""
        with self._table.write_lock:
            if self._is_current():
                self._packets.check_left(place)


def write_packets(blocks: Blocks, file: IO[bytes], head: List[Tuple[int, int, int]], packets: Iterable[Array]) -> None:
    """
    Overview:
        Write a block of packets.
    Arguments:
        - head (:obj:`List`): Row number, size and checksum of each packet.
        - packets (:obj:`Iterable`): Their bytes. The caller may also write them afterwards.
    """
    table = np.array(head, np.int64).reshape(-1, 3).T
    encoded = table.tobytes()
    file.write(encoded)
    blocks.lengths.append(len(head))
    blocks.sizes.append(len(encoded) + int(table[1].sum()))
    blocks.checksums.append(zlib.crc32(encoded))
    for packet in packets:
        file.write(packet.data)
