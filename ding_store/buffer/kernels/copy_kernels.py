"""Loops that copy rows between addresses. Imported and compiled only if numba is installed, see ``load``."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import types
from numba.extending import intrinsic, register_jitable

from ding_store.buffer.array_types import Array
from ding_store.compiled.cache_lines import (
    LINE,
    are_equal,
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
COPY_ITEMS = f'void(int64, {_INTS}, {_INTS}, uint8[::1], {_INTS}, boolean)'
#: The input may be read-only, such as memory of another process.
NARROW = types.boolean(types.Array(types.float32, 1, 'C', readonly=True), types.uint8[::1])
NARROW_ROW = f'boolean({_INTS}, {_INTS}, {_INTS}, uint8[::1])'
NARROW_FRAMES = f'int64({_INTS}, int64, int64, uint8[:, ::1], int32[::1])'
_LEVELS = types.Array(types.uint8, 2, 'C', readonly=True)
WIDEN = types.void(_LEVELS, types.int64[::1], types.float32[:, ::1])
WIDEN_STEPS = types.boolean(_LEVELS, types.float32[:, :])


def _word_copier(num_bits: int) -> Any:
    """Return an intrinsic that copies one word, aligned or not."""

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


#: Rows of at least this size are prefetched for reading and writing while earlier rows are copied. This takes a quarter
#: less time at 512 bytes (512 rows), a fifth at 1.4 KB, and a tenth at 7 KB. It gains nothing at 128 bytes, where the
#: processor itself looks far enough ahead.
_PREFETCHED_BYTES = 192
#: Number of cache lines prefetched per row, and distance ahead in bytes, with its minimum and maximum in rows.
_NUM_LINES, _BYTES_AHEAD, _MIN_AHEAD, _MAX_AHEAD = 12, 4096, 4, 8


#: Up to this many small rows, the next column is prefetched before the present one is copied. This takes a tenth less
#: time for a sample of 64 rows of 97 bytes. For 512 rows it takes a tenth more.
_FEW_ROWS = 128

#: Minimum size of a copy past the caches. Smaller copies gain nothing.
_STREAMED_BYTES = 1024

#: Rows of at least this size are prefetched whole, so many rows ahead, piece by piece while a row is copied. This takes
#: a third less time than a few lines per row at 1.4 to 7 KB, and a sixth less at 28 KB. Items of varying size likewise.
_WHOLE_BYTES, _WHOLE_AHEAD, _PIECE_BYTES = 1024, 4, 512


def gather(sources: Array, sizes: Array, targets: Array, slots: Array, capacity: int, is_far: bool) -> None:
    """
    Overview:
        Copy rows ``slots`` of all columns to consecutive rows. Column ``k`` is at address ``sources[k]`` and has
        ``sizes[k]`` bytes per row. Its rows are copied to ``targets[k]``. Slots out of range are clipped, as in
        ``mode='clip'``. ``is_far`` means that the targets are larger than the caches.
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
        # A copy of constant size compiles to one or two instructions. Other sizes need a call.
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
        elif size >= _WHOLE_BYTES:
            for i in range(num_rows):
                row, to = source + slots[i] * size, target + i * size
                # The last rows are in a cache already.
                ahead = source + slots[min(i + _WHOLE_AHEAD, num_rows - 1)] * size
                for piece in range(0, size, _PIECE_BYTES):
                    end = min(piece + _PIECE_BYTES, size)
                    for line in range(piece, end, LINE):
                        prefetch_early(ahead + line)
                    copy_bytes(to + piece, row + piece, end - piece)
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
    Copy one row: ``sizes[k]`` bytes from ``sources[k]`` to a slot of the column at ``targets[k]``. Large parts bypass
    the caches, because a table's slot is not in a cache and not needed there soon.
    """
    for k in range(sources.shape[0]):
        target, source, size = targets[k] + slot * sizes[k], sources[k], sizes[k]
        if size >= _STREAMED_BYTES:
            stream(target, source, size)
        else:
            copy_bytes(target, source, size)
    finish()


def copy_items(source: int, starts: Array, sizes: Array, target: Array, places: Array, is_far: bool) -> None:
    """
    Overview:
        Copy items of varying size. Item ``i`` has ``sizes[i]`` bytes, which are ``starts[i]`` bytes behind the address
        ``source``. It is copied to ``places[i]`` of the target. The bytes behind it, up to ``places[i + 1]``, become
        zero.
    """
    address, last = target.ctypes.data, starts.shape[0] - 1
    for i in range(last + 1):
        place, size = places[i], sizes[i]
        if is_far and size >= _STREAMED_BYTES:
            stream(address + place, source + starts[i], size)
        else:
            following = min(i + _WHOLE_AHEAD, last)
            for piece in range(0, size, _PIECE_BYTES):
                end = min(piece + _PIECE_BYTES, size)
                for line in range(piece, min(end, sizes[following]), LINE):
                    prefetch_early(source + starts[following] + line)
                copy_bytes(address + place + piece, source + starts[i] + piece, end - piece)
        for k in range(place + size, places[i + 1]):
            target[k] = 0
    if is_far:
        finish()


def _float_bits(context: Any, value: Any) -> Any:
    """Return the bits of a float32 as an int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


