"""Checks of elements that are lists of steps, such as episodes, whose structure may differ."""

from __future__ import annotations

import logging
from typing import Any, Optional, Sequence

from ding_store.columns import NotColumnar, Schema
from ding_store.errors import SchemaMismatch

logger = logging.getLogger(__name__)


def check_may_differ(schema: Optional[Schema], elements: Sequence[Any], reason: SchemaMismatch) -> Optional[Exception]:
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


def tell(difference: Optional[Exception]) -> None:
    """Warn that elements leave the columns, if that may be unintended. Called once, when they do."""
    if difference is not None:
        logger.warning(
            'lists whose steps differ in more than their number (%s) are no longer in columns: '
            'all elements are stored one by one from now on, and sampled as lists',
            difference,
        )


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
