"""A Ray cluster on this host alone, which ends with the process that started it."""

from __future__ import annotations

import os
from typing import Any

_HOST = '127.0.0.1'
# Ray reads these when it is imported. It sends no usage statistics. Ray 2.60 would write a token to the home directory
# of the user, and processes that join would not send it.
os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
os.environ.setdefault('RAY_AUTH_MODE', 'disabled')


def start(directory: str, store_bytes: int, num_cpus: int) -> None:
    """Start Ray's head with its files in ``directory``. Other processes of this host may join."""
    import ray

    _init(_temp_dir=directory, object_store_memory=store_bytes, num_cpus=num_cpus, include_dashboard=False)
    with open(_address_in(directory), 'w') as file:
        file.write(ray.get_runtime_context().gcs_address)


def join(directory: str) -> None:
    with open(_address_in(directory)) as file:
        _init(address=file.read())


def leave() -> None:
    import ray

    ray.shutdown()


def _address_in(directory: str) -> str:
    return os.path.join(directory, 'gcs')


def _init(**options: Any) -> None:
    import ray

    ray.init(namespace='bench', logging_level='ERROR', log_to_driver=False, _node_ip_address=_HOST, **options)
