"""Plan of a row's measurement: the whole replay if memory allows, otherwise its bytes and its index separately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from ding_store.compare.rows import Row
from ding_store.errors import ConfigError

#: Bytes of DequeBuffer per element besides its payload, for Python objects, an index and metas. Measured: 6.0 KB.
STOCK_OBJECT_BYTES = 6000
#: Share of the budget that the elements take when the index is measured.
INDEX_SHARE = 0.25


@dataclass(frozen=True)
class Part:
    """
    Overview:
        A replay that fits into memory. ``kind`` is 'whole', 'bytes' or 'index'. 'bytes' has elements of real size, as
        many as fit. 'index' has as many elements as the job, but smaller ones.
    """

    kind: str
    row: Row
    length: int


def parts(row: Row, budget_bytes: float, max_length: Optional[int] = None) -> List[Part]:
    """
    Overview:
        Return the parts to measure of a row. The row's figures are the lower ones of its parts.
    Arguments:
        - budget_bytes (:obj:`float`): Payload bytes of one replay.
        - max_length (:obj:`Optional[int]`): Maximum length of any part, for quick runs.
    """
    length = min(row.length, max_length or row.length)
    if length == row.length and length * row.element_bytes <= budget_bytes:
        return [Part('whole', row, length)]
    fitting = min(int(budget_bytes // row.element_bytes), length)
    if fitting < row.batch:
        raise ConfigError(
            f'--memory {budget_bytes / 1e9:g} holds {fitting} elements of {row.name}: give it at least '
            f'{row.batch * row.element_bytes / 1e9:.2f}, for a batch of {row.batch}'
        )
    if fitting == length:
        return [Part('bytes', row, fitting)]
    return [
        Part('bytes', row, fitting),
        Part('index', row.smaller(INDEX_SHARE * budget_bytes / length), length),
    ]


def memory_needed(part: Part) -> float:
    """Return the bytes of both sides together, because both exist at the same time."""
    payload = part.length * part.row.element_bytes
    per_step = max(1, part.row.steps) * len(part.row.leaves)
    return 2 * payload + part.length * STOCK_OBJECT_BYTES * max(1.0, per_step / 8)
