"""A sampler in epochs: each row once per epoch, in a random order that takes no memory per row."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.commits import CommitRecord
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.samplers.base import StoredRows, not_enough
from ding_store.buffer.samplers.in_order import InOrder
from ding_store.buffer.table.rows import NO_ROWS, RowIndex, RowListener
from ding_store.errors import ConfigError

#: The number of rounds of a permutation, each with its own key.
_ROUNDS = 4
#: A permutation is over at least this number of bits per half. Smaller ones are not random enough.
_LEAST_BITS = 4
#: Odd constants with bits at random places, which spread a difference over a word.
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


class Permutation(NamedTuple):
    """
    Overview:
        A permutation of the numbers below ``size``, a power of four: a Feistel network, which turns the halves of a
        number's bits into each other. It takes no memory per number.
    Arguments:
        - bits (:obj:`int`): The bits of each half.
        - keys (:obj:`Tuple`): One number below 2 ** 64 for each round.
    """

    bits: int
    keys: Tuple[int, ...]

    @classmethod
    def over(cls, count: int, random: np.random.RandomState) -> Permutation:
        """Return a random permutation of at least ``count`` numbers, and of less than four times as many or 256."""
        bits = max(_LEAST_BITS, ((max(1, count) - 1).bit_length() + 1) // 2)
        return cls(bits, tuple(np.frombuffer(random.bytes(8 * _ROUNDS), np.uint64).tolist()))

    @property
    def size(self) -> int:
        return 1 << 2 * self.bits

    def of(self, numbers: Array) -> Array:
        """Return what these numbers become, int64."""
        bits, mask = np.uint64(self.bits), np.uint64((1 << self.bits) - 1)
        numbers = numbers.astype(np.uint64)
        left, right = numbers >> bits, numbers & mask
        for key in self.keys:
            mixed = (right + np.uint64(key)) * _FIRST_FACTOR
            mixed ^= mixed >> np.uint64(32)
            mixed *= _SECOND_FACTOR
            left, right = right, left ^ (mixed >> np.uint64(32) & mask)
        permuted: Array = (left << bits | right).astype(np.int64)
        return permuted


class Place(NamedTuple):
    """
    The position in an epoch. The epoch is of the rows from ``first`` up to ``end``. Those at the places below
    ``position`` of the permutation have come, except ``owed``.
    """

    num_epochs: int = 0
    first: int = 0
    end: int = 0
    bits: int = 0
    keys: Tuple[int, ...] = ()
    position: int = 1  # The end of a permutation of no bits.
    owed: Tuple[int, ...] = ()

    @property
    def permutation(self) -> Permutation:
        return Permutation(self.bits, self.keys)

    @property
    def is_over(self) -> bool:
        """True if all rows of the epoch have come."""
        return self.position >= self.permutation.size and not self.owed


class Epochs(RowListener):
    """
    Overview:
        The place of a sampler in the rows of its table, and its places after batches that are drawn ahead. If it has a
        record, it records the place whenever it moves. Callers hold the index's lock.
    Arguments:
        - index (:obj:`RowIndex`): The rows of the table.
        - seed (:obj:`Optional[int]`): As in Shuffled.
    """

    def __init__(self, index: RowIndex, seed: Optional[int]) -> None:
        self.index, self._seed = index, seed
        self.place = Place()
        #: The place after the last choice. None: the rows left in the meantime.
        self._chosen: Optional[Place] = None
        self._ahead: Deque[Place] = deque()
        self._record: Optional[CommitRecord] = None
        index.listen(self)

    def persist_to(self, record: CommitRecord) -> None:
        """Restore the recorded place, and record the place from now on."""
        self._record, found = record, record.value
        if found is not None:
            try:
                numbers = (int(found[name]) for name in ('num_epochs', 'first', 'end', 'bits', 'position'))
                keys, owed = (tuple(map(int, found[name])) for name in ('keys', 'owed'))
                num_epochs, first, end, bits, position = numbers
            except (KeyError, TypeError, ValueError, OverflowError) as e:
                raise record.damaged(e) from e
            self.place = Place(num_epochs, first, end, bits, keys, position, owed)

    def choose(self, size: int) -> Array:
        """Return the slots of the next rows. There must be ``size`` live rows."""
        place = self._ahead[-1] if self._ahead else self.place
        chosen = NO_ROWS
        while len(chosen) < size:
            if place.is_over:
                place = self._begin(place.num_epochs)
            more, place = self._walk(place, size - len(chosen), chosen)
            chosen = np.concatenate([chosen, more])
        self._chosen = place
        slots: Array = self.index.find(chosen)[0].astype(np.intp)
        return slots

    def deliver(self) -> None:
        """Move to the place after the batch that was chosen, or that was drawn ahead first."""
        place = self._ahead.popleft() if self._ahead else self._chosen
        if place is not None:
            self.place = place
            # Recorded before the rows are returned, so that a killed process never samples a row twice.
            self._put_on_record()

    def draw_ahead(self) -> None:
        """Note that the chosen batch is drawn ahead. The next choice begins after it."""
        if self._chosen is not None:
            self._ahead.append(self._chosen)

    def give_back(self) -> None:
        """Cancel all batches drawn ahead. The next choice begins where the last delivery ended."""
        self._ahead.clear()

    def cleared(self) -> None:
        """Begin another epoch. The next rows may have any numbers, such as those of a loaded file."""
        self.move_to(Place(self.place.num_epochs))

    def move_to(self, place: Place) -> None:
        """Continue at this place."""
        self.place, self._chosen = place, None
        self._ahead.clear()
        self._put_on_record()

    def _begin(self, num_epochs: int) -> Place:
        """Return the start of an epoch of all live rows."""
        # A seed gives each epoch its own generator. The next process then goes on with other orders.
        random = np.random.mtrand._rand if self._seed is None else np.random.RandomState([self._seed, num_epochs])
        first, end = self._oldest(), self.index.next_row
        permutation = Permutation.over(end - first, random)
        return Place(num_epochs + 1, first, end, permutation.bits, permutation.keys, position=0)

    def _walk(self, place: Place, size: int, taken: Array) -> Tuple[Array, Place]:
        """
        Overview:
            Return up to ``size`` rows of an epoch, and the place after them.
        Arguments:
            - taken (:obj:`np.ndarray`): Rows of the same batch that the epoch before gave. They are owed.
        """
        owed = np.array(place.owed, np.int64)
        owed = owed[self.index.find(owed)[1]]
        found: List[Array] = [owed[:size]]
        count, owed = len(found[0]), owed[size:]
        position, permutation = place.position, place.permutation
        while count < size and position < permutation.size:
            stop = min(position + max(256, 4 * (size - count)), permutation.size)
            rows = place.first + permutation.of(np.arange(position, stop))
            is_next = rows < place.end
            is_next[is_next] = self.index.find(rows[is_next])[1]
            is_taken = is_next & np.isin(rows, taken)
            places = np.flatnonzero(is_next & ~is_taken)[: size - count]
            if len(places) == size - count:
                stop = position + int(places[-1]) + 1
            elif not len(places) and self._oldest() >= place.end:
                stop = permutation.size
            found.append(rows[places])
            owed = np.concatenate([owed, rows[: stop - position][is_taken[: stop - position]]])
            count, position = count + len(places), stop
        return np.concatenate(found), place._replace(position=position, owed=tuple(owed.tolist()))

    def _oldest(self) -> int:
        return int(self.index.row_of_slot[self.index.slots_by_age()[0]])

    def _put_on_record(self) -> None:
        if self._record is not None:
            self._record.put(self.place._asdict())


class Shuffled(InOrder):
    """
    Overview:
        Samples in epochs: each row once per epoch, in random order, with the same memory for any number of rows. An
        epoch is of the rows that are live when it begins. Rows that are pushed later wait for the next epoch, and rows
        that leave before their turn do not come. O(size) amortised.

        The next epoch begins when all rows of the last one have come, if need be within a batch. No row comes twice in
        a batch: a row that would begin the next epoch in the batch that ended the last one comes in the batch after.
    Arguments:
        - seed (:obj:`Optional[int]`): The orders follow from it and from the number of the epoch. None draws from
          numpy's global generator at the start of each epoch.
    Raises:
        - ConfigError: ``seed`` is not an integer in [0, 2 ** 32).
    """

    def __init__(self, seed: Optional[int] = None) -> None:
        super().__init__()
        if seed is not None and not (isinstance(seed, (int, np.integer)) and 0 <= seed < 1 << 32):
            raise ConfigError(f'seed ({seed!r}) must be an integer in [0, 2 ** 32), or None')
        self._seed = None if seed is None else int(seed)
        self._of_table: Optional[Epochs] = None

    @property
    def _epochs(self) -> Epochs:
        if self._of_table is None:
            raise ConfigError('the sampler has no table yet. Pass it to a StoreBuffer first.')
        return self._of_table

    @property
    def num_epochs(self) -> int:
        """The number of epochs that have begun."""
        return self._epochs.place.num_epochs

    def attach(self, index: RowIndex, rows: Optional[StoredRows] = None) -> None:
        """
        Raises:
            - ConfigError: The sampler belongs to another table.
        """
        if self._of_table is None:
            self._of_table = Epochs(index, self._seed)
        elif self._of_table.index is not index:
            raise ConfigError('a Shuffled belongs to one table. Create another Shuffled for another table.')

    def persist_to(self, files: TableDirectory) -> None:
        """Restore the recorded place in the epoch, and record the place from now on."""
        self._epochs.persist_to(files.record('shuffled'))

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Raises:
            - NotEnoughData: There are fewer than ``size`` rows.
            - TypeError: ``replace`` or ``sample_range`` is given.
        """
        self.refuse_options(replace, sample_range)
        if index.count < size:
            raise not_enough(size, index.count)
        return self._epochs.choose(size)

    def delivered(self, rows: Array) -> Optional[Array]:
        """Move past these rows. Return None: no row has to leave."""
        with self._epochs.index.lock:
            self._epochs.deliver()
        return None

    def drawn(self, rows: Array) -> None:
        with self._epochs.index.lock:
            self._epochs.draw_ahead()

    def returned(self, num_batches: int) -> None:
        self._epochs.give_back()

    def state(self) -> Dict[str, Array]:
        with self._epochs.index.lock:
            place = self._epochs.place
        kinds: Dict[str, Any] = {'keys': np.uint64}
        return {name: np.array(value, kinds.get(name, np.int64)) for name, value in place._asdict().items()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        values: Dict[str, Any] = {name: np.asarray(state[name]).tolist() for name in Place._fields}
        keys, owed = tuple(values.pop('keys')), tuple(values.pop('owed'))
        place = Place(**values, keys=keys, owed=owed)
        with self._epochs.index.lock:
            self._epochs.move_to(place)

    def __deepcopy__(self, memo: Dict[int, Any]) -> Shuffled:
        """Return a sampler without a table. ``take_over`` copies the place in the epoch."""
        twin = memo[id(self)] = type(self)(self._seed)
        return twin
