"""A Ray cluster on this host alone, which ends with the process that started it."""

from __future__ import annotations

import os
from typing import Any

_HOST = '127.0.0.1'


def start(directory: str, store_bytes: int, num_cpus: int) -> None:
    """Start Ray's head with its files in ``directory``. Other processes of this host may join."""
    _set_environment()
    import ray

    _init(_temp_dir=directory, object_store_memory=store_bytes, num_cpus=num_cpus, include_dashboard=False)
    with open(_address_in(directory), 'w') as file:
        file.write(ray.get_runtime_context().gcs_address)


def join(directory: str) -> None:
    _set_environment()
    with open(_address_in(directory)) as file:
        _init(address=file.read())


def leave() -> None:
    import ray

    ray.shutdown()


def _set_environment() -> None:
    """Set what Ray reads when it is imported."""
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')  # send no usage statistics
    # Ray 2.60 requires its token by default where a cluster starts, and sends none from processes that join.
    os.environ.setdefault('RAY_AUTH_MODE', 'token')


def _address_in(directory: str) -> str:
    return os.path.join(directory, 'gcs')


def _init(**options: Any) -> None:
    import ray

    ray.init(namespace='bench', logging_level='ERROR', log_to_driver=False, _node_ip_address=_HOST, **options)
