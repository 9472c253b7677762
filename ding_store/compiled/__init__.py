"""Copies larger than the processor's caches, and the compiler for such loops."""

from ding_store.compiled.past_caches import (
    FAR_BYTES,
    MIN_BYTES,
    copy_each_past_caches,
    copy_past_caches,
    is_far,
    join_at,
    join_past_caches,
    load_for,
)

__all__ = [
    'FAR_BYTES',
    'MIN_BYTES',
    'copy_each_past_caches',
    'copy_past_caches',
    'is_far',
    'join_at',
    'join_past_caches',
    'load_for',
]
