"""DI-engine middleware that uses the store, and the parts of a task pipeline."""

from ding_store.middleware.pipeline import Pipeline, pipeline
from ding_store.middleware.shared_policy import ServedPolicy, SharedPolicy, serve_policy, share_policy

__all__ = ['Pipeline', 'ServedPolicy', 'SharedPolicy', 'pipeline', 'serve_policy', 'share_policy']
