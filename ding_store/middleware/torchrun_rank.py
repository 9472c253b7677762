"""A script that ``torchrun`` starts: with the store's flag in its config, each of its processes is one learner."""

from __future__ import annotations

import atexit
import time
from dataclasses import replace
from typing import Any, Mapping

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError
from ding_store.run.claim import claim_role, has_launcher
from ding_store.run.ending import clear_ended_run, end_of, silence_s
from ding_store.run.format import check_format
from ding_store.run.members import launch
from ding_store.run.node_addresses import FIRST_IDS, new_addresses, peer_addresses, remove_address
from ding_store.run.session import RunSession
from ding_store.run.several_learners import check_num_learners, decide_num_learners
from ding_store.run.torchrun import TorchrunWorker, torchrun_worker
from ding_store.storage.store import Store

#: How often a rank looks whether rank 0 has cleared the run before.
_LOOK_S = 0.5


def as_torchrun_rank(config: StoreConfig, cfg: Mapping[str, Any]) -> StoreConfig:
    """
    Overview:
        If torchrun started this process, make it one of the run's learners, and return the config of that rank. Call
        it before the script makes policies. Return ``config`` if torchrun did not start this process, or if
        ``policy.multi_gpu`` is on: DI-engine then trains in its own way.
    Raises:
        - ConfigError: The run has another number of learners, or has ended.
    """
    worker = torchrun_worker() if config.enable and config.launched is None else None
    if worker is None or cfg.get('policy', {}).get('multi_gpu', False):
        return config
    from ding_store.middleware import learner_ranks
    from ding_store.middleware.router import activate, deactivate

    with RunSession(config).store as store:
        joins = worker.rank > 0 or has_launcher(store, FIRST_IDS['learner'])
        launched = launch() if joins else None
        _enter_run(store, config, worker, joins)
        claim_role(store, 'learner', silence_s(config.heartbeat_s), launched, worker.rank)
        peers = peer_addresses(store)
    if worker.num > 1:
        learner_ranks.start(worker.rank, worker.num)
    (address,) = new_addresses(1)
    atexit.register(remove_address, address)
    activate(FIRST_IDS['learner'], address, peers, num_workers=len(peers) + 1)
    atexit.register(deactivate)
    return replace(config, num_learners=worker.num, rank=worker.rank, launched=launched)


def _enter_run(store: Store, config: StoreConfig, worker: TorchrunWorker, joins: bool) -> None:
    """Wait until the run before is cleared, or clear it, and fix the number of learners."""
    if not joins:
        check_format(store)
        clear_ended_run(store, config)
    deadline = time.monotonic() + config.peer_timeout_s
    while (end := end_of(store)) is not None:
        if time.monotonic() >= deadline:
            raise ConfigError(f'run {store.run!r} has ended: {end.reason}. Rank 0 did not begin it anew')
        time.sleep(_LOOK_S)
    check_num_learners(store, worker.num)
    decide_num_learners(store, worker.num)
