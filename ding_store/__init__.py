"""Shared storage for DI-engine: experience, replay and weights over Redis Streams and memory-mapped files.

Importing this package starts nothing and imports neither torch, DI-engine nor redis.
"""

__version__ = '0.1.0'
