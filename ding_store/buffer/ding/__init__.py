"""DI-engine's view of the replay: list sampling, index and storage views, equivalents of its buffer middleware."""

from ding_store.buffer.ding.middleware import sample_range_view, staleness_check, use_time_check

__all__ = ['sample_range_view', 'staleness_check', 'use_time_check']
