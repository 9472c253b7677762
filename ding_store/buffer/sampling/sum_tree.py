"""Masses of slots, with their sum, and draws in proportion to them."""

from __future__ import annotations

import numpy as np

from ding_store.buffer.array_types import Array, filled
from ding_store.buffer.interrupts import finish
from ding_store.buffer.kernels.constants import TREE_FAN_OUT, TREE_SHIFT
from ding_store.buffer.kernels.load import load_kernels


class SumTree:
    """
    Overview:
        A tree of fan-out 8 over one float64 per slot: ``set`` and ``find`` are O(B log(capacity)). Nothing is ever
        added to a sum: a change makes every node above it anew from its children, in their order, so that the tree is
        a function of its leaves alone and cannot drift, however often they change.

        Compiled by numba, or in numpy with the same results to the last bit: sums run from left to right in both.

        * ``masses``: the leaves, filled up to a multiple of the fan-out with zeros.
        * ``_sums``, ``_minima``: of each node above them, the lowest level first, the root last; the minimum is of the
          masses above zero.
        * ``_prefixes``: for each of these nodes, the sum of its block of siblings up to and with it, so that a search
          is a few comparisons per level.
        * ``_starts``: where each level begins in these three.
    Arguments:
        - capacity (:obj:`int`): The number of slots. About 12 bytes each.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        starts, size, num_nodes = [0], _num_blocks(capacity), _num_blocks(capacity)
        self.masses = filled(size * TREE_FAN_OUT, 0.0, np.float64)
        while num_nodes > 1:
            num_nodes = _num_blocks(num_nodes)
            # A level fills whole blocks, which the one above it counts.
            starts.append(starts[-1] + num_nodes * TREE_FAN_OUT)
        self._starts = np.array(starts, np.int64)
        num_inner = starts[-1] + 1
        self._sums, self._prefixes, self._minima = (
            filled(num_inner, value, np.float64) for value in (0.0, 0.0, np.inf)
        )
        #: None where numba does not run.
        self.kernels = load_kernels()

    @property
    def is_compiled(self) -> bool:
        return self.kernels is not None

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._sums[-1])

    @property
    def smallest(self) -> float:
        """The smallest mass above zero; infinite where there is none."""
        return float(self._minima[-1])

    def set(self, slots: Array, masses: Array) -> None:
        """
        Arguments:
            - slots (:obj:`np.ndarray`): ``(B,)``, int64, below the capacity; of one that is repeated the last counts.
            - masses (:obj:`np.ndarray`): ``(B,)``, float64, finite and >= 0, and so is the sum of all.
        """
        if self.kernels is None:
            try:
                self._set_in_numpy(slots, masses)
            except BaseException:
                finish(self._sum_up)
                raise
            return
        slots, masses = np.ascontiguousarray(slots, np.int64), np.ascontiguousarray(masses, np.float64)
        self.kernels.set_many(self.masses, self._sums, self._prefixes, self._minima, self._starts, slots, masses)

    def find(self, targets: Array) -> Array:
        """
        Overview:
            The slots at these places of the running sum of masses, none of which has a mass of zero. ``total`` must be
            above zero.
        Arguments:
            - targets (:obj:`np.ndarray`): ``(B,)``, float64, in [0, total); those beyond count as just below. They are
              used up: other numbers are in the array afterwards.
        Returns:
            - slots (:obj:`np.ndarray`): ``(B,)``, int64.
        """
        if self.kernels is None:
            return self._find_in_numpy(targets)
        slots = np.empty(len(targets), np.int64)
        self.kernels.find_many(self.masses, self._prefixes, self._starts, targets, slots)
        return slots

    def rebuild(self, masses: Array) -> None:
        """Set all masses at once, shape ``(capacity,)``; O(capacity)."""
        self.masses[: self.capacity] = masses
        finish(self._sum_up)

    def _sum_up(self) -> None:
        """Make all that is above the masses."""
        blocks = self.masses.reshape(-1, TREE_FAN_OUT)
        minima = np.where(blocks > 0, blocks, np.inf)
        for level in range(len(self._starts)):
            running = np.cumsum(blocks, axis=1)
            if level > 0:
                self._level(self._prefixes, level - 1)[:] = running
            start, num_nodes = self._starts[level], len(blocks)
            self._sums[start : start + num_nodes] = running[:, -1]
            self._minima[start : start + num_nodes] = minima.min(axis=1)
            if num_nodes > 1:
                blocks, minima = self._level(self._sums, level), self._level(self._minima, level)

    def clear(self) -> None:
        """All masses become zero."""
        self.rebuild(np.zeros(self.capacity))

    def _level(self, nodes: Array, level: int) -> Array:
        """Nodes of a level below the root, a block of siblings per row: a view."""
        return nodes[self._starts[level] : self._starts[level + 1]].reshape(-1, TREE_FAN_OUT)

    def _set_in_numpy(self, slots: Array, masses: Array) -> None:
        self.masses[slots] = masses
        nodes = slots
        for level, start in enumerate(self._starts.tolist()):
            nodes = _without_repeats(nodes >> TREE_SHIFT)
            if level == 0:
                running = self.masses.reshape(-1, TREE_FAN_OUT).take(nodes, 0)
                minima = np.where(running > 0, running, np.inf)
                np.add.accumulate(running, 1, out=running)
            else:
                minima = self._level(self._minima, level - 1).take(nodes, 0)
                running = np.add.accumulate(self._level(self._sums, level - 1).take(nodes, 0), 1)
                self._level(self._prefixes, level - 1)[nodes] = running
            places = nodes + start
            self._sums[places] = running[:, -1]
            self._minima[places] = np.minimum.reduce(minima, 1)

    def _find_in_numpy(self, targets: Array) -> Array:
        slots = np.zeros(len(targets), np.int64)
        befores = np.arange(len(targets)) * TREE_FAN_OUT - 1
        for level in range(len(self._starts) - 2, -2, -1):
            if level >= 0:
                running = self._level(self._prefixes, level).take(slots, 0)
            else:
                running = np.add.accumulate(self.masses.reshape(-1, TREE_FAN_OUT).take(slots, 0), 1)
            is_past = running <= targets[:, None]
            if is_past[:, -1].any():
                np.minimum(targets, np.nextafter(running[:, -1], 0), out=targets)
                is_past = running <= targets[:, None]
            # True, ..., True, False, ...: the first False.
            children = is_past.argmin(1)
            # What lies before a first child is of another row; multiplied by False it does not count.
            targets -= running.take(befores + children, mode='clip') * (children > 0)
            slots = slots * TREE_FAN_OUT + children
        return slots


def _num_blocks(num_children: int) -> int:
    return -(-num_children // TREE_FAN_OUT)


def _without_repeats(nodes: Array) -> Array:
    """Leave out what equals its predecessor."""
    different = np.empty(len(nodes), np.bool_)
    different[:1] = True
    np.not_equal(nodes[1:], nodes[:-1], out=different[1:])
    return nodes[different]
