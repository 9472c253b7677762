"""A tree of minima: one key per slot, and the slots of the smallest keys."""

from __future__ import annotations

from typing import List

import numpy as np

from ding_store.buffer.array_types import Array, filled
from ding_store.buffer.interrupts import finish
from ding_store.buffer.kernels.constants import TREE_FAN_OUT, TREE_SHIFT

#: The tie of a slot without a key. It is above all others.
_LAST = np.iinfo(np.int64).max


class LeastTree:
    """
    Overview:
        A tree of fan-out 8 over one key and one tie per slot. Equal keys are ordered by their ties. Each node has the
        smallest pair below it. ``set`` is O(B log(capacity)), and ``least`` as well: the B smallest of all are below
        the B nodes with the smallest pairs of each level.
    Arguments:
        - capacity (:obj:`int`): The number of slots. Each uses about 18 bytes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        #: Keys and ties by level, the slots first. Each level is padded to whole blocks of siblings.
        self._keys: List[Array] = []
        self._ties: List[Array] = []
        num_nodes = capacity
        while True:
            size = -(-num_nodes // TREE_FAN_OUT) * TREE_FAN_OUT
            self._keys.append(filled(size, np.inf, np.float64))
            self._ties.append(filled(size, _LAST, np.int64))
            if size == TREE_FAN_OUT:
                break
            num_nodes = size // TREE_FAN_OUT

    @property
    def keys(self) -> Array:
        """The key of each slot, infinite if it has none. A view that is valid until the next change."""
        keys: Array = self._keys[0][: self.capacity]
        return keys

    def set(self, slots: Array, keys: Array, ties: Array) -> None:
        """Set keys and ties of slots ``(B,)``. An infinite key removes a slot. The last of a repeated slot counts."""
        try:
            self._keys[0][slots], self._ties[0][slots] = keys, ties
            nodes = slots
            for level in range(1, len(self._keys)):
                nodes = np.unique(nodes >> TREE_SHIFT)
                self._look(level, nodes)
        except BaseException:
            finish(self._look_at_all)
            raise

    def least(self, count: int) -> Array:
        """Return the slots of the ``count`` smallest keys, or of all if there are fewer, smallest first. intp."""
        nodes = np.arange(TREE_FAN_OUT)
        for level in reversed(range(len(self._keys))):
            keys, ties = self._keys[level][nodes], self._ties[level][nodes]
            nodes = nodes[smallest(keys, ties, count)]
            if level:
                nodes = (nodes[:, None] * TREE_FAN_OUT + np.arange(TREE_FAN_OUT)).reshape(-1)
        ordered: Array = nodes[np.lexsort((self._ties[0][nodes], self._keys[0][nodes]))].astype(np.intp)
        return ordered

    def rebuild(self, keys: Array, ties: Array) -> None:
        """Set all keys and ties at once, ``(capacity,)``. O(capacity)."""
        self._keys[0][: self.capacity], self._ties[0][: self.capacity] = keys, ties
        finish(self._look_at_all)

    def _look_at_all(self) -> None:
        for level in range(1, len(self._keys)):
            self._look(level, np.arange(len(self._keys[level - 1]) // TREE_FAN_OUT))

    def _look(self, level: int, nodes: Array) -> None:
        """Compute these nodes from their children."""
        keys = self._keys[level - 1].reshape(-1, TREE_FAN_OUT)[nodes]
        ties = self._ties[level - 1].reshape(-1, TREE_FAN_OUT)[nodes]
        least = keys.min(1)
        self._keys[level][nodes] = least
        self._ties[level][nodes] = np.where(keys == least[:, None], ties, _LAST).min(1)


def smallest(keys: Array, ties: Array, count: int) -> Array:
    """Return the places of the ``count`` smallest finite keys, or of all if there are fewer, in no order. O(n)."""
    if not count:
        return np.empty(0, np.intp)
    if count < len(keys):
        limit = np.partition(keys, count - 1)[count - 1]
        below, at = np.flatnonzero(keys < limit), np.flatnonzero(keys == limit)
        num_left = count - len(below)
        if num_left < len(at):
            at = at[np.argpartition(ties[at], num_left - 1)[:num_left]]
        places = np.concatenate([below, at])
    else:
        places = np.arange(len(keys))
    finite: Array = places[np.isfinite(keys[places])]
    return finite
