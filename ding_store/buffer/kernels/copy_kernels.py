"""Loops that copy rows between addresses. Imported, and compiled, only where numba is: see ``kernels``."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ding_store.buffer.arrays import Array

_INTS = 'int64[::1]'
GATHER = f'void({_INTS}, {_INTS}, {_INTS}, {_INTS}, int64)'
PUT = f'void({_INTS}, {_INTS}, {_INTS}, int64)'
#: What is narrowed may be read-only: another process's memory.
NARROW = types.boolean(
    types.Array(types.float32, 1, 'C', readonly=True),
    types.Array(types.int32, 1, 'C', readonly=True),
    types.uint8[::1],
)


def _word_copier(num_bits: int) -> Any:
    """Copies one word, aligned or not."""

    @intrinsic
    def copy_word(context: Any, target: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = ir.IntType(num_bits).as_pointer()
            target, source = (builder.inttoptr(address, word) for address in arguments)
            builder.store(builder.load(source, align=1), target, align=1)
            return context.get_dummy_value()

        return types.void(target, source), generate

    return copy_word


_copy_1, _copy_4, _copy_8, _copy_16, _copy_32 = (_word_copier(8 * size) for size in (1, 4, 8, 16, 32))


def _copy_bytes(context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """As memcpy."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(address, pointer) for address in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(target, source, num_bytes), generate


_copy_many: Any = intrinsic(_copy_bytes)

#: Of rows this large, the first lines are asked for while those before them are copied: a fifth less time at 1.4 KB, a
#: fortieth at 56 KB; nothing at 81 bytes, where the processor looks far enough ahead by itself.
_PREFETCHED_BYTES = 256
_ROWS_AHEAD, _NUM_LINES, LINE = 4, 8, 64


def _fetch_line(context: Any, address: Any) -> Any:
    """Have the cache line of an address on its way."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        module: Any = builder.module
        fetch = module.declare_intrinsic('llvm.prefetch', [pointer], kind)
        # To read, in all caches, data.
        builder.call(fetch, [builder.inttoptr(arguments[0], pointer), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(address), generate


prefetch: Any = intrinsic(_fetch_line)


def gather(sources: Array, sizes: Array, targets: Array, slots: Array, capacity: int) -> None:
    """
    Overview:
        Rows ``slots`` of all columns: of the column at address ``sources[k]``, of ``sizes[k]`` bytes per row, to
        consecutive rows at ``targets[k]``. Slots that are out of range count as the nearest, as in ``mode='clip'``.
    """
    num_rows = slots.shape[0]
    wanted, slots = slots, np.empty(num_rows, np.int64)
    for i in range(num_rows):
        slots[i] = min(max(wanted[i], 0), capacity - 1)
    for k in range(sources.shape[0]):
        source, size, target = sources[k], sizes[k], targets[k]
        # Sizes that are known here are an instruction or two; others are a call.
        if size == 4:
            for i in range(num_rows):
                _copy_4(target + i * 4, source + slots[i] * 4)
        elif size == 8:
            for i in range(num_rows):
                _copy_8(target + i * 8, source + slots[i] * 8)
        elif size == 1:
            for i in range(num_rows):
                _copy_1(target + i, source + slots[i])
        elif size == 16:
            for i in range(num_rows):
                _copy_16(target + i * 16, source + slots[i] * 16)
        elif size == 32:
            for i in range(num_rows):
                _copy_32(target + i * 32, source + slots[i] * 32)
        else:
            lines = min(size // LINE, _NUM_LINES) if size >= _PREFETCHED_BYTES else 0
            for i in range(num_rows):
                if i + _ROWS_AHEAD < num_rows:
                    ahead = source + slots[i + _ROWS_AHEAD] * size
                    for line in range(lines):
                        prefetch(ahead + line * LINE)
                _copy_many(target + i * size, source + slots[i] * size, size)


def put(sources: Array, sizes: Array, targets: Array, slot: int) -> None:
    """Copy a row: of each column ``sizes[k]`` bytes at ``sources[k]`` to a slot of the column at ``targets[k]``."""
    for k in range(sources.shape[0]):
        _copy_many(targets[k] + slot * sizes[k], sources[k], sizes[k])


def narrow(values: Array, bits: Array, levels: Array) -> bool:
    """
    Overview:
        The bytes k of float32 values k/255.
    Arguments:
        - bits (:obj:`np.ndarray`): The values' own, as int32.
    Returns:
        - is_exact (:obj:`bool`): Whether every value is that of its byte, bit by bit; else ``levels`` mean nothing.
    """
    wrong = np.int32(0)
    for i in range(values.shape[0]):
        level = values[i] * np.float32(255) + np.float32(0.5)
        # In this form a NaN becomes 0, too; without branches, so that it is a few instructions for many values at once.
        level = level if level >= np.float32(0) else np.float32(0)
        level = level if level <= np.float32(255) else np.float32(255)
        k = np.int32(level)
        levels[i] = k
        # 0.0 equals -0.0: the sign is looked at by itself.
        wrong |= np.int32(values[i] != np.float32(k) / np.float32(255)) | (bits[i] & np.int32(-(2**31)))
    is_exact: bool = wrong == 0
    return is_exact
