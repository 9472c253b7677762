"""Schema: what one element is made of, and the way between elements and columns."""

from __future__ import annotations

from reprlib import repr as short
from typing import Any, Collection, Dict, List, NoReturn, Optional, Sequence, Set, Tuple, Union
from typing import Mapping as MappingType

import numpy as np
import treetensor.torch as ttorch

from ding_store.errors import SchemaMismatch

from .blocks import Block, Column, Misfit, make_columns, write
from .collate import batcher, cat_1dim_of, plain_batch
from .decode import Columns, joiner
from .encode import splitter
from .infer import MAPPING_TYPES, infer, merge_all, refusal
from .json_form import from_json, to_json
from .merge import NotColumnar, merge
from .nodes import Mapping, Node, Nothing, Positional, Unrolled, leaf_names
from .nodes import Optional as OptionalNode

#: Of what ``to_json`` gives; another one is refused.
FORMAT = 1


class Schema:
    """
    Overview:
        The leaves of one element: path, dtype, shape, and the containers that they are in. Immutable.

        Elements come back equal in containers, dtypes, shapes, values and Python types, except that tensors come back
        dense, on the CPU and without gradients. bfloat16 and float8 are stored as their bits. A list of two or more
        items that are built alike, such as an unrolled sequence, is one set of leaves with a leading time axis.
        Whether a list's items are alike must not depend on which of them are None: ``[x, None]`` and ``[None, y]``
        do not fit one schema if x and y have different shapes.
    """

    def __init__(self, root: Node) -> None:
        self._root = root
        self._columns: List[Column] = []
        self._split = splitter(root, '', (), self._columns)
        self._join = joiner(root)
        self._batch = batcher(root)
        #: Makes batches of columns that are used again and again; None: only ``decode_batch`` does.
        self.plain_batch = plain_batch(root)
        self._hash = hash(root)

    @classmethod
    def infer(cls, elements: Sequence[Any], may_be_empty: bool = False) -> Schema:
        """
        Overview:
            The schema that fits all of these elements.
        Arguments:
            - may_be_empty (:obj:`bool`): Whether they may be without any array: for a schema that is to be merged.
        Raises:
            - NotColumnar: An element holds what columns cannot, such as a str or an object; names its path.
            - SchemaMismatch: They differ among themselves in more than what is None; names the path.
        """
        if not len(elements):
            raise NotColumnar('a schema is inferred from one element or more, not from none')
        root = merge_all([_root_of(element) for element in elements])
        if not may_be_empty and not leaf_names(root):
            raise refusal(elements[0], '', 'there is no array in it')
        return cls(root)

    @property
    def root(self) -> Node:
        """What one element is."""
        return self._root

    @property
    def cat_1dim(self) -> bool:
        """What ``decode_batch`` takes for ``cat_1dim`` by default."""
        return not isinstance(self._root, Mapping) or cat_1dim_of(self._root)

    def merge(self, other: Schema) -> Schema:
        """
        Overview:
            The schema that fits the elements of both: a leaf or subtree that is None in one of them becomes optional.
        Raises:
            - SchemaMismatch: They differ in anything else; names the path.
        """
        root = merge(self._root, other._root)
        return self if root == self._root else Schema(root)

    @property
    def is_list(self) -> bool:
        """Whether an element is a list."""
        return _items_of(self._root) is not None

    @property
    def kinds_of_items(self) -> Set[bool]:
        """Of a schema of lists: whether items of them are mappings, or no mappings, or there are both."""
        held = [node.node if isinstance(node, OptionalNode) else node for node in _items_of(self._root) or ()]
        return {isinstance(node, Mapping) for node in held if not isinstance(node, Nothing)}

    @staticmethod
    def kinds_in(items: Sequence[Any]) -> Set[bool]:
        """As ``kinds_of_items``, of a list that may be in no columns."""
        return {type(item) in MAPPING_TYPES for item in items if item is not None}

    def check_items(self, other: Schema) -> None:
        """
        Overview:
            Of two schemas of lists: whether the items of the other are built as those of this one, if these are all
            built alike. How many there are, and what of them is None, may differ.
        Raises:
            - SchemaMismatch: They are not; names the path.
        """
        try:
            item = merge_all(_items_of(self._root) or ())
        except SchemaMismatch:
            return
        merge_all([item, *(_items_of(other._root) or ())])

    def columns(self) -> Dict[str, Tuple[np.dtype, Tuple[int, ...]]]:
        """What storage allocates per row: name -> (dtype, shape), presence columns included."""
        return {column.name: (column.dtype, column.shape) for column in self._columns}

    @property
    def row_bytes(self) -> int:
        return sum(column.dtype.itemsize * int(np.prod(column.shape)) for column in self._columns)

    def encode(self, elements: Sequence[Any]) -> Dict[str, np.ndarray]:
        """
        Overview:
            New columns of these elements, ``{name: (n, *shape)}``, which hold on to nothing of theirs.
        Raises:
            - SchemaMismatch: An element does not fit. If only in that something is None, or is not, the schema merged
              with that of the element fits both.
        """
        if not len(elements):
            return {column.name: np.empty((0,) + column.shape, column.dtype) for column in self._columns}
        columns: Dict[str, np.ndarray] = self.encode_parts(elements, ())
        return columns

    def encode_parts(self, elements: Sequence[Any], listed: Collection[str]) -> Dict[str, Any]:
        """
        Overview:
            As ``encode`` of one element or more, for who converts columns of these names anyway: where the elements
            have large arrays for each row, or each of its steps, such a column is the list of those, uncopied.
        """
        return make_columns(self._blocks(elements), len(elements), listed)

    def encode_into(
        self, columns: MappingType[str, np.ndarray], where: Union[int, np.ndarray], elements: Sequence[Any]
    ) -> None:
        """
        Overview:
            Write elements to rows of allocated columns, of which they must not be views. All or nothing: everything is
            checked before the first byte is written. What is None is written as zeros.
        Arguments:
            - where: The first of consecutive rows, or the row of each element (:obj:`np.ndarray`, int).
        Raises:
            - SchemaMismatch: An element does not fit, or a column is missing, too short, or has another dtype or shape.
        """
        n = len(elements)
        if not n:
            return
        blocks = self._blocks(elements)
        slots: Optional[np.ndarray] = None
        if isinstance(where, np.ndarray):
            slots, first, last = where, int(where.min()), int(where.max())
        else:
            first, last = where, where + n - 1
        places = [_column_in(columns, block[0], first, last) for block in blocks]
        for block, place in zip(blocks, places):
            write(block, place[first : last + 1] if slots is None else place, slots, is_far=True)

    def check(self, columns: Columns, num_rows: int, narrowed: Collection[str] = ()) -> None:
        """
        Overview:
            Whether these are what ``encode`` makes of so many elements.
        Arguments:
            - narrowed (:obj:`Collection[str]`): Names of those of float32 whose values stand there as uint8.
        Raises:
            - SchemaMismatch: They are not; names the column.
        """
        specs = self.columns()
        if specs.keys() != columns.keys():
            raise SchemaMismatch(f'columns {sorted(columns)} where {sorted(specs)} are expected')
        for name in narrowed:
            if name not in specs or specs[name][0] != np.float32:
                raise SchemaMismatch(f'column {name!r}: expected uint8 for float32, but that is not what it holds')
        for name, column in columns.items():
            dtype, shape = specs[name]
            if name in narrowed:
                dtype = np.dtype(np.uint8)
            if column.dtype != dtype or column.shape != (num_rows, *shape):
                found = f'{column.dtype} {column.shape}'
                raise SchemaMismatch(f'column {name!r}: expected {dtype} {(num_rows, *shape)}, got {found}')

    def decode(self, columns: Columns) -> List[Any]:
        """
        Overview:
            The elements that were encoded. Tensors and arrays are views of the columns, or of copies of them where
            they are read-only, as torch cannot keep anyone from writing to a tensor.
            Where the columns of an optional leaf or subtree are missing it is None in all rows; where just its presence
            column is, it is in all of them: so it was before the schema knew that it is optional.
        Raises:
            - SchemaMismatch: A column is missing or of another dtype or shape.
        """
        return list(self._join(columns, self._num_rows(columns)))

    def decode_batch(self, columns: Columns, cat_1dim: Optional[bool] = None) -> ttorch.Tensor:
        """
        Overview:
            One batch as ``default_collate`` makes it of the list of elements, without making them: a tree of views of
            the columns, ``(B, *shape)``, and ``(B,)`` for shape ``(1,)``. Elements that are lists of T steps give
            ``(B, T, *shape)``. What is None in all rows is None, what is None in some a list of B values.
        Arguments:
            - cat_1dim (:obj:`Optional[bool]`): Whether shape ``(1,)`` becomes ``(B,)``; by default as DI-engine's
              ``default_preprocess_learn`` decides it: not if the action is continuous.
        Raises:
            - SchemaMismatch: As ``decode``; or the elements are no mappings with str keys.
        """
        if self._batch is None:
            raise SchemaMismatch(f'only mappings with str keys make a batch; the element is a {self._root}')
        return self._batch(columns, self._num_rows(columns), cat_1dim)

    def to_json(self) -> Dict[str, Any]:
        return {'format': FORMAT, 'element': to_json(self._root)}

    @classmethod
    def from_json(cls, data: MappingType[str, Any]) -> Schema:
        """
        Overview:
            The schema that ``to_json`` gave, perhaps in another process. Nothing that it names is imported: a
            namedtuple that this process has not loaded is replaced by one made here, with the same name and fields.
        Raises:
            - SchemaMismatch: It is no schema, or of another format.
        """
        if not isinstance(data, dict) or data.get('format') != FORMAT:
            raise SchemaMismatch(f'no schema of format {FORMAT}: {short(data)}')
        try:
            return cls(from_json(data.get('element')))
        except (ValueError, OverflowError, MemoryError) as e:
            # numpy's, of dimensions that no array can have.
            raise SchemaMismatch(f'no schema of an element: {short(data)} ({e})') from e

    def _blocks(self, elements: Sequence[Any]) -> List[Block]:
        blocks: List[Block] = []
        try:
            self._split(elements, None, blocks)
        except Misfit:
            is_misfit = True
        else:
            is_misfit = False
        if is_misfit:  # Here, so that the error has no other one behind it.
            self._refuse(elements)
        return blocks

    def _refuse(self, elements: Sequence[Any]) -> NoReturn:
        for element in elements:
            merge(self._root, _root_of(element), strict=True)
        raise SchemaMismatch(f'an element does not fit {self}')

    def _num_rows(self, columns: Columns) -> int:
        for column in self._columns:
            if column.name in columns:
                return len(columns[column.name])
        raise SchemaMismatch(f'none of the columns {list(self.columns())} is there, only {sorted(columns)}')

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self._root == other._root

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Tuple[Any, ...]:
        return Schema, (self._root,)

    def __repr__(self) -> str:
        leaves = ', '.join(f'{column.name}: {column.dtype} {column.shape}' for column in self._columns)
        return f'Schema({leaves})'


def _root_of(element: Any) -> Node:
    if element is None or isinstance(element, (bool, int, float, complex, str, bytes, np.generic)):
        raise refusal(element, '', 'an element is an array or a container of arrays')
    try:
        return infer(element)
    except RecursionError as e:
        raise refusal(element, '', 'it is nested too deeply, or contains itself') from e


def _items_of(root: Node) -> Optional[Tuple[Node, ...]]:
    """What the items of a list are; None for what is no list."""
    if isinstance(root, Unrolled):
        return (root.item,)
    return root.items if isinstance(root, Positional) and root.kind == 'list' else None


def _column_in(columns: Columns, column: Column, first: int, last: int) -> np.ndarray:
    """Where to write rows of a column; that they are there is checked."""
    found = columns.get(column.name)
    if found is None or found.dtype != column.dtype or found.shape[1:] != column.shape:
        what = 'no such column' if found is None else f'{found.dtype} {found.shape[1:]}'
        raise SchemaMismatch(f'column {column.name!r}: expected {column.dtype} {column.shape} per row, got {what}')
    if not 0 <= first <= last < len(found):
        raise SchemaMismatch(f'column {column.name!r}: rows {first} to {last + 1} of {len(found)} do not exist')
    return found
