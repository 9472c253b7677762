"""Copies that bypass the processor's caches.

A processor reads a line of memory before it writes to it. A copy larger than its caches is therefore a third slower. It
also drives out data that other code would have found in the caches.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ding_store.compiled.compiler import Compiler, is_wanted, with_compiler

logger = logging.getLogger(__name__)

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
#: Target and source.
Pair = Tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

#: More than a core's caches hold in all: writes of this size go past them.
FAR_BYTES = 10 << 20
#: Writes of this size also go past the caches if the last cache cannot hold their reused target twice.
_NEAR_BYTES = 1 << 20
#: Size of the last cache if the kernel does not report it.
_CACHE_BYTES = 32 << 20
_CACHE_SIZE = '/sys/devices/system/cpu/cpu0/cache/index3/size'
#: Total copies of this size are worth loading the compiler, which takes half a second and 40 MB.
LOADING_BYTES = 32 << 20
#: Smaller arrays are copied through the caches: the call would take longer than numpy's copy.
MIN_BYTES = 1 << 16
#: Plain bytes of this size are copied past the caches, without further checks.
_MIN_STREAMED_BYTES = 1 << 13
#: Copies of this size are shared by threads, in pieces.
_SHARED_BYTES, _PIECE_BYTES, _MAX_THREADS = 64 << 20, 4 << 20, 4


def copy_past_caches(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """
    Overview:
        Copy as ``np.copyto(target, source)`` does, for targets that are not read soon or exceed the caches. Other
        threads run meanwhile.
    Arguments:
        - target (:obj:`np.ndarray`): Must not overlap the source.
    Raises:
        - TypeError, ValueError: See np.copyto.
    """
    if _are_plain(target, source):
        copy = _load()
        if copy is not None:
            # Views instead of addresses, which take numpy three times as long to return.
            copy(target.ravel().view(np.uint8), source.ravel().view(np.uint8))
            return
    np.copyto(target, source)


def join_at(target: _Bytes, parts: Sequence[_Bytes], places: Sequence[int]) -> None:
    """
    Copy contiguous bytes to these places of the target, like ``copy_past_caches`` without its checks. The checks
    take as long as a copy of 10 KB.
    """
    copy = _load()
    for part, place in zip(parts, places):
        num_bytes = len(part)
        if copy is None or num_bytes < _MIN_STREAMED_BYTES:
            target[place : place + num_bytes] = part
        else:
            copy(target[place : place + num_bytes], part)


def is_far(num_bytes: int, area_bytes: int) -> bool:
    """
    Overview:
        Return whether a write to a reused area should go past the caches. A large area's bytes have left the caches
        before they are overwritten, and would have to be read first.
    """
    return num_bytes >= FAR_BYTES or (num_bytes >= _NEAR_BYTES and 2 * area_bytes >= _last_cache_bytes())


@functools.cache
def _last_cache_bytes() -> int:
    try:
        text = Path(_CACHE_SIZE).read_text().strip()
        return int(text.removesuffix('K')) << 10
    except (OSError, ValueError):
        return _CACHE_BYTES


def join_past_caches(target: np.ndarray[Any, Any], parts: Sequence[Any]) -> None:
    """Copy buffers one after the other into an array of bytes, see ``copy_each_past_caches``."""
    pairs, at = [], 0
    for part in parts:
        source = np.frombuffer(part, np.uint8)
        pairs.append((target[at : at + len(source)], source))
        at += len(source)
    copy_each_past_caches(pairs)


def copy_each_past_caches(pairs: Sequence[Pair]) -> None:
    """
    Overview:
        Copy each source to its target, see ``copy_past_caches``. Several threads share large copies, since publishing
        or loading weights waits for them.
    """
    num_bytes = sum(target.nbytes for target, _ in pairs)
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0))) if num_bytes >= _SHARED_BYTES else 1
    if num_threads > 1:
        _Shared([piece for target, source in pairs for piece in _pieces(target, source)]).copy(num_threads)
        return
    for target, source in pairs:
        copy_past_caches(target, source)


class _Shared:
    """
    Overview:
        Copies that threads share: each thread takes the next piece. After a signal interrupts the caller, it waits
        until the other threads have finished their pieces. Otherwise they would write to memory that is reused by then.
    """

    def __init__(self, pieces: List[Pair]) -> None:
        self._left = pieces
        self._errors: List[BaseException] = []
        self._num_under_way = 0  # in helper threads, which no signal interrupts
        self._changed = threading.Condition()

    def copy(self, num_threads: int) -> None:
        try:
            for _ in range(num_threads - 1):
                with suppress(RuntimeError):  # too many threads
                    threading.Thread(target=self._help, daemon=True).start()
            while (piece := self._next()) is not None:
                copy_past_caches(*piece)
        finally:
            # Not in a separate function: a signal may come before its first line.
            interrupt: Optional[BaseException] = None
            while True:
                try:
                    with self._changed:
                        self._left.clear()  # other threads find no further pieces
                        while self._num_under_way:
                            self._changed.wait()
                    break
                except BaseException as e:  # noqa: BLE001 - raised below
                    interrupt = e
            if interrupt is not None:
                raise interrupt
        if self._errors:
            raise self._errors[0]

    def _next(self) -> Optional[Pair]:
        try:
            return self._left.pop()
        except IndexError:
            return None

    def _help(self) -> None:
        while True:
            with self._changed:
                piece = self._next()
                if piece is None:
                    return
                self._num_under_way += 1
            try:
                copy_past_caches(*piece)
            except BaseException as e:  # noqa: BLE001 - for the calling thread
                self._errors.append(e)
            with self._changed:
                self._num_under_way -= 1
                self._changed.notify_all()


def _pieces(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> Iterator[Pair]:
    """Yield a copy of bytes in pieces, any other copy as it is."""
    if not _are_plain(target, source):
        yield target, source
        return
    target, source = target.ravel().view(np.uint8), source.ravel().view(np.uint8)
    for begin in range(0, len(source), _PIECE_BYTES):
        yield target[begin : begin + _PIECE_BYTES], source[begin : begin + _PIECE_BYTES]


def _are_plain(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> bool:
    """Return whether the copy is a large copy of bytes."""
    return (
        target.nbytes >= MIN_BYTES
        and target.dtype == source.dtype
        and target.shape == source.shape
        and target.flags.carray
        and source.flags.c_contiguous
        and not target.dtype.hasobject
    )


def load_for(num_bytes: int) -> None:
    """Load the compiler for coming copies of this total size, if that is worth its cost."""
    if num_bytes >= LOADING_BYTES:
        _compiled()


def _load() -> Optional[Callable[[_Bytes, _Bytes], None]]:
    return _compiled() if 'numba' in sys.modules else None


@functools.cache
def _compiled() -> Optional[Callable[[_Bytes, _Bytes], None]]:
    # Looked up once: reading the environment takes a tenth of the time of a push of small rows.
    try:
        return with_compiler(_compile) if is_wanted() else None
    except Exception as e:  # noqa: BLE001 - numpy copies whatever numba cannot
        logger.warning('numba cannot compile copies, so numpy makes them: %s', e)
        return None


def _compile(compiled: Compiler) -> Callable[..., Any]:
    from ding_store.compiled import cache_lines

    return compiled(cache_lines.COPY, cache_lines.copy, nogil=True)
