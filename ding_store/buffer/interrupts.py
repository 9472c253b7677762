"""
Changes that stay whole when an exception, such as Ctrl-C's, comes in the middle of them.

CPython looks for signals behind each call, in loops, and where functions begin (from Python 3.10 on): nowhere between
two assignments without a call. So a change is one of these:

* assignments behind the last call;
* steps that may be repeated, given to ``finish``;
* what follows from something else, and is made anew from it when an exception comes.
"""

from __future__ import annotations

from typing import Callable, Optional

from ding_store.errors import StoreError

#: A step that raises so often raises for another reason than signals.
_NUM_TRIES = 4


def finish(step: Callable[[], object]) -> None:
    """
    Overview:
        Run a step to its end. When an exception interrupts the step, it is run again, and the exception comes after it.
    Arguments:
        - step (:obj:`Callable`): May be run again, wherever it was interrupted. A StoreError of its own is raised at
          once.
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
