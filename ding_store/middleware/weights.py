"""The model exchangers: send policy weights from the learner to all members, as one versioned value per policy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Dict, Generator, List, Optional

import torch
from ding.framework import task
from ditk import logging

from ding_store.errors import ConfigError, PayloadLost, ServerFull
from ding_store.middleware.own_rank import own_rank
from ding_store.middleware.state_arrays import load_arrays, state_to_arrays
from ding_store.run.foreign import is_count, is_number
from ding_store.run.members import Members
from ding_store.run.session import RunSession
from ding_store.run.waiting import LOOK_EVERY_S, best_effort

if TYPE_CHECKING:
    from ding.framework import Context

#: How long a receiver waits for newer weights if its own are too old. Then it continues with the old ones, as in
#: DI-engine.
MAX_WAIT_S = 60.0
#: How often the sender logs version and lag. A launcher prints them in its progress line as well.
SAY_EVERY_S = 10.0


def model_exchanger(
    session: RunSession,
    model: torch.nn.Module,
    model_loader: Any = None,
    name: str = 'main',
    acting: Optional[bool] = None,
) -> Any:
    """
    Overview:
        Create the middleware that exchanges weights through the store, in place of DI-engine's ``ModelExchanger``. It
        differs in one way: a collector loads the newest version and does not wait for a newer one. The context
        exchanger keeps the pace.
    Arguments:
        - model_loader: Accepted for compatibility and ignored.
        - name (:obj:`str`): The name of the policy, for runs with several.
        - acting (:obj:`Optional[bool]`): True: rows of this process are marked with this policy's version. None: only
          if it is the process's first policy.
    Raises:
        - ConfigError: Another policy of this process has ``acting=True``.
    """
    if not _is_parallel('model exchanger'):
        return task.void()
    if task.has_role(task.role.LEARNER):
        return WeightsSender(session, model, name, acting=acting)
    return WeightsReceiver(session, model, name, acting=acting)


def periodical_model_exchanger(
    session: RunSession,
    model: torch.nn.Module,
    mode: str,
    period: int = 1,
    delay_toleration: Optional[float] = None,
    stale_toleration: Optional[int] = None,
    event_name: str = 'main',
    model_loader: Any = None,
    acting: Optional[bool] = None,
) -> Any:
    """
    Overview:
        Create the middleware that exchanges weights periodically, in place of DI-engine's
        ``PeriodicalModelExchanger``. It differs in one way: without a toleration, a receiver does not wait for newer
        weights, but continues with the newest version.
    Arguments:
        - mode (:obj:`str`): 'send' or 'receive'.
        - period (:obj:`int`): A sender publishes before the first iteration, after it, and after every ``period``-th
          that follows. A receiver loads the newest version once the sender has passed such an iteration. It loads as
          rarely as DI-engine's, and never an older version.
        - delay_toleration (:obj:`Optional[float]`): Seconds for which weights may be used after they were sent, by the
          clocks of both hosts.
        - stale_toleration (:obj:`Optional[int]`): Number of iterations for which weights may be used.
        - event_name (:obj:`str`): The name of the policy, for runs with several.
        - model_loader: Accepted for compatibility and ignored.
        - acting (:obj:`Optional[bool]`): See ``model_exchanger``.
    Raises:
        - ConfigError: A bad mode, period or toleration, or another policy of this process has ``acting=True``.
    """
    if mode not in ('send', 'receive'):
        raise ConfigError(f"mode ({mode!r}) must be 'send' or 'receive'")
    if period < 1:
        raise ConfigError(f'period ({period}) must be >= 1')
    if stale_toleration is not None and stale_toleration < 1:
        raise ConfigError(f'stale_toleration ({stale_toleration}) must be >= 1')
    if delay_toleration is not None and not delay_toleration > 0:
        raise ConfigError(f'delay_toleration ({delay_toleration}) must be > 0')
    if not _is_parallel('periodical model exchanger'):
        return task.void()
    if mode == 'send':
        return WeightsSender(session, model, event_name, period, acting)
    return WeightsReceiver(session, model, event_name, stale_toleration, delay_toleration, period, acting)


def _is_parallel(what: str) -> bool:
    rank = own_rank()
    if not task.router.is_active or (rank is not None and rank.rank):
        return False  # Rank 0 of several learners publishes for all.
    if len(task.roles) == 0:
        logging.warning(f'The task does not have any roles defined, the {what} will not work.')
        return False
    return True


class _WeightsExchanger:
    """Base of sender and receiver: registers the policy in this process's session."""

    uses_no_trajectories = True  # see ingest_plan.py

    def __init__(self, session: RunSession, model: torch.nn.Module, name: str, acting: Optional[bool]) -> None:
        self._session, self._model, self._name, self._value = session, model, name, f'weights/{name}'
        session.add_policy(name, acting)
        self.version = 0

    def _put_versions_into(self, ctx: Context) -> None:
        """Put the policies' versions into ``ctx``, which is a new object in each iteration."""
        ctx.policy_versions = dict(self._session.policy_versions)
        if self._session.acting_policy == self._name:
            ctx.policy_version = self.version


