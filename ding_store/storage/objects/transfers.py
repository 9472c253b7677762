"""Objects between hosts: a host asks the one that stored an object, which uploads it as a value, once per host.

Each host has a stream of requests, ``objects/<host>``, which one of its processes serves. If that process dies, another
one takes its place. A request names the object and the asking host. The answer is a value of the two hosts and one of a
few *lanes*. It carries the request's number and the bytes, or why the object is gone. The asking host has a lock per
lane, so that one of its processes downloads for all. It then confirms, and the answer is deleted. If it dies, the
serving process deletes the answer after some time. If both die, one answer per lane stays until the next request, or
until the run ends.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Protocol, Tuple

from ding_store.errors import CorruptPayload, ObjectGone, StoreClosed, StoreTimeout, StoreUnavailable
from ding_store.storage.base import Arrays, Entry, EntryId, Header
from ding_store.storage.client import Client
from ding_store.storage.encoding.framing import Pieces, is_whole
from ding_store.storage.encoding.value_parts import ValuePart, unpack
from ding_store.storage.exactly_once.reader import ReadableStore, Reader
from ding_store.storage.objects.host_objects import HOST_DIGITS, REF_DIGITS, HostObjects
from ding_store.storage.objects.host_state import DELETED, EVICTED
from ding_store.storage.protocol import Version
from ding_store.storage.shared_memory.download_lock import FetchLock
from ding_store.storage.shared_memory.mapped_files import claim

logger = logging.getLogger(__name__)

#: Number of downloads from one host to another at the same time.
_LANES = 4
#: Time after which an unanswered request is sent again.
_RETRY_S = 5.0
#: Time after which an upload is deleted that the asking host does not confirm. Its bytes may take longer: they get the
#: time of a link of this rate as well.
UPLOAD_S = 60.0
SLOWEST_BYTES_PER_S = 1e6
#: Interval in which a process looks whether its host still has a serving one.
_LOOK_S = 0.5
#: Time that close() waits for the thread.
_JOIN_S = 10.0
#: An upload is sent in parts. The first bytes of an object are its head.
_HEAD_BYTES = 4096

_REF = re.compile(rf'[0-9a-f]{{{REF_DIGITS}}}')
_HOST = re.compile(rf'[0-9a-f]{{{HOST_DIGITS}}}')
_NUMBER = re.compile(r'[0-9a-f]{16}')
#: What a request wants.
FETCH, DONE, DELETE = 'fetch', 'done', 'delete'

_WHY = {
    DELETED: 'it was deleted',
    EVICTED: 'it was evicted to make room. Raise max_bytes, set spill_dir, pin it, or read it sooner',
    0: 'the host that stored it does not know it: it was never stored there, or left so long ago that the host has '
    'forgotten why',
}


def gone(ref: str, why: int) -> ObjectGone:
    """Return the error of an object that does not exist any more."""
    return ObjectGone(f'object {ref} is gone: {_WHY.get(why, _WHY[0])}.')


def line_of(ref: str) -> Tuple[str, int]:
    """Return the host that stored an object and the lane by which it comes. Those of other lines come beside it."""
    return ref[:HOST_DIGITS], int(ref[-1], 16) % _LANES


class CarrierStore(ReadableStore, Protocol):
    """The calls of a store that transfers make: see ``Store``."""

    @property
    def client(self) -> Client: ...

    def append(self, stream: str, header: Header, arrays: Arrays, timeout_s: Optional[float] = None) -> EntryId: ...


class _Request(NamedTuple):
    """A request of another host. ``_checked`` has seen that all fields are as they should be."""

    kind: Any
    ref: Any
    host: Any  # the asking one
    number: Any
    lane: Any


class Transfers:
    """
    Overview:
        The objects of other hosts, as one process of this host gets them and serves its own. Thread-safe.
    Arguments:
        - host (:obj:`str`): The digits with which the references of this host begin.
    """

    def __init__(self, store: CarrierStore, local: HostObjects, host: str) -> None:
        self._store = store
        self._local = local
        self._host = host
        self._closed = threading.Event()
        self._uploads: Dict[str, float] = {}  # value -> time from which it may be deleted
        self._serving = threading.Thread(target=self._serve, name='ding-store-objects', daemon=True)
        self._serving.start()

    def stop(self) -> None:
        """Begin to close. Call ``close`` after the client was closed, which wakes the thread."""
        self._closed.set()

    def close(self) -> None:
        if self._serving is not threading.current_thread():
            self._serving.join(_JOIN_S)

    # The asking side

    def fetch(self, ref: str, deadline: float, stopped: Optional[threading.Event] = None) -> None:
        """
        Overview:
            Bring an object of another host here.
        Arguments:
            - stopped (:obj:`Optional[threading.Event]`): Once it is set, the wait ends as if its time was over.
        Raises:
            - ObjectGone: That host has it no more.
            - StoreTimeout: No process of that host answers.
        """
        other, lane = line_of(ref)
        path = f'fetch-{other}-{lane}'
        while True:
            left_s = deadline - time.monotonic()
            lock = FetchLock(lambda: self._local.lock_path(path), max(0.01, min(_RETRY_S, left_s)))
            with lock.taken(deadline=deadline) as held:
                if self._local.has(ref):
                    return
                if held is not None:
                    self._download(ref, lane, deadline, stopped, held.touch)
                    return
            if time.monotonic() >= deadline or _is_set(stopped):
                raise StoreTimeout(
                    f'object {ref} did not come in time: another process of this host downloads from the same host. '
                    'Raise timeout_s.'
                )

    def delete(self, ref: str) -> None:
        """Ask the host that stored an object to delete it. This does not wait for it."""
        self._send(ref[:HOST_DIGITS], DELETE, ref)

    def _download(
        self, ref: str, lane: int, deadline: float, stopped: Optional[threading.Event], moved: Callable[[], None]
    ) -> None:
        other, number = line_of(ref)[0], uuid.uuid4().hex[:16]
        name = _answer_name(self._host, other, lane)
        client, known, asked_at = self._store.client, 0, 0.0
        try:
            while True:
                found = client.get(name, known, 0.0)
                if found is not None and found.reference[:16] == number.encode():
                    break
                known = found.version if found is not None else known
                if time.monotonic() - asked_at >= _RETRY_S or not asked_at:
                    self._send(other, FETCH, ref, number, lane)
                    asked_at = time.monotonic()
                left_s = deadline - time.monotonic()
                if left_s <= 0 or _is_set(stopped):
                    raise StoreTimeout(
                        f'object {ref} did not come in time: no process of the host that stored it answers. Keep one '
                        'there that has called store.objects(), see its log for a failed request, or raise timeout_s.'
                    )
                client.get(name, known, min(left_s, 1.0))  # wait; the loop reads it
            self._take(ref, name, found, moved)
        finally:
            if asked_at:
                self._send(other, DONE, ref, number, lane)

    def _take(self, ref: str, name: str, found: Version, moved: Callable[[], None]) -> None:
        """Store an answer's bytes as an object of this host."""
        if not found.payload:
            why = found.reference[16:].decode(errors='replace')
            raise gone(ref, int(why) if why.isdigit() else 0)
        listed = unpack(found.payload)
        try:
            if listed is None:
                if not is_whole(memoryview(found.payload)):
                    raise CorruptPayload(f'object {ref}: the bytes from its host are damaged')
                self._local.write(ref, [found.payload], len(found.payload), is_copy=True)
            else:
                with self._local.download(ref, listed.num_bytes) as memory:
                    wanted: List[Tuple[ValuePart, memoryview]] = [
                        (part, memory[offset : offset + part.num_bytes])
                        for part, offset in zip(listed.parts, listed.offsets)
                    ]
                    if not self._store.client.enter().fetch_parts(name, wanted, moved):
                        raise StoreTimeout(f'object {ref}: parts of it vanished during the download. Try again.')
        except FileNotFoundError as e:
            raise gone(ref, DELETED) from e

    def _send(self, host: str, kind: str, ref: str, number: str = '', lane: int = 0) -> None:
        request = _Request(kind, ref, self._host, number, lane)
        self._store.append(_stream_name(host), request._asdict(), {})

    # The serving side

    def _serve(self) -> None:
        """Serve the requests for this host's objects, while no other process of the host does."""
        pid, has_warned = os.getpid(), False
        while not self._closed.is_set() and pid == os.getpid():
            try:
                held = claim(self._local.lock_path('serve'))
                if held is None:
                    self._closed.wait(_LOOK_S)
                    continue
                try:
                    self._serve_stream()
                finally:
                    held.close()
                has_warned = False
            except StoreClosed:
                return
            except Exception as e:  # noqa: BLE001 - the thread must go on for later requests
                if self._closed.is_set():
                    return
                if not has_warned:
                    has_warned = True
                    logger.warning(
                        'other hosts get no objects from here: %s. The store is tried again each second.',
                        e or type(e).__name__,
                    )
                self._closed.wait(1.0)

    def _serve_stream(self) -> None:
        reader = Reader(self._store, _stream_name(self._host), 'objects', on_corrupt='skip')
        while not self._closed.is_set():
            self._drop_old()
            for entry in reader.read(timeout_s=self._store.client.check_every_s):
                request = _checked(entry)
                if request is not None:
                    self._answer(request)
                reader.ack(entry.id, wait=False)

    def _answer(self, request: _Request) -> None:
        """Answer a request. One that fails is logged and done with: the others must not wait for it."""
        name = _answer_name(request.host, self._host, request.lane)
        try:
            if request.kind == DELETE:
                self._local.delete(request.ref)
            elif request.kind == DONE:
                self._store.client.enter().delete(name)
                self._uploads.pop(name, None)
            else:
                self._upload(name, request.ref, request.number)
        except (StoreClosed, StoreUnavailable):
            raise  # The request is read again when the server is back.
        except Exception as e:  # noqa: BLE001 - it may be about this object alone
            if self._closed.is_set():
                raise
            logger.warning(
                'request %r of another host for object %s failed: %s', request.kind, request.ref, e or type(e).__name__
            )

    def _upload(self, name: str, ref: str, number: str) -> None:
        view, why = self._local.view(ref), b''
        payload: Optional[Pieces] = None
        if view is None:
            why = str(self._local.why_gone(ref)).encode()
        else:
            head = min(len(view), _HEAD_BYTES)
            payload = Pieces([view], [head, len(view) - head] if len(view) > head else [head])
            self._local.count('served')
        try:
            self._store.client.enter().put(name, payload, number.encode() + why)
        finally:  # A put that failed may have sent parts of it.
            num_bytes = 0 if view is None else len(view)
            self._uploads[name] = time.monotonic() + UPLOAD_S + num_bytes / SLOWEST_BYTES_PER_S

    def _drop_old(self) -> None:
        """Delete the uploads of hosts that died before they confirmed."""
        for name, until in list(self._uploads.items()):
            if time.monotonic() > until:
                self._store.client.enter().delete(name)
                del self._uploads[name]


