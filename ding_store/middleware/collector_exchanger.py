"""Collector side of the exchange: appends each iteration's experience as one chunk."""

from __future__ import annotations

import bisect
import contextlib
import copy
import random
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional

import numpy as np
import torch
from ding.framework import task
from ditk import logging

from ding_store.errors import AppendUnsettled, ServerFull
from ding_store.metrics.figures import APPEND_BUCKETS_S
from ding_store.middleware.backpressure import LOOK_EVERY_S, Backpressure, progress_of
from ding_store.middleware.chunks import ChunkWriter
from ding_store.middleware.consumer_offset import ENV_ID
from ding_store.middleware.exchanger import Exchanger
from ding_store.middleware.ingest_plan import IngestPlan
from ding_store.middleware.partitions import Part, Partitioner, progress_name_of
from ding_store.middleware.ragged_chunks import ragged_names
from ding_store.run.ending import FINISH
from ding_store.run.members import Members
from ding_store.run.session import RunSession
from ding_store.run.several_learners import stream_of
from ding_store.run.waiting import SLICE_S
from ding_store.storage.base import EntryId
from ding_store.storage.store import Store

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext

#: Low bits of ``env_data_id``, in which each collector numbers its episodes from 0. The bits above hold its ordinal.
ENV_ID_BITS = 32
#: Stands for the id of a chunk that the store's writer will append later, once the full stream or server has room.
UNSETTLED = EntryId('', 0)
#: How long a part of a chunk waits for room before the part of the next partition is tried.
BUSY_S = 0.05
#: Difference between the seeds of two neighbouring collectors.
SEED_STEP = 10007


def take_ordinal(store: Store) -> int:
    """
    Overview:
        Return a number, counted from 0, that no other collector of the run has. A server that lost its memory counts
        from 0 again, so the numbers that members report are skipped.
    """
    known = [member.figures.get('ordinal', -1) for member in Members(store).refresh().of('collector')]
    free = max(known, default=-1) + 1
    ordinal = store.add('collectors', 1) - 1
    # Numbers that the second addition skips stay unused, so collectors that join at once still get different numbers.
    return ordinal if ordinal >= free else store.add('collectors', free - ordinal) - 1


