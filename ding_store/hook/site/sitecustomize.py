"""
Found by Python at start because ``ding-store run`` puts this directory on PYTHONPATH, for spawned workers too.
Runs the sitecustomize that it hides, if there is one, then waits for DI-engine to be imported.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_hidden() -> None:
    paths = [path for path in sys.path if os.path.abspath(path or '.') != _HERE]
    spec = importlib.machinery.PathFinder.find_spec('sitecustomize', paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_hidden()
# Other Pythons that a job starts, without this package, are none of our business.
if os.environ.get('DING_STORE_HOOK') == '1' and importlib.util.find_spec('ding_store') is not None:
    from ding_store.hook.install import install_lazily

    install_lazily()
