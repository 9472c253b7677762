"""Payloads of streams that come through Redis in parts: one process downloads them, and all of the host map its file.

If several processes of a host read a stream, an entry's payload goes through these states. A process may be killed in
any of them:

    nothing    a process that needs the payload takes the stream's lock (``flock``, freed at its exit) and looks again
    claimed    it has an unpublished file: once its process has exited, any process removes it
    published  renamed after all bytes arrived and their checksum matched: a process that looks for it maps it
    acked      the last process to ack it removes its name; the bytes stay while a mapping exists

A process downloads privately if it is the only reader on its host, or cannot lock the stream in time. It also does so
if the shared file is missing or corrupt.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Callable, Dict, List, Optional, Sequence

from ding_store import private_files
from ding_store.errors import StoreUnavailable
from ding_store.storage.base import Buffer, EntryId
from ding_store.storage.encoding.framing import is_whole
from ding_store.storage.protocol import Download, Moved, Remote, fetch_own
from ding_store.storage.shared_memory.cache_dir import CacheDir
from ding_store.storage.shared_memory.download_lock import FetchLock
from ding_store.storage.shared_memory.mapped_files import NewFile, map_bytes
from ding_store.storage.shared_memory.reader_page import HostReaders, is_behind, is_of_epoch, mark_of

logger = logging.getLogger(__name__)

#: Maximum number of payloads, read here and not acked by all, that are tracked by name. ``tidy`` removes other files.
_MAX_USED = 4096


class _Sharing:
    """One stream, as this process reads it."""

    def __init__(self, readers: HostReaders, lock: FetchLock) -> None:
        self.readers = readers
        self.lock = lock
        self.acked: Dict[str, EntryId] = {}  # by reader
        self.used: Dict[str, int] = {}  # path -> mark of the payloads that this process read, in order
        self.num_gone = 0  # value of ``num_fetched`` when no downloaded file was left

    @property
    def is_shared(self) -> bool:
        return len(self.acked) > 1 or self.readers.are_several

    def note(self, reader: str, place: EntryId) -> None:
        """Record a reader's ack, and publish the mark up to which all readers of this process have acked."""
        known = self.acked.get(reader)
        if known is None or known.number <= place.number or known.epoch != place.epoch:
            self.acked[reader] = place
            self.tell()

    def tell(self) -> None:
        places = list(self.acked.values())
        are_of_one_epoch = len(places) == 1 or len({place.epoch for place in places}) == 1
        self.readers.mark = mark_of(min(places)) if are_of_one_epoch else 0

    def marks(self) -> List[int]:
        return [self.readers.mark, *self.readers.others()]

    def remove_used(self) -> None:
        """Remove files that we read and all processes have acked, and files of an epoch that is over for us."""
        marks, done = self.marks(), []
        for path, mark in self.used.items():
            if not is_behind(mark, marks) and is_of_epoch(mark, marks[0]):
                break
            done.append(path)
        for path in done:
            del self.used[path]
            with contextlib.suppress(OSError):  # Another process was first, or the directory is gone.
                os.unlink(path)


