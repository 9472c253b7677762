"""
Runs the batch script of `ding-store slurm` on a real slurmctld with two slurmd on this machine: it submits a job, ends
it as Slurm does before its time limit, lets Slurm queue it again, and waits until it has finished. As root:

    apt-get download slurmctld slurmd slurm-client slurm-wlm-basic-plugins libhwloc15 liblua5.1-0 libmunge2
    for each in *.deb; do dpkg -x "$each" DIR; done
    python scripts/slurm_trial.py --binaries DIR

Nothing of this machine changes: configuration, state and logs lie in a temporary directory. It takes minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

ROOT = Path(__file__).resolve().parents[1]
PIPELINE = ROOT / 'tests' / 'pipelines' / 'tiny_dqn.py'
DEADLINE_S = 900.0
CONF = """
ClusterName=trial
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/%n
SlurmctldPidFile={state}/ctld.pid
SlurmdPidFile={state}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_interval=2
ReturnToService=2
MpiDefault=none
KillWait=30
NodeName=n1 NodeHostname={host} Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} Port={ports[2]} CPUs=8
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> List[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(('', 0))
        return [each.getsockname()[1] for each in sockets]


class Trial:
    def __init__(self, binaries: Path, directory: Path) -> None:
        self.directory, self.binaries = directory, binaries
        libraries = binaries / 'usr' / 'lib' / 'x86_64-linux-gnu'
        plugins = libraries / 'slurm-wlm'
        for name in ('state/ctld', 'state/n1', 'state/n2', 'bin', 'work'):
            (directory / name).mkdir(parents=True)
        fields: Dict[str, Any] = dict(host=socket.gethostname(), plugins=plugins, state=directory / 'state')
        (directory / 'slurm.conf').write_text(CONF.format(ports=free_ports(3), **fields))
        starter = directory / 'bin' / 'ding-store'
        starter.write_text(f'#!/bin/bash\nexec {sys.executable} -W ignore -m ding_store.cli "$@"\n')
        starter.chmod(0o755)
        path = f'{directory / "bin"}:{binaries / "usr" / "bin"}:{Path(sys.executable).parent}:{os.environ["PATH"]}'
        self.environment = {
            **os.environ,
            'PATH': path,
            'SLURM_CONF': str(directory / 'slurm.conf'),
            'LD_LIBRARY_PATH': f'{plugins}:{libraries}',
            'PYTHONPATH': str(ROOT),
        }

    @contextlib.contextmanager
    def daemons(self) -> Iterator[None]:
        sbin = self.binaries / 'usr' / 'sbin'
        step = str(sbin / 'slurmstepd-wlm')
        commands = [[str(sbin / 'slurmctld-wlm'), '-D']]
        commands += [[str(sbin / 'slurmd-wlm'), '-D', '-N', node, '-d', step] for node in ('n1', 'n2')]
        started = []
        try:
            for number, command in enumerate(commands):
                with open(self.directory / f'daemon-{number}.log', 'wb') as log:
                    started.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))
            yield
        finally:
            with contextlib.suppress(subprocess.SubprocessError):
                self.run('scancel', '--user=root')
                time.sleep(5.0)
            for process in reversed(started):
                process.terminate()
            for process in started:
                process.wait(60.0)

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.directory / 'work', env=self.environment, capture_output=True, text=True, timeout=120.0
        )
        if done.returncode != 0:
            raise subprocess.SubprocessError(f'{command}: {done.stdout}{done.stderr}')
        return done.stdout

    def until(self, condition: Callable[[], Any], what: str) -> None:
        begin = time.monotonic()
        while True:
            with contextlib.suppress(subprocess.SubprocessError):
                if condition():
                    break
            if time.monotonic() - begin > DEADLINE_S:
                logs = [path.read_text(errors='replace')[-2000:] for path in self.directory.glob('daemon-*.log')]
                raise TimeoutError(f'no {what}: {self.output()[-3000:]}\n' + '\n'.join(logs))
            time.sleep(1.0)
        print(f'{what} ({time.monotonic() - begin:.0f} s)', flush=True)

    def output(self) -> str:
        return '\n'.join(path.read_text(errors='replace') for path in (self.directory / 'work').glob('trial-*.out'))


def try_it(trial: Trial) -> None:
    work = trial.directory / 'work'
    script = ['--ckpt', '--trace', str(work / 'trace'), '--until', str(work / 'stop')]
    command = ['--roles', 'learner=1,collector=2', '--time', '1:00:00', '--per-node', '2', '--cpus', '2']
    text = trial.run('ding-store', 'slurm', '--run', 'trial', *command, '--', 'python', str(PIPELINE), *script)
    (work / 'job.sbatch').write_text(text)
    with trial.daemons():
        trial.until(lambda: 'idle' in trial.run('sinfo', '-h', '-o', '%t'), 'two nodes')
        job = trial.run('sbatch', '--parsable', 'job.sbatch').strip()
        trial.until(lambda: list((work / 'checkpoints' / 'trial').glob('iteration_*')), 'a checkpoint')
        trial.run('scancel', '--batch', '--signal=TERM', job)
        trial.until(lambda: 'Restarts=1' in trial.run('scontrol', 'show', 'job', job), 'the job is queued again')
        trial.until(lambda: 'resuming from' in learner_log(work), 'the learner has resumed')
        (work / 'stop').touch()
        trial.until(lambda: trial.output().count('launcher: finished') == 1, 'the run has finished')
        trial.until(lambda: 'JobState=COMPLETED' in trial.run('scontrol', 'show', 'job', job), 'the job is completed')
    left = [str(path) for path in Path(os.environ.get('TMPDIR', '/tmp')).glob('ding_store-slurm-*')]
    print('left in the temporary directory:', left or 'nothing')


def learner_log(work: Path) -> str:
    path = work / '.ding_store' / 'trial' / 'logs' / 'learner-0.log'
    return path.read_text(errors='replace') if path.exists() else ''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--binaries', metavar='DIR', type=Path, required=True)
    parser.add_argument('--keep', action='store_true', help='keep the temporary directory')
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix='ding-store-slurm-trial-'))
    try:
        try_it(Trial(options.binaries.resolve(), directory))
    finally:
        if options.keep:
            print(f'kept: {directory}')
        else:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == '__main__':
    main()
