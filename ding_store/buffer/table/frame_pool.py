"""A pool of equal-sized frames, each kept once. Rows refer to its frames by number."""

from __future__ import annotations

import errno
import logging
from typing import Callable, Dict, List, Optional

import numpy as np

from ding_store import free_space
from ding_store.buffer.array_types import Array, filled
from ding_store.buffer.kernels.load import Kernels, load_kernels
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.persistence.table_header import HASH, StoredColumn, StoredFrames
from ding_store.buffer.table.column_memory import ColumnMemory
from ding_store.buffer.table.specs import ColumnSpec, spec_bytes
from ding_store.errors import NotEnoughSpace

#: Positions in ``FramePool._state``, as in ``kernels.frame_kernels``.
_NUM_FREE, _NUM_EVER, _NUM_USED = range(3)
_MIN_TABLE = 1 << 10
#: Rows among whose frames an equal one is looked for. Up to this many environments can take turns.
_RECENT_ROWS = 32
_FRAMES, _HASHES = 'frames', 'hashes'

logger = logging.getLogger(__name__)


class FramesOfRow:
    """
    Overview:
        The frames of one row at a time, and guesses of the earlier frames that they equal.
    Arguments:
        - columns (:obj:`List[int]`): The columns of one pool, by their places among all columns.
        - numbers (:obj:`List[int]`): The number of frames of each.
        - is_brief (:obj:`bool`): Whether to keep the interpreter's lock.
    """

    __slots__ = ('_begin', 'columns', 'intern', 'lags', 'num_frames', 'numbers', 'recent')

    def __init__(self, columns: List[int], numbers: List[int], kernels: Kernels, is_brief: bool) -> None:
        self.columns, self.numbers = np.array(columns), np.array(numbers)
        self.intern = kernels.intern_row if is_brief else kernels.intern_row_freely
        self.num_frames = sum(numbers)
        #: See ``frame_kernels.intern_row``. Rows of several environments may take turns.
        self.lags = np.zeros(self.num_frames, np.int64)
        self.recent = np.zeros(_RECENT_ROWS * self.num_frames, np.int32)
        self._begin = 0

    def turn(self) -> int:
        """Return the place in ``recent`` of the next row."""
        self._begin += self.num_frames
        if self._begin == len(self.recent):
            self._begin = 0
        return self._begin


