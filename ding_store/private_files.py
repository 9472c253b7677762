"""Creates and opens files and directories that belong to this user alone.

Every file of a run, table, checkpoint or host cache is opened through ``opener``. It follows no symbolic link, opens
only regular files, and refuses those of other users. Directories that a user names pass ``directory``. Directories in
places that users share, such as /tmp and /dev/shm, pass the stricter ``own_directory``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from ding_store.errors import ForeignFile
from ding_store.power_cuts import sync_directory


def opener(path: str, flags: int = os.O_RDONLY) -> int:
    """
    Overview:
        Open a file as ``os.open`` does, also for ``open(..., opener=opener)``. New files get mode 0600.
    Raises:
        - ForeignFile: It is a symbolic link, not a regular file, or a file of another user. Nothing was changed.
    """
    # O_NONBLOCK: opening a FIFO would wait for its other end. It has no effect on regular files.
    safe = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, safe, 0o600)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _refused(path, _kind_of(path)) from e
        raise
    try:
        _check_file(path, os.fstat(descriptor))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_file(path: str) -> None:
    """Check a file that is opened later or by other code. Raise the errors of ``opener``."""
    _check_file(path, os.lstat(path))


def create(path: str) -> int:
    """
    Overview:
        Create an empty file of mode 0600 and return its descriptor. An existing file is removed first, never written
        through.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return opener(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def create_opener(path: str, flags: int) -> int:
    """Create a file for ``open(path, 'wb', opener=create_opener)``, see ``create``."""
    return create(path)


def touch(path: str) -> None:
    """Create a file of mode 0600 if it does not exist. Raise the errors of ``opener``."""
    os.close(opener(path, os.O_WRONLY | os.O_CREAT))


def directory(path: str) -> str:
    """
    Overview:
        Create or accept a directory that a user has named. Missing parents are created with mode 0700.
    Returns:
        - path (:obj:`str`): Absolute path.
    Raises:
        - ForeignFile: It belongs to another user, all users may write to it, or it is reached by another user's
          symbolic link.
    """
    path = os.path.abspath(path)
    make_directories(path)
    check_directory(path)
    return path


def check_directory(path: str) -> None:
    """Check an existing directory, see ``directory``."""
    for status in (os.lstat(path), os.stat(path)):
        if status.st_uid != os.geteuid():
            raise _refused(path, f'a {_kind(status.st_mode)} of user {status.st_uid}', 'Name another directory')
    if not stat.S_ISDIR(status.st_mode):
        raise _refused(path, _kind(status.st_mode), 'Name another directory')
    if status.st_mode & stat.S_IWOTH:
        raise _refused(path, 'a directory that all users may write to', f'Run chmod o-w {path}, or name another one')


def own_directory(path: str) -> None:
    """
    Overview:
        Create or accept a directory of mode 0700 in a place that users share.
    Raises:
        - ForeignFile: The existing file is not a directory of this user alone.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        kind, mode = _kind(status.st_mode), stat.S_IMODE(status.st_mode)
        raise _refused(path, f'a {kind} of user {status.st_uid} with mode {mode:04o}, not a directory with mode 0700')


def _check_file(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _refused(path, _kind(status.st_mode))
    if status.st_uid != os.geteuid():
        raise _refused(path, f'a file of user {status.st_uid}')


def make_directories(path: str) -> None:
    """Create the missing directories of this path with mode 0700. Their names survive a power cut."""
    path = os.path.abspath(path)
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_directories(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    else:
        sync_directory(parent)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFLNK: 'symbolic link', stat.S_IFDIR: 'directory', stat.S_IFREG: 'file', stat.S_IFIFO: 'pipe'}
    return kinds.get(stat.S_IFMT(mode), 'special file')


def _kind_of(path: str) -> str:
    try:
        return _kind(os.lstat(path).st_mode)
    except OSError:
        return 'special file'


def _refused(path: str, what: str, fix: str = 'Remove it, or name another directory') -> ForeignFile:
    article = '' if what.startswith('a ') else 'a '
    return ForeignFile(
        f'{path!r} is {article}{what}: only files and directories of user {os.geteuid()} are used. {fix}.'
    )
