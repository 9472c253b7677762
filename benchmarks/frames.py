"""
Benchmark of shared frames: memory per row and speed of a replay of real Atari frames, and bytes of a transition on its
way to the learner, with and without sharing.
"""

from __future__ import annotations

import gc
import json
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional

import numpy as np
import treetensor.torch as ttorch

from benchmarks.output import say, show
from benchmarks.replay import resident_bytes, timed
from ding_store.errors import ConfigError

#: Steps of a row, as in the DQN configs.
NUM_STEPS = 3
BATCH = 64
#: Pushes of a batch that are timed. Then 16 times as many rows are pushed one by one.
NUM_PUSHES = 100
GAMES = ('pong', 'qbert', 'space_invaders')
#: A chunk of the DQN configs: 96 rows from 8 environments.
NUM_ENVS, ROWS_PER_ENV = 8, 12
#: Chunks that are measured, how often, and the frames of an environment before the first.
NUM_CHUNKS, REPEATS, FIRST_FRAME = 8, 10, 100

Columns = Dict[str, np.ndarray]

_HEADER = {'kind': 'trajectories', 'env_step': 1, 'env_episode': 0, 'end_idx': []}


class Ours:
    """StoreBuffer with priorities. Rows have frames of floats, as DI-engine's collectors make them."""

    num_steps = NUM_STEPS
    is_float = True

    def __init__(self, num_rows: int, share_frames: Any) -> None:
        from ding_store.buffer import Prioritized, StoreBuffer

        self._buffer = StoreBuffer(num_rows, sampler=Prioritized(seed=0), share_frames=share_frames)

    def push(self, element: Any) -> None:
        self._buffer.push(element)

    def push_columns(self, columns: Columns) -> None:
        self._buffer.extend(columns)

    def sample(self) -> Any:
        return self._buffer.sample_batch(BATCH)


class OursOfBytes(Ours):
    """StoreBuffer with priorities, whose rows have frames of bytes, as cpprb's have."""

    is_float = False


class OursOfOneStep(OursOfBytes):
    """The same with 1-step rows, as cpprb's are: a row has 5 different frames, with 3 steps 7."""

    num_steps = 1


class Cpprb:
    """cpprb with ``stack_compress`` and ``next_of``. It does not check that frames are equal, and has 1-step rows."""

    num_steps = 1
    is_float = False

    def __init__(self, num_rows: int) -> None:
        import cpprb

        fields = {'obs': {'shape': (84, 84, 4), 'dtype': np.uint8}, 'action': {'dtype': np.int64}}
        fields.update(reward={}, done={'dtype': np.bool_})
        self._buffer = cpprb.PrioritizedReplayBuffer(num_rows, fields, next_of='obs', stack_compress='obs')

    def push_columns(self, columns: Columns) -> None:
        frames = {name: np.moveaxis(columns[name], 1, -1) for name in ('obs', 'next_obs')}
        rest = {'action': columns['action'], 'reward': columns['reward'][:, 0], 'done': columns['done']}
        self._buffer.add(**frames, **rest)
        if columns['done'][-1]:
            self._buffer.on_episode_end()

    def sample(self) -> Any:
        return self._buffer.sample(BATCH, beta=0.4)


def main(games: Optional[str], num_rows: int, budget_s: float, json_path: Optional[str]) -> int:
    """Measure each game, print a table, and write the figures to ``json_path``."""
    names = list(GAMES) if games is None else games.split(',')
    if num_rows < 1000:
        raise ConfigError(f'--rows ({num_rows}) must be at least 1000')
    if not budget_s > 0:
        raise ConfigError(f'--seconds ({budget_s:g}) must be above 0')
    results = [measure(name, num_rows, budget_s) for name in names]
    for result in results:
        show(render(result))
    if json_path is not None:
        Path(json_path).write_text(json.dumps(results, indent=1))
    return 0


def measure(game: str, num_rows: int, budget_s: float) -> Dict[str, Any]:
    """Return the figures of all buffers, each of which is filled with the same rows of a game."""
    say(f'{game}: playing')
    levels = np.stack(list(played(game, num_rows + NUM_PUSHES * (BATCH + 16) + NUM_STEPS + 4)))
    result: Dict[str, Any] = {'game': game, 'rows': num_rows, 'buffers': {}}
    kinds = {
        'shared': lambda: Ours(num_rows, 'auto'),
        'not shared': lambda: Ours(num_rows, False),
        'shared, bytes': lambda: OursOfBytes(num_rows, 'auto'),
        'shared, 1-step, bytes': lambda: OursOfOneStep(num_rows, 'auto'),
        'cpprb, 1-step, bytes': lambda: Cpprb(num_rows),
    }
    # Once with few rows, so that imports and compiled code do not count as memory of the rows.
    _measure(lambda: Ours(1000, 'auto'), levels, 1000, 0.01)
    for name, make in kinds.items():
        say(f'{game}: {name}')
        try:
            result['buffers'][name] = _measure(make, levels, num_rows, budget_s)
        except ImportError as e:
            result['buffers'][name] = {'left_out': str(e)}
        gc.collect()
    result['copy_us'] = _copy_us(levels, budget_s)
    say(f'{game}: chunks')
    result['chunks'] = measure_chunks(game)
    return result


