"""The host cache: this host's directory of memory-mapped files, for the processes of one user, bounded and cleaned up.

<root>/lock             held while files are created or reclaimed; waits for it have a deadline
<root>/marker           a random word; with its device, inode and the boot id it identifies the host
<root>/runs/<run>/      mode 0700
    members             held (shared) by every process that uses the run here
    <hex>.ring          held by its writer, which is named inside
    <hex>.slots         the same, for a value
    <hex>-<bytes>.copies  downloads of a value of another host, in shared slots; has no owner
    <hex>.fetch         held by the process that downloads that value, or for that stream
    <hex>.readers       the processes of this host that read a stream
    <hex>-<mark>-<bytes>-<hex>.payload  a payload that one process downloaded for all; has no owner
    <hex>.shared        memory that all processes write to; has no owner
    objects/            a file per object, see ``storage.objects``. They last as long as the run has a process here
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import uuid
import zlib
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

from ding_store import private_files
from ding_store.errors import ConfigError, CorruptPayload, NotEnoughSpace, StoreTimeout
from ding_store.file_systems import shared_at
from ding_store.storage.shared_memory import cache_root
from ding_store.storage.shared_memory import reader_page as host_readers
from ding_store.storage.shared_memory.cache_files import (
    COPIES,
    FETCH,
    PAYLOAD,
    READERS,
    SHARED,
    all_files,
    changed_ns,
    dead_files,
    files_of,
    is_alive,
    objects_bytes,
    remove_free_files,
    remove_if_abandoned,
    remove_payloads,
    remove_run,
    removed,
    runs_of,
    size_of,
    unlink,
)
from ding_store.storage.shared_memory.mapped_files import (
    PAGE,
    NewFile,
    OwnerLock,
    aligned,
    claim,
    created,
    is_claimed,
)
from ding_store.storage.shared_memory.ring import RingWriter, read_note
from ding_store.storage.shared_memory.slots import SharedSlots, SlotReader, SlotWriter, create_slots, value_of

logger = logging.getLogger(__name__)

T = TypeVar('T')

#: By default the cache takes half of the free space when a store is opened, up to this size.
_MAX_BYTES = 8 << 30
#: A shorter ``cache_root.PATIENCE_S`` for creating a file during work: the payload can go through Redis instead.
_BUSY_PATIENCE_S = 1.0


#: Number of hexadecimal digits in the name of a download lock.
_FETCH_DIGITS = 3


class Found(NamedTuple):
    """A file of the cache whose process has exited, with the note inside it."""

    path: str
    note: Dict[str, Any]


class Garbage(NamedTuple):
    """Files of a run that no process will read again."""

    run: str  # the run's directory
    num_files: int
    num_bytes: int
    changed_s: float  # seconds since 1970 at the last change of one of the files


class CacheDir:
    """
    Overview:
        One process's use of the host cache for one run. ``host`` identifies the run's directory on this host: processes
        with equal ``host`` can map each other's files. Two containers with separate /dev/shm are two hosts.
    Arguments:
        - root (:obj:`str`): Created if it does not exist. Only this user may own it or write to it.
        - max_bytes (:obj:`Optional[int]`): Maximum total size of the files of all runs.
    Raises:
        - ConfigError: The directory belongs to another user, or others may write to it.
        - OSError: The directory cannot be created or written.
        - StoreTimeout: Another process holds the lock of the cache and makes no progress. Methods that create files
          raise this as well.
    """

    def __init__(self, root: str, run: str, max_bytes: Optional[int] = None) -> None:
        self.root = root
        if max_bytes is None:
            max_bytes = min(cache_root.free_bytes(os.path.dirname(root)) // 2, _MAX_BYTES)
        self.max_bytes = max_bytes
        self._run = os.path.join(root, 'runs', run)
        self._root_lock = cache_root.root_lock(root)
        private_files.own_directory(root)
        with self._locked():
            self.host = f"{cache_root.identity(os.path.join(root, 'marker'))}-{run}"
            for directory in (os.path.dirname(self._run), self._run):
                private_files.own_directory(directory)
            members = os.path.join(self._run, 'members')
            private_files.touch(members)
            self._claim: Optional[OwnerLock] = claim(members, shared=True)

    @property
    def run_directory(self) -> str:
        """The directory of the run's files on this host."""
        return self._run

    def path_of(self, name: str) -> str:
        return os.path.join(self._run, f'{name}.ring')

    def slots_path_of(self, name: str) -> str:
        return os.path.join(self._run, f'{name}.slots')

    def create_ring(self, num_bytes: int, note: Dict[str, Any]) -> RingWriter:
        """
        Overview:
            Create a ring. If space is short, remove files that no process will read again.
        Raises:
            - NotEnoughSpace: The cache would be larger than ``max_bytes``, or the file system is full.
            - OSError: The directory is gone, or may not be written.
        """
        path = self.path_of(uuid.uuid4().hex)
        return self._created(num_bytes, lambda: RingWriter(path, num_bytes, note))

    def create_slots(self, slot_bytes: int, name: str) -> SlotWriter:
        """Create slots for the versions of a value, see ``create_ring``."""
        path = self.slots_path_of(uuid.uuid4().hex)
        return self._created(
            2 * slot_bytes, lambda: SlotWriter(path, slot_bytes, name, has_capacity=self._has_capacity)
        )

    def shared_memory(self, name: str, num_bytes: int, fill: Callable[[memoryview], None]) -> memoryview:
        """
        Overview:
            Map memory that all processes of this run and host read and write. If it does not exist, create it and call
            ``fill`` on it, before any other process sees it.
        Raises:
            - ConfigError: It exists with another size.
            - NotEnoughSpace, OSError: See ``create_ring``.
        """
        path = os.path.join(self._run, f'{_short(name)}{SHARED}')

        def make() -> None:
            if not os.path.exists(path):
                with created(path, num_bytes) as (mapping, held):
                    fill(memoryview(mapping))
                held.close()

        if not os.path.exists(path):
            self._created(num_bytes, make)
        file = OwnerLock(private_files.opener(path, os.O_RDWR))
        try:
            size = os.fstat(file.descriptor).st_size
            if size != num_bytes:
                raise ConfigError(f'shared memory {name!r} has {size} bytes, not {num_bytes}. Use another name.')
            return memoryview(mmap.mmap(file.descriptor, num_bytes))
        finally:
            file.close()

    def fetch_path_of(self, name: str) -> str:
        """Return the lock file whose holder downloads the value ``name`` for all processes of this host."""
        # A lock's file cannot be removed. Short names bound their number, and values that share a file wait for each
        # other.
        path = os.path.join(self._run, f'{_short(name)[:_FETCH_DIGITS]}{FETCH}')
        private_files.touch(path)
        return path

    def copies_path_of(self, name: str, num_bytes: int) -> str:
        """Return the path of this host's downloads of another host's value. Values of nearly this size share it."""
        step = max(PAGE, 1 << max(0, num_bytes.bit_length() - 4))
        return os.path.join(self._run, f'{_short(name)}-{aligned(num_bytes, step)}{COPIES}')

    def open_copies(self, path: str, name: str) -> SharedSlots:
        """
        Overview:
            Open this host's downloads of a value. If the file is missing or damaged, create it and remove those of
            other sizes. The caller holds the value's ``fetch_path_of``.
        Raises:
            - NotEnoughSpace, OSError: See ``create_ring``.
        """
        try:
            SlotReader(path).close()
        except (FileNotFoundError, CorruptPayload):
            slot_bytes = int(path[: -len(COPIES)].rpartition('-')[2])
            self.drop_copies(name)
            self._created(2 * slot_bytes, lambda: create_slots(path, slot_bytes, name)).close()
        return SharedSlots(path, self._has_capacity)

    def drop_copies(self, name: str) -> None:
        """Remove this host's downloads of a value."""
        for path in files_of(self._run):
            if os.path.basename(path).startswith(f'{_short(name)}-') and path.endswith(COPIES):
                unlink(path)

    def drop_readers(self, stream: str) -> None:
        """Remove a deleted stream's reader page. Processes that still read miss new readers and download twice."""
        unlink(os.path.join(self._run, f'{_short(stream)}{READERS}'))

    def readers_path_of(self, stream: str) -> str:
        """Return the page on which this host's readers of a stream see each other. Create it if it does not exist."""
        path = os.path.join(self._run, f'{_short(stream)}{READERS}')
        with self._locked():
            if not os.path.exists(path):
                host_readers.create(path)
        return path

    def payload_path_of(self, stream: str, mark: int, num_bytes: int, place: bytes) -> str:
        """Return the path of an entry's payload if a process of this host downloads it for all."""
        name = hashlib.blake2b(place, digest_size=16).hexdigest()
        return os.path.join(self._run, f'{_short(stream)}-{mark:016x}-{num_bytes:x}-{name}{PAYLOAD}')

    def payloads_of(self, stream: str) -> List[Tuple[int, str]]:
        """Return mark and path of each downloaded payload of a stream, sorted by mark."""
        begin = f'{_short(stream)}-'
        ours = [path for path in files_of(self._run) if path.endswith(PAYLOAD) and os.path.basename(path)[:33] == begin]
        return sorted((int(os.path.basename(path).split('-')[1], 16), path) for path in ours)

    def create_payloads(self, stream: str, wanted: Sequence[Tuple[int, str, int]], max_bytes: int) -> List[NewFile]:
        """
        Overview:
            Create files for payloads to be downloaded, in order, until the space is used up. To make room, remove
            payloads of other epochs and payloads earlier in the stream.
        Arguments:
            - wanted (:obj:`Sequence`): Mark, path and size of each payload.
            - max_bytes (:obj:`int`): Maximum total size of this stream's payloads.
        """
        made: List[NewFile] = []
        with self._locked(is_busy=True):
            there = self.payloads_of(stream)
            there.sort(key=lambda one: host_readers.is_of_epoch(one[0], wanted[0][0]))  # a stable sort
            used, ours = self.used_bytes(), sum(size_of(path) for _, path in there)
            for mark, path, num_bytes in wanted:
                used, ours = used + num_bytes, ours + num_bytes
                while (used > self.max_bytes or ours > max_bytes) and there and _goes_for(mark, there[0][0]):
                    freed = removed(there.pop(0)[1])
                    used, ours = used - freed, ours - freed
                if used > self.max_bytes or ours > max_bytes:
                    break
                try:
                    made.append(NewFile(path, num_bytes))
                except NotEnoughSpace:
                    break
        return made

    def _created(self, num_bytes: int, make: Callable[[], T]) -> T:
        with self._locked(is_busy=True):
            if self.used_bytes() + num_bytes > self.max_bytes:
                self._remove_abandoned()
            used = self.used_bytes()
            if used + num_bytes > self.max_bytes:
                used -= remove_payloads(self.root, used + num_bytes - self.max_bytes)
            if used + num_bytes > self.max_bytes:
                raise NotEnoughSpace(
                    errno.ENOSPC,
                    f'the host cache in {self.root!r} has no room for {num_bytes} bytes: {used} of '
                    f'{self.max_bytes} are in use. Raise host_cache_bytes.',
                )
            try:
                return make()
            except NotEnoughSpace:
                freed = self._remove_abandoned() + remove_free_files(self.root)
                if not freed + remove_payloads(self.root, num_bytes):
                    raise
                return make()

    def _has_capacity(self, num_bytes: int) -> bool:
        return self.used_bytes() + num_bytes <= self.max_bytes

    def used_bytes(self) -> int:
        """Return the total size of the files of all runs."""
        return sum(size_of(path) for path in all_files(self.root))

    def orphans(self) -> List[Found]:
        """Return this run's files whose writers have exited. Raise StoreTimeout if another process holds the lock."""
        with self._locked_at_once():
            paths = [path for path in files_of(self._run) if path.endswith(('.ring', '.slots'))]
            return [Found(path, _note(path)) for path in paths if not is_claimed(path)]

    def dead_files(self) -> List[str]:
        """Return files that exited processes never published, and payloads without readers. See ``orphans``."""
        with self._locked_at_once():
            return dead_files(self._run)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files without the lock: only downloads use a name again, and those may go at any time."""
        for path in paths:
            unlink(path)

    def close(self, is_over: bool = False) -> None:
        """Leave the run. The last process removes the directory if nothing unread is in it, or if ``is_over``."""
        held, self._claim = self._claim, None
        if held is None:
            return
        held.close()
        try:
            with self._locked():
                if not is_claimed(os.path.join(self._run, 'members')):
                    remove_run(self._run, is_over)
        except OSError as e:
            logger.info('the host cache in %r was left as it is: %s', self._run, e)

    def _remove_abandoned(self) -> int:
        return sum(remove_if_abandoned(run) for run in runs_of(self.root))

    @contextmanager
    def _locked(self, is_busy: bool = False) -> Iterator[None]:
        patience_s = min(_BUSY_PATIENCE_S, cache_root.PATIENCE_S) if is_busy else None
        with cache_root.locked(self._root_lock, self.root, patience_s):
            yield

    @contextmanager
    def _locked_at_once(self) -> Iterator[None]:
        held = claim(cache_root.lock_path(self.root))
        if held is None:
            raise StoreTimeout(f'the host cache in {self.root!r} is in use')
        try:
            yield
        finally:
            held.close()


def cache_name(run: str, address: str) -> str:
    """Return the name of a run's cache. Different servers may have runs of the same name."""
    return f'{run}-{zlib.crc32(address.encode()):08x}'


