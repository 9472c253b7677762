"""Play a run of 10 to 5,000 collectors against one Redis server, and print what they cost its core.

    python scripts/simulate.py --members 10,100,1000 --seconds 10 --json figures.json
    python scripts/simulate.py --commits HEAD~20,. --members 1000        # two commits in one run

Each collector is a session of this package with a store and a thread of its own, as in a real run: it joins, reports,
watches for the run's end, appends chunks and waits for the learner. The collectors share up to seven processes, and
the learner has one. Left out are environments, policies, weights and the host cache. A chunk is 2 KB, through Redis.

For each number of members there are three phases, and the server's CPU time (INFO cpu) is read around each:

    reports   the members have joined, and only report
    waiting   each collector has appended all that it may, and waits; the learner does nothing
    chunks    the learner takes --chunks-per-s chunks per second, and each lets one collector append the next

A chunk's cost is the CPU time of the third phase beyond that of the second, over the chunks that the learner took. The
law is fitted to all numbers of members: microseconds per chunk, and per member and second, as a line. Wall time does
not count, so the machine may be busy. If its clients are too slow for the rate, the learner takes fewer chunks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import redis

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ab import checkout  # noqa: E402

from ding_store.parent_death import end_with  # noqa: E402
from ding_store.storage.embedded.binary import find_server  # noqa: E402

MOST_PROCESSES = 7
MEMBERS_PER_PROCESS = 50
MAX_LEAD = 2
STREAM = 'experience'
CHUNK_BYTES = 2000
#: Time-outs of the members, whose processes may be slow.
PATIENT_S = 300.0
#: How often a wait looks whether its process ends. It sends nothing, and real members do it on cores of their own.
LOCAL_LOOK_S = 5.0
#: Pause between the starts of two members of a process, so that they do not all connect at once.
RAMP_S = 0.02
#: How long the members may take to join or to fill their lead: per member, and at least.
PATIENCE_S, LEAST_PATIENCE_S = 0.5, 60.0
#: The share of a core at which a server is full: beyond, its clients wait for it.
FULL = 0.7
#: Commands whose calls are printed per chunk.
COUNTED = ('xread', 'evalsha', 'hmget', 'xrevrange', 'xrange')


def main() -> int:
    if sys.argv[1:2] == ['--play']:
        play(json.loads(sys.argv[2]))
        return 0
    options = parse()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    result = []
    for commit in options.commits:
        with checkout(commit) as root:
            name = name_of(root, commit)
            rows = []
            print(f'\n{name}\n{HEAD}', flush=True)
            for number in options.members:
                rows.append(measure(options, root, number))
                print(line_of(rows[-1]), flush=True)
            law = law_of(rows)
            result.append({'commit': name, 'rows': rows, 'law': law})
            print(text_of(law, options.chunks_per_s))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + '\n')
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--members', default='10,50,200,1000', metavar='N,N,...', help='numbers of collectors (default: %(default)s)'
    )
    parser.add_argument(
        '--chunks-per-s', type=float, default=100.0, help='chunks that the learner takes (default: %(default)s)'
    )
    parser.add_argument('--seconds', type=float, default=10.0, help='length of each phase (default: %(default)s)')
    parser.add_argument(
        '--settle-s', type=float, default=5.0, help='seconds between the last join and the first phase (default: 5)'
    )
    parser.add_argument(
        '--commits', default='.', metavar='A,B', help='commits to measure in turn; . is the working tree (default: .)'
    )
    parser.add_argument('--json', metavar='FILE', help='write the figures to FILE')
    options = parser.parse_args()
    options.commits = options.commits.split(',')
    try:
        options.members = [int(word) for word in options.members.split(',')]
    except ValueError:
        parser.error(f'--members ({options.members!r}) must be numbers with commas between them')
    if min(options.members) < 1 or max(options.members) > 5000:
        parser.error(f'--members ({",".join(map(str, options.members))}) must be from 1 to 5000')
    for name in ('chunks_per_s', 'seconds'):
        if getattr(options, name) <= 0:
            parser.error(f'--{name.replace("_", "-")} ({getattr(options, name)}) must be > 0')
    return options


def name_of(root: Path, commit: str) -> str:
    """Return the commit's short id, with + for a working tree that has changes."""
    git = ['git', '-C', str(root)]
    done = subprocess.run([*git, 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True, check=False)
    if done.returncode:
        return commit
    is_changed = subprocess.run([*git, 'diff', '--quiet', 'HEAD'], check=False).returncode
    return 'commit ' + done.stdout.strip() + ('+' if is_changed else '')


# --- one number of members


class Sample(NamedTuple):
    at: float
    cpu_s: float
    commands: int
    calls: Dict[str, int]


class Phase(NamedTuple):
    """What the server did between two samples."""

    seconds: float
    cpu_s: float
    commands: int
    calls: Dict[str, int]

    @property
    def share(self) -> float:
        return self.cpu_s / self.seconds


class Played:
    """The processes that play the members of a run: they get commands and return answers, one line each."""

    def __init__(self, root: Path, url: str, number: int) -> None:
        self._root, self._url = root, url
        num_processes = min(MOST_PROCESSES, math.ceil(number / MEMBERS_PER_PROCESS))
        self._learner = self._start({'role': 'learner', 'first': 0, 'count': 1})
        bounds = [number * index // num_processes for index in range(num_processes + 1)]
        self._collectors = [
            self._start({'role': 'collector', 'first': 1 + first, 'count': end - first})
            for first, end in zip(bounds, bounds[1:])
        ]

    def _start(self, part: Dict[str, Any]) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).resolve()), '--play', json.dumps({**part, 'url': self._url})]
        env = dict(os.environ, PYTHONPATH=str(self._root), OMP_NUM_THREADS='1')
        pipes: Any = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True, 'bufsize': 1}
        return subprocess.Popen(command, cwd=self._root, env=env, **pipes)

    def ask_learner(self, *words: Any) -> int:
        return self._ask([self._learner], *words)

    def ask_collectors(self, *words: Any) -> int:
        """Return the sum of the answers."""
        return self._ask(self._collectors, *words)

    @staticmethod
    def _ask(processes: Sequence[subprocess.Popen[str]], *words: Any) -> int:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(' '.join(map(str, words)) + '\n')
        answers = [process.stdout.readline() for process in processes if process.stdout is not None]
        if not all(answers):
            raise SystemExit('simulate.py: a process of the members has ended. Its error is above.')
        return sum(map(int, answers))

    def kill(self) -> None:
        for process in (self._learner, *self._collectors):
            process.kill()
            process.communicate()


