"""The schema: the leaves of one element, and the conversion between elements and columns."""

from __future__ import annotations

from reprlib import repr as short
from typing import Any, Collection, Dict, List, NoReturn, Optional, Sequence, Set, Tuple, Union
from typing import Mapping as MappingType

import numpy as np
import treetensor.torch as ttorch

from ding_store.errors import SchemaMismatch

from .blocks import Block, Column, Misfit, items_of, make_columns, write
from .collate import batcher, cat_1dim_of, plain_batch
from .decode import Columns, joiner
from .encode import splitter
from .infer import MAPPING_TYPES, infer, merge_all, refusal
from .json_form import from_json, to_json
from .merge import NotColumnar, merge
from .nodes import Mapping, Node, Nothing, Positional, Unrolled, leaf_names
from .nodes import Optional as OptionalNode
from .ragged import Items, Names, check_names, ragged_leaves, with_ragged

#: Versions of the format of ``to_json``: without and with ragged leaves. Other versions are refused.
FORMAT, FORMAT_OF_RAGGED = 1, 2


class Schema:
    """
    Overview:
        The leaves of one element: path, dtype, shape, and the containers that hold them. Immutable.

        Decoded elements equal the encoded ones in containers, dtypes, shapes, values and Python types. Only tensors
        change: they become dense, on the CPU and without gradients. bfloat16 and float8 are stored as their bits. A
        list of at least two items with the same structure, such as an unrolled sequence, becomes one set of leaves.
        These have a leading time axis. The structure of a list's items must not depend on which of them are None: ``[x,
        None]`` and ``[None, y]`` do not fit one schema if x and y have different shapes.
    """

    def __init__(self, root: Node) -> None:
        self._root = root
        self._columns: List[Column] = []
        self._split = splitter(root, '', (), self._columns)
        self._join = joiner(root)
        self._batch = batcher(root)
        #: Makes batches of columns that are reused. None if only ``decode_batch`` can make batches.
        self.plain_batch = plain_batch(root)
        self._hash = hash(root)
        #: The ragged leaves, in the order of their columns: name -> dtype and shape of one item. Their columns hold
        #: lengths.
        self.ragged = ragged_leaves(root)

    @classmethod
    def infer(
        cls, elements: Sequence[Any], may_be_empty: bool = False, ragged: Names = (), may_lack: bool = False
    ) -> Schema:
        """
        Overview:
            Return the schema that fits all of these elements.
        Arguments:
            - may_be_empty (:obj:`bool`): Allow elements without any array, for a schema that will be
              merged.
            - ragged (:obj:`Union[str, Collection]`): Names of leaves whose first dimension varies, or 'all'.
            - may_lack (:obj:`bool`): Allow elements without some of these leaves.
        Raises:
            - NotColumnar: An element holds something that columns cannot, such as a str or an object. Names its path.
            - SchemaMismatch: The elements differ in more than what is None. Names the path.
        """
        if not len(elements):
            raise NotColumnar('a schema is inferred from at least one element, not from none')
        root = merge_all(
            [with_ragged(_root_of(element), ragged) if ragged else _root_of(element) for element in elements]
        )
        if not may_lack:
            check_names(root, ragged)
        if not may_be_empty and not leaf_names(root):
            raise refusal(elements[0], '', 'it contains no array')
        return cls(root)

    @property
    def root(self) -> Node:
        """The node that describes one element."""
        return self._root

    @property
    def cat_1dim(self) -> bool:
        """Default of ``cat_1dim`` in ``decode_batch``."""
        return not isinstance(self._root, Mapping) or cat_1dim_of(self._root)

    def merge(self, other: Schema) -> Schema:
        """
        Overview:
            Return the schema that fits the elements of both: a leaf or subtree that is None in one of them becomes
            optional.
        Raises:
            - SchemaMismatch: The schemas differ in anything else. Names the path.
        """
        root = merge(self._root, other._root)
        return self if root == self._root else Schema(root)

    def with_ragged(self, names: Names) -> Schema:
        """Return the schema in which these leaves are ragged. Raises SchemaMismatch if one of them cannot be."""
        root = with_ragged(self._root, names)
        check_names(root, names)
        return Schema(root)

    @property
    def is_list(self) -> bool:
        """True if an element is a list."""
        return _items_of(self._root) is not None

    @property
    def kinds_of_items(self) -> Set[bool]:
        """Kinds of items in a schema of lists: True for mappings, False for other items."""
        held = [node.node if isinstance(node, OptionalNode) else node for node in _items_of(self._root) or ()]
        return {isinstance(node, Mapping) for node in held if not isinstance(node, Nothing)}

    @staticmethod
    def kinds_in(items: Sequence[Any]) -> Set[bool]:
        """Return the kinds of a list's items, see ``kinds_of_items``. Columns need not be able to hold the list."""
        return {type(item) in MAPPING_TYPES for item in items if item is not None}

    def check_items(self, other: Schema) -> None:
        """
        Overview:
            Check that the items of another schema of lists have the structure of this schema's items. If these differ
            among themselves, accept any. The number of items and what of them is None may differ.
        Raises:
            - SchemaMismatch: The structures differ. Names the path.
        """
        try:
            item = merge_all(_items_of(self._root) or ())
        except SchemaMismatch:
            return
        merge_all([item, *(_items_of(other._root) or ())])

    def columns(self) -> Dict[str, Tuple[np.dtype, Tuple[int, ...]]]:
        """Return what storage allocates per row: name -> (dtype, shape), presence columns included."""
        return {column.name: (column.dtype, column.shape) for column in self._columns}

    @property
    def row_bytes(self) -> int:
        return sum(column.dtype.itemsize * int(np.prod(column.shape)) for column in self._columns)

    def encode(self, elements: Sequence[Any]) -> Dict[str, np.ndarray]:
        """
        Overview:
            Return new columns of these elements, ``{name: (n, *shape)}``, which share no memory with them.
        Raises:
            - SchemaMismatch: An element does not fit. If it differs only in what is None, the schema merged with the
              element's fits both.
        """
        if not len(elements):
            return {column.name: np.empty((0,) + column.shape, column.dtype) for column in self._columns}
        columns: Dict[str, np.ndarray] = self.encode_parts(elements, ())
        return columns

    def encode_parts(self, elements: Sequence[Any], listed: Collection[str]) -> Dict[str, Any]:
        """
        Overview:
            Encode one element or more for a caller that converts the ``listed`` columns itself. If the elements hold
            large arrays for each row or step, such a column is the list of these arrays. They are not copied.
        """
        return make_columns(self._blocks(elements), len(elements), listed)

    def encode_ragged(
        self, elements: Sequence[Any], listed: Collection[str] = ()
    ) -> Tuple[Dict[str, Any], Dict[str, List[np.ndarray]]]:
        """
        Overview:
            Encode elements with ragged leaves, see ``encode_parts``.
        Returns:
            - columns (:obj:`Dict`): The columns, which hold the lengths of ragged leaves.
            - items (:obj:`Dict`): The arrays of each ragged leaf by row. They are not copied.
        """
        blocks, num_rows = self._blocks(elements), len(elements)
        items = {block[0].name: items_of(block, num_rows) for block in blocks if isinstance(block[1], Items)}
        return make_columns(blocks, num_rows, listed), items

    def encode_one(self, element: Any) -> Tuple[Dict[str, Any], Dict[str, np.ndarray]]:
        """
        Overview:
            Encode one element with ragged leaves, like ``encode_ragged``, with fewer arrays.
        Returns:
            - columns (:obj:`Dict`): The values of the columns.
            - items (:obj:`Dict`): The array of each ragged leaf. It is not copied.
        """
        columns: Dict[str, Any] = {}
        items: Dict[str, np.ndarray] = {}
        for block in self._blocks([element]):
            column, values, rows = block
            name = column.name
            if not isinstance(values, Items):
                columns[name] = make_columns([block], 1, ())[name][0]
            else:
                items[name] = array = values[0] if rows is None else items_of(block, 1)[0]
                columns[name] = len(array)
        return columns, items

    def encode_into(
        self, columns: MappingType[str, np.ndarray], where: Union[int, np.ndarray], elements: Sequence[Any]
    ) -> None:
        """
        Overview:
            Write elements to rows of allocated columns, of which they must not be views. All or nothing: everything is
            checked before the first byte is written. None is written as zeros.
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
            Check that these columns are what ``encode`` returns for ``num_rows`` elements.
        Arguments:
            - narrowed (:obj:`Collection[str]`): Names of float32 columns whose values are stored as uint8.
        Raises:
            - SchemaMismatch: A column differs. Names the column.
        """
        specs = self.columns()
        if specs.keys() != columns.keys():
            raise SchemaMismatch(f'columns {sorted(columns)} where {sorted(specs)} are expected')
        for name in narrowed:
            if name not in specs or specs[name][0] != np.float32:
                raise SchemaMismatch(f'column {name!r}: only float32 columns may be stored as uint8')
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
            Return the elements that were encoded. Their tensors and arrays are views of the columns. Read-only columns
            are copied first, since torch cannot protect a tensor from writes. An optional leaf or subtree without
            columns is None in all rows. If only its presence column is missing, it is present in all rows: the columns
            are older than the schema that made it optional.
        Raises:
            - SchemaMismatch: A column is missing or has another dtype or shape.
        """
        return list(self._join(columns, self._num_rows(columns)))

    def decode_batch(self, columns: Columns, cat_1dim: Optional[bool] = None) -> ttorch.Tensor:
        """
        Overview:
            Return the batch that ``default_collate`` makes of the list of elements, without making the elements. The
            batch is a tree of views of the columns, ``(B, *shape)``, and ``(B,)`` for shape ``(1,)``. Elements that are
            lists of T steps give ``(B, T, *shape)``. A leaf that is None in all rows is None. One that is None in some
            rows is a list of B values.
        Arguments:
            - cat_1dim (:obj:`Optional[bool]`): Convert shape ``(1,)`` to ``(B,)``. By default as in DI-engine's
              ``default_preprocess_learn``: not if the action is continuous.
        Raises:
            - SchemaMismatch: See ``decode``, or the elements are not mappings with str keys.
        """
        if self._batch is None:
            raise SchemaMismatch(f'only mappings with str keys make a batch; the element is a {self._root}')
        return self._batch(columns, self._num_rows(columns), cat_1dim)

    def to_json(self) -> Dict[str, Any]:
        return {'format': FORMAT_OF_RAGGED if self.ragged else FORMAT, 'element': to_json(self._root)}

    @classmethod
    def from_json(cls, data: MappingType[str, Any]) -> Schema:
        """
        Overview:
            Return the schema that ``to_json`` wrote, perhaps in another process. No name in it is imported: a
            namedtuple that this process has not loaded is replaced by one with the same name and fields.
        Raises:
            - SchemaMismatch: The data are not a schema, or have another format.
        """
        if not isinstance(data, dict) or data.get('format') not in (FORMAT, FORMAT_OF_RAGGED):
            raise SchemaMismatch(f'not a schema of format {FORMAT} or {FORMAT_OF_RAGGED}: {short(data)}')
        try:
            made = cls(from_json(data.get('element')))
        except (ValueError, OverflowError, MemoryError) as e:
            # numpy raises these for dimensions that no array can have.
            raise SchemaMismatch(f'not a schema of an element: {short(data)} ({e})') from e
        if bool(made.ragged) != (data['format'] == FORMAT_OF_RAGGED):
            raise SchemaMismatch(f'not a schema of an element: {short(data)} (a shape is that of another format)')
        return made

    def _blocks(self, elements: Sequence[Any]) -> List[Block]:
        blocks: List[Block] = []
        try:
            self._split(elements, None, blocks)
        except Misfit:
            is_misfit = True
        else:
            is_misfit = False
        if is_misfit:  # Outside the handler, so that the error has no context.
            self._refuse(elements)
        return blocks

    def _refuse(self, elements: Sequence[Any]) -> NoReturn:
        for element in elements:
            merge(self._root, with_ragged(_root_of(element), self.ragged), strict=True)
        raise SchemaMismatch(f'an element does not fit {self}')

    def _num_rows(self, columns: Columns) -> int:
        for column in self._columns:
            if column.name in columns:
                return len(columns[column.name])
        raise SchemaMismatch(f'none of the columns {list(self.columns())} exists, only {sorted(columns)}')

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
    """Return the nodes of a list's items, or None if the root is not a list."""
    if isinstance(root, Unrolled):
        return (root.item,)
    return root.items if isinstance(root, Positional) and root.kind == 'list' else None


def _column_in(columns: Columns, column: Column, first: int, last: int) -> np.ndarray:
    """Return the array to write a column to, after checking that it has these rows."""
    found = columns.get(column.name)
    if found is None or found.dtype != column.dtype or found.shape[1:] != column.shape:
        what = 'no such column' if found is None else f'{found.dtype} {found.shape[1:]}'
        raise SchemaMismatch(f'column {column.name!r}: expected {column.dtype} {column.shape} per row, got {what}')
    if not 0 <= first <= last < len(found):
        raise SchemaMismatch(f'column {column.name!r}: rows {first} to {last + 1} of {len(found)} do not exist')
    return found