def open_cache_dir(run: str, directory: Optional[str] = None, max_bytes: Optional[int] = None) -> CacheDir:
    """
    Overview:
        Open the host cache of a run, in ``directory`` if it is given. By default use the place of the run's other
        processes. Without these, use /dev/shm if it has room, or the temporary directory with the most free space.
    Raises:
        - ConfigError, OSError: The cache cannot be created in ``directory``, or in any candidate.
        - StoreTimeout: Another process holds the lock of the best candidate and makes no progress. No other candidate
          is tried: in another directory this process could not share files with its host until it restarts.
    """
    if directory is not None:
        shared = shared_at(directory)
        if shared is not None:
            raise ConfigError(
                f'host_cache_dir ({directory!r}) is on {shared.kind}, which other hosts may share: memory there is not '
                'shared memory. Name a directory of this host, such as one in /dev/shm.'
            )
        private_files.make_directories(directory)
        return CacheDir(cache_root.root_in(os.path.abspath(directory)), run, max_bytes)
    reasons = []
    for candidate in cache_root.candidates(run):
        shared = shared_at(candidate)
        if shared is not None:
            reasons.append(f'{candidate!r} is on {shared.kind}, which other hosts may share')
            continue
        try:
            cache = CacheDir(cache_root.root_in(candidate), run, max_bytes)
        except StoreTimeout:
            raise
        except (OSError, ConfigError) as e:
            reasons.append(str(e))
        else:
            if reasons:
                logger.warning('the host cache is in %r: %s', cache.root, '; '.join(reasons))
            return cache
    raise NotEnoughSpace(errno.ENOSPC, f'no directory for the host cache: {"; ".join(reasons)}. Set host_cache_dir.')


