"""A worker's side of the modes with a parameter server."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import torch

from ding_store.errors import AppendUnsettled, ConfigError, StoreClosed, StoreTimeout, StoreUnavailable
from ding_store.learners.tensors import Residuals, Tensors, load_arrays, to_arrays, to_tensors
from ding_store.learners.wire import JOIN, LEAVE, UPDATE, empty_header, stream_of, value_of
from ding_store.storage.base import Arrays, Value
from ding_store.storage.store import Store

#: A worker that waits sends JOIN again this often. The server then publishes again what a lost store has lost.
_ASK_EVERY_S = 2.0

LocalStep = Callable[[], None]


class Link:
    """
    Overview:
        One worker's connection with the parameter server of a name.
    Arguments:
        - while_waiting (:obj:`Callable`): Called about every two seconds while this worker waits for the server.
    Attributes:
        - header (:obj:`Mapping`): Header of the newest parameters that were seen.
        - version (:obj:`int`): Version of the parameters that the model has.
        - number (:obj:`int`): Updates sent.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        sync: str,
        parameters: Sequence[torch.Tensor],
        worker: str,
        timeout_s: float,
        while_waiting: Callable[[], None],
    ) -> None:
        self.header: Mapping[str, Any] = empty_header(sync)
        self.version = 0
        self.number = 0
        self.worker = worker
        self.parameters = list(parameters)
        self._store = store
        self._name = name
        self._sync = sync
        self._timeout_s = timeout_s
        self._while_waiting = while_waiting
        self._seen = 0  # version of the value that was seen last
        self._value: Optional[Value] = None  # not loaded yet: it keeps the server from using its memory again

    def join(self) -> None:
        """
        Raises:
            - StoreTimeout: No server answered within ``timeout_s``.
            - ConfigError: The server has another mode.
            - SchemaMismatch: The server's model has other shapes.
        """
        self.send(JOIN, {})
        self.wait(lambda: self._value is not None and not self.header['is_over'], may_be_over=True)
        if self.header['sync'] != self._sync:
            raise ConfigError(
                f'sync ({self._sync!r}): the parameter server of {self._name!r} has {self.header["sync"]!r}. Use that.'
            )
        self.load()

    def send(self, kind: str, arrays: Arrays, **more: Any) -> None:
        """Append one entry. If the store's server is unreachable, the entry is kept and sent later."""
        self.number += kind == UPDATE
        header = {'kind': kind, 'worker': self.worker, 'number': self.number, 'sync': self._sync, **more}
        header.update(version=self.version, lineage=self.header['lineage'])
        try:
            self._store.append(stream_of(self._name), header, arrays, self._timeout_s)
        except AppendUnsettled:
            pass

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Look for newer parameters, without loading them. Return whether there are any."""
        found = self._store.get(value_of(self._name), self._seen, timeout_s)
        if found is None:
            return False
        self._seen = found.version
        if found.header['lineage'] == self.header['lineage'] and found.header['version'] < self.version:
            return False  # A server that was restarted repeats what followed its checkpoint.
        self.header, self._value = found.header, found
        return True

    def wait(self, is_enough: Callable[[], bool], may_be_over: bool = False) -> None:
        """
        Overview:
            Wait until the newest header is enough. Nothing is loaded.
        Raises:
            - StoreTimeout: The server did not answer within ``timeout_s``.
            - StoreClosed: The server has ended.
        """
        deadline = time.monotonic() + self._timeout_s
        while not is_enough():
            if self.header['is_over'] and not may_be_over:
                raise StoreClosed(f'the parameter server of {self._name!r} has ended')
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StoreTimeout(
                    f'no answer of the parameter server of {self._name!r} within {self._timeout_s:g} s (timeout_s). '
                    'Start a ParameterServer of that name on this run.'
                )
            if not self.poll(min(left_s, _ASK_EVERY_S)):
                self._while_waiting()
                self.send(JOIN, {})

    def wait_for_update(self) -> None:
        """Wait for parameters that follow from what this worker sent last, or that were made without it."""
        version, lineage, dropped = self.version, self.header['lineage'], self.num_dropped
        self.wait(
            lambda: (
                self.header['version'] > version or self.header['lineage'] != lineage or self.num_dropped > dropped
            )
        )

    def load(self) -> None:
        """Copy the newest parameters into the model, if they were not loaded yet."""
        value, self._value = self._value, None
        if value is not None:
            load_arrays(self.parameters, value.arrays)
            self.version = value.header['version']

    def centre(self) -> Tensors:
        """Return the newest parameters, in place."""
        self._seen = 0
        self.wait(lambda: self._value is not None)
        value, self._value = self._value, None
        assert value is not None
        self.version = value.header['version']
        return to_tensors(value.arrays, self.parameters)

    def is_reachable(self) -> bool:
        """Return whether the store's server answers now. Look for newer parameters."""
        try:
            with self._store.nonblocking():
                self.poll()
        except StoreUnavailable:
            return False
        return True

    @property
    def num_unanswered(self) -> int:
        return self.number - int(self.header['handled'].get(self.worker, 0))

    @property
    def num_dropped(self) -> int:
        return int(self.header['dropped'].get(self.worker, 0))

    def close(self) -> None:
        try:
            with self._store.nonblocking():
                self.send(LEAVE, {})
        except (StoreUnavailable, StoreClosed):
            pass  # The server notices by its time-out.


