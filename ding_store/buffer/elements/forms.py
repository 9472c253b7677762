"""
The rules that decide in which form elements are stored: in columns of one schema, or one by one. Lists of steps, such
as episodes, may differ in their length or structure. They are then stored one by one.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, NamedTuple, Optional, Sequence

from ding_store.columns import NotColumnar, Schema
from ding_store.columns.merge import VaryingLength
from ding_store.columns.ragged import Names
from ding_store.errors import SchemaMismatch

logger = logging.getLogger(__name__)


class Form(NamedTuple):
    """
    Overview:
        The form in which elements are to be stored.
    Arguments:
        - schema (:obj:`Optional[Schema]`): The schema of their columns. None: they are stored one by one.
        - difference (:obj:`Optional[Exception]`): Why that may be unintended, see ``tell``.
    """

    schema: Optional[Schema]
    difference: Optional[Exception] = None

    def tell(self) -> None:
        """Warn that elements leave the columns, if that may be unintended. Called once, when they do."""
        if self.difference is not None:
            logger.warning(
                'lists whose steps differ in more than their number (%s) are no longer in columns: '
                'all elements are stored one by one from now on, and sampled as lists',
                self.difference,
            )


def first_form(elements: Sequence[Any], path: Optional[str], ragged: Names = ()) -> Form:
    """
    Overview:
        Return the form for the first elements of a table, whose directory is ``path``.
    Arguments:
        - ragged (:obj:`Union[str, Collection]`): The ragged leaves. If there are any, elements must be in columns.
    Raises:
        - SchemaMismatch: They do not fit together, or are Python objects and there is a path.
    """
    try:
        return Form(Schema.infer(elements, ragged=ragged))
    except SchemaMismatch as e:
        if ragged:
            raise advised(e) from e
        return _one_by_one(None, elements, e, path)


def next_form(
    schema: Schema,
    merged: Callable[[Schema], Schema],
    elements: Sequence[Any],
    path: Optional[str],
    ragged: Names = (),
) -> Form:
    """
    Overview:
        Return the form for the elements in columns of ``schema`` and for new elements, which do not fit them.
    Arguments:
        - merged (:obj:`Callable`): Returns the schema that also holds elements of another schema.
    Raises:
        - SchemaMismatch: The new elements cannot be stored beside those before them.
    """
    try:
        return Form(merged(Schema.infer(elements, may_be_empty=True, ragged=ragged)))
    except SchemaMismatch as e:
        if ragged:
            raise advised(e) from e
        return _one_by_one(schema, elements, e, path)


def advised(error: SchemaMismatch) -> SchemaMismatch:
    """Return an error that names the option for leaves whose length varies, if that is the only difference."""
    if not isinstance(error, VaryingLength):
        return error
    option = f'ragged=({error.path!r},)' if error.path else "ragged='all'"
    return SchemaMismatch(f'{error}. If the first dimension varies, create the StoreBuffer with {option}.')


def check_fit(elements: Sequence[Any], path: Optional[str], ragged: Names = ()) -> None:
    """
    Overview:
        Check that an empty table, whose directory is ``path``, would accept these elements.
    Raises:
        - SchemaMismatch: It would not.
    """
    if first_form(elements, path, ragged).schema is None and path is not None:
        for element in elements:
            try:
                Schema.infer([element])
            except NotColumnar as e:
                raise refusal(path, e) from e


def refusal(path: str, reason: SchemaMismatch) -> SchemaMismatch:
    """Return the error for elements that a table with a path cannot hold."""
    return SchemaMismatch(
        f'elements with Python objects cannot be stored in {path!r}: {reason}. Use path=None, or elements of arrays, '
        'tensors and numbers, which may be lists of varying length.'
    )


def _one_by_one(schema: Optional[Schema], elements: Sequence[Any], reason: SchemaMismatch, path: Optional[str]) -> Form:
    """Return the form of elements without a common schema, if there may be such."""
    difference = _check_may_differ(schema, elements, advised(reason))
    if isinstance(reason, NotColumnar) and path is not None:
        raise refusal(path, reason) from reason
    return Form(None, difference)


def _check_may_differ(schema: Optional[Schema], elements: Sequence[Any], reason: SchemaMismatch) -> Optional[Exception]:
    """
    Overview:
        Check whether elements without a common schema may be stored one by one. The first element that does not fit the
        earlier ones decides. The result is therefore independent of which elements are pushed together.
    Arguments:
        - schema (:obj:`Optional[Schema]`): The schema of the existing elements, or None if there are none.
        - reason: The error that the common schema raised.
    Returns:
        - difference: The difference between the steps of two lists. None if only their number differs.
    Raises:
        - SchemaMismatch: They may not: lists are mixed with other elements, or dicts as steps with other steps.
          Otherwise ``reason``.
    """
    if not any(type(element) is list for element in elements):
        if schema is None and isinstance(reason, NotColumnar):
            return None
        raise reason
    for element in elements:
        try:
            other = Schema.infer([element])
            schema = other if schema is None else schema.merge(other)
            continue
        except SchemaMismatch as e:
            mismatch = e
        if schema is None:
            return None  # An object. All later elements are then objects as well.
        _check_is_list_beside(schema, element, mismatch)
        return None if isinstance(mismatch, NotColumnar) else _difference(schema, other)
    raise reason


def _check_is_list_beside(schema: Schema, element: Any, reason: SchemaMismatch) -> None:
    if type(element) is not list or not schema.is_list:
        raise reason
    theirs, others = schema.kinds_of_items, Schema.kinds_in(element)
    if theirs and others and theirs.isdisjoint(others):
        raise SchemaMismatch(
            f'a list of {_kind(others)} among lists of {_kind(theirs)}: push it to another buffer ({reason})'
        ) from reason


def _kind(kinds: Any) -> str:
    return 'dicts' if True in kinds else 'other values than dicts'


def _difference(schema: Schema, other: Schema) -> Optional[Exception]:
    try:
        schema.check_items(other)
    except SchemaMismatch as e:
        return e
    return None
