"""A data set on the disk: its rows by number, as elements, columns or batches, and in the order of epochs."""

from __future__ import annotations

import logging
import mmap
import operator
import os
import threading
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Type, Union

import numpy as np
import treetensor.torch as ttorch

from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import TrainBatch
from ding_store.buffer.table.outputs import Output, WarmOutputs
from ding_store.columns import Schema
from ding_store.columns.ragged import Ragged
from ding_store.datasets.epochs import Epochs
from ding_store.datasets.kernels import load_gather
from ding_store.datasets.layout import Layout, are_alike
from ding_store.datasets.order import EpochOrder
from ding_store.datasets.segment import DirectRead, Segment, finish_reads, start_reads
from ding_store.datasets.writer import segment_names
from ding_store.errors import ConfigError, CorruptPayload, FormatMismatch, RowGone, SchemaMismatch, StoreError
from ding_store.free_space import MEMORY_SHARE, available_memory

logger = logging.getLogger(__name__)

ON_DAMAGE = ('stop', 'skip')
#: Batches of one size whose memory is reused: three windows of ``epochs``, and what a pipeline holds.
MAX_WARM = 32
#: Rows that are loaded into the page cache for each row that is read, until all that stay there are loaded.
_LOADED_PER_ROW = 8
#: Ways to read rows that are not in memory, see ``DataSet``.
READS = ('auto', 'mapped', 'direct')


