"""
Calls before DI-engine's task stops in this process. Only this module replaces ``task.stop``.

DI-engine has no event for it: ``with task.start()`` calls ``task.stop``, which makes all processes of the mesh finish,
even if an exception ends this one. A run that failed must not count as one that ended in order.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict

from ding.framework import task


def is_failing() -> bool:
    """Return True if an exception ends the task, other than ``SystemExit`` with code 0. For ``before_stop``."""
    error = sys.exc_info()[1]
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def failure() -> str:
    """Return the exception that ends the task as one short line, for this member's last report."""
    error = sys.exc_info()[1]
    lines = str(error).splitlines() or ['']
    return f'{type(error).__name__}: {lines[0][:300]}'.rstrip(': ')


def spare_mesh_at_failure() -> None:
    """
    Overview:
        Let a process that fails or is interrupted stop without the other processes of the mesh. They wait for it as for
        a killed process. ``before_stop`` does the same.
    """
    _stop_of_task()


def spare_mesh() -> None:
    """Let this process stop without the other processes of the mesh, although it does not fail."""
    _stop_of_task().spares_mesh = True


def before_stop(part: Any, call: Callable[[], None], ends_mesh: Callable[[], bool] = lambda: False) -> None:
    """
    Overview:
        Call ``call`` once when the task stops, before DI-engine's own stop. The last one registered is called first.
    Arguments:
        - part: The part of the pipeline that registers. This replaces an earlier call of an equal part.
        - ends_mesh (:obj:`Callable`): Returns True if the other processes of the mesh finish although this one fails.
    """
    _stop_of_task().add(part, call, ends_mesh)


class _Stop:
    """The value of ``task.stop`` until it is called once."""

    spares_mesh = False

    def __init__(self) -> None:
        self._calls: Dict[Any, Callable[[], None]] = {}
        self._end_mesh: Dict[Any, Callable[[], bool]] = {}

    def add(self, part: Any, call: Callable[[], None], ends_mesh: Callable[[], bool]) -> None:
        self._calls.pop(part, None)  # so that it is the last one again
        self._calls[part], self._end_mesh[part] = call, ends_mesh

    def __call__(self) -> None:
        del task.stop  # from here on it is the class's method again
        # Before the calls: they leave the run, and what ``ends_mesh`` returns depends on the run.
        ends_mesh = not is_failing() or any(ends() for ends in self._end_mesh.values())
        ends_mesh = ends_mesh and not self.spares_mesh
        router, was_active = task.router, task.router.is_active
        try:
            for call in reversed(list(self._calls.values())):
                call()
        except BaseException:
            ends_mesh = False
            raise
        finally:
            router.is_active = was_active and ends_mesh
            try:
                task.stop()
            finally:
                router.is_active = was_active


def _stop_of_task() -> _Stop:
    stop = vars(task).get('stop')
    if not isinstance(stop, _Stop):
        stop = task.stop = _Stop()
    return stop