def _is_set(stopped: Optional[threading.Event]) -> bool:
    return stopped is not None and stopped.is_set()


def check_ref(ref: object) -> str:
    """Return a reference. Raise ObjectGone if it is none: it names no object."""
    if not isinstance(ref, str) or not _REF.fullmatch(ref):
        raise ObjectGone(
            f'{_short(ref)} is no reference of an object. Pass what put returned: {REF_DIGITS} hexadecimal digits.'
        )
    return ref


def _short(ref: object) -> str:
    text = repr(ref)
    return text if len(text) <= 100 else text[:100] + '...'


def _checked(entry: Entry) -> Optional[_Request]:
    """Return a request, or None if another program wrote it."""
    header = entry.header
    request = _Request(*(header.get(name) for name in _Request._fields))
    is_good = (
        request.kind in (FETCH, DONE, DELETE)
        and _is_text(request.ref, _REF)
        and _is_text(request.host, _HOST)
        and (request.kind == DELETE or _is_text(request.number, _NUMBER))
        and type(request.lane) is int
        and 0 <= request.lane < _LANES
    )
    if not is_good:
        logger.warning('a request for objects in %r is malformed, and is skipped', entry.stream)
    return request if is_good else None


def _is_text(value: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _stream_name(host: str) -> str:
    return f'objects/{host}'


def _answer_name(asking: str, serving: str, lane: int) -> str:
    return f'objects/{asking}-{serving}-{lane}'
