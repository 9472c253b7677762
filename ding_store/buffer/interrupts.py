"""
Changes that stay complete if an exception, such as that of Ctrl-C, interrupts them.

CPython checks for signals after calls, in loops, and at the start of functions (from Python 3.10 on). It never does
so between two assignments without a call. Therefore each change has one of these forms:

* assignments after the last call
* repeatable steps, passed to ``finish``
* data that can be computed from other data, and is computed anew after an exception
"""

from __future__ import annotations

from typing import Callable, Optional

from ding_store.errors import StoreError

#: A step that raises so often fails for another reason than signals.
_NUM_TRIES = 4


def finish(step: Callable[[], object]) -> None:
    """
    Overview:
        Run a step to its end. If an exception interrupts it, run it again, and raise the exception afterwards.
    Arguments:
        - step (:obj:`Callable`): Must be repeatable, wherever it was interrupted. If it raises a StoreError, the error
          is raised at once.
    """
    first: Optional[BaseException] = None
    for _ in range(_NUM_TRIES):
        try:
            step()
            break
        except StoreError:
            raise
        except BaseException as e:  # noqa: BLE001 - it is raised below
            first = first or e
    if first is not None:
        raise first
