"""Schema: what one element is made of, and the way between elements and columns."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping as MappingType, NoReturn, Optional as Maybe, Sequence, Tuple

import numpy as np
import treetensor.torch as ttorch

from ding_store.errors import SchemaMismatch

from .batch import collator
from .decode import Columns, joiner
from .encode import Column, Misfit, splitter, write
from .infer import infer, merge_all
from .nodes import Leaf, Mapping, Node, NotColumnar, Unrolled, from_json, leaf_names, merge, to_json

FORMAT = 1


class Schema:
    """
    Overview:
        The leaves of one element: path, dtype, shape, and the containers they are in. Immutable.
        Tensors come back on the CPU and without gradients, wherever they were.
    """

    def __init__(self, root: Node) -> None:
        self._root = root
        self._columns: List[Column] = []
        self._split = splitter(root, '', (), self._columns)
        self._join = joiner(root)
        self._names = [column.name for column in self._columns]
        self._sequence = isinstance(root, Unrolled)
        item = root.item if isinstance(root, Unrolled) else root
        self._collate = None
        if isinstance(item, Mapping) and all(type(key) is str for key in item.keys):
            lead = (root.length,) if isinstance(root, Unrolled) else ()
            self._collate = collator(item, '', lead, True)
            self._cat_1dim = _joins_single(item)

    @classmethod
    def infer(cls, elements: Sequence[Any]) -> 'Schema':
        """
        Overview:
            The schema that fits all of these elements.
        Raises:
            - NotColumnar: An element holds what columns cannot; names its path.
            - SchemaMismatch: They differ among themselves in more than what is None; names the path.
        """
        if not len(elements):
            raise ValueError('a schema needs at least one element')
        for element in elements:
            if element is None or isinstance(element, (bool, int, float, str, bytes, np.generic)):
                raise NotColumnar(
                    f'element {element!r:.80} is a bare {type(element).__name__}, no array and no container'
                )
        root = merge_all(infer(element) for element in elements)
        if not leaf_names(root):
            raise NotColumnar(f'element {elements[0]!r:.80} holds no array')
        return cls(root)

    def merge(self, other: 'Schema') -> 'Schema':
        """
        Overview:
            The schema that fits the elements of both: a leaf or subtree that is None in one of them becomes optional.
        Raises:
            - SchemaMismatch: They differ in anything else; names the path.
        """
        root = merge(self._root, other._root)
        return self if root == self._root else Schema(root)

    def columns(self) -> Dict[str, Tuple[np.dtype, Tuple[int, ...]]]:
        """What storage allocates per row: name -> (dtype, shape)."""
        return {column.name: (column.dtype, column.shape) for column in self._columns}

    @property
    def row_bytes(self) -> int:
        return sum(column.dtype.itemsize * int(np.prod(column.shape)) for column in self._columns)

    def encode(self, elements: Sequence[Any]) -> Dict[str, np.ndarray]:
        """
        Overview:
            Columns of these elements, ``{name: (n, *shape)}``; nothing of the elements is kept.
        Raises:
            - SchemaMismatch: An element does not fit. Where ``merge`` with its own schema helps, the message says so.
        """
        n = len(elements)
        columns = {column.name: np.empty((n,) + column.shape, column.dtype) for column in self._columns}
        self.encode_into(columns, 0, elements)
        return columns

    def encode_into(self, columns: MappingType[str, np.ndarray], start: int, elements: Sequence[Any]) -> None:
        """
        Overview:
            Write elements to rows ``start ...`` of allocated columns. All or nothing: everything is checked before the
            first byte is written. Rows of what is None become zero.
        Raises:
            - SchemaMismatch: An element does not fit, or a column is missing or has another dtype or shape.
        """
        n = len(elements)
        blocks: List[Any] = []
        try:
            self._split(elements, None, blocks)
        except Misfit:
            self._refuse(elements)
        for column in self._columns:
            place = columns.get(column.name)
            if place is None or place.dtype != column.dtype or place[start : start + n].shape != (n,) + column.shape:
                raise SchemaMismatch(
                    f'column {column.name!r}: no room for {n} rows of {column.dtype} {column.shape} at {start}'
                )
        write(blocks, columns, start, n)

    def _refuse(self, elements: Sequence[Any]) -> NoReturn:
        for i, element in enumerate(elements):
            root = merge(self._root, Schema.infer([element])._root)
            if root != self._root:
                raise SchemaMismatch(f'element {i} is None, or holds something, where others do not: merge its schema')
        raise SchemaMismatch('an element does not fit its schema')

    def decode(self, columns: Columns) -> List[Any]:
        """
        Overview:
            The elements that were encoded, equal in containers, dtypes, shapes and values. Tensors and arrays are views
            of the columns, or of copies of them where those are read-only.
            A missing presence column means that all are there; where the columns of an optional leaf or subtree are
            missing, too, it is None in all rows: such columns were encoded under an older schema.
        Raises:
            - SchemaMismatch: A column is missing or of another dtype or shape.
        """
        return list(self._join(columns, self._num_rows(columns)))

    def decode_batch(self, columns: Columns, cat_1dim: Maybe[bool] = None) -> ttorch.Tensor:
        """
        Overview:
            One batch, as collating the list of elements would make it, but without making them: a tree whose leaves are
            views of the columns, ``(B, *shape)``, and ``(B,)`` for a leaf of shape ``(1,)``. Elements that are lists of
            T steps give leaves ``(B, T, *shape)``. What is None in all rows is None, what is None in some stays a list.
        Arguments:
            - cat_1dim (:obj:`Optional[bool]`): Whether leaves of shape ``(1,)`` lose that axis; by default as DI-engine's
              ``default_preprocess_learn`` decides: not for continuous actions.
        """
        if self._collate is None:
            raise SchemaMismatch(f'only elements that are mappings with str keys make a batch, not {self._root}')
        index = (slice(None),) * (2 if self._sequence else 1)
        cat = self._cat_1dim if cat_1dim is None else cat_1dim
        return ttorch.Tensor(self._collate(columns, self._num_rows(columns), index, cat))

    def _num_rows(self, columns: Columns) -> int:
        for name in self._names:
            if name in columns:
                return len(columns[name])
        raise SchemaMismatch(f'none of the columns {self._names} is there, only {sorted(columns)}')

    def to_json(self) -> Dict[str, Any]:
        return {'format': FORMAT, 'element': to_json(self._root)}

    @classmethod
    def from_json(cls, data: MappingType[str, Any]) -> 'Schema':
        """
        Overview:
            The schema that ``to_json`` gave. Nothing that it names is imported: a namedtuple that this process has not
            loaded comes back as one made here with the same name and fields.
        Raises:
            - SchemaMismatch: It is no schema, or of a newer format.
        """
        if not isinstance(data, dict) or data.get('format') != FORMAT:
            raise SchemaMismatch(f'no schema of format {FORMAT}: {str(data)[:200]!r}')
        return cls(from_json(data['element']))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self._root == other._root

    def __hash__(self) -> int:
        return hash(self._root)

    def __repr__(self) -> str:
        leaves = ', '.join(f'{column.name}: {column.dtype} {column.shape}' for column in self._columns)
        return f'Schema({leaves})'


def _joins_single(item: Mapping) -> bool:
    action = dict(item.items).get('action')
    if action is None:
        return True
    return isinstance(action, Leaf) and action.kind in ('tensor', 'array') and action.dtype == 'int64'
