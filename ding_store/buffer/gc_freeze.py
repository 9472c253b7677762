"""
What there is of Python's objects when a learner first has trained, left out of garbage collections from then on.

Hundreds of thousands, nearly all of imported modules, which stay. Where no replay is of objects they are most of what
there is, and what a policy makes in an iteration soon enough to look at all of them again: with QMIX that took a tenth
of the time.
"""

from __future__ import annotations

import gc
import os

_frozen_in = 0  # the process


def leave_out_of_collections() -> None:
    """What there is now: ``gc.freeze``."""
    global _frozen_in
    if not gc.get_freeze_count():  # Else who forked this process did it, of whose objects none may be collected.
        gc.freeze()
        _frozen_in = os.getpid()


def take_back_into_collections() -> None:
    """Of a run before this one, in the same process: its replay is freed with it, also where a cycle holds that."""
    global _frozen_in
    if _frozen_in == os.getpid():
        gc.unfreeze()
        _frozen_in = 0
