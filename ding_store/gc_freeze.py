"""
Exclusion of long-lived Python objects from garbage collection. Only this module calls ``gc.freeze``.

Imported modules hold hundreds of thousands of objects, which stay. If the replay has columns, they are most of the
process's objects. The garbage of one training iteration already triggers a scan of all of them. With QMIX these scans
took a tenth of the time.
"""

from __future__ import annotations

import gc
import os

_frozen_in = 0  # The process in which ``leave_out_of_collections`` froze its objects.


def leave_out_of_collections() -> None:
    """Exclude all objects that exist now, once a learner has trained."""
    global _frozen_in
    if not gc.get_freeze_count():  # Otherwise the parent process froze its objects, which must stay frozen.
        gc.freeze()
        _frozen_in = os.getpid()


def take_back_into_collections() -> None:
    """Include the objects again, so that the replay of an earlier run in this process is freed, even in a cycle."""
    global _frozen_in
    if _frozen_in == os.getpid():
        gc.unfreeze()
        _frozen_in = 0


def leave_out_for_good() -> None:
    """Exclude all objects that exist now, in this process and in its children. Around a fork, pages stay shared."""
    gc.freeze()