class FramePool:
    """
    Overview:
        Frames of one dtype and shape, each with the number of references to it. A frame is found by a hash of its
        bytes, and shared only after all its bytes were compared. A frame without references is free. Writers take
        turns. Readers may read frames at any time, and check afterwards that their rows are still there.
    Arguments:
        - spec (:obj:`ColumnSpec`): dtype and shape of a frame.
        - capacity (:obj:`int`): The maximum number of frames. Unused frames take no memory.
        - table_dir (:obj:`Optional[TableDirectory]`): Directory of the files, or None for a private pool.
        - stored (:obj:`Optional[StoredFrames]`): The files, if the directory has them already. ``recount`` must follow.
    """

    #: Bits of the hash that are used. Tests use fewer, so that hashes collide.
    hash_bits = 64

    def __init__(
        self,
        spec: ColumnSpec,
        capacity: int,
        table_dir: Optional[TableDirectory] = None,
        stored: Optional[StoredFrames] = None,
    ) -> None:
        self._memory = ColumnMemory(capacity, table_dir, grows=True, what='frames')
        self._is_warned = False
        if stored is None:
            self._memory.add({_FRAMES: spec, _HASHES: (HASH, ())})
        else:
            dtype, shape = spec
            files = [StoredColumn(_FRAMES, dtype.str, list(shape), stored.file)]
            files.append(StoredColumn(_HASHES, HASH.str, [], stored.hashes))
            try:
                self._memory.open(files, 0)
            except BaseException:
                self._memory.close()
                raise
        self._frame_bytes = spec_bytes(spec)
        self._keep_addresses()
        self._hash_mask = (1 << self.hash_bits) - 1
        self._kernels = load_kernels()
        self._counts = filled(capacity, 0, np.int32)
        self._free = filled(capacity, 0, np.int32)
        self._state = np.zeros(3, np.int64)
        self._table = np.zeros(_MIN_TABLE, np.int32)
        #: Without compiled loops: hash -> a frame with this hash.
        self._frame_of: Dict[int, int] = {}

    @property
    def in_header(self) -> StoredFrames:
        """The pool in the form of a directory's header."""
        frames, hashes = self._memory.stored_columns()
        return StoredFrames(frames.shape, self.capacity, frames.file, hashes.file)

    @property
    def capacity(self) -> int:
        return self._memory.capacity

    @property
    def frames(self) -> Array:
        """The frames by number, ``(capacity, *shape)``."""
        return self._memory.columns[_FRAMES]

    @property
    def has_files(self) -> bool:
        """True if forked processes share the frames."""
        return self._memory.has_files

    @property
    def num_used(self) -> int:
        """The number of frames that have references."""
        return int(self._state[_NUM_USED])

    @property
    def num_bytes(self) -> int:
        """The bytes of all frames that have references."""
        return self.num_used * self._frame_bytes

    def intern(self, frames: Array, lag: int = 0) -> Array:
        """
        Overview:
            Find frames, or add them. Each is counted once more. The caller has reserved room for them.
        Arguments:
            - frames (:obj:`np.ndarray`): ``(n, *shape)``, of the pool's dtype.
            - lag (:obj:`int`): A frame probably equals that so many places before it. A right guess saves its hash.
        Returns:
            - numbers (:obj:`np.ndarray`): ``(n,)``, int32.
        """
        num_frames = len(frames)
        numbers = np.empty(num_frames, np.int32)
        if self._kernels is None:
            self._intern_in_python(frames, numbers)
            return numbers
        frames, done = np.ascontiguousarray(frames), 0
        addresses = frames.ctypes.data, self._frame_bytes, self._address
        while True:
            known = self._hashes, self._counts, self._table, self._free, self._state
            done = self._kernels.intern(*addresses, *known, self._hash_mask, lag, numbers, done)
            if done == num_frames:
                return numbers
            self._check_room()
            self._index(2 * len(self._table))

    def intern_row(self, places: Array, row: FramesOfRow) -> None:
        """
        Overview:
            Find or add the frames of one row, with compiled loops. Each is counted once more. The caller has reserved
            room for them.
        Arguments:
            - places (:obj:`np.ndarray`): Address of each column's value, int64. Those of the pool's columns become
              addresses of references, which are valid until the next row.
        """
        done, begin, pool = 0, row.turn(), (self._frame_bytes, self._address, self._hashes, self._counts)
        while True:
            rest = self._table, self._free, self._state, self._hash_mask, row.lags, row.recent, begin
            done = row.intern(places, row.columns, row.numbers, *pool, *rest, done)
            if done == row.num_frames:
                return
            self._check_room()
            self._index(2 * len(self._table))

    def intern_repeated(self, frames: Array, references: Array) -> Array:
        """
        Overview:
            Find or add the frames to which ``references`` refer, and count each as often as it is in there. Others are
            left out. The caller has reserved room for them.
        Arguments:
            - frames (:obj:`np.ndarray`): ``(m, *shape)``, of the pool's dtype.
            - references (:obj:`np.ndarray`): Places in ``frames``, with repetitions.
        Returns:
            - numbers (:obj:`np.ndarray`): ``(m,)``, int32. Those of left out frames are 0.
        """
        uses = np.bincount(references, minlength=len(frames)).astype(np.int32)
        used = np.flatnonzero(uses)
        numbers = np.zeros(len(frames), np.int32)
        numbers[used] = found = self.intern(frames if len(used) == len(frames) else frames[used])
        # The frames may be equal to each other, and then have one number.
        np.add.at(self._counts, found, uses[used] - 1)
        return numbers

    def reserve(self, num_frames: int) -> Optional[Callable[[], None]]:
        """
        Overview:
            Make room for so many more frames. How often frames will recur is unknown. So they begin in memory, and are
            copied to a private file when they outgrow it. They stay in memory if the disk is full, as long as memory
            lasts.
        Returns:
            - move (:obj:`Optional[Callable]`): Must be called, and switches to the file. May be called again. None: the
              frames stay.
        Raises:
            - NotEnoughSpace: There is none. Nothing changed.
        """
        num_free, num_ever, _ = self._state.tolist()
        needed = min(self.capacity, num_ever + max(0, num_frames - num_free))
        self._memory.reserve(needed)
        if not self._memory.outgrows_memory(num_ever, needed):
            return None
        try:
            return self._moving(num_ever)
        except NotEnoughSpace as e:
            memory = free_space.format_bytes(free_space.available_memory())
            if not self._memory.stay_in_memory(num_ever, needed):
                raise NotEnoughSpace(e.errno, f'memory has only {memory} left, and there is {e.strerror}') from e
            if not self._is_warned:
                self._is_warned = True
                logger.warning('frames outgrow memory, which has %s left, and stay in it: %s', memory, e.strerror)
            return None

    def _moving(self, num_ever: int) -> Callable[[], None]:
        frames, directory = self.frames, free_space.roomiest_directory()
        if free_space.is_in_memory(directory):
            raise NotEnoughSpace(errno.ENOSPC, f'no disk: files in {directory!r} are in memory. Set TMPDIR.')
        made = self._memory.replacing(_FRAMES, (frames.dtype, frames.shape[1:]), _copy, num_ever, directory)
        logger.warning(
            '%s of frames move from memory to a file in %s: memory has only %s left. Samples may read from the disk. '
            'Use a smaller size.',
            free_space.format_bytes(num_ever * self._frame_bytes),
            directory,
            free_space.format_bytes(free_space.available_memory()),
        )

        def move() -> None:
            made.replace()
            self._keep_addresses()

        return move

    def _keep_addresses(self) -> None:
        """Keep what each push needs of the arrays."""
        self._address, self._hashes = self.frames.ctypes.data, self._memory.columns[_HASHES]

    def _check_room(self) -> None:
        if self._state[_NUM_USED] == self.capacity:
            raise RuntimeError(f'a row has more frames than the pool has room for: {self.capacity} are in use')

    def release(self, references: Array, slots: Array) -> None:
        """Count the frames to which these rows of ``references`` refer once less."""
        if self._kernels is None:
            self._release_in_python(references[slots].reshape(-1))
        else:
            slots = np.ascontiguousarray(slots, np.int64)
            self._kernels.release(references, slots, self._hashes, self._counts, self._table, self._free, self._state)

    def recount(self, numbers: Array) -> None:
        """
        Count the references anew: these are all there are. It may be called again after an interruption of itself.
        """
        counts = np.bincount(numbers.reshape(-1), minlength=self.capacity)
        self._counts[:] = counts
        num_ever = max(int(self._state[_NUM_EVER]), int(numbers.max(initial=-1)) + 1)
        free = np.flatnonzero(counts[:num_ever] == 0)[::-1]
        self._free[: len(free)] = free
        self._state[:] = len(free), num_ever, num_ever - len(free)
        self._index(len(self._table))

    def has(self, numbers: Array) -> Array:
        """Return whether the pool has frames of these numbers, bool."""
        return (numbers >= 0) & (numbers < self.capacity)

    def findings(self, numbers: Array) -> List[str]:
        """
        Overview:
            Look for inconsistencies.
        Arguments:
            - numbers (:obj:`np.ndarray`): The frames to which rows refer, with repetitions.
        Returns:
            - findings (:obj:`List[str]`): One sentence per inconsistency.
        """
        numbers = numbers.reshape(-1)
        if ((numbers < 0) | (numbers >= self._state[_NUM_EVER])).any():
            return ['a row refers to a frame that does not exist']
        counts = np.bincount(numbers, minlength=self.capacity)
        free = self._free[: self._state[_NUM_FREE]]
        checks = {
            'the numbers of references to frames are wrong': np.array_equal(counts, self._counts),
            'the number of frames in use is wrong': np.count_nonzero(counts) == self._state[_NUM_USED],
            'the free frames are wrong': np.array_equal(
                np.sort(free), np.flatnonzero(counts[: self._state[_NUM_EVER]] == 0)
            ),
        }
        return [what for what, holds in checks.items() if not holds]

    def resizing(self, capacity: int) -> Callable[[], None]:
        """Make room for more frames. The returned function switches to it. It cannot fail and may be called again."""
        if capacity <= self.capacity:
            return lambda: None
        resize_memory = self._memory.resizing(capacity)
        counts, free = (filled(capacity, 0, np.int32) for _ in range(2))

        def resize() -> None:
            num_ever = int(self._state[_NUM_EVER])
            counts[:num_ever], free[:num_ever] = self._counts[:num_ever], self._free[:num_ever]
            self._counts, self._free = counts, free
            resize_memory(num_ever)
            self._keep_addresses()

        return resize

    def sync(self) -> None:
        """Write all frames to the disk. After a power cut, hashes may be those of earlier frames."""
        self._memory.sync([_FRAMES])

    def close(self) -> None:
        """Close the files. Readers that hold the frames can continue to read them."""
        self._memory.close()

    def discard(self) -> None:
        """Delete files that no header names yet."""
        self._memory.discard()

    def _index(self, size: int) -> None:
        """Make the hash table anew, of at least this size."""
        used = np.flatnonzero(self._counts[: self._state[_NUM_EVER]]).astype(np.int32)
        if self._kernels is None:
            self._frame_of = dict(zip(self._hashes[used].tolist(), used.tolist()))
            return
        while size < 2 * (len(used) + 1):
            size *= 2
        table = np.zeros(size, np.int32)
        self._kernels.index_frames(used, self._hashes, table)
        self._table = table

    def _intern_in_python(self, frames: Array, numbers: Array) -> None:
        for place, frame in enumerate(frames):
            given = frame.tobytes()
            value = hash(given) & self._hash_mask
            number = self._frame_of.get(value)
            # Of frames with one hash only the first is found: another one is kept again.
            if number is None or self.frames[number].tobytes() != given:
                number = self._add(frame, value)
            else:
                self._counts[number] += 1
            numbers[place] = number

    def _add(self, frame: Array, value: int) -> int:
        num_free, number, num_used = (int(each) for each in self._state)
        if num_free:
            num_free -= 1
            number = int(self._free[num_free])
            num_ever = int(self._state[_NUM_EVER])
        else:
            self._check_room()
            num_ever = number + 1
        self.frames[number] = frame
        self._hashes[number], self._counts[number] = value, 1
        self._frame_of.setdefault(value, number)
        self._state[:] = num_free, num_ever, num_used + 1
        return number

    def _release_in_python(self, numbers: Array) -> None:
        for number in numbers.tolist():
            self._counts[number] -= 1
            if self._counts[number]:
                continue
            value = int(self._hashes[number])
            if self._frame_of.get(value) == number:
                del self._frame_of[value]
            self._free[self._state[_NUM_FREE]] = number
            self._state += (1, 0, -1)


def _copy(rows: Array, out: Array) -> None:
    out[...] = rows
