"""The store in DI-engine's task: the only layer that touches ``task``."""

from ding_store.middleware.pipeline import Pipeline, pipeline

__all__ = ['Pipeline', 'pipeline']
