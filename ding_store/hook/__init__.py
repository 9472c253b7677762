"""Patches for unmodified scripts: the store's parts replace DI-engine's in this process and in those it spawns."""

from ding_store.hook.install import install, install_lazily

__all__ = ['install', 'install_lazily']
