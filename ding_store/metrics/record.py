"""One record of a run's history: figures at a moment, and rates and shares of the time since the record before."""

from __future__ import annotations

import math
import time
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence

from ding_store.metrics.figures import COLLECTOR_PARTS, LEARNER_PARTS, Figures

Record = Dict[str, Any]


class Column(NamedTuple):
    """Unit and meaning of one name of a record."""

    unit: str
    meaning: str


#: Name -> unit and meaning. docs/reference/metrics.md has the same table. A record leaves out what is not known.
COLUMNS: Dict[str, Column] = {
    'time': Column('s', 'seconds since 1970 by the clock of the learner'),
    'env_step': Column('steps', 'environment steps that collectors have reported'),
    'train_iter': Column('iterations', 'training iterations'),
    'eval_return': Column('', 'mean return of the newest evaluation, in the first record after it'),
    'eval_step': Column('steps', 'environment steps at that evaluation'),
    'eval_iter': Column('iterations', 'training iterations at that evaluation'),
    'env_steps_per_s': Column('1/s', 'environment steps per second'),
    'train_iters_per_s': Column('1/s', 'training iterations per second'),
    'replay_rows': Column('rows', 'rows in the replay'),
    'replay_size': Column('rows', 'rows that fit into the replay'),
    'replay_bytes': Column('bytes', 'bytes of the rows in the replay'),
    'samples_per_insert': Column('', "rows sampled per row inserted since the learner's start"),
    'policy_lag': Column('versions', 'versions by which the oldest policy of a collector is behind'),
    'pending_bytes': Column('bytes', 'bytes in the experience stream that the learner has not read'),
    'lost_entries': Column('entries', 'entries of the experience stream that were lost'),
    'stream_full': Column('share', 'share of its limit that the experience stream, or its fullest partition, holds'),
    'collectors': Column('processes', 'collectors that run'),
    'died': Column('processes', 'processes that have failed or were killed so far'),
    'workers': Column('processes', 'workers (--roles worker=N) that run'),
    'updates_used': Column('updates', 'gradients or parameters that the parameter server has used'),
    'updates_dropped': Column('updates', 'those that it has dropped: too stale, late, or of another server'),
    'stragglers': Column('', 'times that an update went on without a worker'),
    'staleness': Column('versions', 'mean staleness of the gradients that were used since the record before'),
    'staleness_max': Column('versions', "the largest since the server's start"),
    'checkpoint_overhead': Column('share', 'share of the time that checkpoints have cost so far'),
    'learner_wait_experience': Column('share', 'share of its time that the learner waits for experience'),
    'learner_wait_ranks': Column('share', 'share that it waits for the other learners, if there are several'),
    'learner_ingest': Column('share', 'share that it copies experience into the replay'),
    'learner_sample': Column('share', 'share that it samples batches'),
    'learner_train': Column('share', 'share that it trains'),
    'learner_publish': Column('share', 'share that it publishes weights'),
    'learner_checkpoint': Column('share', 'share that it copies its state for checkpoints'),
    'collector_wait_learner': Column('share', 'share of their time that collectors wait for the learner'),
    'collector_wait_weights': Column('share', 'share that they wait for newer weights'),
    'collector_append': Column('share', 'share that they append experience, and wait for room in the stream'),
    'collector_environment': Column('share', 'share that they wait for steps of their environments'),
}
#: Columns that TensorBoard gets in another way: as its axes, and as DI-engine's own tag of the return.
AXES = ('time', 'env_step', 'train_iter', 'eval_return', 'eval_step', 'eval_iter', 'replay_size')


