"""When the patches are applied: at once, or as soon as DI-engine's modules have been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any, Optional, Sequence

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'site')
#: Modules after whose execution patches are applied.
TRIGGERS = (
    'ding.config.config',
    'ding.framework.middleware',
    'ding.data.buffer',
    'ding.worker',
    'ding_store.middleware.pipeline',
)


def install() -> None:
    """Import DI-engine and patch it at once."""
    import ding.config.config  # noqa: F401
    import ding.framework.middleware  # noqa: F401
    import ding.worker  # noqa: F401

    import ding_store.middleware.pipeline  # noqa: F401
    from ding_store.hook import patches

    for trigger in TRIGGERS:
        patches.apply(trigger)


def install_lazily() -> None:
    """Patch each module of DI-engine right after its import. A process that never imports it pays nothing."""
    for trigger in TRIGGERS:
        if trigger in sys.modules:
            _apply(trigger)
    sys.meta_path.insert(0, _Finder())


def _apply(name: str) -> None:
    from ding_store.hook import patches

    patches.apply(name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name not in TRIGGERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _apply(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
