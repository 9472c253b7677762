"""``ding-store clean``: lists and removes what runs left that have ended: directories, host caches and sockets."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

from ding_store.config import DEFAULT_URL
from ding_store.errors import ConfigError, StoreError
from ding_store.launch import log_dir
from ding_store.launch.printing import printable
from ding_store.launch.runs import runs_in
from ding_store.metrics.screen import duration, size_of
from ding_store.storage.embedded.client import run_files
from ding_store.storage.embedded.private_server import remove_run, running
from ding_store.storage.embedded.supervisor.sockets import socket_directories
from ding_store.storage.shared_memory.cache_dir import Garbage, cache_name, collect_garbage
from ding_store.storage.urls import address_of, directory_of, embedded_url, root_of

#: Seconds for which a directory of sockets stays, because a process that starts makes it before it listens.
STARTING_S = 3600.0
CACHE = 'host cache'


class Leftover(NamedTuple):
    """Files of a run that has ended, or what a killed launcher left."""

    kind: str  # 'run', 'host cache' or 'sockets'
    path: str
    num_bytes: int
    age_s: float  # since its last change
    note: str
    remove: Callable[[], Any]


def clean(
    url: str,
    names: Sequence[str],
    cache_dir: Optional[str] = None,
    older_than_s: float = 0.0,
    dry_run: bool = False,
    as_json: bool = False,
) -> int:
    """
    Overview:
        List what runs left that have ended, and remove it. Nothing of a run that has a process is touched.
    Arguments:
        - url (:obj:`str`): The store. The logs of runs on a Redis server are in ``.ding_store``.
        - names (:obj:`Sequence[str]`): Names of runs. Empty: all runs, and sockets of killed launchers.
        - cache_dir (:obj:`Optional[str]`): The value of ``host_cache_dir``. None: all places of the cache.
        - older_than_s (:obj:`float`): Keep what has changed since so many seconds.
        - dry_run (:obj:`bool`): Only list.
    Raises:
        - ConfigError: There is no run of a given name.
    """
    found: List[Path] = []
    kept: List[Path] = []
    for directory in _directories(root_of(url) or root_of(DEFAULT_URL) or '', names):
        (kept if _lives(directory) else found).append(directory)
    leftovers = [_of_run(directory) for directory in found]
    ours = {_cache_of(url, name) for name in names}
    caches = list(collect_garbage(cache_dir, True, lambda cache: not names or os.path.basename(cache.run) in ours))
    leftovers += [_of_cache(cache) for cache in caches]
    leftovers += [] if names else [_of_sockets(path) for path in socket_directories() if _is_abandoned(path)]
    leftovers = [each for each in leftovers if each.age_s >= older_than_s]
    if names and not (leftovers or kept or found):
        raise ConfigError(f'there is no run {", ".join(names)} to clean. ding-store ls lists those of this directory')
    if as_json:
        sys.stdout.write(json.dumps([_record(each) for each in leftovers]) + '\n')
    else:
        sys.stdout.writelines(printable(line) + '\n' for line in _lines(leftovers, kept))
    sys.stdout.flush()  # if its reader is gone, nothing is removed
    left = [] if dry_run else [each for each in leftovers if not _is_removed(each)]
    abandoned = {each.path for each in leftovers if each.kind == CACHE}
    if not dry_run:
        list(collect_garbage(cache_dir, False, lambda cache: cache.run in abandoned))
    if not as_json:
        freed = sum(each.num_bytes for each in leftovers) - sum(each.num_bytes for each in left)
        sys.stdout.write(f'{size_of(freed)} {"would be" if dry_run else "were"} freed\n')
    return int(bool(left))


def _is_removed(each: Leftover) -> bool:
    """Remove a directory. Return False, after a message, if it stays. Caches are removed together."""
    try:
        each.remove()
    except (StoreError, OSError) as error:
        sys.stderr.write(f'ding-store: {printable(each.path)} stays: {printable(str(error))}\n')
        return False
    return True


def _lines(leftovers: Sequence[Leftover], kept: Sequence[Path]) -> Iterator[str]:
    for each in leftovers:
        note = f' ({each.note})' if each.note else ''
        yield f'{each.kind:<10}  {size_of(each.num_bytes):>8}  {duration(each.age_s):>7}  {each.path}{note}'
    for directory in kept:
        yield f'kept: {directory} (it has a process)'


def _record(each: Leftover) -> Dict[str, Any]:
    return {name: value for name, value in each._asdict().items() if name != 'remove'}


# Directories of runs


def _directories(root: str, names: Sequence[str]) -> List[Path]:
    """Return the directories in which a run left files of ours."""
    return [path for path in runs_in(root) if (not names or path.name in names) and _is_run(path)]


def _is_run(directory: Path) -> bool:
    return os.path.exists(run_files(directory).start_lock) or (directory / 'logs' / log_dir.LOCK).exists()


def _lives(directory: Path) -> bool:
    try:
        return log_dir.is_held(directory / 'logs') or running(str(directory)) is not None
    except StoreError:  # its server does not answer
        return True


def _of_run(directory: Path) -> Leftover:
    files = [path for path in directory.rglob('*') if path.is_file()]
    has_data = os.path.exists(run_files(directory).start_lock)
    note = 'has not finished: it cannot resume afterwards' if has_data and not _has_finished(directory) else ''
    num_bytes, age_s = sum(map(_size, files)), _age_s(directory, *files)
    return Leftover('run', str(directory), num_bytes, age_s, note, lambda: _go(directory))


def _has_finished(directory: Path) -> bool:
    files = run_files(directory)
    return files.is_finished() or not files.data()


def _go(directory: Path) -> None:
    if os.path.exists(run_files(directory).start_lock):
        remove_run(str(directory))  # it fails if a process has started the run meanwhile
    if directory.exists() and not _lives(directory):
        log_dir.remove(directory / 'logs')
        with contextlib.suppress(OSError):  # it has other files
            directory.rmdir()


# Host caches and sockets


def _cache_of(url: str, run: str) -> str:
    directory = directory_of(url, run)
    return cache_name(run, address_of(url) if directory is None else embedded_url(directory))


def _of_cache(cache: Garbage) -> Leftover:
    note = f'{cache.num_files} file{"" if cache.num_files == 1 else "s"}'
    return Leftover(CACHE, cache.run, cache.num_bytes, max(time.time() - cache.changed_s, 0.0), note, lambda: None)


def _is_abandoned(directory: str) -> bool:
    """Return True if no process listens at a socket of a directory that is old enough."""
    paths = [os.path.join(directory, name) for name in os.listdir(directory)]
    are_sockets = all(stat.S_ISSOCK(os.lstat(path).st_mode) for path in paths)
    return _age_s(Path(directory)) > STARTING_S and are_sockets and not any(map(_is_listened_at, paths))


def _is_listened_at(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:  # e.g. its queue is full
            return True
        return True


def _of_sockets(directory: str) -> Leftover:
    return Leftover('sockets', directory, 0, _age_s(Path(directory)), '', lambda: shutil.rmtree(directory))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _age_s(*paths: Path) -> float:
    """Return the seconds since the last change of any of the paths."""
    changed = [path.lstat().st_mtime for path in paths if os.path.lexists(path)]
    return max(time.time() - max(changed, default=0.0), 0.0)
