"""A worker of ``--roles worker=N``: a process that runs a whole pipeline, and shares the updates of its policy."""

from __future__ import annotations

import functools
import random
import sys
import time
import types
from collections import Counter
from typing import Any, Dict, List, Optional

import numpy as np
import torch
from ding.envs import BaseEnvManager, EnvSupervisor
from ding.framework import task
from ding.policy.base_policy import Policy
from ditk import logging

from ding_store.checkpoint import CheckpointDir
from ding_store.config import LearnersConfig
from ding_store.errors import ConfigError, StoreError
from ding_store.middleware.ingest_plan import replay_figures
from ding_store.middleware.learner_ranks import SEED_STEP, write_no_files
from ding_store.middleware.leave_on_signal import leave_on_signal
from ding_store.middleware.own_rank import set_own_worker
from ding_store.middleware.pipeline import pipeline
from ding_store.middleware.replay import keep_for_run
from ding_store.middleware.run_recorder import RunRecorder
from ding_store.middleware.shared_updates import SharedUpdates
from ding_store.middleware.task_stop import before_stop, failure, is_failing
from ding_store.run.ending import CHECKPOINTS
from ding_store.run.lease import WORKER
from ding_store.run.session import RunSession
from ding_store.run.waiting import best_effort

#: Counter of the env steps of all workers.
STEPS = 'worker_steps'
#: DI-engine's evaluators. Worker 0 alone evaluates.
_EVALUATORS = ('interaction_evaluator', 'interaction_evaluator_ttorch')
_MODES = ('_forward_learn', '_forward_collect', '_forward_eval')


def start(rank: int, num: int, has_joined: bool = False) -> WorkerRank:
    """
    Overview:
        Make this process one of several workers. Call it before the script runs, with DI-engine's router inactive: the
        script then runs its whole pipeline in this process, and its policies share their updates.
    Arguments:
        - has_joined (:obj:`bool`): No launcher watches this process: it leaves the run in order at a SIGTERM.
    """
    made = WorkerRank(rank, num, has_joined)
    set_own_worker(made)
    make = Policy.__init__

    @functools.wraps(make)
    def __init__(self: Any, cfg: Any, *args: Any, **kwargs: Any) -> None:
        make(self, cfg, *args, **kwargs)
        fields = kwargs.get('enable_field', args[1] if len(args) > 1 else None)
        if fields is None or 'learn' in fields:
            made.add(self)

    Policy.__init__ = __init__
    if rank:
        write_no_files(rank)
        _evaluate_not()
        _shift_seeds(SEED_STEP * rank)
    return made


