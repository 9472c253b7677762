"""The chain: a hash of all entries of a stream up to one of them. Equal chains mean equal entries.

A server that went back in time gives the numbers of its newest entries to other ones. The chain shows the difference.
Each entry carries its own, and a reader computes it from the chain of the entry before. ``lua/append.lua`` does the
same.
"""

from __future__ import annotations

import hashlib


def link(chain: str, writer: str, sequence: int) -> str:
    """Return the chain up to this entry, whose previous entry has ``chain``."""
    # No secret depends on this hash.
    digest = hashlib.sha1(f'{chain} {writer} {sequence}'.encode(), usedforsecurity=False)
    return digest.hexdigest()[:16]