class Synchronous:
    """
    Overview:
        Mode 'gradients': send the gradients, and wait for the parameters that follow from those of all workers.
    """

    def __init__(self, link: Link, encode: Callable[[Tensors], Dict[str, Any]]) -> None:
        self._link = link
        self._encode = encode
        self.num_local = 0

    def step(self, gradients: Tensors, local_step: LocalStep, more: Dict[str, Any]) -> None:
        self._link.send(UPDATE, self._encode(gradients), **more)
        self._link.wait_for_update()
        self._link.load()


class Asynchronous:
    """
    Overview:
        Mode 'async': send the gradients, and go on with the newest parameters (Dean et al. 2012, "Large scale
        distributed deep networks", Downpour SGD with n_push = n_fetch = 1).
    """

    def __init__(
        self, link: Link, encode: Callable[[Tensors], Dict[str, Any]], store: Store, max_staleness: int, max_ahead: int
    ) -> None:
        self._link = link
        self._encode = encode
        self._store = store
        self._max_staleness = max_staleness
        self._max_ahead = max_ahead
        self.num_local = 0  # steps in a row while the store's server was unreachable

    def step(self, gradients: Tensors, local_step: LocalStep, more: Dict[str, Any]) -> None:
        link = self._link
        arrays = self._encode(gradients)
        with self._store.nonblocking():
            link.send(UPDATE, arrays, max_staleness=self._max_staleness, **more)
        if not link.is_reachable():
            if self.num_local < self._max_staleness:
                self.num_local += 1
                local_step()
                return
            link.poll()  # This waits for the store's server.
        # With local steps behind it, the model returns to the server's parameters once these have all its gradients.
        lineage = link.header['lineage']
        link.wait(lambda: link.num_unanswered <= self._max_ahead or link.header['lineage'] != lineage)
        self.num_local = 0
        link.load()


class Averaging:
    """
    Overview:
        Mode 'average': local steps, then the mean of all workers' parameters (McMahan et al. 2017, "Communication-
        efficient learning of deep networks from decentralized data", with equal weights; Stich 2019, "Local SGD
        converges fast and communicates little").
    """

    def __init__(self, link: Link, dtype: Optional[str], period: int, max_staleness: int, forget: LocalStep) -> None:
        self._link = link
        self._dtype = dtype
        self._period = period
        self._max_staleness = max_staleness
        self._forget = forget  # the optimizer's state, after an exchange
        self._num_since = 0
        self.num_local = 0

    def step(self, gradients: Tensors, local_step: LocalStep, more: Dict[str, Any]) -> None:
        local_step()
        self._num_since += 1
        if self._num_since < self._period:
            return
        if not self._link.is_reachable():
            if self.num_local < self._max_staleness:
                self.num_local += 1
                return
            self._link.poll()  # This waits for the store's server.
        self.exchange()
        self._num_since = self.num_local = 0

    def exchange(self) -> None:
        self._link.send(UPDATE, to_arrays(self._link.parameters, self._dtype))
        self._link.wait_for_update()
        self._link.load()
        self._forget()


class Elastic(Averaging):
    """
    Overview:
        Mode 'elastic': local steps, then worker and centre move towards each other by ``rho`` times their difference
        (Zhang, Choromanska and LeCun 2015, "Deep learning with elastic averaging SGD", algorithm 1, where it is alpha).
    """

    def __init__(self, link: Link, dtype: Optional[str], period: int, max_staleness: int, rho: float) -> None:
        super().__init__(link, dtype, period, max_staleness, lambda: None)
        self._rho = rho

    @torch.no_grad()
    def exchange(self) -> None:
        link = self._link
        differences: List[Optional[torch.Tensor]] = [
            (own.detach().cpu() - centre) * self._rho if centre is not None else None
            for own, centre in zip(link.parameters, link.centre())
        ]
        arrays = to_arrays(differences, self._dtype)
        link.send(UPDATE, arrays)
        # What was sent, rounded or not: the sum of worker and centre stays the same.
        for own, difference in zip(link.parameters, to_tensors(arrays, link.parameters)):
            if difference is not None:
                own.sub_(difference.to(own.device))


def encoder(dtype: Optional[str], residuals: Optional[Residuals]) -> Callable[[Tensors], Dict[str, Any]]:
    """Return the function that makes arrays of gradients."""
    if residuals is not None:
        return residuals.to_signs
    return lambda gradients: to_arrays(gradients, dtype)