def record_of(before: Figures, after: Figures, pending_bytes: Sequence[int] = ()) -> Record:
    """
    Overview:
        Return the record of the figures ``after``. Rates and shares are of the time since the figures ``before``, by
        the clocks of the processes themselves. They are missing if no new report arrived since.
    Arguments:
        - pending_bytes (:obj:`Sequence[int]`): Bytes in the experience stream, or in each of its partitions.
    """
    limit = after.max_pending_bytes
    known = {
        'time': round(time.time(), 3),
        'env_step': after.env_step,
        'train_iter': after.train_iter,
        'replay_rows': after.replay_rows,
        'replay_size': after.replay_size,
        'replay_bytes': after.replay_bytes,
        'policy_lag': after.policy_lag,
        'pending_bytes': sum(pending_bytes) if pending_bytes else None,
        'stream_full': _ratio(max(pending_bytes), limit) if pending_bytes and limit else None,
        'lost_entries': after.chunks_lost,
        'collectors': after.num_collectors,
        'died': after.num_died,
        'checkpoint_overhead': after.checkpoint_overhead,
        **_updates(before, after),
        **_evaluation(before, after),
        'samples_per_insert': samples_per_insert(after),
        **rates(before, after),
        **shares(before, after),
    }
    return {name: known[name] for name in COLUMNS if known.get(name) is not None}


def _updates(before: Figures, after: Figures) -> Dict[str, Any]:
    """Return the counts of processes that share their updates. A restarted server begins its counts anew."""
    found: Dict[str, Any] = {'workers': after.num_workers or None}
    if 'updates_used' in after.updates:
        found.update({name: after.updates[name] for name in ('updates_used', 'stragglers')})
        found['updates_dropped'] = sum(n for name, n in after.updates.items() if name.startswith('updates_dropped_'))
    if after.staleness:
        own = before.staleness if before.learner == after.learner else {}
        counts = {name: count - own.get(name, 0) for name, count in after.staleness.items()}
        found['staleness'] = _ratio(counts.get('sum', 0), sum(n for name, n in counts.items() if name.isdecimal()))
        found['staleness_max'] = after.staleness.get('max')
    return found


def _evaluation(before: Figures, after: Figures) -> Dict[str, Any]:
    value = after.eval_value
    is_new = (after.eval_iter, value) != (before.eval_iter, before.eval_value)
    if value is None or not is_new or not math.isfinite(value):
        return {}
    return {'eval_return': value, 'eval_step': after.eval_step, 'eval_iter': after.eval_iter}


def rates(before: Figures, after: Figures) -> Dict[str, Optional[float]]:
    """Return the rates of the learner between two figures, by its own clock."""
    versions = after.policy_version - before.policy_version if before.learner == after.learner else 0
    before = before if before.learner == after.learner else Figures()
    seconds = after.learner_s.get('up', 0.0) - before.learner_s.get('up', 0.0)
    return {
        'env_steps_per_s': _ratio(after.learner_step - before.learner_step, seconds),
        'train_iters_per_s': _ratio(after.learner_iter - before.learner_iter, seconds),
        'policy_versions_per_s': _ratio(versions, seconds),
    }


def samples_per_insert(figures: Figures) -> Optional[float]:
    """Return how often the learner has sampled each row on average. None: the pipeline does not count samples."""
    return None if figures.rows_sampled is None else _ratio(figures.rows_sampled, figures.rows_inserted)


def shares(before: Figures, after: Figures) -> Dict[str, float]:
    """Return the shares of the time that the learner and the collectors spent in each part of their work."""
    own = before.learner_s if before.learner == after.learner else {}
    return {
        **_shares('learner', LEARNER_PARTS, own, after.learner_s),
        **_shares('collector', COLLECTOR_PARTS, before.collector_s, after.collector_s),
    }


def _shares(role: str, parts: Any, before: Mapping[str, float], after: Mapping[str, float]) -> Dict[str, float]:
    return {f'{role}_{part}': share for part, share in _part_shares(parts, before, after, '').items()}


def part_shares(parts: Sequence[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> Dict[str, float]:
    """Return the shares of the time that one member spent in parts of its work between two of its reports."""
    return _part_shares(parts, before, after, '_s')


def _part_shares(
    parts: Sequence[str], before: Mapping[str, Any], after: Mapping[str, Any], suffix: str
) -> Dict[str, float]:
    seconds = after.get(f'up{suffix}', 0.0) - before.get(f'up{suffix}', 0.0)
    if seconds <= 0:
        return {}
    names = {part: f'{part}{suffix}' for part in parts}
    spent = {part: after[name] - before.get(name, 0.0) for part, name in names.items() if name in after}
    return {part: round(min(max(value / seconds, 0.0), 1.0), 4) for part, value in spent.items()}


def _ratio(count: float, of: float) -> Optional[float]:
    return round(count / of, 3) if of > 0 else None
