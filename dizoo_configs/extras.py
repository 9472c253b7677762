"""Import of modules that come with extras. Adapters import without them, and the error names the command to run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

#: Files per extra with the packages that must be installed without their own requirements.
NO_DEPS = Path(__file__).resolve().parent.parent / 'requirements' / 'no-deps'


def need(module: str, extra: str) -> Any:
    """
    Overview:
        Import a module that an extra installs.
    Arguments:
        - module (:obj:`str`): e.g. 'ale_py'.
        - extra (:obj:`str`): e.g. 'atari'.
    Raises:
        - ModuleNotFoundError: The extra is not installed. The text has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = module if str(error.name).startswith(module.split('.')[0]) else f'{error.name}, for {module},'
        install = f"pip install 'numpy<2' '.[{extra}]'"
        if (NO_DEPS / f'{extra}.txt').exists():
            install += f' && pip install --no-deps -r requirements/no-deps/{extra}.txt'
        raise ModuleNotFoundError(
            f"{missing} is missing, which the environments of '{extra}' need. In a clone of ding_store: "
            f'scripts/setup.sh --extra {extra}, or in another environment: {install}',
            name=error.name,
        ) from error
