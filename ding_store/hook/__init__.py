"""Unmodified scripts: DI-engine's names are replaced by the store's, in this process and in those it spawns."""

from ding_store.hook.install import install, install_lazily
from ding_store.hook.patches import LEFT_ALONE, REPLACED, explain

__all__ = ['LEFT_ALONE', 'REPLACED', 'explain', 'install', 'install_lazily']
