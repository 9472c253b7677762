"""
``ding-store reshard``: distributes a stopped run's replay and unread entries over other learners or partitions.

It first makes all new tables, and copies of the unread entries, in a directory beside the replay. A file ``ready`` in
it says that they are complete. Only then the old ones are replaced. If the command is killed before that file is there,
nothing has changed. If it is killed later, the same command replaces all of them again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

import numpy as np

from ding_store import private_files
from ding_store.buffer import Prioritized, StoreBuffer
from ding_store.buffer.persistence.table_header import read_header
from ding_store.checkpoint import CheckpointDir
from ding_store.columns.ragged import Names
from ding_store.config import StoreConfig
from ding_store.errors import ConfigError
from ding_store.launch.printing import print_to
from ding_store.middleware.backpressure import coarse
from ding_store.middleware.chunks import ChunkWriter
from ding_store.middleware.consumer_offset import ENV_ID, OTHERS, offsets_in
from ding_store.middleware.feed import LEARNER_READER
from ding_store.middleware.partitions import (
    READY,
    RESHARD,
    Layout,
    episode_of,
    layouts_of_plan,
    num_learners_in,
    own_partitions,
    progress_name_of,
)
from ding_store.power_cuts import sync_directory
from ding_store.run.claim import claim_run
from ding_store.run.ending import silence_s
from ding_store.run.node_addresses import FIRST_IDS
from ding_store.run.session import RunSession
from ding_store.run.several_learners import (
    LEARNERS,
    PARTITIONS,
    decide_num_learners,
    num_learners_of,
    num_partitions_of,
    replay_of,
    stream_of,
)
from ding_store.storage.base import Entry
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.store import Store

#: Elements that are moved at a time.
_BLOCK = 256
#: Time that an append to a stream may take.
_APPEND_S = 60.0


def reshard(
    config: StoreConfig, checkpoint: str, num: int, replay: Optional[str] = None, partitions: Optional[int] = None
) -> int:
    """
    Overview:
        Distribute a run anew over ``num`` learners. No process of the run may be running.
    Arguments:
        - checkpoint (:obj:`str`): The run's directory of checkpoints.
        - partitions (:obj:`Optional[int]`): The new number of partitions, a multiple of ``num``. None: ``num``.
        - replay (:obj:`Optional[str]`): The directory of its replay, ``store.buffer_path``. None: in ``checkpoint``.
    Returns:
        - code (:obj:`int`): 0.
    Raises:
        - ConfigError: The directory has no run that could resume, or a process of the run is running.
    """
    partitions = partitions or num
    if partitions % num:
        raise ConfigError(f'--partitions {partitions} must be a multiple of --learners {num}.')
    directory = CheckpointDir(checkpoint)
    if directory.run is None:
        raise ConfigError(f'{checkpoint!r} has no run that could resume. Name the directory of --checkpoint.')
    directory.claim()
    root = os.path.abspath(replay or directory.file('replay'))
    with RunSession(config).store as store:
        lease = claim_run(store, FIRST_IDS['learner'], silence_s(config.heartbeat_s), {}, config.launched)
        try:
            return _Reshard(store, root, directory.run, Layout(num, partitions)).run()
        finally:
            if lease is not None:
                lease.release()


class _Counts(NamedTuple):
    """Counts of all learners: env steps and episodes up to the last row, and those of unread entries."""

    env_step: int
    env_episode: int
    more_steps: int
    more_episodes: int


class _Reshard:
    def __init__(self, store: Store, root: str, run: str, new: Layout) -> None:
        self._store, self._root, self._run, self._num, self._new = store, root, run, new.learners, new
        self._work, self._old = f'{root}{RESHARD}', f'{root}{RESHARD}-old'

    def run(self) -> int:
        if not os.path.exists(self._in_work(READY)):
            found = num_learners_in(self._root)
            if found is None:
                raise ConfigError(f'there is no replay in {self._root!r}. Name another directory with --replay.')
            self._remove_rests()
            old = Layout(found, self._partitions_of(found))
            if old == self._new:
                self._decide_partitions()  # a start that failed may have left another number
                print_to(sys.stdout, f'{self._root} is distributed over {old} already\n')
                return 0
            self._prepare(old)
        self._replace()
        return 0

    def _partitions_of(self, found: int) -> int:
        """Return how many partitions the run has had. The tables say it, because a start that failed may decide."""
        decided = num_partitions_of(self._store)
        with _opened(replay_of(self._root, 0, found)) as table:
            note = table.committed or {}
        of_tables = found * len(offsets_in(note))
        if decided is None or decided == of_tables:
            return of_tables
        streams = [stream_of(partition, decided) for partition in range(decided)]
        if not any(map(self._store.stream_info, streams)):
            return of_tables
        if 'marks' not in note:  # nothing was committed with the rows
            return decided
        raise ConfigError(
            f'run {self._store.run!r} has experience in {decided} partitions, and the replay in {self._root!r} is of '
            f'{of_tables}. Name the run of this replay with --run, or another directory with --replay.'
        )

    def _decide_partitions(self) -> None:
        number = self._new.partitions
        self._store.delete(PARTITIONS)
        if number > 1:
            self._store.decide(PARTITIONS, {'num': number}, 0)

    def _in_work(self, *names: str) -> str:
        return os.path.join(self._work, *names)

    def _remove_rests(self) -> None:
        """Remove what this command, or one that was killed, does not need any more: the replay is whole."""
        for directory in (self._work, self._old):
            shutil.rmtree(directory, ignore_errors=True)

    # Before anything is changed

    def _prepare(self, layout: Layout) -> None:
        found = layout.learners
        private_files.directory(self._work)
        with contextlib.ExitStack() as stack:
            old = [stack.enter_context(_opened(replay_of(self._root, rank, found))) for rank in range(found)]
            size = sum(int(each.size) for each in old)
            has_priorities = any(each.sampler.priorities is not None for each in old)
            paths = [replay_of(self._in_work('replay'), rank, self._num) for rank in range(self._num)]
            for path in paths:
                private_files.directory(os.path.dirname(path))
            each_size = -(-size // self._num)
            new = [stack.enter_context(_made(each_size, path, has_priorities, old[0].ragged)) for path in paths]
            places = _Places(self._new)
            for block in _by_age(old):
                _move(block, new, places)
            notes = [each.committed or {} for each in old]
            counts, num_entries = self._save_entries(notes, layout, places)
            for note, buffer_ in zip(self._notes(notes, new, counts), new):
                buffer_.commit(note)
        plan = dict(found=found, num=self._num, partitions=[layout.partitions, self._new.partitions])
        plan.update(rows=places.num_rows, entries=num_entries, **counts._asdict())
        with open(self._in_work('plan'), 'w', opener=private_files.opener) as file:
            json.dump(plan, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(self._in_work('plan'), self._in_work(READY))
        sync_directory(self._work)

    def _notes(
        self, notes: Sequence[Dict[str, Any]], new: Sequence[StoreBuffer], counts: _Counts
    ) -> Iterator[Dict[str, Any]]:
        """Yield the note of each new table. The sums of their rows are those of the old ones."""
        versions: Dict[str, int] = {}
        for note in notes:
            for name, version in note.get('policy_versions', {}).items():
                versions[name] = max(version, versions.get(name, 0))
        offsets = [offset for note in notes for offset in offsets_in(note)]
        left = sum(int(offset.get('rows', 0)) for offset in offsets) - sum(each.count() for each in new)
        chunks = max(int(offset.get('chunks', 0)) for offset in offsets)
        for rank, each in enumerate(new):
            rows, left = each.count() + max(left, 0), 0  # Rows that were evicted count with the first table.
            steps = dict(chunks=chunks, env_step=counts.env_step, env_episode=counts.env_episode)
            places: Dict[str, Any] = dict(marks={}, runs={}, heads={}, cursor=None, chain='', epochs=0)
            note = dict(run=self._run, rows=rows, policy_versions=versions, **steps, **places)
            _, *others = own_partitions(rank, *self._new)
            states = {stream_of(other, self._new.partitions): {**note, 'rows': 0} for other in others}
            yield {**note, OTHERS: states} if states else note

    def _save_entries(self, notes: Sequence[Dict[str, Any]], layout: Layout, places: _Places) -> Any:
        """Copy the unread entries of all partitions into files. Return the counts, and the number of entries."""
        totals, num_entries = [], 0
        offsets: Dict[int, Dict[str, Any]] = {}
        for rank, note in enumerate(notes):
            offsets.update(zip(own_partitions(rank, *layout), offsets_in(note)))
        for partition in range(layout.partitions):
            note = offsets.get(partition, {})
            steps, episodes = int(note.get('env_step', 0)), int(note.get('env_episode', 0))
            for entry in self._unread(stream_of(partition, layout.partitions), note):
                steps += entry.header['env_step']
                episodes += entry.header['env_episode']
                if entry.header['rows']:
                    _save(entry, self._in_work('entries'), places.of_entry(entry), num_entries)
                    num_entries += 1
            totals.append((steps, episodes))
        env_step = max(int(note.get('env_step', 0)) for note in offsets.values())
        env_episode = max(int(note.get('env_episode', 0)) for note in offsets.values())
        more_steps = max(steps for steps, _ in totals) - env_step
        more_episodes = max(episodes for _, episodes in totals) - env_episode
        return _Counts(env_step, env_episode, more_steps, more_episodes), num_entries

    def _unread(self, stream: str, note: Dict[str, Any]) -> Iterator[Entry]:
        if self._store.stream_info(stream) is None:
            return
        reader = Reader(self._store, stream, LEARNER_READER, marks=note.get('marks'), heads=note.get('heads'))
        while entries := reader.read(max_entries=_BLOCK, timeout_s=0.0):
            yield from entries

    # Afterwards

    def _replace(self) -> None:
        with open(self._in_work(READY)) as file:
            plan = json.load(file)
        found, planned = layouts_of_plan(plan)
        if planned != self._new:
            raise ConfigError(
                f'{self._root!r} is being distributed over {planned}, by a command that was interrupted. '
                f'Complete that first: {planned.options()}'
            )
        self._replace_streams(found, plan)
        if os.path.isdir(self._in_work('replay')):
            if not os.path.isdir(self._old):
                os.rename(self._root, self._old)
            os.rename(self._in_work('replay'), self._root)
            sync_directory(os.path.dirname(self._root))
        os.unlink(self._in_work(READY))
        self._remove_rests()
        print_to(
            sys.stdout,
            f'{self._root}: {plan["rows"]} rows and {plan["entries"]} unread entries of {found} are now of {planned}. '
            f'Go on with --roles learner={planned.learners} and store.learners.partitions={planned.partitions}\n',
        )

    def _replace_streams(self, found: Layout, plan: Dict[str, Any]) -> None:
        store, num = self._store, self._new.partitions
        if num_learners_of(store) not in (found.learners, self._num):
            raise ConfigError(
                f'run {store.run!r} has {num_learners_of(store)} learners, and the replay in {self._root!r} is of '
                f'{found.learners}. Name the run of this replay with --run.'
            )
        for several in (found.partitions, num):
            for partition in range(several):
                store.delete(stream_of(partition, several))
                progress = progress_name_of(partition, several)
                store.delete(progress)
                store.delete(coarse(progress))
        saved = [_saved_names(self._in_work('entries'), partition) for partition in range(num)]
        # Learners take one entry of each partition at a time, so all partitions get equally many. The first one has
        # the counts.
        num_entries = max([any((plan['more_steps'], plan['more_episodes'])), *map(len, saved)])
        for partition in range(num):
            stream = stream_of(partition, num)
            # A stream without a reader would let its entries go.
            store.register(stream, LEARNER_READER)
            counts = dict(env_step=plan['more_steps'], env_episode=plan['more_episodes'])
            for header, arrays in _saved(self._in_work('entries'), partition):
                store.append(stream, {**header, **counts}, arrays, timeout_s=_APPEND_S)
                counts = dict(env_step=0, env_episode=0)
            for _ in range(num_entries - len(saved[partition])):
                header = dict(kind='trajectories', end_idx=[], **counts)
                ChunkWriter(store, stream).write([], header, timeout_s=_APPEND_S)
                counts = dict(env_step=0, env_episode=0)
        store.delete(LEARNERS)
        decide_num_learners(store, self._num, started=self._num)
        self._decide_partitions()
        store.flush()


class _Places:
    """Chooses a table for each row. Rows of one episode stay together, and others go where the fewest rows are."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._counts = [0] * layout.learners
        self._num_entries = [0] * layout.partitions
        self._of_episode: Dict[int, int] = {}
        self._partition_of: Dict[int, int] = {}  # episode -> partition of its unread steps, so that they stay in order

    @property
    def num_rows(self) -> int:
        return sum(self._counts)

    def choose(self, episode: Optional[int], num_rows: int = 1) -> int:
        least = self._counts.index(min(self._counts))
        place = least if episode is None else self._of_episode.setdefault(episode, least)
        self._counts[place] += num_rows
        return place

    def of_entry(self, entry: Entry) -> int:
        """
        Return the partition of an entry: one of the table that has the episode of its first row. It does not count its
        rows.
        """
        ids = entry.arrays.get(ENV_ID)
        episode = int(np.asarray(ids).reshape(-1)[0]) if ids is not None and np.asarray(ids).size else None
        counts = list(self._counts)
        place = self.choose(episode)
        self._counts = counts
        partition = min(own_partitions(place, *self._layout), key=lambda each: self._num_entries[each])
        if episode is not None:
            partition = self._partition_of.setdefault(episode, partition)
        self._num_entries[partition] += 1
        return partition


