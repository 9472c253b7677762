"""The model exchangers: policy weights from the learner to everybody, as one versioned value per policy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Dict, Generator, Optional

import torch
from ding.framework import task
from ditk import logging

from ding_store.errors import ConfigError, PayloadLost
from ding_store.middleware.session import Session
from ding_store.middleware.state import load_arrays, state_to_arrays

if TYPE_CHECKING:
    from ding.framework import Context

#: How long a receiver that must not use old weights waits for new ones before it goes on with them, as in DI-engine.
MAX_WAIT_S = 60.0


def model_exchanger(session: Session, model: torch.nn.Module, model_loader: Any = None, name: str = 'main') -> Any:
    """
    Overview:
        Exchange weights through the store; ModelExchanger's place, with the difference that a collector loads the
        newest version there is and does not wait for a newer one: the pace is kept by the context exchanger.
    Arguments:
        - model_loader: Accepted for compatibility and not needed.
        - name (:obj:`str`): Which policy, for runs with several.
    """
    if not _is_parallel('model exchanger'):
        return task.void()
    if task.has_role(task.role.LEARNER):
        return WeightsSender(session, model, name)
    return WeightsReceiver(session, model, name)


def periodical_model_exchanger(
    session: Session,
    model: torch.nn.Module,
    mode: str,
    period: int = 1,
    delay_toleration: Optional[float] = None,
    stale_toleration: Optional[int] = None,
    event_name: str = 'main',
    model_loader: Any = None,
) -> Any:
    """
    Overview:
        PeriodicalModelExchanger's place and meanings, with the difference that a receiver waits for newer weights only
        if a toleration is given: else it goes on with the newest there are.
    Arguments:
        - mode (:obj:`str`): 'send' or 'receive'.
        - period (:obj:`int`): Weights are sent before the first iteration, and after the first and every ``period``-th
          that follows.
        - delay_toleration (:obj:`Optional[float]`): For how many seconds weights may be used once they are received.
        - stale_toleration (:obj:`Optional[int]`): For how many iterations they may be used.
        - event_name (:obj:`str`): Which policy, for runs with several.
        - model_loader: Accepted for compatibility and not needed.
    Raises:
        - ConfigError: A bad mode, period or toleration.
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
        return WeightsSender(session, model, event_name, period)
    return WeightsReceiver(session, model, event_name, stale_toleration, delay_toleration)


def _is_parallel(what: str) -> bool:
    if not task.router.is_active:
        return False
    if len(task.roles) == 0:
        logging.warning(f'The task does not have any roles defined, the {what} will not work.')
        return False
    return True


class WeightsSender:
    """
    Overview:
        Publish the model once before training, and after every ``period``-th iteration if it trained.
    Output of ctx:
        - policy_version (:obj:`int`): Of the weights that were published last.
    """

    __ding_store_harmless__ = True

    def __init__(self, session: Session, model: torch.nn.Module, name: str, period: int = 1) -> None:
        self._session, self._model, self._value = session, model, f'weights/{name}'
        self._period = period
        self._num_iterations = 0
        self._published_iter: Optional[int] = None
        self._pinned: Dict[str, torch.Tensor] = {}
        self.version = 0

    def __call__(self, ctx: Context) -> Generator:
        if self._published_iter is None:
            self._publish(ctx)
        ctx.policy_version = self.version
        yield
        self._num_iterations += 1
        if ctx.train_iter != self._published_iter and (self._num_iterations - 1) % self._period == 0:
            self._publish(ctx)

    def _publish(self, ctx: Context) -> None:
        header, arrays = state_to_arrays(self._model.state_dict(), self._session.config.weights_dtype, self._pinned)
        header['train_iter'] = ctx.train_iter
        self.version = self._session.store.put(self._value, header, arrays)
        self._published_iter = ctx.train_iter
        self._session.figures(policy_version=self.version)


class WeightsReceiver:
    """
    Overview:
        Load the newest published version, if it is newer than the one at hand.
    Output of ctx:
        - policy_version (:obj:`int`): Of the weights that this iteration works with; 0: its own.
    Arguments:
        - max_iterations (:obj:`Optional[int]`): After as many with the same weights newer ones are waited for.
        - max_age_s (:obj:`Optional[float]`): The same, after so many seconds.
    """

    __ding_store_harmless__ = True

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        name: str,
        max_iterations: Optional[int] = None,
        max_age_s: Optional[float] = None,
    ) -> None:
        self._session, self._model, self._value = session, model, f'weights/{name}'
        self._max_iterations, self._max_age_s = max_iterations, max_age_s
        self._num_iterations = 0  # with the weights at hand
        self._loaded_at = time.monotonic()
        self._lost = ''
        self.version = 0

    def __call__(self, ctx: Context) -> None:
        if not self._load(0.0) and ctx.total_step > 0 and self._is_too_old():
            self._wait()
        self._num_iterations += 1
        ctx.policy_version = self.version

    def _is_too_old(self) -> bool:
        is_stale = self._max_iterations is not None and self._num_iterations >= self._max_iterations
        return is_stale or (self._max_age_s is not None and time.monotonic() - self._loaded_at >= self._max_age_s)

    def _wait(self) -> None:
        deadline = time.monotonic() + MAX_WAIT_S

        def attempt(timeout_s: float) -> Optional[bool]:
            return True if self._load(timeout_s) or time.monotonic() >= deadline else None

        before = self.version
        done = self._session.wait_for(f'weights newer than version {before}', attempt, 'learner')
        if done and self.version == before:
            logging.warning(f'ding_store: no newer weights within {MAX_WAIT_S:.0f} s, going on with version {before}')

    def _load(self, timeout_s: float) -> bool:
        try:
            value = self._session.store.get(self._value, self.version, timeout_s)
        except PayloadLost as error:
            if str(error) != self._lost:
                self._lost = str(error)
                logging.warning(f'ding_store: going on with version {self.version}: {error}')
            return False
        if value is None:
            return False
        load_arrays(self._model, value, self._session.config.weights_in_place)
        self.version = value.version
        self._num_iterations, self._loaded_at = 0, time.monotonic()
        self._session.figures(policy_version=value.version, policy_iter=value.header['train_iter'])
        return True
