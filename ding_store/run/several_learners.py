"""The numbers of learners, partitions and workers of a run. The first two are fixed: data is distributed over them."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Mapping, Optional

from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, VersionConflict
from ding_store.run.recording import STREAM
from ding_store.storage.store import Store

#: The value that says how many learners a run has. A run with one learner has none.
LEARNERS = 'learners'
#: The value that says how many workers the run's launcher starts. Only a run of workers has it.
WORKERS = 'workers'
#: The value that says how many partitions the experience of a run has. Without it, each learner has one.
PARTITIONS = 'partitions'
#: The value that says that learners or workers go on without one that died.
OWN_PACE = 'own-pace'


def stream_of(partition: int, num: int) -> str:
    """Return the name of a partition's stream. If there is only one partition, it has no number."""
    return STREAM if num == 1 else f'{STREAM}/{partition}'


def replay_of(path: str, rank: int, num: int) -> str:
    """
    Return the directory of one learner's or worker's replay. Each of several has its own in ``path``. A single one has
    ``path`` itself, so workers that join it have theirs beside it.
    """
    if num == 1:
        return f'{os.path.normpath(path)}.rank-{rank}' if rank else path
    return os.path.join(path, f'rank-{rank}-of-{num}')


def has_num_learners(store: Store) -> bool:
    """Return whether a process has fixed the number of learners, as those with several do."""
    return store.get(LEARNERS) is not None


def num_learners_of(store: Store) -> int:
    """Return the number of learners that a run was started with. It is 1 if nothing says another number."""
    number = _field(store, 'num')
    return number if type(number) is int and number > 1 else 1


def num_partitions_of(store: Store) -> Optional[int]:
    """Return the number of partitions that a process has fixed. None: none has."""
    value = store.get(PARTITIONS)
    number = None if value is None else value.header.get('num')
    return number if type(number) is int and number > 0 else None


def decide_num_partitions(store: Store, config: StoreConfig, upholds: bool = False) -> int:
    """
    Overview:
        Fix the number of partitions, and return it. Only a run with one learner and one partition needs no value.
    Arguments:
        - upholds (:obj:`bool`): Decide the number again if another process has decided it. This process upholds it.
    Raises:
        - ConfigError: The run has another number by now.
    """
    asked = None if config.learners is None else config.learners.partitions
    wanted = asked or config.num_learners
    value = store.get(PARTITIONS)
    if value is not None and upholds:
        _decide(store, value.header, value.version)
    elif value is None and wanted > 1 and store.stream_info(STREAM) is None:
        _decide(store, {'num': wanted}, 0)
    found = num_partitions_of(store)
    if found is None:
        found = 1
    if asked not in (None, found) or found % config.num_learners:
        is_possible = found % config.num_learners == 0
        way = f'Set partitions to {found} in all processes, or d' if is_possible else 'D'
        raise ConfigError(
            f'run {store.run!r} has its experience in {found} partition{"s" * (found > 1)}, and this process has '
            f'{config.num_learners} learner{"s" * (config.num_learners > 1)} with store.learners.partitions '
            f'({asked!r}). {way}istribute the experience anew: ding-store reshard CHECKPOINT '
            f'--run {store.run} --learners {config.num_learners} --partitions {wanted}'
        )
    return found


def _decide(store: Store, header: Mapping[str, Any], expected_version: int) -> None:
    with contextlib.suppress(VersionConflict):  # another process was earlier
        store.decide(PARTITIONS, dict(header), expected_version)


def has_partitions(store: Store, timeout_s: float) -> Optional[bool]:
    """Return True once the learner has fixed the number of partitions, or reads the stream of a run with one."""
    if num_partitions_of(store) is not None or store.stream_info(STREAM) is not None:
        return True
    store.wait_for_version(PARTITIONS, 1, timeout_s)
    return None


def first_joining_rank(store: Store) -> int:
    """Return the first rank that no launcher starts. Learners that join have the ranks from there on."""
    number = _field(store, 'started')
    return number if type(number) is int and number >= 0 else 0


def _field(store: Store, name: str) -> Any:
    value = store.get(LEARNERS)
    return None if value is None else value.header.get(name)


def check_num_learners(store: Store, num: int) -> None:
    """
    Overview:
        Check that a run may be continued by so many learners.
    Raises:
        - ConfigError: Its experience is distributed over another number of partitions.
    """
    found = num_learners_of(store)
    if found == num or (found == 1 and store.stream_info(STREAM) is None):
        return
    raise ConfigError(
        f'run {store.run!r} has the experience of {found} learner{"s" * (found > 1)}, and this command has '
        f'learner={num}. Use learner={found} to continue it, another --run for a new start, or distribute its '
        f'experience anew: ding-store reshard CHECKPOINT --run {store.run} --learners {num}. If '
        'store.learners.partitions is set, add it as --partitions.'
    )


def decide_num_learners(store: Store, num: int, started: Optional[int] = None) -> None:
    """
    Overview:
        Fix the number of a run's learners. A run with one learner needs no value.
    Arguments:
        - started (:obj:`Optional[int]`): The launcher starts the ranks below this one, and the others join. None: keep
            what an earlier process has decided.
    """
    if num == 1:
        return
    value = store.get(LEARNERS)
    is_known = value is not None and value.header.get('num') == num
    if is_known and started in (None, first_joining_rank(store)):
        return
    try:
        version = value.version if value is not None and is_known else 0
        store.decide(LEARNERS, {'num': num, 'started': started or 0}, version)
    except VersionConflict:
        check_num_learners(store, num)


def decide_num_workers(store: Store, num: int) -> None:
    """Note how many workers this launch starts. With 0, the run has none, whatever an earlier launch of it had."""
    if num:
        store.decide(WORKERS, {'num': num})
    else:
        store.delete(WORKERS)


def num_workers_of(store: Store) -> int:
    """Return how many workers the run's launcher starts. 0: it is no run of workers, or it has not begun."""
    value = store.get(WORKERS)
    number = None if value is None else value.header.get('num')
    return number if type(number) is int and number > 0 else 0


def decide_own_pace(store: Store) -> None:
    """Note that the learners or workers share updates at their own pace. Uphold it, in case the server loses it."""
    store.decide(OWN_PACE, {})


def goes_at_own_pace(store: Store) -> bool:
    """Return True if learners or workers go on without one that died, so that it is started again alone."""
    return store.get(OWN_PACE) is not None
