"""Learner side of the exchange: puts each chunk into the replay exactly once, and reports progress to collectors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import numpy as np
from ding.framework import task
from ditk import logging

from ding_store.errors import ConfigError, CorruptPayload
from ding_store.file_systems import shared_at
from ding_store.metrics.figures import SETTINGS
from ding_store.middleware import learner_ranks
from ding_store.middleware.chunks import ChunkDecoder, meta_of, narrowed_in, num_bytes
from ding_store.middleware.consumer_offset import ConsumerOffset
from ding_store.middleware.exchanger import Exchanger
from ding_store.middleware.feed import LEARNER_READER, Feed
from ding_store.middleware.ingest_plan import IngestPlan
from ding_store.middleware.insert_ratio import InsertRatio, RatioReadAhead
from ding_store.middleware.learner_ranks import LearnerRank
from ding_store.middleware.own_rank import own_rank
from ding_store.middleware.partitions import check_replay_path, own_partitions
from ding_store.middleware.pickled_chunks import is_pickled
from ding_store.middleware.recorder import RecorderProcess
from ding_store.middleware.run_recorder import RunRecorder
from ding_store.run.ending import CHECKPOINTS
from ding_store.run.members import Members
from ding_store.run.session import RunSession
from ding_store.run.waiting import best_effort
from ding_store.storage.base import Entry, EntryId

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext

#: How long the learner waits at the run's end for collectors that are still appending their last chunk.
LAST_CHUNKS_S = 3.0


class LearnerExchanger(Exchanger):
    """
    Overview:
        DI-engine middleware that reads chunks in order, each exactly once. With ``train_ratio='keep'`` it reads one
        chunk per iteration of the learner's loop.
        If only a pusher follows, columns of trajectories go into its buffer as they are. Otherwise chunks become
        ``ctx.trajectories`` or ``ctx.episodes`` and pass through the pipeline's other middleware.
        A collector sends a part of each chunk to every partition. A learner with several partitions takes one part from
        each of them where it says "chunk" here. After one of them lost a part, it takes the same part of the others
        together with the next one, so they do not stay behind.
        While the store is away, the loop uses chunks that were read before, and trains as far as the ratio permits.
        With ``train_ratio='free'`` it trains on the rows in the replay. Acks and progress wait until the store is back.
    Attributes:
        - feeds (:obj:`Dict[str, Feed]`): Stream -> what this learner has of it, in the order of the partitions.
        - consumer_offset (:obj:`ConsumerOffset`): That of the first partition, which commits those of all.
    """

    role = 'learner'
    _may_go_on = False  # True: an iteration may run without a chunk while the store is away
    _train_iter = -1
    _away_since: Optional[float] = None
    _recorder: Optional[RunRecorder] = None
    _rank: Optional[LearnerRank] = None  # None: there is one learner
    _counts_with_others = False  # ``num_passed`` begins where that of the other learners does
    _recording: Optional[RecorderProcess] = None  # of the experience, with store.record

    def __init__(self, session: RunSession, skip_n_iter: int) -> None:
        super().__init__(session, skip_n_iter)
        self._rank = own_rank()
        rank, num = (0, 1) if self._rank is None else (self._rank.rank, self._rank.num)
        num_partitions = session.num_partitions
        learner_ranks.check_settings(session.config)
        session.claim_part(
            f'{LEARNER_READER}-{rank}' if rank else LEARNER_READER,
            'are the learner',
            'Give one process of the script this role (task.add_role), and the others another',
        )
        self._decoder = ChunkDecoder(session.config.allow_pickle)
        feeds = [Feed(session.store, each, num_partitions) for each in own_partitions(rank, num, num_partitions)]
        self.feeds = {each.stream: each for each in feeds}
        self.consumer_offset = feeds[0].offset = ConsumerOffset({each.stream: each.offset for each in feeds[1:]})
        if len(feeds) > 1:
            first, *_ = own_partitions(rank, num, num_partitions)
            session.figures(first_partition=first, own_partitions=len(feeds))
        self._taken: List[Entry] = []

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
            shared = shared_at(path)
            if shared is not None:
                logging.warning(
                    f'ding_store: the replay is in {path!r}, which is on {shared.kind}. Its pages travel to a file '
                    'server, and a lost server ends the learner. Set buffer_path to a directory of this host, and keep '
                    'the checkpoints where they are.'
                )
        if self._session.config.record is not None and is_first:
            # Other ranks read, and acknowledge, only after rank 0 has begun with them.
            self._recording = RecorderProcess(self._session, self._session.config.record)
        if self._rank is not None:
            run = self._rank.begin(self._session, ctx, {'run': run}).get('run')
        if path is not None and plan.replay is not None:
            growth = plan.replay.growth
            if growth is not None:
                growth.fit(path)
            self.consumer_offset.keep_in(plan.replay, path, run, self._session.config.num_learners)
            if growth is not None:
                growth.begin()
        if checkpoints is None:
            if is_first:
                self._session.store.delete(CHECKPOINTS)  # an earlier learner of the run may have left it
        elif self._session.config.checkpoint is not None:
            self._session.figures(max_restarts=self._session.config.checkpoint.max_restarts)
        for feed in self.feeds.values():
            feed.open(
                on_corrupt=self._session.config.on_corrupt,
                # The read-ahead holds entries while the learner trains. With drop_oldest the stream may drop them then.
                copied=self._session.config.overflow == 'drop_oldest',
            )
        is_resumed = self.consumer_offset.is_resumed
        if is_resumed:
            ctx.env_step, ctx.env_episode = self._counted()
        if self._rank is not None:
            self._rank.env_step, self._rank.env_episode = ctx.env_step, ctx.env_episode
        for feed in self.feeds.values():
            if is_resumed:
                self._session.count_versions_from(feed.offset.policy_versions)
            taken = feed.offset.cursor if is_resumed else feed.reader.cursor
            if taken is not None and taken.number:
                # Entries up to here are never read again, and collectors may be waiting for this ack.
                self._advance(ctx, feed, taken)
        # Everything in the read-ahead may become elements at once. Columns go into the table with the size they have.
        is_direct = plan.push_direct is not None

        def size_of(entry: Entry) -> int:
            return num_bytes(entry, as_elements=not is_direct or entry.header.get('kind') == 'episodes')

        # The threads start now, so they read after the entries that were acknowledged above.
        for feed in self.feeds.values():
            feed.start(max_bytes=self._session.config.max_pending_bytes // len(self.feeds), size_of=size_of)
        ratio = getattr(plan.replay.buffer, 'limiter', None) if plan.replay is not None else None
        # Without samples_per_insert the loop keeps the pipeline's ratio: it waits for one chunk per iteration.
        self._ratio_read_ahead: Optional[RatioReadAhead] = None
        if isinstance(ratio, InsertRatio) and ratio.samples_per_insert is not None:
            self._ratio_read_ahead = RatioReadAhead(lambda timeout_s: self._take_chunk(1, timeout_s), ratio)

    def _start_records(self) -> None:
        settings = {name: getattr(self._session.config, name) for name in SETTINGS}
        self._session.figures(**{name: value for name, value in settings.items() if value is not None})
        if self._rank is None or self._rank.rank == 0:
            self._recorder = RunRecorder(self._session)
        # Counts of a run that goes on are known before its first chunk.
        if task.ctx.train_iter or self.consumer_offset.is_resumed:
            self._session.figures(**self._began(task.ctx))
            self._report_counts(task.ctx)
            self._session.report_now()

    def _began(self, ctx: OnlineRLContext) -> Dict[str, int]:
        """Return the counts from which on the figures of this process count."""
        return dict(began_step=ctx.env_step, began_iter=ctx.train_iter, began_rows=self._num_rows())

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._wake()

    def _wake(self) -> None:
        for feed in self.feeds.values():
            feed.read_ahead.wake()

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
        if not is_away and not all(len(feed.read_ahead) for feed in self.feeds.values()):
            with best_effort(self._session.store):
                self._send_acks()
                self._session.store.flush()  # Collectors may be waiting for the ack of the last chunk.
                self._pass_over_skipped()
                for feed in self.feeds.values():
                    feed.restore_progress()
            is_away = self._is_away()
        if self._ratio_read_ahead is not None:
            return self._ratio_read_ahead.take(timeout_s)
        return self._take_chunk(max_entries, timeout_s, must_wait=not (is_away and self._may_go_on))

    def _take_chunk(self, max_entries: int, timeout_s: float, must_wait: bool = True) -> Optional[List[Entry]]:
        """Take up to ``max_entries`` of each partition once each has one, or return None if that takes too long."""
        deadline = time.monotonic() + timeout_s
        for feed in self.feeds.values() if must_wait else ():
            if not feed.read_ahead.wait(max(0.0, deadline - time.monotonic())):
                return None
        most = max(self._num_passed(), 0 if self._rank is None else self._rank.most_passed)
        if self._rank is not None and self._rank.most_passed and not self._counts_with_others:
            # The others may go on with the counts in their replays. This learner has none, and is not behind.
            self._counts_with_others, more = True, most - self._num_passed()
            for each in self.consumer_offset.all():
                each.num_passed += 0 if self.consumer_offset.is_resumed else more
        taken = []
        for feed in self.feeds.values():
            taken += feed.read_ahead.take(max_entries + most - feed.offset.num_passed, 0.0)
        return taken

    def _is_away(self) -> bool:
        is_away = any(map(self._session.store.is_away_for, self.feeds))
        if is_away and self._away_since is None:
            self._away_since = time.monotonic()
            logging.warning('ding_store: the store is away. Training continues as far as the ratio permits')
        elif not is_away and self._away_since is not None:
            logging.warning(f'ding_store: the store is back after {time.monotonic() - self._away_since:.1f} s')
            self._away_since = None
        return is_away

    def _pass_over_skipped(self) -> None:
        """Acknowledge skipped or lost entries, unless a chunk before them is not in the replay yet."""
        if self._taken or (self._ratio_read_ahead is not None and self._ratio_read_ahead.is_holding):
            return
        for feed in self.feeds.values():
            passed = feed.passed_over()
            if passed is not None:
                self._advance(task.ctx, feed, passed)

    def _merge(self, ctx: OnlineRLContext, entries: List[Entry]) -> bool:
        """Put chunks into the replay or into ``ctx``. Return True if ``ctx`` has elements for later middleware."""
        if 'began_s' not in self._member.figures and entries:
            self._session.figures(began_s=time.monotonic(), **self._began(ctx))
        assert self._ingest_plan is not None
        entries = self._chunks_of(entries)
        is_direct = all(self._is_direct(entry) for entry in entries)
        push_direct = self._ingest_plan.push_direct if is_direct else None
        if len({each.stream for each in entries}) == len(entries):
            # Parts without rows come first: the others' pushes commit them too. If this process is killed before the
            # next commit, it would take these parts once more, one chunk behind the other partitions.
            entries.sort(key=lambda each: each.header['rows'] > 0)
        for i, taken in enumerate(entries):
            before = self._counted()
            entry = entries[i] = self.feeds[taken.stream].offset.take(taken)
            self._count(ctx, *(now - then for now, then in zip(self._counted(), before)))
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

    def _is_direct(self, entry: Entry) -> bool:
        """
        Return whether a chunk's columns can go into a replay. An episode's rows are one element, which columns cannot
        express. Pickled chunks have no columns, and those of ragged leaves hold only lengths.
        """
        if entry.header['kind'] != 'trajectories' or is_pickled(entry):
            return False
        return not entry.header['rows'] or not self._decoder.schema(entry).ragged

    def _counted(self) -> Tuple[int, int]:
        """Return the env steps and episodes of all chunks so far. Each partition has those of the whole chunks."""
        offsets = self.consumer_offset.all()
        return max(each.env_step for each in offsets), max(each.env_episode for each in offsets)

    def _num_passed(self) -> int:
        return max(each.num_passed for each in self.consumer_offset.all())

    def _num_rows(self) -> int:
        return sum(each.num_rows for each in self.consumer_offset.all())

    def _count(self, ctx: OnlineRLContext, steps: int, episodes: int) -> None:
        if self._rank is None:
            ctx.env_step += steps
            ctx.env_episode += episodes
            return
        # Each rank counts all steps, as each chunk's part says them. Ranks may read the chunks in another order, so
        # they agree on the largest count before each round of updates.
        self._rank.env_step += steps
        self._rank.env_episode += episodes
        self._rank.num_passed = self._num_passed()
        ctx.env_step = max(ctx.env_step, self._rank.env_step)
        ctx.env_episode = max(ctx.env_episode, self._rank.env_episode)

    def _chunks_of(self, entries: List[Entry]) -> List[Entry]:
        chunks = []
        for entry in entries:
            try:
                self._decoder.check(entry)
                chunks.append(entry)
            except CorruptPayload as error:
                feed = self.feeds[entry.stream]
                feed.reader.pass_over(error)
                feed.offset.skip(entry)
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
        for stream, last in {entry.stream: entry.id for entry in self._taken}.items():
            self._advance(ctx, self.feeds[stream], last)
        self._taken = []
        if self._recorder is not None:
            self._recorder.write()
        if self._recording is not None:
            self._recording.look()

    def _advance(self, ctx: OnlineRLContext, feed: Feed, ingested: EntryId) -> None:
        """Acknowledge entries up to ``ingested`` and send the progress, now or when the store is back."""
        feed.keep_ack(ingested, _counts(ctx))
        if not self._is_away():
            with best_effort(self._session.store):
                feed.send_ack()
        self._report_counts(ctx)
        if not self._session.finished:
            self._session.figures(ended_s=time.monotonic())

    def _report_counts(self, ctx: OnlineRLContext) -> None:
        self._session.figures(
            rows=self._num_rows(),
            chunks=max(each.num_chunks for each in self.consumer_offset.all()),
            is_resumed=self.consumer_offset.is_resumed,
            **(self._ingest_plan.replay_figures() if self._ingest_plan else {'replay_rows': 0}),
            lost=sum(feed.reader.num_lost for feed in self.feeds.values()),
            corrupt=sum(feed.reader.num_corrupt for feed in self.feeds.values()),
            **_counts(ctx),
        )

    def _send_acks(self) -> None:
        for feed in self.feeds.values():
            feed.send_ack()

    def _leave(self, ctx: OnlineRLContext) -> None:
        """Put all that collectors appended before the run's end into the replay, so that both sides' counts agree."""
        self._wake()
        Members(self._session.store).wait_until_left('collector', LAST_CHUNKS_S)
        for feed in self.feeds.values():
            feed.end_of_stream()
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
            self._taken.append(entry)
        self._send(ctx)
        self._send_acks()
        self._session.store.flush()
        if self._recording is not None:
            self._recording.wait()
        if self._recorder is not None:
            self._recorder.close()

    def _rest(self) -> List[Entry]:
        held = []
        if self._ratio_read_ahead is not None:
            self._ratio_read_ahead.ratio.end()
            held = self._ratio_read_ahead.rest()
        return held + [entry for feed in self.feeds.values() for entry in feed.read_ahead.rest()]


def _counts(ctx: OnlineRLContext) -> Dict[str, int]:
    return dict(train_iter=ctx.train_iter, env_step=ctx.env_step, env_episode=ctx.env_episode)
