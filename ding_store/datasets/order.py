"""
The order of the rows of an epoch: a permutation that takes constant memory, and the part of each rank.

A Feistel network permutes the numbers of n bits (Luby and Rackoff 1988). A result that is no row is permuted again
until it is one: that is a permutation of the rows (cycle walking, Black and Rogaway 2002, section 3). There are fewer
than two numbers per row, so this takes less than two rounds on average.
"""

from __future__ import annotations

from typing import List

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.errors import ConfigError

#: Even, so that the halves end where they began. Four rounds are enough for a pseudorandom permutation, if the round
#: function is one. This one is a hash, so there are twice as many.
_NUM_ROUNDS = 8
_WORD = np.uint64
#: Rows whose order is computed at once.
_ROWS_AHEAD = 1 << 14


class Permutation:
    """
    Overview:
        A permutation of ``range(size)``. Any place can be computed by itself.
    Arguments:
        - size (:obj:`int`): The number of rows.
        - seed, epoch (:obj:`int`): Other ones give another permutation.
    """

    def __init__(self, size: int, seed: int, epoch: int = 0) -> None:
        if size < 0 or seed < 0 or epoch < 0:
            raise ConfigError(f'size ({size}), seed ({seed}) and epoch ({epoch}) must be at least 0')
        self.size = size
        num_bits = max(2, (size - 1).bit_length())
        self._left, self._right = num_bits // 2, num_bits - num_bits // 2
        keys = np.random.SeedSequence([seed, epoch]).generate_state(_NUM_ROUNDS, _WORD)
        self._keys: List[np.uint64] = list(keys)

    def __call__(self, places: Array) -> Array:
        """Return the row at each place."""
        return self._walk(places, self._forth)

    def places_of(self, rows: Array) -> Array:
        """Return the place of each row: the inverse."""
        return self._walk(rows, self._back)

    def _walk(self, numbers: Array, step: object) -> Array:
        found = step(np.asarray(numbers).astype(_WORD))  # type: ignore[operator]
        while True:
            outside = np.flatnonzero(found >= self.size)
            if not len(outside):
                return found.astype(np.int64)
            found[outside] = step(found[outside])  # type: ignore[operator]

    def _forth(self, numbers: Array) -> Array:
        left, right = numbers >> _WORD(self._right), numbers & _mask(self._right)
        widths = self._left, self._right
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & _mask(widths[0]))
            widths = widths[1], widths[0]
        joined: Array = left << _WORD(self._right) | right
        return joined

    def _back(self, numbers: Array) -> Array:
        left, right = numbers >> _WORD(self._right), numbers & _mask(self._right)
        widths = self._left, self._right
        for key in reversed(self._keys):
            left, right = right ^ (_mixed(left ^ key) & _mask(widths[1])), left
            widths = widths[1], widths[0]
        joined: Array = left << _WORD(self._right) | right
        return joined


def _mask(num_bits: int) -> np.uint64:
    return _WORD((1 << num_bits) - 1)


def _mixed(words: Array) -> Array:
    """Return a hash of each word: the last steps of splitmix64 (Steele, Lea and Flood 2014)."""
    words = (words ^ words >> _WORD(30)) * _WORD(0xBF58476D1CE4E5B9)
    words = (words ^ words >> _WORD(27)) * _WORD(0x94D049BB133111EB)
    mixed: Array = words ^ words >> _WORD(31)
    return mixed


class EpochOrder:
    """
    Overview:
        The rows of each batch of each epoch, for one rank. Every row is in one batch of one rank per epoch. All ranks
        have the same number of batches.
    Arguments:
        - num_rows, batch_size (:obj:`int`): Each rank's batches have ``batch_size`` rows, but for the last one or two
            of an epoch.
        - seed (:obj:`int`): The same for all ranks.
        - rank, world_size (:obj:`int`): This rank, and the number of ranks.
    Raises:
        - ConfigError: A value is out of range, or there are too few rows for each rank to have a batch.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                f'batch_size ({batch_size}) must be at least 1, and rank ({rank}) at least 0 and below world_size '
                f'({world_size})'
            )
        if num_rows < world_size:
            raise ConfigError(f'{num_rows} rows are too few for world_size ({world_size}): some ranks have none')
        if batch_size == 1 and num_rows % world_size:
            raise ConfigError(
                f'batch_size 1 needs a number of rows ({num_rows}) that world_size ({world_size}) divides. Use 2 or '
                'more.'
            )
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self.rank, self.world_size = rank, world_size
        each, rest = divmod(num_rows, world_size)
        self._num_own = each + (rank < rest)
        #: Batches of an epoch.
        self.num_batches = -(-(each + (rest > 0)) // batch_size)
        self._epoch, self._first, self._rows = -1, 0, np.empty(0, np.int64)

    def batch(self, epoch: int, number: int) -> Array:
        """Return the rows of one batch of this rank, in ascending order, which is the fastest to read."""
        first, last = self._edge(number), self._edge(number + 1)
        if epoch != self._epoch or not self._first <= first or last > self._first + len(self._rows):
            # Many batches at once: a call costs more than the numbers of one batch.
            end = self._edge(min(number + max(1, _ROWS_AHEAD // self.batch_size), self.num_batches))
            places = np.arange(first, max(last, end)) * self.world_size + self.rank
            self._rows = Permutation(self.num_rows, self.seed, epoch)(places)
            self._epoch, self._first = epoch, first
        return np.sort(self._rows[first - self._first : last - self._first])

    def _edge(self, count: int) -> int:
        """Return how many rows of this rank are in its first batches."""
        # Each batch after them has at least one row: a rank with one row less than others has no empty batch.
        return min(count * self.batch_size, self._num_own - (self.num_batches - count))
