"""Modes without a server: averages with random peers, sparse gradients to all peers, and shared memory."""

from __future__ import annotations

import hashlib
import logging
import random
import socket
import time
from contextlib import suppress
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch

from ding_store.errors import ConfigError, PayloadLost, StoreError, StoreUnavailable, VersionConflict
from ding_store.learners.served import LocalStep
from ding_store.learners.tensors import Residuals, Tensors, load_arrays, to_arrays, to_tensors
from ding_store.storage.base import Value
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.store import Store

logger = logging.getLogger(__name__)

#: How often a worker looks for peers that joined, left or died.
_LOOK_EVERY_S = 1.0
_ALIGN = 64


class Gossip:
    """
    Overview:
        Mode 'gossip': local steps, then the mean of the own parameters and those that a random living peer published
        last. Nothing waits for a peer (Lian et al. 2018, "Asynchronous decentralized parallel SGD", where the peer
        changes as well; here each worker changes its own parameters only).

        If worker i of n averages with a uniformly random peer, and i is uniformly random, the expected sum of squared
        distances from the mean shrinks by the factor 1 - (n + 1) / (2 n (n - 1)).

        With ``residuals``, each step also sends the entries of the gradients beyond the threshold to all peers, and
        steps with what all sent (Strom 2015, section 3).
    """

    def __init__(
        self,
        store: Store,
        name: str,
        parameters: Sequence[torch.Tensor],
        worker: str,
        dtype: Optional[str],
        period: int,
        max_staleness: int,
        peer_timeout_s: float,
        seed: Optional[int],
        residuals: Optional[Residuals],
    ) -> None:
        self.num_local = 0
        self.num_averaged = 0
        self._store = store
        self._name = f'gossip/{name}'
        self._own = f'{self._name}/{worker}'
        self._parameters = list(parameters)
        self._dtype = dtype
        self._period = period
        self._max_staleness = max_staleness
        self._peer_timeout_s = peer_timeout_s
        self._random = random.Random(seed)
        self._seen: Dict[str, Tuple[int, float]] = {}  # peer's value -> its version, and since when
        self._looked_at = float('-inf')
        self._num_since = 0
        self._sparse = _SparseGradients(store, self._name, worker, parameters, residuals, peer_timeout_s)
        peer = self._random_peer()
        if peer is not None:  # A worker that joins begins where the others are.
            load_arrays(self._parameters, peer.arrays)
        self._publish()

    def step(self, gradients: Tensors, local_step: LocalStep, more: Dict[str, Any]) -> None:
        with suppress(StoreUnavailable), self._store.nonblocking():
            self._sparse.exchange(gradients)
        local_step()
        self._num_since += 1
        if self._num_since < self._period:
            return
        try:
            with self._store.nonblocking():
                self._average()
        except StoreUnavailable:
            self.num_local += 1
            if self.num_local > self._max_staleness:
                self._average()  # This waits for the store's server.

    def _average(self) -> None:
        peer = self._random_peer()
        if peer is not None:
            with torch.no_grad():
                for own, other in zip(self._parameters, to_tensors(peer.arrays, self._parameters)):
                    if other is not None:
                        own.lerp_(other.to(own.device, own.dtype), 0.5)
            self.num_averaged += 1
        self._publish()
        self._num_since = self.num_local = 0

    def _publish(self) -> None:
        self._store.put(self._own, {}, to_arrays(self._parameters, self._dtype))

    def _random_peer(self) -> Optional[Value]:
        """Return the newest parameters of a random living peer, or None if there is no peer."""
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self._look()
        since = time.monotonic() - self._peer_timeout_s
        living = sorted(name for name, (_, changed) in self._seen.items() if changed >= since)
        if not living:
            return None
        try:
            return self._store.get(self._random.choice(living))
        except PayloadLost:  # It was killed, and its parameters are on another host.
            return None

    def _look(self) -> None:
        now, values = time.monotonic(), self._store.info().values
        seen = {}
        for name, version in values.items():
            if name.startswith(f'{self._name}/') and name != self._own:
                before = self._seen.get(name)
                seen[name] = before if before is not None and before[0] == version else (version, now)
        self._seen, self._looked_at = seen, now

    @property
    def peers(self) -> List[str]:
        """Ids of the living peers, at the last look."""
        since = time.monotonic() - self._peer_timeout_s
        return sorted(name.rpartition('/')[2] for name, (_, changed) in self._seen.items() if changed >= since)

    def close(self) -> None:
        """Leave: peers no longer average with this worker."""
        try:
            with self._store.nonblocking():
                self._sparse.close()
                self._store.delete(self._own)
        except StoreError as e:
            logger.info('%r could not be deleted, so peers may average with it for a while: %s', self._own, e)


