"""One role in pdb: ``ding-store run --debug ROLE``, and what it does at an error."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import pytest
from jobs import DEADLINE_S, TINY, environment
from zygote import zygote

pytest.importorskip('ding')


class Terminal:
    """A command in a terminal of its own, and a person at it."""

    def __init__(self, arguments, cwd):
        self._fd, inner = os.openpty()
        self.text = ''
        self.process = zygote().start(arguments, cwd, environment(TERM='dumb'), inner, has_terminal=True)
        os.close(inner)

    def type(self, line):
        self.text = ''
        os.write(self._fd, f'{line}\n'.encode())

    def read_until(self, what):
        """Read until ``what`` is on the screen, or to the end if it is None."""
        deadline = time.monotonic() + DEADLINE_S
        while what is None or what not in self.text:
            assert select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0], self.text
            try:
                self.text += os.read(self._fd, 1 << 16).decode(errors='replace')
            except OSError:  # every process has closed it
                assert what is None, self.text
                break

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        os.close(self._fd)


def test_role_under_debug_stops_in_pdb_and_goes_on(tmp_path):
    script = tmp_path / 'main.py'
    script.write_text(
        'import runpy\n'
        'from ding.framework import task\n'
        'node = task.router.node_id\n'
        'if node == 0:\n'
        '    breakpoint()\n'
        f'runpy.run_path({TINY!r}, run_name="__main__")\n'
    )
    roles = ['run', '--run', 'r', '--roles', 'learner=1,collector=1', '--debug', 'learner']
    options = ['--trace', tmp_path / 'trace', '--max-train-iter', 20]
    terminal = Terminal([*roles, '--', 'python', script, *options], tmp_path)
    try:
        terminal.read_until('(Pdb) ')
        terminal.type('p f"this is node {node + 0}"')
        terminal.read_until("'this is node 0'")
        terminal.type('c')
        terminal.read_until(None)
        assert terminal.process.wait(DEADLINE_S) == 0, terminal.text
    finally:
        terminal.end()
    assert 'finished:' in terminal.text
    logs = tmp_path / '.ding_store' / 'r' / 'logs'
    assert [path.name for path in logs.glob('*.log')] == ['collector-2.log']


@pytest.mark.parametrize(('debug', 'seen'), [(True, "'the value is 3'"), (False, '')])
def test_error_opens_pdb_only_under_debug(tmp_path, debug, seen):
    script = tmp_path / 'main.py'
    script.write_text('def f(value):\n    raise ValueError\n\n\nf(3)\n')
    code = (
        f'import sys; from ding_store.launch.user_script import UserScript as S; sys.exit(S({str(script)!r}, False, [])'
    )
    done = subprocess.run(
        [sys.executable, '-c', f'{code}.run({debug}))'],
        input='p f"the value is {value}"\nq\n',
        capture_output=True,
        text=True,
        env=environment(),
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1, done.stderr
    assert 'ValueError' in done.stderr
    assert seen in done.stdout
    assert ('(Pdb)' in done.stdout) == debug
