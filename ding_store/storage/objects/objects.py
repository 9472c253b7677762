"""``Objects``: what ``Store.objects`` returns."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from types import TracebackType
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Type,
    Union,
)

from ding_store.storage.base import Arrays, Header
from ding_store.storage.encoding.framing import decode, encode_parts, length_of
from ding_store.storage.objects.host_objects import HOST_DIGITS, REF_DIGITS, HostObjects, Usage
from ding_store.storage.objects.host_state import MEMORY, SPILLED
from ding_store.storage.objects.object_options import ObjectOptions, check_same, checked
from ding_store.storage.objects.transfers import CarrierStore, Transfers, check_ref, gone, line_of
from ding_store.storage.shared_memory.cache_dir import CacheDir
from ding_store.storage.shared_memory.mapped_files import OwnerLock

#: Number of objects that one call downloads at the same time.
_MAX_THREADS = 8


class StoredObject(NamedTuple):
    """An object. ``arrays`` are read-only. They stay valid when the object is evicted or deleted."""

    header: Header
    arrays: Arrays


def _decoded(view: memoryview) -> StoredObject:
    return StoredObject(*decode(view, verify=False))


class ObjectsInfo(NamedTuple):
    """State of the objects on this host, see ``Objects.info``."""

    options: ObjectOptions
    in_memory: Usage
    spilled: Usage
    counts: Dict[str, int]  # put, fetched, served, evicted, spilled_objects, not_spilled, deleted, reused


class Pin:
    """Keeps an object on this host until ``release``, or until this process ends. A forked child does not have it."""

    def __init__(self, ref: str, held: OwnerLock) -> None:
        self.ref = ref
        self._held = held

    def release(self) -> None:
        """Allow the object to be evicted. May be called twice."""
        self._held.close()

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.release()


class Objects:
    """
    Overview:
        Immutable objects that all processes of a run share: named arrays with a header. ``put`` returns a reference.
        Any process of the run gets the object by it, on this host in place. Another host downloads it once for all its
        processes. All methods may be called from several threads.

        Lifetime. An object stays until it is deleted, until it is evicted, or until the last process of the run on its
        host closes its store. If the cache is full, objects move to ``spill_dir``, or are dropped. A pinned object is
        never evicted. A copy on another host is evicted by itself: it can be fetched again.
    """

    def __init__(self, store: CarrierStore, enter: Callable[[], CacheDir], options: Mapping[str, Any]) -> None:
        self._store = store
        self._enter_store = enter  # checks that the store is open, and opens it anew after a fork
        self._given = checked(options)
        self._lock = threading.Lock()
        self._begin(enter())

    def _begin(self, cache: CacheDir) -> None:
        """Create everything that belongs to one process."""
        host = hashlib.blake2b(cache.host.encode(), digest_size=HOST_DIGITS // 2).hexdigest()
        local = HostObjects(cache.run_directory, self._given)
        self._host, self._local, self._transfers = host, local, Transfers(self._store, local, host)
        self._pid = os.getpid()  # Last: until then, a call begins anew.

    def _enter(self) -> HostObjects:
        cache = self._enter_store()
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._begin(cache)
        return self._local

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ConfigError if an option differs from those of the run's objects on this host."""
        check_same(self._enter().options, checked(options))

    def stop(self) -> None:
        """Begin to close, for the store: call ``close`` after the client was closed."""
        if self._pid == os.getpid():
            self._transfers.stop()

    def close(self) -> None:
        """Release threads and files, for the store. Mapped arrays stay valid."""
        if self._pid == os.getpid():
            self._transfers.close()
            self._local.close()

    def put(self, arrays: Arrays, header: Optional[Header] = None) -> str:
        """
        Overview:
            Store an object, and return its reference: 40 hexadecimal digits. This sends nothing.
        Arguments:
            - arrays (:obj:`Mapping`): numpy arrays of a boolean or numeric dtype, copied before this returns.
            - header (:obj:`Optional[Mapping]`): JSON-able.
        Raises:
            - NotEnoughSpace: There is no room, and nothing that may be evicted, or the disk of ``spill_dir`` is full.
        """
        local = self._enter()
        buffers = encode_parts(header or {}, arrays, checked=False)
        num_bytes = length_of(buffers)
        self._store.client.check_size('an object', num_bytes)
        ref = self._host + os.urandom((REF_DIGITS - HOST_DIGITS) // 2).hex()
        local.write(ref, buffers, num_bytes)
        return ref

    def get(self, ref: str, timeout_s: float = 30.0) -> StoredObject:
        """
        Overview:
            Return an object. If it is on another host, download it first.
        Arguments:
            - timeout_s (:obj:`float`): Seconds to wait for another host.
        Raises:
            - ObjectGone: It was deleted or evicted, or ``ref`` is no reference. The message says which.
            - StoreTimeout: No process of the host that stored it answers.
        """
        return self._get(check_ref(ref), time.monotonic() + timeout_s)

    def get_many(self, refs: Iterable[str], timeout_s: float = 30.0) -> List[StoredObject]:
        """
        Overview:
            Return several objects in their order, see ``get``. A few are downloaded, or read from the disk, at the
            same time. ``timeout_s`` is for all of them.
        """
        deadline = time.monotonic() + timeout_s
        wanted = [check_ref(ref) for ref in refs]
        lines = defaultdict(list)
        found, different = {}, list(dict.fromkeys(wanted))
        for ref, view in zip(different, self._enter().views(different)):
            if view is not None:
                found[ref] = _decoded(view)
            else:
                lines[line_of(ref)].append(ref)
        if len(lines) > 1:
            found.update(self._get_beside(list(lines.values()), deadline))
        return [found[ref] if ref in found else self._get(ref, deadline) for ref in wanted]

    def _get_beside(self, lines: List[List[str]], deadline: float) -> Dict[str, StoredObject]:
        """
        Return the objects of several lines, with one thread for each. If one fails, or this thread is interrupted, the
        others end within about a second.
        """
        found: Dict[str, StoredObject] = {}
        errors: List[BaseException] = []
        stopped = threading.Event()
        availability = self._store.client.availability
        is_nonblocking = availability.is_nonblocking  # of this thread, and so of those that work for it

        def get(line: List[str]) -> None:
            try:
                with availability.nonblocking() if is_nonblocking else nullcontext():
                    for ref in line:
                        if not stopped.is_set():
                            found[ref] = self._get(ref, deadline, stopped)
            except BaseException as e:  # noqa: BLE001 - the caller raises the first one
                errors.append(e)
                stopped.set()

        with ThreadPoolExecutor(min(len(lines), _MAX_THREADS), 'ding-store-get') as threads:
            try:
                wait([threads.submit(get, line) for line in lines])
            except BaseException:
                stopped.set()
                raise
        if errors:
            raise errors[0]
        return found

    def _get(self, ref: str, deadline: float, stopped: Optional[threading.Event] = None) -> StoredObject:
        while True:
            view = self._enter().view(ref)
            if view is not None:
                return _decoded(view)
            self._fetch(ref, deadline, stopped)

    def _fetch(self, ref: str, deadline: float, stopped: Optional[threading.Event] = None) -> None:
        """Bring an object here that is not on this host. Raise ObjectGone if it is nowhere."""
        why = self._local.why_gone(ref)
        if ref.startswith(self._host):
            if self._local.has(ref):
                return  # It was spilled while ``view`` looked for it.
            raise gone(ref, why)
        self._transfers.fetch(ref, deadline, stopped)

    def pin(self, ref: str, timeout_s: float = 30.0) -> Pin:
        """
        Overview:
            Keep an object on this host, and download it first if it is on another one. It is not evicted until the pin
            is released or this process ends. ``delete`` removes it all the same.
        Raises:
            - ObjectGone, StoreTimeout: See ``get``.
        """
        check_ref(ref)
        deadline = time.monotonic() + timeout_s
        while True:
            held = self._enter().pin(ref)
            if held is not None:
                return Pin(ref, held)
            self._fetch(ref, deadline)

    def delete(self, refs: Union[str, Sequence[str]]) -> int:
        """
        Overview:
            Delete objects, and return how many of them were on this host. The host that stored an object is told to
            delete it as well, without a wait. Copies on further hosts stay until they are evicted there.
        """
        num_here = 0
        for ref in [check_ref(ref) for ref in ([refs] if isinstance(refs, str) else refs)]:
            num_here += self._enter().delete(ref)
            if not ref.startswith(self._host):
                self._transfers.delete(ref)
        return num_here

    def info(self) -> ObjectsInfo:
        """Return what this host has. This lists its directories, which takes a third of a second for 100,000 files."""
        local = self._enter()
        usage = local.usage()
        return ObjectsInfo(local.options, usage[MEMORY], usage.get(SPILLED, Usage(0, 0)), local.counts())
