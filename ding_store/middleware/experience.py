"""The context exchanger: experience from collectors to the learner, progress back, and the end to everybody."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Dict, Generator, List, Optional

import numpy as np
import torch
from ding.framework import task
from ditk import logging

from ding_store.errors import AppendUnsettled, ConfigError, CorruptPayload, StoreError
from ding_store.middleware.chunks import ChunkDecoder, ChunkWriter
from ding_store.middleware.feed import Feed
from ding_store.middleware.lead import PROGRESS, Lead
from ding_store.middleware.members import Members
from ding_store.middleware.pace import Pace, PacedFeed
from ding_store.middleware.pickled import is_pickled
from ding_store.middleware.plan import Plan
from ding_store.middleware.position import ENV_ID, Position
from ding_store.middleware.session import CHECKPOINTS, SLICE_S, Session
from ding_store.storage.base import Entry, EntryId
from ding_store.storage.reader import Reader

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext

STREAM = 'experience'
LEARNER_READER = 'learner'
#: Collectors count their envs from 0; above these bits stands which collector it was.
ENV_ID_BITS = 32
#: How long the learner waits, at the run's end, for collectors in the middle of their last chunk.
LAST_CHUNKS_S = 3.0
#: Of a chunk that a full stream of a server that had just come back did not take yet: the store's writer will bring it.
UNSETTLED = EntryId('', 0)


def context_exchanger(session: Session, skip_n_iter: int = 1, storage_loader: Any = None) -> Any:
    """
    Overview:
        Exchange context between the processes of a run through the store; ContextExchanger's place and meanings.
        Create it after ``task.add_role``. Void without an active router or without a role, as in DI-engine.
    Arguments:
        - skip_n_iter (:obj:`int`): For collectors and evaluators: iterations that begin without waiting for others.
        - storage_loader: Accepted for compatibility and not needed: payloads do not travel through messages.
    """
    if not task.router.is_active:
        return task.void()
    if len(task.roles) == 0:
        logging.warning('The task does not have any roles defined, the context exchanger will not work.')
        return task.void()
    if session.config.url.startswith('memory:'):
        raise ConfigError(
            f'store.url ({session.config.url!r}) is one process only; for several use embedded:// or redis://'
        )
    if storage_loader is not None:
        logging.info('ding_store: storage_loader is not needed with the store and is ignored')
    for role, kind in ((task.role.LEARNER, LearnerSide), (task.role.COLLECTOR, CollectorSide)):
        if task.has_role(role):
            return kind(session, skip_n_iter)
    return FollowerSide(session, skip_n_iter)


class Side:
    """What the sides of the exchange share: membership, and the end of the run."""

    role = ''
    #: Whether a failure of one process of this role is the end of the run.
    is_vital = True

    def __init__(self, session: Session, skip_n_iter: int) -> None:
        self._session = session
        self._skip_n_iter = skip_n_iter
        self._plan: Optional[Plan] = None
        router = task.router
        address = getattr(getattr(router, '_mq', None), 'listen_to', None)
        self._member = session.join(self.role, router.node_id, address, router.node_id - (router.local_id or 0))
        self._concluded = False
        task.on('finish', lambda value: session.finish('another member of the mesh finished'))
        task.stop = self._stop

    def _end(self, reason: str) -> None:
        task.finish = True

    def _stop(self) -> None:
        """
        In place of ``task.stop``, which makes all processes of the mesh finish, also when it was an exception that
        brought this one here: the run must not pass for one that ended in order.
        """
        del task.stop  # from here on the class's own again
        error = sys.exc_info()[1]
        if error is None or (isinstance(error, SystemExit) and not error.code):
            if self._plan is not None:
                self._conclude(task.ctx)
            task.stop()
            return
        ends_the_run = self.is_vital and not self._session.is_started_again
        try:
            self._session.leave()
        except StoreError as lost:
            logging.warning(f'ding_store: nobody could be told that this process failed: {lost}')
        was_active = task.router.is_active
        task.router.is_active = was_active and ends_the_run
        try:
            task.stop()
        finally:
            task.router.is_active = was_active

    def __call__(self, ctx: OnlineRLContext) -> Generator:
        if self._plan is None:
            self._plan = Plan(task, self)
            self._begin(ctx, self._plan)
            self._session.on_finish(self._end)  # not before this side is complete: the end may have come already
        self._plan.idle = not self._receive(ctx)
        yield
        if not self._plan.idle:
            self._send(ctx)
        if task.finish:
            self._conclude(ctx)

    def _begin(self, ctx: OnlineRLContext, plan: Plan) -> None:
        """The pipeline is complete, and about to run for the first time."""

    def _conclude(self, ctx: OnlineRLContext) -> None:
        if not self._concluded:
            self._concluded = True
            self._session.finish(self._reason(ctx))
            self._leave(ctx)

    def _receive(self, ctx: OnlineRLContext) -> bool:
        """Wait for what this role needs and put it into ctx. False: the run ends, there is nothing to work on."""
        raise NotImplementedError

    def _send(self, ctx: OnlineRLContext) -> None:
        raise NotImplementedError

    def _reason(self, ctx: OnlineRLContext) -> str:
        return f'{self.role} finished at env step {ctx.env_step}, train iteration {ctx.train_iter}'

    def _leave(self, ctx: OnlineRLContext) -> None:
        """The last iteration is over."""


class CollectorSide(Side):
    """
    Overview:
        Append each iteration's trajectories or episodes as one chunk, with the *increments* of env_step and
        env_episode beside them, so that they are counted exactly as often as the rows.
    """

    role = 'collector'
    is_vital = False

    def __init__(self, session: Session, skip_n_iter: int) -> None:
        super().__init__(session, skip_n_iter)
        self._chunks = ChunkWriter(session.store, STREAM, session.config.allow_pickle)
        self._ordinal = session.store.add('collectors', 1) - 1
        self._lead = Lead(session.store, session.config.max_lead)
        self._first_step = self._sent_steps = self._sent_episodes = self._num_rows = self._num_chunks = 0
        self._reseeded = self._ordinal == 0

    def _begin(self, ctx: OnlineRLContext, plan: Plan) -> None:
        # Who is started again, or joins, explores as much as a run does that has come so far.
        progress = self._session.store.get(PROGRESS)
        if progress is not None:
            ctx.env_step = self._first_step = self._sent_steps = progress.header['env_step']

    def _receive(self, ctx: OnlineRLContext) -> bool:
        if self._num_chunks == 0:
            self._session.figures(began_s=time.monotonic())
        config = self._session.config
        keeps_ratio = config.train_ratio == 'keep' or config.samples_per_insert is not None
        if ctx.total_step >= self._skip_n_iter and keeps_ratio:
            self._session.wait_for('the learner to take the last chunks', self._lead.caught_up, 'learner')
        return not self._session.finished

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
        if (elements or steps or episodes) and self._append(elements, header):
            self._sent_steps, self._sent_episodes = ctx.env_step, ctx.env_episode
            self._num_rows += len(elements)
            self._num_chunks += 1
            counts = dict(env_step=self._sent_steps - self._first_step, env_episode=self._sent_episodes)
            self._session.figures(rows=self._num_rows, chunks=self._num_chunks, **counts)
        self._diversify()

    def _append(self, elements: List[Any], header: dict) -> bool:
        """False: the run ended first, and the chunk was not appended."""
        fixups = {ENV_ID: self._ordinal << ENV_ID_BITS}
        # A full stream is waited for here rather than in the store, where the wait could not end on task.finish.
        entry_id = self._session.wait_for(
            'room in the experience stream (is the learner running?)',
            lambda timeout_s: self._try_append(elements, header, fixups, timeout_s),
            'learner',
        )
        if entry_id is not None:
            self._lead.appended(entry_id)
        return entry_id is not None

    def _try_append(self, elements: List[Any], header: dict, fixups: dict, timeout_s: float) -> Optional[EntryId]:
        try:
            return self._chunks.write(elements, header, fixups, timeout_s)
        except TimeoutError:
            return None
        except AppendUnsettled as error:
            logging.warning(f'ding_store: {error}')
            return UNSETTLED

    def _leave(self, ctx: OnlineRLContext) -> None:
        # Said before the script's own clean-up: the learner waits for it, to take what was appended last.
        self._session.leave()

    def _diversify(self) -> None:
        # All collectors run one script with one seed. Left alone, they would collect the same experience: all but the
        # first draw a new state from it, reproducibly, once the envs have been launched (which seeds numpy again).
        if not self._reseeded:
            self._reseeded = True
            torch.manual_seed(torch.initial_seed() % 2**31 + 10007 * self._ordinal)
            np.random.seed((int(np.random.randint(2**31)) + 10007 * self._ordinal) % 2**32)


class LearnerSide(Side):
    """
    Overview:
        Take chunks in order, each exactly once: with ``train_ratio='keep'`` one per iteration of the learner's loop.
        Where only a pusher follows, columns of trajectories go into its buffer as they are; else they become
        ``ctx.trajectories``, episodes ``ctx.episodes``, and pass the pipeline's own middleware.
    """

    role = 'learner'

    def __init__(self, session: Session, skip_n_iter: int) -> None:
        super().__init__(session, skip_n_iter)
        self._decoder = ChunkDecoder(session.config.allow_pickle)
        self._position = Position()
        self._taken: List[Entry] = []
        self._num_skipped = 0  # corrupt entries that others have heard of

    def _begin(self, ctx: OnlineRLContext, plan: Plan) -> None:
        path, checkpoints = self._session.replay_path, self._session.checkpoints
        if self._session.config.checkpoint is not None and checkpoints is None:
            raise ConfigError(
                'store.checkpoint is on, but the pipeline saves none: add task.use(parts.Checkpointer(policy)) as its '
                'last middleware, or leave store.checkpoint out'
            )
        if path is not None and plan.replay is not None:
            self._position.keep_in(plan.replay, path, checkpoints.run if checkpoints is not None else None)
        if checkpoints is None:
            self._session.store.delete(CHECKPOINTS)  # of a learner before this one
        self._reader = Reader(
            self._session.store,
            STREAM,
            LEARNER_READER,
            durable=True,
            marks=self._position.marks or None,
            on_corrupt=self._session.config.on_corrupt,
        )
        taken: Optional[EntryId] = self._reader.cursor
        if self._position.is_resumed:
            ctx.env_step, ctx.env_episode = self._position.env_step, self._position.env_episode
            taken = self._position.cursor
        if taken is not None and taken.number:
            # It is not taken again, and collectors may be waiting for word of it.
            self._advance(ctx, taken)
        self._feed = Feed(self._reader)  # It reads from now on: behind what was just acked.
        limiter = getattr(plan.replay.buffer, 'limiter', None) if plan.replay is not None else None
        # Without a ratio of its own the loop keeps the pipeline's: one chunk per iteration, waited for.
        self._paced: Optional[PacedFeed] = None
        if isinstance(limiter, Pace) and limiter.samples_per_insert is not None:
            self._paced = PacedFeed(self._feed, limiter)

    def _end(self, reason: str) -> None:
        super()._end(reason)
        self._feed.wake()

    def _receive(self, ctx: OnlineRLContext) -> bool:
        limit = 1 if self._session.config.train_ratio == 'keep' else 64
        if self._paced is not None:
            self._paced.begin(ctx.train_iter)
        taken = self._session.wait_for('experience', lambda timeout_s: self._take(limit, timeout_s), 'collector')
        self._taken = taken or []
        self._merge(ctx, self._taken)
        return taken is not None

    def _take(self, max_entries: int, timeout_s: float) -> Optional[List[Entry]]:
        if len(self._feed) == 0:
            self._session.store.settle()  # Those who make experience may be waiting for word of the last chunk.
            self._pass_over_skipped()
        if self._paced is not None:
            return self._paced.take(timeout_s)
        return self._feed.take(max_entries, timeout_s) or None

    def _pass_over_skipped(self) -> None:
        """Entries that the reader skipped are never taken, and who appended them waits for word of them, too."""
        skipped = self._reader.num_corrupt
        if skipped == self._num_skipped or self._taken:
            return
        passed = self._feed.passed()
        if passed is not None and (self._paced is None or not self._paced.is_holding):
            self._num_skipped = skipped
            self._advance(task.ctx, passed)

    def _merge(self, ctx: OnlineRLContext, entries: List[Entry]) -> bool:
        """Returns whether there are elements in ctx, for the middleware that follows."""
        if 'began_s' not in self._member.figures and entries:
            self._session.figures(began_s=time.monotonic())
        assert self._plan is not None
        entries = self._chunks_of(entries)
        # Rows of an episode are one element, which columns know nothing of; and pickled ones are no columns.
        is_direct = all(entry.header['kind'] == 'trajectories' and not is_pickled(entry) for entry in entries)
        push_direct = self._plan.push_direct if is_direct else None
        for i, taken in enumerate(entries):
            ctx.env_step += taken.header['env_step']
            ctx.env_episode += taken.header['env_episode']
            entry = entries[i] = self._position.take(taken)
            if entry.header['rows'] and push_direct is not None:
                push_direct(self._decoder.schema(entry), entry.arrays, self._position.note(), _meta([entry]))
        self._position.leave_note(push_direct is None or not (entries and entries[-1].header['rows']))
        filled = [entry for entry in entries if entry.header['rows']]
        if filled and self._plan.replay is not None:
            self._plan.replay.meta = _meta(filled)
        if filled and push_direct is None:
            self._materialise(ctx, filled)
            return True
        ctx.trajectories = []
        ctx.episodes = None
        return False

    def _chunks_of(self, entries: List[Entry]) -> List[Entry]:
        chunks = []
        for entry in entries:
            try:
                self._decoder.check(entry)
                chunks.append(entry)
            except CorruptPayload as error:
                self._reader.pass_over(error)
                self._position.skip(entry)
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
                # Indices count within their chunk; after others they shift by what stands before them.
                end_idx += [index + len(trajectories) for index in entry.header['end_idx']]
                trajectories += elements
        ctx.trajectories = trajectories if trajectories or not episodes else None
        ctx.episodes = episodes or None
        ctx.trajectory_end_idx = end_idx

    def _send(self, ctx: OnlineRLContext) -> None:
        # Rows are in the replay: what held their place in the stream may go, and the collectors may go on.
        self._position.commit()
        if self._taken:
            self._advance(ctx, self._taken[-1].id)
            self._taken = []

    def _advance(self, ctx: OnlineRLContext, ingested: EntryId) -> None:
        """Not waited for: the news wakes every collector, and on few cores they would go first."""
        counts = dict(train_iter=ctx.train_iter, env_step=ctx.env_step, env_episode=ctx.env_episode)
        self._reader.advance(ingested, PROGRESS, {'ingested': list(ingested), **counts})
        self._session.figures(
            rows=self._position.num_rows,
            chunks=self._position.num_chunks,
            is_resumed=self._position.is_resumed,
            replay_rows=self._plan.count() if self._plan else 0,
            lost=self._reader.num_lost,
            corrupt=self._reader.num_corrupt,
            **counts,
        )
        if not self._session.finished:
            self._session.figures(ended_s=time.monotonic())

    def _leave(self, ctx: OnlineRLContext) -> None:
        """What collectors had appended when the run ended still goes into the replay: the books balance."""
        self._feed.wake()
        Members(self._session.store).wait_until_left('collector', LAST_CHUNKS_S)
        self._end_of_stream()
        assert self._plan is not None
        for entry in self._rest():
            if not self._plan.can_push and entry.header['rows']:
                break  # without a pusher nobody takes it: it stays unread, and is not counted
            if self._merge(ctx, [entry]):
                self._plan.push_through(ctx)
            self._taken = [entry]
        self._send(ctx)
        self._session.store.settle()

    def _rest(self) -> List[Entry]:
        if self._paced is None:
            return self._feed.rest()
        self._paced.pace.end()
        return self._paced.rest() + self._feed.rest()

    def _end_of_stream(self) -> None:
        # The feed's thread sleeps until there is an entry: one without rows wakes it, so that it is not waited for.
        header = dict(kind='trajectories', env_step=0, env_episode=0, end_idx=[])
        try:
            ChunkWriter(self._session.store, STREAM).write([], header, timeout_s=SLICE_S)
        except TimeoutError:
            pass  # the stream is full, so there are entries enough


class FollowerSide(Side):
    """An evaluator, or any other role that only follows the learner's progress."""

    role = 'evaluator'

    def __init__(self, session: Session, skip_n_iter: int) -> None:
        super().__init__(session, skip_n_iter)
        self._version = 0
        self._last_eval_iter: Optional[int] = None

    def _receive(self, ctx: OnlineRLContext) -> bool:
        if ctx.total_step >= self._skip_n_iter:
            self._session.wait_for('progress of the learner', lambda t: self._follow(ctx, t), 'learner')
        return not self._session.finished

    def _follow(self, ctx: OnlineRLContext, timeout_s: float) -> Optional[bool]:
        value = self._session.store.get(PROGRESS, self._version, timeout_s)
        if value is None:
            return None
        self._version = value.version
        for name in ('train_iter', 'env_step', 'env_episode'):
            setattr(ctx, name, value.header[name])
        # A learner that was started again is at its last checkpoint: evaluations that are due are counted from there.
        if ctx.train_iter < ctx.last_eval_iter:
            ctx.last_eval_iter = self._last_eval_iter = ctx.train_iter
        return True

    def _send(self, ctx: OnlineRLContext) -> None:
        if ctx.last_eval_iter != self._last_eval_iter:
            self._last_eval_iter = ctx.last_eval_iter
            self._session.figures(eval_value=float(ctx.last_eval_value), eval_iter=ctx.last_eval_iter)
        self._session.figures(env_step=ctx.env_step, train_iter=ctx.train_iter)

    def _reason(self, ctx: OnlineRLContext) -> str:
        return (
            f'evaluator: mean return {ctx.last_eval_value:.1f} at env step {ctx.env_step}, '
            f'train iteration {ctx.train_iter}'
        )


def _meta(entries: List[Entry]) -> Optional[Dict[str, Any]]:
    """What rows of these chunks are to know: the version of the policy that collected them, of several the oldest."""
    versions = [entry.header['policy_version'] for entry in entries if 'policy_version' in entry.header]
    return {'policy_version': min(versions)} if versions else None
