"""
Run a job of DI-engine on a Ray cluster: one actor per process, and each joins the run.

> python dizoo_configs/ray_job.py --collectors 4 -- python -u dizoo_configs/cartpole/cartpole_dqn_main.py

Ray chooses the nodes, and starts an actor again on another one if its node is lost. The script and ding_store must be
at the same path on each node. docs/howto/ray.md explains the rest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Sequence

import ray

from ding_store.environment import ENV_RUN, ENV_URL
from ding_store.parent_death import end_with
from ding_store.storage.urls import embedded_url

#: Exit statuses after which another start would fail in the same way.
FINAL = (0, os.EX_CONFIG)
#: Seconds until a process that failed is started again, and after which a failure is no longer one after its start.
PAUSE_S, WORKED_S = 5.0, 60.0


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Member:
    """An actor that runs one process of the run. If the actor dies, Ray starts it and its call again."""

    def work(self, words: Sequence[str], directory: str, variables: Dict[str, str]) -> int:
        """Join the run, and return the exit status when this process has left it."""
        parent = os.getpid()
        command = [sys.executable, '-m', 'ding_store.cli', 'join', *words]
        environment = {**os.environ, **variables}
        # The process ends with its actor, also if Ray kills that.
        started = subprocess.Popen(command, cwd=directory, env=environment, preexec_fn=lambda: end_with(parent))
        return started.wait()


@dataclass
class Place:
    """One process of the run: what it is started with, and how often in a row it failed soon after its start."""

    title: str
    words: List[str]
    actor: Any
    num_failures: int = 0
    began_s: float = 0.0

    def start(self, variables: Dict[str, str]) -> Any:
        self.began_s = time.monotonic()
        return self.actor.work.remote(self.words, os.getcwd(), variables)


def say(text: str) -> None:
    sys.stdout.write(f'ray_job: {text}\n')
    sys.stdout.flush()


def places(options: argparse.Namespace, command: Sequence[str]) -> List[Place]:
    """Return the processes of the run: the learner first, without which the others wait."""
    words = {
        'learner': ['--role', 'learner', '--owner'],
        'evaluator': ['--role', 'evaluator', '--wait'],
        'collector': ['--role', 'collector', '--wait'],
    }
    if options.checkpoint:
        words['learner'] += ['--checkpoint', options.checkpoint]
    titles = ['learner', 'evaluator', *(f'collector {number}' for number in range(options.collectors))]
    found = []
    for title in titles:
        role = title.partition(' ')[0]
        size = dict(num_cpus=options.cpus, num_gpus=options.learner_gpus if role == 'learner' else 0)
        found.append(Place(title, [*words[role], '--', *command], Member.options(**size).remote()))
    return found


def follow(everyone: List[Place], variables: Dict[str, str], limit: int) -> int:
    """Start all processes, and again those that fail. Return the exit status when the learner has ended."""
    running = {place.start(variables): place for place in everyone}
    while True:
        (done,), _ = ray.wait(list(running), num_returns=1)
        place, code = running.pop(done), ray.get(done)
        place.num_failures = place.num_failures + 1 if time.monotonic() - place.began_s < WORKED_S else 1
        say(f'{place.title} has ended with status {code}')
        if place.title == 'learner' and (code in FINAL or place.num_failures > limit):
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=60.0)
            return code if code >= 0 else 128 - code
        if code not in FINAL and place.num_failures <= limit:
            time.sleep(PAUSE_S)
            running[place.start(variables)] = place


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage='python dizoo_configs/ray_job.py [options] -- python -u SCRIPT ...',
    )
    parser.add_argument('--run', default=os.environ.get(ENV_RUN, 'ray'), help='name of the run (default: %(default)s)')
    parser.add_argument('--collectors', type=int, default=2, help='number of collectors (default: %(default)s)')
    parser.add_argument('--cpus', type=float, default=1, help='CPUs of each process (default: %(default)s)')
    parser.add_argument('--learner-gpus', type=float, default=0, help='GPUs of the learner (default: %(default)s)')
    parser.add_argument('--checkpoint', metavar='DIR', help='let a learner that is started again resume from DIR')
    parser.add_argument('--failures', type=int, default=3, help='early failures in a row to give up after (default: 3)')
    parser.add_argument('--address', help='of the Ray cluster (default: RAY_ADDRESS, or a new one on this host)')
    parser.add_argument('command', nargs='+', help=argparse.SUPPRESS)
    options = parser.parse_args()
    ray.init(address=options.address, log_to_driver=True)
    url = os.environ.get(ENV_URL)
    if url is None:
        if len(ray.nodes()) > 1:
            parser.error(f'this cluster has several nodes: set {ENV_URL} to a Redis server that all of them reach')
        url = embedded_url('.ding_store')
    everyone = places(options, options.command)
    has, wants = ray.cluster_resources().get('CPU', 0.0), len(everyone) * options.cpus
    if has < wants:
        say(
            f'{len(everyone)} processes want {wants:g} CPUs, and the cluster has {has:g}. The last ones wait for more '
            'nodes. With --cpus 0.5, more of them share a CPU.'
        )
    return follow(everyone, {ENV_URL: url, ENV_RUN: options.run}, options.failures)


if __name__ == '__main__':
    sys.exit(main())
