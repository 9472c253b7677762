"""Patches for unmodified scripts: the store's parts replace DI-engine's in this process and in those it spawns."""

from ding_store.hook.environment import ENV_EXPLAIN, ENV_HOOK
from ding_store.hook.install import install, install_lazily

__all__ = ['ENV_EXPLAIN', 'ENV_HOOK', 'install', 'install_lazily']
