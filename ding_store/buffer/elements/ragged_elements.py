"""Elements with ragged leaves: their arrays are packets in a file, and all other leaves are columns."""

from __future__ import annotations

from itertools import islice
from typing import IO, Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.column_elements import ColumnElements
from ding_store.buffer.elements.element_store import Make, Write
from ding_store.buffer.elements.item_layout import ItemLayout, bytes_of
from ding_store.buffer.elements.packet_file import BYTES, CHECKSUM, PLACE, SPECS, PacketFile
from ding_store.buffer.elements.packets import Packet, Place, packet_of
from ding_store.buffer.elements.save_blocks import BLOCK_BYTES, Blocks, write_packets
from ding_store.buffer.interrupts import finish
from ding_store.buffer.sequences.unrolled import StepReader
from ding_store.buffer.table.outputs import Output, WarmOutputs
from ding_store.buffer.table.row_choices import by_live_rows
from ding_store.buffer.table.specs import Columns, ColumnSpec
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema
from ding_store.columns.ragged import Ragged
from ding_store.errors import CorruptPayload, SchemaMismatch

#: Elements that ``adopt`` encodes at once.
_CHUNK = 64
_NO_ITEMS = np.empty(0, np.uint8)


class RaggedElements(ColumnElements):
    """
    Overview:
        Elements of one schema with ragged leaves. The arrays of a row's ragged leaves are one packet in a
        ``PacketFile``. Columns hold its place and the lengths of these leaves. All other leaves are columns.
    Arguments:
        - packets (:obj:`Optional[PacketFile]`): The packets of the store that this one replaces, if rows stay.
    Raises:
        - CorruptPayload: The file of packets was truncated.
    """

    is_in_memory = False

    def __init__(self, table: Table, schema: Schema, packets: Optional[PacketFile] = None) -> None:
        super().__init__(table, schema)
        self.specs = specs_of(schema)
        self._outputs = WarmOutputs(self.specs)
        self._packets = PacketFile(table) if packets is None else packets
        self.file = self._packets.path
        self._layout = ItemLayout(schema, has_checksums=self.file is not None)
        #: Rows of an earlier process whose packets were found to be whole.
        self._whole_rows: set[int] = set()

    def begin(self) -> None:
        self._packets.find_free()

    def widened(self, schema: Schema) -> RaggedElements:
        return RaggedElements(self._table, schema, self._packets)

    def take(self, slots: Array, is_warm: bool = True) -> Make:
        columns = self._copy(slots, is_warm)
        return lambda: self.schema.decode(columns)

    def gather(self, slots: Array) -> Tuple[Schema, Columns, Output]:
        arrays, output = self._outputs.gather(*self._sources(slots))
        columns: Dict[str, Any] = {name: array for name, array in arrays.items() if name not in SPECS}
        columns.update(self._layout.padded(*self._sound_items(slots, arrays)))
        return self.schema, columns, output

    def take_steps(self, slots: Array) -> Tuple[StepReader, Columns, Columns]:
        raise SchemaMismatch('elements with ragged leaves cannot become a time-major batch. Use sample_sequences().')

    def prepare(self, elements: Sequence[Any]) -> Write:
        columns, items = self.schema.encode_ragged(elements, self._columns.narrow)
        stored = self._table.shape.as_stored({**columns, **self._write(items, len(elements))})
        return lambda slots: self._columns.store(slots, stored)

    def writing(self, element: Any) -> Optional[Callable[[int], None]]:
        if self._columns.is_encoded:
            return None
        try:
            values, items = self.schema.encode_one(element)
        except SchemaMismatch:
            return None
        packet = self._layout.packet([items.get(name, _NO_ITEMS) for name in self.schema.ragged])
        values[PLACE], values[BYTES], values[CHECKSUM] = self._packets.write_one(packet)
        return lambda slot: self._columns.put(slot, values)

    def update(self, rows: Array, slots: Array, element: Any) -> None:
        columns, items = self.schema.encode_ragged([element])
        try:
            self._table.update(rows, {**columns, **self._write(items, 1)})
            self._packets.removed(slots)
            self._packets.published(slots)
        except BaseException:
            finish(self.give_back)
            raise

    def adopt(self, slots: Array, elements: Iterable[Any]) -> Columns:
        found: List[Columns] = []
        left = iter(elements)
        while chunk := list(islice(left, _CHUNK)):
            columns, items = self.schema.encode_ragged(chunk)
            found.append({**columns, **self._write(items, len(chunk))})
        if not found:
            return {name: np.empty((0, *shape), dtype) for name, (dtype, shape) in self.specs.items()}
        return {name: np.concatenate([each[name] for each in found]) for name in self.specs}

    def give_back(self) -> None:
        self._packets.give_back()

    def remove(self) -> None:
        self._packets.remove()

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._packets.used_bytes

    @property
    def packet_bytes(self) -> int:
        """The size of all packets of live rows."""
        return self._packets.used_bytes

    def rows_beyond(self, max_bytes: Optional[int]) -> Array:
        excess = 0 if max_bytes is None else self._packets.used_bytes - max_bytes
        if excess <= 0:
            return np.empty(0, np.int64)
        index = self._table.index
        with index.lock:
            slots = index.slots_by_age()
            sizes = np.cumsum(self._packets.sizes_of(slots))
            rows: Array = index.row_of_slot[slots[: int(np.searchsorted(sizes, excess)) + 1]]
        return rows

    def blocks(self, file: IO[bytes], is_current: Callable[[], bool]) -> Blocks:
        return RaggedBlocks(file, self, self._table, is_current)

    def findings(self) -> List[str]:
        return self._packets.findings()

    def saved_packets(self, rows: Array) -> Tuple[Array, List[Packet]]:
        """Return those of these rows that are live, and each as one packet: its columns, and its ragged leaves."""
        found, columns = self._table.read(by_live_rows(rows), self._copy, is_all=False)
        ragged = {name: columns[name].rows for name in self.schema.ragged}
        fixed = {name: columns[name].lengths if name in ragged else columns[name] for name in self.schema.columns()}
        packets = []
        for place in range(len(found)):
            parts = [bytes_of(values[place : place + 1]) for values in fixed.values()]
            parts += [bytes_of(values[place]) for values in ragged.values()]
            packets.append(packet_of(np.concatenate(parts)))
        return found, packets

    def _copy(self, slots: Array, is_warm: bool = True) -> Dict[str, Any]:
        """Copy the columns of these slots, with ragged leaves that are not padded."""
        arrays = self._outputs.gather(*self._sources(slots))[0] if is_warm else self._columns.take(slots)
        return {**arrays, **self._layout.rows(*self._sound_items(slots, arrays))}

    def _sources(self, slots: Array) -> Tuple[Any, Array, Any]:
        columns, cold = self._columns.sources
        return columns, slots, cold

    def _write(self, items: Dict[str, List[Array]], num_rows: int) -> Dict[str, Array]:
        """Write packets. Return the columns with their places."""
        arrays = [items.get(name) or [_NO_ITEMS] * num_rows for name in self.schema.ragged]
        return self._packets.write(map(self._layout.packet, zip(*arrays)))

    def _sound_items(self, slots: Array, arrays: Columns) -> Tuple[Any, ...]:
        """Return what the layout needs to copy the items of these slots. Raises CorruptPayload if one is damaged."""
        view, places = self._packets.view, arrays[PLACE]
        num_bytes, is_sound = self._layout.sizes(arrays, places, arrays[BYTES], len(view))
        rows = self._table.index.row_of_slot.take(slots, mode='clip')
        for number in np.flatnonzero(~is_sound).tolist():
            self._packets.check_left(self._place(rows, arrays, number))
        if self.file is not None and rows.min(initial=self._packets.first_own_row) < self._packets.first_own_row:
            for number in np.flatnonzero(is_sound & (rows < self._packets.first_own_row) & (rows >= 0)).tolist():
                self._check_whole(self._place(rows, arrays, number))
        return view, arrays, places, num_bytes, is_sound

    def _check_whole(self, place: Place) -> None:
        """Check a packet of an earlier process when it is read for the first time."""
        if place.row in self._whole_rows:
            return
        if self._packets.read(place).is_whole:
            self._whole_rows.add(place.row)
        else:
            self._packets.check_left(place)

    @staticmethod
    def _place(rows: Array, arrays: Columns, number: int) -> Place:
        return Place(int(rows[number]), *(int(arrays[name][number]) for name in (PLACE, BYTES, CHECKSUM)))


