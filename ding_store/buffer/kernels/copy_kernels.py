"""Loops that copy rows between addresses. Imported, and compiled, only where numba is: see ``kernels``."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, register_jitable

from ding_store.buffer.array_types import Array
from ding_store.compiled.cache_lines import (
    LINE,
    copy_bytes,
    finish,
    prefetch,
    prefetch_early,
    prefetch_to_write,
    store_past_caches,
    stream,
)

_INTS = 'int64[::1]'
GATHER = f'void({_INTS}, {_INTS}, {_INTS}, {_INTS}, int64, boolean)'
PUT = f'void({_INTS}, {_INTS}, {_INTS}, int64)'
#: What is narrowed may be read-only: another process's memory.
NARROW = types.boolean(types.Array(types.float32, 1, 'C', readonly=True), types.uint8[::1])
_LEVELS = types.Array(types.uint8, 2, 'C', readonly=True)
WIDEN = types.void(_LEVELS, types.int64[::1], types.float32[:, ::1])
WIDEN_STEPS = types.boolean(_LEVELS, types.float32[:, :])


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


#: Of rows this large the first lines are asked for, to be read and to be written, while those before them are copied: a
#: quarter less time at 512 bytes (512 rows), a fifth at 1.4 KB, a tenth at 7 KB; nothing at 128 bytes, where the
#: processor looks far enough ahead by itself.
_PREFETCHED_BYTES = 192
#: Lines of each, and how many bytes ahead, in rows of which there are at least, and at most, so many.
_NUM_LINES, _BYTES_AHEAD, _MIN_AHEAD, _MAX_AHEAD = 12, 4096, 4, 8


#: Of so many small rows the next column's are asked for before this one's are copied: a tenth less time in all for a
#: sample of 64 rows of 97 bytes. Of 512 rows it takes as much longer.
_FEW_ROWS = 128

#: Parts of rows that are copied past the caches, where that is to be; smaller ones gain nothing.
_STREAMED_BYTES = 1024


def gather(sources: Array, sizes: Array, targets: Array, slots: Array, capacity: int, is_far: bool) -> None:
    """
    Overview:
        Rows ``slots`` of all columns: of the column at address ``sources[k]``, of ``sizes[k]`` bytes per row, to
        consecutive rows at ``targets[k]``. Slots that are out of range count as the nearest, as in ``mode='clip'``.
        ``is_far``: the targets are more than the caches hold.
    """
    num_rows = slots.shape[0]
    wanted, slots = slots, np.empty(num_rows, np.int64)
    for i in range(num_rows):
        slots[i] = min(max(wanted[i], 0), capacity - 1)
    num_columns = sources.shape[0]
    for k in range(num_columns):
        source, size, target = sources[k], sizes[k], targets[k]
        if num_rows <= _FEW_ROWS and k + 1 < num_columns and sizes[k + 1] < _PREFETCHED_BYTES:
            for i in range(num_rows):
                prefetch_early(sources[k + 1] + slots[i] * sizes[k + 1])
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
        elif is_far and size >= _STREAMED_BYTES:
            for i in range(num_rows):
                stream(target + i * size, source + slots[i] * size, size)
        else:
            lines = min(size // LINE, _NUM_LINES) if size >= _PREFETCHED_BYTES else 0
            num_ahead = min(max(_BYTES_AHEAD // max(size, 1), _MIN_AHEAD), _MAX_AHEAD)
            for i in range(num_rows):
                if lines and i + num_ahead < num_rows:
                    ahead, to = source + slots[i + num_ahead] * size, target + (i + num_ahead) * size
                    for line in range(lines):
                        prefetch_early(ahead + line * LINE)
                        prefetch_to_write(to + line * LINE)
                copy_bytes(target + i * size, source + slots[i] * size, size)
    if is_far:
        finish()


def put(sources: Array, sizes: Array, targets: Array, slot: int) -> None:
    """
    Copy a row: of each column ``sizes[k]`` bytes at ``sources[k]`` to a slot of the column at ``targets[k]``. No cache
    has the slot of a table, nor needs it soon.
    """
    for k in range(sources.shape[0]):
        target, source, size = targets[k] + slot * sizes[k], sources[k], sizes[k]
        if size >= _STREAMED_BYTES:
            stream(target, source, size)
        else:
            copy_bytes(target, source, size)
    finish()


def _float_bits(context: Any, value: Any) -> Any:
    """The bits of a float32 as an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


