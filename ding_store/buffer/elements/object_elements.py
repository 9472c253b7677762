"""Elements that columns cannot hold, as Python objects of this process, by slot."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Callable, Iterable, List, Sequence

import numpy as np
import torch
import treetensor.torch as ttorch

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.element_store import ElementStore, Make, Write
from ding_store.buffer.elements.packets import unpacked
from ding_store.buffer.table.specs import Columns
from ding_store.buffer.table.table import Table
from ding_store.free_space import format_bytes

logger = logging.getLogger(__name__)

#: Elements with more bytes in arrays than this should be in columns. A warning is logged once.
LARGE_BYTES = 64 << 10

_MAPPINGS = (dict, Mapping, ttorch.Tensor)


class ObjectElements(ElementStore):
    """
    Overview:
        One object per slot, stored by reference. A change to an object in place is visible to all later readers, as in
        DI-engine's buffers. Takes 8 bytes per used slot, in addition to the objects.
    """

    takes_any = True

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._objects: List[Any] = []
        self._warned = False

    def take(self, slots: Array, is_warm: bool = True) -> Make:
        taken = self.objects(slots)
        return lambda: taken

    def prepare(self, elements: Sequence[Any]) -> Write:
        return lambda slots: self._put(slots, elements)

    def update(self, rows: Array, slots: Array, element: Any) -> None:
        self._put(slots, [element])

    def adopt(self, slots: Array, elements: Iterable[Any]) -> Columns:
        self._put(slots, unpacked(elements))
        return {}

    def drop(self, slots: Array) -> None:
        for slot in slots.tolist():
            self._objects[slot] = None

    def objects(self, slots: Array) -> List[Any]:
        objects = self._objects
        return [objects[slot] for slot in slots.tolist()]

    def moving(self, source: Array, target: Array, capacity: int) -> Callable[[], None]:
        # Build a new list, because readers may be iterating over the old one.
        objects = self._objects[:]
        for old, new in zip(source.tolist(), target.tolist()):
            objects.extend([None] * (new + 1 - len(objects)))
            objects[new] = objects[old]
        moved = objects[:capacity]

        def resize() -> None:
            self._objects = moved

        return resize

    def _put(self, slots: Array, objects: Sequence[Any]) -> None:
        highest = int(slots.max(initial=-1))
        if highest >= len(self._objects):
            self._objects.extend([None] * (highest + 1 - len(self._objects)))
        for slot, each in zip(slots.tolist(), objects):
            self._objects[slot] = each
        if not self._warned and len(objects):
            self._warn_if_large(objects[-1])

    def _warn_if_large(self, element: Any) -> None:
        # Lists are episodes of varying length, which no column can hold.
        num_bytes = 0 if isinstance(element, list) else array_bytes(element)
        if num_bytes > LARGE_BYTES:
            self._warned = True
            logger.warning(
                'elements of type %s are stored as Python objects in this process, with %s of arrays each. '
                'Push elements with the same leaves, dtypes and shapes: columns are smaller and faster.',
                type(element).__name__,
                format_bytes(num_bytes),
            )


def array_bytes(element: Any, depth: int = 4) -> int:
    """
    Return the number of bytes of arrays and tensors in an element, summed over containers up to ``depth`` levels deep.
    """
    if isinstance(element, torch.Tensor):
        return element.element_size() * element.nelement()
    if isinstance(element, np.ndarray):
        return element.nbytes
    if depth == 0:
        return 0
    if isinstance(element, _MAPPINGS):
        return sum(array_bytes(value, depth - 1) for value in element.values())
    if isinstance(element, (list, tuple)):
        return sum(array_bytes(value, depth - 1) for value in element)
    return 0