def collect_garbage(
    directory: Optional[str] = None, dry_run: bool = False, is_wanted: Callable[[Garbage], bool] = lambda garbage: True
) -> Iterator[Garbage]:
    """
    Overview:
        Remove the files of all runs that have no running process on this host. A run that is resumed later loses what
        it had not read. For running runs, remove only unpublished files of dead processes and payloads without readers.
    Arguments:
        - directory (:obj:`Optional[str]`): The value of ``host_cache_dir``. By default, every place that the cache may
          be.
        - dry_run (:obj:`bool`): Only report what would be removed.
        - is_wanted (:obj:`Callable`): Leave garbage for which this returns False.
    Returns:
        - garbage (:obj:`Iterator`): One item for each run that had garbage.
    Raises:
        - StoreTimeout: Another process holds the lock of a directory and makes no progress. Raised after all others are
          done.
    """
    directories = [os.path.abspath(directory)] if directory else cache_root.directories()
    hung: Optional[StoreTimeout] = None
    for root in filter(os.path.isdir, map(cache_root.root_in, directories)):
        try:
            yield from _garbage_in(root, dry_run, is_wanted)
        except StoreTimeout as e:
            hung = e
    if hung is not None:
        raise hung


def _garbage_in(root: str, dry_run: bool, is_wanted: Callable[[Garbage], bool]) -> List[Garbage]:
    found = []
    with cache_root.locked(cache_root.root_lock(root), root):
        for run in runs_of(root):
            dead = dead_files(run)
            if not dead and is_alive(run):
                continue
            changed_s = max(changed_ns(path) for path in [run, *dead]) / 1e9
            num_bytes = sum(map(size_of, dead)) + (0 if is_alive(run) else objects_bytes(run))
            garbage = Garbage(run, len(dead), num_bytes, changed_s)
            if is_wanted(garbage):
                found.append(garbage)
                if not dry_run:
                    remove_if_abandoned(run)
    return found


def _goes_for(mark: int, other: int) -> bool:
    return other < mark or not host_readers.is_of_epoch(mark, other)


def _short(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _note(path: str) -> Dict[str, Any]:
    try:
        return read_note(path) if path.endswith('.ring') else {'value': value_of(path)}
    except OSError:
        return {}