class _SparseGradients:
    """
    Overview:
        Entries of gradients beyond a threshold, which each worker sends to all others. Each worker reads the stream
        with a reader of its own, so each message counts once in each worker. A reader that acks nothing for
        ``peer_timeout_s`` is removed, so that a dead worker does not fill the stream.
    """

    def __init__(
        self,
        store: Store,
        stream: str,
        worker: str,
        parameters: Sequence[torch.Tensor],
        residuals: Optional[Residuals],
        peer_timeout_s: float,
    ) -> None:
        self._store = store
        self._stream = stream
        self._worker = worker
        self._parameters = list(parameters)
        self._residuals = residuals
        self._peer_timeout_s = peer_timeout_s
        self._acks: Dict[str, Tuple[int, float]] = {}
        self._looked_at = time.monotonic()
        self._reader = Reader(store, stream, worker, start='now', on_corrupt='skip') if residuals is not None else None

    def exchange(self, gradients: Tensors) -> None:
        """Send what is beyond the threshold, and set each gradient to the sum of what all workers sent."""
        if self._reader is None or self._residuals is None:
            return
        arrays = self._residuals.to_signs(gradients)
        self._apply([to_tensors(arrays, self._parameters, self._residuals.threshold)])
        self._store.append(self._stream, {'worker': self._worker, 'threshold': self._residuals.threshold}, arrays)
        entries = self._reader.read()
        others = [entry for entry in entries if entry.header['worker'] != self._worker]
        self._apply([to_tensors(one.arrays, self._parameters, one.header['threshold']) for one in others], adds=True)
        if entries:
            self._reader.ack(wait=False)
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self._remove_dead_readers()

    def _apply(self, sent: Sequence[Tensors], adds: bool = False) -> None:
        with torch.no_grad():
            if not adds:
                for parameter in self._parameters:
                    if parameter.grad is not None:
                        parameter.grad.zero_()
            for tensors in sent:
                for parameter, tensor in zip(self._parameters, tensors):
                    if tensor is None:
                        continue
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad.add_(tensor.to(parameter.device))

    def _remove_dead_readers(self) -> None:
        self._looked_at = now = time.monotonic()
        info = self._store.stream_info(self._stream)
        for reader, acked in info.readers.items() if info is not None else ():
            before = self._acks.get(reader, (acked, now))
            self._acks[reader] = before if before[0] == acked else (acked, now)
            has_more = info is not None and info.last > acked
            if has_more and reader != self._worker and now - self._acks[reader][1] > self._peer_timeout_s:
                logger.warning('worker %r read nothing for %g s: it counts as dead', reader, self._peer_timeout_s)
                self._store.forget(self._stream, reader)
                del self._acks[reader]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.forget()


class Hogwild:
    """
    Overview:
        Mode 'hogwild': the parameters are one file of the host cache, which all workers of this host change without
        locks (Recht et al. 2011, "Hogwild!"). The worker that comes first brings the parameters. A worker on another
        host is refused: it would train alone.
    """

    num_local = 0

    def __init__(self, store: Store, name: str, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        if any(each.device.type != 'cpu' for each in parameters):
            raise ConfigError("sync ('hogwild') needs parameters on the CPU: the workers share their memory")
        places, at = [], _ALIGN
        for each in self._parameters:
            places.append(at)
            at += -(-each.nbytes // _ALIGN) * _ALIGN
        shapes = str([(tuple(each.shape), str(each.dtype)) for each in self._parameters])
        digest = hashlib.blake2b(shapes.encode(), digest_size=16).digest()

        _check_host(store, name)

        def fill(memory: memoryview) -> None:
            memory[: len(digest)] = digest
            with torch.no_grad():
                for target, source in zip(self._views(memory, places), self._parameters):
                    target.copy_(source)

        memory = store.shared_memory(f'hogwild/{name}', at, fill)
        if bytes(memory[: len(digest)]) != digest:
            raise ConfigError(f'hogwild model {name!r} has other parameters. Use another name, or the same model.')
        for parameter, view in zip(self._parameters, self._views(memory, places)):
            parameter.data = view

    def _views(self, memory: memoryview, places: Sequence[int]) -> List[torch.Tensor]:
        everything = torch.from_numpy(np.frombuffer(memory, np.uint8))
        return [
            everything[at : at + each.nbytes].view(each.dtype).view(each.shape)
            for at, each in zip(places, self._parameters)
        ]

    def step(self, gradients: Tensors, local_step: LocalStep, more: Dict[str, Any]) -> None:
        local_step()

    def close(self) -> None:
        """Continue with parameters of this process."""
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()


def _check_host(store: Store, name: str) -> None:
    """Raise ConfigError if the model is in the memory of another host, as the worker that came first has noted."""
    if not store.host:
        return  # ``shared_memory`` refuses it, with the reason
    value = f'hogwild/{name}'
    with suppress(VersionConflict):
        store.decide(value, {'host': store.host, 'hostname': socket.gethostname()}, 0)
    found = store.get(value)
    if found is not None and found.header['host'] != store.host:
        hostname = found.header['hostname']
        if hostname == socket.gethostname():
            place, fix = 'another host cache of this host', 'Set the same store.host_cache_dir for all workers'
        else:
            place, fix = f'the memory of {hostname!r}', "Use sync='async'"
        raise ConfigError(
            f"sync ('hogwild') works on one host, and model {name!r} is in {place}. {fix}. "
            'If no worker runs there any more, start another --run, or use another name.'
        )