_bits_of: Any = intrinsic(_float_bits)

#: From here to twice as much floats are integers, whose last byte is that of the float's bits: adding it rounds.
_ROUNDING = np.float32(2**23)
#: Numbers that are looked at before the next are asked for, and how far ahead these are. What no cache has is waited
#: for line by line otherwise: 63 us for 113 KB, 12 with it.
_STEP, _AHEAD = 128, 512


def narrow(values: Array, levels: Array) -> bool:
    """
    Overview:
        The bytes k of float32 values k/255.
    Returns:
        - is_exact (:obj:`bool`): Whether every value is that of its byte, bit by bit; else ``levels`` mean nothing.
    """
    count, address, wrong = values.shape[0], values.ctypes.data, np.int32(0)
    for start in range(0, 4 * min(count, _AHEAD), LINE):
        prefetch(address + start)
    for start in range(0, count, _STEP):
        end = min(start + _STEP, count)
        for ahead in range(4 * (start + _AHEAD), 4 * min(end + _AHEAD, count), LINE):
            prefetch(address + ahead)
        part, narrowed = values[start:end], levels[start:end]
        for i in range(end - start):
            # What is no number of 0 to 255 becomes any byte, and has other bits than that. Without branches, so that it
            # is a few instructions for many values at once.
            level = _bits_of(part[i] * np.float32(255) + _ROUNDING) & np.int32(255)
            narrowed[i] = level
            wrong |= _bits_of(part[i]) ^ _bits_of(np.float32(level) / np.float32(255))
    is_exact: bool = wrong == 0
    return is_exact


def widen(levels: Array, slots: Array, values: Array) -> None:
    """Rows ``slots`` of bytes k as the float32 values k/255 in consecutive rows; slots as those of ``gather``."""
    for i in range(slots.shape[0]):
        row, out = levels[min(max(slots[i], 0), levels.shape[0] - 1)], values[i]
        for k in range(row.shape[0]):
            out[k] = np.float32(row[k]) / np.float32(255)


#: Values in a cache line.
_PER_LINE = LINE // 4


def _stream_line(context: Any, target: Any, source: Any) -> Any:
    """Widen as many bytes as make a line, past the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integers, floats = ir.VectorType(ir.IntType(8), _PER_LINE), ir.VectorType(ir.FloatType(), _PER_LINE)
        levels = builder.load(builder.inttoptr(arguments[1], integers.as_pointer()), align=1)
        values = builder.fdiv(builder.uitofp(levels, floats), floats([ir.FloatType()(255.0)] * _PER_LINE))
        store_past_caches(builder, values, arguments[0])
        return context.get_dummy_value()

    return types.void(target, source), generate


_widen_line: Any = intrinsic(_stream_line)


@register_jitable
def _widen_past_caches(row: Array, out: Array) -> None:
    """One row; ``finish`` afterwards."""
    size, source, target = row.shape[0], row.ctypes.data, out.ctypes.data
    first = min(size, (-target % LINE) // 4)
    end = first + (size - first) // _PER_LINE * _PER_LINE
    for k in range(first):
        out[k] = np.float32(row[k]) / np.float32(255)
    for k in range(first, end, _PER_LINE):
        _widen_line(target + 4 * k, source + k)
    for k in range(end, size):
        out[k] = np.float32(row[k]) / np.float32(255)


def widen_many(levels: Array, slots: Array, values: Array) -> None:
    """As ``widen``, of more than caches hold: half the time."""
    for i in range(slots.shape[0]):
        _widen_past_caches(levels[min(max(slots[i], 0), levels.shape[0] - 1)], values[i])
    finish()


def widen_steps(levels: Array, values: Array) -> bool:
    """
    Overview:
        All rows, past the caches, to rows that need not be consecutive.
    Returns:
        - is_done (:obj:`bool`): Whether they are of the same shape, and have no gaps in them; else nothing happened.
    """
    if levels.shape != values.shape or (values.shape[1] > 1 and values.strides[1] != 4):
        return False
    for i in range(levels.shape[0]):
        _widen_past_caches(levels[i], values[i])
    finish()
    return True