class StreamCopies:
    """
    Overview:
        This host's downloads of the payloads of a run's streams, as one process uses them. Thread-safe.
    Arguments:
        - limit_of (:obj:`Callable`): Returns the maximum total size of a stream's downloads, in bytes.
    """

    def __init__(self, cache: CacheDir, limit_of: Callable[[str], int]) -> None:
        self._cache = cache
        self._limit_of = limit_of
        self._lock = threading.Lock()
        self._streams: Dict[str, _Sharing] = {}
        self._has_complained = False

    def join(self, stream: str, reader: str, place: EntryId) -> None:
        """Register a reader of this process that has acked up to ``place``."""
        try:
            with self._lock:
                if stream not in self._streams:
                    lock = FetchLock(lambda: self._cache.fetch_path_of(f'stream {stream}'))
                    self._streams[stream] = _Sharing(HostReaders(self._cache.readers_path_of(stream)), lock)
                self._streams[stream].note(reader, place)
        except OSError as e:
            self._complain(stream, e)

    def leave(self, stream: str, reader: str) -> None:
        with self._lock:
            sharing = self._streams.get(stream)
            if sharing is None or sharing.acked.pop(reader, None) is None:
                return
            if sharing.acked:
                sharing.tell()
            else:
                del self._streams[stream]
                self._end(stream, sharing)

    def note_ack(self, stream: str, reader: str, place: EntryId) -> None:
        with self._lock:
            sharing = self._streams.get(stream)
            if sharing is None or reader not in sharing.acked:
                return
            sharing.note(reader, place)
            if sharing.used:
                sharing.remove_used()

    def fetch(self, stream: str, wanted: Sequence[Remote], download: Download) -> List[Optional[Buffer]]:
        """Return payloads as ``fetch_own`` does, in place if possible."""
        sharing, found = self._streams.get(stream), {}
        if sharing is not None:
            try:
                found = self._share(stream, sharing, wanted, download)
            except StoreUnavailable:  # also an OSError
                raise
            except OSError as e:
                self._complain(stream, e)
        missing = [one for one in wanted if one not in found]
        rest = iter(fetch_own(stream, missing, download) if missing else ())
        return [found[one] if one in found else next(rest) for one in wanted]

    def done(self) -> List[str]:
        """Return the files that no process of this host needs any more."""
        with self._lock:
            found = {stream: self._cache.payloads_of(stream) for stream in self._streams}
            marks = {stream: self._streams[stream].marks() for stream, files in found.items() if files}
        return [path for stream in marks for mark, path in found[stream] if is_behind(mark, marks[stream])]

    def drop(self, stream: str) -> None:
        """Remove a deleted stream's downloads. Its readers are gone as well: those that continue register again."""
        with self._lock:
            sharing = self._streams.pop(stream, None)
        if sharing is not None:
            sharing.readers.close()
        try:
            self._cache.remove([path for _, path in self._cache.payloads_of(stream)])
            self._cache.drop_readers(stream)
        except OSError as e:
            self._complain(stream, e)

    def close(self) -> None:
        with self._lock:
            for stream, sharing in self._streams.items():
                self._end(stream, sharing)
            self._streams.clear()

    def _share(
        self, stream: str, sharing: _Sharing, wanted: Sequence[Remote], download: Download
    ) -> Dict[Remote, Buffer]:
        """Return the payloads that are already shared, and those that can be downloaded for all now."""
        is_shared = sharing.is_shared
        if not is_shared and not self._are_left(stream, sharing):
            return {}
        paths = {one: self._cache.payload_path_of(stream, mark_of(one.id), one.num_bytes, one.place) for one in wanted}
        found = _found(paths)
        if is_shared and len(found) < len(wanted):
            with sharing.lock.taken() as held:
                found = {**found, **_found({one: path for one, path in paths.items() if one not in found})}
                if held is not None:
                    missing = {one: path for one, path in paths.items() if one not in found}
                    found = {**found, **self._filled(stream, sharing.readers, missing, download, held.touch)}
        with self._lock:
            sharing.used.update({paths[one]: mark_of(one.id) for one in wanted if one in found})
            while len(sharing.used) > _MAX_USED:
                del sharing.used[next(iter(sharing.used))]
        return found

    def _are_left(self, stream: str, sharing: _Sharing) -> bool:
        """Return whether there may be downloads, though no other process reads the stream any more."""
        num_fetched = sharing.readers.num_fetched
        if num_fetched != sharing.num_gone and not self._cache.payloads_of(stream):
            sharing.num_gone = num_fetched
        return num_fetched != sharing.num_gone

    def _filled(
        self, stream: str, readers: HostReaders, paths: Dict[Remote, str], download: Download, moved: Moved
    ) -> Dict[Remote, Buffer]:
        """Download payloads into shared files, as many as there is room for."""
        wanted = [(mark_of(one.id), path, one.num_bytes) for one, path in paths.items()]
        files = self._cache.create_payloads(stream, wanted, self._limit_of(stream)) if wanted else []
        if not files:
            return {}
        remotes, payloads = list(paths)[: len(files)], [memoryview(file.mapping) for file in files]
        published: List[NewFile] = []
        try:
            are_there = download(remotes, payloads, moved)
            readers.num_fetched += len(files)
            for file, payload, is_there in zip(files, payloads, are_there):
                if is_there and is_whole(payload):
                    file.publish()
                    published.append(file)
        finally:
            for file in files:
                file.close() if file in published else file.discard()
        received = zip(remotes, payloads, are_there)
        own = {one: payload.toreadonly() for one, payload, is_there in received if is_there}
        return {**own, **_found({one: paths[one] for one, file in zip(remotes, files) if file in published})}

    def _end(self, stream: str, sharing: _Sharing) -> None:
        others = sharing.readers.others()
        sharing.readers.close()
        try:
            self._cache.remove([path for mark, path in self._cache.payloads_of(stream) if is_behind(mark, others)])
        except OSError as e:
            self._complain(stream, e)

    def _complain(self, stream: str, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning('each process downloads the payloads of %r for itself: %s', stream, error)


def _found(paths: Dict[Remote, str]) -> Dict[Remote, Buffer]:
    mapped = {one: _mapped(path, one.num_bytes) for one, path in paths.items()}
    return {one: payload for one, payload in mapped.items() if payload is not None}


def _mapped(path: str, num_bytes: int) -> Optional[memoryview]:
    try:
        descriptor = private_files.opener(path)
    except FileNotFoundError:
        return None
    try:
        return map_bytes(descriptor, num_bytes)
    finally:
        os.close(descriptor)