class WeightsSender(_WeightsExchanger):
    """
    Overview:
        Publishes the model once before training, and after every ``period``-th iteration if it has trained since. While
        the store is away, training continues, and the newest weights are published later. If the server loses the
        weights while the learner waits for data, they are published again.
    Output of ctx:
        - policy_version (:obj:`int`): Version of the acting policy that was published last.
        - policy_versions (:obj:`Dict[str, int]`): policy -> the same version, for all policies of this process.
    """

    def __init__(
        self, session: RunSession, model: torch.nn.Module, name: str, period: int = 1, acting: Optional[bool] = None
    ) -> None:
        super().__init__(session, model, name, acting)
        self._period = period
        self._num_iterations = 0
        self._published_iter: Optional[int] = None
        self._train_iter = 0
        self._looked_at = 0.0
        self._is_due = self._is_claimed = False
        self._pinned: Dict[str, torch.Tensor] = {}
        # Buffers are not rounded: a running variance may overflow or vanish in half precision.
        self._buffers = {buffer_name for buffer_name, _ in model.named_buffers(remove_duplicate=False)}
        self._not_rounded: List[str] = []
        self._say_at = 0.0
        self._members: Optional[Members] = None
        session.while_waiting.append(self._restore)

    def __call__(self, ctx: Context) -> Generator:
        self._train_iter = ctx.train_iter
        if self._published_iter is None:
            with self._session.time_spent.measure('publish'):
                self._publish()
        self._put_versions_into(ctx)
        yield
        self._num_iterations += 1
        self._train_iter = ctx.train_iter
        if ctx.train_iter != self._published_iter and (self._num_iterations - 1) % self._period == 0:
            self._is_due = True
        # If the store is away, publish later, with the weights of that time.
        if self._is_due and not self._session.store.is_away_for(self._value):
            with self._session.time_spent.measure('publish'):
                self._publish()

    def _restore(self) -> None:
        """Publish the weights again if the server lost them. A collector may start before the learner trains again."""
        now = time.monotonic()
        if self._published_iter is None or now < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at, is_there = now, True
        with best_effort(self._session.store):
            is_there = self._session.store.wait_for_version(self._value, self.version, 0.0)
        if not is_there:
            self._publish()

    def _publish(self) -> None:
        """Publish the weights. If the store is away or full, they remain due."""
        dtype = self._session.config.weights_dtype
        header, arrays = state_to_arrays(self._model.state_dict(), dtype, self._pinned, self._buffers)
        header.update(train_iter=self._train_iter, iteration=max(0, self._num_iterations - 1), sent_at=time.time())
        self._warn_of(header['not_rounded'])
        # A restarted learner has version numbers that the store may have lost and that rows are marked with.
        self._session.store.set_start_version(self._value, self._session.policy_versions[self._name])
        try:
            with best_effort(self._session.store):
                self._claim()
                self.version = int(self._session.store.put(self._value, header, arrays))
                self._published_iter, self._is_due = self._train_iter, False
                self._session.set_policy_version(self._name, self.version)
                if time.monotonic() >= self._say_at:
                    self._say()
        except ServerFull as error:
            self._session.note_full(error)

    def _claim(self) -> None:
        if not self._is_claimed:
            advice = 'Let one process send it, or name each policy (event_name, or name for ModelExchanger)'
            self._session.claim_part(self._value, f'publish the policy {self._name!r}', advice)
            self._is_claimed = True

    def _say(self) -> None:
        self._say_at = time.monotonic() + SAY_EVERY_S
        self._members = self._members or Members(self._session.store)
        lag = self._members.refresh().policy_lag(self._name, self.version)
        logging.info(
            f'ding_store: policy {self._name} v{self.version} (lag {lag}) at train iteration {self._train_iter}'
        )

    def _warn_of(self, not_rounded: List[str]) -> None:
        if not_rounded and not self._not_rounded:
            logging.warning(
                f'ding_store: values of {self._value!r} are out of the range of {self._session.config.weights_dtype}; '
                f'these keep their type: {", ".join(not_rounded)}'
            )
        self._not_rounded = not_rounded


