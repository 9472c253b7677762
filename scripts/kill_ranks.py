"""
Break a job with several learners at random moments, and check that no row is lost and none is in a replay twice.

    python scripts/kill_ranks.py                    30 kills of a learner in one CartPole job with two learners
    python scripts/kill_ranks.py --fault redis      freezes its Redis server for some seconds, or restarts it
    python scripts/kill_ranks.py --fault host       kills all processes of a second host, which has the last learner
    python scripts/kill_ranks.py --fault cable      unplugs that host for some seconds
    python scripts/kill_ranks.py --faults 5 --seed 3

After each fault the job must train again: with Redis or the cable back, or with all learners started from the last
checkpoint. The second host has network and process namespaces of its own, which need root and the command ip. It joins
again after each kill. At the end the job finishes in order. Then the rows that collectors appended must be the rows in
the replays, and their sum over the partitions.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

from netns import Network, why_not  # noqa: E402
from redis_server import RedisServer  # noqa: E402

from ding_store.storage.embedded.binary import find_server  # noqa: E402

TINY = ROOT / 'tests' / 'pipelines' / 'tiny_dqn.py'
RUN = 'kill-ranks'
#: Time that the learners may take from their start until they train, and the job from the last kill to its end.
DEADLINE_S = 600.0
#: Faults of a job whose last learner is on a second host.
SECOND_HOST = ('host', 'cable')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--fault', choices=('learner', 'redis', 'host', 'cable'), default='learner')
    parser.add_argument('--faults', type=int, default=30, help='number of faults (default: %(default)s)')
    parser.add_argument('--learners', type=int, default=2)
    parser.add_argument('--collectors', type=int, default=1)
    parser.add_argument('--partitions', type=int, help='default: one for each learner')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument(
        '--longest', type=float, default=8.0, help='seconds from a start, or a checkpoint, to the fault, at most'
    )
    parser.add_argument('--json', metavar='FILE', help='write the figures to FILE')
    parser.add_argument('--keep', action='store_true', help='keep the directory of the job')
    options = parser.parse_args()
    if options.fault in SECOND_HOST and why_not():
        parser.error(f'--fault {options.fault}: {why_not()}')

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job does not outlive this command
    directory = Path(tempfile.mkdtemp(prefix='kill-ranks-'))
    try:
        figures = run(options, directory)
    finally:
        if options.keep:
            say(f'the files of the job are in {directory}')
        else:
            shutil.rmtree(directory, ignore_errors=True)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1))
    say(json.dumps(figures))
    return 0 if not figures['faults'] else 1


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(options: argparse.Namespace, directory: Path) -> Dict:
    chance, faults = random.Random(options.seed), []
    with contextlib.ExitStack() as stack:
        server = network = None
        if options.fault in SECOND_HOST:
            network = stack.enter_context(Network('one', 'two'))
        if options.fault != 'learner':
            server = stack.enter_context(redis_server(directory, network))
        job = Job(options, directory, server, network)
        stack.callback(job.kill)
        job.add_host()
        strikes = dict(learner=job.kill_learner, redis=job.break_redis, host=job.kill_host, cable=job.pull_cable)
        strike = strikes[options.fault]
        for number in range(options.faults):
            faults.append(strike(chance))
            say(f'fault {number + 1} of {options.faults}: {faults[-1]}')
        if options.fault == 'learner':
            job.wait_for_learners()
        job.wait_for_training()
        code = job.end()
    return checked(job.text(), directory / 'trace', code, faults)


@contextlib.contextmanager
def redis_server(directory: Path, network: Optional[Network]) -> Iterator[RedisServer]:
    """Run a server that keeps each write on the disk, on the first host if there are two."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    address = '127.0.0.1' if network is None else network.addresses['one']
    words = ['--bind', address, '--port', port, '--protected-mode', 'no', '--appendonly', 'yes']
    before = [] if network is None else network.command('one')
    with RedisServer(str(find_server()), *words, '--appendfsync', 'always', before=before) as server:
        server.url = f'redis://{address}:{port}'
        yield server