@contextlib.contextmanager
def server() -> Iterator[Tuple[str, redis.Redis]]:
    """Run a redis-server within the block. The value is its URL, and a client."""
    directory = tempfile.mkdtemp(prefix='simulate')
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    command = [str(find_server()), '--port', str(port), '--save', '', '--dir', directory, '--maxclients', '19000']
    command += ['--loglevel', 'warning']
    die = functools.partial(end_with, os.getpid(), signal.SIGKILL)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=die)
    try:
        with redis.Redis(port=port) as client:
            wait_until(lambda: answers(client), LEAST_PATIENCE_S, 'the server answers')
            yield f'redis://127.0.0.1:{port}', client
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def wait_until(is_true: Any, patience_s: float, what: str) -> None:
    deadline = time.monotonic() + patience_s
    while not is_true():
        if time.monotonic() > deadline:
            raise SystemExit(f'simulate.py: waited {patience_s:.0f} s until {what}. Try fewer --members.')
        time.sleep(0.1)


def sample(client: redis.Redis) -> Sample:
    info: Any = client.info('cpu')
    stats: Any = client.info('commandstats')
    total: Any = client.info('stats')
    calls = {name: int(stats.get(f'cmdstat_{name}', {}).get('calls', 0)) for name in COUNTED}
    cpu_s = info['used_cpu_user'] + info['used_cpu_sys']
    return Sample(time.monotonic(), cpu_s, int(total['total_commands_processed']), calls)


def phase(client: redis.Redis, seconds: float) -> Phase:
    """Let the members do what they do for so many seconds, and return what the server did."""
    before = sample(client)
    time.sleep(seconds)
    after = sample(client)
    calls = {name: after.calls[name] - before.calls[name] for name in COUNTED}
    return Phase(after.at - before.at, after.cpu_s - before.cpu_s, after.commands - before.commands, calls)


def measure(options: argparse.Namespace, root: Path, number: int) -> Dict[str, Any]:
    patience_s = max(LEAST_PATIENCE_S, number * PATIENCE_S)
    with server() as (url, client):
        played = Played(root, url, number)
        try:
            played.ask_learner('join')
            played.ask_collectors('join')
            time.sleep(options.settle_s)
            reports = phase(client, options.seconds)
            played.ask_collectors('collect')
            wait_until(
                lambda: played.ask_collectors('waiting') == number, patience_s, 'all collectors wait for the learner'
            )
            waiting = phase(client, options.seconds)
            played.ask_learner('learn', options.chunks_per_s)
            time.sleep(min(1.0, options.seconds))
            before = played.ask_learner('count')
            chunks = phase(client, options.seconds)
            num_chunks = played.ask_learner('count') - before
            clients: Any = client.info('clients')
            connections = (clients['connected_clients'] - 1) / (number + 1)
        finally:
            played.kill()
    if not num_chunks:
        raise SystemExit(f'simulate.py: the learner of {number} members took no chunk. Try longer --seconds.')
    idle = chunks.seconds / waiting.seconds
    return {
        'members': number,
        'connections_per_member': round(connections, 2),
        'reports_share': reports.share,
        'us_per_member_second': 1e6 * reports.share / number,
        'waiting_share': max(0.0, waiting.share - reports.share),
        'chunks_per_s': num_chunks / chunks.seconds,
        'us_per_chunk': max(0.0, 1e6 * (chunks.cpu_s - waiting.cpu_s * idle) / num_chunks),
        'share': chunks.share,
        'calls_per_chunk': {
            name: max(0.0, (chunks.calls[name] - waiting.calls[name] * idle) / num_chunks) for name in COUNTED
        },
        'commands_per_s': {
            'reports': reports.commands / reports.seconds,
            'waiting': waiting.commands / waiting.seconds,
            'chunks': chunks.commands / chunks.seconds,
        },
    }


