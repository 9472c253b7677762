"""The optimizer of a worker: its step exchanges gradients or parameters with other workers."""

from __future__ import annotations

import uuid
from typing import Any, Callable, Dict, List, Optional, Union

import torch

from ding_store.errors import ConfigError, StoreClosed, StoreUnavailable
from ding_store.learners.gossip import Gossip, Hogwild
from ding_store.learners.served import Asynchronous, Averaging, Elastic, Link, Synchronous, encoder
from ding_store.learners.tensors import Residuals, check_dtype
from ding_store.learners.wire import SERVED, check_at_least, check_mode
from ding_store.storage.store import Store

#: Options that count in some modes only.
_ONLY_IN = {
    'period': ('average', 'elastic', 'gossip'),
    'rho': ('elastic',),
    'max_ahead': ('async',),
    'threshold': ('async', 'gossip'),
    'reset_state': ('average',),
}


class StoreOptimizer(torch.optim.Optimizer):
    """
    Overview:
        An optimizer for several workers that train one model. Each worker has the model, an optimizer, and this around
        it. Learning rates, groups and the state are those of the inner optimizer, so schedulers work.

        =============  ==========================================================================================
        ``sync``       ``step()``
        =============  ==========================================================================================
        'gradients'    sends the gradients, waits until the server has stepped with the mean of all workers'
        'async'        sends the gradients. The server steps with each worker's as they come
        'average'      steps here. Every ``period`` steps, all workers continue with the mean of their parameters
        'elastic'      steps here. Every ``period`` steps, worker and server move towards each other by ``rho``
        'gossip'       steps here. Every ``period`` steps, averages with one random living worker, without a server
        'hogwild'      steps here, on parameters that all workers of a host share, without a server
        =============  ==========================================================================================

        The first four need a ``ParameterServer`` of this name. Workers may join, leave and die at any time. While the
        store's server is unreachable, 'gradients' waits, 'hogwild' notices nothing, and the others step here:
        ``max_staleness`` steps ('async') or exchanges. Then they wait, up to the store's ``reconnect_timeout_s``.

        Gradients carry the learning rates of their worker, and the server steps with these. So a scheduler here works.
    Arguments:
        - optimizer (:obj:`torch.optim.Optimizer`): The optimizer of the worker's model. With 'gradients' and 'async',
          only the server's optimizer has a state, and this one steps only while the store is unreachable.
        - store (:obj:`Store`): The run's store.
        - name (:obj:`str`): Name of the model in the run.
        - sync (:obj:`str`): The mode, see above.
        - max_staleness (:obj:`int`): With 'async', the server drops gradients that are older, in versions of the
          parameters. Also the bound of steps without the store, see above.
        - max_ahead (:obj:`int`): With 'async', gradients of this worker that may be unanswered when ``step`` returns.
          With 0, one worker does exactly what the server's optimizer does alone. With 1, computing and sending overlap.
        - period (:obj:`int`): Steps from one exchange to the next.
        - rho (:obj:`float`): 0 to 1.
        - threshold (:obj:`Optional[float]`): Send only +threshold or -threshold for entries beyond it, and carry the
          rest over (Strom 2015). With 'gossip', these go to all workers in each step.
        - dtype (:obj:`Optional[str]`): Send floats as 'float16' or 'bfloat16', which halves the bytes.
        - reset_state (:obj:`bool`): With 'average', empty the optimizer's state (momentum) after each exchange.
        - timeout_s (:obj:`float`): Seconds to wait for the server or for other workers.
        - peer_timeout_s (:obj:`float`): With 'gossip', a worker that publishes nothing for so long counts as dead.
        - seed (:obj:`Optional[int]`): Of the choice of peers.
        - worker (:obj:`Optional[str]`): Name of this worker in logs, unique among all. Default: a random one.
    Raises:
        - ConfigError: A setting is wrong, or the server has another mode.
        - StoreTimeout: No server answered within ``timeout_s``.
        - SchemaMismatch: The server's model has other shapes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: Store,
        name: str,
        sync: str = 'gradients',
        max_staleness: int = 8,
        max_ahead: int = 0,
        period: int = 1,
        rho: float = 0.5,
        threshold: Optional[float] = None,
        dtype: Optional[str] = None,
        reset_state: bool = False,
        timeout_s: float = 120.0,
        peer_timeout_s: float = 30.0,
        seed: Optional[int] = None,
        worker: Optional[str] = None,
    ) -> None:
        # torch's own __init__ is not called: groups, state and hooks are those of the inner optimizer.
        self.optimizer = optimizer
        self.sync = check_mode(sync)
        self.name = name
        self.worker = worker or uuid.uuid4().hex[:8]
        check_at_least('max_staleness', max_staleness, 0)
        check_at_least('max_ahead', max_ahead, 0)
        check_at_least('period', period, 1)
        check_at_least('rho', rho, 0, 1)
        check_at_least('timeout_s', timeout_s, 0)
        check_at_least('peer_timeout_s', peer_timeout_s, 0)
        check_dtype(dtype)
        set_here = {'period': period != 1, 'rho': rho != 0.5, 'max_ahead': max_ahead != 0}
        set_here.update(threshold=threshold is not None, reset_state=reset_state)
        for option, modes in _ONLY_IN.items():
            if set_here[option] and sync not in modes:
                raise ConfigError(f'{option} counts with sync {" or ".join(map(repr, modes))} only, not {sync!r}')
        self._is_closed = False
        parameters = self._parameters()
        residuals = Residuals(parameters, threshold) if threshold is not None else None
        self.residuals = residuals
        self._link: Optional[Link] = None
        self._more: Dict[str, Any] = {}
        if sync in SERVED:
            self._link = link = Link(store, name, sync, parameters, self.worker, timeout_s, self._while_waiting)
            link.join()
        self._exchange: Union[Synchronous, Asynchronous, Averaging, Gossip, Hogwild]
        if sync == 'gradients':
            self._exchange = Synchronous(link, encoder(dtype, None))
        elif sync == 'async':
            self._exchange = Asynchronous(link, encoder(dtype, residuals), store, max_staleness, max_ahead)
            if threshold is not None:
                self._more = {'threshold': threshold}
        elif sync == 'average':
            forget = self.optimizer.state.clear if reset_state else lambda: None
            self._exchange = Averaging(link, dtype, period, max_staleness, forget)
        elif sync == 'elastic':
            self._exchange = Elastic(link, dtype, period, max_staleness, rho)
        elif sync == 'gossip':
            self._exchange = Gossip(
                store, name, parameters, self.worker, dtype, period, max_staleness, peer_timeout_s, seed, residuals
            )
        else:
            self._exchange = Hogwild(store, name, parameters)

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """
        Overview:
            Exchange, and step. Afterwards the model has the parameters to continue with.
        Arguments:
            - closure (:obj:`Optional[Callable]`): Called once, first. It computes the gradients, and returns the loss.
        Returns:
            - loss: What ``closure`` returned.
        Raises:
            - StoreTimeout: The parameter server did not answer within ``timeout_s``.
            - StoreUnavailable: The store's server did not come back within ``reconnect_timeout_s``. What was sent
              arrives later: continue with the next gradients.
            - StoreClosed: The parameter server has ended, or this optimizer was closed.
        """
        if self._is_closed:
            raise StoreClosed(f'the optimizer of {self.name!r} was closed')
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        more = dict(self._more)
        if self.sync in ('gradients', 'async'):
            more['rates'] = [float(group['lr']) for group in self.param_groups if 'lr' in group]
            self._call_hooks('_optimizer_step_pre_hooks')
        gradients = [each.grad for each in self._parameters()]
        try:
            self._exchange.step(gradients, self.optimizer.step, more)
        except StoreUnavailable as e:
            raise StoreUnavailable(
                f'step of {self.name!r}: the server of the store did not come back, after {self._exchange.num_local} '
                f'steps without it (max_staleness). Start it again, and continue with the next step. {e}'
            ) from e
        if self.sync in ('gradients', 'async'):
            self._call_hooks('_optimizer_step_post_hooks')
        return loss

    def _while_waiting(self) -> None:
        """Do other work about every two seconds while a step waits for the parameter server."""

    def _call_hooks(self, kind: str) -> None:
        """Call the inner optimizer's hooks: parameters change, although it does not step."""
        for hook in list(getattr(self.optimizer, kind, {}).values()):
            hook(self, (), {})

    @property
    def figures(self) -> Dict[str, int]:
        """
        Overview:
            Counts of this worker.
        Returns:
            - version (:obj:`int`): Version of the parameters of the last exchange, with a server.
            - sent, dropped (:obj:`int`): Updates sent, and those that the server dropped, with a server.
            - local (:obj:`int`): Steps or exchanges in a row without the store.
            - averaged (:obj:`int`): Averages with a peer, with 'gossip'.
        """
        found = {'local': self._exchange.num_local}
        if self._link is not None:
            found.update(version=self._link.version, sent=self._link.number, dropped=self._link.num_dropped)
        if isinstance(self._exchange, Gossip):
            found['averaged'] = self._exchange.num_averaged
        return found

    @property
    def peers(self) -> List[str]:
        """Ids of the other workers that live, with 'gossip'."""
        return self._exchange.peers if isinstance(self._exchange, Gossip) else []

    def close(self) -> None:
        """Leave: the others do not wait for this worker any more. The model stays as it is."""
        if not self._is_closed:
            self._is_closed = True
            if self._link is not None:
                self._link.close()
            elif isinstance(self._exchange, (Gossip, Hogwild)):
                self._exchange.close()

    def __enter__(self) -> StoreOptimizer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """
        Raises:
            - ConfigError: Always: the other workers and the server would lack these parameters.
        """
        raise ConfigError('add_param_group: add the group to the inner optimizers before StoreOptimizer is made')

    def __getattr__(self, name: str) -> Any:
        if name == 'optimizer':
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f'StoreOptimizer({self.optimizer!r}, name={self.name!r}, sync={self.sync!r})'

    def _parameters(self) -> List[torch.Tensor]:
        return [each for group in self.optimizer.param_groups for each in group['params']]