class WorkerRank:
    """
    Overview:
        One worker. It joins the run when its policy acts, makes a row or trains for the first time. ``ctx.env_step``
        counts the steps of all workers from the first update on. A worker that reaches the script's end ends the run
        for all. One that was asked to leave does not.
    """

    def __init__(self, rank: int, num: int, has_joined: bool = False) -> None:
        self.rank, self.num, self._has_joined = rank, num, has_joined
        self._policies: List[Any] = []
        self._session: Optional[RunSession] = None
        self._shared: Optional[SharedUpdates] = None
        self._recorder: Optional[RunRecorder] = None
        self._has_begun = False
        self._env_step = self._own_steps = 0
        self._unsent_steps = 0
        self._last_eval_iter: Optional[int] = None

    def use(self, session: RunSession) -> None:
        """Use the session of the pipeline that the script makes."""
        self._session = session
        session.has_recorder = True  # This worker records for the run, or none does.

    def add(self, policy: Any) -> None:
        """Share the updates of a policy, from its first use on."""
        if policy._cfg.get('multi_gpu', False):
            raise ConfigError(
                f'policy.multi_gpu is on, and so are {self.num} workers (--roles): gradients would be averaged twice. '
                'Remove policy.multi_gpu.'
            )
        self._policies.append(policy)
        for name in _MODES:
            if hasattr(policy, name):
                setattr(policy, name, types.MethodType(self._shared_forward(name, getattr(policy, name)), policy))
        # With ``random_collect_size``, a random policy acts first. It makes its rows with this method.
        make_row = policy._process_transition

        @functools.wraps(make_row)
        def begun_first(_: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin_once()
            return make_row(*args, **kwargs)

        policy._process_transition = types.MethodType(begun_first, policy)

    def _shared_forward(self, name: str, forward: Any) -> Any:
        @functools.wraps(forward)
        def shared(_: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin_once()
            if self._session is not None:
                self._session.show_health()
                if self._session.leaves_alone:
                    task.finish = True
            if name == '_forward_learn':
                self._before_update()
            return forward(*args, **kwargs)

        return shared

    def _begin_once(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._begin()

    def _begin(self) -> None:
        if self._session is None:  # the script uses no part of the store
            pipeline({'store': {}})
        session = self._session
        assert session is not None
        session.join(WORKER, self.rank)
        if self._has_joined:
            leave_on_signal(session)
        session.on_finish(self._end)
        before_stop(self, self._stop)
        ctx: Any = task.ctx
        self._env_step = int(ctx.env_step)
        began_step = self._count_from(session) if self.rank == 0 else self._env_step
        session.figures(began_s=time.monotonic(), began_step=began_step, began_iter=int(ctx.train_iter))
        sync = (session.config.learners or LearnersConfig()).sync or 'gradients'
        if sync == 'ddp':
            raise ConfigError(
                "store.learners.sync ('ddp') does not work with --roles worker=N. Set 'gradients': workers then step "
                'with the mean of all gradients as well.'
            )
        shared = SharedUpdates(session, sync, self.rank, self.num)
        given = shared.begin({'run': self._run_of_checkpoints(session)})
        if given is None or not shared.share(self._policies):
            return
        if self.rank and session.config.checkpoint is not None and session.kept_replay is not None:
            keep_for_run(session.kept_replay, given['run'])
        self._shared = shared
        if self.rank:
            torch.manual_seed(torch.initial_seed() % 2**31 + SEED_STEP * self.rank)
            random.seed(random.getrandbits(31) + SEED_STEP * self.rank)
            np.random.seed((int(np.random.randint(2**31)) + SEED_STEP * self.rank) % 2**32)
        else:
            self._recorder = RunRecorder(session, has_experience=False)

    def _run_of_checkpoints(self, session: RunSession) -> Optional[str]:
        """Return the name of the run whose checkpoints worker 0 has. The replays of all workers are of this run."""
        config = session.config.checkpoint
        return CheckpointDir(config.path).run if config is not None and not self.rank else None

    def _count_from(self, session: RunSession) -> int:
        """
        Go on from the checkpoint that this process resumed, if the server has lost the count. Return the steps so far.
        """
        known = session.store.add(STEPS, 0)
        if known < self._env_step:
            session.store.add(STEPS, self._env_step - known)
        checkpoints, config = session.checkpoints, session.config.checkpoint
        if checkpoints is not None and config is not None:
            header = {'path': checkpoints.path, 'run': checkpoints.run, 'max_restarts': config.max_restarts}
            session.store.decide(CHECKPOINTS, header)
            session.upheld.append(CHECKPOINTS)
        else:
            session.store.delete(CHECKPOINTS)
        return max(known, self._env_step)

    def _end(self, reason: str) -> None:
        task.finish = True

    def _before_update(self) -> None:
        """Count the env steps since the last update, and report."""
        session, ctx = self._session, task.ctx
        assert session is not None
        self._count_steps(ctx)
        self._report_counts(ctx)
        if self._shared is not None:
            self._shared.report()
        if self._recorder is not None:
            self._recorder.write()

    def _count_steps(self, ctx: Any) -> None:
        """Make ``ctx.env_step`` the number of steps of all workers. While the store is away, it has the own steps."""
        assert self._session is not None
        more = int(ctx.env_step) - self._env_step
        if more > 0:
            self._own_steps += more
            self._unsent_steps += more
            with best_effort(self._session.store):
                total = self._session.store.add(STEPS, self._unsent_steps)
                self._unsent_steps = 0
                ctx.env_step = max(total, int(ctx.env_step))
        self._env_step = int(ctx.env_step)

    def _report_counts(self, ctx: Any) -> None:
        assert self._session is not None
        counts = dict(env_step=self._own_steps, run_env_step=int(ctx.env_step), train_iter=int(ctx.train_iter))
        self._session.figures(ended_s=time.monotonic(), **counts, **self._replay_figures())
        value, iteration = ctx.last_eval_value, int(ctx.last_eval_iter)
        if self.rank == 0 and iteration >= 0 and iteration != self._last_eval_iter:
            self._last_eval_iter = iteration
            self._session.figures(eval_value=float(value), eval_iter=iteration, eval_step=int(ctx.env_step))

    def _replay_figures(self) -> Dict[str, int]:
        """Return the sums over all replays of this process. A worker that leaves takes its rows with it."""
        assert self._session is not None
        found = Counter(replay_rows=0)
        for each in self._session.replays:
            found.update(replay_figures(each))
        return {name: 0 if self._session.leaves_alone else count for name, count in found.items()}

    def _stop(self) -> None:
        """Leave the run before the task stops, and end the run unless this process failed."""
        session, ctx = self._session, task.ctx
        assert session is not None
        if is_failing():
            try:
                session.leave(failed=True, reason=failure())
            except StoreError as lost:
                logging.warning(f'ding_store: the failure of this process could not be reported to the run: {lost}')
            return
        self._count_steps(ctx)
        self._report_counts(ctx)
        if not session.leaves_alone:
            session.finish(f'worker {self.rank} finished at env step {ctx.env_step}, train iteration {ctx.train_iter}')
        if self._shared is not None:
            self._shared.leave()
        if self._recorder is not None:
            self._recorder.close()
        session.leave()


def _evaluate_not() -> None:
    """Let DI-engine's evaluators do nothing in this process, for a script that is imported after this call."""
    for name in _EVALUATORS:
        for module in list(sys.modules.values()):
            if getattr(module, '__name__', '').startswith('ding.framework') and name in vars(module):
                setattr(module, name, lambda *args, **kwargs: task.void())


def _shift_seeds(step: int) -> None:
    """Make environments of this process play other episodes than those of the other workers."""
    for kind in (BaseEnvManager, EnvSupervisor):
        seed = kind.seed

        def shifted(self: Any, seeds: Any, *args: Any, _seed: Any = seed, **kwargs: Any) -> Any:
            if isinstance(seeds, dict):
                seeds = {name: each + step for name, each in seeds.items()}
            else:
                seeds = [each + step for each in seeds] if isinstance(seeds, list) else seeds + step
            return _seed(self, seeds, *args, **kwargs)

        kind.seed = functools.wraps(seed)(shifted)
