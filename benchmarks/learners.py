"""Benchmark of several learners: updates/s at one global batch, beside peers and the same loop on data in memory."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Type

import numpy as np
import torch
import torch.distributed as dist
import treetensor.torch as ttorch
from ding.framework import task
from ding.framework.context import OnlineRLContext
from ding.model import DQN
from ding.policy import DQNPolicy
from ding.utils import deep_merge_dicts
from ditk import logging
from easydict import EasyDict

from benchmarks.machine import busy_cores, others
from benchmarks.output import say, show
from benchmarks.shared_replays import PEERS, SharedReplay
from ding_store.buffer import StoreBuffer
from ding_store.config import StoreConfig
from ding_store.errors import ConfigError, StoreError
from ding_store.learners.data_parallel import LearnerGroup
from ding_store.learners.data_parallel_gradients import GradientAverage
from ding_store.middleware import learner_ranks
from ding_store.middleware.batch_policies import takes_batch
from ding_store.middleware.chunks import ChunkWriter
from ding_store.middleware.partitions import Partitioner
from ding_store.middleware.replay import OffPolicyLearner
from ding_store.run.several_learners import stream_of
from ding_store.run.time_spent import TimeSpent
from ding_store.storage import open_store

FORK = multiprocessing.get_context('fork')
#: Seconds that no process takes.
LIMIT_S = 600.0
#: Rows of the replays together, length of an observation, width of the model's layers.
NUM_ROWS, OBS, HIDDEN, ACTIONS = 20_000, 128, 256, 6
#: Updates before those that are measured.
WARM_UP = 10
#: Updates per iteration, as in DI-engine's configs: the learners agree once per iteration.
PER_ITERATION = 10


def main(learners: str, batch_size: int, updates: int, rounds: int, json_file: Optional[str]) -> int:
    """Measure, and print a table. Write all to ``json_file``, if given."""
    numbers = [int(each) for each in learners.split(',') if each.isdigit()]
    if not numbers or min(numbers) < 2 or any(batch_size % each for each in numbers):
        raise ConfigError(f'--learners ({learners!r}) must be numbers of at least 2 that divide --batch ({batch_size})')
    if updates < 1 or updates % PER_ITERATION:
        raise ConfigError(f'--updates ({updates}) must be a multiple of {PER_ITERATION}, the updates per iteration')
    logging.getLogger().setLevel(logging.WARNING)
    show(
        f'{os.cpu_count()} cores; each learner is a process with one thread; DQN, {HIDDEN} wide, batch {batch_size}; '
        f'{PER_ITERATION} updates per iteration'
    )
    results = []
    for num in numbers:
        results.append(measure(num, batch_size, updates, rounds))
        show(render(results[-1]))
    if json_file:
        with open(json_file, 'w') as out:
            json.dump({'cores': os.cpu_count(), 'batch': batch_size, 'results': results}, out, indent=1)
        show(f'all figures are in {json_file}')
    return 0


def measure(num: int, batch_size: int, updates: int, rounds: int) -> Dict[str, Any]:
    """Return the figures of ``num`` learners, of the same loop on data in memory, and of one learner."""
    busy = busy_cores()
    found: Dict[str, List[Any]] = {way: [] for way in _WAYS}
    for number in range(rounds):
        for way, several in found.items():
            say(f'{num} learners: round {number + 1} of {way}')
            processes = 1 if way == 'one learner' else num
            several.append(_in_processes(processes, _WAYS[way], batch_size, updates))
    shares = bytes_per_partition(num)
    peers = {title: peer_rates(peer, num, batch_size, updates, rounds) for title, peer in PEERS.items()}
    result: Dict[str, Any] = {
        'peers': peers,
        'learners': num,
        'others_cores': max(busy, busy_cores()),
        'bytes_per_partition': shares,
    }
    for way, several in found.items():
        # The last process to end counts: all make equally many updates.
        result[way] = {'updates_per_s': [updates / max(each['seconds'] for each in ranks) for ranks in several]}
        result[way]['agreement_share'] = [
            max(each.get('agreement_s', 0.0) / each['seconds'] for each in ranks) for ranks in several
        ]
    ours = found['ding_store'][-1]
    result['replay_bytes'] = [each['replay_bytes'] for each in ours]
    result['replay_bytes_of_one'] = found['one learner'][-1][0]['replay_bytes']
    return result


def render(result: Dict[str, Any]) -> str:
    num, ours = result['learners'], _median(result['ding_store']['updates_per_s'])
    ways = ('in memory, gloo', 'one learner', 'one update per iteration')
    bound, one, single = (_median(result[way]['updates_per_s']) for way in ways)
    memory = max(result['replay_bytes']) / result['replay_bytes_of_one']
    received = max(result['bytes_per_partition']) / sum(result['bytes_per_partition'])
    waits = _median(result['ding_store']['agreement_share'])
    lines = [
        f'{num} learners                      {ours:10.1f} updates/s',
        f'  the same on data in memory, gloo {bound:8.1f}  ({ours / bound:.2f} of it; goal 0.9)',
        f'  agreeing before each update    {single:10.1f}  ({single / bound:.2f} of it)',
        f'  one learner                    {one:10.1f}',
        *(_render_peer(title, found, ours) for title, found in result['peers'].items()),
        f'  agreement                      {waits:10.1%}  of an update (goal: below 3 %)',
        f'  memory of a replay             {memory:10.1%}  of that of one learner (goal: {1 / num + 0.1:.0%})',
        f'  bytes of experience received   {received:10.1%}  of all (goal: {1 / num + 0.1:.0%})',
        *others(result['others_cores']),
    ]
    return '\n'.join(lines)


def _render_peer(title: str, found: Dict[str, Any], ours: float) -> str:
    if 'missing' in found:
        return f'  {title}: {found["missing"]}'
    rate = _median(found['updates_per_s'])
    return f'  {title:31}{rate:10.1f}  (ding_store is {ours / rate:.2f} times as fast)'


def peer_rates(peer: Type[SharedReplay], num: int, batch_size: int, updates: int, rounds: int) -> Dict[str, Any]:
    """Return the updates/s of learners that share another library's replay, or why there are none."""
    missing = peer.missing()
    if missing:
        return {'missing': f'not measured, {missing} is not installed'}
    rates = []
    for number in range(rounds):
        say(f'{num} learners: round {number + 1} of {peer.title}')
        with tempfile.TemporaryDirectory(prefix='bench') as directory:
            try:
                with peer.served(functools.partial(columns, NUM_ROWS), directory):
                    ranks = _in_processes(num, _with_peer, batch_size, updates, peer, directory)
            except StoreError as error:
                return {'missing': f'did not start: {str(error).strip().splitlines()[-1]}'}
        rates.append(updates / max(each['seconds'] for each in ranks))
    return {'updates_per_s': rates}


