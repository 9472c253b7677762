"""Learner side of the exchange: puts each chunk into the replay exactly once, and reports progress to collectors."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import numpy as np
from ding.framework import task
from ditk import logging

from ding_store.errors import ConfigError, CorruptPayload, ServerFull
from ding_store.middleware import learner_ranks
from ding_store.middleware.backpressure import ProgressWriter
from ding_store.middleware.chunks import ChunkDecoder, ChunkWriter, meta_of, narrowed_in, num_bytes
from ding_store.middleware.consumer_offset import ConsumerOffset
from ding_store.middleware.exchanger import Exchanger
from ding_store.middleware.ingest_plan import IngestPlan
from ding_store.middleware.insert_ratio import InsertRatio, RatioReadAhead
from ding_store.middleware.learner_ranks import LearnerRank
from ding_store.middleware.own_rank import own_rank
from ding_store.middleware.partitions import check_replay_path, progress_name_of, stream_of
from ding_store.middleware.pickled_chunks import is_pickled
from ding_store.middleware.read_ahead import ReadAhead
from ding_store.middleware.recorder import RecorderProcess
from ding_store.middleware.run_recorder import RunRecorder
from ding_store.run.ending import CHECKPOINTS
from ding_store.run.members import Members
from ding_store.run.recording import check_one_learner
from ding_store.run.session import RunSession
from ding_store.run.waiting import LOOK_EVERY_S, SLICE_S, best_effort
from ding_store.storage.base import Entry, EntryId

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext

LEARNER_READER = 'learner'
#: How long the learner waits at the run's end for collectors that are still appending their last chunk.
LAST_CHUNKS_S = 3.0


class LearnerExchanger(Exchanger):
    """
    Overview:
        DI-engine middleware that reads chunks in order, each exactly once. With ``train_ratio='keep'`` it reads one
        chunk per iteration of the learner's loop.
        If only a pusher follows, columns of trajectories go into its buffer as they are. Otherwise chunks become
        ``ctx.trajectories`` or ``ctx.episodes`` and pass through the pipeline's other middleware.
        While the store is away, the loop uses chunks that were read before, and trains as far as the ratio permits.
        With ``train_ratio='free'`` it trains on the rows in the replay. Acks and progress wait until the store is back.
    Attributes:
        - consumer_offset (:obj:`ConsumerOffset`): Which chunks are in the replay.
        - reader (:obj:`Reader`): The learner's reader of the stream, from the first iteration on.
        - read_ahead (:obj:`ReadAhead`): The thread that reads, from the first iteration on.
    """

    role = 'learner'
    _may_go_on = False  # True: an iteration may run without a chunk while the store is away
    _train_iter = -1
    _away_since: Optional[float] = None
    _unpublished: Optional[Tuple[EntryId, Dict[str, Any]]] = None  # the ack and the progress that are not sent yet
    _published: Optional[Dict[str, Any]] = None  # the progress of the last put
    _looked_at = 0.0
    _recorder: Optional[RunRecorder] = None
    _rank: Optional[LearnerRank] = None  # None: there is one learner
    _stream, _progress = stream_of(0, 1), progress_name_of(0, 1)
    _recording: Optional[RecorderProcess] = None  # of the experience, with store.record

    def __init__(self, session: RunSession, skip_n_iter: int) -> None:
        super().__init__(session, skip_n_iter)
        self._rank = own_rank()
        rank, num = (0, 1) if self._rank is None else (self._rank.rank, self._rank.num)
        if self._rank is not None:
            learner_ranks.check_settings(session.config)
        self._stream, self._progress = stream_of(rank, num), progress_name_of(rank, num)
        session.claim_part(
            f'{LEARNER_READER}-{rank}' if rank else LEARNER_READER,
            'are the learner',
            'Give one process of the script this role (task.add_role), and the others another',
        )
        self._decoder = ChunkDecoder(session.config.allow_pickle)
        self.consumer_offset = ConsumerOffset()
        self._taken: List[Entry] = []
        self._num_skipped = 0  # corrupt and lost entries that were acknowledged

    def _begin(self, ctx: OnlineRLContext, plan: IngestPlan) -> None:
        path, checkpoints = self._session.replay_path, self._session.checkpoints
        is_first = self._rank is None or self._rank.rank == 0
        if self._session.config.checkpoint is not None and checkpoints is None and is_first:
            raise ConfigError(
                'store.checkpoint is set, but the pipeline has no checkpointer. Add '
                'task.use(parts.Checkpointer(policy)) as its last middleware, or remove store.checkpoint.'
            )
        run = checkpoints.run if checkpoints is not None else None
        if path is not None:
            check_replay_path(path, self._session.config)
        if self._rank is not None:
            run = self._rank.begin(self._session, ctx, {'run': run}).get('run')
        if path is not None and plan.replay is not None:
            growth = plan.replay.growth
            if growth is not None:
                growth.fit(path)
            self.consumer_offset.keep_in(plan.replay, path, run)
            if growth is not None:
                growth.begin()
        if checkpoints is None:
            if is_first:
                self._session.store.delete(CHECKPOINTS)  # an earlier learner of the run may have left it
        elif self._session.config.checkpoint is not None:
            self._session.figures(max_restarts=self._session.config.checkpoint.max_restarts)
        if self._session.config.record is not None:  # before this learner acks anything
            check_one_learner(self._session.config.num_learners)
            self._recording = RecorderProcess(self._session, self._session.config.record)
        self.reader = self.consumer_offset.reader(
            self._session.store,
            self._stream,
            LEARNER_READER,
            on_corrupt=self._session.config.on_corrupt,
            # The read-ahead holds entries while the learner trains. With drop_oldest the stream may drop them then.
            copied=self._session.config.overflow == 'drop_oldest',
        )
        taken: Optional[EntryId] = self.reader.cursor
        if self.consumer_offset.is_resumed:
            ctx.env_step, ctx.env_episode = self.consumer_offset.env_step, self.consumer_offset.env_episode
        if self._rank is not None:
            self._rank.env_step, self._rank.env_episode = ctx.env_step, ctx.env_episode
        if self.consumer_offset.is_resumed:
            taken = self.consumer_offset.cursor
            self._session.count_versions_from(self.consumer_offset.policy_versions)
        if taken is not None and taken.number:
            # Entries up to here are never read again, and collectors may be waiting for this ack.
            self._advance(ctx, taken)
        # Everything in the read-ahead may become elements at once. Columns go into the table with the size they have.
        is_direct = plan.push_direct is not None

        def size_of(entry: Entry) -> int:
            return num_bytes(entry, as_elements=not is_direct or entry.header.get('kind') == 'episodes')

        # The read-ahead's thread starts now, so it reads after the entry that was acknowledged above.
        self.read_ahead = ReadAhead(self.reader, max_bytes=self._session.config.max_pending_bytes, size_of=size_of)
        ratio = getattr(plan.replay.buffer, 'limiter', None) if plan.replay is not None else None
        # Without samples_per_insert the loop keeps the pipeline's ratio: it waits for one chunk per iteration.
        self._ratio_read_ahead: Optional[RatioReadAhead] = None
        if isinstance(ratio, InsertRatio) and ratio.samples_per_insert is not None:
            self._ratio_read_ahead = RatioReadAhead(self.read_ahead, ratio)

    def _start_records(self) -> None:
        config = self._session.config
        # Those that look at the run compare figures with these limits.
        limits = dict(max_pending_bytes=config.max_pending_bytes, max_lead=config.max_lead, prefetch=config.prefetch)
        self._session.figures(**limits)
        if self._rank is None or self._rank.rank == 0:
            self._recorder = RunRecorder(self._session)

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self.read_ahead.wake()

    def _close_for_writing(self, ctx: OnlineRLContext) -> None:
        if self._rank is not None and not self._closed_for_writing:
            self._rank.end(ctx)
        super()._close_for_writing(ctx)

    def _receive(self, ctx: OnlineRLContext) -> bool:
        limit = 1 if self._session.config.train_ratio == 'keep' else 64
        if self._ratio_read_ahead is not None:
            self._ratio_read_ahead.begin(ctx.train_iter)
        # Middleware before the pusher may need elements. A loop that has not trained would spin without a chunk.
        is_free = (
            self._session.config.train_ratio == 'free'
            and self._ingest_plan is not None
            and bool(self._ingest_plan.push_direct)
        )
        self._may_go_on = is_free and self._train_iter not in (-1, ctx.train_iter)
        self._train_iter = ctx.train_iter
        taken = self._session.wait_for(
            'experience', lambda timeout_s: self._take(limit, timeout_s), 'collector', 'wait_experience'
        )
        self._taken = taken or []
        with self._session.time_spent.measure('ingest'):
            self._merge(ctx, self._taken)
        return taken is not None

    def _take(self, max_entries: int, timeout_s: float) -> Optional[List[Entry]]:
        is_away = self._is_away()
        if len(self.read_ahead) == 0 and not is_away:
            with best_effort(self._session.store):
                self._send_ack()
                self._session.store.flush()  # Collectors may be waiting for the ack of the last chunk.
                self._pass_over_skipped()
                self._restore_progress()
            is_away = self._is_away()
        if self._ratio_read_ahead is not None:
            return self._ratio_read_ahead.take(timeout_s)
        if is_away and self._may_go_on:
            return self.read_ahead.take(max_entries, 0.0)
        return self.read_ahead.take(max_entries, timeout_s) or None

    def _is_away(self) -> bool:
        is_away = self._session.store.is_away_for(self.reader.stream)
        if is_away and self._away_since is None:
            self._away_since = time.monotonic()
            logging.warning('ding_store: the store is away. Training continues as far as the ratio permits')
        elif not is_away and self._away_since is not None:
            logging.warning(f'ding_store: the store is back after {time.monotonic() - self._away_since:.1f} s')
            self._away_since = None
        return is_away

    def _pass_over_skipped(self) -> None:
        """Acknowledge skipped or lost entries: no chunk does that for them, and their writers may wait for it."""
        skipped = self.reader.num_corrupt + self.reader.num_lost
        if skipped == self._num_skipped or self._taken:
            return
        passed = self.read_ahead.passed()
        if passed is not None and (self._ratio_read_ahead is None or not self._ratio_read_ahead.is_holding):
            self._num_skipped = skipped
            self._advance(task.ctx, passed)

    def _merge(self, ctx: OnlineRLContext, entries: List[Entry]) -> bool:
        """Put chunks into the replay or into ``ctx``. Return True if ``ctx`` has elements for later middleware."""
        if 'began_s' not in self._member.figures and entries:
            began = dict(began_step=ctx.env_step, began_iter=ctx.train_iter, began_rows=self.consumer_offset.num_rows)
            self._session.figures(began_s=time.monotonic(), **began)
        assert self._ingest_plan is not None
        entries = self._chunks_of(entries)
        # An episode's rows are one element, which columns cannot express. Pickled chunks have no columns.
        is_direct = all(entry.header['kind'] == 'trajectories' and not is_pickled(entry) for entry in entries)
        push_direct = self._ingest_plan.push_direct if is_direct else None
        for i, taken in enumerate(entries):
            self._count(ctx, taken)
            entry = entries[i] = self.consumer_offset.take(taken)
            if entry.header['rows'] and push_direct is not None:
                schema, note = self._decoder.schema(entry), self.consumer_offset.note()
                push_direct(schema, self._decoder.columns(entry), note, meta_of([entry]), narrowed_in(entry))
        self.consumer_offset.leave_note(push_direct is None or not (entries and entries[-1].header['rows']))
        filled = [entry for entry in entries if entry.header['rows']]
        if filled and self._ingest_plan.replay is not None:
            self._ingest_plan.replay.meta = meta_of(filled)
        if filled and push_direct is None:
            self._materialise(ctx, filled)
            return True
        ctx.trajectories = []
        ctx.episodes = None
        return False

    def _count(self, ctx: OnlineRLContext, entry: Entry) -> None:
        steps, episodes = entry.header['env_step'], entry.header['env_episode']
        if self._rank is None:
            ctx.env_step += steps
            ctx.env_episode += episodes
            return
        # Each rank counts all steps, as each chunk's part says them. Ranks may read the chunks in another order, so
        # they agree on the largest count before each update.
        self._rank.env_step += steps
        self._rank.env_episode += episodes
        ctx.env_step = max(ctx.env_step, self._rank.env_step)
        ctx.env_episode = max(ctx.env_episode, self._rank.env_episode)

    def _chunks_of(self, entries: List[Entry]) -> List[Entry]:
        chunks = []
        for entry in entries:
            try:
                self._decoder.check(entry)
                chunks.append(entry)
            except CorruptPayload as error:
                self.reader.pass_over(error)
                self.consumer_offset.skip(entry)
        return chunks

    def _materialise(self, ctx: OnlineRLContext, entries: List[Entry]) -> None:
        trajectories: List[Any] = []
        episodes: List[Any] = []
        end_idx: List[int] = []
        for entry in entries:
            elements = self._decoder.elements(entry)
            if entry.header['kind'] == 'episodes':
                ends = np.cumsum(entry.header['lengths'])
                episodes += [elements[end - length : end] for end, length in zip(ends, entry.header['lengths'])]
            else:
                # Indices count within their chunk: add the number of steps that earlier chunks put before it.
                end_idx += [index + len(trajectories) for index in entry.header['end_idx']]
                trajectories += elements
        ctx.trajectories = trajectories if trajectories or not episodes else None
        ctx.episodes = episodes or None
        ctx.trajectory_end_idx = end_idx

    def _send(self, ctx: OnlineRLContext) -> None:
        # The rows are in the replay, so the stream may delete their entries and the collectors may continue.
        self.consumer_offset.commit()
        if self._taken:
            self._advance(ctx, self._taken[-1].id)
            self._taken = []
        if self._recorder is not None:
            self._recorder.write()
        if self._recording is not None:
            self._recording.look()

    @functools.cached_property
    def _progress_writer(self) -> ProgressWriter:
        return ProgressWriter(self._progress)

    def _advance(self, ctx: OnlineRLContext, ingested: EntryId) -> None:
        """
        Acknowledge entries up to ``ingested`` and send the progress, without waiting for the reply. The message wakes
        every collector, and with few cores they would run before the learner.
        """
        counts = dict(train_iter=ctx.train_iter, env_step=ctx.env_step, env_episode=ctx.env_episode)
        self._unpublished = ingested, {'ingested': list(ingested), **counts}
        if not self._is_away():
            with best_effort(self._session.store):
                self._send_ack()
        self._session.figures(
            rows=self.consumer_offset.num_rows,
            chunks=self.consumer_offset.num_chunks,
            is_resumed=self.consumer_offset.is_resumed,
            **(self._ingest_plan.replay_figures() if self._ingest_plan else {'replay_rows': 0}),
            lost=self.reader.num_lost,
            corrupt=self.reader.num_corrupt,
            **counts,
        )
        if not self._session.finished:
            self._session.figures(ended_s=time.monotonic())

    def _send_ack(self) -> None:
        if self._unpublished is not None:
            ingested, progress = self._unpublished
            self._progress_writer.publish(self.reader, ingested, progress)
            self._unpublished, self._published = None, progress

    def _restore_progress(self) -> None:
        """Put the progress again if the server lost it. Collectors that wait for it may be the only source of rows."""
        now = time.monotonic()
        if self._published is None or now < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at = now
        newest = self._session.store.get(self._progress)
        if newest is None or newest.header.get('ingested') != self._published['ingested']:
            self._session.store.put(self._progress, self._published, {})

    def _leave(self, ctx: OnlineRLContext) -> None:
        """Put all that collectors appended before the run's end into the replay, so that both sides' counts agree."""
        self.read_ahead.wake()
        Members(self._session.store).wait_until_left('collector', LAST_CHUNKS_S)
        self._end_of_stream()
        assert self._ingest_plan is not None
        for entry in self._rest():
            if not self._ingest_plan.can_push and entry.header['rows']:
                break  # without a pusher the chunk has no consumer: it stays unread and uncounted
            # ctx still has fields of the last iteration, such as train_data, which do not belong to this chunk.
            renewed = ctx.renew()
            if self._merge(renewed, [entry]):
                self._ingest_plan.push_through(renewed)
            for key in renewed._kept_keys:
                setattr(ctx, key, getattr(renewed, key))
            self._taken = [entry]
        self._send(ctx)
        self._send_ack()
        self._session.store.flush()
        if self._recording is not None:
            self._recording.wait()
        if self._recorder is not None:
            self._recorder.close()

    def _rest(self) -> List[Entry]:
        if self._ratio_read_ahead is None:
            return self.read_ahead.rest()
        self._ratio_read_ahead.ratio.end()
        return self._ratio_read_ahead.rest() + self.read_ahead.rest()

    def _end_of_stream(self) -> None:
        # The read-ahead's thread sleeps until an entry arrives. An entry without rows wakes it at once.
        header = dict(kind='trajectories', env_step=0, env_episode=0, end_idx=[])
        try:
            ChunkWriter(self._session.store, self._stream).write([], header, timeout_s=SLICE_S)
        except (TimeoutError, ServerFull):
            pass  # the stream is full, so its entries wake the thread
