"""DI-store's ``Client`` over the objects of a run, so that ``DI_STORE=on`` of DI-engine works.

DI-engine imports it as ``di_store``. ``python -m ding_store.di_store`` prints the directory that has this name:

    DI_STORE=on PYTHONPATH="$(python -m ding_store.di_store)" ding -m parallel -c cartpole_dqn_config.py
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ding_store.di_store.client import Client

__all__ = ['Client', 'path']

#: The directory whose ``di_store`` module is this one.
path = os.path.join(os.path.dirname(__file__), 'path')


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds, which the command that prints the path need not wait for.
    if name == 'Client':
        from ding_store.di_store.client import Client

        return Client
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
