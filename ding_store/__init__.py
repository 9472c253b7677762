"""Shared storage for DI-engine: experience, replay and weights over Redis Streams and memory-mapped files.

Importing this package starts nothing and imports neither torch, DI-engine nor redis.
"""

from ding_store.config import enable

__all__ = ['enable', '__version__']
__version__ = '0.1.0'
