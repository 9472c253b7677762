"""Converts elements, trees of arrays, to columns, one array per leaf, and back. Only this package handles trees."""

from .merge import NotColumnar
from .schema import Schema

__all__ = ['NotColumnar', 'Schema']
