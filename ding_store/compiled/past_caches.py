"""
Copies past the caches. A processor reads a line of memory before it writes to it, and a copy of more than its caches
hold is a third slower by that; it also drives out what others would have found there.
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
#: Where to, and what.
Pair = Tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

#: More than a core's caches hold, in all: what is written goes past them.
FAR_BYTES = 10 << 20
#: So much goes past them, too, into an area that is filled again and again, if the last cache has no room for two such.
_NEAR_BYTES = 1 << 20
#: The last cache, where the kernel says nothing about it.
_CACHE_BYTES = 32 << 20
_CACHE_SIZE = '/sys/devices/system/cpu/cpu0/cache/index3/size'
#: For copies of so much in all the compiler is loaded, half a second and 40 MB, where nothing else has.
LOADING_BYTES = 32 << 20
#: Arrays that are smaller are copied through the caches: the call takes longer than numpy's.
MIN_BYTES = 1 << 16
#: Copies of so much are shared by threads, in pieces.
_SHARED_BYTES, _PIECE_BYTES, _MAX_THREADS = 64 << 20, 4 << 20, 4


def copy_past_caches(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """
    Overview:
        ``np.copyto(target, source)``, for targets of which nothing is read soon, or more than the caches hold. Other
        threads run meanwhile.
    Arguments:
        - target (:obj:`np.ndarray`): Overlaps the source nowhere.
    Raises:
        - TypeError, ValueError: As np.copyto.
    """
    if _are_plain(target, source):
        copy = _load()
        if copy is not None:
            # Views and not addresses, which numpy takes three times as long to tell.
            copy(target.ravel().view(np.uint8), source.ravel().view(np.uint8))
            return
    np.copyto(target, source)


def is_far(num_bytes: int, area_bytes: int) -> bool:
    """
    Whether so much at once is to be written past the caches, to an area that is filled again and again: its bytes have
    left them by the time that they are written to again, and would have to be read first.
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
    """Copy buffers behind each other into an array of bytes, as ``copy_each_past_caches``."""
    pairs, at = [], 0
    for part in parts:
        source = np.frombuffer(part, np.uint8)
        pairs.append((target[at : at + len(source)], source))
        at += len(source)
    copy_each_past_caches(pairs)


def copy_each_past_caches(pairs: Sequence[Pair]) -> None:
    """
    Overview:
        ``copy_past_caches`` of each target and its source; much of that by several threads, as who publishes weights,
        or loads them, waits for it.
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
    Copies that threads share: each takes the next one. Who is interrupted by a signal goes on only when the other
    threads have ended what they had begun: they would write where something else is by then.
    """

    def __init__(self, pieces: List[Pair]) -> None:
        self._left = pieces
        self._errors: List[BaseException] = []
        self._num_under_way = 0  # in threads that help: no signal interrupts those
        self._changed = threading.Condition()

    def copy(self, num_threads: int) -> None:
        try:
            for _ in range(num_threads - 1):
                with suppress(RuntimeError):  # there are too many
                    threading.Thread(target=self._help, daemon=True).start()
            while (piece := self._next()) is not None:
                copy_past_caches(*piece)
        finally:
            # Not in a function of its own: a signal may come before its first line.
            interrupt: Optional[BaseException] = None
            while True:
                try:
                    with self._changed:
                        self._left.clear()  # who has not begun yet finds nothing
                        while self._num_under_way:
                            self._changed.wait()
                    break
                except BaseException as e:  # noqa: BLE001 - it is raised below
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
            except BaseException as e:  # noqa: BLE001 - for the thread that asked
                self._errors.append(e)
            with self._changed:
                self._num_under_way -= 1
                self._changed.notify_all()


def _pieces(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> Iterator[Pair]:
    """The same copy in parts, where it is one of bytes."""
    if not _are_plain(target, source):
        yield target, source
        return
    target, source = target.ravel().view(np.uint8), source.ravel().view(np.uint8)
    for begin in range(0, len(source), _PIECE_BYTES):
        yield target[begin : begin + _PIECE_BYTES], source[begin : begin + _PIECE_BYTES]


def _are_plain(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> bool:
    """Whether the copy is one of bytes, and large."""
    return (
        target.nbytes >= MIN_BYTES
        and target.dtype == source.dtype
        and target.shape == source.shape
        and target.flags.carray
        and source.flags.c_contiguous
        and not target.dtype.hasobject
    )


def load_for(num_bytes: int) -> None:
    """Copies of so much in all follow: let them go past the caches, if that is worth loading the compiler."""
    if num_bytes >= LOADING_BYTES:
        _compiled()


def _load() -> Optional[Callable[[_Bytes, _Bytes], None]]:
    return _compiled() if 'numba' in sys.modules else None


@functools.cache
def _compiled() -> Optional[Callable[[_Bytes, _Bytes], None]]:
    # Asked once: a look at the environment takes a tenth of a push of small rows.
    try:
        return with_compiler(_compile) if is_wanted() else None
    except Exception as e:  # noqa: BLE001 - numpy copies what no version of numba can
        logger.warning('numba cannot compile copies, which numpy makes: %s', e)
        return None


def _compile(compiled: Compiler) -> Callable[..., Any]:
    from ding_store.compiled import cache_lines

    return compiled(cache_lines.COPY, cache_lines.copy, nogil=True)
