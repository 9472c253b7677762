"""The exporter of ``ding-store metrics``: a run's status as Prometheus metrics, see docs/reference/metrics.md."""

from __future__ import annotations

import itertools
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ding_store.errors import StoreError
from ding_store.metrics.figures import APPEND_BUCKETS_S, COLLECTOR_PARTS, LEARNER_PARTS, STALENESS_BUCKETS
from ding_store.metrics.screen import is_experience
from ding_store.metrics.sizing import collectors_needed

#: Most series that one name gets from a run, so that a garbled report cannot fill Prometheus.
MAX_SERIES = 1000
#: Parts of a collector's work that are no waits.
COLLECTOR_WORK = [part for part in COLLECTOR_PARTS if not part.startswith('wait_')]

Status = Mapping[str, Any]
Samples = Dict[Tuple[str, ...], float]


class RunCollector(Collector):
    """
    Overview:
        Reads a run's status at each scrape. While the store is away, ``ding_store_server_up`` is 0, and alone.
        If one of several servers is away, it is 0 beside what the others have.
    Arguments:
        - run (:obj:`str`): The label ``run`` of all series.
        - read (:obj:`Callable`): Returns the status, see docs/reference/status-json.md.
    """

    def __init__(self, run: str, read: Callable[[], Status]) -> None:
        self._run, self._read = run, read
        self._lock = threading.Lock()  # Prometheus and a person may ask at once

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry then reads no status when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        status: Optional[Status] = None
        with self._lock:
            try:
                status = self._read()
            except StoreError:
                pass
        is_up = status is not None and not status['servers_away']
        yield self._gauge('server_up', 'Whether all servers of the store answer (1) or not (0).', {(): float(is_up)})
        if status is not None:
            yield from self._of_run(status)
            yield from self._of_members(status['members'])
            yield from self._of_streams(status)
            yield from self._of_servers(status['memory'])

    def _of_run(self, status: Status) -> Iterator[Metric]:
        figures = status['figures']
        for name, figure, text in COUNTERS:
            yield self._counter(name, text, {(): figures[figure]})
        for name, figure, text in GAUGES:
            if figures[figure] is not None:
                yield self._gauge(name, text, {(): figures[figure]})
        if status['samples_per_insert'] is not None:
            text = "Rows sampled per row inserted since the learner's start."
            yield self._gauge('samples_per_insert', text, {(): status['samples_per_insert']})
        needed = collectors_needed(status['shares'], figures['num_collectors'])
        text = 'Collectors that the learner needs, by what it and they have waited for since the last scrape.'
        yield self._gauge('collectors_needed', text, {} if needed is None else {(): needed})
        versions = {(name,): version for name, version in figures['policy_versions'].items()}
        yield self._gauge('policy_version', "Version of the learner's policy.", versions, 'policy')
        lags = {(name,): lag for name, lag in figures['policy_lags'].items()}
        yield self._gauge('policy_lag', 'Versions by which the oldest policy of a collector is behind.', lags, 'policy')
        yield from self._of_time(figures['learner_s'], figures['collector_s'])
        if figures['updates']:
            yield from self._of_updates(figures['updates'], figures['staleness'])

    def _of_updates(self, updates: Mapping[str, int], staleness: Mapping[str, int]) -> Iterator[Metric]:
        for name, figure, text in UPDATE_COUNTERS:
            if figure in updates:
                yield self._counter(name, text, {(): updates[figure]})
        text = 'Updates that the parameter server has dropped.'
        prefix = 'updates_dropped_'
        dropped = {(name[len(prefix) :],): count for name, count in updates.items() if name.startswith(prefix)}
        yield self._counter('updates_dropped', text, dropped, 'why')
        if staleness:
            text = 'Staleness of the gradients that were used, in versions of the parameters.'
            family = HistogramMetricFamily('ding_store_update_staleness', text, labels=['run'])
            counts = [staleness.get(str(i), 0) for i in range(len(STALENESS_BUCKETS) + 1)]
            bounds = [*map(str, map(float, STALENESS_BUCKETS)), '+Inf']
            buckets = list(zip(bounds, itertools.accumulate(counts)))
            family.add_metric([self._run], buckets=buckets, sum_value=staleness.get('sum', 0))
            yield family

    def _of_time(self, learner: Mapping[str, float], collectors: Mapping[str, float]) -> Iterator[Metric]:
        waits = {(part[5:],): learner[part] for part in LEARNER_PARTS if part in learner and part.startswith('wait_')}
        yield self._counter('learner_wait_seconds', 'Seconds that the learner has waited.', waits, 'for')
        work = {(part,): learner[part] for part in LEARNER_PARTS if part in learner and not part.startswith('wait')}
        yield self._counter('learner_work_seconds', "Seconds of the learner's loop in each part of it.", work, 'part')
        text = 'Seconds since the start of the learner.'
        yield self._counter('learner_seconds', text, {(): learner['up']} if 'up' in learner else {})
        waits = {(part[5:],): seconds for part, seconds in collectors.items() if part.startswith('wait_')}
        yield self._counter('collector_wait_seconds', 'Seconds that collectors have waited, summed.', waits, 'for')
        work = {(part,): seconds for part, seconds in collectors.items() if part in COLLECTOR_WORK}
        text = 'Seconds of the collectors in other parts of their work, summed.'
        yield self._counter('collector_work_seconds', text, work, 'part')
        text = 'Seconds since their starts of all collectors, summed.'
        yield self._counter('collector_seconds', text, {(): collectors['up']} if 'up' in collectors else {})

    def _of_members(self, members: List[Mapping[str, Any]]) -> Iterator[Metric]:
        steps: Samples = {}
        reports: Samples = {}
        states: Samples = {}
        appends, seconds = [0] * (len(APPEND_BUCKETS_S) + 1), 0.0
        for member in members:
            figures, key = member['figures'], (member['role'], str(member['node_id']))
            rank = (str(figures['rank']),) if 'rank' in figures else ('',)  # an empty label is none to Prometheus
            states[member['role'], member['state']] = states.get((member['role'], member['state']), 0.0) + 1.0
            if member['state'] == 'alive' and 'at_s' in figures:
                reports[key + rank] = max(figures['at_s'], reports.get(key + rank, 0.0))
            if member['role'] in ('collector', 'worker'):
                steps[key] = steps.get(key, 0.0) + figures.get('env_step', 0)
            if member['role'] == 'collector':
                appends = [count + figures.get(f'append_bucket_{i}', 0) for i, count in enumerate(appends)]
                seconds += figures.get('append_s', 0.0)
        yield self._counter('env_steps', 'Environment steps of each collector or worker.', steps, 'role', 'node')
        yield self._gauge('members', 'Processes by role and state.', states, 'role', 'state')
        text = 'Seconds since 1970 at the last report of a process that runs, by its own clock.'
        yield self._gauge('last_report_timestamp_seconds', text, reports, 'role', 'node', 'rank')
        yield from self._of_ranks([each for each in members if each['role'] == 'learner' and 'rank' in each['figures']])
        text = 'Seconds that collectors took to append a chunk, with waits for room in the stream.'
        family = HistogramMetricFamily('ding_store_append_seconds', text, labels=['run'])
        bounds = [*map(str, APPEND_BUCKETS_S), '+Inf']
        family.add_metric([self._run], buckets=list(zip(bounds, itertools.accumulate(appends))), sum_value=seconds)
        yield family

    def _of_ranks(self, learners: List[Mapping[str, Any]]) -> Iterator[Metric]:
        """Yield the seconds of each of several learners. The last that joined with a rank is the present one."""
        last = {str(each['figures']['rank']): each['figures'] for each in learners}
        seconds = {(rank,): figures['up_s'] for rank, figures in last.items() if 'up_s' in figures}
        yield self._counter('rank_seconds', 'Seconds since the start of each of several learners.', seconds, 'rank')
        parts = {
            (rank, part): figures[f'{part}_s']
            for rank, figures in last.items()
            for part in LEARNER_PARTS
            if f'{part}_s' in figures
        }
        text = 'Seconds of each of several learners in each part of its loop. The slowest waits least for the ranks.'
        yield self._counter('rank_part_seconds', text, parts, 'rank', 'part')

    def _of_streams(self, status: Status) -> Iterator[Metric]:
        streams = status['streams']
        for name, figure, text in STREAM_GAUGES:
            yield self._gauge(name, text, {(each,): stream[figure] for each, stream in streams.items()}, 'stream')
        dropped = {(name,): stream['num_dropped'] for name, stream in streams.items()}
        yield self._counter('stream_dropped_entries', 'Entries that the stream has dropped.', dropped, 'stream')
        lags: Samples = {
            (name, reader): stream['last'] - acked
            for name, stream in streams.items()
            for reader, acked in stream['readers'].items()
        }
        yield self._gauge('reader_lag_entries', 'Entries that a reader has not read.', lags, 'stream', 'reader')
        limit = status['figures']['max_pending_bytes']
        limits = {} if limit is None else {(name,): limit for name in streams if is_experience(name)}
        yield self._gauge('stream_limit_bytes', 'Bytes that the stream may hold.', limits, 'stream')

    def _of_servers(self, memory: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        used = {(address,): each['used_bytes'] for address, each in memory.items()}
        yield self._gauge('server_memory_bytes', 'Memory that the server uses.', used, 'server')
        limits = {(address,): each['limit_bytes'] for address, each in memory.items() if each['limit_bytes']}
        yield self._gauge('server_memory_limit_bytes', 'The maxmemory of the server.', limits, 'server')

    def _gauge(self, name: str, text: str, samples: Mapping[Any, float], *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(f'ding_store_{name}', text, labels=['run', *labels]), samples)

    def _counter(self, name: str, text: str, samples: Mapping[Any, float], *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(f'ding_store_{name}', text, labels=['run', *labels]), samples)

    def _filled(self, family: Any, samples: Mapping[Any, float]) -> Metric:
        for labels, value in list(samples.items())[:MAX_SERIES]:
            family.add_metric([self._run, *labels], float(value))
        found: Metric = family
        return found


#: Name, figure of the run, help.
COUNTERS = (
    ('train_iterations', 'train_iter', 'Training iterations.'),
    ('rows_appended', 'rows_appended', 'Rows that collectors have sent.'),
    ('rows_ingested', 'rows_ingested', 'Rows that the learner has read.'),
    ('entries_lost', 'chunks_lost', 'Entries of experience that were lost.'),
    ('entries_corrupt', 'entries_corrupt', 'Damaged entries of experience that were skipped.'),
)
UPDATE_COUNTERS = (
    ('updates_sent', 'updates_sent', 'Updates that workers or learners have sent to the server.'),
    ('updates_used', 'updates_used', 'Updates that the parameter server has used.'),
    ('updates_averaged', 'updates_averaged', 'Averages with a random peer (gossip).'),
    ('stragglers', 'stragglers', 'Times that an update went on without a worker.'),
)
GAUGES = (
    ('replay_rows', 'replay_rows', 'Rows in the replay.'),
    ('replay_capacity_rows', 'replay_size', 'Rows that fit into the replay.'),
    ('replay_bytes', 'replay_bytes', 'Bytes of the rows in the replay.'),
    ('checkpoint_overhead_ratio', 'checkpoint_overhead', 'Share of the time that checkpoints have cost.'),
    ('eval_return', 'eval_value', 'Mean return of the newest evaluation.'),
    ('eval_iteration', 'eval_iter', 'Training iteration of the newest evaluation.'),
)
STREAM_GAUGES = (
    ('stream_pending_bytes', 'pending_bytes', 'Bytes in the stream that some reader has not read.'),
    ('stream_last_entry', 'last', 'Number of the newest entry.'),
)
