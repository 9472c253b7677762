"""Access to DI-engine's own parts, also under `ding-store run`, which puts replacements in their place."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar('T')
#: A replacement has DI-engine's class or function as an attribute of this name.
STOCK = '__ding_store_stock__'


def stock(part: T) -> T:
    """Return DI-engine's class or function, given itself or its replacement."""
    found: T = getattr(part, STOCK, part)
    return found
