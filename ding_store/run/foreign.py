"""Checks of values that another program may have put into the run's store."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional

from ditk import logging

from ding_store.storage.base import Header, Value


def is_count(field: Any) -> bool:
    """Return whether a field is an integer from 0 to 2**63 - 1."""
    return type(field) is int and 0 <= field < 1 << 63


def is_number(field: Any) -> bool:
    """Return whether a field is a number, and no bool."""
    return isinstance(field, (int, float)) and not isinstance(field, bool)


def is_text(field: Any) -> bool:
    """Return whether a field is a string."""
    return isinstance(field, str)


def fields_of(value: Optional[Value], kinds: Mapping[str, Callable[[Any], bool]]) -> Optional[Header]:
    """
    Overview:
        Return the header of a value if it has these fields. Otherwise another program put it: log a warning that names
        the value, and return None.
    Arguments:
        - kinds (:obj:`Mapping`): What each field must be.
    """
    if value is None:
        return None
    wrong = [name for name, is_one in kinds.items() if not is_one(value.header.get(name))]
    if not wrong:
        return value.header
    logging.warning(
        f'ding_store: value {value.name!r} was put by another program, and is ignored: version {value.version} has '
        f'missing or wrong header fields {", ".join(map(repr, wrong))}. Let that program use another name.'
    )
    return None
