"""Unmodified scripts: DI-engine's names are replaced by the store's, in this process and in those it spawns."""

from ding_store.hook.configs import ENV_LAUNCHER, wait_until_written
from ding_store.hook.install import ENV_EXPLAIN, ENV_HOOK, install, install_lazily
from ding_store.hook.uses import uses

__all__ = ['ENV_EXPLAIN', 'ENV_HOOK', 'ENV_LAUNCHER', 'install', 'install_lazily', 'uses', 'wait_until_written']
