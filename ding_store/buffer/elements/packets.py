"""Packets: elements of any size as bytes, each with its own schema and a checksum."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.columns import Schema
from ding_store.errors import CorruptPayload
from ding_store.storage.encoding.checksum import checksum

_ALIGNMENT = 64


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
    def parts(self) -> List[Array]:
        return [self.data]

    @property
    def size(self) -> int:
        return len(self.data)

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


def packet_of(data: Array) -> Packet:
    """Return new bytes as a packet that has no row yet."""
    return Packet(-1, data, _checksum(data))


def unpacked(elements: Iterable[Any]) -> List[Any]:
    """Return the elements of whole packets, and other elements unchanged."""
    return [element.element() if isinstance(element, Packet) else element for element in elements]


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
