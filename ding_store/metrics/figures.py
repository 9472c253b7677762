"""Figures of a run, from the reports of its members."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Protocol, Sequence

#: Parts of the work of a learner's loop and of a collector's, whose seconds they report as ``<part>_s``. A collector
#: spends the rest of its time mostly on its policy. ``append`` includes waits for room in the stream.
LEARNER_PARTS = ('wait_experience', 'wait_ranks', 'ingest', 'sample', 'train', 'publish', 'checkpoint')
COLLECTOR_PARTS = ('wait_learner', 'wait_weights', 'append', 'environment')
#: Bounds in seconds of the buckets in which collectors count how long they took to append a chunk. Longer ones are
#: counted in one more bucket. Bucket i is reported as ``append_bucket_<i>``.
APPEND_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
#: Bounds of the buckets in which a parameter server counts the staleness of gradients that it used, in versions. Larger
#: ones are counted in one more bucket. Bucket i is reported as ``staleness_bucket_<i>``.
STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64)
#: Counts of the processes that share their updates: what a parameter server used, and dropped because it was older than
#: ``max_staleness``, came after its update had gone on, or was of another server. Times that an update went on without
#: a worker. What workers sent, and their averages with a peer.
UPDATES = (
    'updates_used',
    'updates_dropped_stale',
    'updates_dropped_late',
    'updates_dropped_foreign',
    'stragglers',
    'updates_sent',
    'updates_averaged',
)

#: Settings that the learner reports, because its figures are compared with them.
SETTINGS = ('max_pending_bytes', 'max_lead', 'prefetch', 'samples_per_insert', 'min_size_to_sample')


class Report(Protocol):
    """The last report of a member, see ``ding_store.run.members.Member``."""

    id: str
    figures: Dict[str, Any]

    @property
    def clock(self) -> str: ...


class Reports(Protocol):
    """The last reports of all members of a run, see ``ding_store.run.members.Members``."""

    def of(self, role: str) -> Sequence[Report]: ...

    def total(self, role: str, figure: str) -> float: ...

    def began_s(self, role: str, clock: str) -> Optional[float]: ...

    def num_not_left(self, role: str) -> int: ...

    def num_running(self, role: str) -> int: ...

    def num_died(self) -> int: ...

    def policy_lag(self, name: str, version: int) -> int: ...


@dataclass
class Figures:
    """
    Overview:
        Progress of a run so far, from its members' own reports. ``began_s`` and ``ended_s`` are seconds of the
        learner's CLOCK_MONOTONIC.
    """

    env_step: int = 0
    train_iter: int = 0
    rows_appended: int = 0
    collectors_not_left: int = 0  # after the run: they were killed, and had appended more than they reported
    rows_ingested: int = 0
    chunks_lost: int = 0
    entries_corrupt: int = 0
    replay_rows: int = 0
    policy_version: int = 0
    policy_lag: int = 0  # the largest
    policy_versions: Dict[str, int] = field(default_factory=dict)  # of the learner, by name
    policy_lags: Dict[str, int] = field(default_factory=dict)
    eval_value: Optional[float] = None
    eval_iter: Optional[int] = None
    began_s: Optional[float] = None
    ended_s: Optional[float] = None
    began_step: int = 0  # at began_s
    began_iter: int = 0
    eval_step: Optional[int] = None
    replay_size: Optional[int] = None
    replay_bytes: Optional[int] = None
    checkpoint_overhead: Optional[float] = None
    max_pending_bytes: Optional[int] = None  # settings of the learner
    max_lead: Optional[int] = None
    prefetch: Optional[int] = None
    samples_per_insert: Optional[float] = None
    min_size_to_sample: Optional[int] = None
    learner: Optional[str] = None  # id of the learner's process. The following counts and seconds are since its start
    learner_step: int = 0
    learner_iter: int = 0
    rows_sampled: Optional[int] = None  # None: the pipeline has no OffPolicyLearner
    rows_inserted: int = 0
    learner_s: Dict[str, float] = field(default_factory=dict)  # part of its work -> seconds; 'up': all seconds
    num_collectors: int = 0  # that run
    num_died: int = 0  # processes of any role that failed or were killed
    num_workers: int = 0  # of ``--roles worker=N`` that run
    updates: Dict[str, int] = field(default_factory=dict)  # counts of the parameter server, and of gossip: ``UPDATES``
    staleness: Dict[str, int] = field(default_factory=dict)  # 'sum', 'max', and counts by bucket: '0', '1', ...
    collector_s: Dict[str, float] = field(default_factory=dict)  # the same, summed over all collectors

    @classmethod
    def of(cls, members: Reports) -> Figures:
        learners = _by_rank(members.of('learner') or members.of('worker'))
        learner = _newest(learners.get(0, ()))
        if learner is not None and 'rows' in learner.figures:
            # Ranks from before the run was distributed anew, over fewer learners, count no rows of their own.
            num = max(learner.figures.get('num_learners', 1), 1)
            learners = {rank: several for rank, several in learners.items() if rank < num}
        evaluator = _newest(members.of('evaluator'))
        figures = cls(
            rows_appended=int(members.total('collector', 'rows')),
            env_step=int(members.total('collector', 'env_step') + members.total('worker', 'env_step')),
        )
        figures.rows_ingested = sum(map(_rows_of, learners.values()))
        figures.chunks_lost = int(members.total('learner', 'lost'))
        figures.entries_corrupt = int(members.total('learner', 'corrupt'))
        # A killed collector's rows after its last report are counted when the learner reads them. The reports of
        # collectors that left are complete: there the two counts stay apart, because a difference shows a fault.
        figures.collectors_not_left = members.num_not_left('collector')
        if figures.collectors_not_left:
            figures.rows_appended = max(figures.rows_appended, figures.rows_ingested)
        if learner is not None:
            # A learner that was started again counts from a checkpoint, which it has not read at first.
            counted = next((each for each in reversed(learners[0]) if 'train_iter' in each.figures), learner)
            figures._add_learner(counted.figures, members)
            # CLOCK_MONOTONIC begins anew at each boot. If no collector shares the learner's clock, the loop begins with
            # the first chunk that the learner reads.
            began_s = members.began_s('collector', learner.clock)
            figures.began_s = learner.figures.get('began_s') if began_s is None else began_s
            # A learner that resumed may be the first that its server has seen.
            is_later = len(learners[0]) > 1 or learner.figures.get('began_step') or learner.figures.get('began_iter')
            if is_later and 'began_s' in learner.figures:
                figures._measure_loop_of(learner.figures)
            figures._add_own(learner)
            for rank in learners.keys() - {0}:
                figures._add_rank(learners[rank][-1].figures)
            figures._add_updates([each[-1].figures for each in learners.values()])
        figures.num_collectors, figures.num_died = members.num_running('collector'), members.num_died()
        figures.num_workers = members.num_running('worker')
        if members.of('worker') and learner is not None:
            # Each worker reports its own steps, and those of the whole run, of which rank 0 has the count at its start.
            of_run = [each.figures.get('run_env_step', 0) for each in members.of('worker')]
            figures.env_step = max(figures.env_step, *of_run)
            figures.began_step = learner.figures.get('began_step', 0)
            figures.learner_step = figures.env_step - figures.began_step
            evaluator = learner
        seconds = {part: members.total('collector', f'{part}_s') for part in ('up', *COLLECTOR_PARTS)}
        figures.collector_s = {part: value for part, value in seconds.items() if value}
        if evaluator is not None:
            figures.eval_step = evaluator.figures.get('eval_step')
            figures.eval_value = evaluator.figures.get('eval_value')
            figures.eval_iter = evaluator.figures.get('eval_iter')
        return figures

    def _add_learner(self, learner: dict, members: Reports) -> None:
        self.env_step = max(self.env_step, learner.get('env_step', 0))
        self.train_iter = learner.get('train_iter', 0)
        self.replay_rows = learner.get('replay_rows', 0)
        self.policy_version = learner.get('policy_version', 0)
        self.ended_s = learner.get('ended_s')
        self.policy_versions = learner.get('policy_versions', {})
        self.policy_lags = {name: members.policy_lag(name, version) for name, version in self.policy_versions.items()}
        self.policy_lag = max(self.policy_lags.values(), default=0)

    def _add_own(self, learner: Report) -> None:
        """Add what this learner's process counts from its own start."""
        own = learner.figures
        self.learner, self.checkpoint_overhead = learner.id, own.get('checkpoint_overhead')
        for name in ('replay_size', 'replay_bytes', *SETTINGS):
            setattr(self, name, own.get(name))
        self.learner_step = own.get('env_step', 0) - own.get('began_step', 0)
        self.learner_iter = own.get('train_iter', 0) - own.get('began_iter', 0)
        self.rows_sampled, self.rows_inserted = own.get('sampled'), own.get('rows', 0) - own.get('began_rows', 0)
        self.learner_s = {part: own[f'{part}_s'] for part in ('up', *LEARNER_PARTS) if f'{part}_s' in own}

    def _add_rank(self, own: dict) -> None:
        """Add what another rank than the first has: its part of the replay, of the samples and of the inserts."""
        self.replay_rows += own.get('replay_rows', 0)
        self.rows_inserted += own.get('rows', 0) - own.get('began_rows', 0)
        for name, figure in (
            ('replay_size', 'replay_size'),
            ('replay_bytes', 'replay_bytes'),
            ('rows_sampled', 'sampled'),
        ):
            known, more = getattr(self, name), own.get(figure)
            if more is not None:
                setattr(self, name, (known or 0) + more)

    def _add_updates(self, ranks: Sequence[dict]) -> None:
        """Add what the processes report that share their updates. Rank 0 has the parameter server."""
        self.updates = {
            name: sum(own.get(name, 0) for own in ranks) for name in UPDATES if any(name in own for own in ranks)
        }
        for own in ranks:
            for name, count in own.items():
                if name.startswith('staleness_'):
                    key = name[len('staleness_') :].replace('bucket_', '')
                    self.staleness[key] = self.staleness.get(key, 0) + count

    def _measure_loop_of(self, learner: dict) -> None:
        """Set times and rates to those of a restarted learner's own loop. Totals include the processes before it."""
        self.began_s, self.began_iter = learner['began_s'], learner.get('began_iter', 0)
        # A learner that did not resume the counts of those before it started at 0: its steps are the last of all.
        self.began_step = self.env_step - (learner.get('env_step', 0) - learner.get('began_step', 0))

    @property
    def loop_s(self) -> float:
        """Seconds from the first env step to the last iteration of the learner."""
        return max(self.ended_s - self.began_s, 1e-9) if self.began_s and self.ended_s else float('nan')

    def policies(self) -> str:
        """Return versions and lags as text, with names if there are several policies."""
        several = len(self.policy_versions) > 1
        texts = [
            f'{name + " " if several else ""}v{version} (lag {self.policy_lags.get(name, 0)})'
            for name, version in self.policy_versions.items()
        ]
        return ', '.join(texts) or 'v0 (lag 0)'

    def line(self) -> str:
        evaluated = '-' if self.eval_value is None else f'{self.eval_value:.1f} @ iter {self.eval_iter}'
        corrupt = f'  {self.entries_corrupt} corrupt entries skipped' if self.entries_corrupt else ''
        return (
            f'env steps {self.env_step}  train iters {self.train_iter}  replay {self.replay_rows} rows  '
            f'policy {self.policies()}  eval return {evaluated}{corrupt}'
        )


def _by_rank(learners: Sequence[Report]) -> Dict[int, List[Report]]:
    """Return the learners of each rank in the order in which they joined. A run with one learner has rank 0 only."""
    found: Dict[int, List[Report]] = {}
    for each in learners:
        found.setdefault(each.figures.get('rank', 0), []).append(each)
    return found


def _rows_of(learners: Sequence[Report]) -> int:
    """Return the rows that the learners of one rank have ingested, one after the other."""
    rows = 0
    for each in learners:
        # A learner that resumed with the replay of those before it counts all of their rows.
        rows = int(each.figures.get('rows', 0)) + (0 if each.figures.get('is_resumed') else rows)
    return rows


def _newest(members: Sequence[Report]) -> Optional[Report]:
    # The last that joined: a learner that was killed together with its launcher still counts as alive.
    return members[-1] if members else None