class _Block(NamedTuple):
    elements: List[Any]
    metas: List[Any]
    priorities: Optional[np.ndarray]


def _opened(path: str) -> Any:
    """Return a context manager with the table of a path, with its priorities if it has some."""
    header = read_header(os.path.join(path, 'header'))
    if header is None:
        raise ConfigError(f'{path!r} has no table. Copy the replay of each learner to this host, or use a shared disk.')
    has_priorities = any(re.fullmatch(r'priority\b.*values', name) for name in os.listdir(path))
    return _made(header.capacity, path, has_priorities)


def _made(size: int, path: str, has_priorities: bool, ragged: Names = ()) -> Any:
    sampler = Prioritized() if has_priorities else None
    return contextlib.closing(StoreBuffer(size, path=path, sampler=sampler, ragged=ragged))


def _by_age(tables: Sequence[StoreBuffer]) -> Iterator[_Block]:
    """Yield the rows of all tables, each table's by age. Tables take turns, in proportion to their rows."""
    rows = [each.table.rows_by_age() for each in tables]
    at = [0] * len(tables)
    while any(place < len(each) for place, each in zip(at, rows)):
        shares = [place / len(each) if place < len(each) else 2.0 for place, each in zip(at, rows)]
        chosen = shares.index(min(shares))
        block = rows[chosen][at[chosen] : at[chosen] + _BLOCK]
        at[chosen] += len(block)
        buffer_ = tables[chosen]
        items = buffer_.sample(indices=[str(row) for row in block])
        priorities = buffer_.sampler.priorities
        values = None if priorities is None else priorities.of(block)
        yield _Block([item.data for item in items], [item.meta for item in items], values)


