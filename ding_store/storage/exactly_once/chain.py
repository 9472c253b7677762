"""A hash of all entries of a stream up to one of them: equal where the entries are, whatever became of the server.

A server whose data became older gives the numbers of the newest entries to others. The *chain* tells them apart: each
entry carries its own, and who has read the entry before it knows what that must be. ``lua/append.lua`` makes it, too.
"""

from __future__ import annotations

import hashlib


def link(chain: str, writer: str, sequence: int) -> str:
    """The chain up to this entry, which came behind those of ``chain``."""
    # No secret depends on it.
    digest = hashlib.sha1(f'{chain} {writer} {sequence}'.encode(), usedforsecurity=False)
    return digest.hexdigest()[:16]
