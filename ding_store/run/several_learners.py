"""The number of learners of a run. It is fixed until the run ends, because its experience is distributed over them."""

from __future__ import annotations

from ding_store.errors import ConfigError, VersionConflict
from ding_store.storage.store import Store

#: The value that says how many learners a run has. A run with one learner has none.
LEARNERS = 'learners'
#: The value that says that learners or workers go on without one that died.
OWN_PACE = 'own-pace'


def num_learners_of(store: Store) -> int:
    """Return the number of learners that a run was started with. It is 1 if nothing says another number."""
    value = store.get(LEARNERS)
    number = None if value is None else value.header.get('num')
    return number if type(number) is int and number > 1 else 1


def check_num_learners(store: Store, num: int) -> None:
    """
    Overview:
        Check that a run may be continued by so many learners.
    Raises:
        - ConfigError: Its experience is distributed over another number of partitions.
    """
    found = num_learners_of(store)
    if found == num or (found == 1 and store.stream_info('experience') is None):
        return
    raise ConfigError(
        f'run {store.run!r} has the experience of {found} learner{"s" * (found > 1)}, and --roles has learner={num}. '
        f'Use learner={found} to continue it, or another --run for a new start: experience cannot be distributed anew '
        'yet.'
    )


def decide_num_learners(store: Store, num: int) -> None:
    """Fix the number of a run's learners. A run with one learner needs no value."""
    if num == 1:
        return
    try:
        store.decide(LEARNERS, {'num': num}, 0)
    except VersionConflict:
        check_num_learners(store, num)


def note_own_pace(store: Store) -> None:
    """Note that the learners or workers share updates at their own pace."""
    store.put(OWN_PACE, {}, {})


def goes_at_own_pace(store: Store) -> bool:
    """Return True if learners or workers go on without one that died, so that it is started again alone."""
    return store.get(OWN_PACE) is not None
