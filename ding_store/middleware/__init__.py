"""DI-engine middleware that uses the store, and the parts of a task pipeline."""

from __future__ import annotations

import importlib
from typing import Any

from ding_store.middleware.pipeline import Pipeline, pipeline

__all__ = ['Pipeline', 'ServedPolicy', 'SharedPolicy', 'pipeline', 'serve_policy', 'share_policy']

#: Names of a module that imports torch and DI-engine, which the flag 'off' does not need.
_LAZY = ('ServedPolicy', 'SharedPolicy', 'serve_policy', 'share_policy')


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module('ding_store.middleware.shared_policy'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
