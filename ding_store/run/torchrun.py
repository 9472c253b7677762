"""The rank that ``torchrun`` gives to each of its workers."""

from __future__ import annotations

import os
from typing import NamedTuple, Optional

from ding_store.errors import ConfigError


class TorchrunWorker(NamedTuple):
    """
    Overview:
        One of the processes that torchrun started on one or several hosts.
    Attributes:
        - rank (:obj:`int`), num (:obj:`int`): Its number from 0 on, and how many there are.
        - job (:obj:`str`): torchrun's name of the job, which all of them have.
    """

    rank: int
    num: int
    job: str


def torchrun_worker() -> Optional[TorchrunWorker]:
    """
    Overview:
        Return what torchrun says to this process. None: torchrun did not start it.
    Raises:
        - ConfigError: A variable of torchrun is no number.
    """
    job = os.environ.get('TORCHELASTIC_RUN_ID')
    if job is None:
        return None
    found = {}
    for name in ('RANK', 'WORLD_SIZE'):
        text = os.environ.get(name, '')
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f'{name} ({text!r}) in the environment must be a number. torchrun sets it')
        found[name] = int(text)
    return TorchrunWorker(found['RANK'], found['WORLD_SIZE'], job)
