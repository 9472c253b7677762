"""The process that adds up what workers send, and publishes the parameters that follow."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Union

import torch

from ding_store.checkpoint.directory import CheckpointDir
from ding_store.errors import ConfigError, SchemaMismatch, StoreClosed, StoreError, StoreUnavailable, VersionConflict
from ding_store.learners.optimizer_copy import state_of
from ding_store.learners.tensors import Tensors, check_dtype, load_arrays, to_arrays, to_tensors
from ding_store.learners.wire import (
    JOIN,
    LEAVE,
    SERVED,
    SYNCHRONOUS,
    UPDATE,
    check_at_least,
    check_mode,
    empty_header,
    stream_of,
    value_of,
)
from ding_store.storage.base import Entry, EntryId
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.store import Store

logger = logging.getLogger(__name__)

READER = 'server'
#: How long one wait for entries is. ``close`` waits for its end.
_WAIT_S = 0.5
#: Entries of one update that are added up together, to save passes over their memory.
_MAX_HELD = 2
#: Workers whose counts are kept after they left, newest first.
_MAX_GONE = 1000


class ParameterServer:
    """
    Overview:
        The centre of the modes 'gradients', 'async', 'average' and 'elastic': see ``StoreOptimizer``. It reads the
        stream ``updates/<name>``, changes the model's parameters, and publishes them as the value
        ``parameters/<name>``. One process serves a name. Call ``run``, or ``start`` for a thread of this process.

        Each gradient counts once, also after a crash: with ``path``, the server acks entries when a checkpoint holds
        their effect. A server that died continues from its newest checkpoint, and reads the entries after it again.
        Without ``path``, entries are acked at once, and a server that died begins again with its model's parameters.
    Arguments:
        - model: A torch module, or its parameters. They are changed in place. Buffers, such as running means of batch
          norms, are not exchanged.
        - optimizer (:obj:`Optional[torch.optim.Optimizer]`): Steps on the mean of the gradients. It has the parameters
          in the order of the workers' optimizers. None: for 'average' and 'elastic', which need none.
        - store (:obj:`Store`): The run's store.
        - name (:obj:`str`): Name of the model in the run.
        - sync (:obj:`str`): 'gradients', 'async', 'average' or 'elastic', as in the workers.
        - num_workers (:obj:`int`): The synchronous modes wait for this number of workers before the first update.
        - straggler_timeout_s (:obj:`float`): Seconds since the first gradient of an update after which a synchronous
          mode goes on without the workers that are missing. It waits for them again once they send something.
        - scale_by (:obj:`Optional[str]`): 'staleness': with 'async', divide each gradient by 1 + its staleness (Zhang
          et al. 2016, "Staleness-aware async-SGD", equation 6, with a learning rate of 1 / (1 + staleness)).
        - dtype (:obj:`Optional[str]`): Publish floats as 'float16' or 'bfloat16', which halves the bytes. The server
          keeps the full values.
        - path (:obj:`Optional[str]`): Directory of checkpoints. Only one process may use it.
        - checkpoint_s (:obj:`float`): Seconds between two checkpoints. Updates wait while one is written.
        - max_unsaved_bytes (:obj:`int`): Write a checkpoint earlier if entries of this size are not acked. It must be
          below ``max_pending_bytes`` of the stream.
    Attributes:
        - version (:obj:`int`): Number of updates.
        - figures (:obj:`dict`): Counts since the server began: see ``figures``.
    Raises:
        - ConfigError: A setting is wrong, or another process uses ``path``.
    """

    def __init__(
        self,
        model: Union[torch.nn.Module, Sequence[torch.Tensor]],
        optimizer: Optional[torch.optim.Optimizer],
        store: Store,
        name: str,
        sync: str = 'gradients',
        num_workers: int = 1,
        straggler_timeout_s: float = 10.0,
        scale_by: Optional[str] = None,
        dtype: Optional[str] = None,
        path: Optional[str] = None,
        checkpoint_s: float = 30.0,
        max_unsaved_bytes: int = 128 << 20,
    ) -> None:
        self.sync = check_mode(sync, SERVED)
        if optimizer is None and sync in ('gradients', 'async'):
            raise ConfigError(f'sync ({sync!r}) needs an optimizer: the server steps with it')
        if scale_by not in (None, 'staleness'):
            raise ConfigError(f"scale_by ({scale_by!r}) must be None or 'staleness'")
        self.optimizer = optimizer
        self.name = name
        self.num_workers = check_at_least('num_workers', num_workers, 1)
        self.straggler_timeout_s = check_at_least('straggler_timeout_s', straggler_timeout_s, 0)
        self.version = 0
        self._scale_by = scale_by
        self._dtype = check_dtype(dtype)
        self._checkpoint_s = check_at_least('checkpoint_s', checkpoint_s, 0)
        self._max_unsaved_bytes = check_at_least('max_unsaved_bytes', max_unsaved_bytes, 0)
        self._store = store
        self._id = uuid.uuid4().hex
        self._lineage = uuid.uuid4().hex
        self._parameters = _parameters_of(model, optimizer)
        self._sum = [torch.zeros(each.shape, dtype=each.dtype) for each in self._parameters]
        self._is_summed = [False] * len(self._sum)
        self._held: List[Tensors] = []  # what follows in the sum, in the memory of entries that are not acked
        self._members: Set[str] = set()
        self._has_begun = False
        self._came: Dict[str, float] = {}  # workers of the open update, and when they came
        self._handled: Dict[str, int] = {}
        self._dropped: Dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self._marks: Dict[str, int] = {}
        self._published: Any = 0  # version of the value; 0: nothing
        self._must_publish = True
        self._unsaved_bytes, self._saved_at = 0, time.monotonic()
        self._unsaved_id: Optional[EntryId] = None
        self._changing = threading.Lock()  # held while entries change parameters, the optimizer's state and counts
        self._stopping = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._error: Optional[BaseException] = None
        self._is_closed = False
        self._checkpoints = CheckpointDir(path, keep=2) if path is not None else None
        heads = self._resume() if self._checkpoints is not None else {}
        self._reader = Reader(
            store, stream_of(name), READER, marks=self._marks, heads=heads, on_corrupt='skip', loss_grace_s=5.0
        )
        if not heads:
            self._save()  # A server that dies early continues the history of these versions.

    # The loop

    def serve(self, timeout_s: float = _WAIT_S) -> int:
        """
        Overview:
            Use the entries that came, and publish once if parameters changed. Wait up to ``timeout_s`` for the first.
        Returns:
            - num_updates (:obj:`int`): How many versions this call added.
        Raises:
            - StoreUnavailable: The store's server did not return within ``reconnect_timeout_s``. Call again: nothing
              is lost.
            - StoreError: Another process serves this name by now.
        """
        if self._is_closed:
            raise StoreClosed(f'the parameter server of {self.name!r} was closed')
        if self._must_publish:
            self._publish()
        before = self.version
        entries = self._reader.read(timeout_s=min(timeout_s, self._s_to_deadline()))
        for entry in entries:
            with self._changing:
                self._handle(entry)
            self._unsaved_id = entry.id
        if self._came and self._has_begun and self._s_to_deadline() <= 0:
            with self._changing:
                self._go_on()
        if self._must_publish:
            self._publish()
        self._finish()
        return self.version - before

    def run(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Serve until ``is_done()`` returns True, or until ``close``. Wait for a store that is unreachable."""
        is_away = False
        while not (is_done() or self._stopping.is_set()):
            try:
                self.serve()
                is_away = False
            except StoreUnavailable as e:
                if not is_away:
                    logger.warning('parameter server %r waits for the store: %s', self.name, e)
                is_away = True
                self._stopping.wait(_WAIT_S)

    def start(self) -> ParameterServer:
        """Run in a thread of this process until ``close``. Return this server, for a ``with`` block."""
        self._thread = threading.Thread(target=self._run_thread, name='ding-store-parameters', daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """
        Overview:
            Stop, save a last checkpoint, and end the workers: their next step raises StoreClosed. May be called twice.
        Raises:
            - Exception: The error that ended the thread of ``start``.
        """
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if not self._is_closed:
            self._is_closed = True
            try:
                self._save()
                self._publish(is_over=True)
            except StoreError as e:
                logger.warning('parameter server %r closed without its last message to workers: %s', self.name, e)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def figures(self) -> Dict[str, Any]:
        """
        Overview:
            Counts since this object was made.
        Returns:
            - version (:obj:`int`): Number of updates, of earlier servers too.
            - workers (:obj:`int`): Workers that joined and did not leave. One that was killed counts until a
              synchronous update goes on without it.
            - used, dropped_stale, dropped_late, dropped_foreign (:obj:`int`): Entries that changed parameters; were
              older than ``max_staleness``; came after their update had gone on; or did not fit.
            - stragglers (:obj:`int`): Times that an update went on without a worker.
            - lost, duplicates (:obj:`int`): See ``storage.Reader``.
            - staleness (:obj:`dict`): staleness -> number of used gradients, for 'async'.
        """
        names = ('used', 'dropped_stale', 'dropped_late', 'dropped_foreign', 'stragglers')
        reads = {'lost': self._reader.num_lost, 'duplicates': self._reader.num_duplicates}
        with self._changing:
            counts = {name: self._counts[name] for name in names}
            staleness = dict(sorted(self._staleness.items()))
            return {'version': self.version, 'workers': len(self._members), **counts, **reads, 'staleness': staleness}

    def optimizer_state(self) -> List[Dict[str, Any]]:
        """
        Overview:
            Return a copy of the optimizer's state between two updates, one dict per parameter. Any thread may call
            this. Without an optimizer, the dicts are empty.
        """
        with self._changing:
            return [{} for _ in self._parameters] if self.optimizer is None else state_of(self.optimizer)

    def _run_thread(self) -> None:
        try:
            self.run()
        except StoreClosed:
            pass
        except BaseException as e:  # noqa: BLE001 - ``close`` raises it
            logger.error('parameter server %r ended: %s', self.name, e)
            self._error = e

    # Entries

    def _handle(self, entry: Entry) -> None:
        self._marks[entry.writer] = entry.sequence
        self._unsaved_bytes += sum(array.nbytes for array in entry.arrays.values())
        header = entry.header
        kind, worker, number = header.get('kind'), str(header.get('worker')), int(header.get('number', 0))
        if kind == LEAVE:
            self._members.discard(worker)
            self._forget_gone()
        elif kind == JOIN:
            self._admit(worker)
            self._must_publish = True
        elif kind == UPDATE:
            self._admit(worker)
            self._handled[worker] = number
            self._use(worker, header, entry)
        if self._came and self._has_begun and self._members <= self._came.keys():
            self._update()

    def _admit(self, worker: str) -> None:
        self._members.add(worker)
        if not self._has_begun and len(self._members) >= self.num_workers:
            self._has_begun = True
            # The worker that joined last gets the whole time for its first update.
            self._came = dict.fromkeys(self._came, time.monotonic())

    def _use(self, worker: str, header: Mapping[str, Any], entry: Entry) -> None:
        """Add what an entry brings, or drop it and count why."""
        if header.get('lineage') != self._lineage or header.get('sync') != self.sync:
            self._drop(worker, 'foreign', f'it is of another server, or of mode {header.get("sync")!r}')
            return
        try:
            tensors = to_tensors(entry.arrays, self._parameters, float(header.get('threshold', 0.0)))
        except SchemaMismatch as e:
            self._drop(worker, 'foreign', str(e))
            return
        base = int(header['version'])
        if base > self.version:
            self._catch_up(base)
        self._follow_rates(header.get('rates'))
        staleness = self.version - base
        if self.sync in SYNCHRONOUS:
            if staleness or worker in self._came:
                self._drop(worker, 'late', f'version {base + 1} went on without it')
                return
            self._came[worker] = time.monotonic()
            self._add(tensors)
        elif self.sync == 'async':
            if staleness > header.get('max_staleness', staleness):
                self._drop(worker, 'stale', f'it is {staleness} versions old')
                return
            self._staleness[staleness] += 1
            self._add(tensors)
            self._step(1.0 / (1 + staleness) if self._scale_by else 1.0)
        else:
            with torch.no_grad():
                for parameter, tensor in zip(self._parameters, tensors):
                    if tensor is not None:
                        parameter.add_(tensor.to(parameter.device))
            self._end_update()
        self._counts['used'] += 1

    def _drop(self, worker: str, why: str, reason: str) -> None:
        self._must_publish = True  # The worker waits for an answer.
        self._dropped[worker] = self._dropped.get(worker, 0) + 1
        self._counts[f'dropped_{why}'] += 1
        level = logging.WARNING if self._counts[f'dropped_{why}'] == 1 else logging.DEBUG
        logger.log(level, 'parameter server %r drops an update of worker %s: %s', self.name, worker, reason)

    def _catch_up(self, base: int) -> None:
        """
        Raise the version to one that a worker has seen. The server that published it is dead. It went on without a
        straggler, which no entry shows, or its entries are lost.
        """
        if self._came:
            self._go_on()
        self.version = max(self.version, base)
        self._must_publish = True

    def _follow_rates(self, rates: Optional[List[float]]) -> None:
        """Use the worker's learning rates, so that its schedulers count."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        if rates is not None and len(rates) == len(groups):
            for group, rate in zip(groups, rates):
                if group['lr'] != rate:
                    group['lr'] = rate

    # Updates

    def _add(self, tensors: Tensors) -> None:
        """Add to the sum of the open update. The last ones wait in the memory of their entries."""
        if len(self._held) == _MAX_HELD:
            self._fold()
        self._held.append(tensors)

    def _fold(self, share: float = 1.0) -> None:
        """
        Add what waits in the memory of entries to the sum, and multiply the sum by ``share``. One parameter after the
        other, so that each is in the processor's caches until its sum is done.
        """
        if not self._held and share == 1.0:
            return
        held, self._held = self._held, []
        factor = torch.tensor(share, dtype=torch.float64)
        for place, total in enumerate(self._sum):
            parts = [each for each in (tensors[place] for tensors in held) if each is not None]
            if parts and not self._is_summed[place]:
                self._is_summed[place] = True
                first, *parts = parts
                if parts and first.dtype == parts[0].dtype == total.dtype:
                    torch.add(first, parts.pop(0), out=total)  # This saves the copy of the first one.
                else:
                    total.copy_(first)
            for each in parts:
                total.add_(each)
            if share != 1.0 and self._is_summed[place]:
                total.mul_(factor)

    def _s_to_deadline(self) -> float:
        """Return the seconds until an open update goes on without stragglers."""
        if not self._came or not self._has_begun:
            return _WAIT_S
        return max(0.0, min(self._came.values()) + self.straggler_timeout_s - time.monotonic())

    def _go_on(self) -> None:
        """Make the open update without the workers that are missing."""
        missing = sorted(self._members - self._came.keys())
        if missing:
            self._counts['stragglers'] += len(missing)
            logger.warning(
                'parameter server %r goes on without %s, which sent nothing for version %d within %g s '
                '(straggler_timeout_s). Their next update counts again.',
                *(self.name, ', '.join(missing), self.version + 1, self.straggler_timeout_s),
            )
        self._members -= set(missing)
        self._update()

    def _update(self) -> None:
        """Make a synchronous update from the sum."""
        share = 1.0 / len(self._came)
        self._came = {}
        if self.sync == 'gradients':
            self._step(share)
            return
        self._fold(share)
        load_arrays(self._parameters, to_arrays(self._summed()))
        self._end_update()

    def _step(self, share: float) -> None:
        self._fold(share)
        for parameter, gradient in zip(self._parameters, self._summed()):
            parameter.grad = gradient.to(parameter.device) if gradient is not None else None
        assert self.optimizer is not None
        self.optimizer.step()
        self._end_update()

    def _end_update(self) -> None:
        self._is_summed = [False] * len(self._sum)
        self.version += 1
        self._must_publish = True

    def _summed(self) -> List[Optional[torch.Tensor]]:
        """Return the sums. None: no worker sent this parameter."""
        return [each if is_used else None for each, is_used in zip(self._sum, self._is_summed)]

    def _forget_gone(self) -> None:
        gone = [worker for worker in self._handled if worker not in self._members]
        for worker in gone[: max(0, len(gone) - _MAX_GONE)]:
            del self._handled[worker]
            self._dropped.pop(worker, None)

    # What follows

    def _publish(self, is_over: bool = False) -> None:
        header = {
            **empty_header(self.sync),
            'version': self.version,
            'lineage': self._lineage,
            'server': self._id,
            'handled': self._handled,
            'dropped': self._dropped,
            'is_over': is_over,
        }
        value = value_of(self.name)
        arrays = to_arrays(self._parameters, self._dtype)
        try:
            self._published = self._store.put(value, header, arrays, self._published)
        except VersionConflict as e:
            found = self._store.get(value)
            if found is not None and self._published and found.header.get('server') != self._id:
                raise StoreError(f'another parameter server serves {self.name!r} by now. End one of them.') from e
            # The first publication of this server, or a store that lost its memory.
            self._published = self._store.put(value, header, arrays)
        self._must_publish = False

    def _finish(self) -> None:
        """Ack what was used, or write a checkpoint if one is due."""
        if self._unsaved_id is None:
            return
        is_due = time.monotonic() - self._saved_at >= self._checkpoint_s
        is_large = self._unsaved_bytes >= self._max_unsaved_bytes
        if self._checkpoints is not None:
            if is_due or is_large:
                self._save()
        elif is_large or not self._came:
            self._fold()
            self._reader.ack(self._unsaved_id, wait=False)
            self._unsaved_bytes, self._unsaved_id = 0, None

    def _save(self) -> None:
        """Write a checkpoint, then ack the entries in it. An update that is still open is in no checkpoint."""
        if self._checkpoints is None or self._came:
            return
        writers = self._reader.marks  # It drops writers that left for good.
        self._marks = {writer: mark for writer, mark in self._marks.items() if writer in writers}
        self._checkpoints.save(
            self.version,
            {
                'parameters': [each.detach().cpu() for each in self._parameters],
                'optimizer': self.optimizer.state_dict() if self.optimizer is not None else None,
                'version': self.version,
                'lineage': self._lineage,
                'sync': self.sync,
                'has_begun': self._has_begun,
                'members': sorted(self._members),
                'handled': self._handled,
                'dropped': self._dropped,
                'marks': self._marks,
                'heads': self._reader.heads(self._marks),
            },
        )
        if self._unsaved_id is not None:
            self._reader.ack(self._unsaved_id)
        self._unsaved_bytes, self._saved_at, self._unsaved_id = 0, time.monotonic(), None

    def _resume(self) -> Dict[str, Any]:
        """Load the newest checkpoint, and return the reader's heads in it."""
        assert self._checkpoints is not None
        self._checkpoints.claim()
        self._checkpoints.begin()
        found = self._checkpoints.newest()
        if found is None:
            return {}
        path, state = found
        if state['sync'] != self.sync:
            raise ConfigError(f'sync ({self.sync!r}): {path!r} is of mode {state["sync"]!r}. Name another path.')
        load_arrays(self._parameters, to_arrays(state['parameters']))
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state['optimizer'])
        self.version, self._lineage, self._has_begun = state['version'], state['lineage'], state['has_begun']
        self._members = set(state['members'])
        self._handled, self._dropped, self._marks = state['handled'], state['dropped'], state['marks']
        logger.info('parameter server %r continues from version %d in %s', self.name, self.version, path)
        heads: Dict[str, Any] = state['heads']
        return heads


def _parameters_of(
    model: Union[torch.nn.Module, Sequence[torch.Tensor]], optimizer: Optional[torch.optim.Optimizer]
) -> List[torch.Tensor]:
    """Return the optimizer's parameters, in its order. Without an optimizer, return the model's."""
    own: List[torch.Tensor] = list(model.parameters()) if isinstance(model, torch.nn.Module) else list(model)
    if optimizer is None:
        return own
    stepped = [each for group in optimizer.param_groups for each in group['params']]
    if not {id(each) for each in stepped} <= {id(each) for each in own}:
        raise ConfigError('the optimizer of a parameter server has parameters that its model lacks')
    return stepped
