"""Elements that are lists, whose lengths may differ."""

from __future__ import annotations

from typing import Any, Sequence

from ding_store.columns import NotColumnar, Schema


def are_lists(elements: Sequence[Any]) -> bool:
    return all(type(element) is list for element in elements)


def check_lengths_alone_differ(schema: Schema, elements: Sequence[Any]) -> None:
    """
    Overview:
        Whether lists that do not fit a schema of lists are nothing else than such lists of other lengths.
    Raises:
        - SchemaMismatch: An item of theirs differs; names the path.
    """
    for element in elements:
        try:
            other = Schema.infer([element])
        except NotColumnar:
            continue  # An empty one, or of objects.
        schema.check_items(other)
