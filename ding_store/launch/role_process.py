"""Roles of a job, and how to start one in a new interpreter: a launcher with threads must not fork."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, List, Mapping, Optional

from ding_store import private_files
from ding_store.environment import set_rank
from ding_store.launch.deferred_imports import defer_dynamo, deferred_imports
from ding_store.launch.log_lines import log_as
from ding_store.launch.user_script import UserScript, exit_process, quiet_imports
from ding_store.launch.warn_once import warn_once
from ding_store.parent_death import end_with

#: The driver's directory, with an entry for each NVIDIA GPU.
_GPUS = '/proc/driver/nvidia/gpus'


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
            of them. None: there is one learner, or the process is none.
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
    is_worker: bool = False

    def enter(self) -> None:
        """Make this process end with its launcher, even if the launcher is killed."""
        # Every process of a terminal receives its Ctrl-C and SIGHUP. The launcher ends the run for all, in order.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A learner or worker 0 may have a last checkpoint to write. All others have nothing to keep.
        may_save = self.title.startswith('learner') or (self.is_worker and not self.rank)
        end_with(self.launcher, signal.SIGTERM if may_save else signal.SIGKILL)

    def run(self) -> int:
        """Run the script until it ends, and return its exit code."""
        from ding_store.hook import install
        from ding_store.middleware.router import activate, deactivate

        log_as(self.title)
        warn_once(self.warnings)
        if self.delay_s:
            time.sleep(self.delay_s)
        if not self.has_gpu:
            # CUDA reads this at its first use, which has not been yet. Policies are then on the CPU, whatever their
            # config's cuda says, because they check whether torch has a GPU.
            os.environ['CUDA_VISIBLE_DEVICES'] = ''
        elif self.rank is not None:
            own_gpu = gpu_of(self.rank, os.environ.get('CUDA_VISIBLE_DEVICES'))
            if own_gpu is not None:
                os.environ['CUDA_VISIBLE_DEVICES'] = own_gpu
        with quiet_imports(), deferred_imports():
            install()
            defer_dynamo()
            if self.rank is not None:
                from ding_store.middleware import learner_ranks, worker_rank

                set_rank(self.rank)
                if self.is_worker:
                    worker_rank.start(self.rank, self.num_learners)
                else:
                    learner_ranks.start(self.rank, self.num_learners)
        if not self.is_worker:
            activate(self.node_id, self.address, self.peers, self.num_workers)
        code = self.script.run(self.is_debugged)
        deactivate()
        from ding_store.middleware.leave_on_signal import exit_code

        return exit_code(code)

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


def gpu_of(rank: int, visible: Optional[str]) -> Optional[str]:
    """
    Overview:
        Return the GPU of one of several learners on this host, each of which uses one. With more learners than GPUs,
        several share one.
    Arguments:
        - visible (:obj:`Optional[str]`): The GPUs that the processes may use, as in CUDA_VISIBLE_DEVICES. None: all.
    Returns:
        - gpu (:obj:`Optional[str]`): None: there is none.
    """
    if visible is not None:
        known = [each.strip() for each in visible.split(',') if each.strip()]
    else:
        # torch would count them with CUDA, which then reads no other CUDA_VISIBLE_DEVICES.
        known = [str(number) for number in range(len(os.listdir(_GPUS)))] if os.path.isdir(_GPUS) else []
    return known[rank % len(known)] if known else None


def role_from(fields: Mapping[str, Any]) -> Role:
    """Return the role that ``dataclasses.asdict`` has made a dict of."""
    return Role(**{**fields, 'script': UserScript(**fields['script'])})


def redirect(log: Path, is_new: bool = True) -> None:
    """Write this process's output to a log file, which is emptied before if ``is_new``. Read nothing."""
    how = os.O_TRUNC if is_new else os.O_APPEND
    fd = private_files.opener(str(log), os.O_WRONLY | os.O_CREAT | how)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # Flush each line, so that a log is complete however its process ends.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def main() -> None:
    role = role_from(json.loads(sys.argv[1]))
    role.enter()
    exit_process(role.run())


if __name__ == '__main__':
    main()
