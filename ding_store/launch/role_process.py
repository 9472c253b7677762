"""One role of a job in a process that was not forked from its launcher: which has threads by then, and may not fork."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import List

from ding_store import private_files
from ding_store.launch.user_script import UserScript, exit_process
from ding_store.parent_death import end_with


@dataclass
class Role:
    """
    Overview:
        What a role's process has to know.
    Arguments:
        - script (:obj:`UserScript`): What it runs.
        - node_id (:obj:`int`), address (:obj:`str`): Its own, in DI-engine's router.
        - peers (:obj:`List[str]`): Addresses to dial.
        - num_workers (:obj:`int`): Of the job.
        - launcher (:obj:`int`): The pid that it does not outlive.
        - has_gpu (:obj:`bool`): Whether it may use the machine's GPUs.
    """

    script: UserScript
    node_id: int
    address: str
    peers: List[str]
    num_workers: int
    launcher: int
    delay_s: float = 0.0
    has_gpu: bool = True

    def enter(self) -> None:
        """Make this process one that its launcher ends: nobody else would, if that is killed."""
        # Ctrl-C, or its closing, reaches every process of the terminal. The launcher ends the run for all, in order.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with(self.launcher)

    def run(self) -> int:
        """Run the script to its end; returns its exit code."""
        from ding_store.hook import install
        from ding_store.launch.router import activate, deactivate

        if self.delay_s:
            time.sleep(self.delay_s)
        if not self.has_gpu:
            # Read when CUDA is first asked for, which nobody did yet. Policies then are on the CPU, whatever their
            # config's cuda says: they ask torch whether there is a GPU.
            os.environ['CUDA_VISIBLE_DEVICES'] = ''
        install()
        activate(self.node_id, self.address, self.peers, self.num_workers)
        code = self.script.run()
        deactivate()
        return code

    def spawn(self, log: Path) -> int:
        """Start a new interpreter with this role, its output at the end of ``log``; returns its pid."""
        command = [sys.executable, '-u', '-m', 'ding_store.launch.role_process', json.dumps(asdict(self))]
        with open(log, 'ab', opener=private_files.opener) as out:
            # It shall have the code that its launcher has, wherever that comes from.
            path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get('PYTHONPATH')]))
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, 'PYTHONPATH': path}
            )
        child.returncode = 0  # the launcher reaps it, by its pid: not for subprocess to wait for
        return child.pid


def main() -> None:
    fields = json.loads(sys.argv[1])
    role = Role(**{**fields, 'script': UserScript(**fields['script'])})
    role.enter()
    exit_process(role.run())


if __name__ == '__main__':
    main()
