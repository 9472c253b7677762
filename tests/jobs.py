"""Jobs as users start them: the real command, real processes, and a deadline on each."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from zygote import zygote

ROOT = Path(__file__).resolve().parent.parent
PIPELINES = ROOT / 'tests' / 'pipelines'
TINY = str(PIPELINES / 'tiny_dqn.py')
ROLES = 'learner=1,evaluator=1,collector=2'
DEADLINE_S = 240.0
DING_STORE = [sys.executable, '-m', 'ding_store.cli']


def environment(**extra):
    return {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'ignore', 'OMP_NUM_THREADS': '1', **extra}


def ding_store(*arguments):
    return [*DING_STORE, *map(str, arguments)]


def benchmark(*arguments):
    return [sys.executable, '-m', 'benchmarks', *map(str, arguments)]


def start(command, cwd, env, out):
    """Our own commands are forked from a process that has imported DI-engine: seconds less for each."""
    if command[:3] == ['ip', 'netns', 'exec'] and command[4 : 4 + len(DING_STORE)] == DING_STORE:
        arguments = [command[3], *command[4 + len(DING_STORE) :]]
        return zygote().call('netns', 'ding_store_at', arguments, cwd, env, out.fileno())
    if command[: len(DING_STORE)] == DING_STORE:
        return zygote().start(command[len(DING_STORE) :], cwd, env, out.fileno())
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=out, start_new_session=True)


class Job:
    """A command in its own process group, its output in a file that tests can wait on."""

    def __init__(self, command, cwd, name='job', **extra):
        self.out = Path(cwd) / f'{name}.out'
        with open(self.out, 'wb') as out:
            self.process = start(command, cwd, environment(**extra), out)

    @property
    def text(self):
        return self.out.read_text(errors='replace')

    def wait(self, timeout_s=DEADLINE_S):
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f'still running after {timeout_s} s; it said:\n{self.text[-4000:]}') from None

    def wait_for(self, condition, what, timeout_s=DEADLINE_S):
        """Until ``condition()`` gives something true, which is returned; the job must not end before."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None  # before we look: what it did last counts, too
            result = condition()
            if result:
                return result
            assert not has_ended, f'ended before {what}:\n{self.text[-4000:]}'
            time.sleep(0.05)  # a file is looked at: nobody tells us when it grows
        raise AssertionError(f'no {what} within {timeout_s} s:\n{self.text[-4000:]}')

    def kill_group(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def job(command, cwd, **kwargs):
    started = Job(command, cwd, **kwargs)
    try:
        yield started
    finally:
        started.kill_group()


def records(path):
    """The lines of a trace, so far; the last one may be half written."""
    lines = Path(path).read_text().splitlines(keepends=True) if Path(path).exists() else []
    return [json.loads(line) for line in lines if line.endswith('\n')]


def table(text):
    """The end table of a run: row name -> number."""
    rows = re.findall(r'^(\S.*?\S)\s{2,}(-?[\d.]+)\s*$', text, re.M)
    return {name: float(value) for name, value in rows}


def status(cwd, run='r', store=None):
    """A run's status, as ``ding-store status --json`` prints it after a second, in which it measures rates."""
    from ding_store.config import StoreConfig
    from ding_store.launch.status import check_running, read_status
    from ding_store.run.session import RunSession
    from ding_store.storage.urls import embedded_url

    config = StoreConfig(enable=True, url=store or embedded_url(f'{cwd}/.ding_store'), run=run)
    check_running(config)
    with RunSession(config).store as opened:
        return read_status(opened, 0.0)
