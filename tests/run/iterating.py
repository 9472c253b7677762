"""A process that iterates, one line of stdin each, and writes a last checkpoint when it is told to end."""

import os
import select
import signal
import sys
import threading
import time

from ding_store.run import last_checkpoint as module
from ding_store.run.last_checkpoint import LastCheckpoint, saving, wait_until_saved


def say(text):
    sys.stdout.write(f'{text}\n')
    sys.stdout.flush()


def wait_for_a_line():
    """In slices: who is told just before it waits hears of it afterwards."""
    line = b''
    while not line.endswith(b'\n'):
        if select.select([0], [], [], 0.1)[0]:
            line += os.read(0, 1) or b'\n'
    return line.decode().strip()


def fork():
    waits, says = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(says, b'.')
        wait_for_a_line()
    os.read(waits, 1)
    os.kill(child, signal.SIGTERM)
    say(f'the child ended with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}')


def lose_parent():
    def leave():
        wait_until_saved()
        say('killed')
        os._exit(0)

    threading.Thread(target=leave).start()
    while not last_save.must_exit:
        time.sleep(0.01)  # the other thread is about to say so, and tells nobody when it has


CALLS = {'fork': fork, 'lose parent': lose_parent}


def iterate():
    last_save.expect()
    while True:
        say('iterating')
        CALLS.get(wait_for_a_line(), str)()
        if last_save.must_exit:
            with saving():
                say('saved')
            last_save.done()


if __name__ == '__main__':
    if sys.argv[1:]:
        module.ARRIVE_S, module.SAME_S = map(float, sys.argv[1:])
    last_save = LastCheckpoint()
    try:
        iterate()
    except KeyboardInterrupt:
        say('interrupted')
    last_save.done()  # of the run's end: nothing comes of it a second time
    say('ended')
