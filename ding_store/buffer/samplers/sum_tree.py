"""A sum tree: one mass per slot, their sum, and draws in proportion to the masses."""

from __future__ import annotations

import numpy as np

from ding_store.buffer.array_types import Array, filled
from ding_store.buffer.interrupts import finish
from ding_store.buffer.kernels.constants import TREE_FAN_OUT, TREE_SHIFT
from ding_store.buffer.kernels.load import load_kernels


class SumTree:
    """
    Overview:
        A tree of fan-out 8 over one float64 per slot. ``set`` and ``find`` are O(B log(capacity)). A change never adds
        to a sum: it computes every node above from its children, in order. Therefore the tree depends only on its
        leaves and cannot drift.

        The tree is compiled by numba, or runs in numpy with bit-identical results: both sum from left to right.

        * ``masses``: the leaves, padded with zeros to a multiple of the fan-out.
        * ``_sums``, ``_minima``: the values of each node above the leaves, the lowest level first, the root last. The
          minimum covers the masses above zero.
        * ``_prefixes``: for each of these nodes, the sum of its block of siblings up to and including it. A search then
          needs a few comparisons per level.
        * ``_starts``: the start of each level in these three.
    Arguments:
        - capacity (:obj:`int`): The number of slots. Each uses about 12 bytes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        starts, size, num_nodes = [0], _num_blocks(capacity), _num_blocks(capacity)
        self.masses = filled(size * TREE_FAN_OUT, 0.0, np.float64)
        while num_nodes > 1:
            num_nodes = _num_blocks(num_nodes)
            # Each level is padded to whole blocks, because the level above has a node per block.
            starts.append(starts[-1] + num_nodes * TREE_FAN_OUT)
        self._starts = np.array(starts, np.int64)
        num_inner = starts[-1] + 1
        self._sums, self._prefixes, self._minima = (
            filled(num_inner, value, np.float64) for value in (0.0, 0.0, np.inf)
        )
        #: None if numba is not available.
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
        """The smallest mass above zero. Infinite if there is none."""
        return float(self._minima[-1])

    def set(self, slots: Array, masses: Array) -> None:
        """
        Arguments:
            - slots (:obj:`np.ndarray`): ``(B,)``, int64, below the capacity. If one is repeated, its last mass counts.
            - masses (:obj:`np.ndarray`): ``(B,)``, float64, finite and >= 0. The sum of all must be finite.
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

    def set_powers(self, slots: Array, priorities: Array, epsilon: float, alpha: float) -> None:
        """Set masses to ``(priority + epsilon) ** alpha``, with arguments like those of ``set``, both contiguous."""
        if self.kernels is None:
            self.set(slots, self.powers(priorities, epsilon, alpha))
            return
        tree = self.masses, self._sums, self._prefixes, self._minima, self._starts
        self.kernels.set_powers(*tree, slots, priorities, epsilon, alpha)

    def powers(self, priorities: Array, epsilon: float, alpha: float) -> Array:
        """Return the masses that ``set_powers`` sets."""
        if self.kernels is None:
            powers: Array = (priorities + epsilon) ** alpha
            return powers
        masses = np.empty(len(priorities))
        self.kernels.mass(np.ascontiguousarray(priorities, np.float64), epsilon, alpha, masses)
        return masses

    def weigh(self, slots: Array, exponent: float) -> Array:
        """Return ``(mass / smallest mass) ** exponent`` of slots ``(B,)``, int64 and contiguous. Float32."""
        if self.kernels is None:
            weights: Array = ((self.masses.take(slots) / self.smallest) ** exponent).astype(np.float32)
            return weights
        weights = np.empty(len(slots), np.float32)
        self.kernels.weigh(self.masses, slots, self._minima[-1], exponent, weights)
        return weights

    def find(self, targets: Array) -> Array:
        """
        Overview:
            Return the slots at these places of the running sum of masses. ``total`` must be above zero. A slot with
            mass zero is never returned.
        Arguments:
            - targets (:obj:`np.ndarray`): ``(B,)``, float64, in [0, total). Larger ones count as just below. The array
              is overwritten.
        Returns:
            - slots (:obj:`np.ndarray`): ``(B,)``, int64.
        """
        if self.kernels is None:
            return self._find_in_numpy(targets)
        slots = np.empty(len(targets), np.int64)
        self.kernels.find_many(self.masses, self._prefixes, self._starts, targets, 0.0, slots)
        return slots

    def draw(self, uniforms: Array, total: float) -> Array:
        """
        Overview:
            Return one slot from each of equal shares of ``total``, the sum of all masses, which must be above zero.
        Arguments:
            - uniforms (:obj:`np.ndarray`): ``(B,)``, float64, in [0, 1): the places in the shares. The array is
              overwritten.
        Returns:
            - slots (:obj:`np.ndarray`): ``(B,)``, int64.
        """
        if self.kernels is None:
            return self._find_in_numpy(spread(uniforms, total))
        slots = np.empty(len(uniforms), np.int64)
        self.kernels.find_many(self.masses, self._prefixes, self._starts, uniforms, total, slots)
        return slots

    def rebuild(self, masses: Array) -> None:
        """Set all masses at once, shape ``(capacity,)``. O(capacity)."""
        self.masses[: self.capacity] = masses
        finish(self._sum_up)

    def _sum_up(self) -> None:
        """Compute all nodes from the masses."""
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
        """Set all masses to zero."""
        self.rebuild(np.zeros(self.capacity))

    def _level(self, nodes: Array, level: int) -> Array:
        """Return a view of a level below the root, with a block of siblings per row."""
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
            # Each row is True, ..., True, False, ...: ``argmin`` finds the first False.
            children = is_past.argmin(1)
            # For a first child, ``take`` reads a value of another row. The product with False drops it.
            targets -= running.take(befores + children, mode='clip') * (children > 0)
            slots = slots * TREE_FAN_OUT + children
        return slots


def spread(uniforms: Array, total: float) -> Array:
    """Turn n numbers in [0, 1) into n positions, one in each of n equal shares of ``total``. Overwrite the array."""
    uniforms += np.arange(len(uniforms))
    uniforms *= total / len(uniforms)
    return uniforms


def _num_blocks(num_children: int) -> int:
    return -(-num_children // TREE_FAN_OUT)


def _without_repeats(nodes: Array) -> Array:
    """Leave out each node that equals its predecessor."""
    different = np.empty(len(nodes), np.bool_)
    different[:1] = True
    np.not_equal(nodes[1:], nodes[:-1], out=different[1:])
    return nodes[different]
