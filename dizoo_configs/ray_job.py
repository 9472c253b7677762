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
from typing import Any, Dict, List, Optional, Sequence, Tuple

import ray

from ding_store.environment import ENV_RUN, ENV_URL
from ding_store.launch.restarts import WORKED_S, Restarts
from ding_store.parent_death import end_with
from ding_store.storage.urls import embedded_url

#: The exit status of a ``join`` that is refused, and the seconds until the next try. A collector is refused while an
#: earlier run of this name has failed and its learner has not resumed it yet.
REFUSED, PAUSE_S = 2, 5.0


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Member:
    """An actor that runs one process of the run. If the actor dies, Ray starts it and its call again."""

    def work(
        self, words: Sequence[str], directory: str, variables: Dict[str, str], pause_s: float = 0.0
    ) -> Tuple[int, float]:
        """Join the run after a pause. When the process has ended, return its exit status and how long it ran."""
        time.sleep(pause_s)
        parent, began_s = os.getpid(), time.monotonic()
        command = [sys.executable, '-m', 'ding_store.cli', 'join', *words]
        environment = {**os.environ, **variables}
        # The process ends with its actor, also if Ray kills that.
        started = subprocess.Popen(command, cwd=directory, env=environment, preexec_fn=lambda: end_with(parent))
        return started.wait(), time.monotonic() - began_s


@dataclass
class Place:
    """One process of the run: what it is started with, its actor, and a reference that is ready when the actor is."""

    title: str
    words: List[str]
    actor: Any
    ready: Any
    restarts: Restarts

    @property
    def role(self) -> str:
        return self.title.partition(' ')[0]

    def start(self, variables: Dict[str, str], pause_s: float = 0.0) -> Any:
        return self.actor.work.remote(self.words, os.getcwd(), variables, pause_s)

    def pause_after(self, code: int, ran_s: float) -> Optional[float]:
        """Return the seconds until the next start after an end, or None: the process is not started again."""
        if code == 0:
            return None
        if code == REFUSED and self.role != 'learner':
            return PAUSE_S
        return self.restarts.after(code, ran_s if ran_s >= WORKED_S else None)


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
        actor = Member.options(**size).remote()
        ready = actor.__ray_ready__.remote()
        if role == 'learner':
            ray.wait([ready])  # Ray may otherwise give the last CPUs to an actor that was made later
        found.append(Place(title, [*words[role], '--', *command], actor, ready, Restarts(options.restarts)))
    return found


def follow(everyone: List[Place], variables: Dict[str, str]) -> int:
    """Start all processes, and again those that fail. Return the exit status when the run has ended or cannot go on."""
    running = {place.start(variables): place for place in everyone}
    while True:
        (done,), _ = ray.wait(list(running), num_returns=1)
        place, (code, ran_s) = running.pop(done), ray.get(done)
        say(f'{place.title} has ended with status {code}')
        pause_s = place.pause_after(code, ran_s)
        if pause_s is not None:
            running[place.start(variables, pause_s)] = place
            continue
        ray.kill(place.actor)  # actors that wait get its CPUs
        if code != 0:
            say(f'{place.title} is given up')
        if place.role == 'learner':
            wait_for_rest(running)
        elif code == 0 or any(each.role == place.role for each in running.values()):
            continue
        else:
            say(f'the run cannot go on without its {place.role}')
        return code if code >= 0 else 128 - code


def wait_for_rest(running: Dict[Any, Place]) -> None:
    """Let the other processes leave the run. An actor that still waits for a CPU has none."""
    begun = [done for done, place in running.items() if ray.wait([place.ready], timeout=0)[0]]
    if begun:
        ray.wait(begun, num_returns=len(begun), timeout=60.0)


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
    parser.add_argument(
        '--restarts', type=int, default=3, help='restarts in a row after failures in the first minute (default: 3)'
    )
    parser.add_argument('--address', help='of the Ray cluster (default: RAY_ADDRESS, a running one, or a new one)')
    parser.add_argument('command', nargs='+', help=argparse.SUPPRESS)
    options = parser.parse_args()
    ray.init(address=options.address, log_to_driver=True)
    url = os.environ.get(ENV_URL)
    if url is None:
        if sum(node['Alive'] for node in ray.nodes()) > 1:
            parser.error(f'this cluster has several nodes: set {ENV_URL} to a Redis server that all of them reach')
        url = embedded_url('.ding_store')
    number = 2 + options.collectors
    has, wants = ray.cluster_resources().get('CPU', 0.0), number * options.cpus
    if has < wants:
        say(
            f'{number} processes want {wants:g} CPUs, and the cluster has {has:g}. The last ones wait for more '
            'nodes. With --cpus 0.5, more of them share a CPU.'
        )
    # Other nodes do not inherit the driver's variables, such as the login at the sentinels.
    own = {name: value for name, value in os.environ.items() if name.startswith('DING_STORE_')}
    return follow(places(options, options.command), {**own, ENV_URL: url, ENV_RUN: options.run})


if __name__ == '__main__':
    sys.exit(main())
