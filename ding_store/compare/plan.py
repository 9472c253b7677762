"""How much of a row is measured at once: all of it where memory allows, else its bytes and its index one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from ding_store.compare.rows import Row
from ding_store.errors import ConfigError

#: What DequeBuffer keeps per element beside its payload: Python objects, an index, metas. Measured: 6.0 KB.
STOCK_OBJECT_BYTES = 6000
#: The index is measured with elements that take so much of the budget.
INDEX_SHARE = 0.25


@dataclass(frozen=True)
class Part:
    """
    Overview:
        A replay that fits: ``kind`` is 'whole'; or 'bytes', elements of real size and as many as fit; or 'index', as
        many elements as the job has, and smaller ones.
    """

    kind: str
    row: Row
    length: int


def parts(row: Row, budget_bytes: float, max_length: Optional[int] = None) -> List[Part]:
    """
    Overview:
        What to measure of a row; its figures are the lower ones of its parts.
    Arguments:
        - budget_bytes (:obj:`float`): Payload of one replay.
        - max_length (:obj:`Optional[int]`): Of any index, to be quick.
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
    """Of both sides together, which are there at the same time."""
    payload = part.length * part.row.element_bytes
    per_step = max(1, part.row.steps) * len(part.row.leaves)
    return 2 * payload + part.length * STOCK_OBJECT_BYTES * max(1.0, per_step / 8)