def _median(values: List[float]) -> float:
    return float(np.median(values))


def bytes_per_partition(num: int) -> List[int]:
    """Return the bytes that each learner receives of the same chunks."""
    with open_store('memory://', 'bytes', max_pending_bytes=1 << 30) as store:
        partitioner = Partitioner(num, keeps_episodes=True)
        writers = [ChunkWriter(store, stream_of(i, num)) for i in range(num)]
        for i in range(num):
            store.register(stream_of(i, num), 'learner')
        header = dict(kind='trajectories', env_step=96, env_episode=0, end_idx=[])
        known = [row(i) for i in range(96)]
        for chunk in range(50):
            rows = [{**each, 'env_data_id': torch.tensor([10 * chunk + i // 10])} for i, each in enumerate(known)]
            for writer, part in zip(writers, partitioner.split(rows, header)):
                writer.write(part.elements, part.header, timeout_s=10.0)
        return [store.info().streams[stream_of(i, num)].pending_bytes for i in range(num)]


def row(number: int) -> Dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(number)
    obs, next_obs = (torch.randn(OBS, generator=drawn) for _ in range(2))
    action, done = torch.randint(ACTIONS, (), generator=drawn), torch.tensor(False)
    return dict(obs=obs, next_obs=next_obs, action=action, reward=torch.ones(1), done=done)


def columns(num_rows: int) -> Dict[str, np.ndarray]:
    chance = np.random.default_rng(0)
    obs, next_obs = (chance.standard_normal((num_rows, OBS), np.float32) for _ in range(2))
    action, done = chance.integers(ACTIONS, size=num_rows), np.zeros(num_rows, bool)
    return dict(obs=obs, next_obs=next_obs, action=action, reward=np.ones((num_rows, 1), np.float32), done=done)


def config_of(batch_size: int, updates: int) -> EasyDict:
    learn = dict(batch_size=batch_size, update_per_collect=updates, ignore_done=False)
    policy = deep_merge_dicts(DQNPolicy.default_config(), dict(cuda=False, learn=learn))
    return EasyDict(policy=policy)


def policy_of(cfg: EasyDict) -> DQNPolicy:
    torch.manual_seed(0)
    return DQNPolicy(cfg.policy, model=DQN(OBS, ACTIONS, [HIDDEN, HIDDEN]), enable_field=['learn'])


def _ours(
    number: int, num: int, keys: dist.Store, batch_size: int, updates: int, per_iteration: int = PER_ITERATION
) -> Dict[str, Any]:
    agreement_s = [0.0]
    if num > 1:
        rank = learner_ranks.start(number, num)
        rank.group.connect_through(keys)
        rank.belong_to(SimpleNamespace(config=StoreConfig(), finished=False, time_spent=TimeSpent()))
        gather = rank.group.gather

        def timed(numbers: Any) -> np.ndarray:
            begin = time.perf_counter()
            found = gather(numbers)
            agreement_s[0] += time.perf_counter() - begin
            return found

        rank.group.gather = timed  # type: ignore[method-assign]
    buffer_ = StoreBuffer(NUM_ROWS // num, share_frames=False)
    buffer_.extend(columns(NUM_ROWS // num))
    cfg = config_of(batch_size, per_iteration)
    policy, ctx = policy_of(cfg), OnlineRLContext()
    learner = OffPolicyLearner(cfg, policy.learn_mode, buffer_, log_freq=10**9)
    while ctx.train_iter < WARM_UP:
        learner(ctx)
    agreement_s[0], begin, updates = 0.0, time.perf_counter(), updates + ctx.train_iter
    while ctx.train_iter < updates:
        learner(ctx)
    seconds = time.perf_counter() - begin
    if ctx.train_iter != updates:
        raise StoreError(f'{ctx.train_iter} updates in place of {updates}')
    return dict(seconds=seconds, agreement_s=agreement_s[0], replay_bytes=buffer_.num_bytes)


def _in_memory(number: int, num: int, keys: dist.Store, batch_size: int, updates: int) -> Dict[str, Any]:
    """Train on tensors in memory. Only gradients travel, and nothing is agreed on."""
    data = {name: torch.from_numpy(values) for name, values in columns(NUM_ROWS // num).items()}
    chance = np.random.default_rng(number)

    def draw() -> Dict[str, Any]:
        rows = torch.from_numpy(chance.integers(NUM_ROWS // num, size=batch_size // num))
        return {name: each[rows] for name, each in data.items()}

    return _train(number, num, keys, batch_size, updates, draw)


def _with_peer(
    number: int, num: int, keys: dist.Store, batch_size: int, updates: int, peer: Type[SharedReplay], directory: str
) -> Dict[str, Any]:
    """Train on the batches of a peer. Only gradients travel between learners."""
    # Ray's arrays are read-only, and the policy does not write to them.
    warnings.filterwarnings('ignore', 'The given NumPy array is not writable')
    return _train(number, num, keys, batch_size, updates, peer.draws(directory, batch_size // num))


def _train(
    number: int, num: int, keys: dist.Store, batch_size: int, updates: int, draw: Callable[[], Dict[str, Any]]
) -> Dict[str, Any]:
    group = LearnerGroup(number, num)
    group.connect_through(keys)
    policy = policy_of(config_of(batch_size // num, 1))
    average = GradientAverage(group.add_up, num)
    average.watch(policy._optimizer)
    if not takes_batch(policy.learn_mode):
        raise StoreError('DQN takes no batch')
    seconds = 0.0
    for update in range(WARM_UP + updates):
        if update == WARM_UP:
            seconds = -time.perf_counter()
        batch = {name: torch.as_tensor(each) for name, each in draw().items()}
        policy.learn_mode.forward(ttorch.as_tensor(batch))
    return dict(seconds=seconds + time.perf_counter())


_WAYS: Dict[str, Callable] = {
    'ding_store': _ours,
    'one update per iteration': functools.partial(_ours, per_iteration=1),
    'in memory, gloo': _in_memory,
    'one learner': _ours,
}


def _in_processes(num: int, work: Callable, *arguments: Any) -> List[Dict[str, Any]]:
    """Return what the work returns in each of ``num`` processes."""
    ends, processes = [], []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for number in range(num):
                ours, theirs = FORK.Pipe(duplex=False)
                target = (number, num, f'{directory}/keys', theirs, work, arguments)
                processes.append(FORK.Process(target=_run, args=target, daemon=True))
                processes[-1].start()
                theirs.close()
                ends.append(ours)
            return [_received(end) for end in ends]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _received(end: Any) -> Dict[str, Any]:
    if not end.poll(LIMIT_S):
        raise StoreError(f'a learner did not end within {LIMIT_S:.0f} s')
    try:
        found = end.recv()
    except EOFError as error:
        raise StoreError('a learner has died') from error
    if isinstance(found, str):
        raise StoreError(f'a learner failed:\n{found}')
    return dict(found)


def _run(number: int, num: int, keys: str, end: Any, work: Callable, arguments: Any) -> None:
    try:
        torch.set_num_threads(1)
        task.start(async_mode=False)
        end.send(work(number, num, dist.FileStore(keys, num), *arguments))
    except BaseException:  # noqa: BLE001 - the parent shows it
        end.send(traceback.format_exc())
    end.close()
