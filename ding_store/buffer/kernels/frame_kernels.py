"""Loops that find equal frames. Imported and compiled only if numba is installed, see ``load``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from ding_store.buffer.array_types import Array
from ding_store.compiled.cache_lines import are_equal, copy_bytes, load_byte, load_word, prefetch_early

_HASHES, _INTS, _STATE = 'uint64[::1]', 'int32[::1]', 'int64[::1]'
_WORDS, _POOL = _STATE, f'int64, int64, {_HASHES}, {_INTS}, {_INTS}, {_INTS}, {_STATE}, uint64'
INTERN = f'int64(int64, {_POOL}, int64, {_INTS}, int64)'
INTERN_ROW = f'int64({_WORDS}, {_WORDS}, {_WORDS}, {_POOL}, {_WORDS}, {_INTS}, int64, int64)'
RELEASE = f'void(int32[:, ::1], {_WORDS}, {_HASHES}, {_INTS}, {_INTS}, {_INTS}, {_STATE})'
INDEX = f'void({_INTS}, {_HASHES}, {_INTS})'

#: Positions in the state of a pool: the number of free frames on the stack, the number of frames that were ever used,
#: and the number of frames in use.
NUM_FREE, NUM_EVER, NUM_USED = range(3)

#: Odd constants of xxHash64 and of the finalizer of MurmurHash3 (Austin Appleby), both in the public domain.
_PRIME = np.uint64(0x9E3779B185EBCA87)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT = np.uint64(33)
#: Lines of the next frame that are prefetched.
_NUM_LINES, _LINE = 12, 64


@register_jitable
def _mixed(value: Any) -> Any:
    value = (value ^ (value >> _SHIFT)) * _MIX
    return value ^ (value >> _SHIFT)


@register_jitable
def _step(lane: Any, address: int) -> Any:
    lane = (lane ^ load_word(address)) * _PRIME
    # A multiplication carries only upwards: bring the upper bits down, or differences in them would cancel each other.
    return lane ^ (lane >> _SHIFT)


@register_jitable
def _hash(address: int, num_bytes: int) -> Any:
    """Return a 64-bit hash of bytes. Eight lanes hide the latency of the multiplications."""
    a, b, c, d = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    e, f, g, h = np.uint64(5), np.uint64(6), np.uint64(7), np.uint64(8)
    num_blocks = num_bytes // _LINE
    for block in range(num_blocks):
        at = address + block * _LINE
        a, b, c, d = _step(a, at), _step(b, at + 8), _step(c, at + 16), _step(d, at + 24)
        e, f, g, h = _step(e, at + 32), _step(f, at + 40), _step(g, at + 48), _step(h, at + 56)
    value = np.uint64(num_bytes)
    for k in range(num_blocks * _LINE, num_bytes):
        value = (value ^ load_byte(address + k)) * _PRIME
    for lane in (a, b, c, d, e, f, g, h):
        value = _mixed(value ^ lane) + _PRIME
    return value


@register_jitable
def _insert(table: Array, hashes: Array, frame: Any) -> None:
    mask = table.shape[0] - 1
    place = np.int64(hashes[frame]) & mask
    while table[place]:
        place = (place + 1) & mask
    table[place] = frame + 1


@register_jitable
def _found(
    given: int,
    num_bytes: int,
    frames: int,
    hashes: Array,
    counts: Array,
    table: Array,
    free: Array,
    state: Array,
    hash_mask: int,
) -> Any:
    """Return the number of a frame that is in the pool, or was added. It is counted once more. -1: the pool is full."""
    value, mask = _hash(given, num_bytes) & hash_mask, table.shape[0] - 1
    place = np.int64(value) & mask
    while table[place]:
        frame = np.int64(table[place]) - 1
        if hashes[frame] == value and are_equal(frames + frame * num_bytes, given, num_bytes):
            counts[frame] += 1
            return frame
        place = (place + 1) & mask
    if state[NUM_FREE] > 0:
        state[NUM_FREE] -= 1
        frame = np.int64(free[state[NUM_FREE]])
    elif state[NUM_EVER] < hashes.shape[0]:
        frame = state[NUM_EVER]
        state[NUM_EVER] += 1
    else:
        return np.int64(-1)
    # Not past the caches: the next rows have this frame as well, and will be compared with it.
    copy_bytes(frames + frame * num_bytes, given, num_bytes)
    state[NUM_USED] += 1
    hashes[frame], counts[frame], table[place] = value, 1, frame + 1
    return frame


def intern(
    source: int,
    num_bytes: int,
    frames: int,
    hashes: Array,
    counts: Array,
    table: Array,
    free: Array,
    state: Array,
    hash_mask: int,
    lag: int,
    refs: Array,
    start: int,
) -> int:
    """
    Overview:
        Find frames in a pool, or add them to it. Each is counted once more. Two frames are one only if all their bytes
        are equal.
    Arguments:
        - source (:obj:`int`): Address of the frames, ``num_bytes`` each.
        - frames (:obj:`int`): Address of the pool's frames.
        - hashes, counts (:obj:`np.ndarray`): Hash and number of references of each of the pool's frames.
        - table (:obj:`np.ndarray`): Hash table with linear probing: frame number plus one, or 0. A power of two.
        - free (:obj:`np.ndarray`): Stack of free frames below ``state[NUM_EVER]``.
        - hash_mask (:obj:`int`): Bits of the hash that are used, for tests of collisions.
        - lag (:obj:`int`): A frame probably equals that so many places before it. It is then not hashed. 0: no guess.
        - refs (:obj:`np.ndarray`): Receives the frame numbers.
        - start (:obj:`int`): The first frame to look at.
    Returns:
        - end (:obj:`int`): The number of frames that are done. If not all, the pool is full, or the table must grow
          first.
    """
    for i in range(start, refs.shape[0]):
        if 2 * (state[NUM_USED] + 1) > table.shape[0]:
            return i
        given = source + i * num_bytes
        for line in range(_NUM_LINES):
            prefetch_early(given + num_bytes + line * _LINE)
        if 0 < lag <= i:
            frame = np.int64(refs[i - lag])
            if are_equal(frames + frame * num_bytes, given, num_bytes):
                counts[frame] += 1
                refs[i] = frame
                continue
        frame = _found(given, num_bytes, frames, hashes, counts, table, free, state, hash_mask)
        if frame < 0:
            return i
        refs[i] = frame
    return refs.shape[0]


@register_jitable
def _before(place: int, lag: int, size: int) -> int:
    """Return the place in a ring that is so many before another one."""
    return place - lag if place >= lag else place - lag + size


def intern_row(
    places: Array,
    columns: Array,
    numbers: Array,
    num_bytes: int,
    frames: int,
    hashes: Array,
    counts: Array,
    table: Array,
    free: Array,
    state: Array,
    hash_mask: int,
    lags: Array,
    recent: Array,
    begin: int,
    start: int,
) -> int:
    """
    Overview:
        Find the frames of one row like ``intern``. A frame is first compared with the one that is as many places before
        it as the equal one was in an earlier row. If all of these guesses are right, no frame is hashed.
    Arguments:
        - places (:obj:`np.ndarray`): Address of each column's value. Receives those of the references instead.
        - columns, numbers (:obj:`np.ndarray`): The columns of this pool among ``places``, and their numbers of frames.
        - lags (:obj:`np.ndarray`): The guess for each frame of a row, which this function improves. 0: no guess.
        - recent (:obj:`np.ndarray`): A ring of the latest references, some of which may be of free frames by now.
        - begin (:obj:`int`): The place of this row in ``recent``, which receives its references.
        - start (:obj:`int`): The first frame to look at.
    Returns:
        - end (:obj:`int`): As ``intern`` returns it. ``places`` are unchanged unless all frames are done.
    """
    i, last = 0, recent.shape[0]
    for k in range(columns.shape[0]):
        for place in range(numbers[k]):
            if i < start:
                i += 1
                continue
            if 2 * (state[NUM_USED] + 1) > table.shape[0]:
                return i
            given, at = places[columns[k]] + place * num_bytes, begin + i
            for line in range(_NUM_LINES):
                prefetch_early(given + num_bytes + line * _LINE)
            frame = np.int64(recent[_before(at, lags[i], last)])
            # A frame without references may be written to at any time, and is not in the table.
            if lags[i] and counts[frame] and are_equal(frames + frame * num_bytes, given, num_bytes):
                counts[frame] += 1
            else:
                frame = _found(given, num_bytes, frames, hashes, counts, table, free, state, hash_mask)
                if frame < 0:
                    return i
                if counts[frame] > 1:
                    for lag in range(1, last):
                        if recent[_before(at, lag, last)] == frame:
                            lags[i] = lag
                            break
            recent[at] = frame
            i += 1
    address = recent.ctypes.data + begin * recent.itemsize
    for k in range(columns.shape[0]):
        places[columns[k]] = address
        address += numbers[k] * recent.itemsize
    return i


def release(
    references: Array, slots: Array, hashes: Array, counts: Array, table: Array, free: Array, state: Array
) -> None:
    """Count the frames to which these rows refer once less. Frames without references become free."""
    mask = table.shape[0] - 1
    for i in range(slots.shape[0]):
        for k in range(references.shape[1]):
            frame = np.int64(references[slots[i], k])
            counts[frame] -= 1
            if counts[frame]:
                continue
            free[state[NUM_FREE]] = frame
            state[NUM_FREE] += 1
            state[NUM_USED] -= 1
            place = np.int64(hashes[frame]) & mask
            while table[place] and table[place] != frame + 1:
                place = (place + 1) & mask
            if not table[place]:
                continue  # It was not in the table: nothing is shared with it.
            # Close the gap: move back each later entry that the gap would make unreachable (Knuth, 6.4, algorithm R).
            gap = place
            while True:
                place = (place + 1) & mask
                if not table[place]:
                    break
                home = np.int64(hashes[np.int64(table[place]) - 1]) & mask
                if (place - home) & mask >= (place - gap) & mask:
                    table[gap] = table[place]
                    gap = place
            table[gap] = 0


def index_frames(wanted: Array, hashes: Array, table: Array) -> None:
    """Insert these frames into an empty table. Their hashes are known."""
    for i in range(wanted.shape[0]):
        _insert(table, hashes, np.int64(wanted[i]))