class DataSet:
    """
    Overview:
        The rows of a data set, read in place. Row numbers count from 0 in the order in which rows were recorded. The
        data set is what it was when it was opened: rows that are recorded later need a new ``DataSet``.
    Arguments:
        - path (:obj:`str`): The directory.
        - on_damage (:obj:`str`): What to do about segments that cannot be read. 'stop': raise. 'skip': log and leave
          them out, see ``damaged``.
        - segments (:obj:`Optional[Sequence[str]]`): Read these segments only. Default: all.
        - reads (:obj:`str`): 'mapped': read rows through the page cache. 'direct': read them from the disk, without the
          page cache. This is faster if the data set is larger than memory. 'auto': 'direct' if the data set is larger
          than half of the free memory, else 'mapped'.
        - cache_bytes (:obj:`Optional[int]`): Bytes of the first rows that direct reads keep in the page cache all the
          same. None: half of the free memory if ``reads`` is 'auto', and 0 if it is 'direct'. Each ``DataSet`` measures
          the free memory for itself. If you use several large data sets at once, set this for each.
    Attributes:
        - damaged (:obj:`Dict[str, str]`): Segment -> why it cannot be read.
    Raises:
        - ConfigError: There is no data set at this path, or a named segment does not exist.
        - CorruptPayload: A segment is damaged. The message names all of them. A changed byte within rows is only found
          by ``verify``.
        - SchemaMismatch: The segments have rows of different schemas. The message names the segments.
    """

    def __init__(
        self,
        path: Union[str, os.PathLike],
        on_damage: str = 'stop',
        segments: Optional[Sequence[str]] = None,
        reads: str = 'auto',
        cache_bytes: Optional[int] = None,
    ) -> None:
        if on_damage not in ON_DAMAGE or reads not in READS:
            raise ConfigError(
                f'on_damage ({on_damage!r}) must be one of {", ".join(ON_DAMAGE)}, and reads ({reads!r}) one of '
                f'{", ".join(READS)}'
            )
        if cache_bytes is not None:
            _check_cache(cache_bytes, reads)
        self.path = os.fspath(path)
        self.damaged: Dict[str, str] = {}
        #: The segments that can be read and have rows.
        self.segments: List[Segment] = []
        self._open(_checked_names(self.path, segments))
        if self.damaged and on_damage == 'stop':
            raise CorruptPayload(
                f'the data set in {self.path!r} is damaged: {"; ".join(self.damaged.values())}. Leave these segments '
                "out with on_damage='skip'."
            )
        for reason in self.damaged.values():
            logger.warning('a segment of the data set in %r is left out: %s', self.path, reason)
        ends = np.cumsum([0, *(segment.num_rows for segment in self.segments)])
        self._first_rows: Array = ends[:-1].astype(np.int64)
        self._num_rows = int(ends[-1])
        memory = int(MEMORY_SHARE * available_memory())
        self.is_direct = reads == 'direct' or (reads == 'auto' and self.num_bytes > memory)
        if cache_bytes is None or not self.is_direct:
            cache_bytes = 0 if reads == 'direct' else memory
        self._num_kept = self._rows_of(cache_bytes)
        # The number of these rows that were loaded so far. Forked processes share it, such as the workers of torch's
        # DataLoader, which are new in each epoch.
        self._num_loaded: Array = np.frombuffer(mmap.mmap(-1, 8), np.int64)
        self._outputs: Optional[WarmOutputs] = None
        #: Rows are decoded by their layout: they are not columns as they are.
        self._is_decoded = any(segment.layout.narrow or segment.layout.schema.ragged for segment in self.segments)
        self._check_schemas()
        # In the order of the first schema, as the outputs have them.
        names = list(self.schema.columns()) if self.segments else []
        self._places = [segment.layout.places_of(names) for segment in self.segments]

    def _open(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                segment = Segment(os.path.join(self.path, name))
            except FormatMismatch:
                raise
            except (StoreError, OSError) as error:
                self.damaged[name] = str(error)
                continue
            if segment.num_rows:
                self.segments.append(segment)

    def _check_schemas(self) -> None:
        for segment in self.segments[1:]:
            first = self.segments[0]
            if not are_alike(first.layout.schema, segment.layout.schema):
                raise SchemaMismatch(
                    f'segments {first.name} and {segment.name} of {self.path!r} have rows of different schemas: '
                    f'{_named(first.layout.schema)} and {_named(segment.layout.schema)}. Name those of one schema with '
                    'segments=[...].'
                )

    def __len__(self) -> int:
        return self._num_rows

    @property
    def schema(self) -> Schema:
        """The schema of the elements. Raises ConfigError if there are no rows."""
        return self.layout.schema

    @property
    def layout(self) -> Layout:
        if not self.segments:
            raise ConfigError(f'the data set in {self.path!r} has no rows')
        return self.segments[0].layout

    @property
    def num_bytes(self) -> int:
        """Size of the rows on the disk."""
        return sum(segment.num_bytes + segment.item_bytes for segment in self.segments)

    def __getitem__(self, row: int) -> Any:
        """Return one element, as it was recorded."""
        return self.elements([row])[0]

    def columns(self, rows: Union[Sequence[int], Array]) -> Dict[str, Array]:
        """
        Overview:
            Return the columns of these rows, in this order: name -> ``(n, *shape)``. That of a ragged leaf has
            ``lengths`` ``(n,)``, ``padded`` ``(n, longest, ...)`` and ``rows``, the array of each row.
        Raises:
            - RowGone: There is no such row.
        """
        return self.gather(self._checked(rows))[0]

    def elements(self, rows: Union[Sequence[int], Array]) -> List[Any]:
        """Return elements as they were recorded. Their tensors share memory with each other. See ``columns``."""
        columns = self.columns(rows)
        return self.schema.decode(columns) if len(rows) else []

    def batch(self, rows: Union[Sequence[int], Array]) -> ttorch.Tensor:
        """Return these rows as one collated tree with leaves ``(n, *shape)``, valid while it is referenced."""
        return self.collated(*self.gather(self._checked(rows)))

    def train_batch(self, rows: Union[Sequence[int], Array]) -> TrainBatch:
        """Return these rows as a collated batch that is also the list of its elements, as DI-engine expects one."""
        columns, output = self.gather(self._checked(rows))
        return self.listed(self.collated(columns, output), columns)

    def listed(self, batch: ttorch.Tensor, columns: Dict[str, Array]) -> TrainBatch:
        """Return a collated batch of these columns as one that is also the list of its elements."""
        schema = self.schema

        def elements() -> List[Dict[str, Any]]:
            return [each.json() if isinstance(each, ttorch.Tensor) else each for each in schema.decode(columns)]

        return TrainBatch.of(batch, len(next(iter(columns.values()))), elements, schema.cat_1dim)

    def epochs(
        self,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        prefetch: int = 4,
        num_epochs: Optional[int] = None,
        start: int = 0,
    ) -> Epochs:
        """
        Overview:
            Return an iterator over batches. Each epoch has each row once, in a new random order that the seed fixes.
            A thread reads ahead in this order.
        Arguments:
            - rank, world_size (:obj:`int`): This process gets its part of the rows. Others with the same seed get the
              others, and the same number of batches.
            - prefetch (:obj:`int`): Number of batches that are read together, while as many wait to be used. More rows
              have neighbours on the disk, which are read at once. Above 8, memory is no longer reused.
            - num_epochs (:obj:`Optional[int]`): Stop after this many. None: go on for ever.
            - start (:obj:`int`): Number of batches to skip, to go on after a crash. Nothing is read for them.
        Raises:
            - ConfigError: A value is out of range, or the data set has no rows.
        """
        self.layout  # noqa: B018 - refuses a data set without rows
        order = EpochOrder(len(self), batch_size, seed, rank, world_size)
        return Epochs(self, order, prefetch, num_epochs, start)

    def metas(self, rows: Union[Sequence[int], Array]) -> List[Dict[str, int]]:
        """
        Return the meta of each row, such as ``{'policy_version': 3}``. If several partitions had the steps of an
        episode, ``piece`` is the number of the first step in this row's piece of it.
        """
        commits = [commit for segment in self.segments for commit in segment.log.commits]
        runs = [run for commit in commits for run in commit.metas]
        ends = np.cumsum([count for count, _ in runs])
        return [runs[place][1] for place in np.searchsorted(ends, self._checked(rows), side='right').tolist()]

    def scan(self, names: Sequence[str], num_rows: int = 65536) -> Iterator[Dict[str, Array]]:
        """
        Overview:
            Yield these columns of all rows in order, a part at a time. Columns that do not exist are left out.
        Raises:
            - SchemaMismatch: One of the leaves is ragged.
        """
        known = [name for name in names if self.segments and name in self.schema.columns()]
        ragged = [name for name in known if name in self.schema.ragged]
        if ragged:
            raise SchemaMismatch(
                f'leaf {ragged[0]!r} of {self.path!r} varies in its first dimension, which is not supported here. '
                'Pad it before you record.'
            )
        for segment in self.segments:
            for first in range(0, segment.num_rows, num_rows):
                records = segment.records[first : first + num_rows]
                yield {name: segment.layout.column(records, name) for name in known}

    def begins(self) -> List[int]:
        """Return the rows at which recordings began: episodes before one do not continue behind it."""
        found, row = [], 0
        for commit in (commit for segment in self.segments for commit in segment.log.commits):
            found += [row] if commit.begins else []
            row += commit.num_rows
        return found

    def verify(self) -> Dict[str, str]:
        """Read everything, compare checksums, and return segment -> what is damaged, those of ``damaged`` included."""
        found = dict(self.damaged)
        for segment in self.segments:
            try:
                segment.verify()
            except (CorruptPayload, OSError) as error:
                found[segment.name] = str(error)
        return found

    def close(self) -> None:
        """Close the files. Batches stay valid."""
        for segment in self.segments:
            segment.close()

    def __enter__(self) -> DataSet:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    # How rows are read. ``Epochs`` uses these as well.

    def gather(self, rows: Array) -> Tuple[Dict[str, Array], Output]:
        """Return the columns of rows, and the output that reuses their memory."""
        kernel = None if self.is_direct or self._is_decoded else load_gather()
        if kernel is None:
            return self.decode(self.records(rows), rows)
        arrays, output = self._lend(len(rows))
        if len(self.segments) == 1:
            groups = [(0, rows, np.arange(len(rows)))]
        else:
            numbers = np.searchsorted(self._first_rows, rows, side='right') - 1
            parts = [(number, np.flatnonzero(numbers == number)) for number in np.unique(numbers).tolist()]
            groups = [(number, rows[places] - self._first_rows[number], places) for number, places in parts]
        for number, own, places in groups:
            source = self.segments[number].records
            kernel(source.ctypes.data, self.layout.row_bytes, *self._places[number], output.addresses, own, places)
        return arrays, output

    def _lend(self, num_rows: int) -> Tuple[Dict[str, Array], Output]:
        if self._outputs is None:
            self._outputs = WarmOutputs(self.schema.columns(), self.schema.plain_batch, MAX_WARM)
        return self._outputs.lend(num_rows)

    def records(self, rows: Array) -> List[Any]:
        """
        Return (layout, places, records) of these rows, for each segment that has some. If all have one layout, there is
        one item without places. Its records are valid until the next call in this thread.
        """
        records, started = self.start(rows)
        finish_reads(started)
        return records

    def load_more(self, num_rows: int) -> None:
        """
        Overview:
            Load more of the first rows into the page cache, eight for each row that the caller reads. Callers that read
            all rows again and again call this at each read. It returns before the rows are there.

            The first rows stay in the cache. An epoch reads each row once. Therefore a cache of n rows saves at most n
            reads per epoch, and these rows save all n. A cache of the last rows that were read would save less, because
            most of them leave the cache before they are read again.
        Arguments:
            - num_rows (:obj:`int`): The number of rows that the caller reads.
        """
        first = int(self._num_loaded[0])
        last = min(first + _LOADED_PER_ROW * num_rows, self._num_kept)
        if first >= last:
            return
        for segment, begin in zip(self.segments, self._first_rows.tolist()):
            own = max(first - begin, 0), min(last - begin, segment.num_rows)
            if own[0] < own[1] and (segment.reads_cache or not self.is_direct):
                segment.load_ahead(*own)
        self._num_loaded[0] = last

    def _rows_of(self, num_bytes: int) -> int:
        """Return how many of the first rows have this size together."""
        num_rows = 0
        for segment in self.segments:
            fitting = min(segment.num_rows, num_bytes // segment.layout.row_bytes)
            num_rows, num_bytes = num_rows + fitting, num_bytes - fitting * segment.layout.row_bytes
            if fitting < segment.num_rows:
                break
        return num_rows

    def start(self, rows: Array, slot: int = 0) -> Tuple[List[Any], List[Future]]:
        """
        Start to read rows. Return the result of ``records``, which is complete after ``finish_reads``. Its records are
        valid until the next call in this thread with the same ``slot``.
        """
        made: List[Any] = []
        held: List[Any] = []
        reads: List[DirectRead] = []
        numbers = np.searchsorted(self._first_rows, rows, side='right') - 1
        groups = np.unique(numbers).tolist()
        is_one = len({self.segments[number].layout.narrow for number in groups}) == 1
        shared = _warm_records(len(rows), self.segments[groups[0]].layout, slot) if groups and is_one else None
        for number in groups:
            segment = self.segments[number]
            places = np.flatnonzero(numbers == number)
            own = rows[places] - self._first_rows[number]
            if shared is not None:
                target, at = shared, places
            else:
                target, at = np.empty(len(places), segment.layout.record), np.arange(len(places))
                made.append((segment.layout, places, target))
            if not self.is_direct:
                segment.read_into(own, target, at)
                continue
            is_kept = rows[places] < self._num_kept
            if is_kept.any():
                held.append((segment, own[is_kept], target, at[is_kept]))
            reads += _direct_reads(segment, own[~is_kept], target, at[~is_kept])
        if shared is not None:
            made.append((self.segments[groups[0]].layout, None, shared))
        started = start_reads(reads)
        try:  # The disk reads meanwhile.
            for segment, own, target, at in held:
                missing = segment.read_held(own, target, at)
                started += start_reads(_direct_reads(segment, own[missing], target, at[missing]))
        except BaseException:
            wait(started)  # They write to memory that is used again.
            raise
        return made, started

    def decode(self, records: List[Any], rows: Array) -> Tuple[Dict[str, Array], Output]:
        """Return the columns of ``records``, which are those of ``rows``, and the output that reuses their memory."""
        arrays, output = self._lend(sum(len(each) for _, _, each in records))
        for layout, places, each in records:
            if places is None:
                layout.decode_into(each, arrays)
                continue
            parts = layout.empty(len(each))
            layout.decode_into(each, parts)
            for name, part in parts.items():
                arrays[name][places] = part
        if self.schema.ragged:
            arrays = {**arrays, **self._ragged(records, rows, arrays)}
        return arrays, output

    def _ragged(self, records: List[Any], rows: Array, lengths: Dict[str, Array]) -> Dict[str, Any]:
        """Return the ragged leaves of rows."""
        numbers = np.searchsorted(self._first_rows, rows, side='right') - 1
        groups = [(number, np.flatnonzero(numbers == number)) for number in np.unique(numbers).tolist()]
        made = {}
        for name, (dtype, shape) in self.schema.ragged.items():
            begins = np.empty(len(rows), np.int64)
            for layout, places, each in records:
                begins[slice(None) if places is None else places] = layout.items_at(each, name)
            size = dtype.itemsize * int(np.prod(shape))
            found: List[Any] = [None] * len(rows)
            for number, places in groups:
                items = self.segments[number].items(begins[places], lengths[name][places], size, self.is_direct)
                for place, each, length in zip(places.tolist(), items, lengths[name][places].tolist()):
                    found[place] = each.view(dtype).reshape(length, *shape)
            made[name] = Ragged.of(found, dtype, shape)
        return made

    def collated(self, columns: Dict[str, Array], output: Output) -> ttorch.Tensor:
        """Return the batch of these columns."""
        batch = output.batch()
        return self.schema.decode_batch(columns) if batch is None else batch

    def _checked(self, rows: Union[Sequence[int], Array]) -> Array:
        checked = np.asarray(rows, dtype=np.int64).reshape(-1)
        checked = np.where(checked < 0, checked + self._num_rows, checked)
        wrong = np.flatnonzero((checked < 0) | (checked >= self._num_rows))
        if len(wrong):
            raise RowGone(f'row {np.asarray(rows).reshape(-1)[wrong[0]]} is not one of the {self._num_rows} rows')
        return checked


def _named(schema: Schema) -> str:
    """Return a schema with its ragged leaves, which its text does not have."""
    ragged = {name: f'{dtype} {shape}' for name, (dtype, shape) in schema.ragged.items()}
    return f'{schema} with ragged {ragged}' if ragged else str(schema)


def _check_cache(cache_bytes: Any, reads: str) -> None:
    try:
        is_valid = operator.index(cache_bytes) >= 0
    except TypeError:
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f'cache_bytes ({cache_bytes!r}) must be a whole number of bytes, at least 0, such as 8 << 30 for 8 GiB'
        )
    if reads == 'mapped':
        raise ConfigError(
            f"cache_bytes ({cache_bytes}) has no effect with reads='mapped', where all rows go through the page cache. "
            "Leave it out, or use reads='auto' or 'direct'."
        )


def _direct_reads(segment: Segment, rows: Array, records: Array, places: Array) -> List[DirectRead]:
    if not len(rows):
        return []
    ascending = np.argsort(rows, kind='stable')
    return segment.reads(rows[ascending], records, places[ascending])


_scratch = threading.local()


def _warm_records(num_rows: int, layout: Layout, slot: int) -> Array:
    """Return records with undefined contents, in memory that this thread reuses. Fresh memory costs page faults."""
    size = num_rows * layout.row_bytes
    slots: Dict[int, Array] = vars(_scratch).setdefault('slots', {})
    found = slots.get(slot)
    if found is None or len(found) < size:
        found = slots[slot] = np.empty(size, np.uint8)
    return found[:size].view(layout.record)


def _checked_names(path: str, segments: Optional[Sequence[str]]) -> List[str]:
    names = segment_names(path) if os.path.isdir(path) else []
    if not names:
        raise ConfigError(f'there is no data set in {path!r}. Record one with ding-store data record.')
    unknown = sorted(set(segments or ()) - set(names))
    if unknown:
        raise ConfigError(f'{path!r} has no segment {unknown[0]!r}. It has {names[0]} to {names[-1]}.')
    return names if segments is None else [name for name in names if name in set(segments)]