def _float_pointer(context: Any, address: Any) -> Any:
    """Return an address as a pointer to float32 values."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(address), generate  # type: ignore[no-untyped-call]


_bits_of: Any = intrinsic(_float_bits)
_floats_at: Any = intrinsic(_float_pointer)

#: Adding this to a float rounds it to an integer, which is then in the last byte of the float's bits. The sum is
#: between 2**23 and 2**24, where all floats are integers.
_ROUNDING = np.float32(2**23)
#: Number of values per step, and prefetch distance in values. Without prefetching, each cache line is awaited: 63 us
#: for 113 KB, against 12 us.
_STEP, _AHEAD = 128, 512


@register_jitable
def narrow(values: Array, levels: Array) -> bool:
    """
    Overview:
        Convert float32 values k/255 to the bytes k.
    Returns:
        - is_exact (:obj:`bool`): Whether every value is exactly that of its byte, bit by bit. If not, ``levels`` are
          undefined.
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
            # A value outside 0 to 255 becomes an arbitrary byte, whose value has other bits. The loop has no branches,
            # so that it compiles to vector instructions.
            level = _bits_of(part[i] * np.float32(255) + _ROUNDING) & np.int32(255)
            narrowed[i] = level
            wrong |= _bits_of(part[i]) ^ _bits_of(np.float32(level) / np.float32(255))
    is_exact: bool = wrong == 0
    return is_exact


def narrow_row(places: Array, columns: Array, sizes: Array, levels: Array) -> bool:
    """
    Overview:
        Convert the values of one row to bytes like ``narrow``, and write the addresses of the bytes to ``places``.
    Arguments:
        - places (:obj:`np.ndarray`): Address of each column's value.
        - columns, sizes (:obj:`np.ndarray`): The columns of floats among ``places``, and their numbers of values.
        - levels (:obj:`np.ndarray`): Receives the bytes of all columns behind each other.
    Returns:
        - is_exact (:obj:`bool`): As in ``narrow``. False as well if an address is not that of a float.
    """
    start = 0
    for k in range(columns.shape[0]):
        given, end = places[columns[k]], start + sizes[k]
        if given % 4 or not narrow(carray(_floats_at(given), (sizes[k],)), levels[start:end]):
            return False
        places[columns[k]] = levels.ctypes.data + start
        start = end
    return True