# --- the table and the law

HEAD = (
    f'{"members":>7} {"sockets":>7}  {"reports":>7} {"waiting":>7}  {"us per":>9}  '
    f'{"chunks":>6} {"of a":>6}   calls per chunk\n'
    f'{"":>7} {"each":>7}  {"% core":>7} {"% core":>7}  {"chunk":>9}  {"per s":>6} {"core":>6}   ' + ', '.join(COUNTED)
)


def line_of(row: Dict[str, Any]) -> str:
    calls = ', '.join(f'{row["calls_per_chunk"][name]:.1f}' for name in COUNTED)
    return (
        f'{row["members"]:7} {row["connections_per_member"]:7.2f}  {100 * row["reports_share"]:7.1f} '
        f'{100 * row["waiting_share"]:7.1f}  {row["us_per_chunk"]:9.0f}  {row["chunks_per_s"]:6.1f} '
        f'{100 * row["share"]:5.0f}%   {calls}'
    )


def fit(rows: Sequence[Dict[str, Any]], name: str) -> Tuple[float, float]:
    """Return a and b of the line a + b * members that fits a figure best, by relative errors."""
    points = [(row['members'], row[name], 1 / max(row[name], 1e-9) ** 2) for row in rows]
    total = sum(weight for _, _, weight in points)
    mean_x = sum(weight * x for x, _, weight in points) / total
    mean_y = sum(weight * y for _, y, weight in points) / total
    spread = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    slope = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / spread if spread else 0.0
    return mean_y - slope * mean_x, slope


def law_of(rows: Sequence[Dict[str, Any]]) -> Dict[str, float]:
    if len({row['members'] for row in rows}) < 2:
        return {}
    chunk, chunk_per_member = fit(rows, 'us_per_chunk')
    reports, reports_per_member = fit(rows, 'reports_share')
    waiting, waiting_per_member = fit([{**row, 'w': max(row['waiting_share'], 1e-4)} for row in rows], 'w')
    return {
        'us_per_chunk': chunk,
        'us_per_chunk_and_waiting_collector': chunk_per_member,
        'reports_share': reports,
        'us_per_member_second': 1e6 * reports_per_member,
        'waiting_share': waiting,
        'us_per_waiting_collector_second': 1e6 * waiting_per_member,
    }


def share_of(law: Dict[str, float], members: int, chunks_per_s: float) -> float:
    """Return the share of the server's core that the law gives."""
    per_chunk = law['us_per_chunk'] + law['us_per_chunk_and_waiting_collector'] * members
    per_second = law['us_per_member_second'] + law['us_per_waiting_collector_second']
    fixed = law['reports_share'] + law['waiting_share']
    return max(0.0, fixed) + 1e-6 * (per_chunk * chunks_per_s + per_second * members)


def most_members(law: Dict[str, float], chunks_per_s: float) -> int:
    """Return how many collectors fill the core, at most 100,000."""
    low, high = 0, 100_000
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if share_of(law, middle, chunks_per_s) <= FULL else (low, middle - 1)
    return low


def text_of(law: Dict[str, float], rate: float) -> str:
    if not law:
        return 'no law: it needs two numbers of members'
    return (
        f'law: {law["us_per_chunk"]:.0f} us + {law["us_per_chunk_and_waiting_collector"]:.3f} us x waiting collectors '
        f'per chunk; {law["us_per_member_second"]:.0f} us per member and second of reports; '
        f'{law["us_per_waiting_collector_second"]:.0f} us per second of a wait\n'
        f'by the law, 1,000 collectors at {rate:g} chunks/s take {100 * share_of(law, 1000, rate):.0f} % of a core, '
        f'and {FULL:.0%} of a core are reached at {most_members(law, rate):,} collectors'
    )


# --- the processes of the members


