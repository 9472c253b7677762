"""Makes file contents and directory names durable, so that they survive a power cut."""

from __future__ import annotations

import os


def sync_directory(path: str) -> None:
    """Wait until all names in a directory are on the disk, after files were created, renamed or removed in it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return  # Another user owns it, and this process may only use it. There is no other way to sync it.
    _sync(descriptor)


def sync_path(path: str) -> None:
    """Sync a directory and all directories above it on the same file system, see ``sync_directory``."""
    device = os.stat(path).st_dev
    while os.stat(path).st_dev == device:
        sync_directory(path)
        if path == os.path.dirname(path):
            return
        path = os.path.dirname(path)


def sync_file(path: str) -> None:
    """Wait until a file's content is on the disk, whichever process wrote it."""
    _sync(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
