"""The collectors' side of the exchange: each iteration's experience is one chunk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, List, Optional

import numpy as np
import torch
from ditk import logging

from ding_store.errors import AppendUnsettled
from ding_store.middleware.chunks import ChunkWriter
from ding_store.middleware.lead import PROGRESS, Lead
from ding_store.middleware.plan import Plan
from ding_store.middleware.position import ENV_ID
from ding_store.middleware.session import Session
from ding_store.middleware.side import STREAM, Side
from ding_store.storage.base import EntryId

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext

#: Collectors count their envs from 0; above these bits stands which collector it was.
ENV_ID_BITS = 32
#: Of a chunk that a full stream of a server that had just come back did not take yet: the store's writer will bring it.
UNSETTLED = EntryId('', 0)


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