def play(part: Dict[str, Any]) -> None:
    """Play some members, by the commands of the process that started this one."""
    import logging

    from ding_store.storage.redis import values

    end_with(os.getppid(), signal.SIGKILL)
    threading.stack_size(256 << 10)
    vars(values)['LOOK_S'] = LOCAL_LOOK_S
    logging.basicConfig(level='ERROR', format=f'{part["role"]} %(message)s')
    kind = PlayedLearner if part['role'] == 'learner' else PlayedCollectors
    members = kind(part)
    for line in sys.stdin:
        command, *arguments = line.split()
        print(getattr(members, command)(*arguments), flush=True)
    os._exit(0)  # No member leaves in order: that is not measured.


class PlayedMembers:
    def __init__(self, part: Dict[str, Any]) -> None:
        from ding_store.config import StoreConfig

        self.role, self.ids = part['role'], range(part['first'], part['first'] + part['count'])
        self.config = StoreConfig(
            url=part['url'],
            run='simulated',
            launched='simulate',
            max_lead=MAX_LEAD,
            reconnect_timeout_s=PATIENT_S,
            store_options={'host_plane': 'off', 'socket_timeout_s': PATIENT_S},
        )
        self.sessions: List[Any] = []

    def join(self) -> int:
        from ding_store.run.session import RunSession

        for node_id in self.ids:
            session = RunSession(self.config)
            session.join(self.role, node_id)
            session.figures(ordinal=node_id, began_s=time.monotonic())
            self.sessions.append(session)
        return len(self.sessions)


class PlayedCollectors(PlayedMembers):
    def __init__(self, part: Dict[str, Any]) -> None:
        super().__init__(part)
        self.is_waiting: Dict[int, bool] = {}

    def collect(self) -> int:
        for session in self.sessions:
            threading.Thread(target=self._collect, args=(session,), daemon=True).start()
            time.sleep(RAMP_S)
        return len(self.sessions)

    def _collect(self, session: Any) -> None:
        import numpy as np

        from ding_store.middleware import backpressure as module

        if hasattr(module.Backpressure, 'wait_for_learner'):
            backpressure = module.Backpressure(session.store, MAX_LEAD, lambda: session.finished)
            wait = functools.partial(backpressure.wait_for_learner, session)
        else:  # in commits before wait_for_learner
            backpressure = module.Backpressure(session.store, MAX_LEAD)
            wait = functools.partial(session.wait_for, 'the learner', backpressure.wait_within_lead, 'learner')
        rows = np.zeros(CHUNK_BYTES, np.uint8)
        num_chunks = 0
        while not session.finished:
            self.is_waiting[session.member.node_id] = True
            wait()
            self.is_waiting[session.member.node_id] = False
            num_chunks += 1
            header = {'rows': 32, 'env_step': 32, 'env_episode': 0, 'kind': 'trajectories', 'policy_version': 1}
            backpressure.appended(session.store.append(STREAM, header, {'x': rows}))
            session.figures(rows=32 * num_chunks, chunks=num_chunks, env_step=32 * num_chunks)

    def waiting(self) -> int:
        """Return the number of collectors that have waited for a moment."""
        before = {member for member, is_waiting in self.is_waiting.items() if is_waiting}
        time.sleep(0.2)
        return sum(self.is_waiting[member] for member in before)


class PlayedLearner(PlayedMembers):
    num_chunks = 0

    def join(self) -> int:
        from ding_store.middleware import backpressure
        from ding_store.storage import Reader

        super().join()
        self.reader = Reader(self.sessions[0].store, STREAM, 'learner')
        if hasattr(backpressure, 'ProgressWriter'):
            self.publish = backpressure.ProgressWriter().publish
        else:  # in earlier commits
            self.publish = lambda reader, place, progress: reader.advance(place, 'progress', progress)
        return 1

    def learn(self, chunks_per_s: str) -> int:
        threading.Thread(target=self._learn, args=(float(chunks_per_s),), daemon=True).start()
        return 1

    def _learn(self, chunks_per_s: float) -> None:
        (session,) = self.sessions
        due_at = time.monotonic()
        while not session.finished:
            for entry in self.reader.read(1, timeout_s=1.0):
                due_at = max(due_at + 1 / chunks_per_s, time.monotonic() - 0.5)
                time.sleep(max(0.0, due_at - time.monotonic()))
                self.num_chunks += 1
                steps = 32 * self.num_chunks
                counts = {'train_iter': self.num_chunks, 'env_step': steps, 'env_episode': 0}
                self.publish(self.reader, entry.id, {'ingested': list(entry.id), **counts})
                session.figures(chunks=self.num_chunks, rows=steps, **counts)

    def count(self) -> int:
        return self.num_chunks


if __name__ == '__main__':
    sys.exit(main())
