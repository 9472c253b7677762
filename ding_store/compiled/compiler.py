"""numba, which compiles loops where it is installed."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import types
from pathlib import Path
from typing import Any, Callable, Optional, Protocol, TypeVar

logger = logging.getLogger(__name__)

#: Set to anything but '' or '0' to do without numba.
NO_NUMBA = 'DING_STORE_NO_NUMBA'

T = TypeVar('T')


class Compiler(Protocol):
    def __call__(self, signature: Any, function: Callable[..., Any], nogil: bool = False) -> Callable[..., Any]:
        """The compiled function; ``nogil``: it lets go of the interpreter, so that other threads run meanwhile."""


def is_wanted() -> bool:
    """Whether loops are to be compiled, if they can be."""
    return os.environ.get(NO_NUMBA, '') in ('', '0')


def with_compiler(compile_all: Callable[[Compiler], T]) -> Optional[T]:
    """
    What a function makes that is given the compiler; None where there is no numba, or it does not compile
    (``NUMBA_DISABLE_JIT``, for coverage and debuggers). Signatures compile at once, so that
    whatever goes wrong does so here and not in the middle of training.
    """
    try:
        import numba
    except ImportError as e:
        # Also one that is too old for this numpy.
        logger.info('loops run in numpy (%s); pip install "ding_store[fast]" makes small rows several times faster', e)
        return None
    if getattr(numba.config, 'DISABLE_JIT', 0):
        logger.info('loops run in numpy: NUMBA_DISABLE_JIT is set')
        return None
    try:
        return compile_all(_compiler(numba, cache=True))
    except (OSError, RuntimeError) as e:
        # numba's cache lies beside the file of a loop, or in the user's cache directory; neither can be written to.
        logger.info('compiled loops are not cached, which costs seconds at every start: %s', e)
        return compile_all(_compiler(numba, cache=False))


def _compiler(numba: Any, cache: bool) -> Compiler:
    is_warned = False

    def compiled(signature: Any, function: Callable[..., Any], nogil: bool = False) -> Callable[..., Any]:
        nonlocal is_warned
        function = _renamed(function, '_freely' if nogil else '')
        # A division that may raise is a branch, and keeps a loop from being instructions for many values at once.
        made = numba.njit(signature, cache=cache, nogil=nogil, error_model='numpy')(function)
        if cache and made.stats.cache_misses and not is_warned:
            is_warned = True
            logger.warning(
                'ding_store compiles its loops, once for this installation: about 20 s of a core. At every start? Then '
                'set NUMBA_CACHE_DIR to a directory that this user may write to'
            )
        return made  # type: ignore[no-any-return]

    return compiled


def _renamed(function: Any, suffix: str) -> Callable[..., Any]:
    """
    Copy a function under another name, by which numba's cache finds it. Without that name the cache would not tell a
    loop that holds the interpreter's lock from one that releases it, and would not see a change of ``cache_lines.py``.
    """
    name = f'{function.__name__}{suffix}_{_digest()}'
    copied = types.FunctionType(function.__code__, function.__globals__, name)
    copied.__qualname__, copied.__module__ = name, function.__module__
    return copied


@functools.cache
def _digest() -> str:
    return hashlib.sha1(Path(__file__).with_name('cache_lines.py').read_bytes(), usedforsecurity=False).hexdigest()[:8]