class WeightsReceiver(_WeightsExchanger):
    """
    Overview:
        Loads the newest published version, if it is newer than the loaded one.
    Output of ctx:
        - policy_version (:obj:`int`): Version of the acting policy in this iteration. 0: no published one was loaded.
        - policy_versions (:obj:`Dict[str, int]`): policy -> the same version, for all policies of this process.
    Arguments:
        - max_iterations (:obj:`Optional[int]`): Wait for newer weights after this many iterations with the same ones.
        - max_age_s (:obj:`Optional[float]`): Wait for newer weights this many seconds after the last ones were sent.
        - period (:obj:`int`): Load newer weights once in this many iterations of the sender.
    """

    def __init__(
        self,
        session: RunSession,
        model: torch.nn.Module,
        name: str,
        max_iterations: Optional[int] = None,
        max_age_s: Optional[float] = None,
        period: int = 1,
        acting: Optional[bool] = None,
    ) -> None:
        super().__init__(session, model, name, acting)
        self._max_iterations, self._max_age_s, self._period = max_iterations, max_age_s, period
        self._num_iterations = 0  # with the loaded weights
        self._sent_at = time.time()
        self._sent_iteration = -1
        self._seen = 0  # the newest version that was loaded, or skipped because of ``period``
        self._lost = ''

    def __call__(self, ctx: Context) -> None:
        self._load(0.0)
        if ctx.total_step > 0 and self._is_too_old():
            self._wait()
        self._num_iterations += 1
        self._put_versions_into(ctx)

    def _is_too_old(self) -> bool:
        age_s = time.time() - self._sent_at  # by the clocks of both hosts, as in DI-engine
        is_stale = self._max_iterations is not None and self._num_iterations >= self._max_iterations
        return is_stale or (self._max_age_s is not None and age_s >= self._max_age_s)

    def _wait(self) -> None:
        deadline = time.monotonic() + MAX_WAIT_S

        def attempt(timeout_s: float) -> Optional[bool]:
            is_fresh = self._load(timeout_s) and not self._is_too_old()
            return True if is_fresh or time.monotonic() >= deadline else None

        before = self.version
        done = self._session.wait_for(f'weights newer than version {before}', attempt, 'learner', 'wait_weights')
        if done and self._is_too_old():
            logging.warning(
                f'ding_store: waited {MAX_WAIT_S:.0f} s for newer weights. Continuing with version '
                f'{self.version} of {self._value!r}'
            )

    def _load(self, timeout_s: float) -> bool:
        try:
            value = self._session.store.get(self._value, self._seen, timeout_s)
        except PayloadLost as error:
            if str(error) != self._lost:
                self._lost = str(error)
                logging.warning(f'ding_store: continuing with version {self.version} of {self._value!r}: {error}')
            return False
        if value is None:
            return False
        # A script that puts weights itself may leave out the iteration. Then each version is loaded.
        header: Dict[str, Any] = dict(value.header)
        counts = (header.get(name) for name in ('iteration', 'train_iter'))
        iteration, train_iter = (int(count or 0) if is_count(count) else 0 for count in counts)
        sent_at: Any = header.get('sent_at')
        if not self._is_of_period(iteration):
            self._seen = value.version
            return False
        load_arrays(self._model, value, self._session.config.weights_in_place)
        self._seen, self.version = value.version, int(value.version)
        self._num_iterations = 0
        self._sent_iteration, self._sent_at = iteration, sent_at if is_number(sent_at) else time.time()
        self._session.set_policy_version(self._name, self.version, policy_iter=train_iter)
        return True

    def _is_of_period(self, iteration: int) -> bool:
        """
        Return True if the sender has reached another multiple of the period since the loaded version. A restarted
        sender counts iterations from 0 again.
        """
        is_next = iteration // self._period > self._sent_iteration // self._period
        return self.version == 0 or is_next or iteration <= self._sent_iteration
