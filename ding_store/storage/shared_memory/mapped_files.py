"""Memory-mapped files that processes share: published whole or not at all, locked by their owner, with 64-bit words.

Numbers in such a file are *words* of 64 bits, written by one process and read by many.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import platform
import struct
import threading
import time
import uuid
import weakref
from contextlib import contextmanager
from typing import Iterator, List, Optional

import numpy as np

from ding_store import private_files
from ding_store.errors import CorruptPayload, NotEnoughSpace

PAGE = 4096
ALIGN = 64
#: Suffix of files that are not published yet.
NEW = '.new'

# On x86-64 all processes see a process's plain stores in program order, and loads are in program order as well. String
# moves and glibc's non-temporal copies end with a fence. Other machines may reorder both, and Python has no fences.
_KEEPS_ORDER = platform.machine() in ('x86_64', 'AMD64')
_POPULATE = getattr(mmap, 'MAP_POPULATE', 0)
#: The kernel maps this many bytes at once, from a file of huge pages to an address that is a multiple of it.
HUGE_PAGE = 2 << 20
_MAP_FIXED, _COLLAPSE = 0x10, 25
_NO_ADDRESS = ctypes.c_void_p(-1).value
_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_C.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_C.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
#: Much less than any ``patience_s``.
_TOUCH_EVERY_S = 0.05
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


def aligned(size: int, to: int = ALIGN) -> int:
    return -(-size // to) * to


class OwnerLock:
    """
    Overview:
        A file descriptor that locks a file for the lifetime of this process. A forked child closes its copy, so that it
        does not keep the lock, and the parent's lock stays.
    """

    #: A copy: at interpreter exit, modules may be empty before the last mapping is freed.
    _close = staticmethod(os.close)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._touched_at = 0.0
        _CLAIMS.add(self)

    def touch(self) -> None:
        """Show progress to the processes that wait in ``claim_within``. Cheap enough to be called all the time."""
        now = time.monotonic()
        if now - self._touched_at >= _TOUCH_EVERY_S:
            self._touched_at = now
            os.utime(self.descriptor)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            self._close(descriptor)

    def __del__(self) -> None:
        self.close()


# All locks of this process: a forked child finds the descriptors that it inherited only here.
_CLAIMS: weakref.WeakSet[OwnerLock] = weakref.WeakSet()


def _drop_inherited() -> None:
    for claim in list(_CLAIMS):
        claim.close()


os.register_at_fork(after_in_child=_drop_inherited)


def claim(path: str, shared: bool = False, wait: bool = False) -> Optional[OwnerLock]:
    """
    Overview:
        Lock a whole file with ``flock``. The file is opened anew for the lock: the descriptor inside a mapping would
        carry the lock into forked children.
    Returns:
        - claim (:obj:`Optional[OwnerLock]`): None if another process holds the lock and ``wait`` is False.
    """
    # If flock is emulated, for example on NFS, an exclusive lock needs a file that is open for writing.
    held = OwnerLock(private_files.opener(path, os.O_RDONLY if shared else os.O_RDWR))
    try:
        fcntl.flock(held.descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        held.close()
        return None
    return held


def claim_within(path: str, patience_s: float, deadline: float = math.inf) -> Optional[OwnerLock]:
    """
    Overview:
        Lock a file as ``claim(path, wait=True)`` does, but only while its holder makes progress. A thread waits instead
        of the caller, since ``flock`` has no deadline.
    Arguments:
        - patience_s (:obj:`float`): Give up after this time without a ``touch``, or up to twice as long.
        - deadline (:obj:`float`): Give up at this time of ``time.monotonic`` in any case.
    Returns:
        - claim (:obj:`Optional[OwnerLock]`): None if it gave up.
    Raises:
        - FileNotFoundError: The file is gone.
    """
    held = claim(path)
    if held is not None or patience_s <= 0:
        return held
    found: List[OwnerLock] = []
    lock, is_over = threading.Lock(), False

    def wait() -> None:
        claimed = claim(path, wait=True)
        with lock:
            if claimed is not None and not is_over:
                found.append(claimed)  # else it is closed here, which releases the lock

    waiting = threading.Thread(target=wait, name='ding-store-claim', daemon=True)
    waiting.start()
    seen_at = -1
    while waiting.is_alive() and (touched_at := changed_at(path)) != seen_at and time.monotonic() < deadline:
        seen_at = touched_at
        waiting.join(max(0.0, min(patience_s, deadline - time.monotonic())))
    with lock:
        is_over = True
        return found.pop() if found else None


def changed_at(path: str) -> int:
    """Return the file's modification time. Compare it for equality only, since clocks jump."""
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0


