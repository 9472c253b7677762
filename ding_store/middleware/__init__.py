"""DI-engine middleware that uses the store, and the parts of a task pipeline."""

from ding_store.middleware.pipeline import Pipeline, pipeline

__all__ = ['Pipeline', 'pipeline']
