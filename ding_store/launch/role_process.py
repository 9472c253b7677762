"""Roles of a job, and how to start one in a new interpreter: a launcher with threads must not fork."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import List, Optional

from ding_store import private_files
from ding_store.environment import set_rank
from ding_store.launch.log_lines import log_as
from ding_store.launch.user_script import UserScript, exit_process, quiet_imports
from ding_store.launch.warn_once import warn_once
from ding_store.parent_death import end_with


@dataclass
class Role:
    """
    Overview:
        Data that a role's process needs.
    Arguments:
        - script (:obj:`UserScript`): Script to run.
        - node_id (:obj:`int`), address (:obj:`str`): The process's own in DI-engine's router.
        - peers (:obj:`List[str]`): Addresses to dial.
        - num_workers (:obj:`int`): Number of processes of the job.
        - launcher (:obj:`int`): Pid of the process whose end ends this one.
        - has_gpu (:obj:`bool`): True if the process may use the machine's GPUs.
        - title (:obj:`str`): Name of the process in logs, such as ``collector-2``.
        - warnings (:obj:`str`): File of the warnings that the processes of the run have printed.
        - rank (:obj:`Optional[int]`), num_learners (:obj:`int`): Number of this learner or worker from 0 on, and of all
            of them. None: there is one learner, or the process is no learner.
        - group (:obj:`str`): Name that the learners have which start together.
        - is_worker (:obj:`bool`): True: the script runs its whole pipeline here, as in one process.
        - is_debugged (:obj:`bool`): True if the process uses the launcher's terminal. An error opens pdb there.
    """

    script: UserScript
    node_id: int
    address: str
    peers: List[str]
    num_workers: int
    launcher: int
    delay_s: float = 0.0
    has_gpu: bool = True
    title: str = ''
    warnings: str = ''
    is_debugged: bool = False
    rank: Optional[int] = None
    num_learners: int = 1
    group: str = ''
    is_worker: bool = False

    def enter(self) -> None:
        """Make this process end with its launcher, even if the launcher is killed."""
        # Every process of a terminal receives its Ctrl-C and SIGHUP. The launcher ends the run for all, in order.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with(self.launcher)

    def run(self) -> int:
        """Run the script until it ends, and return its exit code."""
        from ding_store.hook import install
        from ding_store.launch.router import activate, deactivate

        log_as(self.title)
        warn_once(self.warnings)
        if self.delay_s:
            time.sleep(self.delay_s)
        if not self.has_gpu:
            # CUDA reads this at its first use, which has not been yet. Policies are then on the CPU, whatever their
            # config's cuda says, because they check whether torch has a GPU.
            os.environ['CUDA_VISIBLE_DEVICES'] = ''
        with quiet_imports():
            install()
            if self.rank is not None:
                from ding_store.middleware import learner_ranks, worker_rank

                set_rank(self.rank)
                if self.is_worker:
                    worker_rank.start(self.rank, self.num_learners)
                else:
                    learner_ranks.start(self.rank, self.num_learners, self.group)
        if not self.is_worker:
            activate(self.node_id, self.address, self.peers, self.num_workers)
        code = self.script.run(self.is_debugged)
        deactivate()
        return code

    def spawn(self, log: Path) -> int:
        """Start a new interpreter with this role and append its output to ``log``. Return its pid."""
        command = [sys.executable, '-u', '-m', 'ding_store.launch.role_process', json.dumps(asdict(self))]
        with open(log, 'ab', opener=private_files.opener) as out:
            # The new process must import the code that its launcher runs, from the same place.
            path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get('PYTHONPATH')]))
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, 'PYTHONPATH': path}
            )
        child.returncode = 0  # the launcher reaps it by its pid: subprocess must not wait for it
        return child.pid


def main() -> None:
    fields = json.loads(sys.argv[1])
    role = Role(**{**fields, 'script': UserScript(**fields['script'])})
    role.enter()
    exit_process(role.run())


if __name__ == '__main__':
    main()