def _move(block: _Block, new: Sequence[StoreBuffer], places: _Places) -> None:
    chosen = [places.choose(_episode_of(each)) for each in block.elements]
    for place in sorted(set(chosen)):
        at = [i for i, each in enumerate(chosen) if each == place]
        priority = None if block.priorities is None else block.priorities[at]
        new[place].extend_elements([block.elements[i] for i in at], [block.metas[i] for i in at], priority)


def _episode_of(element: Any) -> Optional[int]:
    while isinstance(element, list) and element:  # an episode of its own, or a sequence
        element = element[0]
    return episode_of(element)


def _save(entry: Entry, directory: str, partition: int, number: int) -> None:
    path = os.path.join(directory, str(partition))
    os.makedirs(path, exist_ok=True)
    header = np.frombuffer(json.dumps(dict(entry.header)).encode(), np.uint8)
    arrays = {f'array:{name}': array for name, array in entry.arrays.items()}
    with open(os.path.join(path, f'{number:012d}.npz'), 'wb', opener=private_files.opener) as file:
        np.savez(file, header=header, **arrays)
        file.flush()
        os.fsync(file.fileno())


def _saved_names(directory: str, partition: int) -> List[str]:
    """Return the names of the files of a partition's entries, in order."""
    path = os.path.join(directory, str(partition))
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


def _saved(directory: str, partition: int) -> Iterator[Any]:
    """Yield header and arrays of each entry that was saved for a partition."""
    for name in _saved_names(directory, partition):
        with np.load(os.path.join(directory, str(partition), name), allow_pickle=False) as file:
            header = json.loads(file['header'].tobytes())
            yield header, {key[len('array:') :]: file[key] for key in file.files if key != 'header'}
