"""The objects of a run on one host: a file per object, in the host cache or in the directory for spilled ones.

An object's name is its reference. It is made under another name and renamed when it is whole. What is known about it is
in its file: the size, and the time of modification (see ``eviction``). No crash can tear that.

* Eviction moves the file to ``spill_dir``, or removes it. It first locks the file. A pin is a shared lock on the file,
  which the kernel drops with its process. So a pinned file stays.
* A file that is removed stays readable for a process that has mapped it. Its memory is freed with the last mapping.
* A file that no process has mapped is kept for the next object instead, see ``free_files``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from contextlib import contextmanager, suppress
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

from ding_store import page_cache, private_files
from ding_store.errors import NotEnoughSpace, StoreTimeout
from ding_store.storage.base import Buffer
from ding_store.storage.objects import object_file
from ding_store.storage.objects.eviction import ORDERS, Fifo, Found, Listing, Order, now
from ding_store.storage.objects.free_files import FreeFiles, may_be_kept
from ding_store.storage.objects.host_state import BOOT, COUNTS, DELETED, EVICTED, MEMORY, PAID_AT, SPILLED, HostState
from ding_store.storage.objects.object_file import FULL, ObjectFile, footprint, in_huge_pages, pages
from ding_store.storage.objects.object_options import ObjectOptions, agreed, note
from ding_store.storage.shared_memory.cache_files import FREE_FILE, MEMBERS, OBJECTS, remove_spilled, spill_directory
from ding_store.storage.shared_memory.cache_root import boot_id
from ding_store.storage.shared_memory.download_lock import FetchLock
from ding_store.storage.shared_memory.mapped_files import NEW, OwnerLock, claim, is_claimed

#: Number of hexadecimal digits of a reference. The first ones identify the host that stored the object.
REF_DIGITS, HOST_DIGITS = 40, 8
#: Share of the listed objects that are evicted before the directory is listed again.
_PER_LISTING = 8
#: Share of a directory's bytes that an eviction frees beyond what is needed.
_SPARE = 64
#: Directory of the objects that are being written.
_NEW_DIRECTORY = 'new'
_PATIENCE_S = 10.0
#: Number and bytes of the files that one call reads at the same time. At least one file is read.
_NUM_OPENED, _OPENED_BYTES = 32, 64 << 20
#: Number of times that other processes may take the room that was made for an object.
_MIN_TRIES = 10

_Result = TypeVar('_Result')


class Usage(NamedTuple):
    """Number and bytes of the objects in a directory."""

    num_objects: int
    num_bytes: int


class _Tier:
    """
    Overview:
        A directory of objects, and the iterator of its next victims. Its bytes are a number of the state. Objects that
        are being written are in a directory below it.
    """

    def __init__(self, directory: str, max_bytes: int, word: str, order: Order) -> None:
        self.directory = directory
        self.new_directory = os.path.join(directory, _NEW_DIRECTORY)
        private_files.own_directory(self.new_directory)
        self.max_bytes = max_bytes
        self.word = word
        self.order = order
        self.victims: Iterator[Found] = iter(())
        self.num_left = 0  # evictions before the next listing
        self.listed_bytes = self.evicted_bytes = 0

    def path(self, ref: str) -> str:
        return f'{self.directory}/{ref}'

    def new_path(self, ref: str, num_bytes: int) -> str:
        """Return the path of a file that is being written, and takes ``num_bytes``."""
        return f'{self.new_directory}/{ref}.{num_bytes:x}{NEW}'

    def stamp_of(self, ref: str) -> int:
        try:
            return os.stat(self.path(ref)).st_mtime_ns
        except FileNotFoundError:
            return -1

    def restamp(self, ref: str, stamp: int) -> None:
        with suppress(FileNotFoundError):
            os.utime(self.path(ref), ns=(stamp, stamp))


class HostObjects:
    """
    Overview:
        The files of one run's objects on this host, as one process uses them. Thread-safe. A forked child opens its
        own.
    Arguments:
        - run_directory (:obj:`str`): The run's directory in the host cache.
        - given (:obj:`Dict`): Options that this process was given, from ``object_options.checked``.
    """

    def __init__(self, run_directory: str, given: Dict[str, Any]) -> None:
        self.directory = os.path.join(run_directory, OBJECTS)
        private_files.own_directory(self.directory)
        self.state = HostState(self.directory)
        with self.state.locked():
            self._remove_those_of_another_boot()
            self.options = options = agreed(self.directory, given)
            self._members = self._joined(run_directory, options)
            note(self.directory, options)
        assert options.max_bytes is not None
        self._memory = _Tier(self.directory, options.max_bytes, MEMORY, ORDERS[options.eviction]())
        self._free_files = FreeFiles(self.directory, self.state, options.max_bytes)
        self._spill: Optional[_Tier] = None
        if options.spill_dir is not None and options.spill_max_bytes is not None:
            directory = spill_directory(options.spill_dir, run_directory)
            # Objects leave the disk in the order in which they came: any other order would write more.
            self._spill = _Tier(directory, options.spill_max_bytes, SPILLED, Fifo())
        self._tiers = [self._memory] if self._spill is None else [self._memory, self._spill]
        self._evicting = FetchLock(self._evict_path, _PATIENCE_S)

    def _remove_those_of_another_boot(self) -> None:
        """Remove the objects of before this host was started again: their stamps are of another clock."""
        boot = int(boot_id().replace('-', '')[:16], 16)
        if self.state[BOOT] not in (0, boot):
            for name in os.listdir(self.directory):
                if len(name) == REF_DIGITS or name.startswith(FREE_FILE):
                    os.unlink(os.path.join(self.directory, name))
            shutil.rmtree(os.path.join(self.directory, _NEW_DIRECTORY), ignore_errors=True)
            for word in (MEMORY, SPILLED, PAID_AT):
                self.state[word] = 0
            self.state.forget_free()
        self.state[BOOT] = boot

    def _joined(self, run_directory: str, options: ObjectOptions) -> Optional[OwnerLock]:
        """Create the directory for spilled objects, hold it, and remove those that no process holds."""
        if options.spill_dir is None:
            return None
        private_files.make_directories(options.spill_dir)
        directory = spill_directory(options.spill_dir, run_directory)
        private_files.own_directory(os.path.dirname(directory))
        members = os.path.join(directory, MEMBERS)
        held: Optional[OwnerLock] = None
        while held is None:
            private_files.own_directory(directory)
            with suppress(FileNotFoundError):
                private_files.touch(members)
                found = claim(members, shared=True)
                # Another process may just have removed a directory that no process held.
                if found is not None and os.path.samestat(os.fstat(found.descriptor), os.stat(members)):
                    held = found
        for name in os.listdir(os.path.dirname(directory)):
            remove_spilled(os.path.join(os.path.dirname(directory), name))
        return held

    def _evict_path(self) -> str:
        path = os.path.join(self.directory, 'evict')
        private_files.touch(path)
        return path

    def lock_path(self, name: str) -> str:
        """Return the path of a lock file in the objects' directory, and create it if it does not exist."""
        path = os.path.join(self.directory, name)
        private_files.touch(path)
        return path

    # Writing

    def write(self, ref: str, buffers: Sequence[Buffer], num_bytes: int, is_copy: bool = False) -> None:
        """
        Overview:
            Store an object. It is there whole, or not at all.
        Arguments:
            - is_copy (:obj:`bool`): It is of another host, so that this host may have known it before.
        Raises:
            - FileNotFoundError: The copy was deleted meanwhile.
            - NotEnoughSpace: There is no room, and nothing that may be evicted.
        """
        with self._made(ref, num_bytes, is_copy) as new:
            self._with_space(lambda: new.write(buffers, num_bytes))

    @contextmanager
    def download(self, ref: str, num_bytes: int) -> Iterator[memoryview]:
        """
        Overview:
            Store an object that the block writes to the given memory.
        Raises:
            - FileNotFoundError: The object was deleted meanwhile.
            - NotEnoughSpace: See ``write``.
        """
        with self._made(ref, num_bytes, is_copy=True) as new:
            yield self._with_space(lambda: new.memory(num_bytes))
            new.finish(num_bytes)

    @contextmanager
    def _made(self, ref: str, num_bytes: int, is_copy: bool) -> Iterator[ObjectFile]:
        """Make the file of an object, which the block fills. It gets its name after the block."""
        tier = self._memory
        new, temporary, taken = self._reserved(tier, ref, num_bytes, 'fetched' if is_copy else 'put')
        try:
            new.prepare()
            yield new
            if is_copy:
                with self.state.locked():  # A process may delete it now, or evict it again.
                    why = self.state.why_gone(ref)
                    if why == DELETED:
                        raise FileNotFoundError(errno.ENOENT, 'the object was deleted', tier.path(ref))
                    self._publish(tier, new, temporary, ref, was_evicted=why == EVICTED)
            else:  # No process knows the reference yet, and a listing has seen the new file first.
                self._publish(tier, new, temporary, ref, was_evicted=False)
        except BaseException as e:
            self._discard(tier, temporary, taken)
            if isinstance(e, OSError) and e.errno in FULL:
                raise NotEnoughSpace(
                    errno.ENOSPC,
                    f'no room for an object of {num_bytes} bytes in {self.directory!r}, although its objects may have '
                    f'{tier.max_bytes} bytes. Lower max_bytes, or set host_cache_dir to another directory.',
                ) from e
            raise
        finally:
            new.close()

    def _publish(self, tier: _Tier, new: ObjectFile, temporary: str, ref: str, was_evicted: bool) -> None:
        stamp = tier.order.first_stamp(was_evicted)
        os.utime(new.descriptor, ns=(stamp, stamp))
        os.rename(temporary, tier.path(ref))

    def _reserved(self, tier: _Tier, ref: str, num_bytes: int, count: str) -> Tuple[ObjectFile, str, int]:
        """
        Make a locked file for an object if the directory has room for it, and count it. Return the file, its path and
        its bytes. The caller made room for an object to spill.
        """
        needed = footprint(num_bytes)
        if needed > tier.max_bytes:
            raise NotEnoughSpace(
                errno.ENOSPC, f'an object has {needed} bytes, and all objects {tier.max_bytes}. Raise max_bytes.'
            )
        deadline, num_tries = time.monotonic() + _PATIENCE_S, 0
        while True:
            with self.state.locked():
                if self.state[tier.word] + needed <= tier.max_bytes or tier is self._spill:
                    used = self._used_again(ref, num_bytes) if tier is self._memory else None
                    if used is not None:
                        self.state.add(count, 1)
                        return used
                    path = tier.new_path(ref, needed)
                    held = self._created(path)
                    self.state.add(count, 1)
                    fcntl.flock(held.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # It is new: no other process has it.
                    self.state.add(tier.word, needed)
                    if tier is self._memory:
                        self._free_files.shrink(max(0, tier.max_bytes - self.state[tier.word]))
                    return ObjectFile(held), path, needed
            # Time alone says little: a try may wait for another process that spills to a slow disk.
            if time.monotonic() > deadline and num_tries > _MIN_TRIES:
                raise NotEnoughSpace(
                    errno.ENOSPC,
                    f'other processes took the room for an object of {needed} bytes, again and again. '
                    'Raise max_bytes.',
                )
            self._make_room(needed)
            num_tries += 1

    def _created(self, path: str) -> OwnerLock:
        """Create a file. If there is no inode for it, remove the free files first. The caller holds the lock."""
        try:
            return object_file.create(path)
        except NotEnoughSpace:
            if not self._free_files.shrink(0):
                raise
            return object_file.create(path)

    def _used_again(self, ref: str, num_bytes: int) -> Optional[Tuple[ObjectFile, str, int]]:
        """Make the file of an object of a free one, see ``_reserved``. The caller holds the lock."""
        free = self._free_files
        found = free.find(num_bytes)
        if found is None:
            return None
        size, best = free.size_of(found), in_huge_pages(num_bytes)
        room = self._memory.max_bytes - self.state[MEMORY] - free.num_bytes
        taken = best if size < best <= size + room else size
        path = self._memory.new_path(ref, taken)
        held = free.take(found, path)
        if held is None:
            return None
        self.state.add(MEMORY, taken)
        self.state.add('reused', 1)
        return ObjectFile(held, taken), path, taken

    def _with_space(self, work: Callable[[], _Result]) -> _Result:
        """Call ``work``. If the file system is full, remove the free files, and call it once more."""
        try:
            return work()
        except OSError as e:
            if e.errno not in FULL:
                raise
            with self.state.locked():
                if not self._free_files.shrink(0):
                    raise
            return work()

    def _discard(self, tier: _Tier, temporary: str, num_bytes: int) -> None:
        """Remove a file that did not become an object."""
        with self.state.locked():
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            self.state.add(tier.word, -num_bytes)

    # Reading

    def view(self, ref: str) -> Optional[memoryview]:
        """Return an object's bytes, read-only, or None if it is not on this host."""
        opened = self._opened(ref)
        if opened is None:
            return None
        try:
            return object_file.read(*opened)
        finally:
            os.close(opened[0])

    def views(self, refs: Sequence[str]) -> List[Optional[memoryview]]:
        """Return the bytes of several objects, see ``view``. Spilled ones are read from the disk at the same time."""
        found: List[Optional[memoryview]] = []
        while len(found) < len(refs):
            opened: List[Optional[Tuple[int, int]]] = []
            num_bytes = 0
            try:
                for ref in refs[len(found) : len(found) + _NUM_OPENED]:
                    opened.append(self._opened(ref, is_read_later=True))
                    num_bytes += 0 if opened[-1] is None else opened[-1][1]
                    if num_bytes >= _OPENED_BYTES:
                        break
                for one in opened:
                    found.append(None if one is None else object_file.read(*one))
            finally:
                for one in opened:
                    if one is not None:
                        os.close(one[0])
        return found

    def _opened(self, ref: str, is_read_later: bool = False) -> Optional[Tuple[int, int]]:
        """
        Open an object's file, and return its descriptor and size. The disk begins to read a spilled one, unless the
        caller's next call reads all of it anyway.
        """
        for tier in self._tiers:
            path = tier.path(ref)
            # Most of those that are not in memory were spilled. This is faster than the error of ``opener``.
            if tier is not self._tiers[-1] and not os.access(path, os.F_OK):
                continue
            try:
                descriptor = private_files.opener(path)
            except (FileNotFoundError, BlockingIOError):  # It is gone, or becomes a free file just now.
                continue
            is_kept = False
            try:
                status = os.fstat(descriptor)
                if tier is self._spill:
                    if is_read_later or object_file.is_mapped(status.st_size):
                        page_cache.load(descriptor, 0, status.st_size)
                elif may_be_kept(status.st_size) and not _is_at(path, status):
                    continue
                stamp = tier.order.stamp_at_read(status.st_mtime_ns)
                if stamp != status.st_mtime_ns:
                    os.utime(descriptor, ns=(stamp, stamp))
                is_kept = True
                return descriptor, status.st_size
            finally:
                if not is_kept:
                    os.close(descriptor)
        return None

    def has(self, ref: str) -> bool:
        return any(os.path.exists(tier.path(ref)) for tier in self._tiers)

    def pin(self, ref: str) -> Optional[OwnerLock]:
        """
        Overview:
            Lock an object's file, so that it is not evicted. Return None if it is not on this host.
        Raises:
            - StoreTimeout: A process that evicts it makes no progress.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while self.has(ref):
            for tier in self._tiers:
                with suppress(FileNotFoundError, BlockingIOError):
                    held = claim(tier.path(ref), shared=True)
                    if held is not None and _is_at(tier.path(ref), os.fstat(held.descriptor)):
                        return held
                    if held is not None:
                        held.close()  # It was evicted or deleted after it was opened.
            if time.monotonic() > deadline:
                raise StoreTimeout(
                    f'object {ref} cannot be pinned: a process holds its file and makes no progress. '
                    "Continue or end this user's stopped processes."
                )
            time.sleep(0.001)
        return None

    def why_gone(self, ref: str) -> int:
        with self.state.locked():
            return self.state.why_gone(ref)

    def count(self, name: str) -> None:
        with self.state.locked():
            self.state.add(name, 1)

    def delete(self, ref: str) -> bool:
        """Delete an object on this host, and return whether it was here. Pins do not keep it."""
        with self.state.locked():
            were_here = [self._removed(tier, ref) for tier in self._tiers]
            if any(were_here) or self.state.why_gone(ref) != DELETED:
                self.state.note_gone(ref, DELETED)
            self.state.add('deleted', any(were_here))
        return any(were_here)

    def usage(self) -> Dict[str, Usage]:
        """Return what each directory has. This lists both."""
        with self.state.locked():
            listed = {tier.word: self._listed(tier) for tier in self._tiers}
        return {word: Usage(len(found), sum(one.num_bytes for one in found)) for word, found in listed.items()}

    def counts(self) -> Dict[str, int]:
        return {name: self.state[name] for name in COUNTS}

    def close(self) -> None:
        held, self._members = self._members, None
        if held is not None:
            held.close()
        self.state.close()

    # Eviction

    def _make_room(self, num_bytes: int) -> None:
        with self._evicting.taken() as held:
            if held is None:
                raise StoreTimeout(
                    f'a process that evicts objects in {self.directory!r} makes no progress. '
                    "Continue or end this user's stopped processes."
                )
            self._free(self._memory, num_bytes, held.touch)

    def _free(self, tier: _Tier, num_bytes: int, moved: Callable[[], None]) -> None:
        """Evict objects of a directory until there is room for ``num_bytes``. The caller holds ``_evicting``."""
        wanted, is_fresh = num_bytes, False
        while tier.max_bytes - self.state[tier.word] < wanted:
            wanted = min(tier.max_bytes, num_bytes + tier.max_bytes // _SPARE)
            found = next(tier.victims, None) if tier.num_left > 0 else None
            if found is not None:
                if self._evict(tier, found, moved):
                    is_fresh = False
                    tier.num_left -= 1
                    tier.evicted_bytes += found.num_bytes
                moved()
                continue
            if is_fresh:
                if tier.max_bytes - self.state[tier.word] >= num_bytes:
                    return
                raise NotEnoughSpace(
                    errno.ENOSPC,
                    f'no room for an object of {num_bytes} bytes in {tier.directory!r}: all of the '
                    f'{self.state[tier.word]} bytes there are pinned or being written. Release pins, or raise '
                    f'{"max_bytes" if tier.word == MEMORY else "spill_max_bytes"}.',
                )
            self._list(tier)
            is_fresh = True

    def _list(self, tier: _Tier) -> None:
        with self.state.locked():
            objects = self._listed(tier)
            tier.listed_bytes, tier.evicted_bytes = self.state[tier.word], 0

        def arrived() -> int:
            return self.state[tier.word] - tier.listed_bytes + tier.evicted_bytes

        tier.victims = tier.order.victims(Listing(objects, tier.stamp_of, tier.restamp, arrived))
        tier.num_left = max(64, len(objects) // _PER_LISTING)

    def _listed(self, tier: _Tier) -> List[Found]:
        """List a directory, count its bytes anew, and remove files that killed processes left. The lock is held."""
        objects, free, new = [], [], self._listed_new(tier)
        with os.scandir(tier.directory) as entries:
            for entry in entries:
                if len(entry.name) == REF_DIGITS:
                    status = entry.stat()
                    objects.append(Found(status.st_mtime_ns, entry.name, pages(status.st_size)))
                    new.pop(entry.name, None)
                elif entry.name.startswith(FREE_FILE):
                    free.append(entry.name)
        self.state[tier.word] = sum(found.num_bytes for found in objects) + sum(new.values())
        if tier is self._memory:
            self._free_files.sweep(free)
        return objects

    def _listed_new(self, tier: _Tier) -> Dict[str, int]:
        """
        Return the bytes of the objects that are being written. They get their names without the lock. So they are
        listed first: one that gets its name meanwhile is found here, or in the second listing, or in both.
        """
        new = {}
        with os.scandir(tier.new_directory) as entries:
            for entry in entries:
                if is_claimed(entry.path):
                    ref, size, _ = entry.name.split('.')
                    new[ref] = int(size, 16)
                else:
                    with suppress(FileNotFoundError):
                        os.unlink(entry.path)
        return new

    def _evict(self, tier: _Tier, found: Found, moved: Callable[[], None]) -> bool:
        """Evict one object, and return whether it left. It stays if it is pinned."""
        try:
            held = claim(tier.path(found.name))
        except (FileNotFoundError, BlockingIOError):  # A process deletes it.
            return False
        if held is None:
            return False
        try:
            if not _is_at(tier.path(found.name), os.fstat(held.descriptor)):
                return False  # It was deleted after it was opened, and its file may be that of another object.
            if tier.word == MEMORY and self._spill is not None and self._is_spilled(self._spill, held, found, moved):
                with self.state.locked():
                    return self._removed(tier, found.name, held)
            with self.state.locked():
                if not self._removed(tier, found.name, held):
                    return False
                self.state.note_gone(found.name, EVICTED)
                self.state.add('evicted', 1)
                return True
        finally:
            held.close()

    def _is_spilled(self, spill: _Tier, held: OwnerLock, found: Found, moved: Callable[[], None]) -> bool:
        """
        Overview:
            Copy an object to the disk, and return whether it is there. False: the limit of writes does not admit it.
        Raises:
            - NotEnoughSpace: The disk is full, or everything there is pinned. The object stays where it is.
        """
        path = spill.path(found.name)
        if os.path.exists(path):
            return True  # A process was killed before it could remove the first copy.
        num_bytes = object_file.length_of(held.descriptor)
        needed = footprint(num_bytes)
        if needed > spill.max_bytes or not self._is_admitted(needed):
            return False
        self._free(spill, needed, moved)
        new, temporary, _ = self._reserved(spill, found.name, num_bytes, 'spilled_objects')
        is_there = False
        try:
            new.copy(held.descriptor, moved)
            stamp = now()
            os.utime(new.descriptor, ns=(stamp, stamp))
            with self.state.locked():
                if os.path.exists(self._memory.path(found.name)):  # It was not deleted meanwhile.
                    os.rename(temporary, path)
                    is_there = True
        except OSError as e:
            if e.errno not in FULL:
                raise
            raise NotEnoughSpace(
                errno.ENOSPC,
                f'no room to spill an object of {num_bytes} bytes to {spill.directory!r}: its objects have '
                f'{self.state[SPILLED]} bytes, and spill_max_bytes is {spill.max_bytes}. Make room on this disk, or '
                'delete objects.',
            ) from e
        finally:
            if not is_there:
                self._discard(spill, temporary, needed)
            new.close()
        return True

    def _is_admitted(self, num_bytes: int) -> bool:
        """Return whether the disk may be written now, and note the write. At most a second's bytes come at once."""
        rate = self.options.spill_bytes_per_s
        if rate is None:
            return True
        with self.state.locked():
            paid_at = max(self.state[PAID_AT], now())
            if paid_at > now() + 1_000_000_000:
                self.state.add('not_spilled', 1)
                return False
            self.state[PAID_AT] = paid_at + int(num_bytes / rate * 1e9)
            return True

    def _removed(self, tier: _Tier, ref: str, held: Optional[OwnerLock] = None) -> bool:
        """
        Remove an object's file, or keep it for another object. Return whether there was one. The caller holds the lock
        of the state, and closes ``held``, the lock of the file, if it has that.
        """
        path = tier.path(ref)
        try:
            num_bytes = pages(os.stat(path).st_size)
        except FileNotFoundError:
            return False
        if tier is self._memory:
            self._free_files.keep(path, num_bytes, held)
        else:
            os.unlink(path)
        self.state.add(tier.word, -num_bytes)
        return True


def _is_at(path: str, status: os.stat_result) -> bool:
    """Return whether a path is that of an open file. If it is not, the file may become another object."""
    try:
        return os.path.samestat(os.stat(path), status)
    except FileNotFoundError:
        return False
