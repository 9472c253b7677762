"""
Environment variables by which the user, or the process that started this one, configures a process.

Only this module reads and writes the variables of ding_store. A process reads them with ``read_environment`` and passes
the result on, usually as a ``StoreConfig``. A process that starts others writes them once, with ``write_environment``.
Users may set those that docs/reference/environment-variables.md lists. The others are internal: their names may change.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Dict, Optional

ENV_URL, ENV_RUN = 'DING_STORE_URL', 'DING_STORE_RUN'
ENV_REDIS_SERVER = 'DING_STORE_REDIS_SERVER'
ENV_NO_NUMBA = 'DING_STORE_NO_NUMBA'
ENV_SENTINEL_USER, ENV_SENTINEL_PASSWORD = 'DING_STORE_SENTINEL_USER', 'DING_STORE_SENTINEL_PASSWORD'
ENV_SENTINEL_TLS = 'DING_STORE_SENTINEL_TLS'
ENV_HEALTH = 'DING_STORE_HEALTH'
ENV_SETTINGS, ENV_CHECKPOINT = 'DING_STORE_SETTINGS', 'DING_STORE_CHECKPOINT'
#: Internal: see the fields of ``Environment``.
ENV_LAUNCHED, ENV_JOINED = 'DING_STORE_LAUNCHED', 'DING_STORE_JOINED'
ENV_LEARNERS, ENV_RANK = 'DING_STORE_LEARNERS', 'DING_STORE_RANK'
ENV_LAUNCHER, ENV_USES, ENV_EXPLAIN = 'DING_STORE_LAUNCHER', 'DING_STORE_USES', 'DING_STORE_EXPLAIN'
#: Internal: '1' patches DI-engine when it is imported. ``hook/site/sitecustomize.py`` reads it in each Python.
ENV_HOOK = 'DING_STORE_HOOK'


@dataclass(frozen=True)
class Environment:
    """
    Overview:
        The variables of ding_store, one field each. None: the variable is not set, or empty.
    Arguments:
        - url, run (:obj:`Optional[str]`): The store and the run. They override the config.
        - settings (:obj:`Optional[str]`): The settings of ``--set KEY=VALUE``, as a Python dict.
        - checkpoint (:obj:`Optional[str]`): Turns checkpoints on. Their directory, or '1' for the config's.
        - health (:obj:`Optional[str]`): Directory of the files that ``ding-store health`` looks at.
        - launched (:obj:`Optional[str]`): Name of the launch of ``ding-store run --roles`` or ``join`` that started
            this process. Its launcher deletes the run's data after it has read the last figures.
        - joined (:obj:`Optional[str]`): The epoch of the ``members`` stream when ``ding-store join`` started this
            process.
        - learners (:obj:`Optional[str]`): Number of learners of the run, if there are several.
        - rank (:obj:`Optional[str]`): Number of this process among the learners, from 0 on, if there are several.
        - launcher (:obj:`Optional[str]`): Pid of the command that waits for configs that are still being written.
        - uses (:obj:`Optional[str]`): Path of the command's file for notes of the parts that its processes use.
        - explain (:obj:`Optional[str]`): '1': each process prints each part that it uses.
        - redis_server (:obj:`Optional[str]`): Program of the embedded server.
        - no_numba (:obj:`Optional[str]`): Anything but '0' disables numba.
        - sentinel_user, sentinel_password (:obj:`Optional[str]`): Login at the sentinels that the URL names.
        - sentinel_tls (:obj:`Optional[str]`): '0': the sentinels of a ``rediss+sentinel://`` URL do not use TLS.
    """

    url: Optional[str] = None
    run: Optional[str] = None
    settings: Optional[str] = None
    checkpoint: Optional[str] = None
    health: Optional[str] = None
    launched: Optional[str] = None
    joined: Optional[str] = None
    learners: Optional[str] = None
    rank: Optional[str] = None
    launcher: Optional[str] = None
    uses: Optional[str] = None
    explain: Optional[str] = None
    redis_server: Optional[str] = None
    no_numba: Optional[str] = None
    sentinel_user: Optional[str] = None
    sentinel_password: Optional[str] = field(default=None, repr=False)
    sentinel_tls: Optional[str] = None


_NAMES: Dict[str, str] = {
    'url': ENV_URL,
    'run': ENV_RUN,
    'settings': ENV_SETTINGS,
    'checkpoint': ENV_CHECKPOINT,
    'health': ENV_HEALTH,
    'launched': ENV_LAUNCHED,
    'joined': ENV_JOINED,
    'learners': ENV_LEARNERS,
    'rank': ENV_RANK,
    'launcher': ENV_LAUNCHER,
    'uses': ENV_USES,
    'explain': ENV_EXPLAIN,
    'redis_server': ENV_REDIS_SERVER,
    'no_numba': ENV_NO_NUMBA,
    'sentinel_user': ENV_SENTINEL_USER,
    'sentinel_password': ENV_SENTINEL_PASSWORD,
    'sentinel_tls': ENV_SENTINEL_TLS,
}


def read_environment() -> Environment:
    """Return the variables as they are now. For the entry points of a process, which pass the result on."""
    return Environment(**{each: os.environ.get(name) or None for each, name in _NAMES.items()})


def is_numba_disabled() -> bool:
    """Return whether ``no_numba`` is set. Pushes and samples call this, so it reads one variable alone."""
    return os.environ.get(ENV_NO_NUMBA, '0') not in ('', '0')


def write_environment(environment: Environment, site: Optional[str] = None) -> None:
    """
    Overview:
        Set the variables for the processes that this one starts.
    Arguments:
        - site (:obj:`Optional[str]`): Directory whose ``sitecustomize`` patches DI-engine in each Python that starts.
    """
    for each in fields(environment):
        value = getattr(environment, each.name)
        if value is None:
            os.environ.pop(_NAMES[each.name], None)
        else:
            os.environ[_NAMES[each.name]] = value
    if site is not None:
        os.environ[ENV_HOOK] = '1'
        os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [site, os.environ.get('PYTHONPATH')]))


def set_rank(rank: int) -> None:
    """Set the variable ``rank`` of this process, which is one of several learners."""
    os.environ[ENV_RANK] = str(rank)
