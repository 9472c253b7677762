"""A redis-server on TCP for one measurement."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
from typing import Iterator

from ding_store.parent_death import end_with
from ding_store.storage import open_store
from ding_store.storage.embedded.binary import find_server


@contextlib.contextmanager
def tcp_server() -> Iterator[int]:
    """
    Run a server on a free port of the loopback for as long as the block runs, without persistence. Yield the port.
    """
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    words = [str(find_server()), '--bind', '127.0.0.1', '--port', str(port), '--save', '', '--appendonly', 'no']
    end_with_us = functools.partial(end_with, os.getpid(), signal.SIGKILL)
    server = subprocess.Popen([*words, '--daemonize', 'no'], stdout=subprocess.DEVNULL, preexec_fn=end_with_us)
    try:
        open_store(f'redis://127.0.0.1:{port}', 'bench', host_plane='off').close()  # the server answers
        yield port
    finally:
        server.kill()
        server.wait()
