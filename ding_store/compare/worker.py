"""An object in another process, called from here, so that a measurement has its own memory and core."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from multiprocessing import connection
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Tuple

#: Environment of one thread per process: the machine's other cores are for other processes.
ONE_THREAD = {name: '1' for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'NUMBA_NUM_THREADS')}
#: Characters of a failed process's traceback or log that are kept.
LOG_LENGTH = 3000


class Effort(NamedTuple):
    """Number of windows per figure, seconds of a window, and seconds after which a process without an answer hangs."""

    repeats: int
    seconds: float
    timeout_s: float


class WorkerFailed(RuntimeError):
    """
    A process of a measurement crashed, raised or hangs. The text is one short line. ``log`` is what it printed last.
    """

    def __init__(self, reason: str, log: str = '') -> None:
        super().__init__(reason)
        self.log = log[-LOG_LENGTH:]

    @property
    def record(self) -> Dict[str, str]:
        """The failure as a record of the results, in place of figures."""
        return {'failed': str(self), 'log': self.log}


def crashed(code: Optional[int]) -> str:
    """Return how a process ended by itself, from its exit code as Python gives it."""
    return f'crashed (signal {-code})' if code is not None and code < 0 else f'crashed (exit {code})'


def hung(timeout_s: float) -> str:
    return f'hung: no end within {timeout_s:g} s'


class Worker:
    """
    Overview:
        An object in a process forked from a server that has only imported DI-engine: ``make`` ('module:class') called
        with the arguments. The start then takes no seconds, and the process shares no memory with this one.
    Raises (call, get):
        - WorkerFailed: The call raised, the process ended, or it did not answer within ``timeout_s``.
    """

    def __init__(self, make: str, *arguments: Any, timeout_s: float) -> None:
        os.environ.update(ONE_THREAD)  # before the other process imports numerical libraries
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(['ding_store.compare.preload'])
        self._pipe, theirs = context.Pipe()
        self._timeout_s = timeout_s
        self._is_busy = False
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, name: str, *arguments: Any) -> Any:
        return self._ask(name, arguments)

    def get(self, name: str) -> Any:
        return self._ask(name, None)

    def _ask(self, name: str, arguments: Optional[Tuple[Any, ...]]) -> Any:
        self._begin(name, arguments)
        if not self._pipe.poll(self._timeout_s):
            raise WorkerFailed(hung(self._timeout_s))
        return self._answer()

    def _begin(self, name: str, arguments: Optional[Tuple[Any, ...]]) -> None:
        self._is_busy = True
        try:
            self._pipe.send((name, arguments))
        except BrokenPipeError:
            self._raise_ended()

    def _answer(self) -> Any:
        try:
            is_good, result = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._raise_ended()
        self._is_busy = False
        if not is_good:
            raise WorkerFailed(f'failed: {result.strip().splitlines()[-1][:200]}', result)
        return result

    def _raise_ended(self) -> NoReturn:
        self._process.join(5)
        raise WorkerFailed(crashed(self._process.exitcode)) from None

    def close(self) -> None:
        self._pipe.close()
        # An idle process ends by itself. A busy one is killed, because its result is not needed any more.
        self._process.join(0 if self._is_busy else 5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def first_answer(workers: List[Worker], name: str, timeout_s: float) -> Any:
    """
    Overview:
        Call a method in all processes at once, and return the answer of the first process. The others never answer.
    Raises:
        - WorkerFailed: One of the processes failed, or the first did not answer in time.
    """
    for worker in workers:
        worker._begin(name, ())
    by_pipe = {worker._pipe: worker for worker in workers}
    deadline = time.monotonic() + timeout_s
    while True:
        ready = connection.wait(list(by_pipe), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerFailed(hung(timeout_s))
        for pipe in ready:
            answer = by_pipe[pipe]._answer()  # type: ignore[index]
            if by_pipe[pipe] is workers[0]:  # type: ignore[index]
                return answer


def _serve(pipe: Any, make: str, arguments: Tuple[Any, ...]) -> None:
    module, _, name = make.partition(':')
    try:
        made = getattr(importlib.import_module(module), name)(*arguments)
        while True:
            name, arguments = pipe.recv()
            found = getattr(made, name)
            pipe.send((True, found if arguments is None else found(*arguments)))
    except EOFError:
        os._exit(0)  # do not free millions of objects one by one
    except BaseException:  # noqa: BLE001 - the caller's process reports it
        pipe.send((False, traceback.format_exc()))
        os._exit(1)
