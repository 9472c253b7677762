"""Elements (trees of arrays, as collectors make them) <-> columns (one array per leaf). Only here are trees known."""

from .merge import NotColumnar
from .schema import Schema

__all__ = ['NotColumnar', 'Schema']
