"""Files that only their owner can read, whatever the umask; their directories are made with ``mode=0o700``."""

from __future__ import annotations

import os
import stat


def opener(path: str, flags: int) -> int:
    """For ``open(..., opener=opener)``: a file that it makes is of mode 0600."""
    return os.open(path, flags, 0o600)


def touch(path: str) -> None:
    """Have a file of mode 0600, if there is none."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def own_directory(path: str) -> bool:
    """Have a directory of mode 0700, if there is none; whether it is this user's alone: it may have been there."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
