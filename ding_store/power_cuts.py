"""What a power cut does not take: names in a directory, and what is in a file."""

from __future__ import annotations

import os


def sync_directory(path: str) -> None:
    """Wait until the names in a directory are on the disk: what was made, renamed or removed in it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return  # It belongs to others, and this process may only use it. There is no other way to sync it.
    _sync(descriptor)


def sync_path(path: str) -> None:
    """As ``sync_directory``, for a directory and all above it that are on the same file system."""
    device = os.stat(path).st_dev
    while os.stat(path).st_dev == device:
        sync_directory(path)
        if path == os.path.dirname(path):
            return
        path = os.path.dirname(path)


def sync_file(path: str) -> None:
    """Wait until what is in a file is on the disk, whichever process wrote it."""
    _sync(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
