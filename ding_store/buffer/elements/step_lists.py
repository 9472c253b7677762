"""Elements that are lists of steps, such as episodes, which need not all be built alike."""

from __future__ import annotations

import logging
from typing import Any, Optional, Sequence

from ding_store.columns import NotColumnar, Schema
from ding_store.errors import SchemaMismatch

logger = logging.getLogger(__name__)


def check_may_differ(schema: Optional[Schema], elements: Sequence[Any], reason: SchemaMismatch) -> Optional[Exception]:
    """
    Overview:
        Whether elements that have no schema together, for this reason, may be kept one by one: as the first that does
        not fit those before it says, so that it does not matter which of them are pushed together.
    Arguments:
        - schema (:obj:`Optional[Schema]`): Of the elements that are there; None: there are none.
    Returns:
        - difference: Of the steps of two lists, if not their number alone differs.
    Raises:
        - SchemaMismatch: They may not: lists and what is no list, or dicts as steps and others; else the reason.
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
            return None  # An object, and all that come after it.
        _check_is_list_beside(schema, element, mismatch)
        return None if isinstance(mismatch, NotColumnar) else _difference(schema, other)
    raise reason


def tell(difference: Optional[Exception]) -> None:
    """That elements are in columns no more, where that may not be meant: called once, when it is so."""
    if difference is not None:
        logger.warning(
            'lists whose steps differ in more than their number (%s) are no longer in columns: '
            'all elements are kept one by one from here on, and sampled as lists',
            difference,
        )


def _check_is_list_beside(schema: Schema, element: Any, reason: SchemaMismatch) -> None:
    if type(element) is not list or not schema.is_list:
        raise reason
    theirs, others = schema.kinds_of_items, Schema.kinds_in(element)
    if theirs and others and theirs.isdisjoint(others):
        raise SchemaMismatch(
            f'a list of {_kind(others)} among lists of {_kind(theirs)}: push it to a buffer of its own ({reason})'
        ) from reason


def _kind(kinds: Any) -> str:
    return 'dicts' if True in kinds else 'what is no dict'


def _difference(schema: Schema, other: Schema) -> Optional[Exception]:
    try:
        schema.check_items(other)
    except SchemaMismatch as e:
        return e
    return None
