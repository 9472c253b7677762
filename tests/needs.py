"""What a test needs of the machine: a lack of it fails in CI, and skips elsewhere with the reason."""

import importlib.util
import os

import pytest

from dizoo_configs import extras

#: Policies are on a GPU where tests compare what they find: scripts/simulated_gpu.py sets it, and who has a GPU may.
CUDA = os.environ.get('DING_STORE_TEST_CUDA') == '1'
#: Random tests make several times as many tries, and a long partition is waited for: see CONTRIBUTING.md.
IS_LONG = 'DING_STORE_SLOW_TESTS' in os.environ


def lacking(message: str) -> None:
    if os.environ.get('CI') == 'true':
        pytest.fail(message)
    pytest.skip(message)


def need_extra(module: str, extra: str) -> None:
    """
    The test needs a module that ``scripts/setup.sh --extra EXTRA`` installs. It is not imported here, and jaxmarl
    cannot be: see conftest.py.
    """
    importlib.invalidate_caches()
    if importlib.util.find_spec(module) is None:
        try:
            extras.need(module, extra)
        except ModuleNotFoundError as error:
            lacking(str(error))