def reopened(descriptor: int, flags: int = os.O_RDONLY) -> OwnerLock:
    """Open the same file anew with separate locks, even if its name is gone."""
    return OwnerLock(os.open(f'/proc/self/fd/{descriptor}', flags | os.O_CLOEXEC))


def is_claimed(path: str) -> bool:
    """Return whether a running process holds this file. A missing file is not held."""
    try:
        held = claim(path)
    except FileNotFoundError:
        return False
    if held is None:
        return True
    held.close()
    return False


class NewFile:
    """
    Overview:
        A mapped and locked file of ``num_bytes`` zeros that has no public name until it is published. All its space is
        allocated at once: a write to a page without space on the disk would raise SIGBUS.
    Raises:
        - NotEnoughSpace: The file system has no room for the file.
    """

    def __init__(self, path: str, num_bytes: int) -> None:
        self.path = path
        self._temporary = f'{path}.{uuid.uuid4().hex[:8]}{NEW}'
        descriptor = private_files.opener(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        held: Optional[OwnerLock] = None
        try:
            held = claim(self._temporary)
            allocate(descriptor, 0, num_bytes, path)
            self.mapping = mmap.mmap(descriptor, num_bytes)
        except BaseException:
            os.unlink(self._temporary)
            if held is not None:
                held.close()
            raise
        finally:
            os.close(descriptor)
        assert held is not None
        self.claim = held

    def publish(self) -> None:
        """Rename the file to its path, whole. It replaces a file that is already there."""
        os.rename(self._temporary, self.path)

    def discard(self) -> None:
        """Remove the file without publishing it. Existing mappings keep its bytes."""
        os.unlink(self._temporary)
        self.close()

    def close(self) -> None:
        """Release the lock: the file has no owner from now on."""
        self.claim.close()


@contextmanager
def created(path: str, num_bytes: int) -> Iterator[tuple[mmap.mmap, OwnerLock]]:
    """
    Overview:
        Create a ``NewFile`` and publish it at ``path`` when the block ends without an error.
    Raises:
        - NotEnoughSpace: The file system has no room for the file.
    """
    new = NewFile(path, num_bytes)
    try:
        yield new.mapping, new.claim
        new.publish()
    except BaseException:
        new.discard()
        raise


def allocate(descriptor: int, offset: int, num_bytes: int, path: str) -> None:
    try:
        os.posix_fallocate(descriptor, offset, num_bytes)
    except OSError as e:
        if e.errno not in _NO_SPACE:
            raise
        free = os.fstatvfs(descriptor)
        raise NotEnoughSpace(
            errno.ENOSPC,
            f'no room for {path!r}: it needs {num_bytes} bytes, {free.f_bavail * free.f_frsize} are free. '
            'Lower host_cache_bytes, or set host_cache_dir to another directory.',
        ) from e


def map_bytes(descriptor: int, num_bytes: int, is_writable: bool = False) -> memoryview:
    """
    Overview:
        Map the first bytes of a file, for as long as a view of them exists. All pages are loaded at once: 768 page
        faults for 3 MB take longer than mapping them. The mapping holds no file descriptor. ``mmap.mmap`` would keep
        one (before ``trackfd`` in Python 3.13), and a process with many payloads would run out of them.
    Raises:
        - OSError: The bytes cannot be mapped, or the file is shorter: reading beyond its end would raise SIGBUS.
    """
    check_length(descriptor, num_bytes)
    address = _mapped(descriptor, num_bytes, mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0), _POPULATE)
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(memory, _C.munmap, address, num_bytes).atexit = False
    view: memoryview = np.frombuffer(memoryview(memory), np.uint8).data
    return view if is_writable else view.toreadonly()


def make_huge(descriptor: int, num_bytes: int) -> bool:
    """
    Overview:
        Move the pages of a file to huge ones, and return whether the kernel did. It copies them, which takes as long as
        writing them. Linux before 6.1 cannot.
    """
    try:
        address = _mapped(descriptor, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, 0)
    except OSError:
        return False
    is_done: bool = _C.madvise(address, num_bytes, _COLLAPSE) == 0
    _C.munmap(address, num_bytes)
    return is_done


