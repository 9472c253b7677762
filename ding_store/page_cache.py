"""Loads parts of files into the kernel's page cache, before they are used."""

import os

#: Bytes of one request. Linux shortens a larger one to the disk's read-ahead (128 KiB by default), or to the disk's
#: optimal request if that is larger.
_STEP_BYTES = 128 << 10


def load(descriptor: int, start: int, stop: int) -> None:
    """Begin to read bytes ``start`` to ``stop`` of a file. This returns before they are read."""
    for at in range(start, stop, _STEP_BYTES):
        os.posix_fadvise(descriptor, at, min(_STEP_BYTES, stop - at), os.POSIX_FADV_WILLNEED)
