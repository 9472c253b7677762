"""The place of a stream, value or counter among several servers. All processes of a run must compute the same."""

from __future__ import annotations

import functools
import zlib


@functools.lru_cache(4096)
def shard_of(name: str, num_shards: int) -> int:
    """
    Overview:
        Return the number of the server that has a name, from 0 on. If the name ends in ``/<p>`` with a number p, this
        is p modulo the number of servers. So partitions 0, 1, 2, ... are on servers 0, 1, 2, ..., and a partition's
        values are beside its stream. For any other name it is the CRC-32 of the name modulo the number of servers.
    """
    _, slash, last = name.rpartition('/')
    number = int(last) if slash and last.isascii() and last.isdigit() else zlib.crc32(name.encode())
    return number % num_shards
