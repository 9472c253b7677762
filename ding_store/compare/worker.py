"""An object in another process, called from here, so that a measurement has its own memory and core."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
from typing import Any, Optional, Tuple

#: Environment of one thread per process: the machine's other cores are for other processes.
ONE_THREAD = {name: '1' for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'NUMBA_NUM_THREADS')}
DEADLINE_S = 600.0


class WorkerFailed(RuntimeError):
    """A call raised in the other process, or that process ended."""


class Worker:
    """
    Overview:
        An object in a process forked from a server that has only imported DI-engine: ``make`` ('module:class') called
        with the arguments. The start then takes no seconds, and the process shares no memory with this one.
    Raises (call, get):
        - WorkerFailed: The call failed. The text has the other process's traceback.
    """

    def __init__(self, make: str, *arguments: Any) -> None:
        os.environ.update(ONE_THREAD)  # before the other process imports numerical libraries
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(['ding_store.compare.preload'])
        self._pipe, theirs = context.Pipe()
        self._is_busy = False
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, name: str, *arguments: Any) -> Any:
        return self._ask(name, arguments)

    def get(self, name: str) -> Any:
        return self._ask(name, None)

    def _ask(self, name: str, arguments: Optional[Tuple[Any, ...]]) -> Any:
        self._is_busy = True
        self._pipe.send((name, arguments))
        answer = self._answer()
        self._is_busy = False
        return answer

    def _answer(self) -> Any:
        if not self._pipe.poll(DEADLINE_S):
            raise WorkerFailed(f'no answer within {DEADLINE_S:.0f} s')
        try:
            is_good, result = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            code = self._process.exitcode
            raise WorkerFailed(f'its process ended with {code} (-9: perhaps out of memory)') from None
        if not is_good:
            raise WorkerFailed(result)
        return result

    def close(self) -> None:
        self._pipe.close()
        # An idle process ends by itself. A busy one is killed, because its result is not needed any more.
        self._process.join(0 if self._is_busy else 5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


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