class RaggedBlocks(Blocks):
    """
    Overview:
        Blocks of a head and packets, like ``PacketBlocks``. The packet of a row holds its columns as well.
    Arguments:
        - is_current (:obj:`Callable`): Tells whether the rows are still in this store.
    """

    is_packed = True

    def __init__(self, file: IO[bytes], store: RaggedElements, table: Table, is_current: Callable[[], bool]) -> None:
        super().__init__()
        self._file, self._store, self._table, self._is_current = file, store, table, is_current

    def num_bytes(self, rows: Array) -> int:
        return int(self._store.num_bytes * len(rows) / max(1, len(self._table)))

    def write(self, rows: Array) -> Array:
        step = max(1, min(1024, BLOCK_BYTES * max(1, len(self._table)) // max(1, self._store.num_bytes)))
        written = [self._write_block(rows[first : first + step]) for first in range(0, len(rows), step)]
        return np.concatenate([*written, np.empty(0, np.int64)])

    def _write_block(self, rows: Array) -> Array:
        try:
            found, packets = self._store.saved_packets(rows)
        except KeyError:
            if self._is_current():
                raise
            return np.empty(0, np.int64)  # The writer starts again.
        head = [(row, packet.size, packet.checksum) for row, packet in zip(found.tolist(), packets)]
        write_packets(self, self._file, head, [packet.data for packet in packets])
        return found


def saved_elements(schema: Schema, packets: Iterable[Packet]) -> Iterator[Any]:
    """
    Overview:
        Yield the elements of packets from ``RaggedBlocks``.
    Raises:
        - CorruptPayload: A packet is not of this schema.
    """
    layout, specs = ItemLayout(schema, has_checksums=False), schema.columns()
    for packet in packets:
        place, columns = 0, {}
        try:
            for name, (dtype, shape) in specs.items():
                end = place + dtype.itemsize * int(np.prod(shape))
                columns[name] = np.frombuffer(packet.data[place:end].tobytes(), dtype).reshape(1, *shape)
                place = end
            items: Dict[str, Ragged] = layout.unpacked(packet.data[place:], columns)
        except ValueError as e:
            raise CorruptPayload(f'the packet of row {packet.row} holds no element of its schema: {e}') from e
        merged: Dict[str, Any] = {**columns, **items}
        yield schema.decode(merged)[0]


def specs_of(schema: Schema) -> Dict[str, ColumnSpec]:
    """Return the columns that the elements of a schema need in the table."""
    return {**schema.columns(), **SPECS} if schema.ragged else schema.columns()
