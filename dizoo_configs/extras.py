"""Environments come with extras of this package: adapters import without them, and say here what to install."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str, extra: str) -> Any:
    """
    Overview:
        Import a module that an extra installs.
    Arguments:
        - module (:obj:`str`): e.g. 'ale_py'.
        - extra (:obj:`str`): e.g. 'atari'.
    Raises:
        - ModuleNotFoundError: With the line that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{module} is missing, which the environments of '{extra}' need. In a clone of ding_store: "
            f"scripts/setup.sh --extra {extra}, or in an environment of yours: pip install 'numpy<2' '.[{extra}]'",
            name=error.name,
        ) from error