def measure_chunks(game: str) -> Dict[str, Any]:
    """
    Return bytes and CPU times of chunks of ``ROWS_PER_ENV`` rows of each environment. The times are the lowest of some
    repeats. A writer's includes one copy of the payload and its checksum. A learner's is that of a push into a replay
    that shares frames.
    """
    from ding_store.middleware.chunks import ChunkWriter
    from ding_store.storage import open_store
    from ding_store.storage.encoding.framing import encode

    num_rows = NUM_CHUNKS * ROWS_PER_ENV
    chunks: List[List[Any]] = [[] for _ in range(NUM_CHUNKS)]
    for env in range(NUM_ENVS):
        levels = np.stack(list(played(game, FIRST_FRAME + num_rows + NUM_STEPS + 4, env)))
        columns = rows_of(levels, FIRST_FRAME, num_rows)
        for i in range(num_rows):
            chunks[i // ROWS_PER_ENV].append(_element(columns, i))
    kinds = {'shared': True, 'not shared': False}
    figures: Dict[str, Any] = {kind: {} for kind in kinds}
    writes, pushes = [], []
    with open_store('memory://', run='frames') as store:
        sink = _Sink(store, encode)
        for kind, share_frames in kinds.items():
            stream = f'chunks/{share_frames}'
            writer = ChunkWriter(store, stream, share_frames=share_frames)
            for chunk in chunks:
                writer.write(chunk, _HEADER)
            entries = store.read(stream)
            num_bytes = sum(len(encode(entry.header, entry.arrays)) for entry in entries)
            figures[kind]['bytes_per_transition'] = num_bytes / (NUM_CHUNKS * len(chunks[0]))
            write, push = ChunkWriter(sink, stream, share_frames=share_frames).write, _Pusher()
            writes.append([partial(write, chunk, _HEADER) for chunk in chunks])
            pushes.append([partial(push, entry) for entry in entries])
        for name, calls in (('write_us', writes), ('push_us', pushes)):
            for kind, lowest in zip(kinds, _lowest_cpu_us(calls)):
                figures[kind][name] = lowest
    return figures


class _Pusher:
    """Pushes chunks into a replay that shares frames, as a learner does."""

    def __init__(self) -> None:
        from ding_store.buffer import StoreBuffer
        from ding_store.middleware.chunks import ChunkDecoder

        self._buffer, self._decoder = StoreBuffer(10_000), ChunkDecoder()

    def __call__(self, entry: Any) -> None:
        from ding_store.middleware.chunks import narrowed_in

        self._decoder.check(entry)
        schema, columns = self._decoder.schema(entry), self._decoder.columns(entry)
        self._buffer.extend(columns, schema, narrowed=narrowed_in(entry))


class _Sink:
    """A store whose appends are encoded and dropped."""

    def __init__(self, store: Any, encode: Callable[..., bytes]) -> None:
        self.get, self.put, self._encode = store.get, store.put, encode

    def append(self, stream: str, header: Any, arrays: Any, timeout_s: Optional[float] = None) -> None:
        self._encode(header, arrays)


def _lowest_cpu_us(calls: List[List[Callable[[], Any]]]) -> List[float]:
    """Return the mean of the lowest CPU times of each list of calls. The lists take turns."""
    times = np.empty((1 + REPEATS, len(calls), len(calls[0])))
    for repeat in range(1 + REPEATS):
        for i, each in enumerate(zip(*calls)):
            for kind, call in enumerate(each):
                began = time.process_time()
                call()
                times[repeat, kind, i] = time.process_time() - began
    lowest: List[float] = (times[1:].min(0).mean(1) * 1e6).tolist()
    return lowest


def played(game: str, num_frames: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yield frames ``(84, 84)``, uint8, of random play."""
    from easydict import EasyDict

    from dizoo_configs.atari.atari_env import AtariEnv

    rom = ''.join(part.capitalize() for part in game.split('_'))
    env = AtariEnv(EasyDict(env_id=f'{rom}NoFrameskip-v4', frame_stack=4, is_train=True))
    env.seed(seed, dynamic_seed=False)
    obs = env.reset()
    for _ in range(num_frames):
        frames = np.round(np.asarray(obs) * 255).astype(np.uint8)
        yield frames[-1]
        step = env.step(env.random_action())
        obs = env.reset() if step.done else step.obs
    env.close()


def rows_of(levels: np.ndarray, start: int, count: int, num_steps: int = NUM_STEPS, is_float: bool = True) -> Columns:
    """Return rows whose stacks are consecutive frames, as a collector makes them."""
    stacks = np.lib.stride_tricks.sliding_window_view(levels, 4, axis=0).transpose(0, 3, 1, 2)
    columns = {'obs': stacks[start : start + count], 'next_obs': stacks[start + num_steps : start + num_steps + count]}
    if is_float:
        scale = np.arange(256, dtype=np.float32) / np.float32(255)
        columns = {name: scale[column] for name, column in columns.items()}
    columns['action'] = np.zeros(count, np.int64)
    columns['reward'] = np.zeros((count, num_steps), np.float32)
    columns['done'] = np.zeros(count, np.bool_)
    return columns


def _measure(make: Any, levels: np.ndarray, num_rows: int, budget_s: float) -> Dict[str, Any]:
    before = resident_bytes()
    buffer = make()
    options = {'num_steps': buffer.num_steps, 'is_float': buffer.is_float}
    for start in range(0, num_rows, BATCH):
        buffer.push_columns(rows_of(levels, start, min(BATCH, num_rows - start), **options))
    buffer.sample()
    figures: Dict[str, Any] = {'bytes_per_row': (resident_bytes() - before) / num_rows}
    figures['sample_us'] = _median_us(timed(lambda i: buffer.sample(), budget_s))
    # Play goes on: a row that was pushed before would have no new frame.
    starts = range(num_rows, num_rows + NUM_PUSHES * BATCH, BATCH)
    chunks = (rows_of(levels, start, BATCH, **options) for start in starts)
    figures['push_columns_us'] = _median_us(_times(buffer.push_columns, chunks))
    if isinstance(buffer, Ours):
        rest = range(starts.stop, len(levels) - NUM_STEPS - 4)
        elements = (_element(rows_of(levels, start, 1, **options), 0) for start in rest)
        figures['push_us'] = _median_us(_times(buffer.push, elements))
    return figures


def _copy_us(levels: np.ndarray, budget_s: float) -> float:
    """Return the time of one copy of as many bytes as a batch of bytes has, in one piece, to compare samples with."""
    batch = np.empty((8 * BATCH, *levels.shape[1:]), np.uint8)
    num_batches = len(levels) // len(batch)

    def copy(i: int) -> None:
        start = i % num_batches * len(batch)
        batch[:] = levels[start : start + len(batch)]

    return _median_us(timed(copy, budget_s))


def _times(push: Callable[[Any], None], rows: Iterable[Any]) -> List[float]:
    """Return the seconds that each push took, without the time to make its rows."""
    times = []
    for each in rows:
        begin = time.perf_counter()
        push(each)
        times.append(time.perf_counter() - begin)
    return times


def _element(columns: Columns, i: int) -> Any:
    import torch

    return ttorch.tensor({name: torch.as_tensor(column[i].copy()) for name, column in columns.items()})


def _median_us(calls: List[float]) -> float:
    return float(np.median(calls)) * 1e6


def render(result: Dict[str, Any]) -> str:
    """Return a table of one game."""
    lines = [f'{result["game"]}: {result["rows"]:,} rows of {NUM_STEPS} steps, batch {BATCH}, prioritized']
    lines.append(f'{"":22}{"bytes a row":>14}{"sample us":>12}{"push 64 us":>12}{"push us":>10}')
    for name, figures in result['buffers'].items():
        if 'left_out' in figures:
            lines.append(f'{name:22}left out: {figures["left_out"]}')
            continue
        push = f'{figures["push_us"]:10,.0f}' if 'push_us' in figures else ''
        lines.append(
            f'{name:22}{figures["bytes_per_row"]:14,.0f}{figures["sample_us"]:12,.0f}'
            f'{figures["push_columns_us"]:12,.0f}{push}'
        )
    lines.append(f'{"one copy of the bytes":22}{"":14}{result["copy_us"]:12,.0f}')
    lines.append(f'chunks of {ROWS_PER_ENV} rows from each of {NUM_ENVS} environments, before a codec')
    lines.append(f'{"":16}{"bytes a row":>14}{"write us":>12}{"push us":>12}')
    for name, figures in result['chunks'].items():
        lines.append(
            f'{name:16}{figures["bytes_per_transition"]:14,.0f}{figures["write_us"]:12,.0f}{figures["push_us"]:12,.0f}'
        )
    return '\n'.join(lines)
