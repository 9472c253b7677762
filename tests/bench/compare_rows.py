"""Rows of ``ding-store compare``, by their names."""

from ding_store.compare.rows import ROWS, Row


def row(name: str) -> Row:
    return next(one for one in ROWS if one.name == name)