class Job:
    """
    Overview:
        The job: a launcher, and a learner on a second host if there are two.
    Arguments:
        - server (:obj:`Optional[RedisServer]`): None: the launcher starts one.
        - network (:obj:`Optional[Network]`): The two hosts, or None.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        directory: Path,
        server: Optional[RedisServer],
        network: Optional[Network] = None,
    ) -> None:
        self._options, self._directory, self._server, self._network = options, directory, server, network
        self._until = directory / 'until'
        self._known: set = set()
        self._second: Optional[subprocess.Popen] = None
        restarts = f'checkpoint={{"max_restarts": {options.faults + 1}, "interval_s": 1.0}}'
        patience = f'peer_timeout_s={DEADLINE_S}'  # many kills in a row leave no time to train
        where = ['--run', RUN, '--checkpoint', str(directory / 'saved'), '--set', restarts, '--set', patience]
        where += ['--set', f'learners={{"partitions": {options.partitions or options.learners}}}']
        where += [] if server is None else ['--store', server.url]
        script = ['--', 'python', str(TINY), '--ckpt', '--trace', str(directory / 'trace'), '--until', str(self._until)]
        joins = network is not None
        roles = f'learner={options.learners - joins},collector={options.collectors},evaluator=1'
        more = ['--learners', str(options.learners)] if joins else []
        self._join = ['join', *where, '--role', 'learner', '--wait', *more, *script]
        before = [] if network is None else network.command('one')
        self._launcher = self._start('job', ['run', *where, '--roles', roles, *more, *script], *before)

    def add_host(self) -> None:
        """Start the learner of the second host, if there is one."""
        if self._network is not None:
            self._wait_for(lambda: 'logs in' in self.text())
            self._second = self._start_host()

    def _start(self, name: str, words: List[str], *before: str) -> subprocess.Popen:
        environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore'}
        command = [*before, sys.executable, '-m', 'ding_store.cli', *words]
        with open(self._directory / f'{name}.out', 'ab') as out:
            return subprocess.Popen(
                command, cwd=self._directory, env=environment, stdout=out, stderr=out, start_new_session=True
            )

    def _start_host(self) -> subprocess.Popen:
        assert self._network is not None
        apart = self._network.command('two', 'unshare', '--pid', '--uts', '--mount-proc', '--fork', '--kill-child')
        return self._start('second', self._join, *apart)

    def text(self) -> str:
        return (self._directory / 'job.out').read_text(errors='replace')

    def kill(self) -> None:
        for process in filter(None, [self._launcher, self._second]):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def end(self) -> int:
        """Let the job end in order, and return its exit status."""
        self._until.touch()
        code = self._launcher.wait(DEADLINE_S)
        return code or (0 if self._second is None else self._second.wait(DEADLINE_S))

    # Faults

    def kill_learner(self, chance: random.Random) -> Dict:
        learners = self.wait_for_learners()
        trains = chance.random() < 0.5  # else it may die while it starts, connects or resumes
        if trains:
            self.wait_for_training()
        after_s, rank = self._pause(chance), chance.randrange(self._options.learners)
        try:
            os.kill(learners[rank], signal.SIGKILL)
        except ProcessLookupError:
            say(f'rank {rank} had ended by itself')
        return dict(rank=rank, after_s=after_s, trained=trains)

    def break_redis(self, chance: random.Random) -> Dict:
        assert self._server is not None
        self.wait_for_training()
        after_s, frozen_s = self._pause(chance), round(chance.uniform(1.0, 8.0), 2)
        restarts = chance.random() < 0.5
        if restarts:
            self._server.kill()
        else:
            self._server.signal(signal.SIGSTOP)
        time.sleep(frozen_s)
        if restarts:
            self._server.start()
        else:
            self._server.signal(signal.SIGCONT)
        return dict(after_s=after_s, away_s=frozen_s, restarted=restarts)

    def kill_host(self, chance: random.Random) -> Dict:
        assert self._second is not None
        trains = chance.random() < 0.7
        if trains:
            self.wait_for_training()
        after_s = self._pause(chance)
        os.killpg(self._second.pid, signal.SIGKILL)
        self._second.wait()
        joins_after_s = self._pause(chance)
        self._second = self._start_host()
        return dict(after_s=after_s, trained=trains, joins_after_s=joins_after_s)

    def pull_cable(self, chance: random.Random) -> Dict:
        assert self._network is not None
        self.wait_for_training()
        after_s, away_s = self._pause(chance), round(chance.uniform(1.0, 8.0), 2)
        self._network.unplug('two')
        time.sleep(away_s)
        self._network.plug('two')
        return dict(after_s=after_s, away_s=away_s)

    def _pause(self, chance: random.Random) -> float:
        pause_s = round(chance.uniform(0.0, self._options.longest), 2)
        time.sleep(pause_s)
        return pause_s

    # Waits

    def wait_for_learners(self) -> List[int]:
        """Return the pids of the learners by rank, once all have been started that are not known yet."""
        num = self._options.learners

        def look() -> List[int]:
            found = {rank: pid for pid, rank in learners_of(self._launcher.pid).items() if pid not in self._known}
            return [found[rank] for rank in range(num)] if len(found) == num else []

        learners = self._wait_for(look)
        self._known |= set(learners)
        return learners

    def wait_for_training(self) -> None:
        """Wait until the learners have trained together, and have written another checkpoint."""
        saved = self._directory / 'saved'

        def newest() -> int:
            names = os.listdir(saved) if saved.is_dir() else []
            found = [int(match[1]) for name in names if (match := re.match(r'iteration_(\d+)\.pth', name))]
            return max(found, default=0)

        before = newest()
        self._wait_for(lambda: newest() > before)

    def _wait_for(self, condition: Callable):
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            result = condition()
            if result:
                return result
            if self._launcher.poll() is not None:
                raise SystemExit(f'the job ended:\n{self.text()[-3000:]}')
            if self._second is not None and self._second.poll() is not None:
                second = (self._directory / 'second.out').read_text(errors='replace')
                raise SystemExit(f'the second host ended:\n{second[-3000:]}\n{self.text()[-3000:]}')
            time.sleep(0.1)
        raise SystemExit(f'nothing for {DEADLINE_S:.0f} s:\n{self.text()[-3000:]}')


def learners_of(launcher: int) -> Dict[int, int]:
    """Return pid -> rank of the learners among a launcher's descendants. Another process of it starts some again."""
    found = {}
    for pid in children_of(launcher):
        found.update(learners_of(pid))
        try:
            output = os.readlink(f'/proc/{pid}/fd/1')
        except OSError:
            continue  # it has ended
        match = re.search(r'/learner-(\d+)\.log$', output)
        if match:
            found[pid] = int(match[1])
    return found


