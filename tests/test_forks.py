"""The tests' own processes: they fork while garbage of other tests waits for its collector."""

import gc
import os

import pynng


class Owner:
    """Only the collector of garbage finds it, as it refers to itself."""

    def __init__(self) -> None:
        self.self, self.socket = self, pynng.Push0()


def test_forked_children_leave_their_parents_garbage_alone() -> None:
    gc.disable()
    try:
        Owner()
        pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(0)
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
