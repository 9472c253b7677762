"""DI-engine's own parts, under `ding-store run` too, where others stand in their place."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar('T')
#: What stands in for a class or function of DI-engine has it under this name.
STOCK = '__ding_store_stock__'


def stock(part: T) -> T:
    """DI-engine's class or function, of itself or of what stands in for it."""
    found: T = getattr(part, STOCK, part)
    return found