class CollectorExchanger(Exchanger):
    """
    Overview:
        DI-engine middleware that appends each iteration's trajectories or episodes as one chunk. The chunk also has the
        *increments* of env_step and env_episode, so they are counted exactly as often as the rows.
    """

    role = 'collector'
    is_vital = False

    def __init__(self, session: RunSession, skip_n_iter: int) -> None:
        super().__init__(session, skip_n_iter)
        config, num = session.config, session.num_partitions
        self._chunks = [
            ChunkWriter(session.store, stream_of(i, num), config.allow_pickle, config.share_frames is not False)
            for i in range(num)
        ]
        self._ordinal = take_ordinal(session.store)
        session.figures(ordinal=self._ordinal)
        self._partitioner: Optional[Partitioner] = None
        self._backpressures = [
            Backpressure(session.store, config.max_lead, lambda: session.is_leaving, progress_name_of(i, num))
            for i in range(num)
        ]
        self._first_step = self._sent_steps = self._sent_episodes = self._num_rows = self._num_chunks = 0
        self._append_buckets: Dict[str, int] = {}
        # All collectors run one script with one seed, so they would collect the same experience. All but the first
        # shift that seed by their ordinal.
        self._seed_shift = SEED_STEP * self._ordinal
        self._has_collected = False
        self._measured: List[Any] = []
        task.use_wrapper(self._prepare_envs)

    def _prepare_envs(self, middleware: Any) -> Any:
        """
        Measure the steps of the envs of a collector that the script passes to ``task.use``. Shift the seed of the
        collector, and seed its envs with it.
        """
        cfg: Any = getattr(middleware, 'cfg', None)
        env: Any = getattr(middleware, 'env', None)
        if hasattr(env, 'step') and not any(env is known for known in self._measured):
            self._measured.append(env)
            with contextlib.suppress(AttributeError):  # an object that cannot be changed is not measured
                env.step = self._session.time_spent.measured('environment', env.step)
        if self._seed_shift and hasattr(env, 'seed') and isinstance(getattr(cfg, 'seed', None), int):
            # DI-engine's collectors seed their envs with cfg.seed again while they collect at random.
            middleware.cfg = cfg = copy.copy(cfg)
            cfg.seed += self._seed_shift
            env.seed(cfg.seed)
        return middleware

    def _begin(self, ctx: OnlineRLContext, plan: IngestPlan) -> None:
        if self._seed_shift:
            torch.manual_seed(torch.initial_seed() % 2**31 + self._seed_shift)
            random.seed(random.getrandbits(31) + self._seed_shift)
            self._seed_numpy()
        # A collector that restarts or joins late starts at the run's env_step, which sets how much it explores.
        num = self._session.num_partitions
        progress = progress_of(self._session.store.get(progress_name_of(0, num)), 'env_step')
        if progress is not None:
            ctx.env_step = self._first_step = self._sent_steps = progress['env_step']
        # Every process of the script makes the learner's replay, so a process without one has a learner without one.
        for each in self._chunks:
            each.ragged = ragged_names(self._session.replays)
        self._partitioner = Partitioner(num, bool(self._session.replays), self._ordinal % num)

    def _receive(self, ctx: OnlineRLContext) -> bool:
        if self._num_chunks == 0:
            self._session.figures(began_s=time.monotonic())
        config = self._session.config
        keeps_ratio = config.train_ratio == 'keep' or config.samples_per_insert is not None
        if ctx.total_step >= self._skip_n_iter and keeps_ratio:
            self._session.wait_for(
                'the learner to take the last chunks',
                self._wait_within_lead,
                'learner',
                'wait_learner',
                LOOK_EVERY_S if len(self._backpressures) == 1 else SLICE_S,
            )
        return not self._session.is_leaving

    def _wait_within_lead(self, timeout_s: float) -> Optional[bool]:
        """
        Wait until the lead is within bounds in one partition. All learners take a chunk in each iteration, so one of
        them that waits for data stops all, and must get some however many chunks the others have left.
        """
        *others, last = self._backpressures
        if any(each.wait_within_lead(0.0) for each in others):
            return True
        return last.wait_within_lead(timeout_s)

    def _send(self, ctx: OnlineRLContext) -> None:
        steps, episodes = ctx.env_step - self._sent_steps, ctx.env_episode - self._sent_episodes
        header = dict(
            kind='trajectories',
            env_step=steps,
            env_episode=episodes,
            end_idx=[int(i) for i in ctx.trajectory_end_idx or []],
            train_iter=ctx.train_iter,
            policy_version=self._member.figures.get('policy_version', 0),
            policy_versions=self._session.policy_versions,
        )
        elements = ctx.trajectories or []
        if ctx.trajectories is None and ctx.episodes is not None:
            header.update(kind='episodes', lengths=[len(episode) for episode in ctx.episodes])
            elements = [step for episode in ctx.episodes for step in episode]
        if (elements or steps or episodes) and self._append_parts(elements, header):
            self._sent_steps, self._sent_episodes = ctx.env_step, ctx.env_episode
            self._num_chunks += 1
            counts = dict(env_step=self._sent_steps - self._first_step, env_episode=self._sent_episodes)
            self._session.figures(rows=self._num_rows, chunks=self._num_chunks, **counts, **self._append_buckets)
        if self._seed_shift and not self._has_collected:
            # Envs seed numpy when they launch. Collectors that are not DI-engine's did that with the script's seed.
            self._seed_numpy()
        self._has_collected = True

    def _append_parts(self, elements: List[Any], header: dict) -> bool:
        """
        Append a chunk to all partitions, waiting for room. A partition without room holds up no other one: its learner
        may wait for one that has no chunk. Return False if the run ended before any part was appended.
        """
        assert self._partitioner is not None
        parts = dict(enumerate(self._partitioner.split(elements, header)))
        num_parts, began_s, fixups = len(parts), time.monotonic(), {ENV_ID: self._ordinal << ENV_ID_BITS}

        def append(timeout_s: float) -> Optional[bool]:
            for partition, part in list(parts.items()):
                entry_id = self._try_append(partition, part, fixups, timeout_s if len(parts) == 1 else BUSY_S)
                if entry_id is not None:
                    del parts[partition]
                    self._count_appended(partition, part, entry_id, time.monotonic() - began_s)
            return None if parts else True

        # The wait for a full stream is here and not in the store, where it could not end on task.finish.
        self._session.wait_for('room in the experience stream (is the learner running?)', append, 'learner', 'append')
        return len(parts) < num_parts

    def _count_appended(self, partition: int, part: Part, entry_id: EntryId, duration_s: float) -> None:
        self._backpressures[partition].appended(entry_id)
        self._num_rows += len(part.elements)
        bucket = f'append_bucket_{bisect.bisect_left(APPEND_BUCKETS_S, duration_s)}'
        self._append_buckets[bucket] = self._append_buckets.get(bucket, 0) + 1

    def _try_append(self, partition: int, part: Part, fixups: dict, timeout_s: float) -> Optional[EntryId]:
        try:
            return self._chunks[partition].write(part.elements, part.header, fixups, timeout_s)
        except TimeoutError:
            return None
        except AppendUnsettled as error:
            if not error.needs_room:
                raise
            logging.warning(f'ding_store: {error}')
            return UNSETTLED
        except ServerFull as error:
            self._session.note_full(error)
            # The server does not announce when it has room. The run may end in the meantime, so wait for that.
            self._session.store.get(FINISH, timeout_s=timeout_s)
            return None

    def _leave(self, ctx: OnlineRLContext) -> None:
        self._session.store.flush()  # Once all members have left, the run is deleted, and later entries would be lost.
        # Leave before the script's own clean-up: the learner waits for that before it reads the last chunks.
        if not self._session.leaves_alone:
            self._session.leave()

    def _seed_numpy(self) -> None:
        np.random.seed((int(np.random.randint(2**31)) + self._seed_shift) % 2**32)
