"""The loops of ``SumTree``. Imported and compiled only if numba is installed, see ``load``."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, register_jitable

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import TREE_FAN_OUT, TREE_SHIFT
from ding_store.buffer.kernels.power_kernels import powers_of
from ding_store.compiled.cache_lines import prefetch

_FLOATS, _INTS = 'float64[::1]', 'int64[::1]'
SET = f'void({_FLOATS}, {_FLOATS}, {_FLOATS}, {_FLOATS}, {_INTS}, {_INTS}, {_FLOATS})'
SET_POWERS = f'void({_FLOATS}, {_FLOATS}, {_FLOATS}, {_FLOATS}, {_INTS}, {_INTS}, {_FLOATS}, float64, float64)'
FIND = f'void({_FLOATS}, {_FLOATS}, {_INTS}, {_FLOATS}, float64, {_INTS})'

#: All indices are unsigned. For signed indices numba checks at each access whether they count from the end. These
#: checks take longer than the work itself, and prevent vector instructions.
_u: Any = np.uint64
_SHIFT, _FAN_OUT, _ONE = _u(TREE_SHIFT), _u(TREE_FAN_OUT), _u(1)


@register_jitable
def _set(
    masses: Array, sums: Array, prefixes: Array, minima: Array, starts: Array, slots: Array, values: Array
) -> None:
    """
    Overview:
        Set leaves, then recompute all nodes above them level by level, with the arguments of ``SumTree``. The loop
        handles two nodes at a time, because the additions of one sum wait for each other. Slots are mostly in order, so
        that each node of the upper levels is computed only once.
    """
    if slots.shape[0] == 0:
        return
    count = _u(slots.shape[0])
    nodes = np.empty(count + _ONE, np.uint64)
    for i in range(count):
        nodes[i] = _u(slots[i])
        masses[nodes[i]] = values[i]
    for level in range(starts.shape[0]):
        count = _parents(nodes, count)
        here, below = _u(starts[level]), _u(starts[level - 1] if level > 0 else 0)
        for pair in range((count + _ONE) >> _ONE):
            a, b = nodes[pair + pair], nodes[pair + pair + _ONE]
            first_a, first_b = (a << _SHIFT) + below, (b << _SHIFT) + below
            total_a = total_b = 0.0
            least_a = least_b = np.inf
            if level == 0:
                for k in range(_FAN_OUT):
                    x, y = masses[first_a + k], masses[first_b + k]
                    total_a += x
                    total_b += y
                    x, y = x if x > 0.0 else np.inf, y if y > 0.0 else np.inf
                    least_a, least_b = x if x < least_a else least_a, y if y < least_b else least_b
            else:
                for k in range(_FAN_OUT):
                    total_a += sums[first_a + k]
                    total_b += sums[first_b + k]
                    prefixes[first_a + k], prefixes[first_b + k] = total_a, total_b
                    x, y = minima[first_a + k], minima[first_b + k]
                    least_a, least_b = x if x < least_a else least_a, y if y < least_b else least_b
            sums[here + a], sums[here + b] = total_a, total_b
            minima[here + a], minima[here + b] = least_a, least_b


def set_many(
    masses: Array, sums: Array, prefixes: Array, minima: Array, starts: Array, slots: Array, values: Array
) -> None:
    """Set leaves, see ``SumTree.set``."""
    _set(masses, sums, prefixes, minima, starts, slots, values)


def set_powers(
    masses: Array,
    sums: Array,
    prefixes: Array,
    minima: Array,
    starts: Array,
    slots: Array,
    priorities: Array,
    epsilon: float,
    alpha: float,
) -> None:
    """Set leaves to ``(priority + epsilon) ** alpha``."""
    values = np.empty(priorities.shape[0])
    powers_of(priorities + epsilon, alpha, values)
    _set(masses, sums, prefixes, minima, starts, slots, values)


@register_jitable
def _parents(nodes: Array, count: Any) -> Any:
    """
    Overview:
        Replace nodes by their parents. Of consecutive equal parents one is kept. The last is written twice, as the
        second half of a pair.
    Returns:
        - count (:obj:`int`): The number of parents.
    """
    num, last = _u(0), ~_u(0)
    for i in range(count):
        node = nodes[i] >> _SHIFT
        nodes[num] = node
        num += _u(node != last)
        last = node
    nodes[num] = last
    return num


def _count(context: Any, address: Any, target: Any) -> Any:
    """Return how many numbers of a block are at most ``target``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # One comparison of the whole block, without branches: half of the branches would be mispredicted.
        block = ir.VectorType(ir.DoubleType(), TREE_FAN_OUT)
        numbers = builder.load(builder.inttoptr(arguments[0], block.as_pointer()), align=8)
        one = builder.insert_element(ir.Constant(block, ir.Undefined), arguments[1], ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), TREE_FAN_OUT), [0] * TREE_FAN_OUT)
        target = builder.shuffle_vector(one, ir.Constant(block, ir.Undefined), zeros)
        bits = builder.bitcast(builder.fcmp_ordered('<=', numbers, target), ir.IntType(TREE_FAN_OUT))
        return builder.zext(builder.ctpop(bits), ir.IntType(64))

    return types.uint64(address, target), generate


_num_up_to: Any = intrinsic(_count)


def find_many(masses: Array, prefixes: Array, starts: Array, targets: Array, total: float, slots: Array) -> None:
    """
    Find the slot of each target. All targets go through a level together, so that their memory accesses overlap. With a
    ``total`` above zero, targets are numbers in [0, 1) at first. Each is moved to one of equal shares of the total.
    """
    num_targets, block_bytes = _u(targets.shape[0]), TREE_FAN_OUT * 8
    if total > 0.0:
        share = total / targets.shape[0]
        for i in range(targets.shape[0]):
            targets[i] = (targets[i] + i) * share
    prefix_address, mass_address = np.int64(prefixes.ctypes.data), np.int64(masses.ctypes.data)
    for i in range(num_targets):
        slots[i] = 0
    for level in range(starts.shape[0] - 2, -1, -1):
        start, below = _u(starts[level]), prefix_address + starts[level - 1] * 8 if level > 0 else mass_address
        for i in range(num_targets):
            node, target = _u(slots[i]) << _SHIFT, targets[i]
            first = start + node
            child = _num_up_to(prefix_address + np.int64(first) * 8, target)
            if child == _FAN_OUT:
                target = np.nextafter(prefixes[first + _FAN_OUT - _ONE], 0.0)
                # Limit it to the last child, which matters for a block without mass. Such a block is never drawn.
                child = min(_num_up_to(prefix_address + np.int64(first) * 8, target), _FAN_OUT - _ONE)
            if child > 0:
                target -= prefixes[first + child - _ONE]
            targets[i] = target
            slots[i] = slot = np.int64(node + child)
            # Prefetch the block of the next level, which is read after all other targets were here.
            prefetch(below + slot * block_bytes)
    for i in range(num_targets):
        first, target = _u(slots[i]) << _SHIFT, targets[i]
        total, place = 0.0, 0
        for k in range(_FAN_OUT):
            total += masses[first + k]
            place += total <= target
        if place == TREE_FAN_OUT:
            target = np.nextafter(total, 0.0)
            total, place = 0.0, 0
            for k in range(_FAN_OUT):
                total += masses[first + k]
                place += total <= target
        slots[i] = np.int64(first) + place
