"""Compiles loops with numba if it is installed."""

from __future__ import annotations

import functools
import hashlib
import logging
import types
from pathlib import Path
from typing import Any, Callable, Optional, Protocol, TypeVar

from ding_store.environment import is_numba_disabled

logger = logging.getLogger(__name__)

T = TypeVar('T')


class Compiler(Protocol):
    def __call__(self, signature: Any, function: Callable[..., Any], nogil: bool = False) -> Callable[..., Any]:
        """Return the compiled function. With ``nogil`` it releases the interpreter lock while it runs."""


def is_wanted() -> bool:
    """Return whether loops should be compiled if possible."""
    return not is_numba_disabled()


def with_compiler(compile_all: Callable[[Compiler], T]) -> Optional[T]:
    """
    Overview:
        Call a function with the compiler and return its result. Return None if numba is missing or does not compile
        (``NUMBA_DISABLE_JIT``, for coverage and debuggers). Signatures compile at once, so that errors occur here and
        not during training.
    """
    try:
        import numba
    except ImportError as e:
        # A numba that is too old for this numpy raises this as well.
        logger.info('loops run in numpy (%s); pip install "ding_store[fast]" makes small rows several times faster', e)
        return None
    if getattr(numba.config, 'DISABLE_JIT', 0):
        logger.info('loops run in numpy: NUMBA_DISABLE_JIT is set')
        return None
    try:
        return compile_all(_compiler(numba, cache=True))
    except (OSError, RuntimeError) as e:
        # numba's cache is next to the file of a loop, or in the user's cache directory. Both are not writable here.
        logger.info('compiled loops are not cached, which costs seconds at every start: %s', e)
        return compile_all(_compiler(numba, cache=False))


def _compiler(numba: Any, cache: bool) -> Compiler:
    def compiled(signature: Any, function: Callable[..., Any], nogil: bool = False) -> Callable[..., Any]:
        function = _renamed(function, '_freely' if nogil else '')
        # A division that may raise is a branch, which prevents vector instructions in a loop.
        made = numba.njit(signature, cache=cache, nogil=nogil, error_model='numpy')(function)
        if cache and made.stats.cache_misses:
            _notice()
        return made  # type: ignore[no-any-return]

    return compiled


@functools.cache
def _notice() -> None:
    """Log once per process that loops are compiled."""
    logger.warning(
        'ding_store compiles its loops, once per installation: about 20 s of one core. If this repeats at every start, '
        'set NUMBA_CACHE_DIR to a directory that this user may write to.'
    )


def _renamed(function: Any, suffix: str) -> Callable[..., Any]:
    """
    Overview:
        Copy a function under another name, by which numba's cache finds it. The name distinguishes a loop that holds
        the interpreter lock from one that releases it. It also changes with ``cache_lines.py``.
    """
    name = f'{function.__name__}{suffix}_{_digest()}'
    copied = types.FunctionType(function.__code__, function.__globals__, name)
    copied.__qualname__, copied.__module__ = name, function.__module__
    return copied


@functools.cache
def _digest() -> str:
    return hashlib.sha1(Path(__file__).with_name('cache_lines.py').read_bytes(), usedforsecurity=False).hexdigest()[:8]
