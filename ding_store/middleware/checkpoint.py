"""Checkpoints of a task pipeline: saved in the background and resumed automatically, in addition to CkptSaver's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Dict, Optional, Union

import numpy as np
from ding.framework import task
from ding.framework.task import VoidMiddleware
from ditk import logging

from ding_store.checkpoint import EXTRA, CheckpointDir, Interval, Saver, read_state
from ding_store.checkpoint.snapshot import Snapshot, optimizers_of
from ding_store.config import CheckpointConfig
from ding_store.errors import ConfigError, CorruptPayload
from ding_store.middleware.own_rank import is_first, own_rank
from ding_store.middleware.plain_saver import stock_saver
from ding_store.middleware.policies import Policies
from ding_store.middleware.random_states import random_states, set_random_states
from ding_store.middleware.rank_states import RankStates
from ding_store.middleware.task_stop import before_stop, is_failing
from ding_store.run.ending import CHECKPOINTS
from ding_store.run.last_checkpoint import SAVE_S, LastCheckpoint, saving
from ding_store.run.session import RunSession

if TYPE_CHECKING:
    from ding.framework import OnlineRLContext

#: Counters of ``ctx``, online or offline, that a checkpoint holds. In a run with roles only the evaluator evaluates.
COUNTERS = ('train_iter', 'env_step', 'env_episode', 'trained_env_step', 'last_eval_iter', 'last_eval_value')
VERSION = 1


def checkpointer(session: RunSession, policy: Any) -> Any:
    """
    Overview:
        Create the middleware that saves the learner's state in the background and resumes from the newest checkpoint.
        Create it after the policy and the roles, and use it last, like CkptSaver. In an evaluator it keeps the best
        policy. In collectors and without ``store.checkpoint`` it does nothing.
        A process has one such middleware: under ``ding-store run`` CkptSaver creates it. Later calls add their policy
        to it, and return a void. A checkpoint file has all policies of a process, from the same moment.
    Arguments:
        - policy (:obj:`Policy`): The policy, as for CkptSaver. Its ``learn_mode`` and its optimizers are saved.
    Input of ctx:
        - train_iter (:obj:`int`), env_step (:obj:`int`), eval_value (:obj:`Optional[float]`)
    Raises:
        - ConfigError: The checkpoint cannot be read or has other policies, or another process saves there.
    """
    config, rank = session.config.checkpoint, own_rank()
    # Rank 0 of several learners or workers saves for all, and gives them its state when they start.
    if config is None or (rank is None and not is_first()):
        return task.void()
    if rank is not None and rank.rank:
        if rank.states is not None:
            return task.void()
        rank.states = RankStates(session, f'rank-{rank.rank}-of-{rank.num}')
        return rank.states
    if session.checkpointer is not None:
        session.checkpointer.add(policy)
        return task.void()
    made: Union[LearnerCheckpoints, BestCheckpoint]
    if not task.router.is_active or task.has_role(task.role.LEARNER):
        made = LearnerCheckpoints(session, config)
    elif task.has_role(task.role.EVALUATOR):
        made = BestCheckpoint(config)
    else:
        return task.void()
    made.add(policy)
    session.checkpointer = made
    return made


def ckpt_saver(session: RunSession, policy: Any, *args: Any, **kwargs: Any) -> Any:
    """
    Overview:
        Create DI-engine's CkptSaver. With ``store.checkpoint``, ``checkpointer`` runs after it, for scripts that use
        CkptSaver only.
    Raises:
        - ConfigError: Both would write into the same directory.
    """
    stock = stock_saver(policy, *args, **kwargs)
    if session.config.checkpoint is not None and not isinstance(stock, VoidMiddleware):
        session.config.checkpoint.check_apart(stock.prefix)
    parts = [part for part in (stock, checkpointer(session, policy)) if not isinstance(part, VoidMiddleware)]
    if len(parts) < 2:
        return parts[0] if parts else task.void()

    def save(ctx: OnlineRLContext) -> None:
        for part in parts:
            part(ctx)

    return save


class BestCheckpoint:
    """Keeps the policy with the best evaluation of this run, also across restarts of the evaluator."""

    def __init__(self, config: CheckpointConfig) -> None:
        self.directory = CheckpointDir(config.path, config.keep)
        self._policies = Policies()
        self._snapshot = Snapshot()
        self._best = -np.inf
        self._has_warned = False

    def add(self, policy: Any) -> None:
        self._policies.add(policy)

    def __call__(self, ctx: OnlineRLContext) -> None:
        if not _is_better(ctx, self._best):
            return
        try:
            if self.directory.run is None:
                self._warn(ctx)
                return
            state = self._policies.state()
            state[EXTRA]['train_iter'] = ctx.train_iter
            self._snapshot.begin(state, at_once=True)  # on the CPU: the file may be loaded on a host without a GPU
            self.directory.save_best(self._snapshot.state, float(ctx.eval_value))
            self._best = float(ctx.eval_value)  # after the save: if it fails, the disk still has the old best
        except (OSError, CorruptPayload) as e:
            logging.error(f'ding_store: the best policy so far could not be saved: {e}')

    def _warn(self, ctx: OnlineRLContext) -> None:
        if ctx.train_iter > 0 and not self._has_warned:  # at 0 the learner may not have created the run yet
            self._has_warned = True
            logging.warning(
                f'ding_store: the best policy is not kept: this host has no run in {self.directory.path}. Use a '
                "directory that the learner's host shares"
            )


class LearnerCheckpoints:
    """
    Overview:
        The learner's checkpoints. It resumes when it is created. It saves after training, as often as the interval
        allows. It saves once more at the run's end, or after the iteration in which a signal arrives. A run of one
        process also saves after each evaluation that is the best so far.
    Attributes:
        - directory (:obj:`CheckpointDir`), saver (:obj:`Saver`), interval (:obj:`Interval`): Where it saves, the thread
          that writes, and when the next checkpoint is due.
    """

    def __init__(self, session: RunSession, config: CheckpointConfig) -> None:
        self._session, self._policies = session, Policies()
        self.directory = CheckpointDir(config.path, config.keep)
        self.interval = Interval(config.max_overhead, config.interval_s)
        self._best = -np.inf  # the evaluation of the best policy on the disk
        self.directory.claim()
        self.directory.begin()
        self._saved_iter = self._saving_iter = self._resume(config)  # train iterations: on the disk, and being written
        self.saver = Saver()
        self._unreported = False
        self._last_s: Optional[float] = None
        self._ctx: Optional[OnlineRLContext] = None
        self._saved_by: Optional[float] = None  # deadline of the last checkpoint, once it has begun
        self._last_save = LastCheckpoint()
        self._num_steps = 0  # optimizer steps at the end of the last iteration
        session.checkpoints = self.directory
        session.before_leaving.append(self._leave)
        session.while_waiting.append(self._end_in_a_wait)
        if task.router.is_active:
            # The launcher cannot read this in the script. It looks here when the learner or an evaluator crashes.
            header = {'path': self.directory.path, 'run': self.directory.run, 'max_restarts': config.max_restarts}
            session.store.put(CHECKPOINTS, header, {})
        else:
            # A run of one process: its task may finish after the last call of any middleware.
            before_stop(self, lambda: self._leave(failed=is_failing() or not task.finish))

    def add(self, policy: Any) -> None:
        """Add a policy before the first iteration. If this process resumes, load its state from the checkpoint."""
        if self._policies.add(policy):
            self.saver.watch(optimizers_of(policy))

    def __call__(self, ctx: OnlineRLContext) -> None:
        if self._ctx is None:
            self._policies.check_complete()
            self._last_save.expect()
        self._ctx = ctx
        if self._last_s is not None and ctx.eval_value in (None, -np.inf):  # time with an evaluation is not training
            self.interval.iterated(self._trained_s() - self._last_s, self.saver.is_busy or self._unreported)
        if self._unreported and not self.saver.is_busy:
            self._report()
        if not task.router.is_active and _is_better(ctx, self._best):
            self._save_best(ctx)
        if task.finish:
            with saving():
                # The task of a worker also finishes when its run fails: another start of the run resumes it.
                if self._save_last(ctx) and not (task.router.is_active or self._session.failed):
                    self._finish('the task finished')
        elif ctx.train_iter > self._saved_iter and not self.saver.is_busy and self.interval.is_due:
            with self._session.time_spent.measure('checkpoint'):
                self._save(ctx)
        if self._last_save.must_exit:
            self._end(ctx)
        self._last_s, self._num_steps = self._trained_s(), self.saver.num_steps

    def _may_end_here(self) -> bool:
        """Return True if a signal arrived and no optimizer has stepped since the end of the last iteration."""
        return self._last_save.must_exit and self.saver.num_steps == self._num_steps

    def _end_in_a_wait(self) -> None:
        """End during a wait for experience, which may never arrive if the signal ended the collectors as well."""
        if self._ctx is not None and self._may_end_here():
            self._end(self._ctx)

    def _end(self, ctx: OnlineRLContext) -> None:
        """Write the last checkpoint and release the held signal. The run stays resumable."""
        try:
            with saving():
                self._save_last(ctx)
        finally:
            self._last_save.done()

    def _trained_s(self) -> float:
        """Return a clock that stands while the loop waits for experience or the store: waits are no training time."""
        return time.perf_counter() - self._session.waited_s

    def _save(self, ctx: OnlineRLContext, eval_value: Optional[float] = None) -> None:
        train_iter, is_newer = ctx.train_iter, ctx.train_iter > self._saved_iter

        def write(state: Any) -> None:
            if is_newer:
                self.directory.save(train_iter, state)
            if eval_value is not None:
                self.directory.save_best(state, eval_value)
                self._best = eval_value  # after the save: if it fails, the disk still has the old best

        self.interval.begin()
        self.saver.save(self._state(ctx), write)
        self._saving_iter, self._unreported = train_iter, True
        rank = own_rank()
        if rank is not None:
            rank.saved_iter = train_iter  # the other ranks learn it in the next agreement

    def _save_best(self, ctx: OnlineRLContext) -> None:
        """Save the present state as the best policy, after waiting for a save in progress."""
        begin = time.perf_counter()
        self.saver.drain()
        if self._unreported:
            self._report(time.perf_counter() - begin)
        self._save(ctx, float(ctx.eval_value))

    def _report(self, drained_s: float = 0.0) -> None:
        self._unreported = False
        self.interval.end(self.saver.copying_s, self.saver.waiting_s + drained_s)
        if not self.saver.is_saved:  # the saver logged why
            return
        self._saved_iter = self._saving_iter
        stall_ms = 1e3 * (self.saver.copying_s + self.saver.waiting_s)
        logging.info(
            f'ding_store: checkpoint of iteration {self._saved_iter}: stall {stall_ms:.1f} ms, cost '
            f'{1e3 * self.interval.cost_s:.1f} ms; next after {self.interval.next_s:.1f} s, overhead so far '
            f'{self.interval.overhead:.2%}'
        )
        self._session.figures(checkpoint_iter=self._saved_iter, checkpoint_overhead=round(self.interval.overhead, 5))

    def _leave(self, failed: bool) -> None:
        """
        Save the state once more, because the run may have ended after the last iteration. If the run ended in order and
        the state is on the disk, mark the run as finished, so that it is not resumed.
        """
        try:
            with saving():
                # After a Ctrl-C the failure may come from environments that got the signal, not from the training.
                if self._ctx is None or (failed and not self._may_end_here()):
                    self._drain()
                elif self._save_last(self._ctx) and not (failed or self._session.failed):
                    self._finish(self._session.finish_reason or 'the task finished')
            self.saver.close()
        finally:
            self._last_save.done()

    def _finish(self, reason: str) -> None:
        """Mark the run as finished in the directory. If that fails, only log it, because the policy is on the disk."""
        try:
            self.directory.finish(reason)
        except (OSError, CorruptPayload) as e:
            logging.error(
                f'ding_store: {self.directory.path}: the end of this run could not be written, so the next run '
                f'resumes from here: {e}'
            )

    def _save_last(self, ctx: OnlineRLContext) -> bool:
        """Save the last state, and return True if it is on the disk."""
        self._complete()
        if ctx.train_iter > self._saved_iter:
            self._save(ctx)
            self._complete()
        is_saved = ctx.train_iter <= self._saved_iter
        if not is_saved:
            logging.error(f'ding_store: the policy at train iteration {ctx.train_iter} is in no checkpoint')
        return is_saved

    def _complete(self) -> None:
        self._drain()
        if self._unreported:
            self._report()

    def _drain(self) -> None:
        """Wait for saves in progress. From the first call on, all waits together take at most ``SAVE_S``."""
        now = time.perf_counter()
        if self._saved_by is None:
            self._saved_by = now + SAVE_S
        self.saver.drain(max(0.0, self._saved_by - now))

    # What is in a checkpoint

    def _state(self, ctx: OnlineRLContext) -> Dict[str, Any]:
        counters = {name: getattr(ctx, name) for name in COUNTERS if getattr(ctx, name, None) is not None}
        state = self._policies.state()
        state[EXTRA].update(
            version=VERSION,
            run=self.directory.run,
            counters={name: float(x) if name == 'last_eval_value' else int(x) for name, x in counters.items()},
            policy_versions=dict(self._session.policy_versions),
        )
        random = random_states(self._session.replays)
        state[EXTRA].update(samplers=random.pop('samplers'), random=random)
        return state

    def _resume(self, config: CheckpointConfig) -> int:
        """Load the newest checkpoint, and return its train iteration. Return -1 if there is none."""
        newest, known = self.directory.newest(), self.directory.paths()
        if newest is None and known:
            raise ConfigError(
                f'none of the {len(known)} checkpoints in {self.directory.path} can be read, see the log. To start '
                'anew, set store.checkpoint.path to another directory or remove this one.'
            )
        if newest is None and config.load is not None:
            logging.info(f'ding_store: starting with the policy of {config.load}')
            self._policies.load(config.load, read_state(config.load), is_resumed=False)
            return -1
        if newest is None:
            return -1
        path, state = newest
        if EXTRA not in state:
            raise ConfigError(
                f'{path!r} was not written by ding_store. Set store.checkpoint.path to a directory that no other '
                'saver, such as CkptSaver, writes to.'
            )
        self._policies.load(path, state, is_resumed=True)
        extra = state[EXTRA]
        for name, value in extra['counters'].items():
            setattr(task.ctx, name, value)
        set_random_states({**extra['random'], 'samplers': extra.get('samplers', [])}, self._session.replays)
        self._session.count_versions_from(extra.get('policy_versions', {}))
        logging.info(f'ding_store: resuming from {path}: train iteration {task.ctx.train_iter}')
        return int(task.ctx.train_iter)


def _is_better(ctx: OnlineRLContext, best: float) -> bool:
    return ctx.eval_value is not None and bool(ctx.eval_value > best)
