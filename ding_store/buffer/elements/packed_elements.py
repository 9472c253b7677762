"""Elements of varying size, such as whole episodes, in a file of a table directory."""

from __future__ import annotations

from typing import IO, Any, Callable, Dict, Iterable, List, Sequence

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.element_store import ElementStore, Make, Write
from ding_store.buffer.elements.forms import refusal
from ding_store.buffer.elements.packet_file import SPECS, PacketFile
from ding_store.buffer.elements.packets import Packet, PacketLayout, packet_of
from ding_store.buffer.elements.save_blocks import Blocks, PacketBlocks
from ding_store.buffer.interrupts import finish
from ding_store.buffer.table.specs import Columns
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema
from ding_store.errors import SchemaMismatch

#: The header's information of a table of packed elements, instead of a schema. Version 1 had no checksums.
INFO = {'packed': 2}


class PackedElements(ElementStore):
    """
    Overview:
        Each element is a *packet* in a ``PacketFile``: its schema and columns.
    Arguments:
        - table (:obj:`Table`): A table with a path, which has packed elements or will have.
    Raises:
        - CorruptPayload: The file was truncated, so that packets of several rows are missing. The file is unchanged.
    """

    specs = SPECS
    is_in_memory = False
    takes_any = True

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        assert table.table_dir is not None
        self._path = table.table_dir.path
        self._packets = PacketFile(table)
        self.file = self._packets.path
        self._layouts: Dict[Any, PacketLayout] = {}

    @property
    def info(self) -> Any:
        return INFO

    def begin(self) -> None:
        self._packets.find_free()

    def take(self, slots: Array, is_warm: bool = True) -> Make:
        packets = self._packets
        taken = [packets.read(place) for place in packets.places(slots)]
        return lambda: self._elements(taken)

    def prepare(self, elements: Sequence[Any]) -> Write:
        table, stored = self._table, self._write(elements)
        return lambda slots: table.columns.store(slots, stored)

    def update(self, rows: Array, slots: Array, element: Any) -> None:
        try:
            self._table.update(rows, self._write([element]))
            self._packets.removed(slots)
            self._packets.published(slots)
        except BaseException:
            finish(self.give_back)
            raise

    def adopt(self, slots: Array, elements: Iterable[Any]) -> Columns:
        return self._write(elements)

    def give_back(self) -> None:
        self._packets.give_back()

    def remove(self) -> None:
        self._packets.remove()

    @property
    def num_bytes(self) -> int:
        return self._packets.num_bytes

    @property
    def packet_bytes(self) -> int:
        return self._packets.used_bytes

    def blocks(self, file: IO[bytes], is_current: Callable[[], bool]) -> Blocks:
        return PacketBlocks(file, self._packets, self._table, is_current)

    def findings(self) -> List[str]:
        return self._packets.findings()

    def _write(self, elements: Iterable[Any]) -> Columns:
        """Write elements, or packets of them. Return the columns with their places."""
        return self._packets.write(each if isinstance(each, Packet) else self._pack(each) for each in elements)

    def _elements(self, packets: List[Packet]) -> List[Any]:
        """Decode packets. The elements are views of them. Raises CorruptPayload if a packet is damaged."""
        for packet in packets:
            if not packet.is_whole:
                raise packet.damage(self._path)
        return [packet.element() for packet in packets]

    def _pack(self, element: Any) -> Packet:
        # Most elements have the layout of the last element of the same length.
        key = len(element) if isinstance(element, list) else None
        layout = self._layouts.get(key)
        if layout is not None:
            try:
                return packet_of(layout.pack(element))
            except SchemaMismatch:
                pass
        try:
            layout = self._layouts[key] = PacketLayout(Schema.infer([element]))
        except SchemaMismatch as e:
            raise refusal(self._path, e) from e
        return packet_of(layout.pack(element))
