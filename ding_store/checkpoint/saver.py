"""Writes checkpoints in the background: one thread completes the snapshot and then writes it."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Callable, Optional, Sequence

import torch

from ding_store.checkpoint.snapshot import Snapshot
from ding_store.errors import StoreTimeout

logger = logging.getLogger(__name__)


class Saver:
    """
    Overview:
        Saves one state after the other. Optimizer steps wait until the parameters that they change are copied.
    Arguments:
        - optimizers (:obj:`Sequence`): All optimizers whose parameters are in the states.
    Attributes:
        - copying_s, waiting_s (:obj:`float`): Duration of the last ``save``, and time that optimizer
          steps waited. Their sum is the stall.
        - num_failed (:obj:`int`): Checkpoints that could not be written.
        - num_steps (:obj:`int`): Optimizer steps begun, of all optimizers.
        - is_saved (:obj:`bool`): True if the last checkpoint was written, once ``is_busy`` is False.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._snapshot = Snapshot()
        self._write: Optional[Callable[[Any], None]] = None
        self._news = threading.Condition()
        self._copied = threading.Event()
        self._copied.set()
        self._thread: Optional[threading.Thread] = None
        self._trusts_hooks = True
        self._warned_failed = False
        self.copying_s = self.waiting_s = 0.0
        self.num_failed = self.num_steps = 0
        self.is_saved = False
        self.watch(optimizers)

    @property
    def is_busy(self) -> bool:
        return self._write is not None

    def watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Make the steps of these optimizers wait as well."""
        for each in optimizers:
            if not any(each is known for known in self._snapshot.optimizers):
                each.register_step_pre_hook(self._before_step)
                self._snapshot.optimizers.append(each)

    def save(self, state: Any, write: Callable[[Any], None]) -> bool:
        """
        Overview:
            Take a snapshot and run ``write(snapshot)`` in the background. Training may go on when this returns. Return
            False if there will be no checkpoint. Either the one before is not written yet, or the state could not be
            copied, which counts as a failure.
        """
        if self.is_busy:
            return False
        begin = time.perf_counter()
        self.is_saved = False
        try:
            self._snapshot.begin(state, at_once=not self._trusts_hooks)
        except Exception as e:  # noqa: BLE001 - no memory for the copy, or an object that cannot be copied
            self._fail(e)
            return False
        finally:
            self.copying_s, self.waiting_s = time.perf_counter() - begin, 0.0
        self._copied.clear()
        with self._news:
            self._write = write
            self._news.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name='ding_store-checkpoint', daemon=True)
            self._thread.start()
        return True

    def drain(self, timeout_s: float = 600.0) -> None:
        """
        Overview:
            Wait until everything is on the disk.
        Raises:
            - StoreTimeout: It was not within ``timeout_s``.
        """
        with self._news:
            if not self._news.wait_for(lambda: self._write is None, timeout_s):
                raise StoreTimeout(f'the checkpoint that is being written was not finished within {timeout_s:.0f} s')

    def close(self) -> None:
        """End the thread, which holds the copies, unless it still writes. The next ``save`` starts another thread."""
        with self._news:
            if self._write is None:
                self._thread = None
                self._news.notify_all()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.num_steps += 1
        if not self._copied.is_set():
            begin = time.perf_counter()
            self._copied.wait()
            self.waiting_s += time.perf_counter() - begin

    def _run(self) -> None:
        own = threading.current_thread()
        while True:
            with self._news:
                self._news.wait_for(lambda: self._write is not None or self._thread is not own)
                write = self._write
                if write is None or self._thread is not own:
                    return
            try:
                self._save(write)
                self._warned_failed = False
            except Exception as e:  # noqa: BLE001
                self._fail(e)
            finally:
                self._copied.set()
                with self._news:
                    self._write = None
                    self._news.notify_all()

    def _fail(self, error: Exception) -> None:
        """Log the failure. Training goes on without this checkpoint, and the next may succeed."""
        self.num_failed += 1
        level = logging.DEBUG if self._warned_failed else logging.ERROR
        logger.log(level, 'a checkpoint could not be written, earlier ones are unchanged: %s', error)
        self._warned_failed = True

    def _save(self, write: Callable[[Any], None]) -> None:
        whole = self._snapshot.complete()
        self._copied.set()
        if whole:
            write(self._snapshot.state)
            self.is_saved = True
            return
        self._trusts_hooks = False
        logger.warning(
            'parameters were changed outside of an optimizer step during a checkpoint. It is dropped. From now on '
            'checkpoints copy everything before training goes on.'
        )
