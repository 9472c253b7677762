"""Elements (trees of arrays, as collectors make them) <-> columns (one array per leaf). The only place that knows trees."""

from .nodes import NotColumnar
from .schema import Schema

__all__ = ['NotColumnar', 'Schema']
