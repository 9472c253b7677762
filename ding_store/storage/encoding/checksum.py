"""The checksum of payloads that go through Redis."""

from __future__ import annotations

import zlib
from typing import Iterable, List

import numpy as np

from ding_store.storage.base import Buffer

_FOLD_FROM = 1 << 16
_ROW_WORDS = 1024
_ROW_BYTES = _ROW_WORDS * 8


def checksum(parts: Iterable[Buffer], num_bytes: int) -> int:
    """
    Overview:
        Return the crc32 of some bytes. For large payloads it is the crc32 of their sums, which is several times faster.
        There the bytes are rows of 1024 words of 64 bits. The sums are those of each column and each row, and the bytes
        after the last whole row are added. A change within one word always changes the result. Torn, moved and missing
        bytes change it but for one chance in 2 ** 32.
    Arguments:
        - parts (:obj:`Iterable`): The bytes, in any number of pieces.
        - num_bytes (:obj:`int`): The total number of bytes.
    """
    crc = 0
    for part in parts if num_bytes < _FOLD_FROM else _fold(parts):
        crc = zlib.crc32(part, crc)
    return crc


def _fold(parts: Iterable[Buffer]) -> List[Buffer]:
    columns, rows, rest = np.zeros(_ROW_WORDS, np.uint64), [], b''

    def add(whole_rows: Buffer) -> None:
        nonlocal columns
        words = np.frombuffer(whole_rows, np.uint64).reshape(-1, _ROW_WORDS)
        columns += np.add.reduce(words, axis=0)
        rows.append(np.add.reduce(words, axis=1).tobytes())

    for part in parts:
        view = memoryview(part).cast('B')
        if rest:
            missing = _ROW_BYTES - len(rest)
            rest, view = rest + bytes(view[:missing]), view[missing:]
            if len(rest) == _ROW_BYTES:
                add(rest)
                rest = b''
        upto = len(view) // _ROW_BYTES * _ROW_BYTES
        if upto:
            add(view[:upto])
        rest = rest or bytes(view[upto:])
    return [columns.tobytes(), *rows, rest]