def children_of(pid: int) -> List[int]:
    found: List[int] = []
    for path in Path(f'/proc/{pid}/task').glob('*/children'):
        with contextlib.suppress(OSError):  # it has ended
            found += map(int, path.read_text().split())
    return found


def checked(text: str, trace: Path, code: int, struck: List[Dict]) -> Dict:
    """Return the figures of the job, with its faults."""
    table = {name: float(value) for name, value in re.findall(r'^(\S.*?\S)\s{2,}(-?[\d.]+)\s*$', text, re.M)}
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    ends = [each for each in records if each['event'] == 'end' and each['roles'] == ['learner']]
    appended, ingested = table.get('rows appended', -1), table.get('rows ingested', -2)
    in_replays = sum(each['replay'] for each in ends)
    faults = []
    if code:
        faults.append(f'the job ended with {code}: {text[-2000:]}')
    if appended != ingested:
        faults.append(f'{appended:.0f} rows appended, {ingested:.0f} ingested')
    if in_replays != ingested:
        faults.append(f'{in_replays} rows in the replays, {ingested:.0f} ingested')
    if table.get('chunks lost'):
        faults.append(f'{table["chunks lost"]:.0f} chunks lost')
    if len({each['train_iter'] for each in ends}) != 1:
        faults.append(f'the learners ended at different iterations: {[each["train_iter"] for each in ends]}')
    return dict(struck=struck, appended=appended, ingested=ingested, in_replays=in_replays, faults=faults)


if __name__ == '__main__':
    sys.exit(main())