def narrow_frames(parts: Array, per_part: int, lag: int, levels: Array, numbers: Array) -> int:
    """
    Overview:
        Convert frames of float32 values k/255 to the bytes k. A frame that equals the one ``lag`` places before it is
        not kept again.
    Arguments:
        - parts (:obj:`np.ndarray`): Addresses of the parts, each of which has ``per_part`` frames.
        - levels (:obj:`np.ndarray`): Receives the frames that are kept, ``(number, value)``. It has room for all.
        - numbers (:obj:`np.ndarray`): Receives the number of each frame.
    Returns:
        - count (:obj:`int`): The number of frames that are kept. -1 if a value is not exactly k/255.
    """
    count, size, address = 0, levels.shape[1], levels.ctypes.data
    for i in range(numbers.shape[0]):
        given = parts[i // per_part] + i % per_part * 4 * size
        if not narrow(carray(_floats_at(given), (size,)), levels[count]):
            return -1
        # Bytes are compared, because floats would be four times as many.
        if 0 < lag <= i and are_equal(address + numbers[i - lag] * size, address + count * size, size):
            numbers[i] = numbers[i - lag]
        else:
            numbers[i] = count
            count += 1
    return count


def widen(levels: Array, slots: Array, values: Array) -> None:
    """
    Convert rows ``slots`` of bytes k to float32 values k/255 in consecutive rows. Slots are clipped as in ``gather``.
    """
    for i in range(slots.shape[0]):
        row, out = levels[min(max(slots[i], 0), levels.shape[0] - 1)], values[i]
        for k in range(row.shape[0]):
            out[k] = np.float32(row[k]) / np.float32(255)


#: Number of values in a cache line.
_PER_LINE = LINE // 4


def _stream_line(context: Any, target: Any, source: Any) -> Any:
    """Widen as many bytes as fill a line of floats, and store it past the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integers, floats = ir.VectorType(ir.IntType(8), _PER_LINE), ir.VectorType(ir.FloatType(), _PER_LINE)
        levels = builder.load(builder.inttoptr(arguments[1], integers.as_pointer()), align=1)
        values = builder.fdiv(builder.uitofp(levels, floats), floats([ir.FloatType()(255.0)] * _PER_LINE))
        store_past_caches(builder, values, arguments[0])
        return context.get_dummy_value()

    return types.void(target, source), generate


_widen_line: Any = intrinsic(_stream_line)


@register_jitable
def _widen_past_caches(row: Array, out: Array, ahead: int) -> None:
    """Widen one row past the caches, and prefetch a row at the address ``ahead``. Call ``finish`` afterwards."""
    size, source, target = row.shape[0], row.ctypes.data, out.ctypes.data
    first = min(size, (-target % LINE) // 4)
    end = first + (size - first) // _PER_LINE * _PER_LINE
    for k in range(first):
        out[k] = np.float32(row[k]) / np.float32(255)
    for k in range(first, end, _PER_LINE):
        if k % LINE < _PER_LINE:
            prefetch_early(ahead + k)
        _widen_line(target + 4 * k, source + k)
    for k in range(end, size):
        out[k] = np.float32(row[k]) / np.float32(255)


def widen_many(levels: Array, slots: Array, values: Array) -> None:
    """Widen rows like ``widen``, past the caches. This takes half the time if the result is larger than the caches."""
    num_rows, last = slots.shape[0], levels.shape[0] - 1
    for i in range(num_rows):
        ahead = min(max(slots[min(i + _WHOLE_AHEAD, num_rows - 1)], 0), last)
        _widen_past_caches(levels[min(max(slots[i], 0), last)], values[i], levels[ahead].ctypes.data)
    finish()


def widen_steps(levels: Array, values: Array) -> bool:
    """
    Overview:
        Widen all rows past the caches, to rows that may be apart from each other.
    Returns:
        - is_done (:obj:`bool`): False, and nothing changed, if the shapes differ or a target row has gaps.
    """
    if levels.shape != values.shape or (values.shape[1] > 1 and values.strides[1] != 4):
        return False
    for i in range(levels.shape[0]):
        _widen_past_caches(levels[i], values[i], levels[min(i + _WHOLE_AHEAD, levels.shape[0] - 1)].ctypes.data)
    finish()
    return True
