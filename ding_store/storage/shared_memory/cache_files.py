"""Lists, measures and removes the files of a host cache. Callers hold the lock of ``cache_dir``."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from typing import Iterator, List, Optional

from ding_store.storage.shared_memory import reader_page as host_readers
from ding_store.storage.shared_memory.mapped_files import NEW, claim, is_claimed

#: Suffixes of files without an owner. Everything in them exists elsewhere as well.
COPIES, FETCH, READERS, PAYLOAD = '.copies', '.fetch', '.readers', '.payload'
#: Suffix of memory that all processes of a run write to. It lasts as long as one of them is on the host.
SHARED = '.shared'
#: File of a directory that is held (shared) by every process that uses it.
MEMBERS = 'members'
#: A run's directory of objects, with a budget of its own: see ``storage.objects``. And the file with its options.
OBJECTS, OPTIONS = 'objects', 'options'
#: Beginning of the names there of files without an object, whose memory the next objects use again.
FREE_FILE = 'free-'


def runs_of(root: str) -> List[str]:
    directory = os.path.join(root, 'runs')
    return [os.path.join(directory, run) for run in os.listdir(directory)] if os.path.isdir(directory) else []


def files_of(run: str) -> List[str]:
    names = os.listdir(run) if os.path.isdir(run) else []
    return [os.path.join(run, name) for name in names if name not in (MEMBERS, OBJECTS)]


def all_files(root: str) -> Iterator[str]:
    for run in runs_of(root):
        yield from files_of(run)


def is_alive(run: str) -> bool:
    """Return whether a running process takes part in the run."""
    return is_claimed(os.path.join(run, MEMBERS))


def dead_files(run: str) -> List[str]:
    """
    Overview:
        Return the files of a run that no process needs: all files if the run has no processes. Otherwise only
        unpublished files of dead processes, and payloads of streams without readers.
    """
    found = files_of(run)
    if is_alive(run):
        are_read = {path[: -len(READERS)] for path in found if path.endswith(READERS) and host_readers.are_there(path)}
        found = [
            path for path in found if path.endswith(NEW) or (path.endswith(PAYLOAD) and _stream(path) not in are_read)
        ]
    return [path for path in found if not is_claimed(path)]


def _stream(path: str) -> str:
    directory, name = os.path.split(path)
    return os.path.join(directory, name.partition('-')[0])


def remove_if_abandoned(run: str) -> int:
    """Remove a run's dead files and return the number of bytes freed."""
    lives, dead = is_alive(run), dead_files(run)
    freed = sum(map(size_of, dead))
    for path in dead:
        unlink(path)
    if not lives:
        remove_run(run, is_over=False)
    return freed


def remove_run(run: str, is_over: bool) -> None:
    if is_over or all(path.endswith((COPIES, FETCH, READERS, PAYLOAD, SHARED)) for path in files_of(run)):
        spilled = _spilled_of(run)
        shutil.rmtree(run, ignore_errors=True)
        if spilled is not None:
            remove_spilled(spilled)


def spill_directory(directory: str, run: str) -> str:
    """Return where a run spills its objects, below a directory that the user has named."""
    # Equal names on two hosts that share a disk must not meet: the directory's inode and its host's boot are in it.
    status = os.stat(run)
    with open('/proc/sys/kernel/random/boot_id') as file:
        boot = file.read()[:8]
    name = f'{os.path.basename(run)}-{boot}-{status.st_dev:x}-{status.st_ino:x}'
    return os.path.join(directory, f'ding-store-objects-{os.geteuid()}', name)


def remove_spilled(directory: str) -> None:
    """Remove the spilled objects of a run, unless a process uses them."""
    members = os.path.join(directory, MEMBERS)
    try:
        held = claim(members)
    except OSError:
        return
    if held is not None:
        shutil.rmtree(directory, ignore_errors=True)
        held.close()


def objects_bytes(run: str) -> int:
    """Return the bytes of a run's objects, spilled ones included."""
    directories = [os.path.join(run, OBJECTS), _spilled_of(run) or '']
    return sum(
        size_of(os.path.join(path, name))
        for directory in directories
        for path, _, names in os.walk(directory)
        for name in names
    )


def _spilled_of(run: str) -> Optional[str]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(os.path.join(run, OBJECTS, OPTIONS)) as file:
            return spill_directory(json.load(file)['spill_dir'], run)
    return None


def remove_payloads(root: str, num_bytes: int) -> int:
    """Remove the oldest payloads of all runs until ``num_bytes`` are free. Return the number of bytes freed."""
    freed = 0
    for path in sorted((path for path in all_files(root) if path.endswith(PAYLOAD)), key=changed_ns):
        if freed >= num_bytes:
            break
        freed += removed(path)
    return freed


def remove_free_files(root: str) -> int:
    """Remove the files that all runs keep for further objects. Return the number of bytes freed."""
    directories = [os.path.join(run, OBJECTS) for run in runs_of(root)]
    return sum(
        removed(os.path.join(directory, name))
        for directory in directories
        if os.path.isdir(directory)
        for name in os.listdir(directory)
        if name.startswith(FREE_FILE)
    )


def changed_ns(path: str) -> int:
    """Return the time of a file's last change, in nanoseconds since 1970. 0: it is gone."""
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0


def removed(path: str) -> int:
    """Remove a file and return the number of bytes freed."""
    num_bytes = size_of(path)
    unlink(path)
    return num_bytes


def size_of(path: str) -> int:
    if path.endswith(PAYLOAD):  # There may be thousands: avoid a system call.
        return int(os.path.basename(path).split('-')[2], 16)
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
