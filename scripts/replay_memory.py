#!/usr/bin/env python3
"""
Replays of published length under a memory limit: rows that are held, bytes per row, and samples, on real frames.

    python scripts/replay_memory.py dqn                 # 1M transitions of Pong in 10 GB; an hour, 7 GB of disk
    python scripts/replay_memory.py r2d2                # 10,000 sequences of 100 steps in 10 GB
    python scripts/replay_memory.py impala              # 100,000 trajectories of 13 steps in 10 GB; 9 GB of disk
    python scripts/replay_memory.py dqn --rows 20000 --limit 1e9 --seconds 0.5      # a first look, minutes

Frames of random play are recorded once, in DIRECTORY/GAME.frames. A process in a memory cgroup of its own fills a
StoreBuffer from them. The group counts its memory, its shared memory and the page cache of its files. Two processes
without a limit hold few rows each: one shares frames, the other keeps each row by itself. At ten checkpoints all three
sample in turn. Without the right to make a cgroup nothing limits the process, and its memory is measured as its own
share of all pages (PSS). The output says so.

Stopped and started again, the command goes on recording, fills the replay anew, and keeps the checkpoints that it has.
Figures of rows that were not held are labelled as projected.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'scripts')]

from benchmarks.machine import busy_cores  # noqa: E402
from benchmarks.output import say, show  # noqa: E402
from ding_store.compare.disk import V1, Limit  # noqa: E402
from ding_store.compare.units import number, size_text  # noqa: E402
from ding_store.compare.worker import Worker, WorkerFailed  # noqa: E402

#: Steps of a transition, as in the DQN configs.
NUM_STEPS = 3
FRAME = (84, 84)
FRAME_BYTES = 84 * 84
STACK = 4
#: Frames that are read and written at once.
BLOCK = 1_000
#: The page cache reads ahead, and keeps files in blocks, of at most this many bytes.
CACHED_BYTES = 4 << 20
CHECKPOINTS = 10
#: Windows of each process at a checkpoint. Figures are medians.
WINDOWS = 3
TIMEOUT_S = 3600.0
#: Values of a recurrent state: an LSTM of this width has two vectors, and keeps both for each step.
STATE = 512


class Task(NamedTuple):
    """
    Overview:
        A job of the published table.
    Arguments:
        - rows (:obj:`int`): Rows to hold, by default.
        - published (:obj:`int`): Rows of the published replay.
        - small (:obj:`int`): Rows of the processes without a limit.
        - steps (:obj:`int`): Steps of a sequence. 0: a row is a transition of three steps.
        - stride (:obj:`int`): Steps from the begin of a row to that of the next.
        - batch (:obj:`int`): Rows per sample.
    """

    rows: int
    published: int
    small: int
    steps: int
    stride: int
    batch: int

    def num_frames(self, rows: int) -> int:
        """Return the number of frames that so many rows are made of."""
        return (rows - 1) * self.stride + max(1, self.steps) + NUM_STEPS + STACK

    @property
    def float_bytes(self) -> int:
        """Bytes of a row's frames as plain DI-engine holds them: float32, each stack by itself."""
        stacks = 2 if not self.steps else self.steps if self.stride < self.steps else 2 * self.steps
        return 4 * STACK * FRAME_BYTES * stacks


TASKS = {
    'dqn': Task(rows=1_000_000, published=1_000_000, small=8_000, steps=0, stride=1, batch=64),
    # As in pong_r2d2_config: 20 steps of burn-in and 80 to learn from, of which the next sequence has 50 as well.
    'r2d2': Task(rows=10_000, published=10_000, small=100, steps=100, stride=50, batch=32),
    # 3 MB as float32, as published.
    'impala': Task(rows=100_000, published=100_000, small=400, steps=13, stride=13, batch=32),
}


def record(path: Path, game: str, num_frames: int) -> None:
    """Record frames of random play until the file has so many. A file that a kill cut short is completed."""
    from benchmarks.frames import played

    have = path.stat().st_size // FRAME_BYTES if path.exists() else 0
    with path.open('ab') as file:
        file.truncate(have * FRAME_BYTES)
        frames: List[np.ndarray] = []
        # Another seed after each stop: the same one would repeat the same play.
        for frame in played(game, max(0, num_frames - have), seed=have):
            frames.append(frame)
            if len(frames) == BLOCK:
                file.write(np.stack(frames).tobytes())
                file.flush()
                have, frames = have + BLOCK, []
                say(f'recording {game}: {have:,} of {num_frames:,} frames')
        if frames:
            file.write(np.stack(frames).tobytes())