def _mapped(descriptor: int, num_bytes: int, access: int, flags: int) -> int:
    """Map the first bytes of a file, and return their address. Many bytes begin at a multiple of ``HUGE_PAGE``."""
    length, address, shared = aligned(num_bytes, PAGE), None, mmap.MAP_SHARED | flags
    if length >= HUGE_PAGE:
        # The kernel chooses an address in a reservation that is longer. What is not used of it is returned.
        begin = _C.mmap(None, length + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if begin != _NO_ADDRESS:
            address, shared = aligned(begin, HUGE_PAGE), shared | _MAP_FIXED
            if address > begin:
                _C.munmap(begin, address - begin)
            _C.munmap(address + length, begin + HUGE_PAGE - address)
    found: int = _C.mmap(address, num_bytes, access, shared, descriptor, 0)
    if found == _NO_ADDRESS:
        code = ctypes.get_errno()
        # Too many mappings: the reservation is still there. After other errors, another thread may use its addresses.
        if address is not None and code == errno.ENOMEM:
            _C.munmap(address, length)
        raise OSError(code, f'{num_bytes} bytes cannot be mapped: {os.strerror(code)}')
    return found


def check_length(descriptor: int, num_bytes: int) -> None:
    """
    Raises:
        - OSError: The file is shorter than ``num_bytes``.
    """
    found = os.fstat(descriptor).st_size
    if found < num_bytes:
        raise OSError(errno.EINVAL, f'a file has {found} bytes, {num_bytes} are expected')


def map_read_only(descriptor: int, magic: bytes, path: str) -> mmap.mmap:
    """
    Overview:
        Map a whole file read-only and check its magic bytes.
    Raises:
        - CorruptPayload: The file is too short or begins with other bytes.
    """
    if os.fstat(descriptor).st_size < PAGE:
        raise CorruptPayload(f'{path!r} is too short for a file of ding_store')
    mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    if mapping[: len(magic)] != magic:
        raise CorruptPayload(f'{path!r} begins with {mapping[: len(magic)]!r} where {magic!r} is expected')
    return mapping


class Words:
    """
    Overview:
        The words of a mapped file's first page, by number: byte ``8 * number``. Words that change at different moments
        belong in different cache lines of 8 words each.
    """

    def __init__(self, mapping: mmap.mmap, path: str) -> None:
        # Native items are stored and loaded with one instruction, while struct.pack_into('<Q') writes byte by byte.
        self._words = memoryview(mapping)[:PAGE].cast('Q')
        self._lock = None if _KEEPS_ORDER else OwnerLock(private_files.opener(path))

    def __getitem__(self, number: int) -> int:
        if self._lock is None:
            return self._words[number]
        with ordered(self._lock):
            return self._words[number]

    def __setitem__(self, number: int, word: int) -> None:
        if self._lock is None:
            self._words[number] = word
            return
        with ordered(self._lock):
            self._words[number] = word


@contextmanager
def ordered(lock: OwnerLock) -> Iterator[None]:
    """
    Overview:
        Order memory accesses on machines other than x86-64, with a lock on one byte behind any file's end. Locking and
        unlocking are barriers in the kernel: the next holder sees what was stored before.
    """
    range_lock(lock.descriptor, fcntl.F_RDLCK, _BARRIER_BYTE)
    try:
        yield
    finally:
        range_lock(lock.descriptor, fcntl.F_UNLCK, _BARRIER_BYTE)


_BARRIER_BYTE = 1 << 60


def range_lock(descriptor: int, kind: int, byte: int) -> bool:
    """
    Overview:
        Lock or unlock one byte of a file for this *open* file. Unlike a plain record lock, it survives when another
        descriptor of the same file is closed. It ends with the process that holds it.
    Returns:
        - done (:obj:`bool`): False if another open file holds the byte.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack('hhqqi', kind, os.SEEK_SET, byte, 1, 0))
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def range_holder(descriptor: int, first: int, count: int) -> Optional[int]:
    """Return one of these bytes that another open file holds exclusively, or None if there is none."""
    asked = struct.pack('hhqqi', fcntl.F_RDLCK, os.SEEK_SET, first, count, 0)
    kind, _, start, *_ = struct.unpack('hhqqi', fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else start
