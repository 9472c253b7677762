"""Step-by-step reads of rows that are whole sequences: lists of T steps, or dicts of such lists."""

from __future__ import annotations

from functools import lru_cache
from typing import List, Optional, Tuple
from typing import Mapping as MappingType

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.sequences.states import STATE
from ding_store.buffer.table.cold import ColdColumn, ColdRead, Put, read_cold
from ding_store.buffer.table.encodings import Column
from ding_store.buffer.table.outputs import WarmOutputs
from ding_store.columns import Schema
from ding_store.columns.nodes import Leaf, Mapping, Node, Nothing, Unrolled, leaf_names
from ding_store.columns.nodes import Optional as OptionalNode
from ding_store.errors import SchemaMismatch

#: Columns of a table, and arrays of values, by name.
Sources = MappingType[str, Column]
Columns = MappingType[str, Array]


def is_sequence(schema: Optional[Schema]) -> bool:
    """Return whether elements are sequences of one length, as ``StepReader`` needs. False for Python objects."""
    lengths: List[int] = []
    return schema is not None and _parts(schema.root, lengths)[0] is not None and len(set(lengths)) == 1


@lru_cache(maxsize=16)
def can_be_joined(schema: Schema) -> bool:
    """
    Return whether time-major batches of such sequences can be joined. No leaf may be ragged. Only the states before
    the steps may be None in some rows: whether another leaf is a tensor would depend on the rows that are drawn.
    """
    if not is_sequence(schema) or schema.ragged:
        return False
    steps, rest = _parts(schema.root, [])
    return parts_can_be_joined(steps, rest)


def parts_can_be_joined(steps: Optional[Node], rest: Optional[Node]) -> bool:
    """Return whether only the states before the steps may be None in some rows, see ``can_be_joined``."""
    parts = [rest, *(child for key, child in steps.items if key != STATE)] if isinstance(steps, Mapping) else [steps]
    return not any(part is not None and has_optional(part) for part in parts)


@lru_cache(maxsize=64)
def has_optional(node: Node) -> bool:
    """Return whether a leaf or a container below a node, or the node itself, is None in some rows."""
    if isinstance(node, OptionalNode):
        return True
    if isinstance(node, (Leaf, Nothing)):
        return False
    if isinstance(node, Unrolled):
        return has_optional(node.item)
    children = [child for _, child in node.items] if isinstance(node, Mapping) else node.items
    return any(map(has_optional, children))


class StepReader:
    """
    Overview:
        Reads such rows time-major: one gather of steps per column, into ``(T * B, *shape)``.
    Arguments:
        - schema (:obj:`Schema`): The schema of the rows.
    Raises:
        - SchemaMismatch: The rows are not sequences of one length.
    """

    def __init__(self, schema: Schema) -> None:
        lengths: List[int] = []
        steps, rest = _parts(schema.root, lengths)
        if steps is None or len(set(lengths)) != 1:
            raise SchemaMismatch(
                'time-major batches need elements that are lists of T steps, or dicts of such lists. The '
                f'element is a {schema.root}, and its lists have lengths {sorted(set(lengths))}.'
            )
        self.schema, self.length = schema, lengths[0]
        self.steps, self.rest = Schema(steps), Schema(rest) if rest is not None else None
        self._outputs = WarmOutputs(self.steps.columns())
        self._rest_outputs = WarmOutputs(self.rest.columns() if self.rest is not None else {})
        self._seen: Tuple[Sources, Sources] = ({}, {})

    def take(
        self, slots: Array, columns: Sources, cold: Optional[MappingType[str, ColdColumn]] = None
    ) -> Tuple[Columns, Columns]:
        """
        Copy the steps ``(T * B, *shape)`` and the other leaves ``(B, *shape)`` out of columns. The first steps of all
        rows come first. Columns in ``cold`` are read from disk.
        """
        places = (slots * self.length + np.arange(self.length)[:, None]).reshape(-1)
        if not cold:
            return self._outputs.gather(self._by_step(columns), places)[0], self._rest_outputs.gather(columns, slots)[0]
        steps, reads = self._outputs.take(len(places)), []
        for name, column in self._by_step(columns).items():
            out, kept_as = steps[name], _kept_as(name)
            if kept_as in cold:
                put = _put_steps(columns[kept_as], out.reshape(self.length, len(slots), *out.shape[1:]))
                reads.append(ColdRead(cold[kept_as], slots, put))
            else:
                column.read_into(places, out)
        rest = self._rest_outputs.take(len(slots))
        for name, out in rest.items():
            columns[name].read_into(slots, out, cold.get(name))
        read_cold(reads)
        return steps, rest

    def _by_step(self, columns: Sources) -> Sources:
        """Return views of the columns with a row per step. The same columns give the same views."""
        of, by_step = self._seen
        if of is not columns:
            by_step = {name: columns[_kept_as(name)].by_step() for name in self.steps.columns()}
            self._seen = columns, by_step
        return by_step


def _kept_as(name: str) -> str:
    """Return a step column's name in the table. A presence column has one mark per time axis above it."""
    return name + '?' if name.endswith('?') else name


def _put_steps(column: Column, out: Array) -> Put:
    """Return a function that writes a stored row of this column into ``(T, B, *shape)``."""
    return lambda place, row: column.put(row, out[:, place])


def _parts(node: Node, lengths: List[int]) -> Tuple[Optional[Node], Optional[Node]]:
    """Return the node of a step, and the node of what a sequence has as a whole."""
    if isinstance(node, Unrolled):
        lengths.append(node.length)
        return node.item, None
    if not isinstance(node, Mapping):
        return None, node
    parts = [(key, *_parts(child, lengths)) for key, child in node.items]
    steps = tuple((key, step) for key, step, _ in parts if step is not None)
    rest = tuple((key, other) for key, _, other in parts if other is not None)
    return (
        Mapping(node.kind, steps) if steps else None,
        Mapping(node.kind, rest) if any(leaf_names(other) for _, other in rest) else None,
    )