class Frames:
    """
    The recorded frames. Their pages leave memory after each read, so that they count for no limit: all blocks that the
    read touched, because the page cache may have read them whole.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY)

    def read(self, start: int, count: int) -> np.ndarray:
        data = os.pread(self._file, count * FRAME_BYTES, start * FRAME_BYTES)
        first = start * FRAME_BYTES // CACHED_BYTES * CACHED_BYTES
        os.posix_fadvise(self._file, first, len(data) + 2 * CACHED_BYTES, os.POSIX_FADV_DONTNEED)
        return np.frombuffer(data, np.uint8).reshape(-1, *FRAME)


class Held:
    """A replay in a process of its own, in the cgroup ``group`` if that is given."""

    def __init__(self, task: str, path: str, size: int, group: Optional[str], is_sharing: bool, batch: int) -> None:
        if group is not None:
            Path(group, 'cgroup.procs').write_text(str(os.getpid()))
        from ding_store.buffer import Prioritized, StoreBuffer, Uniform

        self._task, self._frames, self._size, self._batch = TASKS[task], Frames(path), size, batch
        sampler = Uniform(0) if task == 'impala' else Prioritized(seed=0)
        self._buffer = StoreBuffer(size, sampler=sampler, share_frames='auto' if is_sharing else False)
        self._rng = np.random.default_rng(0)

    def fill(self, rows: int) -> int:
        """Push rows until there are so many, and return their number."""
        step = 4 if self._task.steps else 256
        while (first := self._buffer.count()) < min(rows, self._size):
            count = min(step, rows - first)
            if self._task.steps:
                self._buffer.extend_elements(list(self._sequences(first, count)))
            else:
                self._push_transitions(first, count)
        return int(self._buffer.count())

    def window(self, seconds: float) -> float:
        """Return rows that are sampled per second. DQN and R2D2 also update their priorities."""
        began, count, size = time.perf_counter(), 0, min(self._batch, self._buffer.count())
        while time.perf_counter() - began < seconds or count < 3 * size:
            batch = self._buffer.sample_time_major(size) if self._task.steps else self._buffer.sample_batch(size)
            if self._task.stride != self._task.steps:
                self._buffer.update_priorities(batch.rows, self._rng.random(size))
            count += size
        return count / (time.perf_counter() - began)

    def memory(self) -> Dict[str, int]:
        """Return this process's memory, and what the replay says of itself."""
        lines = Path('/proc/self/smaps_rollup').read_text().splitlines()[1:]
        pss = {name: 1024 * int(value.split()[0]) for name, _, value in (line.partition(':') for line in lines)}
        columns = self._buffer.table.columns
        pools = {id(each.pool): each.pool for each in columns.shared.values()}.values()
        return dict(
            rows=self._buffer.count(),
            pss=pss['Pss'],
            num_bytes=int(self._buffer.num_bytes or 0),
            frame_bytes=sum(pool.num_bytes for pool in pools),
            num_frames=sum(pool.num_used for pool in pools),
        )

    def _push_transitions(self, first: int, count: int) -> None:
        from benchmarks.frames import rows_of

        levels = self._frames.read(first, count + NUM_STEPS + STACK)
        if self._buffer.schema is None:
            # The first rows are floats, so that samples are.
            self._buffer.extend(rows_of(levels, 0, count, NUM_STEPS))
            return
        columns = rows_of(levels, 0, count, NUM_STEPS, is_float=False)
        self._buffer.extend(columns, self._buffer.schema, narrowed=('obs', 'next_obs'))

    def _sequences(self, first: int, count: int) -> Iterator[Dict[str, Any]]:
        import torch

        length, stride = self._task.steps, self._task.stride
        scale = np.arange(256, dtype=np.float32) / np.float32(255)
        is_r2d2 = stride < length
        for i in range(first, first + count):
            levels = self._frames.read(i * stride, length + STACK)
            stacks = np.lib.stride_tricks.sliding_window_view(levels, STACK, axis=0).transpose(0, 3, 1, 2)
            obs = torch.from_numpy(scale[stacks])
            element: Dict[str, Any] = {'obs': list(obs[:length]), 'action': list(torch.zeros(length, 1).long())}
            element['done'] = list(torch.zeros(length, dtype=torch.bool))
            if is_r2d2:
                element['reward'] = list(torch.zeros(length, 5))
                # Of each step of play, so that overlapping sequences have them in common.
                blocks = [np.random.default_rng(i + k) for k in range(length // stride)]
                states = [torch.from_numpy(each.random((stride, 2, 1, 1, STATE), np.float32)) for each in blocks]
                element['prev_state'] = [{'h': h, 'c': c} for h, c in torch.cat(states)]
            else:
                element['reward'] = list(torch.zeros(length, 1))
                element['next_obs'], element['logit'] = list(obs[1:]), list(torch.rand(length, 6))
            yield element


def group_bytes(limit: Limit) -> Optional[Dict[str, int]]:
    """Return what a cgroup counts: everything, and its peak if the kernel keeps that."""
    if limit.path is None:
        return None
    is_v1 = (limit.path / V1.limit).exists()
    names = ('memory.usage_in_bytes', 'memory.max_usage_in_bytes') if is_v1 else ('memory.current', 'memory.peak')
    files = [(key, limit.path / name) for key, name in zip(('used', 'peak'), names)]
    return {key: int(file.read_text()) for key, file in files if file.exists()}


def measure(given: argparse.Namespace, task: Task, frames: Path, records: Path) -> None:
    """Fill the limited replay, and write a line per checkpoint."""
    known = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    arguments = (given.task, str(frames))
    small = min(given.small, given.rows)
    with contextlib.ExitStack() as stack:
        limit = stack.enter_context(contextlib.closing(Limit(given.limit)))
        if limit.path is None:
            show(f'No limit is set: {limit.reason}. Memory is the PSS of the process.')

        def worker(size: int, group: Optional[str], is_sharing: bool) -> Worker:
            make = 'replay_memory:Held'
            made = Worker(make, *arguments, size, group, is_sharing, given.batch, timeout_s=TIMEOUT_S)
            return stack.enter_context(contextlib.closing(made))

        workers = {
            'limited': worker(given.rows, None if limit.path is None else str(limit.path), True),
            'small': worker(small, None, True),
            'plain': worker(small, None, False),
        }
        for name in ('small', 'plain'):
            workers[name].call('fill', small)
        # What follows counts from here: the interpreter, compiled loops and batches are there once.
        first_rows = workers['limited'].call('fill', max(given.batch, given.rows // 100))
        workers['limited'].call('window', given.seconds / 2)
        base = first_rows, used_bytes(workers['limited'].call('memory'), limit)
        show(f'Memory that is there once, with the first {first_rows:,} rows: {size_text(base[1])}.')
        show(HEAD)
        for number_of in range(1, CHECKPOINTS + 1):
            rows = math.ceil(given.rows * number_of / CHECKPOINTS)
            say(f'filling {rows:,} of {given.rows:,} rows')
            began = time.monotonic()
            workers['limited'].call('fill', rows)
            fill_s = time.monotonic() - began
            found = next((each for each in known if each['rows'] == rows), None)
            if found is None:
                found = checkpoint(workers, limit, given.seconds, base)
                found['fill_s'] = fill_s
                with records.open('a') as file:
                    file.write(json.dumps(found) + '\n')
            show(line(found))
        if limit.path is not None:
            show(f'Peak of the group: {size_text(group_bytes(limit)["peak"])} of {size_text(given.limit)}.')


def used_bytes(memory: Dict[str, int], limit: Limit) -> int:
    """Return the memory that counts for the limit, or the process's own share if there is none."""
    group = group_bytes(limit)
    return memory['pss'] if group is None else group['used']


def checkpoint(workers: Dict[str, Worker], limit: Limit, seconds: float, base: Tuple[int, int]) -> Dict[str, Any]:
    """Return the figures of all processes. They sample in turn."""
    other_cores = busy_cores()
    rates: Dict[str, List[float]] = {name: [] for name in workers}
    for name in workers:
        workers[name].call('window', seconds / 2)
    for number_of in range(WINDOWS):
        for name in list(workers)[:: 1 if number_of % 2 else -1]:
            rates[name].append(workers[name].call('window', seconds))
    memory = workers['limited'].call('memory')
    used = used_bytes(memory, limit)
    date = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%d')
    return {
        **memory,
        'used': used,
        'counted': 'memory cgroup' if limit.path is not None else 'PSS, without a limit',
        'bytes_per_row': (used - base[1]) / (memory['rows'] - base[0]),
        'samples_per_s': {name: median(each) for name, each in rates.items()},
        'other_cores': other_cores,
        'date': date,
    }


HEAD = f'{"rows":>10}{"held in":>10}{"bytes a row":>13}{"frames, rest":>20}{"frames a row":>13}{"sample/s":>10}'
HEAD += f'{"small":>9}{"plain":>9}{"of small":>9}{"of plain":>9}{"others":>8}'


def line(found: Dict[str, Any]) -> str:
    rates, rows = found['samples_per_s'], found['rows']
    rest = size_text((found['num_bytes'] - found['frame_bytes']) / rows)
    ratios = [rates['limited'] / rates[name] for name in ('small', 'plain')]
    return (
        f'{rows:>10,}{size_text(found["used"]):>10}{size_text(found["bytes_per_row"]):>13}'
        f'{size_text(found["frame_bytes"] / rows) + ", " + rest:>20}{found["num_frames"] / rows:>13.2f}'
        + ''.join(f'{number(rates[name]):>{width}}' for name, width in (('limited', 10), ('small', 9), ('plain', 9)))
        + ''.join(f'{ratio:>9.2f}' for ratio in ratios)
        + f'{found["other_cores"]:>8.1f}'
    )


def conclusion(given: argparse.Namespace, task: Task, records: Path) -> str:
    """Return what was held, and what is only projected."""
    last = json.loads(records.read_text().splitlines()[-1])
    held = f'Held and sampled: {last["rows"]:,} rows in {size_text(last["used"])} ({last["counted"]}).'
    lines = [held]
    if last['rows'] < task.published:
        # The larger one: with few rows, memory grows in steps.
        per_row = max(last['bytes_per_row'], last['num_bytes'] / last['rows'])
        whole = last['used'] + (task.published - last['rows']) * per_row
        lines.append(f'Projected, not held: the published {task.published:,} rows would take {size_text(whole)}.')
    plain = task.float_bytes * last['rows']
    lines.append(
        f'Projected, not held: plain DI-engine, which keeps each frame as float32, would take {size_text(plain)} '
        f'for the frames of {last["rows"]:,} rows.'
    )
    if given.task == 'r2d2':
        lines.append(
            f'Recurrent states: one per step, 2 x {STATE} float32, so {size_text(8 * STATE * task.steps)} per '
            'sequence. Overlapping sequences have them in common, and they are kept once, like frames.'
        )
    return '\n'.join(lines)


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('task', choices=list(TASKS))
    parser.add_argument('--game', default='pong', help='game to play (pong)')
    parser.add_argument('--rows', type=int, help="rows to hold (the task's own)")
    parser.add_argument('--limit', type=float, default=10e9, help='bytes of the memory cgroup (10e9)')
    parser.add_argument('--small', type=int, help="rows of the processes without a limit (the task's own)")
    parser.add_argument('--batch', type=int, help="rows per sample (the task's own)")
    parser.add_argument('--seconds', type=float, default=2.0, help='seconds of a window (2)')
    parser.add_argument('--directory', type=Path, default=Path('runs/replay_memory'))
    given = parser.parse_args(arguments)
    task = TASKS[given.task]
    for name in ('rows', 'small', 'batch'):
        value = getattr(given, name)
        setattr(given, name, getattr(task, name) if value is None else value)
        if getattr(given, name) < 1:
            parser.error(f'--{name} ({value}) must be at least 1')
    if given.rows <= CHECKPOINTS * given.batch:
        parser.error(f'--rows ({given.rows}) must be more than {CHECKPOINTS} batches of {given.batch}')
    for name in ('seconds', 'limit'):
        if not 0 < getattr(given, name) < math.inf:
            parser.error(f'--{name} ({getattr(given, name):g}) must be above 0, and finite')
    return given


def main() -> int:
    given = parse()
    from ding_store.launch.termination import signals_as_interrupt

    task, directory = TASKS[given.task], given.directory.resolve()
    frames = directory / f'{given.game}.frames'
    records = directory / f'{given.task}-{given.game}-{given.rows}-{given.limit:.0f}.jsonl'
    try:
        with signals_as_interrupt():
            directory.mkdir(parents=True, exist_ok=True)
            record(frames, given.game, task.num_frames(given.rows))
            measure(given, task, frames, records)
            show(conclusion(given, task, records))
    except KeyboardInterrupt:
        raise SystemExit('interrupted: the same command goes on') from None
    except WorkerFailed as error:
        said = f'{error}. A process that crashes by signal 9 has reached its limit, or the memory is full.'
        raise SystemExit(f'{given.task}: {said}\n{error.log}') from None
    return 0


if __name__ == '__main__':
    sys.exit(main())
